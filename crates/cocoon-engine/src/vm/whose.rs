//! Whose a noted process is: that of a VM in this very folder, or of the folder that this one is a copy of.
//!
//! Entry point: [`Noted::whose`]. A copied data folder holds the same notes as its original, and on the same
//! machine they name a process that runs: the original's. So a note counts only where it was made. Its QEMU was
//! started on the writable disk in the VM's run folder, and a copy of that is another file. Invariants: what does
//! not hold this folder's disk is never taken for the VM, nor ended; what is written down at the start decides
//! first, because a guest that broke into its QEMU could close descriptors in order to be left alone.

use std::{fs, io, path::PathBuf};

use crate::{paths::RunFolder, process::Process, qemu::memory::FileId};

/// A hypervisor as it was noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Noted {
    /// The process.
    pub(crate) process: Process,
    /// The disk that it was started on, if the note has that.
    pub(crate) disk: Option<FileId>,
}

/// Whose a running process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The VM's in this folder.
    Ours,
    /// Another folder's.
    Others,
    /// It holds nothing any more: it is about to be gone, whosesoever it was.
    Ending,
}

impl Noted {
    /// Whose the process is, which runs; `run` is the VM's folder. Not to be seen is an error and no answer.
    pub(crate) fn whose(self, run: &RunFolder) -> io::Result<Whose> {
        let disk = FileId::at(&run.cow())?;
        if disk.is_some() && disk == self.disk {
            return Ok(Whose::Ours);
        }
        let Some(held) = held(self.process)? else { return Ok(Whose::Ending) };
        let ours = match disk {
            Some(disk) => holds(&held, disk)?,
            None => holds_removed(&held, run),
        };
        Ok(if ours { Whose::Ours } else { Whose::Others })
    }
}

/// The descriptors of a process, as links; `None`: it has none, which is so only while it ends.
fn held(process: Process) -> io::Result<Option<Vec<PathBuf>>> {
    let entries = match fs::read_dir(format!("/proc/{}/fd", process.pid)) {
        Ok(entries) => entries,
        Err(error) if is_gone(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut links = Vec::new();
    for entry in entries {
        match entry {
            Ok(entry) => links.push(entry.path()),
            Err(error) if is_gone(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok((!links.is_empty()).then_some(links))
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

fn holds(held: &[PathBuf], disk: FileId) -> io::Result<bool> {
    for link in held {
        // A descriptor may be closed meanwhile.
        if FileId::at(link)? == Some(disk) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the process holds the disk that was removed from here. The kernel says so by the disk's path, and a
/// copy has another path.
fn holds_removed(held: &[PathBuf], run: &RunFolder) -> bool {
    let Some(disk) = real(&run.cow()) else { return false };
    let mut name = disk.into_os_string();
    name.push(" (deleted)");
    held.iter().any(|link| fs::read_link(link).is_ok_and(|target| target.as_os_str() == name))
}

/// The path without links, as far as it is there.
fn real(path: &std::path::Path) -> Option<PathBuf> {
    match fs::canonicalize(path) {
        Ok(real) => Some(real),
        Err(_) => Some(real(path.parent()?)?.join(path.file_name()?)),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        path::Path,
        process::{Child, Command, Stdio},
        sync::Arc,
        time::Duration,
    };

    use cocoon_kit::world::RealWorld;

    use super::*;
    use crate::{
        engine::Engine,
        model::VmState,
        process::pid_file_head,
        vm::{
            Shared,
            tests::{config, running},
        },
    };

    fn sleeping(stdin: impl Into<Stdio>) -> Child {
        Command::new("sleep").arg("600").stdin(stdin).spawn().unwrap()
    }

    fn run(folder: &Path, name: &str) -> RunFolder {
        let run = RunFolder(folder.join(name));
        fs::create_dir(&run.0).unwrap();
        fs::write(run.cow(), "disk").unwrap();
        run
    }

    #[test]
    fn a_process_is_a_vms_only_where_it_holds_the_disk_or_was_started_on_it() {
        let folder = tempfile::tempdir().unwrap();
        let [ours, copy, gone] = ["ours", "copy", "gone"].map(|name| run(folder.path(), name));
        let ids = [&ours, &copy, &gone].map(|run| FileId::at(&run.cow()).unwrap());
        let mut children = [&ours, &gone]
            .map(|run| sleeping(File::open(run.cow()).unwrap()))
            .into_iter()
            .chain([sleeping(Stdio::null())])
            .collect::<Vec<_>>();
        fs::remove_dir_all(&gone.0).unwrap();
        let at = |index: usize, disk| Noted { process: Process::of_pid(children[index].id()).unwrap(), disk };
        for (what, noted, run, whose) in [
            ("as the record says", at(0, ids[0]), &ours, Whose::Ours),
            ("a note without a disk", at(0, None), &ours, Whose::Ours),
            ("a disk that was put back under another number", at(0, ids[1]), &ours, Whose::Ours),
            ("a copy's record", at(0, ids[0]), &copy, Whose::Others),
            ("a copy's note without a disk", at(0, None), &copy, Whose::Others),
            ("a removed folder", at(1, ids[2]), &gone, Whose::Ours),
            ("another one's removed folder", at(0, ids[0]), &gone, Whose::Others),
            ("it let go of its disk in order to be left alone", at(2, ids[0]), &ours, Whose::Ours),
            ("a stranger", at(2, None), &ours, Whose::Others),
        ] {
            assert_eq!(noted.whose(run).unwrap(), whose, "{what}");
        }
        let last = at(2, None);
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(last.whose(&ours).unwrap(), Whose::Ending);
    }

    fn copied(from: &Path, to: &Path) {
        assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
    }

    #[tokio::test]
    async fn an_engine_on_a_copied_folder_neither_has_nor_ends_the_originals_vm() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::create_dir(&one).unwrap();
        let shared = Shared::open(config(&one), Arc::new(RealWorld)).await.unwrap();
        let (mut record, mut runs) = running(&shared).await;
        let stat = fs::read_to_string(format!("/proc/{}/stat", runs.0.id())).unwrap();
        let note = pid_file_head().unwrap() + &stat;
        fs::write(shared.run_folder(&record.vm.id).pid_file(), note).unwrap();
        // The second time it is a record of an older release.
        for disk in [record.disk, None] {
            record.disk = disk;
            shared.records.save(&record).await.unwrap();
            copied(&one, &two);
            let copy = Engine::open(config(&two), Arc::new(RealWorld)).await.unwrap();
            let shown = copy.list().await.unwrap();
            assert_eq!(shown.iter().map(|vm| (vm.state, vm.pid)).collect::<Vec<_>>(), [(VmState::Stale, 0)]);
            assert!(copy.capture("vm-a", "s").await.unwrap_err().to_string().contains("not running"));
            assert!(copy.resume("vm-a").await.is_err());
            copy.stop("vm-a", true, Duration::ZERO).await.unwrap();
            copy.remove("vm-a", false).await.unwrap();
            assert!(copy.gc().await.unwrap().is_empty() && copy.list().await.unwrap().is_empty());
            assert!(runs.0.try_wait().unwrap().is_none(), "the original's process was ended");
            drop(copy);
            fs::remove_dir_all(&two).unwrap();
        }
        let lost = two.join("run").join(&record.vm.id);
        copied(&one, &two);
        fs::remove_file(two.join("root/engine.db")).unwrap();
        Engine::open(config(&two), Arc::new(RealWorld)).await.unwrap();
        assert!(!lost.exists(), "what no record names goes");
        assert!(runs.0.try_wait().unwrap().is_none(), "without its process, which is the original's");
        let original = Engine::open(config(&one), Arc::new(RealWorld)).await.unwrap();
        assert_eq!(original.list().await.unwrap()[0].state, VmState::Running);
        original.remove("vm-a", true).await.unwrap();
        assert!(!record.process.unwrap().alive().unwrap(), "its own folder's engine ends it");
    }
}
