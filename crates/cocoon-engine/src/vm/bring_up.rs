//! The way up for a fresh guest: name, disks, links, QEMU, first answer.
//!
//! Entry points: [`run`]; [`boot`] for a cold start. A failure in any phase of a run takes everything
//! down again.

use std::{
    os::{fd::OwnedFd, unix::fs::chown},
    path::Path,
    sync::Arc,
    time::Duration,
};

use cocoon_kit::files::private_folder;

use super::{
    Shared, blocking, guest, memory,
    reserve::{check_name, fill, reserve},
    while_alive,
};
use crate::{
    error::{BringUpError, Fault},
    model::{RunSpec, Vm, VmConfig, VmState},
    paths::{LogFolder, RunFolder},
    process::Process,
    qemu::{
        launch::{Launched, Plan, RamSource, launch, ram_file},
        machine::{MAX_CPUS, MAX_MEMORY, MAX_NICS, Machine},
    },
    records::{RamRecord, Record},
};

/// Least guest memory.
const MIN_MEMORY: u64 = 128 << 20;
const MIB: u64 = 1 << 20;

/// Boots a VM from an image and waits until its agent answers.
pub(crate) async fn run(shared: &Arc<Shared>, spec: RunSpec) -> Result<Vm, BringUpError> {
    check(&spec)?;
    memory::fits(&spec.name, spec.memory).await?;
    let facts = shared.facts().await?;
    let boot = shared.images.boot_set(&spec.image, &shared.config.boot_bundle).await?;
    let nics = if shared.config.network.is_some() { spec.nics } else { 0 };
    let sizes = (spec.cpu, spec.memory.next_multiple_of(MIB));
    let machine = Machine::new(&facts.machine_type(), facts.accelerator, sizes, boot.layers.len(), nics);
    let config = VmConfig {
        name: spec.name.clone(),
        cpu: sizes.0,
        memory: sizes.1,
        storage: spec.storage,
        image: boot.image.name.clone(),
        image_digest: boot.image.id.clone(),
        image_type: boot.image.kind.clone(),
        ..VmConfig::default()
    };
    let half = reserve(shared, config, |record| fill(shared, record, &boot, machine)).await?;
    let done = half.during(fresh(shared, half.record().clone())).await;
    half.end(done).await
}

fn check(spec: &RunSpec) -> Result<(), BringUpError> {
    check_name(&spec.name)?;
    let wrong = |what: String| Err(BringUpError::Invalid(format!("VM {}: {what}", spec.name)));
    if !(1..=MAX_CPUS).contains(&spec.cpu) {
        return wrong(format!("{} CPUs are asked for; 1 to {MAX_CPUS} are possible", spec.cpu));
    }
    if spec.memory < MIN_MEMORY {
        return wrong(format!("{} bytes of memory are asked for; the least is {MIN_MEMORY}", spec.memory));
    }
    if spec.memory > MAX_MEMORY {
        let (asked, most) = (memory::in_words(spec.memory), memory::in_words(MAX_MEMORY));
        return wrong(format!("{asked} of memory are asked for; the most that a machine has is {most}"));
    }
    if spec.nics > MAX_NICS {
        return wrong(format!("{} NICs are asked for; the most is {MAX_NICS}", spec.nics));
    }
    Ok(())
}

async fn fresh(shared: &Shared, mut record: Record) -> Result<Vm, BringUpError> {
    folders(shared, &record).await?;
    let cow = shared.run_folder(&record.vm.id).cow();
    shared.images.writable_disk(record.vm.config.storage, &cow).await?;
    give(&cow, record.uid()).await?;
    kept(shared, &record).await?;
    boot(shared, &mut record).await?;
    finish(shared, record).await
}

/// Makes the VM's run and log folders.
pub(crate) async fn folders(shared: &Shared, record: &Record) -> Result<(), Fault> {
    let (run, log) = (shared.run_folder(&record.vm.id), shared.log_folder(&record.vm.id));
    blocking(&format!("folders of VM {}", record.vm.config.name), move || {
        private_folder(&run.0).and_then(|()| private_folder(&log.0))
    })
    .await
}

/// Makes a file the VM's own.
pub(crate) async fn give(path: &Path, uid: u32) -> Result<(), Fault> {
    let path = path.to_owned();
    blocking(&format!("owner of {}", path.display()), move || chown(&path, Some(uid), Some(uid))).await
}

/// Makes the VM's disk survive a power cut. The record that says that the VM runs does, and once it is written
/// a saved state that the VM woke from may be dropped: the disk must not be the one that is missing.
pub(crate) async fn kept(shared: &Shared, record: &Record) -> Result<(), Fault> {
    let run = shared.run_folder(&record.vm.id);
    blocking(&format!("disk of VM {}", record.vm.config.name), move || run.sync()).await
}

/// Links, QEMU, first answer of the guest. On an error the process may still run: the caller unwinds.
pub(crate) async fn boot(shared: &Shared, record: &mut Record) -> Result<(), BringUpError> {
    let nics = attach(shared, record).await?;
    let memory = record.vm.config.memory;
    let ram = blocking("guest memory", move || ram_file(memory)).await?;
    let launched = launched(shared, record, nics, RamSource::Own(ram), false).await?;
    started(shared, record, launched, false);
    let (run, log) = (shared.run_folder(&record.vm.id), shared.log_folder(&record.vm.id));
    answered(record, launched.process, &run, &log, shared.config.boot_timeout).await
}

/// Taps for all NICs of the machine.
pub(crate) async fn attach(
    shared: &Shared,
    record: &Record,
) -> Result<Vec<(Option<OwnedFd>, String)>, Fault> {
    let mut nics = Vec::new();
    for (index, interface) in record.vm.network_configs.iter().enumerate() {
        let tap = match &shared.config.network {
            None => None,
            Some(network) => {
                let made = cocoon_net::links::attach(network, &record.vm.id, index, &interface.mac).await;
                Some(
                    made.map_err(|error| Fault::new(format!("link of VM {}", record.vm.config.name), error))?
                        .fd,
                )
            }
        };
        nics.push((tap, interface.mac.clone()));
    }
    Ok(nics)
}

/// Starts QEMU as the record says.
pub(crate) async fn launched(
    shared: &Shared,
    record: &Record,
    nics: Vec<(Option<OwnedFd>, String)>,
    ram: RamSource,
    incoming: bool,
) -> Result<Launched, Fault> {
    let name = record.vm.config.name.clone();
    let machine = record.machine.clone();
    let plan = Plan {
        machine: machine.ok_or_else(|| Fault::new(format!("VM {name}"), "its record names no machine"))?,
        name: name.clone(),
        id: record.vm.id.clone(),
        uid: record.uid(),
        boot: (!incoming).then(|| record.boot.clone()),
        layers: record.layers.clone(),
        cow: record.cow.clone(),
        nics,
        ram,
    };
    let qemu = shared.config.qemu.clone();
    let (run, log) = (shared.run_folder(&record.vm.id), shared.log_folder(&record.vm.id));
    blocking(&format!("VM {name}"), move || launch(&qemu, &run, &log, plan)).await
}

/// Puts a started QEMU into the record.
pub(crate) fn started(shared: &Shared, record: &mut Record, launched: Launched, private: bool) {
    record.process = Some(launched.process);
    record.disk = Some(launched.disk);
    record.ram = Some(RamRecord { file: launched.ram, private });
    record.vm.pid = launched.process.pid;
    record.vm.started_at = Some(shared.world.now());
    record.vm.transition_generation += 1;
    record.vm.state = VmState::Running;
    record.vm.paused = false;
    record.captured_as = None;
    record.stop_ordered = false;
}

async fn answered(
    record: &Record,
    process: Process,
    run: &RunFolder,
    log: &LogFolder,
    limit: Duration,
) -> Result<(), BringUpError> {
    let name = &record.vm.config.name;
    let opening = guest::open(run, false, limit);
    match while_alive(process, log, name, opening).await? {
        Ok(_channel) => Ok(()),
        Err(error) => {
            let console = super::tail(&log.console());
            tracing::warn!(vm = %name, %error, console, "the guest did not answer");
            // Told here, because a VM whose start failed may be gone, and its logs with it.
            let said = format!("its console says last: {console}; QEMU says: {}", super::tail(&log.qemu()));
            Err(BringUpError::GuestSilent { vm: name.clone(), seconds: limit.as_secs(), said })
        }
    }
}

/// The last phase: the record says that the VM runs.
pub(crate) async fn finish(shared: &Shared, mut record: Record) -> Result<Vm, BringUpError> {
    record.vm.first_booted = true;
    shared.save(&mut record).await?;
    let process = record.process;
    Ok(shared.shown_with(record, process))
}

#[cfg(test)]
mod tests {
    use cocoon_kit::world::RealWorld;

    use super::*;
    use crate::vm::tests::{config, running};

    fn spec(cpu: u64, memory: u64) -> RunSpec {
        RunSpec { name: "vm-a".into(), image: "tiny".into(), cpu, memory, storage: 1 << 30, nics: 0 }
    }

    #[test]
    fn what_no_machine_can_have_is_refused_with_what_it_can_have() {
        for (spec, said) in [
            (spec(1024, MIN_MEMORY), "1024 CPUs are asked for; 1 to 255"),
            (spec(1, MIN_MEMORY - 1), "134217727 bytes of memory are asked for; the least is 134217728"),
            (
                spec(1, 4 << 40),
                "4096.0 GiB of memory are asked for; the most that a machine has is 960.0 GiB",
            ),
        ] {
            let error = check(&spec).unwrap_err().to_string();
            assert!(error.contains("VM vm-a") && error.contains(said), "{error}");
        }
        check(&spec(MAX_CPUS, MAX_MEMORY)).unwrap();
    }

    #[tokio::test]
    async fn a_guest_that_never_answered_is_told_with_the_last_it_said_for_its_logs_go_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let shared = Shared::open(config(folder.path()), Arc::new(RealWorld)).await.unwrap();
        let (record, _runs) = running(&shared).await;
        let (run, log) = (shared.run_folder(&record.vm.id), shared.log_folder(&record.vm.id));
        private_folder(&log.0).unwrap();
        std::fs::write(log.console(), "booting\nKernel panic: no memory\n").unwrap();
        let limit = Duration::from_millis(1);
        let error =
            answered(&record, record.process.unwrap(), &run, &log, limit).await.unwrap_err().to_string();
        assert!(error.contains("guest of vm-a did not answer"), "{error}");
        assert!(
            error.contains("booting; Kernel panic: no memory") && error.contains("QEMU says: nothing"),
            "{error}"
        );
        assert!(!error.contains("vm logs"), "{error}");
    }
}
