//! Starts a confined QEMU on descriptors that this process opened.
//!
//! Entry point: [`launch`] (blocks). Invariants: QEMU's process notes itself in the run folder's pid
//! file before it becomes QEMU, so no QEMU of ours is ever without a trace; it inherits exactly the
//! descriptors on its command line; its network namespace is empty.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::{
        fd::{AsRawFd as _, OwnedFd, RawFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::{
    command::{BootWiring, DiskWiring, GUEST_PORTS, NicWiring, Wiring, arguments},
    machine::{Accelerator, Machine},
    memory::FileId,
    version,
};
use crate::{
    cgroup,
    error::Fault,
    paths::{LogFolder, RunFolder, listen, named, open_read},
    process::{Process, pid_file_head},
    records::BootRecord,
    sys::{self, Confinement},
};

/// Where guest memory comes from.
#[derive(Debug)]
pub(crate) enum RamSource {
    /// A RAM file of the VM's own, of the machine's memory size.
    Own(File),
    /// The snapshot's memory, mapped privately by the preloaded shim.
    Private {
        /// Open for reading only.
        base: File,
        /// The shim's code.
        shim: &'static [u8],
    },
}

/// All that a QEMU needs.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The machine.
    pub(crate) machine: Machine,
    /// Shown by `ps`.
    pub(crate) name: String,
    /// VM id, for its control group.
    pub(crate) id: String,
    /// Unprivileged user and group.
    pub(crate) uid: u32,
    /// Kernel and initrd; without them QEMU waits for device state.
    pub(crate) boot: Option<BootRecord>,
    /// erofs files, lowest first.
    pub(crate) layers: Vec<PathBuf>,
    /// The writable disk's files, top first.
    pub(crate) cow: Vec<PathBuf>,
    /// Taps and MACs by NIC index.
    pub(crate) nics: Vec<(Option<OwnedFd>, String)>,
    /// Memory.
    pub(crate) ram: RamSource,
}

/// A started QEMU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launched {
    /// The process.
    pub(crate) process: Process,
    /// The file that its memory maps: its own, or the base if the shim did its work.
    pub(crate) ram: FileId,
    /// Its writable disk: by that it is known as this very folder's (`vm::whose`).
    pub(crate) disk: FileId,
}

/// An anonymous RAM file: nothing of a guest's memory is written to a disk behind its back, and it
/// goes with its last user.
pub(crate) fn ram_file(size: u64) -> io::Result<File> {
    let file = File::from(memfd_create("cocoon-ram", MemfdFlags::CLOEXEC)?);
    file.set_len(size)?;
    Ok(file)
}

/// Descriptors that QEMU inherits.
#[derive(Default)]
struct Kept(Vec<OwnedFd>);

impl Kept {
    fn keep(&mut self, fd: impl Into<OwnedFd>) -> RawFd {
        let fd = fd.into();
        let number = fd.as_raw_fd();
        self.0.push(fd);
        number
    }
}

/// Starts QEMU. On an error nothing runs.
pub(crate) fn launch(qemu: &Path, run: &RunFolder, log: &LogFolder, plan: Plan) -> Result<Launched, Fault> {
    let name = plan.name.clone();
    let started = start(qemu, run, log, plan);
    started.map_err(|error| Fault::new(format!("starting QEMU for VM {name}"), error))
}

fn start(qemu: &Path, run: &RunFolder, log: &LogFolder, plan: Plan) -> io::Result<Launched> {
    let mut kept = Kept::default();
    let mut command = Command::new(qemu);
    // A clean environment: nothing of the agent's reaches a program that runs guests.
    command.env_clear().current_dir("/").stdin(Stdio::null());
    let said = File::options().create(true).append(true).mode(0o600).open(log.qemu())?;
    command.stdout(said.try_clone()?).stderr(said);
    let small_pages = matches!(plan.ram, RamSource::Private { .. });
    let (ram_fd, ram) = wire_ram(&mut command, &mut kept, plan.ram, plan.machine.memory)?;
    let (cow, disk) = cow(&mut kept, &plan.cow)?;
    let wiring = Wiring {
        name: plan.name,
        ram: ram_fd,
        boot: plan.boot.map(|boot| wire_boot(&mut kept, run, boot)).transpose()?,
        console: kept.keep(File::options().create(true).append(true).mode(0o600).open(log.console())?),
        monitors: [kept.keep(listen(&run.ctl())?), kept.keep(listen(&run.events())?)],
        ports: ports(&mut kept, run)?,
        layers: plan.layers.iter().map(|path| layer(&mut kept, path)).collect::<io::Result<_>>()?,
        cow,
        nics: plan
            .nics
            .into_iter()
            .map(|(tap, mac)| NicWiring { tap: tap.map(|tap| kept.keep(tap)), mac })
            .collect(),
    };
    command.args(arguments(&plan.machine, &wiring));
    let group = (plan.machine.accelerator == Accelerator::Kvm).then(version::kvm_group).flatten();
    let confinement = Confinement {
        uid: plan.uid,
        group,
        keep: kept.0,
        pid_file: Some(pid_file(run)?),
        cgroup: cgroup::create(&plan.id),
        oom_score_adj: b"500",
        small_pages,
    };
    let mut child = sys::spawn(command, confinement)?;
    match noted(run, &child) {
        Ok(process) => Ok(Launched { process, ram, disk }),
        Err(error) => {
            // Without its note nobody would ever find it.
            child.kill()?;
            child.wait()?;
            Err(error)
        }
    }
}

/// The started process, as its note has it: by that everybody else knows it.
fn noted(run: &RunFolder, child: &Child) -> io::Result<Process> {
    let noted = Process::of_pid_file(&run.pid_file())?.filter(|process| process.pid == child.id());
    noted.ok_or_else(|| io::Error::other("QEMU's process left no note of itself"))
}

/// The file in which QEMU's process notes itself; this boot is noted already.
fn pid_file(run: &RunFolder) -> io::Result<OwnedFd> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(run.pid_file())?;
    file.write_all(pid_file_head()?.as_bytes())?;
    Ok(file.into())
}

fn wire_ram(
    command: &mut Command,
    kept: &mut Kept,
    source: RamSource,
    size: u64,
) -> io::Result<(RawFd, FileId)> {
    match source {
        RamSource::Own(file) => {
            let id = FileId::of(&file)?;
            Ok((kept.keep(file), id))
        }
        RamSource::Private { base, shim } => {
            let empty = ram_file(size)?;
            let (own, id) = (FileId::of(&empty)?, FileId::of(&base)?);
            command.env("LD_PRELOAD", format!("/proc/self/fd/{}", kept.keep(library(shim)?)));
            command.env("COCOON_SHIM_RAM_DEV", own.device.to_string());
            command.env("COCOON_SHIM_RAM_INO", own.inode.to_string());
            command.env("COCOON_SHIM_BASE_FD", kept.keep(base).to_string());
            Ok((kept.keep(empty), id))
        }
    }
}

/// The shim as a sealed file in memory, made once: all clones share its pages, none can change them.
fn library(shim: &[u8]) -> io::Result<File> {
    static LIBRARY: Mutex<Option<File>> = Mutex::new(None);
    let mut kept = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    let library = match kept.take() {
        Some(library) => library,
        None => {
            let mut new =
                File::from(memfd_create("cocoon-shim", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
            new.write_all(shim)?;
            fcntl_add_seals(&new, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
            new
        }
    };
    kept.insert(library).try_clone()
}

fn wire_boot(kept: &mut Kept, run: &RunFolder, boot: BootRecord) -> io::Result<BootWiring> {
    Ok(BootWiring {
        kernel: kept.keep(boot_file(run, &boot.kernel)?),
        initrd: kept.keep(boot_file(run, &boot.initrd)?),
        cmdline: boot.cmdline,
    })
}

/// Opens a file of the image store. One that is gone comes back with its image.
fn of_image(path: &Path) -> io::Result<File> {
    open_read(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let of_bundle = path.iter().any(|part| part.to_string_lossy().starts_with("bundle-"));
            let way_out = if of_bundle {
                "it was made of the boot bundle; run a new VM of the image, which makes it again, then start this one"
            } else {
                "it belongs to the VM's image; import the image again, then start the VM again"
            };
            io::Error::new(error.kind(), format!("{error}; {way_out}"))
        }
        _ => error,
    })
}

/// QEMU opens kernel and initrd a second time, as its unprivileged user; a file that others may not
/// read is handed over as a copy.
fn boot_file(run: &RunFolder, path: &Path) -> io::Result<File> {
    let mut file = of_image(path)?;
    if file.metadata()?.mode() & 0o004 != 0 {
        return Ok(file);
    }
    let copy = run.0.join(format!("boot-{}", path.file_name().unwrap_or_default().to_string_lossy()));
    let mut to = File::options().write(true).create(true).truncate(true).mode(0o444).open(&copy)?;
    io::copy(&mut file, &mut to)?;
    open_read(&copy)
}

fn ports(kept: &mut Kept, run: &RunFolder) -> io::Result<[RawFd; GUEST_PORTS]> {
    let mut ports = [-1; GUEST_PORTS];
    for (index, port) in ports.iter_mut().enumerate() {
        *port = kept.keep(listen(&run.port(index))?);
    }
    Ok(ports)
}

fn layer(kept: &mut Kept, path: &Path) -> io::Result<DiskWiring> {
    Ok(DiskWiring { chain: vec![kept.keep(of_image(path)?)], qcow2: false, read_only: true })
}

/// The writable disk, and which file its top is.
fn cow(kept: &mut Kept, files: &[PathBuf]) -> io::Result<(DiskWiring, FileId)> {
    let (mut chain, mut top) = (Vec::new(), None);
    for (level, path) in files.iter().enumerate() {
        let file = File::options().read(true).write(level == 0).open(path);
        let file = file.map_err(|error| named(path, &error))?;
        if level == 0 {
            top = Some(FileId::of(&file)?);
        }
        chain.push(kept.keep(file));
    }
    let top = top.ok_or_else(|| io::Error::other("the disk has no file"))?;
    Ok((DiskWiring { chain, qcow2: true, read_only: false }, top))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_file_of_an_image_is_named_with_the_way_to_get_it_back() {
        let folder = tempfile::tempdir().unwrap();
        let (run, lost) = (RunFolder(folder.path().to_owned()), folder.path().join("oci/boot/aa/vmlinuz"));
        let boot = BootRecord { kernel: lost.clone(), initrd: lost.clone(), cmdline: String::new() };
        let errors = [
            wire_boot(&mut Kept::default(), &run, boot).map(drop).unwrap_err(),
            layer(&mut Kept::default(), &lost).map(drop).unwrap_err(),
        ];
        let bundle = of_image(&folder.path().join("oci/boot/bundle-aa/vmlinuz")).unwrap_err().to_string();
        assert!(bundle.contains("run a new VM"), "{bundle}");
        for error in errors {
            let text = error.to_string();
            assert!(text.contains("vmlinuz") && text.contains("import the image again"), "{text}");
            assert_eq!(error.kind(), io::ErrorKind::NotFound);
        }
    }
}
