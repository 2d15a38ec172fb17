//! A tree becomes a read-only disk.
//!
//! Entry point: [`build`]. Debian 12's `mkfs.erofs` (1.5) knows no `--tar`, so it works on a folder.
//! Compression is lz4: measured on 100 MB, lz4hc takes 17 times as long (9.7 s against 0.56 s) for 6 %
//! less disk, and the guest reads both the same way. The same tree gives the same bytes: no times, a
//! UUID from the digest.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
    process::{Command, Stdio},
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use uuid::Uuid;

use super::files::hash;

/// Least room that a failed build must have left, so that it was not for want of space.
const ROOM: u64 = 1 << 20;

/// Why a disk could not be built.
#[derive(Debug)]
pub(super) enum BuildError {
    /// `mkfs.erofs` is not installed.
    Missing,
    /// It failed; its last words.
    Failed(String),
    /// Starting it or reading its output failed.
    Io(io::Error),
}

/// Builds `out` from `tree`; returns its size and sha256.
pub(super) fn build(tree: &Path, out: &Path, digest: &str) -> Result<(u64, String), BuildError> {
    let uuid = Uuid::new_v5(&Uuid::NAMESPACE_URL, digest.as_bytes());
    let done = Command::new("mkfs.erofs")
        .args(["--quiet", "-zlz4", "-C4096", "-T0", "-x2"])
        .arg(format!("-U{uuid}"))
        .arg(out)
        .arg(tree)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => BuildError::Missing,
            _ => BuildError::Io(error),
        })?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        let tail = said.trim().lines().last().unwrap_or("no message");
        if let Err(full) = grow(out) {
            return Err(BuildError::Io(full));
        }
        return Err(BuildError::Failed(format!("{}: {tail}", done.status)));
    }
    let file = File::open(out).map_err(BuildError::Io)?;
    file.sync_all().map_err(BuildError::Io)?;
    let size = file.metadata().map_err(BuildError::Io)?.len();
    let sum = hash(&mut file.take(u64::MAX)).map_err(BuildError::Io)?;
    Ok((size, sum))
}

/// Makes what a failed build left longer: whether there is no space is the file system's to say, not to be read
/// from another program's words. Any other answer says nothing.
fn grow(out: &Path) -> io::Result<()> {
    let Ok(file) = File::options().append(true).open(out) else { return Ok(()) };
    let Ok(found) = file.metadata() else { return Ok(()) };
    match fallocate(&file, FallocateFlags::empty(), found.len(), ROOM) {
        Err(error @ (Errno::NOSPC | Errno::DQUOT)) => Err(error.into()),
        _ => Ok(()),
    }
}
