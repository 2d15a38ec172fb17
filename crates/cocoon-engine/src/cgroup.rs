//! A control group per VM, where the host lets us have one.
//!
//! It holds the VM's processes together for accounting and for whoever looks; nothing depends on it,
//! so every failure is only logged at debug level.

use std::{
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

/// Where version 2 of the hierarchy is mounted: alone, or beside version 1.
const MOUNTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const GROUP: &str = "cocoon";
/// How often, and how long apart, a group that is still busy is tried.
const REMOVE_TRIES: u32 = 100;
const REMOVE_PAUSE: Duration = Duration::from_millis(5);

fn folder(id: &str) -> Option<PathBuf> {
    let mount = MOUNTS.iter().find(|mount| Path::new(mount).join("cgroup.procs").exists())?;
    Some(Path::new(mount).join(GROUP).join(id))
}

/// Makes the group of VM `id` and opens the file that moves a process into it.
pub(crate) fn create(id: &str) -> Option<OwnedFd> {
    let folder = folder(id)?;
    let made = fs::create_dir_all(&folder)
        .and_then(|()| File::options().write(true).open(folder.join("cgroup.procs")));
    match made {
        Ok(file) => Some(file.into()),
        Err(error) => {
            tracing::debug!(%error, vm = id, "the VM gets no control group of its own");
            None
        }
    }
}

/// Removes the group of VM `id`, and the one above it once it is empty. Blocks: a group stays busy for a
/// moment after its last process has ended.
pub(crate) fn remove(id: &str) {
    let Some(folder) = folder(id) else { return };
    for _ in 0..REMOVE_TRIES {
        match fs::remove_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => std::thread::sleep(REMOVE_PAUSE),
            _ => break,
        }
    }
    let _ = folder.parent().map(fs::remove_dir);
}
