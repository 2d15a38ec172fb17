//! Start and stop of VMs that exist.
//!
//! Entry points: [`start`], [`stop`]. A start that fails leaves a stopped VM in state `error`. Both go on to
//! their end if whoever waits goes away ([`crate::engine::Engine`]).

use std::time::Duration;

use cocoon_guest::host::Exec;

use super::{
    Shared, blocking,
    bring_up::{boot, finish},
    capture, clone, guest, memory, monitor, tear_down, tend,
};
use crate::{
    error::{BringUpError, ChangeError, Fault},
    hold::Hold,
    model::{Vm, VmState},
    paths::RunFolder,
    process::Process,
    records::Record,
};

/// The agent's own way to end the guest in order.
const AGENT_POWER_OFF: [&str; 2] = ["/run/cocoon/agent", "poweroff"];
/// How long the agent may take to be reached before the power button alone is tried.
const AGENT_LIMIT: Duration = Duration::from_secs(5);

/// Cold start from the VM's own disk. Running is success; paused or stopped for want of space, the guest
/// goes on; links that are still down are tried again.
pub(crate) async fn start(shared: &Shared, reference: &str) -> Result<Vm, BringUpError> {
    let (record, lock) = shared.lock_existing(reference, "start").await?;
    Hold::new(lock).during(up(shared, record)).await
}

async fn up(shared: &Shared, mut record: Record) -> Result<Vm, BringUpError> {
    let name = record.vm.config.name.clone();
    if record.vm.state == VmState::Creating {
        return Err(BringUpError::Invalid(format!("VM {name} is still being created")));
    }
    if let Some(process) = shared.process_of(&record)? {
        return go_on(shared, record, process).await;
    }
    memory::fits(&name, record.vm.config.memory).await?;
    let facts = shared.facts().await?;
    record.machine =
        record.machine.map(|machine| machine.booted_on(&facts.machine_type(), facts.accelerator));
    tear_down::end(shared, &record.vm.id, record.noted()).await?;
    record.links_down = false;
    match boot(shared, &mut record).await {
        Ok(()) => finish(shared, record).await,
        Err(error) => {
            failed_start(shared, record).await;
            Err(error)
        }
    }
}

async fn go_on(shared: &Shared, mut record: Record, process: Process) -> Result<Vm, BringUpError> {
    if record.vm.paused || tend::is_starved(shared, &record).await? {
        capture::let_go(shared, &mut record).await?;
        tend::is_starved(shared, &record).await?;
    }
    if record.links_down {
        clone::identify_again(shared, &mut record).await?;
    }
    record.vm.started_at = Some(shared.world.now());
    record.stop_ordered = false;
    shared.save(&mut record).await?;
    Ok(shared.shown_with(record, Some(process)))
}

async fn failed_start(shared: &Shared, mut record: Record) {
    let ended = tear_down::end(shared, &record.vm.id, record.noted()).await;
    halted(shared, &mut record, VmState::Error);
    let saved = shared.save(&mut record).await;
    for error in [ended, saved].into_iter().filter_map(Result::err) {
        tracing::warn!(vm = %record.vm.config.name, %error, "cleaning up after a failed start");
    }
}

/// Puts the end of a hypervisor into the record.
pub(crate) fn halted(shared: &Shared, record: &mut Record, state: VmState) {
    record.process = None;
    record.disk = None;
    record.ram = None;
    record.links_down = false;
    record.vm.warnings.clear();
    record.vm.pid = 0;
    record.vm.paused = false;
    record.vm.state = state;
    record.vm.stopped_at = Some(shared.world.now());
    record.vm.transition_generation += 1;
}

/// Stops a VM: the guest's power button, then the end of the process.
pub(crate) async fn stop(
    shared: &Shared,
    reference: &str,
    force: bool,
    limit: Duration,
) -> Result<(), ChangeError> {
    let (mut record, _lock) = shared.lock_existing(reference, "stop").await?;
    let name = record.vm.config.name.clone();
    if record.vm.state == VmState::Creating {
        return Err(ChangeError::Invalid(format!("VM {name} is still being created")));
    }
    if let Some(process) = shared.process_of(&record)? {
        record.stop_ordered = true;
        shared.save(&mut record).await?;
        if !force
            && !record.vm.paused
            && let Err(error) = power_down(shared, &record, process, limit).await
        {
            tracing::info!(vm = %name, %error, "the guest did not power down by itself");
        }
    } else if matches!(record.vm.state, VmState::Stopped | VmState::Created | VmState::Error) {
        // A start whose process was killed leaves a QEMU that only the pid file knows.
        return Ok(tear_down::kill(shared, &record.vm.id, None).await.map(drop)?);
    }
    tear_down::end(shared, &record.vm.id, record.noted()).await?;
    halted(shared, &mut record, VmState::Stopped);
    Ok(shared.save(&mut record).await?)
}

/// Asks the guest's agent and presses the power button, then waits for the hypervisor's end.
async fn power_down(
    shared: &Shared,
    record: &Record,
    process: Process,
    limit: Duration,
) -> Result<(), Fault> {
    let (run, name) = (shared.run_folder(&record.vm.id), &record.vm.config.name);
    // An agent that is the guest's first process ends the guest in order; it knows no power button.
    let open = guest::open(&run, false, limit.min(AGENT_LIMIT)).await;
    // Kept until the end: a session that is dropped ends its command.
    let session = match &open {
        Ok(open) => {
            let argv = AGENT_POWER_OFF.map(str::to_owned).to_vec();
            open.channel.exec(Exec { argv, ..Exec::default() }).await.ok()
        }
        Err(_) => None,
    };
    let pressed = press(&run, name).await;
    // A guest that its agent ends may be gone before its button is pressed.
    if let Err(error) = pressed
        && session.is_none()
        && process.alive().unwrap_or(true)
    {
        return Err(error);
    }
    blocking(&format!("the end of VM {name}"), move || process.wait(limit)).await
}

/// Presses the guest's power button.
async fn press(run: &RunFolder, name: &str) -> Result<(), Fault> {
    let mut qmp = super::connect(run, name).await?;
    let pressed = qmp.execute("system_powerdown", serde_json::json!({})).await;
    pressed.map(drop).map_err(|error| monitor(name, "power button", error))
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, sync::Arc};

    use cocoon_kit::world::RealWorld;

    use super::*;
    use crate::vm::tests::{config, running};

    #[tokio::test]
    async fn whoever_looks_while_a_vm_is_being_stopped_sees_no_crash() {
        let folder = tempfile::tempdir().unwrap();
        let shared = Shared::open(config(folder.path()), Arc::new(RealWorld)).await.unwrap();
        let (record, mut runs) = running(&shared).await;
        // Its monitor takes the connection and says nothing: the stop takes its time.
        let _silent = UnixListener::bind(shared.run_folder(&record.vm.id).ctl()).unwrap();
        let ordered = async {
            while !shared.records.find("vm-a").await.unwrap().stop_ordered {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            stopped = stop(&shared, "vm-a", false, Duration::from_secs(600)) => panic!("{stopped:?}"),
            () = ordered => {}
        }
        runs.0.kill().unwrap();
        runs.0.wait().unwrap();
        let between = shared.records.find("vm-a").await.unwrap();
        assert_eq!(between.vm.state, VmState::Running, "the end of the stop is not written yet");
        assert_eq!(shared.shown(between).unwrap().state, VmState::Stopped);
        // A process that ends without an order did so by itself.
        assert_eq!(shared.shown(record).unwrap().state, VmState::Stale);
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_is_no_success_while_qemu_does_not_say_that_the_guest_runs() {
        let folder = tempfile::tempdir().unwrap();
        let shared = Shared::open(config(folder.path()), Arc::new(RealWorld)).await.unwrap();
        let (record, _runs) = running(&shared).await;
        // It takes the connection and says nothing: QEMU hangs.
        let _silent = UnixListener::bind(shared.run_folder(&record.vm.id).ctl()).unwrap();
        for paused in [false, true] {
            let wanted = Record { vm: Vm { paused, ..record.vm.clone() }, ..record.clone() };
            shared.records.save(&wanted).await.unwrap();
            let error = start(&shared, "vm-a").await.unwrap_err();
            assert!(
                matches!(error, BringUpError::Fault(_)) && error.to_string().contains("VM vm-a"),
                "{error}"
            );
            assert_eq!(
                shared.records.find("vm-a").await.unwrap(),
                wanted,
                "nothing is known, so nothing is noted"
            );
        }
    }
}
