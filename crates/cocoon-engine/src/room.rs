//! What a full disk lacks: bytes or inodes, where, and the way out.
//!
//! Entry points: [`explained`] for an operation's error, [`full`] for one of a file. The kernel has one answer for both
//! ("No space left on device"), which on a file system with gigabytes free tells nobody that it has no inode for
//! another file.

use std::{error::Error, io, path::Path};

use thiserror::Error;

use crate::{
    engine::EngineConfig,
    error::{BringUpError, ChangeError, Fault, ImportError, LookupError},
};

/// Free inodes below which they are what is short: what failed has given some back by the time one looks.
const FEW: u64 = 16;

/// A full disk, explained.
#[derive(Debug, Error)]
#[error("{why}")]
pub(crate) struct Full {
    why: String,
    #[source]
    source: Box<dyn Error + Send + Sync>,
}

/// What a file system has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Left {
    /// Bytes that an ordinary user may still write.
    pub(crate) bytes: u64,
    inodes: u64,
    /// 0: it makes inodes as it needs them.
    all_inodes: u64,
}

impl Left {
    /// At `folder`, or at the next folder above it that is there.
    pub(crate) fn at(folder: &Path) -> io::Result<Self> {
        let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(folder);
        let facts = rustix::fs::statvfs(there)?;
        Ok(Self {
            bytes: facts.f_bavail.saturating_mul(facts.f_frsize),
            inodes: facts.f_favail,
            all_inodes: facts.f_files,
        })
    }

    /// Whether it has no inode for another few files.
    pub(crate) const fn lacks_inodes(self) -> bool {
        self.all_inodes > 0 && self.inodes < FEW
    }

    fn sentence(self, folder: &Path) -> String {
        let (folder, Self { bytes, inodes, all_inodes }) = (folder.display(), self);
        if self.lacks_inodes() {
            return format!(
                "the file system of {folder} has no inodes for more files ({inodes} of {all_inodes} are free, and \
                 {bytes} bytes); remove files there that nobody needs, or move --root-dir to one with more inodes"
            );
        }
        format!("the disk with {folder} is full ({bytes} bytes are free); free space or move --root-dir")
    }
}

/// An error of a full disk with what is short in the first of `folders` that lacks something, else in the fullest.
pub(crate) fn full(source: impl Into<Box<dyn Error + Send + Sync>>, folders: &[&Path]) -> Full {
    let mut known: Vec<(&Path, Left)> =
        folders.iter().filter_map(|folder| Some((*folder, Left::at(folder).ok()?))).collect();
    known.sort_by_key(|(_, left)| (!left.lacks_inodes(), left.bytes));
    let why = known.first().map_or_else(
        || "the disk is full; free space or move --root-dir".to_owned(),
        |(folder, left)| left.sentence(folder),
    );
    Full { why, source: source.into() }
}

/// An operation's error that may be a fault.
pub(crate) trait Faulty {
    /// The fault, if it is one.
    fn fault(&mut self) -> Option<&mut Fault>;
}

impl Faulty for Fault {
    fn fault(&mut self) -> Option<&mut Fault> {
        Some(self)
    }
}

macro_rules! faulty {
    ($($error:ident),*) => {$(
        impl Faulty for $error {
            fn fault(&mut self) -> Option<&mut Fault> {
                match self {
                    Self::Fault(fault) | Self::Lookup(LookupError::Fault(fault)) => Some(fault),
                    _ => None,
                }
            }
        }
    )*};
}

faulty!(BringUpError, ChangeError);

impl Faulty for ImportError {
    fn fault(&mut self) -> Option<&mut Fault> {
        match self {
            Self::Fault(fault) => Some(fault),
            _ => None,
        }
    }
}

/// The error, and if a full disk is its cause, what that lacks.
pub(crate) fn explained<E: Faulty>(config: &EngineConfig, mut error: E) -> E {
    if let Some(fault) = error.fault()
        && cocoon_kit::failure::is_disk_full(fault)
        && !is_explained(fault)
    {
        let source = std::mem::replace(&mut fault.source, "".into());
        fault.source = full(source, &[&config.root_dir, &config.run_dir, &config.log_dir]).into();
    }
    error
}

fn is_explained(fault: &Fault) -> bool {
    cocoon_kit::failure::causes(fault.source.as_ref()).any(|cause| cause.is::<Full>())
}

#[cfg(test)]
mod tests {
    use cocoon_kit::failure::{chain, is_disk_full};

    use super::*;
    use crate::vm::tests::config;

    #[test]
    fn what_is_short_is_what_is_told() {
        let told =
            |bytes, inodes, all_inodes| Left { bytes, inodes, all_inodes }.sentence(Path::new("/data"));
        for (bytes, inodes, all, said) in [
            (1_286_352_896, 0, 576, "has no inodes for more files (0 of 576 are free, and 1286352896 bytes)"),
            (1_286_352_896, 3, 576, "(3 of 576 are free"),
            (4096, 5000, 9000, "the disk with /data is full (4096 bytes are free)"),
            (4096, 0, 0, "the disk with /data is full (4096 bytes are free)"),
        ] {
            let text = told(bytes, inodes, all);
            assert!(text.contains(said) && text.contains("/data") && text.contains("--root-dir"), "{text}");
        }
    }

    #[test]
    fn a_full_disk_is_explained_once_and_stays_one_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(folder.path());
        let fault = |kind: io::ErrorKind| Fault::new("lock of VM A", io::Error::from(kind));
        for error in [
            BringUpError::Fault(fault(io::ErrorKind::StorageFull)),
            BringUpError::Lookup(LookupError::Fault(fault(io::ErrorKind::StorageFull))),
        ] {
            let once = explained(&config, error);
            let text = chain(&once);
            assert!(text.contains("lock of VM A: the disk with ") && text.contains("--root-dir"), "{text}");
            assert!(is_disk_full(&once), "{text}");
            assert_eq!(chain(&explained(&config, once)), text);
        }
        let other = explained(&config, ChangeError::Fault(fault(io::ErrorKind::NotFound)));
        assert_eq!(chain(&other), "lock of VM A: entity not found");
    }
}
