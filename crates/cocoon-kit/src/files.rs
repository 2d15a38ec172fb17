//! Durable files and locks.
//!
//! Entry points: [`replace`] (a reader sees the old or the new content, never a part, and after the
//! call the new one survives a power cut), [`create`] (the same, over nothing that is there), [`reserve`]
//! (space for what must be writable on a full disk) and [`Lock`] (one holder across processes, released by
//! the kernel when the holder dies).

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, FallocateFlags, FlockOperation, RenameFlags, fallocate, flock, renameat_with};

/// Writes `content` to a temporary file beside `path`, syncs it, renames it over `path`, syncs the
/// folder. `mode` is the file's permission bits.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    write_aside(path, content, mode, |temporary| std::fs::rename(temporary, path))
}

/// [`replace`] that replaces nothing: whatever has the name already, a dangling link included, stays, and the
/// error is of kind `AlreadyExists`.
pub fn create(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    write_aside(path, content, mode, |temporary| {
        Ok(renameat_with(CWD, temporary, CWD, path, RenameFlags::NOREPLACE)?)
    })
}

/// Writes beside `path`, and lets `place` move that to it.
fn write_aside(
    path: &Path,
    content: &[u8],
    mode: u32,
    place: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let folder = parent(path)?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}.tmp", std::process::id()));
    let written = write_synced(&temporary, content, mode).and_then(|()| place(&temporary));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written.and_then(|()| sync_folder(folder))
}

fn write_synced(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.write_all(content)?;
    file.sync_all()
}

fn parent(path: &Path) -> io::Result<&Path> {
    path.parent().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a path without a folder"))
}

/// Sets space aside for the first `bytes` of a file that is there, so that it can be written that far when the
/// disk is full. Its length stays. File systems that copy on write may need more all the same.
pub fn reserve(path: &Path, bytes: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    Ok(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes)?)
}

/// [`reserve`] for the write-ahead log of the open SQLite file at `path`, which grows to 4 MiB before it is used
/// again from its begin. For as long as it is open; best effort.
pub fn reserve_log(path: &Path, bytes: u64) {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    if let Err(error) = reserve(Path::new(&log), bytes) {
        tracing::debug!(path = %path.display(), %error, "no space is set aside for a full disk");
    }
}

/// Makes renames and removals in `folder` survive a power cut.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Creates `path` and what is missing above it, each with mode 0700. An existing folder is kept.
pub fn private_folder(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// An exclusive lock on a file, held until dropped or until the process dies: a process that is just being
/// started shares every descriptor until its exec, and does not keep what was dropped. A holder that
/// unlinks its file must be the last one to want it, and whoever waited must look again: a lock on an
/// unlinked file guards nothing.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock if it is free; `Ok(None)` says that somebody else holds it.
    pub fn try_acquire(path: &Path) -> io::Result<Option<Self>> {
        let file = Self::open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { file, path: path.to_owned() })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the lock. Blocks the thread: call it where blocking is allowed.
    pub fn acquire(path: &Path) -> io::Result<Self> {
        let file = Self::open(path)?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => return Ok(Self { file, path: path.to_owned() }),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn open(path: &Path) -> io::Result<File> {
        // Not truncated: the holder may have written who it is.
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
    }

    /// The lock file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open lock file, for a holder that leaves a note (such as its process id) in it.
    #[must_use]
    pub const fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing alone lets go only once nobody shares the descriptor any more.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replace_swaps_the_whole_content_and_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        replace(&path, b"one", 0o600).unwrap();
        replace(&path, b"two", 0o640).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_there_is_never_overwritten_by_a_creation() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        create(&at("new"), b"1", 0o600).unwrap();
        std::os::unix::fs::symlink("nowhere", at("link")).unwrap();
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        for name in ["new", "link", "loop"] {
            let error = create(&at(name), b"2", 0o600).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{name}");
        }
        assert_eq!(std::fs::read(at("new")).unwrap(), b"1");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "no temporary file is left");
    }

    #[test]
    fn space_is_set_aside_without_a_change_to_the_file() {
        use std::os::unix::fs::MetadataExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("db");
        std::fs::write(folder.path().join("db-wal"), b"kept").unwrap();
        reserve_log(&path, 1 << 20);
        let facts = std::fs::metadata(folder.path().join("db-wal")).unwrap();
        assert_eq!((facts.len(), facts.blocks() * 512 >= 1 << 20), (4, true));
        assert!(!path.exists(), "the database itself is not touched: closing it would drop its locks");
        assert!(reserve(&path, 1).is_err());
    }

    #[test]
    fn a_lock_has_one_holder_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = Lock::try_acquire(&path).unwrap();
        assert!(held.is_some());
        assert!(Lock::try_acquire(&path).unwrap().is_none());
        drop(held);
        assert!(Lock::try_acquire(&path).unwrap().is_some());
    }

    #[test]
    fn a_dropped_lock_is_free_even_if_a_starting_process_still_shares_its_descriptor() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = Lock::try_acquire(&path).unwrap().unwrap();
        // As a fork does; the kernel keeps one lock for all that share it.
        let _shared = held.file().try_clone().unwrap();
        drop(held);
        assert!(Lock::try_acquire(&path).unwrap().is_some());
    }
}
