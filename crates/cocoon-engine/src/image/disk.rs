//! The writable disk of a fresh VM.
//!
//! Entry point: [`create`]. An empty ext4 in a qcow2 is made once a size; every VM gets a copy of it (a
//! few MiB, or a reflink). The raw file that `mkfs.ext4` works on is all zeros, and it is told so: then
//! neither it nor the guest's kernel writes inode tables.

use std::{
    fs::File,
    io,
    path::Path,
    process::{Command, Stdio},
};

use crate::error::Fault;

use super::files::{copy_sparse, place};

/// Smallest disk that ext4 with a journal is of use on.
const MINIMUM: u64 = 16 << 20;

/// Puts a fresh disk of `size` bytes at `dest`, which must not exist. `templates` and `temp` are folders
/// of the store, on one file system.
pub(super) fn create(templates: &Path, temp: &Path, size: u64, dest: &Path) -> Result<(), Fault> {
    let fault = |source: io::Error| Fault::new(format!("writable disk {}", dest.display()), source);
    if size < MINIMUM || !size.is_multiple_of(4096) {
        let message =
            format!("a disk of {size} bytes cannot be made; it must be a multiple of 4096, at least 16 MiB");
        return Err(fault(io::Error::new(io::ErrorKind::InvalidInput, message)));
    }
    let template = templates.join(format!("ext4-{size}.qcow2"));
    if !template.exists() {
        make_template(temp, size, &template)?;
    }
    copy_sparse(&template, dest).map_err(fault)
}

fn make_template(temp: &Path, size: u64, template: &Path) -> Result<(), Fault> {
    let step = || format!("template for disks of {size} bytes");
    let folder =
        tempfile::Builder::new().prefix("disk-").tempdir_in(temp).map_err(|e| Fault::new(step(), e))?;
    let (raw, qcow2) = (folder.path().join("raw"), folder.path().join("qcow2"));
    File::create(&raw).and_then(|file| file.set_len(size)).map_err(|e| Fault::new(step(), e))?;
    let ext4 = "lazy_itable_init=1,lazy_journal_init=1,assume_storage_prezeroed=1,nodiscard";
    tool(
        "mkfs.ext4",
        "e2fsprogs",
        &[&["-q", "-F", "-m0", "-L", "cocoon-cow", "-E", ext4], &[text(&raw)?][..]],
    )?;
    let convert: &[&str] = &["convert", "-f", "raw", "-O", "qcow2", "-o", "lazy_refcounts=off"];
    tool("qemu-img", "qemu-utils", &[convert, &[text(&raw)?, text(&qcow2)?][..]])?;
    place(&qcow2, template).map_err(|e| Fault::new(step(), e))
}

fn text(path: &Path) -> Result<&str, Fault> {
    path.to_str()
        .ok_or_else(|| Fault::new(format!("path {}", path.display()), "not UTF-8; choose another --root-dir"))
}

fn tool(program: &str, package: &str, arguments: &[&[&str]]) -> Result<(), Fault> {
    let run = Command::new(program)
        .args(arguments.iter().flat_map(|part| part.iter()))
        .stdin(Stdio::null())
        .output();
    match run {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => {
            let said = String::from_utf8_lossy(&done.stderr);
            Err(Fault::new(format!("{program} ({})", done.status), said.trim().to_owned()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Fault::new(program, format!("not installed; apt-get install {package}")))
        }
        Err(error) => Err(Fault::new(program, error)),
    }
}
