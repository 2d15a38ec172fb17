//! The folder into which layers are unpacked.
//!
//! Entry point: [`Tree`]. Invariant: every path is resolved by the kernel with `RESOLVE_BENEATH` and
//! `RESOLVE_NO_SYMLINKS` from the root's descriptor, so nothing in an archive reaches a file outside,
//! and no link is ever followed.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read, Seek as _, SeekFrom, Write as _},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid, XattrFlags},
    io::Errno,
};

use super::{
    path::Inside,
    tarball::{LayerError, Member, hostile},
};

/// Zero runs of this length become holes.
const BLOCK: usize = 64 << 10;

/// A folder that is being filled.
#[derive(Debug)]
pub(super) struct Tree {
    root: OwnedFd,
    /// Members come folder by folder, so the last one is kept open.
    last: Option<(Inside, OwnedFd)>,
}

impl Tree {
    /// Opens an existing folder as the root.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self { root: rustix::fs::open(path, flags, Mode::empty())?, last: None })
    }

    /// The folder at `path`, made (with what is missing above it) if `create`. `Ok(None)`: not there.
    fn folder(&mut self, path: &Inside, create: bool) -> Result<Option<BorrowedFd<'_>>, LayerError> {
        if self.last.as_ref().is_none_or(|(known, _)| known != path) {
            let opened = match open_folder(self.root.as_fd(), path.as_path()) {
                Ok(opened) => opened,
                Err(Errno::NOENT) if create => {
                    self.make_all(path)?;
                    open_folder(self.root.as_fd(), path.as_path()).map_err(|error| refused(path, error))?
                }
                Err(Errno::NOENT) => return Ok(None),
                Err(error) => return Err(refused(path, error)),
            };
            self.last = Some((path.clone(), opened));
        }
        Ok(self.last.as_ref().map(|(_, opened)| opened.as_fd()))
    }

    fn make_all(&self, path: &Inside) -> Result<(), LayerError> {
        let mut at = std::path::PathBuf::new();
        for part in path.as_path().components() {
            let above = open_folder(self.root.as_fd(), &at).map_err(|error| refused(path, error))?;
            match rustix::fs::mkdirat(&above, part.as_os_str(), Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            at.push(part);
        }
        Ok(())
    }

    /// What is at `path`, not following a link. `None`: nothing.
    pub(super) fn look(&mut self, path: &Inside) -> Result<Option<Stat>, LayerError> {
        let Some((above, name)) = path.split() else {
            return Ok(Some(rustix::fs::fstat(&self.root)?));
        };
        let Some(folder) = self.folder(&above, false)? else { return Ok(None) };
        stat(folder, name).map_err(Into::into)
    }

    /// Makes a folder; one that is there keeps its content.
    pub(super) fn make_folder(&mut self, member: &Member) -> Result<(), LayerError> {
        if let Some((above, name)) = member.path.split() {
            let folder = parent(self.folder(&above, true)?)?;
            let found = stat(folder, name)?;
            if found.is_none_or(|found| !is(&found, FileType::Directory)) {
                if found.is_some() {
                    rustix::fs::unlinkat(folder, name, AtFlags::empty())?;
                }
                rustix::fs::mkdirat(folder, name, Mode::RWXU)?;
                self.forget();
            }
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = beneath(self.root.as_fd(), member.path.as_path(), flags, Mode::empty())
            .map_err(|error| refused(&member.path, error))?;
        finish(&opened, member)
    }

    /// Writes a file, replacing what is there. Zeros become holes.
    pub(super) fn make_file(&mut self, member: &Member, body: &mut dyn Read) -> Result<(), LayerError> {
        let (above, name) = leaf(member)?;
        self.clear(&member.path)?;
        let folder = parent(self.folder(&above, true)?)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = beneath(folder, Path::new(name), flags, Mode::RUSR | Mode::WUSR)
            .map_err(|error| refused(&member.path, error))?;
        let mut file = File::from(opened);
        if copy_sparse(body, &mut file, member.size)? != member.size {
            return Err(hostile(&member.path, "the archive ends inside this file"));
        }
        finish(&file, member)
    }

    /// Makes a symbolic link, replacing what is there.
    pub(super) fn make_symlink(&mut self, member: &Member, target: &OsStr) -> Result<(), LayerError> {
        let (above, name) = leaf(member)?;
        self.clear(&member.path)?;
        let folder = parent(self.folder(&above, true)?)?;
        rustix::fs::symlinkat(target, folder, name)?;
        let (uid, gid) = owner(member);
        rustix::fs::chownat(folder, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }

    /// Makes a hard link to a file or link of the tree. `Ok(false)`: the target is not there.
    pub(super) fn make_hardlink(&mut self, member: &Member, target: &Inside) -> Result<bool, LayerError> {
        let (above, name) = leaf(member)?;
        if *target == member.path {
            return Ok(self.look(target)?.is_some());
        }
        let Some(found) = self.look(target)? else { return Ok(false) };
        if !is(&found, FileType::RegularFile) && !is(&found, FileType::Symlink) {
            return Err(hostile(&member.path, format!("hard link to {target}, which is not a file")));
        }
        let Some((target_above, target_name)) = target.split() else { return Ok(false) };
        let source =
            open_folder(self.root.as_fd(), target_above.as_path()).map_err(|error| refused(target, error))?;
        self.clear(&member.path)?;
        let folder = parent(self.folder(&above, true)?)?;
        rustix::fs::linkat(&source, target_name, folder, name, AtFlags::empty())?;
        Ok(true)
    }

    /// Removes whatever is at `path`, with all below it.
    pub(super) fn clear(&mut self, path: &Inside) -> Result<(), LayerError> {
        let Some((above, name)) = path.split() else { return Ok(()) };
        let Some(folder) = self.folder(&above, false)? else { return Ok(()) };
        match stat(folder, name)? {
            None => return Ok(()),
            Some(found) if is(&found, FileType::Directory) => {
                // The parent was resolved above; nobody else writes here, and the removal follows no link.
                let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
                std::fs::remove_dir_all(path)?;
            }
            Some(_) => rustix::fs::unlinkat(folder, name, AtFlags::empty())?,
        }
        self.forget();
        Ok(())
    }

    /// Names in a folder with whether each is a folder; empty if it is not there.
    pub(super) fn children(&mut self, path: &Inside) -> Result<Vec<(Vec<u8>, bool)>, LayerError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = match beneath(self.root.as_fd(), path.as_path(), flags, Mode::empty()) {
            Ok(opened) => opened,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
            Err(error) => return Err(refused(path, error)),
        };
        let mut out = Vec::new();
        for entry in rustix::fs::Dir::read_from(&opened)? {
            let entry = entry?;
            let name = entry.file_name();
            if !matches!(name.to_bytes(), b"." | b"..") {
                let found = rustix::fs::statat(&opened, name, AtFlags::SYMLINK_NOFOLLOW)?;
                out.push((name.to_bytes().to_vec(), is(&found, FileType::Directory)));
            }
        }
        Ok(out)
    }

    /// Opens a regular file for reading; `None` if there is none.
    pub(super) fn read(&mut self, path: &Inside) -> Result<Option<File>, LayerError> {
        match self.look(path)? {
            Some(found) if is(&found, FileType::RegularFile) => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let opened = beneath(self.root.as_fd(), path.as_path(), flags, Mode::empty())
                    .map_err(|error| refused(path, error))?;
                Ok(Some(File::from(opened)))
            }
            _ => Ok(None),
        }
    }

    /// A folder was removed or made: the one kept open may not be the one of that name any more.
    fn forget(&mut self) {
        self.last = None;
    }
}

/// Whether `found` is of type `wanted`.
pub(super) fn is(found: &Stat, wanted: FileType) -> bool {
    FileType::from_raw_mode(found.st_mode) == wanted
}

fn beneath(at: BorrowedFd<'_>, path: &Path, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(at, path, flags, mode, resolve)
}

fn open_folder(at: BorrowedFd<'_>, path: &Path) -> rustix::io::Result<OwnedFd> {
    beneath(at, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn refused(path: &Inside, error: Errno) -> LayerError {
    match error {
        Errno::LOOP => hostile(
            path,
            "the path goes through a symbolic link; pack it under the folder that the link points to",
        ),
        Errno::XDEV => hostile(path, "the path leaves the image"),
        Errno::NOTDIR => hostile(path, "the path goes through something that is not a folder"),
        other => other.into(),
    }
}

/// `folder(_, true)` never answers `None`.
fn parent(folder: Option<BorrowedFd<'_>>) -> Result<BorrowedFd<'_>, LayerError> {
    folder.ok_or_else(|| LayerError::Io(io::ErrorKind::NotFound.into()))
}

fn leaf(member: &Member) -> Result<(Inside, &OsStr), LayerError> {
    member.path.split().ok_or_else(|| hostile("/", "the root can only be a folder"))
}

fn stat(folder: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<Option<Stat>> {
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

fn owner(member: &Member) -> (Uid, Gid) {
    (Uid::from_raw(member.uid), Gid::from_raw(member.gid))
}

/// Owner first: `chown` clears mode bits.
fn finish(file: impl AsFd, member: &Member) -> Result<(), LayerError> {
    let (uid, gid) = owner(member);
    rustix::fs::fchown(&file, Some(uid), Some(gid))?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(member.mode))?;
    for (name, value) in member.xattrs.iter().filter(|(name, _)| name.starts_with(b"user.")) {
        match rustix::fs::fsetxattr(&file, name.as_slice(), value, XattrFlags::empty()) {
            // A tmpfs has none; nothing that a guest needs in order to boot is kept in them.
            Ok(()) | Err(Errno::NOTSUP) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn copy_sparse(from: &mut dyn Read, to: &mut File, size: u64) -> io::Result<u64> {
    let mut buffer = vec![0; BLOCK];
    let mut copied = 0;
    let mut from = from.take(size);
    loop {
        let length = fill(&mut from, &mut buffer)?;
        if length == 0 {
            break;
        }
        let block = &buffer[..length];
        if length == BLOCK && block.iter().all(|byte| *byte == 0) {
            to.seek(SeekFrom::Current(BLOCK as i64))?;
        } else {
            to.write_all(block)?;
        }
        copied += length as u64;
    }
    to.set_len(copied)?;
    Ok(copied)
}

fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match from.read(&mut buffer[length..]) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}
