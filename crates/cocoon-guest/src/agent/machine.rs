//! What `reseed` and `identity` do to this very guest.

use std::{fs, io, path::Path};

use async_trait::async_trait;
use rustix::{
    rand::{GetRandomFlags, getrandom},
    system::sethostname,
    time::{ClockId, Timespec, clock_settime},
};

use super::{
    dhcp::Leases,
    identity::{self, Change},
    network,
    session::Machine,
};
use crate::{protocol::Identity, sys};

const MACHINE_ID: &str = "etc/machine-id";
const DBUS_MACHINE_ID: &str = "var/lib/dbus/machine-id";
/// Entropy that systemd carries from one boot to the next: every clone would start with it.
const SAVED_SEED: &str = "var/lib/systemd/random-seed";

/// The guest we run in.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The DHCP clients.
    pub(crate) leases: Leases,
}

#[async_trait]
impl Machine for Guest {
    async fn reseed(&self, entropy: &[u8], regen_machine_id: bool) -> Result<(), String> {
        mix_in(entropy)?;
        if regen_machine_id {
            set_machine_id("/", &fresh_machine_id()?)?;
        }
        Ok(())
    }

    async fn identity(&self, identity: &Identity) -> Result<(), String> {
        let change = identity::check(identity)?;
        let nics = network::interfaces().len();
        if change.macs.len() > nics {
            return Err(format!("{} MACs for {nics} NICs", change.macs.len()));
        }
        if !change.entropy.is_empty() {
            mix_in(&change.entropy)?;
        }
        if let Some(ns) = change.unix_time_ns {
            let time = Timespec { tv_sec: ns / 1_000_000_000, tv_nsec: ns % 1_000_000_000 };
            clock_settime(ClockId::Realtime, time).map_err(|error| format!("clock: {error}"))?;
        }
        if let Some(name) = &change.hostname {
            set_hostname(name)?;
        }
        if let Some(id) = &change.machine_id {
            set_machine_id("/", id)?;
        }
        self.rewire(&change).await
    }
}

impl Guest {
    /// Changes MACs and drops what belonged to the old ones.
    async fn rewire(&self, change: &Change) -> Result<(), String> {
        for (index, interface) in network::interfaces().iter().enumerate() {
            let mac = change.macs.get(index).copied();
            let changed = mac.filter(|mac| network::mac(interface) != Some(*mac));
            if changed.is_none() && !change.renew_dhcp {
                continue;
            }
            self.leases.stop(interface).await;
            let done = network::flush(interface)
                .and_then(|()| changed.map_or(Ok(()), |mac| network::set_mac(interface, mac)));
            self.leases.resume(interface).await;
            done?;
        }
        Ok(())
    }
}

fn mix_in(entropy: &[u8]) -> Result<(), String> {
    sys::add_entropy(entropy).map_err(|error| format!("entropy: {error}"))?;
    remove_saved_seed("/")
}

/// Removes the entropy that was saved below `root` for the next boot.
pub(crate) fn remove_saved_seed(root: &str) -> Result<(), String> {
    remove(Path::new(root).join(SAVED_SEED))
}

/// Sets the host name, now and for the next boot.
pub(crate) fn set_hostname(name: &str) -> Result<(), String> {
    let set = || -> io::Result<()> {
        sethostname(name.as_bytes())?;
        fs::write("/etc/hostname", format!("{name}\n"))?;
        let old = fs::read_to_string("/etc/hosts").unwrap_or_default();
        fs::write("/etc/hosts", identity::hosts(&old, name))
    };
    set().map_err(|error| format!("hostname: {error}"))
}

/// A machine id nobody else has.
pub(crate) fn fresh_machine_id() -> Result<String, String> {
    let mut id = [0_u8; 16];
    getrandom(&mut id, GetRandomFlags::empty()).map_err(|error| format!("machine id: {error}"))?;
    // The marks of a version 4 UUID, as systemd sets them.
    id[6] = id[6] & 0x0f | 0x40;
    id[8] = id[8] & 0x3f | 0x80;
    Ok(id.iter().map(|b| format!("{b:02x}")).collect())
}

/// Writes the machine id below `root` as a regular file, and drops D-Bus' copy of the old one.
pub(crate) fn set_machine_id(root: &str, id: &str) -> Result<(), String> {
    let is_link = |path: &Path| fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink());
    let (path, copy) = (Path::new(root).join(MACHINE_ID), Path::new(root).join(DBUS_MACHINE_ID));
    let set = || -> io::Result<()> {
        if is_link(&path) {
            fs::remove_file(&path)?;
        }
        fs::write(&path, format!("{id}\n"))
    };
    set().map_err(|error| format!("{}: {error}", path.display()))?;
    if is_link(&copy) { Ok(()) } else { remove(copy) }
}

/// Removes a file; its absence is as good.
pub(crate) fn remove(path: impl AsRef<Path>) -> Result<(), String> {
    let path = path.as_ref();
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
        _ => Ok(()),
    }
}
