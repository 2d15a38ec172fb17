//! Kernel and initrd: out of an image's layers, or from the boot bundle with the guest agent appended.
//!
//! Entry points: [`keep`] for a file of a layer, [`make_bundle`]. Kept files are named by what they are
//! made of, are read-only and never change.

use std::{
    fs::File,
    io::{self, Seek as _, Write as _},
    path::{Path, PathBuf},
};

use cocoon_kit::files::{private_folder, sync_folder};
use sha2::{Digest as _, Sha256};

use super::{
    cpio,
    files::{copy_hashed, hash, place, stamp},
    index::Bundle,
    unpack::Boot,
};

/// Folder below `boot/` of a bundle.
pub(super) fn bundle_folder(hex: &str) -> String {
    format!("bundle-{hex}")
}

/// Copies a boot file out of a layer into `boot/<hex>/`; returns its hex sha256.
pub(super) fn keep(mut from: File, boot: &Path, hex: &str, kind: Boot) -> io::Result<String> {
    let folder = boot.join(hex);
    private_folder(&folder)?;
    let mut temp = tempfile::NamedTempFile::new_in(&folder)?;
    let sum = copy_hashed(&mut from, &mut temp)?;
    let (_, path) = temp.keep().map_err(|error| error.error)?;
    place(&path, &folder.join(kind.file_name()))?;
    sync_folder(boot)?;
    Ok(sum)
}

/// The source files of a bundle.
#[derive(Debug, Clone)]
pub(super) struct Parts {
    kernel: PathBuf,
    initrd: PathBuf,
}

impl Parts {
    /// `vmlinuz` and `initrd.img` in `folder`, if both are there.
    pub(super) fn of(folder: &Path) -> Option<Self> {
        let parts = Self {
            kernel: folder.join(Boot::Kernel.file_name()),
            initrd: folder.join(Boot::Initrd.file_name()),
        };
        (parts.kernel.is_file() && parts.initrd.is_file()).then_some(parts)
    }

    /// Changes whenever a part changes.
    pub(super) fn stamp(&self, agent: &[u8]) -> io::Result<String> {
        Ok(format!(
            "{} {} {}",
            stamp(&self.kernel)?,
            stamp(&self.initrd)?,
            hex::encode(Sha256::digest(agent))
        ))
    }
}

/// Makes `boot/bundle-<hex>/` from the parts and the agent, unless it is there.
pub(super) fn make_bundle(parts: &Parts, agent: &[u8], boot: &Path, temp: &Path) -> io::Result<Bundle> {
    let staging = tempfile::Builder::new().prefix("bundle-").tempdir_in(temp)?;
    let (kernel, initrd) = (staging.path().join("vmlinuz"), staging.path().join("initrd.img"));
    let kernel_sum = copy_hashed(&mut File::open(&parts.kernel)?, &mut File::create(&kernel)?)?;
    let initrd_sum = append_agent(&parts.initrd, agent, &initrd)?;
    let hex = hex::encode(Sha256::digest(format!("cocoon boot bundle\n{kernel_sum}\n{initrd_sum}\n")));
    let folder = boot.join(bundle_folder(&hex));
    private_folder(&folder)?;
    place(&kernel, &folder.join(Boot::Kernel.file_name()))?;
    place(&initrd, &folder.join(Boot::Initrd.file_name()))?;
    sync_folder(boot)?;
    Ok(Bundle { hex, kernel: kernel_sum, initrd: initrd_sum })
}

fn append_agent(base: &Path, agent: &[u8], to: &Path) -> io::Result<String> {
    let mut out = File::options().read(true).write(true).create_new(true).open(to)?;
    let length = io::copy(&mut File::open(base)?, &mut out)?;
    out.write_all(&[0; 4][..cpio::padding(length)])?;
    let init = cpio::Member { name: "init", mode: 0o100_755, data: agent };
    out.write_all(&cpio::archive(&[init]).ok_or(io::ErrorKind::FileTooLarge)?)?;
    out.rewind()?;
    hash(&mut out)
}
