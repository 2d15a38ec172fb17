//! The way up for a clone: private memory, disk overlay, links down until the guest is itself.
//!
//! Entry point: [`clone_vm`]. What the snapshot says is checked against this host before anything is
//! made. Invariant: no frame leaves a clone before its guest took its own MAC, name and entropy.

use std::{
    fs::File,
    io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use base64::Engine as _;
use cocoon_guest::{host::Channel, protocol::Identity};
use serde_json::json;

use super::{
    Shared, blocking,
    bring_up::{attach, finish, folders, give, kept, launched, started},
    guest, memory, monitor,
    reserve::{check_name, fill, reserve},
    tear_down, while_alive,
    whose::Noted,
};
use crate::{
    embed,
    engine::MemoryRecipe,
    error::{BringUpError, Fault},
    model::{CloneIdentity, CloneSpec, Snapshot, Vm, VmConfig},
    paths::{RunFolder, named, open_read},
    qemu::{
        launch::{Launched, RamSource, ram_file},
        memory::{Ram, copy_sparse},
        qmp::{Qmp, QmpError},
        version::{Facts, machine_type},
    },
    records::Record,
    snapshot::{
        description::{COW, Description, MAX_BYTES, MEMORY_RANGES, MemoryMode, QEMU_JSON, QEMU_STATE},
        qcow2,
    },
};

/// How long a guest's agent may take to answer after `cont`.
const ANSWER_LIMIT: Duration = Duration::from_secs(12);
/// How long it may take to have answered and taken its identity.
const IDENTITY_LIMIT: Duration = Duration::from_secs(17);
/// How long device state may take to load; a full stream of a large guest takes its time.
const LOAD_LIMIT: Duration = Duration::from_secs(600);
/// Bytes of entropy for the guest.
const ENTROPY: usize = 512;

/// Clones a snapshot.
pub(crate) async fn clone_vm(shared: &Arc<Shared>, spec: CloneSpec) -> Result<Vm, BringUpError> {
    check_name(&spec.name)?;
    let facts = shared.facts().await?;
    let snapshot = shared.snapshots.find(&spec.snapshot).await?;
    let description = described(&snapshot).await?;
    description.check(&facts).map_err(|mismatch| BringUpError::SnapshotIncompatible {
        snapshot: snapshot.envelope.name.clone(),
        theirs: mismatch.theirs,
        ours: mismatch.ours,
    })?;
    memory::held(&snapshot.envelope.name, description.machine.memory).await?;
    let boot = shared.images.boot_set_by_digests(&description.boot, &shared.config.boot_bundle).await?;
    let envelope = &snapshot.envelope;
    let config = VmConfig {
        name: spec.name.clone(),
        cpu: description.machine.cpus,
        memory: description.machine.memory,
        storage: description.storage,
        image: envelope.image.clone(),
        image_digest: envelope.image_digest.clone(),
        image_type: envelope.image_type.clone(),
        network: envelope.network.clone(),
        ..VmConfig::default()
    };
    let half = reserve(shared, config, |record| {
        fill(shared, record, &boot, description.machine.clone());
        record.cow.push(shared.run_folder(&record.vm.id).cow_base());
        record.vm.cloned_from.clone_from(&envelope.id);
    })
    .await?;
    let source = Source {
        snapshot: &snapshot,
        description: &description,
        private: private(shared, &facts, &description),
    };
    let done = half.during(woken(shared, half.record().clone(), &source, spec.identity)).await;
    half.end(done).await
}

struct Source<'a> {
    snapshot: &'a Snapshot,
    description: &'a Description,
    private: bool,
}

impl Source<'_> {
    fn file(&self, name: &str) -> PathBuf {
        self.snapshot.folder.join(name)
    }
}

/// Whether this clone's memory is to be mapped privately.
fn private(shared: &Shared, facts: &Facts, description: &Description) -> bool {
    shared.config.memory == MemoryRecipe::Auto
        && description.memory_mode == MemoryMode::Ranges
        && facts.private_memory_tested()
        && embed::shim().is_some()
}

/// Reads a snapshot's `qemu.json`.
pub(crate) async fn described(snapshot: &Snapshot) -> Result<Description, Fault> {
    let path = snapshot.folder.join(QEMU_JSON);
    let step = format!("snapshot {}", snapshot.envelope.name);
    let bytes = blocking(&step, move || read_bounded(&path)).await?;
    Description::parse(&bytes).map_err(|error| Fault::new(step, error))
}

/// Reads a description's bytes, however long the file claims to be.
pub(crate) fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(open_read(path)?, MAX_BYTES), &mut bytes)?;
    Ok(bytes)
}

async fn woken(
    shared: &Shared,
    mut record: Record,
    source: &Source<'_>,
    identity: CloneIdentity,
) -> Result<Vm, BringUpError> {
    let begun = Instant::now();
    folders(shared, &record).await?;
    let (nics, disk) = tokio::join!(attach(shared, &record), overlay(shared, &record, source));
    disk?;
    let prepared = begun.elapsed();
    // Durable before the record says so; a disk that is slow to sync does so beside QEMU's start.
    let (of_disk, nics) = (record.clone(), nics?);
    let (qmp, disk) = tokio::join!(loaded(shared, &mut record, nics, source), kept(shared, &of_disk));
    let mut qmp = qmp?;
    disk?;
    let loaded = begun.elapsed();
    let name = record.vm.config.name.clone();
    for index in 0..record.vm.network_configs.len() {
        set_link(&mut qmp, index, false).await.map_err(|error| monitor(&name, "link", error))?;
    }
    qmp.execute("cont", json!({})).await.map_err(|error| monitor(&name, "resuming", error))?;
    let resumed = begun.elapsed();
    let answered = identified(shared, &mut record, &mut qmp, identity).await?;
    let identified = begun.elapsed();
    let vm = finish(shared, record).await?;
    tracing::info!(
        vm = %name, prepared_ms = prepared.as_millis(), loaded_ms = loaded.as_millis(),
        answered_ms = (resumed + answered).as_millis(), identified_ms = identified.as_millis(),
        total_ms = begun.elapsed().as_millis(), "cloned"
    );
    Ok(vm)
}

/// The snapshot's disk under a second name, and an empty overlay on it.
async fn overlay(shared: &Shared, record: &Record, source: &Source<'_>) -> Result<(), Fault> {
    let run = shared.run_folder(&record.vm.id);
    let (from, storage) = (source.file(COW), source.description.storage);
    let step = format!("disk of VM {}", record.vm.config.name);
    let (base, cow) = (run.cow_base(), run.cow());
    let at = cow.clone();
    blocking(&step, move || {
        let header = disk_header(&from)?;
        if header.size != storage {
            return Err(io::Error::other("the snapshot's disk has another size than its qemu.json says"));
        }
        second_name(&from, &base)?;
        std::fs::write(&at, qcow2::empty(storage).map_err(io::Error::other)?)
    })
    .await?;
    give(&cow, record.uid()).await
}

/// Checks the header of a disk file that may come from outside.
pub(crate) fn disk_header(path: &Path) -> io::Result<qcow2::Header> {
    use std::os::unix::fs::FileExt as _;
    let file = open_read(path)?;
    let length = file.metadata()?.len();
    let mut bytes = [0; qcow2::HEADER];
    let take = usize::try_from(length).unwrap_or(qcow2::HEADER).min(qcow2::HEADER);
    let head = bytes.get_mut(..take).unwrap_or_default();
    file.read_exact_at(head, 0).map_err(|error| named(path, &error))?;
    qcow2::check(head, length).map_err(|error| named(path, &io::Error::other(error)))
}

/// A hard link; a sparse copy where the run folder is on another file system.
fn second_name(from: &Path, to: &Path) -> io::Result<()> {
    match std::fs::hard_link(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {
            let source = open_read(from)?;
            copy_sparse(&source, &File::create_new(to)?, source.metadata()?.len())
        }
        done => done,
    }
}

/// QEMU with the snapshot's state in it, still stopped.
async fn loaded(
    shared: &Shared,
    record: &mut Record,
    nics: Vec<(Option<std::os::fd::OwnedFd>, String)>,
    source: &Source<'_>,
) -> Result<Qmp, BringUpError> {
    let run = shared.run_folder(&record.vm.id);
    let ram = ram_source(record, source, source.private).await?;
    let started_now = launched(shared, record, nics, ram, true).await?;
    let mut private = source.private;
    let mut qmp = greeted(shared, record, &run, started_now).await?;
    let mut launched_now = started_now;
    if private && !is_private(started_now, record.vm.config.memory)? {
        tracing::warn!(vm = %record.vm.config.name, "QEMU did not map the snapshot's memory privately; copying it");
        drop(qmp);
        let noted = Noted { process: started_now.process, disk: Some(started_now.disk) };
        tear_down::kill(shared, &record.vm.id, Some(noted)).await?;
        private = false;
        let (nics, ram) = (attach(shared, record).await?, ram_source(record, source, false).await?);
        launched_now = launched(shared, record, nics, ram, true).await?;
        qmp = greeted(shared, record, &run, launched_now).await?;
    }
    started(shared, record, launched_now, private);
    let name = record.vm.config.name.clone();
    let state = source.file(QEMU_STATE);
    let ranges = source.description.memory_mode == MemoryMode::Ranges;
    let log = shared.log_folder(&record.vm.id);
    let loading = load(&mut qmp, &state, ranges);
    let done = while_alive(launched_now.process, &log, &name, loading).await?;
    done.map_err(|error| monitor(&name, "loading the state", error))?;
    Ok(qmp)
}

async fn greeted(
    shared: &Shared,
    record: &Record,
    run: &RunFolder,
    launched: Launched,
) -> Result<Qmp, Fault> {
    let (name, log) = (&record.vm.config.name, shared.log_folder(&record.vm.id));
    let qmp = while_alive(launched.process, &log, name, super::connect(run, name)).await??;
    let version = qmp.version().map_err(|error| monitor(name, "monitor", error))?;
    // The host's QEMU may have been replaced since the state was compared with it.
    match &record.machine {
        Some(machine) if machine.machine_type != machine_type(version) => Err(Fault::new(
            format!("starting VM {name} as machine {}", machine.machine_type),
            format!("QEMU {version} came up: it was replaced meanwhile; try again"),
        )),
        _ => Ok(qmp),
    }
}

async fn ram_source(record: &Record, source: &Source<'_>, private: bool) -> Result<RamSource, Fault> {
    let size = record.vm.config.memory;
    let ranges = source.file(MEMORY_RANGES);
    let mode = source.description.memory_mode;
    blocking(&format!("memory of VM {}", record.vm.config.name), move || {
        if mode == MemoryMode::Stream {
            return Ok(RamSource::Own(ram_file(size)?));
        }
        let base = open_read(&ranges)?;
        if base.metadata()?.len() != size {
            return Err(io::Error::other("the snapshot's memory has another size than its qemu.json says"));
        }
        if let Some(shim) = embed::shim().filter(|_| private) {
            return Ok(RamSource::Private { base, shim });
        }
        let own = ram_file(size)?;
        copy_sparse(&base, &own, size)?;
        Ok(RamSource::Own(own))
    })
    .await
}

fn is_private(launched: Launched, size: u64) -> Result<bool, Fault> {
    let found = Ram::find(launched.process, launched.ram, size);
    let found = found.map_err(|error| Fault::new("looking at QEMU's mappings", error))?;
    Ok(found.is_some_and(|ram| ram.is_private()))
}

async fn load(qmp: &mut Qmp, state: &Path, ranges: bool) -> Result<(), QmpError> {
    let file = File::open(state)?;
    capabilities(qmp, ranges).await?;
    qmp.pass_fd("state", file.as_fd()).await?;
    qmp.execute("migrate-incoming", json!({ "uri": "fd:state" })).await?;
    qmp.migrated(LOAD_LIMIT).await
}

/// Sets what both ends of a transfer of state must agree on.
pub(crate) async fn capabilities(qmp: &mut Qmp, ranges: bool) -> Result<(), QmpError> {
    let capability = json!([{ "capability": "x-ignore-shared", "state": ranges }]);
    qmp.execute("migrate-set-capabilities", json!({ "capabilities": capability })).await?;
    // The announcement would carry a MAC before the guest has its own; the limit would throttle.
    let parameters = json!({ "announce-rounds": 0, "max-bandwidth": 1_u64 << 40 });
    qmp.execute("migrate-set-parameters", parameters).await.map(drop)
}

async fn set_link(qmp: &mut Qmp, index: usize, up: bool) -> Result<(), QmpError> {
    qmp.execute("set_link", json!({ "name": format!("nic{index}"), "up": up })).await.map(drop)
}

/// Gives the guest its identity and then its links. A guest that does not answer is a warning: the
/// clone runs, its links stay down, and [`identify_again`] tries once more. Returns how long the agent
/// took to answer at all.
async fn identified(
    shared: &Shared,
    record: &mut Record,
    qmp: &mut Qmp,
    kind: CloneIdentity,
) -> Result<Duration, Fault> {
    let (run, name) = (shared.run_folder(&record.vm.id), record.vm.config.name.clone());
    record.identity_is_new = kind == CloneIdentity::New;
    let begun = Instant::now();
    let opened = guest::open(&run, false, ANSWER_LIMIT).await;
    let answered = begun.elapsed();
    let taken = match opened {
        Ok(open) => tell(shared, record, &open.channel, IDENTITY_LIMIT.saturating_sub(answered))
            .await
            .map_err(|error| error.to_string()),
        Err(error) => {
            Err(std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string))
        }
    };
    if let Err(error) = taken {
        tracing::warn!(vm = %name, %error, "the clone's guest did not take its identity; its links stay down");
        record.links_down = true;
        record.vm.warnings = vec![format!(
            "the guest did not take its identity ({error}); its links stay down; `cocoon vm start {name}` tries again"
        )];
        return Ok(answered);
    }
    for index in 0..record.vm.network_configs.len() {
        set_link(qmp, index, true).await.map_err(|error| monitor(&name, "link", error))?;
    }
    record.links_down = false;
    record.vm.warnings.clear();
    Ok(answered)
}

async fn tell(
    shared: &Shared,
    record: &Record,
    channel: &Channel,
    limit: Duration,
) -> Result<(), cocoon_guest::host::GuestError> {
    let mut entropy = [0; ENTROPY];
    shared.world.random(&mut entropy);
    let mut machine = [0; 16];
    shared.world.random(&mut machine);
    let identity = Identity {
        macs: record.vm.network_configs.iter().map(|nic| nic.mac.clone()).collect(),
        hostname: if record.identity_is_new { record.vm.config.name.clone() } else { String::new() },
        machine_id: if record.identity_is_new { hex::encode(machine) } else { String::new() },
        entropy: base64::engine::general_purpose::STANDARD.encode(entropy),
        renew_dhcp: !record.vm.network_configs.is_empty(),
        unix_time_ns: i64::try_from(shared.world.now().as_nanosecond()).unwrap_or(0),
    };
    channel.identity(identity, limit).await
}

/// Tries once more to give a running clone its identity and links.
pub(crate) async fn identify_again(shared: &Shared, record: &mut Record) -> Result<(), BringUpError> {
    let (run, name) = (shared.run_folder(&record.vm.id), record.vm.config.name.clone());
    let kind = if record.identity_is_new { CloneIdentity::New } else { CloneIdentity::Same };
    let mut qmp = super::connect(&run, &name).await?;
    identified(shared, record, &mut qmp, kind).await?;
    if record.links_down {
        // The VM runs, so its logs are there.
        let said = format!("see `cocoon vm logs {name}`");
        return Err(BringUpError::GuestSilent { vm: name, seconds: IDENTITY_LIMIT.as_secs(), said });
    }
    Ok(())
}
