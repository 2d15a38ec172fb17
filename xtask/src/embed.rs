//! The two parts inside the product's binary: guest agent and QEMU shim.
//!
//! Entry point: [`run`]. Both are built in a target folder of their own (`target/guest`), the agent
//! statically, and put in `target/embed` only when they changed, lest cargo builds the engine anew.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{build, bundle::checked};

const TARGET: &str = "x86_64-unknown-linux-gnu";
const AGENT: &str = "cocoon-guest-agent";
const SHIM: &str = "libcocoon_shim.so";

/// Builds both. Returns the folder that holds them.
pub fn run() -> Result<PathBuf> {
    let root = crate::root();
    let embed = root.join("target/embed");
    let target = root.join("target/guest");
    fs::create_dir_all(&embed)?;
    eprintln!("embed: building {AGENT}");
    checked(
        cargo(&target)
            .args(["-p", "cocoon-guest", "--bin", AGENT, "--target", TARGET])
            .env("RUSTFLAGS", "-C target-feature=+crt-static"),
    )?;
    let built = target.join(TARGET).join("release").join(AGENT);
    let stripped = target.join("agent.stripped");
    checked(Command::new("strip").arg("-o").arg(&stripped).arg(&built))?;
    put(&stripped, &embed.join(AGENT))?;

    eprintln!("embed: building {SHIM}");
    checked(cargo(&target).args(["-p", "cocoon-shim"]).env_remove("RUSTFLAGS"))?;
    let stripped = target.join("shim.stripped");
    checked(Command::new("strip").arg("-o").arg(&stripped).arg(target.join("release").join(SHIM)))?;
    put(&stripped, &embed.join(SHIM))?;
    Ok(embed)
}

fn cargo(target: &Path) -> Command {
    let mut command = build::cargo(&["build", "--quiet", "--release", "--target-dir"]);
    command.arg(target);
    command
}

/// Copies a file over another if the content differs.
fn put(from: &Path, to: &Path) -> Result<()> {
    let new = fs::read(from).with_context(|| from.display().to_string())?;
    if fs::read(to).is_ok_and(|old| old == new) {
        eprintln!("embed: {} unchanged", to.display());
        return Ok(());
    }
    let temporary = to.with_extension("new");
    fs::copy(from, &temporary)?;
    fs::rename(&temporary, to).with_context(|| to.display().to_string())?;
    eprintln!("embed: {} ({} KiB)", to.display(), new.len() >> 10);
    Ok(())
}
