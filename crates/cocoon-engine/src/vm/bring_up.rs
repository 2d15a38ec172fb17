//! The way up for a fresh guest: name, disks, links, QEMU, first answer.
//!
//! Entry points: [`run`], [`start`]. A failure in any phase takes everything down again ([`run`]) or
//! leaves a stopped VM in state `error` ([`start`]).

use std::{os::fd::OwnedFd, os::unix::fs::chown, path::Path, time::Duration};

use cocoon_kit::files::{Lock, private_folder};

use super::{Shared, blocking, guest, monitor, tear_down, while_alive};
use crate::{
    error::{BringUpError, Fault},
    image::BootSet,
    model::{Disk, Hypervisor, NetworkInterface, RunSpec, Vm, VmConfig, VmState},
    paths::{LogFolder, RunFolder},
    process::Process,
    qemu::{
        launch::{Launched, Plan, RamSource, launch, ram_file},
        machine::{MAX_LAYERS, MAX_NICS, Machine},
    },
    records::{BootRecord, RamRecord, Record},
};

/// Least guest memory.
const MIN_MEMORY: u64 = 128 << 20;
const MIB: u64 = 1 << 20;

/// Boots a VM from an image and waits until its agent answers.
pub(crate) async fn run(shared: &Shared, spec: RunSpec) -> Result<Vm, BringUpError> {
    check(&spec)?;
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
    let (record, lock) = reserve(shared, config, |record| fill(shared, record, &boot, machine)).await?;
    match fresh(shared, record.clone()).await {
        Ok(vm) => Ok(vm),
        Err(error) => {
            tear_down::unwind(shared, &record, lock).await;
            Err(error)
        }
    }
}

fn check(spec: &RunSpec) -> Result<(), BringUpError> {
    check_name(&spec.name)?;
    let wrong = |what: String| Err(BringUpError::Invalid(format!("VM {}: {what}", spec.name)));
    if !(1..=255).contains(&spec.cpu) {
        return wrong(format!("{} CPUs are asked for; 1 to 255 are possible", spec.cpu));
    }
    if spec.memory < MIN_MEMORY {
        return wrong(format!("{} bytes of memory are asked for; the least is {MIN_MEMORY}", spec.memory));
    }
    if spec.nics > MAX_NICS {
        return wrong(format!("{} NICs are asked for; the most is {MAX_NICS}", spec.nics));
    }
    Ok(())
}

/// `[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}`.
pub(crate) fn check_name(name: &str) -> Result<(), BringUpError> {
    let fits = (1..=63).contains(&name.len());
    let first = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if fits && first && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
        return Ok(());
    }
    Err(BringUpError::Invalid(format!(
        "VM name {name:?} cannot be used: 1 to 63 letters, digits, dots, dashes and underscores, \
         the first a letter or digit"
    )))
}

/// Takes a new id's lock, then the name. The record is written before anything else exists.
pub(crate) async fn reserve(
    shared: &Shared,
    config: VmConfig,
    fill: impl FnOnce(&mut Record),
) -> Result<(Record, Lock), BringUpError> {
    let (id, now) = (shared.world.engine_id(), shared.world.now());
    let lock = shared.lock(&id).await?;
    let mut record = Record::new(Vm {
        id,
        hypervisor: Hypervisor::Qemu,
        state: VmState::Creating,
        config,
        pid: 0,
        socket_path: String::new(),
        network_configs: Vec::new(),
        storage_configs: Vec::new(),
        first_booted: false,
        snapshot_ids: Default::default(),
        paused: false,
        cloned_from: String::new(),
        transition_generation: 0,
        created_at: now,
        updated_at: now,
        started_at: None,
        stopped_at: None,
    });
    fill(&mut record);
    match shared.records.reserve(record).await {
        Ok(record) => Ok((record, lock)),
        Err(error) => {
            let _ = std::fs::remove_file(lock.path());
            Err(error)
        }
    }
}

/// Everything about a VM that is known before it exists.
pub(crate) fn fill(shared: &Shared, record: &mut Record, boot: &BootSet, machine: Machine) {
    let run = shared.run_folder(&record.vm.id);
    record.boot = BootRecord {
        kernel: boot.kernel.clone(),
        initrd: boot.initrd.clone(),
        cmdline: cmdline(&record.vm.config.name, boot.layers.len()),
    };
    record.recorded_boot = Some(boot.recorded());
    record.layers = boot.layers.iter().map(|layer| layer.path.clone()).collect();
    record.image_blob_ids.clone_from(&boot.blob_ids);
    record.cow = vec![run.cow()];
    record.vm.network_configs = interfaces(shared, &record.vm.id, machine.nics());
    record.vm.storage_configs = storage(&record.layers, &run.cow());
    record.machine = Some(machine);
}

fn cmdline(name: &str, layers: usize) -> String {
    let serials: Vec<String> = (0..layers).rev().map(|index| format!("cocoon-layer{index}")).collect();
    format!(
        "console=ttyS0 loglevel=3 panic=-1 net.ifnames=0 boot=cocoon-overlay rw cocoon.layers={} \
         cocoon.cow=cocoon-cow cocoon.hostname={name}",
        serials.join(",")
    )
}

fn interfaces(shared: &Shared, id: &str, nics: usize) -> Vec<NetworkInterface> {
    let bridge = shared.config.network.as_ref().map(|network| network.bridge.clone()).unwrap_or_default();
    let short: String = id.chars().take(8).collect::<String>().to_lowercase();
    (0..nics)
        .map(|index| NetworkInterface {
            tap: format!("bt{short}-{index}"),
            mac: random_mac(shared),
            backend: "bridge".into(),
            bridge_dev: bridge.clone(),
        })
        .collect()
}

/// Random, locally administered, unicast.
fn random_mac(shared: &Shared) -> String {
    let mut bytes = [0_u8; 6];
    shared.world.random(&mut bytes);
    bytes[0] = (bytes[0] & 0xfc) | 0x02;
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

fn storage(layers: &[std::path::PathBuf], cow: &Path) -> Vec<Disk> {
    let layer = |(index, path): (usize, &std::path::PathBuf)| Disk {
        path: path.display().to_string(),
        ro: true,
        serial: format!("cocoon-layer{index}"),
        role: "layer".into(),
    };
    let mut disks: Vec<Disk> = layers.iter().enumerate().map(layer).collect();
    disks.push(Disk {
        path: cow.display().to_string(),
        ro: false,
        serial: "cocoon-cow".into(),
        role: "cow".into(),
    });
    disks
}

async fn fresh(shared: &Shared, mut record: Record) -> Result<Vm, BringUpError> {
    folders(shared, &record).await?;
    let cow = shared.run_folder(&record.vm.id).cow();
    shared.images.writable_disk(record.vm.config.storage, &cow).await?;
    give(&cow, record.uid()).await?;
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

/// Links, QEMU, first answer of the guest. On an error the process may still run: the caller unwinds.
async fn boot(shared: &Shared, record: &mut Record) -> Result<(), BringUpError> {
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
        kernel: record.boot.kernel.clone(),
        initrd: record.boot.initrd.clone(),
        cmdline: record.boot.cmdline.clone(),
        layers: record.layers.clone(),
        cow: record.cow.clone(),
        nics,
        ram,
        incoming,
    };
    let qemu = shared.config.qemu.clone();
    let (run, log) = (shared.run_folder(&record.vm.id), shared.log_folder(&record.vm.id));
    blocking(&format!("VM {name}"), move || launch(&qemu, &run, &log, plan)).await
}

/// Puts a started QEMU into the record.
pub(crate) fn started(shared: &Shared, record: &mut Record, launched: Launched, private: bool) {
    record.process = Some(launched.process);
    record.ram = Some(RamRecord { file: launched.ram, private });
    record.vm.pid = launched.process.pid;
    record.vm.started_at = Some(shared.world.now());
    record.vm.transition_generation += 1;
    record.vm.state = VmState::Running;
    record.vm.paused = false;
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
            tracing::warn!(vm = %name, %error, console = %super::tail(&log.console()), "the guest did not answer");
            Err(BringUpError::GuestSilent { vm: name.clone(), seconds: limit.as_secs() })
        }
    }
}

/// The last phase: the record says that the VM runs.
pub(crate) async fn finish(shared: &Shared, mut record: Record) -> Result<Vm, BringUpError> {
    record.vm.first_booted = true;
    shared.save(&mut record).await?;
    Ok(shared.shown(record))
}

/// Cold start from the VM's own disk. Running is success; paused, the guest goes on; links that are
/// still down are tried again.
pub(crate) async fn start(shared: &Shared, reference: &str) -> Result<Vm, BringUpError> {
    let (mut record, _lock) = shared.lock_existing(reference).await?;
    let name = record.vm.config.name.clone();
    if record.vm.state == VmState::Creating {
        return Err(BringUpError::Invalid(format!("VM {name} is still being created")));
    }
    if shared.process_of(&record).is_some() {
        return go_on(shared, record).await;
    }
    shared.facts().await?;
    tear_down::kill(shared, &record.vm.id, record.process).await?;
    tear_down::unlink(shared, &record.vm.id).await?;
    record.links_down = false;
    match boot(shared, &mut record).await {
        Ok(()) => finish(shared, record).await,
        Err(error) => {
            failed_start(shared, record).await;
            Err(error)
        }
    }
}

async fn go_on(shared: &Shared, mut record: Record) -> Result<Vm, BringUpError> {
    if record.vm.paused {
        super::capture::let_go(shared, &mut record).await?;
    }
    if record.links_down {
        super::clone::identify_again(shared, &mut record).await?;
    }
    record.vm.started_at = Some(shared.world.now());
    shared.save(&mut record).await?;
    Ok(shared.shown(record))
}

async fn failed_start(shared: &Shared, mut record: Record) {
    let ended = tear_down::kill(shared, &record.vm.id, record.process).await;
    let unlinked = tear_down::unlink(shared, &record.vm.id).await;
    halted(shared, &mut record, VmState::Error);
    let saved = shared.save(&mut record).await;
    for error in [ended, unlinked, saved].into_iter().filter_map(Result::err) {
        tracing::warn!(vm = %record.vm.config.name, %error, "cleaning up after a failed start");
    }
}

/// Puts the end of a hypervisor into the record.
pub(crate) fn halted(shared: &Shared, record: &mut Record, state: VmState) {
    record.process = None;
    record.ram = None;
    record.links_down = false;
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
) -> Result<(), crate::error::ChangeError> {
    let (mut record, _lock) = shared.lock_existing(reference).await?;
    let name = record.vm.config.name.clone();
    if record.vm.state == VmState::Creating {
        return Err(crate::error::ChangeError::Invalid(format!("VM {name} is still being created")));
    }
    if let Some(process) = shared.process_of(&record) {
        if !force && !record.vm.paused {
            if let Err(error) = power_down(shared, &record, process, limit).await {
                tracing::info!(vm = %name, %error, "the guest did not power down by itself");
            }
        }
    } else if matches!(record.vm.state, VmState::Stopped | VmState::Created | VmState::Error) {
        return Ok(());
    }
    tear_down::kill(shared, &record.vm.id, record.process).await?;
    tear_down::unlink(shared, &record.vm.id).await?;
    halted(shared, &mut record, VmState::Stopped);
    Ok(shared.save(&mut record).await?)
}

async fn power_down(
    shared: &Shared,
    record: &Record,
    process: Process,
    limit: Duration,
) -> Result<(), Fault> {
    let (run, name) = (shared.run_folder(&record.vm.id), &record.vm.config.name);
    let step = |error| Fault::new(format!("powering VM {name} down"), error);
    // A guest whose first process is our agent knows no power button: its disks are synced first.
    if let Ok(open) = guest::open(&run, false, limit.min(Duration::from_secs(5))).await {
        let sync = cocoon_guest::host::Exec { argv: vec!["sync".into()], ..Default::default() };
        let _ = open.channel.output(sync, limit.min(Duration::from_secs(20))).await;
    }
    let mut qmp = super::connect(&run, name).await?;
    qmp.execute("system_powerdown", serde_json::json!({}))
        .await
        .map_err(|error| monitor(name, "power button", error))?;
    tokio::task::spawn_blocking(move || process.wait(limit))
        .await
        .map_err(|error| Fault::new("waiting", error))?
        .map_err(step)
}

const _: () = assert!(MAX_LAYERS >= crate::image::MAX_LAYERS);
