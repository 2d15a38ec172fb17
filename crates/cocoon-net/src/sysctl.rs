//! Kernel switches that this crate turns, and their old values.
//!
//! Entry points: [`Saved`], [`forwarding`], [`remember_forwarding`], [`forwarding_on`], [`forwarding_back`]. Invariants:
//! an old value is durable in `state_dir` before the switch is turned; a record of another boot or another network namespace is not used; with
//! several networks on one host the last one taken down restores what the first one found.

use std::{io, os::unix::fs::MetadataExt as _, path::Path};

use cocoon_kit::files;
use serde::{Deserialize, Serialize};

const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";
const FILE: &str = "sysctls.json";

/// The value of `net.ipv4.ip_forward` before we came, and where and when that was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// The kernel's boot and the network namespace that the value belongs to.
    world: String,
    /// The value of `net.ipv4.ip_forward`.
    pub(crate) ip_forward: String,
}

/// The value of `net.ipv4.ip_forward`.
pub(crate) fn forwarding() -> io::Result<String> {
    Ok(std::fs::read_to_string(FORWARD)?.trim().to_owned())
}

/// Records `found` as the value to put back, unless one is recorded already.
pub(crate) fn remember_forwarding(state_dir: &Path, found: String) -> io::Result<Saved> {
    let world = world()?;
    if let Some(saved) = load(state_dir)?.filter(|saved| saved.world == world) {
        return Ok(saved);
    }
    let saved = Saved { world, ip_forward: found };
    files::replace(&state_dir.join(FILE), &serde_json::to_vec_pretty(&saved)?, 0o600)?;
    Ok(saved)
}

/// Turns forwarding on.
pub(crate) fn forwarding_on() -> io::Result<()> {
    if is_on(&forwarding()?) { Ok(()) } else { std::fs::write(FORWARD, "1") }
}

/// Whether a value of the switch lets packets pass.
pub(crate) fn is_on(value: &str) -> bool {
    value != "0"
}

/// Puts the old value back, unless another network of ours still needs forwarding, and forgets it.
pub(crate) fn forwarding_back(state_dir: &Path, others: bool) -> io::Result<()> {
    let Some(saved) = load(state_dir)? else { return Ok(()) };
    if !others && saved.world == world()? && forwarding()? != saved.ip_forward {
        std::fs::write(FORWARD, &saved.ip_forward)?;
    }
    std::fs::remove_file(state_dir.join(FILE))
}

fn load(state_dir: &Path) -> io::Result<Option<Saved>> {
    match std::fs::read(state_dir.join(FILE)) {
        // A damaged record says nothing; the value found now is the best that is known.
        Ok(text) => Ok(serde_json::from_slice(&text).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn world() -> io::Result<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::metadata("/proc/thread-self/ns/net")?.ino();
    Ok(format!("{} net {namespace}", boot.trim()))
}
