//! Snapshots of a running VM: stop, device state, memory, disk, and go on (or not).
//!
//! Entry points: [`snapshot`], [`let_go`], [`size`]. The record says "paused" before the guest stops and until it
//! goes on, so that a guest frozen by a crash is found and resumed. Invariants: a state carries the version of
//! the QEMU that wrote it, whatever the host's is by then; whatever fails, the
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
use serde_json::{Value, json};

use super::{MONITOR_LIMIT, Shared, blocking, clone::capabilities, connect, monitor, tend};
use crate::{
    disk,
    engine::MemoryRecipe,
    error::{ChangeError, Fault, LookupError},
    model::{Snapshot, VmState},
    paths::open_read,
    process::Process,
    qemu::{
        limit::{Stop, limit, limited},
        memory::{Ram, copy_sparse_until},
        qmp::{Qmp, QmpError},
        version::{Facts, private_memory_tested},
    },
    records::{RamRecord, Record},
    room::Left,
    snapshot::{
        description::{
            COCOON_JSON, COW, Description, FORMAT, MEMORY_RANGES, MemoryMode, QEMU_JSON, QEMU_STATE,
        },
        store::Stage,
    },
    sys::write_out,
};

/// How long the device state may take to be written, while the guest stands still.
const STATE_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of memory that a full stream writes at least each second.
const STREAM_PACE: u64 = 64 << 20;
/// Room beside what is counted: device state, metadata, what the guest touches until it stops.
const SLACK: u64 = 64 << 20;
/// Bytes that are written out at once.
const SYNC_PIECE: u64 = 16 << 20;
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
    let process = match shared.process_of(&record)? {
        Some(process) if record.vm.state == VmState::Running => process,
        _ => return Err(ChangeError::NotRunning(name)),
    };
    // Only a warning hangs on it: guests run on, and are saved, while the host's QEMU is being replaced.
    let facts = shared.facts().await.inspect_err(|error| {
        tracing::warn!(vm = %name, error = cocoon_kit::failure::chain(error), "whether this host can load the snapshot is not known");
    });
    let mut qmp = connect(&shared.run_folder(&record.vm.id), &name).await?;
    let version = qmp.version().map_err(|error| monitor(&name, "monitor", error))?.to_owned();
    let mut job = Job::new(shared, &record, process, version, &wish).await?;
    worth_taking(&name, &wish.name, &job.description, facts.as_ref().ok())?;
    let job = blocking("free space of the snapshot store", move || {
        let enough = job.room();
        Ok::<_, io::Error>(enough.map(|()| job))
    })
    .await??;
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

/// Refuses, before the guest stops, a state that no host could load.
///
/// One that only this host cannot load, because its QEMU was upgraded under the guest, is taken all the same, with
/// the version that tells where it wakes. A refusal would protect nothing: the guest's memory would go with
/// the host's next reboot, a delete that has to save would wait for ever, and other nodes still have that QEMU.
/// Nothing is lost by a true label: a wake compares it before it starts or replaces anything, names both
/// sides, and the snapshot stays.
fn worth_taking(
    vm: &str,
    snapshot: &str,
    description: &Description,
    facts: Option<&Facts>,
) -> Result<(), ChangeError> {
    description.is_loadable().map_err(|mismatch| ChangeError::Unloadable {
        vm: vm.to_owned(),
        version: description.qemu_version.clone(),
        theirs: mismatch.theirs,
        ours: mismatch.ours,
    })?;
    if let Some((facts, mismatch)) = facts.and_then(|facts| Some((facts, description.check(facts).err()?))) {
        tracing::warn!(
            vm, snapshot, running = %description.qemu_version, installed = %facts.version,
            "the VM has {}, this host has {} by now: the snapshot wakes where the former is; install that again to \
             wake it here",
            mismatch.theirs, mismatch.ours
        );
    }
    Ok(())
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
    /// Bytes that the copy of the memory will hold, and all files of the disk; set by [`Job::room`].
    memory_bytes: u64,
    disk_bytes: u64,
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
        version: String,
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
        let ranges = shared.config.memory == MemoryRecipe::Auto && private_memory_tested(&version);
        let id = shared.world.engine_id();
        Ok(Self {
            stage: shared.snapshots.stage(&id)?,
            id,
            size: machine.memory,
            memory_bytes: 0,
            disk_bytes: 0,
            ram,
            description: Description {
                format: FORMAT,
                qemu_version: version,
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

    /// Counts what will be written, and refuses before the guest stops if the disk cannot hold it.
    fn room(&mut self) -> Result<(), ChangeError> {
        let fault = |error| Fault::new("free space of the snapshot store", error);
        self.count().map_err(fault)?;
        // The disk once as the result, and the overlay's copy on the way.
        let needed = self.memory_bytes + 2 * self.disk_bytes + SLACK;
        let folder = self.stage.folder();
        let free = tend::free(folder).map_err(fault)?;
        if needed > free {
            return Err(ChangeError::DiskFull { folder: folder.display().to_string(), needed, free });
        }
        Ok(())
    }

    fn count(&mut self) -> io::Result<()> {
        self.memory_bytes = self.ram.footprint()?;
        self.disk_bytes = allocated(&self.cow)?;
        Ok(())
    }
}

/// Bytes that a disk's files really take.
fn allocated(cow: &[PathBuf]) -> io::Result<u64> {
    cow.iter().try_fold(0, |sum, path| Ok(sum + std::fs::metadata(path)?.blocks() * 512))
}

/// Bytes that a capture would hold at most; `None`: the VM does not run.
pub(crate) async fn size(shared: &Shared, reference: &str) -> Result<Option<u64>, LookupError> {
    let record = shared.records.find(reference).await?;
    let Some(process) = shared.process_of(&record)?.filter(|_| record.vm.state == VmState::Running) else {
        return Ok(None);
    };
    let (Some(machine), Some(RamRecord { file, .. })) = (record.machine, record.ram) else {
        return Ok(None);
    };
    let (cow, memory) = (record.cow, machine.memory);
    let counted = blocking("the size of a capture", move || {
        let Some(ram) = Ram::find(process, file, memory)? else { return Ok(None) };
        Ok::<_, io::Error>(Some(ram.footprint()? + allocated(&cow)?))
    });
    Ok(counted.await?)
}

/// A disk that filled up in spite of the check gets the same error as one that was full before, unless it is not
/// bytes that it lacks.
fn full(error: ChangeError, folder: &Path, needed: u64) -> ChangeError {
    match (error, Left::at(folder)) {
        (ChangeError::Fault(fault), Ok(left))
            if cocoon_kit::failure::is_disk_full(&fault) && left.bytes < needed && !left.lacks_inodes() =>
        {
            ChangeError::DiskFull { folder: folder.display().to_string(), needed, free: left.bytes }
        }
        (error, _) => error,
    }
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
    let mut job = remembered(&name, job).await?;
    let mut overlay = None;
    if goes_on {
        (job, overlay) = set_aside(&name, job).await?;
        resume(shared, record, qmp).await?;
    }
    let paused = begun.elapsed();
    let job = flattened(&name, job, overlay, !goes_on).await?;
    let snapshot = described(shared, record, &job, wish);
    let job = written(&name, job, sidecar(record), wish, !goes_on).await?;
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
        let _ = qmp.settle(MONITOR_LIMIT).await;
    }
    done
}

/// Copies memory, unless the stream has it.
async fn remembered(name: &str, job: Job) -> Result<Job, Fault> {
    if job.description.memory_mode != MemoryMode::Ranges {
        return Ok(job);
    }
    let limit = limit(job.memory_bytes, true);
    limited(&format!("copying memory of VM {name}"), limit, move |stop| {
        job.ram.capture(&File::create_new(job.at(MEMORY_RANGES))?, job.size, stop)?;
        Ok(job)
    })
    .await
}

/// Copies the disk's top file, which a guest that goes on writes to.
async fn set_aside(name: &str, job: Job) -> Result<(Job, Option<PathBuf>), Fault> {
    let limit = limit(job.disk_bytes, true);
    limited(&format!("copying the disk of VM {name}"), limit, move |stop| {
        let Some(top) = job.cow.first() else { return Ok((job, None)) };
        let (from, path) = (open_read(top)?, job.at(OVERLAY));
        copy_sparse_until(&from, &File::create_new(&path)?, from.metadata()?.len(), stop)?;
        Ok((job, Some(path)))
    })
    .await
}

/// Makes one file of the disk's chain.
async fn flattened(name: &str, job: Job, overlay: Option<PathBuf>, frozen: bool) -> Result<Job, Fault> {
    let limit = limit(job.disk_bytes, frozen);
    limited(&format!("making one file of the disk of VM {name}"), limit, move |stop| {
        disk::flatten(overlay.as_deref(), &job.cow, &job.at(COW), job.uid, stop)?;
        Ok(job)
    })
    .await
}

/// Puts the descriptions beside memory and disk, and all of it on the disk for good.
async fn written(name: &str, job: Job, sidecar: Value, wish: &Wish, frozen: bool) -> Result<Job, Fault> {
    let limit = limit(job.memory_bytes + job.disk_bytes, frozen);
    limited(&format!("writing out snapshot {} of VM {name}", wish.name), limit, move |stop| {
        std::fs::write(job.at(QEMU_JSON), serde_json::to_vec_pretty(&job.description)?)?;
        std::fs::write(job.at(COCOON_JSON), serde_json::to_vec_pretty(&sidecar)?)?;
        for entry in std::fs::read_dir(job.stage.folder())? {
            sync_until(&open_read(&entry?.path())?, stop)?;
        }
        Ok(job)
    })
    .await
}

/// Makes a file durable piece by piece: nothing ends a system call that writes gigabytes.
fn sync_until(file: &File, stop: &Stop) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut at = 0;
    while at < length {
        stop.check()?;
        write_out(file, at, SYNC_PIECE.min(length - at))?;
        at += SYNC_PIECE;
    }
    stop.check()?;
    file.sync_all()
}

fn described(shared: &Shared, record: &Record, job: &Job, wish: &Wish) -> Snapshot {
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
    Snapshot { envelope, created_at: shared.world.now(), folder: PathBuf::new() }
}

/// What other engines read beside a snapshot.
fn sidecar(record: &Record) -> Value {
    json!({
        "storage_configs": record.vm.storage_configs,
        "boot_config": {
            "kernel_path": record.boot.kernel, "initrd_path": record.boot.initrd, "cmdline": record.boot.cmdline,
        },
    })
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
    if record.vm.state != VmState::Running || shared.process_of(&record)?.is_none() {
        return Err(ChangeError::NotRunning(record.vm.config.name));
    }
    Ok(let_go(shared, &mut record).await?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn a_file_is_written_out_whole_unless_its_time_is_over() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 9000], 2 * SYNC_PIECE - 100).unwrap();
        sync_until(&file, &Stop::default()).unwrap();
        let late = sync_until(&file, &Stop::after(Duration::ZERO)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        sync_until(&tempfile::tempfile().unwrap(), &Stop::default()).unwrap();
    }
}
