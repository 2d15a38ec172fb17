//! Disk chains into one standalone file.
//!
//! Entry point: [`flatten`]. `qemu-img` does the work, confined like QEMU itself: the content of a disk
//! is the guest's, so what reads it must not be trusted. It gets descriptors and an explicit chain.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::fchown,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::{
    error::Fault,
    paths::{named, open_read},
    qemu::memory::copy_sparse,
    sys::{self, Confinement},
    vm::blocking,
};

/// Where `qemu-img` is looked for: nothing else of our environment reaches it.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Writes the disk whose files are `chain` (top first) to `out` as one qcow2 file without a backing
/// file. `top`, if given, stands in for the first file and is removed afterwards.
pub(crate) async fn flatten(
    top: Option<PathBuf>,
    mut chain: Vec<PathBuf>,
    out: PathBuf,
    uid: u32,
) -> Result<(), Fault> {
    if let (Some(first), Some(copy)) = (chain.first_mut(), &top) {
        first.clone_from(copy);
    }
    blocking(&format!("disk {}", out.display()), move || {
        match chain.as_slice() {
            [only] if top.is_some() => return std::fs::rename(only, &out),
            [only] => {
                let from = open_read(only)?;
                copy_sparse(&from, &File::create_new(&out)?, from.metadata()?.len())?;
            }
            _ => convert(&chain, &out, uid)?,
        }
        top.map_or(Ok(()), std::fs::remove_file)
    })
    .await
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

fn convert(chain: &[PathBuf], out: &Path, uid: u32) -> io::Result<()> {
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
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut keep = files;
    keep.push(target.into());
    let confinement = Confinement {
        uid,
        group: None,
        keep,
        pid_file: None,
        cgroup: None,
        oom_score_adj: b"500",
        no_network: true,
        small_pages: false,
    };
    let mut child = sys::spawn(command, confinement)
        .map_err(|error| named(Path::new("qemu-img (apt-get install qemu-utils)"), &error))?;
    let mut said = String::new();
    if let Some(errors) = child.stderr.take() {
        errors.take(4096).read_to_string(&mut said)?;
    }
    let status = child.wait()?;
    if status.success() {
        Ok(())
    } else {
        Err(io::Error::other(format!("qemu-img: {status}: {}", said.trim())))
    }
}
