//! Disk chains into one standalone file.
//!
//! Entry point: [`flatten`]. `qemu-img` does the work, confined like QEMU itself: the content of a disk
//! is the guest's, so what reads it must not be trusted. It gets descriptors and an explicit chain, and is
//! killed when it takes too long.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::fchown,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::{
    paths::{named, open_read},
    qemu::{limit::Stop, memory::copy_sparse_until, tool::Tool},
};

/// Where `qemu-img` is looked for: nothing else of our environment reaches it.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Writes the disk whose files are `chain` (top first) to `out` as one qcow2 file without a backing
/// file. `top`, if given, stands in for the first file and is removed afterwards. Blocks.
pub(crate) fn flatten(
    top: Option<&Path>,
    chain: &[PathBuf],
    out: &Path,
    uid: u32,
    stop: &Stop,
) -> io::Result<()> {
    match (top, chain) {
        (Some(top), [_]) => return std::fs::rename(top, out),
        (None, [only]) => {
            let from = open_read(only)?;
            copy_sparse_until(&from, &File::create_new(out)?, from.metadata()?.len(), stop)?;
        }
        (_, []) => return Err(io::Error::other("the disk has no file")),
        (_, [first, below @ ..]) => {
            let chain: Vec<&Path> =
                [top.unwrap_or(first)].into_iter().chain(below.iter().map(PathBuf::as_path)).collect();
            convert(&chain, out, uid, stop)?;
        }
    }
    top.map_or(Ok(()), std::fs::remove_file)
}

fn node(files: &[OwnedFd]) -> Value {
    files.iter().rev().fold(Value::Null, |below, file| {
        json!({
            "driver": "qcow2",
            "file": { "driver": "file", "filename": format!("/proc/self/fd/{}", file.as_raw_fd()) },
            "backing": below,
        })
    })
}

fn convert(chain: &[&Path], out: &Path, uid: u32, stop: &Stop) -> io::Result<()> {
    let files =
        chain.iter().map(|path| open_read(path).map(OwnedFd::from)).collect::<io::Result<Vec<_>>>()?;
    if let Some(top) = files.first() {
        fchown(top, Some(uid), Some(uid))?;
    }
    let target = File::options().read(true).write(true).create_new(true).open(out)?;
    fchown(&target, Some(uid), Some(uid))?;
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-q", "-U", "-O", "qcow2"]).arg(format!("json:{}", node(&files)));
    command.arg(format!("/proc/self/fd/{}", target.as_raw_fd()));
    command.env_clear().env("PATH", PATH).current_dir("/");
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut keep = files;
    keep.push(target.into());
    let mut tool = Tool::start(command, uid, None, keep)
        .map_err(|error| named(Path::new("qemu-img (apt-get install qemu-utils)"), &error))?;
    let status = tool.wait(stop)?;
    if status.success() {
        Ok(())
    } else {
        Err(io::Error::other(format!("qemu-img: {status}: {}", tool.said()?)))
    }
}
