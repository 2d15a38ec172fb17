//! Where the engine keeps things, and Unix sockets below paths of any length.
//!
//! `root/engine.db`, `root/locks/<vm id>.lock`, `root/snapshot/localfile/<id>/`,
//! `root/snapshot/staging/<id>/`, `root/oci/...` (image store), `run/<vm id>/` (disks, sockets, pid
//! file, port locks), `log/<vm id>/` (console and QEMU's own words). All folders have mode 0700.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
};

use cocoon_kit::files::sync_folder;
use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

/// The run folder of one VM.
#[derive(Debug, Clone)]
pub(crate) struct RunFolder(pub(crate) PathBuf);

impl RunFolder {
    /// The writable disk.
    #[must_use]
    pub(crate) fn cow(&self) -> PathBuf {
        self.0.join("cow.qcow2")
    }

    /// What lies below the writable disk of a clone: the snapshot's disk under a second name.
    #[must_use]
    pub(crate) fn cow_base(&self) -> PathBuf {
        self.0.join("cow-base.qcow2")
    }

    /// Makes the writable disk, what lies below it and their names survive a power cut: before a record says
    /// that they are there.
    pub(crate) fn sync(&self) -> io::Result<()> {
        for file in [self.cow(), self.cow_base()] {
            match File::open(&file).and_then(|file| file.sync_all()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(named(&file, &error)),
                _ => {}
            }
        }
        sync_folder(&self.0)?;
        self.0.parent().map_or(Ok(()), sync_folder)
    }

    /// Written by QEMU's process before it becomes QEMU.
    #[must_use]
    pub(crate) fn pid_file(&self) -> PathBuf {
        self.0.join("qemu.pid")
    }

    /// The monitor for commands.
    #[must_use]
    pub(crate) fn ctl(&self) -> PathBuf {
        self.0.join("ctl.sock")
    }

    /// The second monitor, for one who watches what QEMU says unasked while others command on [`Self::ctl`].
    /// Nobody connects to it in this release, whose upkeep asks on the first; it is there so that a VM that
    /// was started today, and outlives this program, can be watched by a later one.
    #[must_use]
    pub(crate) fn events(&self) -> PathBuf {
        self.0.join("events.sock")
    }

    /// Guest port `index`.
    #[must_use]
    pub(crate) fn port(&self, index: usize) -> PathBuf {
        self.0.join(format!("agent.{index}.sock"))
    }

    /// The lock of guest port `index`; that of port 0 is the agent's.
    #[must_use]
    pub(crate) fn port_lock(&self, index: usize) -> PathBuf {
        self.0.join(if index == 0 { "agent.lock".to_owned() } else { format!("agent.{index}.lock") })
    }
}

/// The log folder of one VM.
#[derive(Debug, Clone)]
pub(crate) struct LogFolder(pub(crate) PathBuf);

impl LogFolder {
    /// What the guest prints on ttyS0.
    #[must_use]
    pub(crate) fn console(&self) -> PathBuf {
        self.0.join("console.log")
    }

    /// What QEMU itself says.
    #[must_use]
    pub(crate) fn qemu(&self) -> PathBuf {
        self.0.join("qemu.log")
    }
}

/// A socket address holds at most 107 bytes; through the folder's descriptor every path fits.
fn short(path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    Ok((folder, path))
}

/// Connects to a Unix socket.
pub(crate) async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (_folder, short) = short(path)?;
    UnixStream::connect(short).await
}

/// A listening Unix socket with mode 0600; what was there before is replaced.
pub(crate) fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let (_folder, short) = short(path)?;
    let listener = UnixListener::bind(&short)?;
    std::fs::set_permissions(&short, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    Ok(listener.into())
}

/// Removes a folder with all that is in it; not there is success.
pub(crate) fn remove_folder(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Opens a file for reading, naming it in the error.
pub(crate) fn open_read(path: &Path) -> io::Result<File> {
    File::open(path).map_err(|error| named(path, &error))
}

/// An I/O error that names its file.
pub(crate) fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_below_a_very_long_path_can_be_made_and_reached() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("x".repeat(120)).join("y".repeat(120));
        std::fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("ctl.sock");
        let first = listen(&socket).unwrap();
        drop(first);
        let _second = listen(&socket).unwrap();
        connect(&socket).await.unwrap();
    }
}
