//! Small file helpers: hashing, durable placing, sparse copies.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, Read, Seek as _, SeekFrom, Write},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
};

use cocoon_kit::files::sync_folder;
use rustix::fs::SeekFrom as Hole;
use sha2::{Digest as _, Sha256};

/// Hex sha256 of what is left in `from`.
pub(super) fn hash(from: &mut impl Read) -> io::Result<String> {
    copy_hashed(from, &mut io::sink())
}

/// Copies and returns the hex sha256 of what was copied.
pub(super) fn copy_hashed(from: &mut impl Read, to: &mut impl Write) -> io::Result<String> {
    let mut sum = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(hex::encode(sum.finalize())),
            Ok(read) => {
                sum.update(&buffer[..read]);
                to.write_all(&buffer[..read])?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Makes a finished file read-only and moves it to its place, durably. An older one of that name, made
/// from the same content, is replaced.
pub(super) fn place(finished: &Path, to: &Path) -> io::Result<()> {
    let file = File::open(finished)?;
    file.set_permissions(Permissions::from_mode(0o444))?;
    file.sync_all()?;
    std::fs::rename(finished, to)?;
    sync_folder(to.parent().ok_or(io::ErrorKind::InvalidInput)?)
}

/// Tells two states of a file apart without reading it.
pub(super) fn stamp(path: &Path) -> io::Result<String> {
    let found = std::fs::metadata(path)?;
    Ok(format!(
        "{}:{}:{}:{}.{}:{}.{}",
        found.dev(),
        found.ino(),
        found.size(),
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec()
    ))
}

/// Copies to a new private file, sharing blocks where the file system can, else keeping holes.
pub(super) fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    let source = File::open(from)?;
    let target = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to)?;
    let copied = copy_into(source, target);
    if copied.is_err() {
        let _ = std::fs::remove_file(to);
    }
    copied
}

fn copy_into(mut source: File, mut target: File) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(&target, &source).is_ok() {
        return Ok(());
    }
    let length = source.metadata()?.len();
    target.set_len(length)?;
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(&source, Hole::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&source, Hole::Hole(start))?;
        source.seek(SeekFrom::Start(start))?;
        target.seek(SeekFrom::Start(start))?;
        io::copy(&mut (&mut source).take(end - start), &mut target)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_equal_private_and_keeps_its_holes() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("b"));
        let mut file = File::create(&from).unwrap();
        file.write_all(b"start").unwrap();
        file.seek(SeekFrom::Start(2 << 20)).unwrap();
        file.write_all(b"end").unwrap();
        file.set_len(4 << 20).unwrap();
        copy_sparse(&from, &to).unwrap();
        let found = std::fs::metadata(&to).unwrap();
        assert_eq!(found.mode() & 0o777, 0o600);
        assert!(found.blocks() * 512 < 1 << 20, "{} blocks", found.blocks());
        assert_eq!(
            hash(&mut File::open(&from).unwrap()).unwrap(),
            hash(&mut File::open(&to).unwrap()).unwrap()
        );
        assert!(copy_sparse(&from, &to).is_err(), "an existing file is never overwritten");
    }
}
