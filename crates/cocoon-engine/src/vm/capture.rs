//! Snapshots of a running VM: stop, device state, memory, disk, and go on (or not).
//!
//! Entry points: [`snapshot`], [`let_go`]. The record says "paused" before the guest stops and until it
//! goes on, so that a guest frozen by a crash is found and resumed. Invariants: whatever fails, the
//! guest goes on (or stays paused, if it was and only a copy was asked for); nothing half made keeps a
//! name; `captured_as` names a snapshot only while the guest has not run since it was taken.

use std::{
    fs::File,
    io,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use cocoon_oci::snapshot::{Empty, Envelope};
use serde_json::json;

use super::{Shared, blocking, clone::capabilities, connect, monitor};
use crate::{
    disk,
    engine::MemoryRecipe,
    error::{ChangeError, Fault},
    model::{Snapshot, VmState},
    process::Process,
    qemu::{
        memory::{Ram, copy_sparse},
        qmp::{Qmp, QmpError},
        version::Facts,
    },
    records::{RamRecord, Record},
    snapshot::{
        description::{
            COCOON_JSON, COW, Description, FORMAT, MEMORY_RANGES, MemoryMode, QEMU_JSON, QEMU_STATE,
        },
        store::Stage,
    },
};

/// How long the device state may take to be written, while the guest stands still.
const STATE_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of memory that a full stream writes at least each second.
const STREAM_PACE: u64 = 64 << 20;
/// Room beside what is counted: device state, metadata, what the guest touches until it stops.
const SLACK: u64 = 64 << 20;
/// Longest snapshot name.
const MAX_NAME: usize = 255;
/// The overlay's copy while a snapshot is in the making.
const OVERLAY: &str = ".overlay.qcow2";

/// What to take and what to do afterwards.
#[derive(Debug, Clone)]
pub(crate) struct Wish {
    /// Snapshot name.
    pub(crate) name: String,
    /// Free text.
    pub(crate) description: String,
    /// Leave the guest stopped, and replace an older snapshot of the name (hibernation).
    pub(crate) keep_paused: bool,
}

/// Takes a snapshot.
pub(crate) async fn snapshot(shared: &Shared, reference: &str, wish: Wish) -> Result<Snapshot, ChangeError> {
    check_name(&wish.name)?;
    let (mut record, _lock) = shared.lock_existing(reference, "a capture").await?;
    if !wish.keep_paused
        && let Some(holder) = shared.snapshots.holder(&wish.name).await?
    {
        return Err(ChangeError::SnapshotExists { name: wish.name, holder });
    }
    let name = record.vm.config.name.clone();
    let process = match shared.process_of(&record) {
        Some(process) if record.vm.state == VmState::Running => process,
        _ => return Err(ChangeError::NotRunning(name)),
    };
    let facts = shared.facts().await.map_err(|error| Fault::new(format!("VM {name}"), error))?;
    let job = Job::new(shared, &record, process, facts, &wish).await?;
    let job = blocking("free space of the snapshot store", move || {
        let enough = job.room();
        Ok::<_, io::Error>(enough.map(|()| job))
    })
    .await??;
    let mut qmp = connect(&shared.run_folder(&record.vm.id), &name).await?;
    let was_paused = std::mem::replace(&mut record.vm.paused, true);
    record.captured_as = None;
    shared.save(&mut record).await?;
    let (store, size) = (shared.config.root_dir.clone(), job.size);
    let goes_on = !wish.keep_paused && !was_paused;
    let taken = take(shared, &mut record, &mut qmp, job, &wish, goes_on).await;
    let taken = taken.map_err(|error| full(error, &store, size));
    if taken.is_err()
        && let Err(error) = recover(shared, &mut record, &mut qmp, !wish.keep_paused && was_paused).await
    {
        tracing::warn!(vm = %name, %error, "the guest could not be resumed after a failed snapshot");
    }
    taken
}

/// After a failure: the guest goes on, or stands still if that is how a copy found it.
async fn recover(
    shared: &Shared,
    record: &mut Record,
    qmp: &mut Qmp,
    stays_paused: bool,
) -> Result<(), Fault> {
    if stays_paused {
        let stopped = qmp.execute("stop", json!({})).await;
        return stopped.map(drop).map_err(|error| monitor(&record.vm.config.name, "stopping", error));
    }
    resume(shared, record, qmp).await
}

/// Snapshot names hold slashes and colons; no path is ever made of one.
pub(crate) fn check_name(name: &str) -> Result<(), ChangeError> {
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        let rule = format!(
            "snapshot name {name:?} cannot be used: 1 to {MAX_NAME} characters, none of them control characters"
        );
        return Err(ChangeError::Invalid(rule));
    }
    Ok(())
}

struct Job {
    id: String,
    stage: Stage,
    size: u64,
    ram: Ram,
    description: Description,
    cow: Vec<PathBuf>,
    uid: u32,
}

impl Job {
    async fn new(
        shared: &Shared,
        record: &Record,
        process: Process,
        facts: &Facts,
        wish: &Wish,
    ) -> Result<Self, Fault> {
        let step = || format!("snapshot {} of VM {}", wish.name, record.vm.config.name);
        let missing = || Fault::new(step(), "the VM's record is incomplete; start the VM again");
        let machine = record.machine.clone().ok_or_else(missing)?;
        let boot = record.recorded_boot.clone().ok_or_else(missing)?;
        let RamRecord { file, .. } = record.ram.ok_or_else(missing)?;
        let memory = machine.memory;
        let ram = blocking(&step(), move || Ram::find(process, file, memory)).await?;
        let ram = ram.ok_or_else(|| Fault::new(step(), "QEMU's memory mapping is not as recorded"))?;
        let ranges = shared.config.memory == MemoryRecipe::Auto && facts.private_memory_tested();
        let id = shared.world.engine_id();
        Ok(Self {
            stage: shared.snapshots.stage(&id)?,
            id,
            size: machine.memory,
            ram,
            description: Description {
                format: FORMAT,
                qemu_version: facts.version.clone(),
                machine,
                memory_mode: if ranges { MemoryMode::Ranges } else { MemoryMode::Stream },
                boot,
                image_blob_ids: record.image_blob_ids.iter().cloned().collect(),
                storage: record.vm.config.storage,
            },
            cow: record.cow.clone(),
            uid: record.uid(),
        })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.stage.folder().join(name)
    }

    /// Refuses before the guest stops if the disk cannot hold what will be written.
    fn room(&self) -> Result<(), ChangeError> {
        let folder = self.stage.folder();
        let count = || -> io::Result<(u64, u64)> {
            let mut needed = self.ram.footprint()? + SLACK;
            for path in &self.cow {
                // Once as the result, and the overlay's copy on the way.
                needed += std::fs::metadata(path)?.blocks() * 512 * 2;
            }
            Ok((needed, free(folder)?))
        };
        let (needed, free) =
            count().map_err(|error| Fault::new("free space of the snapshot store", error))?;
        if needed > free {
            return Err(ChangeError::DiskFull { folder: folder.display().to_string(), needed, free });
        }
        Ok(())
    }
}

/// Bytes that may still be written below `folder`.
fn free(folder: &Path) -> io::Result<u64> {
    let at = rustix::fs::statvfs(folder)?;
    Ok(at.f_bavail * at.f_frsize)
}

/// A disk that filled up in spite of the check gets the same error as one that was full before.
fn full(error: ChangeError, folder: &Path, needed: u64) -> ChangeError {
    let mut cause: Option<&dyn std::error::Error> = match &error {
        ChangeError::Fault(fault) => Some(fault),
        _ => None,
    };
    while let Some(error) = cause {
        let io = error.downcast_ref::<io::Error>();
        if io.is_some_and(|io| io.kind() == io::ErrorKind::StorageFull) {
            let free = free(folder).unwrap_or(0);
            return ChangeError::DiskFull { folder: folder.display().to_string(), needed, free };
        }
        cause = error.source();
    }
    error
}

async fn take(
    shared: &Shared,
    record: &mut Record,
    qmp: &mut Qmp,
    job: Job,
    wish: &Wish,
    goes_on: bool,
) -> Result<Snapshot, ChangeError> {
    let name = record.vm.config.name.clone();
    let begun = Instant::now();
    let ranges = job.description.memory_mode == MemoryMode::Ranges;
    let state = job.at(QEMU_STATE);
    let limit = state_limit(ranges, job.size);
    freeze(qmp, &state, ranges, limit).await.map_err(|error| monitor(&name, "capturing the state", error))?;
    let frozen = begun.elapsed();
    let (job, overlay) = copied(&name, job, goes_on).await?;
    if goes_on {
        resume(shared, record, qmp).await?;
    }
    let paused = begun.elapsed();
    disk::flatten(overlay, job.cow.clone(), job.at(COW), job.uid).await?;
    let snapshot = described(shared, record, &job, wish).await?;
    let published = shared.snapshots.publish(job.stage, snapshot, wish.keep_paused).await?;
    record.captured_as = (!goes_on).then(|| job.id.clone());
    record.vm.snapshot_ids.insert(job.id, Empty {});
    shared.save(record).await?;
    tracing::info!(
        vm = %name, snapshot = %wish.name, state_ms = frozen.as_millis(), paused_ms = paused.as_millis(),
        total_ms = begun.elapsed().as_millis(), "snapshot taken"
    );
    Ok(published)
}

fn state_limit(ranges: bool, memory: u64) -> Duration {
    let stream = if ranges { 0 } else { memory / STREAM_PACE };
    STATE_LIMIT + Duration::from_secs(stream)
}

async fn freeze(qmp: &mut Qmp, state: &Path, ranges: bool, limit: Duration) -> Result<(), QmpError> {
    let file = File::options().read(true).write(true).create_new(true).open(state)?;
    // Stopped since an earlier capture, QEMU refuses a second one until the guest went on for a moment.
    if qmp.status().await? == "postmigrate" {
        qmp.execute("cont", json!({})).await?;
    }
    qmp.execute("stop", json!({})).await?;
    capabilities(qmp, ranges).await?;
    qmp.pass_fd("state", file.as_fd()).await?;
    qmp.execute("migrate", json!({ "uri": "fd:state" })).await?;
    let done = qmp.migrated(limit).await;
    if done.is_err() {
        // The caller lets the guest go on; what still writes must end first.
        let _ = qmp.execute("migrate_cancel", json!({})).await;
    }
    done
}

/// Copies memory, and for a guest that goes on at once also the disk's top file.
async fn copied(name: &str, job: Job, goes_on: bool) -> Result<(Job, Option<PathBuf>), Fault> {
    blocking(&format!("copying memory of VM {name}"), move || {
        if job.description.memory_mode == MemoryMode::Ranges {
            job.ram.capture(&File::create_new(job.at(MEMORY_RANGES))?, job.size)?;
        }
        let top = job.cow.first().filter(|_| goes_on);
        let copy = match top {
            None => None,
            Some(top) => {
                let (from, path) = (File::open(top)?, job.at(OVERLAY));
                copy_sparse(&from, &File::create_new(&path)?, from.metadata()?.len())?;
                Some(path)
            }
        };
        Ok::<_, io::Error>((job, copy))
    })
    .await
}

async fn described(shared: &Shared, record: &Record, job: &Job, wish: &Wish) -> Result<Snapshot, Fault> {
    let config = &record.vm.config;
    let envelope = Envelope {
        id: job.id.clone(),
        name: wish.name.clone(),
        description: wish.description.clone(),
        image: config.image.clone(),
        image_digest: config.image_digest.clone(),
        image_type: config.image_type.clone(),
        image_blob_ids: record.image_blob_ids.iter().map(|id| (id.clone(), Empty {})).collect(),
        hypervisor: "qemu".into(),
        cpu: config.cpu,
        memory: config.memory,
        storage: config.storage,
        nics: record.vm.network_configs.len() as u64,
        network: config.network.clone(),
        windows: false,
    };
    let sidecar = json!({
        "storage_configs": record.vm.storage_configs,
        "boot_config": {
            "kernel_path": record.boot.kernel, "initrd_path": record.boot.initrd, "cmdline": record.boot.cmdline,
        },
    });
    let (qemu, cocoon) = (job.at(QEMU_JSON), job.at(COCOON_JSON));
    let description = job.description.clone();
    blocking(&format!("description of snapshot {}", wish.name), move || {
        std::fs::write(qemu, serde_json::to_vec_pretty(&description)?)?;
        std::fs::write(cocoon, serde_json::to_vec_pretty(&sidecar)?)
    })
    .await?;
    Ok(Snapshot { envelope, created_at: shared.world.now(), folder: PathBuf::new() })
}

/// Lets the guest of a connected monitor go on, and writes that down.
async fn resume(shared: &Shared, record: &mut Record, qmp: &mut Qmp) -> Result<(), Fault> {
    let name = record.vm.config.name.clone();
    // Written before it runs: a crash in between must not make its snapshot look complete.
    if record.captured_as.take().is_some() {
        shared.save(record).await?;
    }
    qmp.execute("cont", json!({})).await.map_err(|error| monitor(&name, "resuming", error))?;
    record.vm.paused = false;
    shared.save(record).await
}

/// Lets a paused guest go on. Not paused is success.
pub(crate) async fn let_go(shared: &Shared, record: &mut Record) -> Result<(), Fault> {
    let name = record.vm.config.name.clone();
    let mut qmp = connect(&shared.run_folder(&record.vm.id), &name).await?;
    let status = qmp.status().await.map_err(|error| monitor(&name, "status", error))?;
    if status == "running" && !record.vm.paused {
        return Ok(());
    }
    resume(shared, record, &mut qmp).await
}

/// [`let_go`] by name.
pub(crate) async fn let_go_by_name(shared: &Shared, reference: &str) -> Result<(), ChangeError> {
    let (mut record, _lock) = shared.lock_existing(reference, "a resume").await?;
    if record.vm.state != VmState::Running || shared.process_of(&record).is_none() {
        return Err(ChangeError::NotRunning(record.vm.config.name));
    }
    Ok(let_go(shared, &mut record).await?)
}
