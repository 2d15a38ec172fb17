//! The way down: process, links, control group, folders, record, in this order.
//!
//! Entry point: [`all`]. Each step is done whether or not the VM ever got that far, and not there is
//! success, so this also unwinds a bring-up from any phase and finishes what a crash began.

use std::time::Duration;

use cocoon_kit::files::Lock;

use super::{
    Shared, blocking,
    whose::{Noted, Whose},
};
use crate::{
    cgroup,
    error::{ChangeError, Fault},
    paths::remove_folder,
    process::Process,
    records::Record,
};

/// How long a killed QEMU may take to be gone.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// Removes a VM by name if its guest has not run since the capture that made `snapshot`.
pub(crate) async fn remove_captured(
    shared: &Shared,
    reference: &str,
    snapshot: &str,
) -> Result<(), ChangeError> {
    let (record, lock) = shared.lock_existing(reference, "removal of a hibernated VM").await?;
    if record.captured_as.as_deref() != Some(snapshot) {
        return Err(ChangeError::WentOn(record.vm.config.name));
    }
    Ok(all(shared, &record, lock).await?)
}

/// Removes a VM by name. One that runs is removed only with `force`.
pub(crate) async fn remove(shared: &Shared, reference: &str, force: bool) -> Result<(), ChangeError> {
    let (record, lock) = shared.lock_existing(reference, "removal").await?;
    if !force && shared.process_of(&record)?.is_some() {
        return Err(ChangeError::ForceRequired(record.vm.config.name));
    }
    Ok(all(shared, &record, lock).await?)
}

/// Removes a VM and all that belongs to it; `lock` is the VM's.
pub(crate) async fn all(shared: &Shared, record: &Record, lock: Lock) -> Result<(), Fault> {
    parts(shared, &record.vm.id, record.noted()).await?;
    shared.records.remove(&record.vm.id).await?;
    // Unlinked while held: who waits for it sees that its file is gone and looks again.
    let _ = std::fs::remove_file(lock.path());
    Ok(())
}

/// Everything but the record.
pub(crate) async fn parts(shared: &Shared, id: &str, recorded: Option<Noted>) -> Result<(), Fault> {
    end(shared, id, recorded).await?;
    let (run, log) = (shared.run_folder(id), shared.log_folder(id));
    blocking(&format!("folders of VM {id}"), move || {
        remove_folder(&run.0).and_then(|()| remove_folder(&log.0))
    })
    .await
}

/// Ends the hypervisor and takes the VM's links away: unless that is another folder's hypervisor, whose links
/// they are.
pub(crate) async fn end(shared: &Shared, id: &str, recorded: Option<Noted>) -> Result<(), Fault> {
    if kill(shared, id, recorded).await? { unlink(shared, id).await } else { Ok(()) }
}

/// Ends the hypervisor, and everything of it that is not on a disk. Returns whether there is none any more: one
/// that does not hold this folder's disk is another folder's, and goes on.
pub(crate) async fn kill(shared: &Shared, id: &str, recorded: Option<Noted>) -> Result<bool, Fault> {
    let run = shared.run_folder(id);
    let group = id.to_owned();
    blocking(&format!("ending QEMU of VM {id}"), move || {
        let by_pid_file = Process::of_pid_file(&run.pid_file())?;
        let by_pid_file =
            by_pid_file.filter(|process| recorded.is_none_or(|noted| noted.process != *process));
        let by_pid_file = by_pid_file.map(|process| Noted { process, disk: None });
        let mut gone = true;
        for noted in recorded.into_iter().chain(by_pid_file) {
            let is_ours = || noted.whose(&run).map(|whose| whose != Whose::Others);
            if !noted.process.kill(KILL_LIMIT, is_ours)? {
                let pid = noted.process.pid;
                tracing::warn!(
                    vm = group,
                    pid,
                    "this process has the VM of another data folder; it is left alone"
                );
                gone = false;
            }
        }
        if gone {
            cgroup::remove(&group);
        }
        Ok::<_, std::io::Error>(gone)
    })
    .await
}

/// Takes the VM's links away.
async fn unlink(shared: &Shared, id: &str) -> Result<(), Fault> {
    let Some(network) = &shared.config.network else { return Ok(()) };
    let gone = cocoon_net::links::detach(network, id).await;
    gone.map_err(|error| Fault::new(format!("links of VM {id}"), error))
}

/// Unwinds a bring-up that failed. Its own failures are logged: the first error is the one to report,
/// and gc finds the rest by the record.
pub(crate) async fn unwind(shared: &Shared, record: &Record, lock: Lock) {
    if let Err(error) = all(shared, record, lock).await {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        tracing::warn!(vm = %record.vm.config.name, %error, cause, "a failed VM left parts; `cocoon gc` takes them");
    }
}
