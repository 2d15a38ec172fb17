//! One layer into one tree: the rules for what is taken, whiteouts, and where boot files are.
//!
//! Entry point: [`Unpacker::layer`]. A layer is unpacked *alone* (it becomes a disk of its own, and
//! overlayfs in the guest stacks them) or *merged* over the layers below it. A layer that removes or
//! links files of lower layers cannot stand alone; [`LayerError::NeedsLower`] says so. Merging needs
//! neither device nodes nor privileged attributes for whiteouts, and works on every file system.
//!
//! Refused: `..` and absolute paths, paths through links, links out, device nodes, pipes, setuid and
//! setgid programs, file capabilities (both can be stripped on demand), too much of anything.

use std::{
    collections::HashSet,
    io::Read,
    path::{Path, PathBuf},
};

use rustix::fs::FileType;

use super::{
    path::{self, Inside},
    tarball::{self, Budget, Kind, LayerError, Member, hostile},
    tree::{Tree, is},
};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const CAPABILITY: &[u8] = b"security.capability";

/// What to do with programs that run with more rights than their caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Setuid {
    /// Refuse the image.
    #[default]
    Refuse,
    /// Take the file without its setuid and setgid bits and without file capabilities.
    Strip,
}

/// How a layer stands to the ones below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In a tree of its own; `lowest` has nothing below.
    Alone {
        /// The image's first layer.
        lowest: bool,
    },
    /// In the tree that the lower layers were unpacked into.
    Merged,
}

/// Boot files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Boot {
    /// `vmlinuz*`.
    Kernel,
    /// `initrd.img*`.
    Initrd,
}

impl Boot {
    /// The name under which it is kept.
    pub(super) const fn file_name(self) -> &'static str {
        match self {
            Self::Kernel => "vmlinuz",
            Self::Initrd => "initrd.img",
        }
    }

    /// `vmlinuz*` and `initrd.img*` in `/` and `/boot`, without `.old`.
    fn of(path: &Inside) -> Option<Self> {
        let (above, name) = path.split()?;
        let name = name.to_str()?;
        if !(above.depth() == 0 || above.as_path() == Path::new("boot")) || name.ends_with(".old") {
            return None;
        }
        [Self::Kernel, Self::Initrd].into_iter().find(|kind| name.starts_with(kind.file_name()))
    }
}

/// Fills one tree.
#[derive(Debug)]
pub(super) struct Unpacker {
    tree: Tree,
    setuid: Setuid,
    boot: Vec<(Boot, Inside)>,
    /// The first file that lost bits.
    stripped: Option<String>,
    /// A lowest layer removes files of layers that are not below it here, but may be in another image.
    hides: bool,
    /// Paths of the current layer, when it is merged: its whiteouts do not touch them.
    own: HashSet<PathBuf>,
}

impl Unpacker {
    /// Starts with an empty tree.
    pub(super) fn new(tree: Tree, setuid: Setuid) -> Self {
        Self { tree, setuid, boot: Vec::new(), stripped: None, hides: false, own: HashSet::new() }
    }

    /// Unpacks one layer and reads its stream to the end.
    pub(super) fn layer(
        &mut self,
        stream: &mut dyn Read,
        budget: &mut Budget,
        place: Place,
    ) -> Result<(), LayerError> {
        self.own.clear();
        tarball::each(stream, budget, &mut |member, body| self.take(member, body, place))
    }

    /// Whether the tree is right only for an image without a layer below it.
    pub(super) const fn hides(&self) -> bool {
        self.hides
    }

    /// The first path that lost its setuid bit or its capabilities.
    pub(super) fn stripped(&self) -> Option<&str> {
        self.stripped.as_deref()
    }

    /// The last boot file of a kind that is still a regular file.
    pub(super) fn boot_file(&mut self, kind: Boot) -> Result<Option<std::fs::File>, LayerError> {
        let candidates: Vec<_> =
            self.boot.iter().rev().filter(|(of, _)| *of == kind).map(|(_, path)| path.clone()).collect();
        for path in candidates {
            if let Some(file) = self.tree.read(&path)? {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    fn take(&mut self, mut member: Member, body: &mut dyn Read, place: Place) -> Result<(), LayerError> {
        if let Some((above, name)) = member.path.split()
            && let Some(hidden) = std::os::unix::ffi::OsStrExt::as_bytes(name).strip_prefix(WHITEOUT)
        {
            let opaque = std::os::unix::ffi::OsStrExt::as_bytes(name) == OPAQUE;
            return self.whiteout(&member.path, &above, hidden, opaque, place);
        }
        self.disarm(&mut member)?;
        match &member.kind {
            Kind::Folder => self.tree.make_folder(&member)?,
            Kind::File => self.tree.make_file(&member, body)?,
            Kind::Symlink(target) => {
                if !path::link_stays_inside(&member.path, target) {
                    let reason = format!(
                        "symbolic link out of the image, to {:?}; point it inside, or drop it from the archive",
                        tarball::printable(target)
                    );
                    return Err(hostile(&member.path, reason));
                }
                self.tree.make_symlink(&member, &path::os_string(target))?;
            }
            Kind::Hardlink(target) => self.hardlink(&member, target, place)?,
        }
        if let (Kind::File | Kind::Hardlink(_), Some(kind)) = (&member.kind, Boot::of(&member.path)) {
            self.boot.push((kind, member.path.clone()));
        }
        self.note(&member.path, place);
        Ok(())
    }

    fn hardlink(&mut self, member: &Member, target: &Inside, place: Place) -> Result<(), LayerError> {
        if self.tree.make_hardlink(member, target)? {
            return Ok(());
        }
        match place {
            Place::Alone { lowest: false } => Err(LayerError::NeedsLower),
            _ => Err(hostile(
                &member.path,
                format!("hard link to {target}, which the image does not have; pack that file before it"),
            )),
        }
    }

    /// Takes the bits off, or refuses, where a file would run with more rights than its caller.
    fn disarm(&mut self, member: &mut Member) -> Result<(), LayerError> {
        if member.kind == Kind::Folder {
            // On a folder setgid only passes the group on; setuid means nothing.
            member.mode &= !SETUID;
            return Ok(());
        }
        let capable = member.xattrs.remove(CAPABILITY).is_some();
        let bits = member.mode & (SETUID | SETGID);
        if member.kind != Kind::File || (bits == 0 && !capable) {
            return Ok(());
        }
        if self.setuid == Setuid::Refuse {
            let what = match bits {
                0 => "file capabilities",
                SETGID => "setgid",
                _ => "setuid",
            };
            return Err(hostile(&member.path, armed_reason(what)));
        }
        member.mode &= !(SETUID | SETGID);
        self.stripped.get_or_insert_with(|| member.path.to_string());
        Ok(())
    }

    fn whiteout(
        &mut self,
        written: &Inside,
        above: &Inside,
        hidden: &[u8],
        opaque: bool,
        place: Place,
    ) -> Result<(), LayerError> {
        let target = if opaque {
            above.clone()
        } else if hidden.starts_with(WHITEOUT) {
            // aufs' own notes (`.wh..wh.plnk` and such) mean nothing here.
            return Ok(());
        } else {
            above.child(hidden).map_err(|_| hostile(written, "malformed whiteout"))?
        };
        match place {
            Place::Alone { lowest: true } => {
                self.hides = true;
                Ok(())
            }
            Place::Alone { lowest: false } => Err(LayerError::NeedsLower),
            Place::Merged if opaque => self.hide_below(&target),
            Place::Merged => self.hide(&target),
        }
    }

    /// Removes what lower layers put at `path`; what this layer put there stays.
    fn hide(&mut self, path: &Inside) -> Result<(), LayerError> {
        if !self.own.contains(path.as_path()) {
            return self.tree.clear(path);
        }
        self.hide_below(path)
    }

    fn hide_below(&mut self, path: &Inside) -> Result<(), LayerError> {
        if self.tree.look(path)?.is_none_or(|found| !is(&found, FileType::Directory)) {
            return Ok(());
        }
        for (name, folder) in self.tree.children(path)? {
            let child = path.child(&name).map_err(|rule| hostile(path, rule))?;
            if !self.own.contains(child.as_path()) {
                self.tree.clear(&child)?;
            } else if folder {
                self.hide_below(&child)?;
            }
        }
        Ok(())
    }

    fn note(&mut self, path: &Inside, place: Place) {
        if place != Place::Merged {
            return;
        }
        for at in path.as_path().ancestors() {
            if !self.own.insert(at.to_owned()) {
                break;
            }
        }
    }
}

/// The rule that setuid files break, with the way out.
pub(super) fn armed_reason(what: &str) -> String {
    format!("{what}; import it with `--strip-setuid` to take such files without these rights")
}

#[cfg(test)]
mod tests;
