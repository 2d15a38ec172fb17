//! VMs: bring-up and teardown as phases that unwind.
//!
//! What all of them share stands here: the open engine ([`Shared`]), the lock of a VM, small steps.
//! Invariants: whoever changes a VM holds its lock, for one operation; the record exists before
//! anything else of the VM and goes last.

pub(crate) mod bring_up;
pub(crate) mod capture;
pub(crate) mod clone;
pub(crate) mod guest;
pub(crate) mod power;
pub(crate) mod reserve;
pub(crate) mod tear_down;
pub(crate) mod tend;

use std::{
    future::Future,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use cocoon_kit::{files::Lock, world::World};

use crate::{
    db::Db,
    engine::EngineConfig,
    error::{BringUpError, Fault, LookupError},
    hold::kept,
    image,
    model::{Vm, VmState},
    paths::{LogFolder, RunFolder},
    process::Process,
    qemu::{
        qmp::{Qmp, QmpError},
        version::{self, Facts},
    },
    records::{Record, Records},
    snapshot,
};

/// How long QEMU may take to answer on its monitor.
pub(crate) const MONITOR_LIMIT: Duration = Duration::from_secs(20);

/// How long an operation waits for the one that has the VM; a capture of a large guest takes its time.
const LOCK_LIMIT: Duration = Duration::from_secs(300);
/// How often it looks.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The open engine.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Where things are.
    pub(crate) config: EngineConfig,
    /// Clock, ids, randomness.
    pub(crate) world: Arc<dyn World>,
    /// The database.
    pub(crate) db: Db,
    /// VM records.
    pub(crate) records: Records,
    /// Snapshots.
    pub(crate) snapshots: snapshot::store::Store,
    /// Images.
    pub(crate) images: image::Store,
    /// What guests were last seen doing.
    pub(crate) watch: tend::Watch,
    facts: version::Known,
}

impl Shared {
    /// Opens folders, records and stores.
    pub(crate) async fn open(config: EngineConfig, world: Arc<dyn World>) -> Result<Self, Fault> {
        for folder in [&config.root_dir, &config.root_dir.join("locks"), &config.run_dir, &config.log_dir] {
            cocoon_kit::files::private_folder(folder)
                .map_err(|error| Fault::new(format!("engine folder {}", folder.display()), error))?;
        }
        let db = Db::open(&config.root_dir.join("engine.db"))?;
        version::migrate(&db).await?;
        Ok(Self {
            records: Records::open(db.clone()).await?,
            snapshots: snapshot::store::Store::open(&config.root_dir, db.clone()).await?,
            images: image::Store::open(&config.root_dir, db.clone()).await?,
            config,
            world,
            db,
            watch: tend::Watch::default(),
            facts: version::Known::default(),
        })
    }

    /// What this host's QEMU is now. A VM that runs may run on another one.
    pub(crate) async fn facts(&self) -> Result<Facts, BringUpError> {
        if !rustix::process::geteuid().is_root() {
            return Err(BringUpError::HostMissing {
                what: "root (for taps and for running QEMU as a user of its own)".into(),
                remedy: "run this command as root, for example with `sudo`".into(),
            });
        }
        self.facts.facts(&self.db, &self.config.qemu).await
    }

    /// The run folder of a VM.
    #[must_use]
    pub(crate) fn run_folder(&self, id: &str) -> RunFolder {
        RunFolder(self.config.run_dir.join(id))
    }

    /// The log folder of a VM.
    #[must_use]
    pub(crate) fn log_folder(&self, id: &str) -> LogFolder {
        LogFolder(self.config.log_dir.join(id))
    }

    /// The lock file of a VM.
    #[must_use]
    pub(crate) fn lock_file(&self, id: &str) -> PathBuf {
        self.config.root_dir.join("locks").join(format!("{id}.lock"))
    }

    /// Waits for the lock of a VM, for [`LOCK_LIMIT`], and notes in it what it is held for.
    pub(crate) async fn lock(&self, id: &str, operation: &str) -> Result<Lock, Fault> {
        let deadline = Instant::now() + LOCK_LIMIT;
        loop {
            if let Some(lock) = self.try_lock(id)? {
                note(&lock, operation);
                return Ok(lock);
            }
            if Instant::now() >= deadline {
                return Err(held(id, &self.lock_file(id)));
            }
            tokio::time::sleep(LOCK_PAUSE).await;
        }
    }

    /// Takes the lock of a VM if nobody has it.
    pub(crate) fn try_lock(&self, id: &str) -> Result<Option<Lock>, Fault> {
        let path = self.lock_file(id);
        let lock = Lock::try_acquire(&path).map_err(|error| Fault::new(format!("lock of VM {id}"), error))?;
        // On a file that a removal has just unlinked, the lock guards nothing.
        Ok(lock.filter(current))
    }

    /// The record and the lock of an existing VM.
    pub(crate) async fn lock_existing(
        &self,
        reference: &str,
        operation: &str,
    ) -> Result<(Record, Lock), LookupError> {
        let id = self.records.find(reference).await?.vm.id;
        let lock = self.lock(&id, operation).await?;
        match self.records.find(&id).await {
            Ok(record) => Ok((record, lock)),
            Err(error) => {
                // Removed while we waited: the lock file is ours to take away again.
                let _ = std::fs::remove_file(lock.path());
                Err(error)
            }
        }
    }

    /// Whether the VM's hypervisor runs.
    #[must_use]
    pub(crate) fn process_of(&self, record: &Record) -> Option<Process> {
        record.process.filter(|process| process.alive())
    }

    /// Writes a changed record with its time and generation.
    pub(crate) async fn save(&self, record: &mut Record) -> Result<(), Fault> {
        record.vm.updated_at = self.world.now();
        self.records.save(record).await
    }

    /// The object that users see: stored state against the process, and what its guest was last seen
    /// doing.
    #[must_use]
    pub(crate) fn shown(&self, record: Record) -> Vm {
        let process = self.process_of(&record);
        let alive = process.is_some();
        let mut vm = record.vm;
        vm.links_down = record.links_down && alive;
        let starved = process.is_some_and(|process| self.watch.starved(&vm.id, process));
        vm.disk_full = starved && vm.state == VmState::Running && !vm.paused;
        if vm.disk_full {
            vm.warnings.push(tend::sentence(&vm.config.name, &self.run_folder(&vm.id).0));
        }
        if vm.state == VmState::Running && !alive {
            vm.state = VmState::Stale;
            vm.paused = false;
        }
        if vm.state == VmState::Running {
            vm.socket_path = self.run_folder(&vm.id).ctl().display().to_string();
        } else {
            vm.pid = 0;
        }
        vm
    }
}

/// Says in the lock file who holds it. For people only, so a failure means nothing.
fn note(lock: &Lock, operation: &str) {
    let text = format!("{operation} (process {})", std::process::id());
    let _ = lock.file().set_len(0).and_then(|()| lock.file().write_all_at(text.as_bytes(), 0));
}

/// The error of who waited too long.
fn held(id: &str, path: &Path) -> Fault {
    let holder = std::fs::read_to_string(path).unwrap_or_default();
    let holder = if holder.is_empty() { "another operation" } else { holder.as_str() };
    let why = format!(
        "it was held by {holder} for more than {} s; wait for that to end, then try again",
        LOCK_LIMIT.as_secs()
    );
    Fault::new(format!("lock of VM {id}"), io::Error::new(io::ErrorKind::TimedOut, why))
}

/// Whether the lock's file is still the one at its path.
fn current(lock: &Lock) -> bool {
    match (lock.file().metadata(), std::fs::metadata(lock.path())) {
        (Ok(held), Ok(named)) => (held.dev(), held.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Runs blocking work away from the runtime's threads; `step` names it in the error. Begun under a VM's lock, it
/// keeps that until it ends.
pub(crate) async fn blocking<T, E, F>(step: &str, work: F) -> Result<T, Fault>
where
    T: Send + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    F: FnOnce() -> Result<T, E> + Send + 'static,
{
    match tokio::task::spawn_blocking(kept(work)).await {
        Ok(done) => done.map_err(|error| Fault::new(step, error)),
        Err(panicked) => Err(Fault::new(step, panicked)),
    }
}

/// A QMP failure with its VM.
pub(crate) fn monitor(vm: &str, step: &str, error: QmpError) -> Fault {
    Fault::new(format!("{step} of VM {vm}"), error)
}

/// Connects to a VM's command monitor. The caller has the VM's lock, so a transfer of state that is
/// still under way belongs to an operation that was killed: it is ended first.
pub(crate) async fn connect(run: &RunFolder, vm: &str) -> Result<Qmp, Fault> {
    let opened = Qmp::connect(&run.ctl(), MONITOR_LIMIT).await;
    let mut qmp = opened.map_err(|error| monitor(vm, "monitor", error))?;
    qmp.settle(MONITOR_LIMIT).await.map_err(|error| monitor(vm, "ending a left-over transfer", error))?;
    Ok(qmp)
}

/// Waits for `work` while the hypervisor lives; its death ends the wait with what QEMU said.
pub(crate) async fn while_alive<T>(
    process: Process,
    log: &LogFolder,
    vm: &str,
    work: impl Future<Output = T>,
) -> Result<T, Fault> {
    let death = async {
        while process.alive() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = death => Err(Fault::new(format!("QEMU of VM {vm} ended"), tail(&log.qemu()))),
    }
}

/// The last lines of a log, for an error message.
#[must_use]
pub(crate) fn tail(path: &Path) -> String {
    const LINES: usize = 5;
    let text =
        std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default().join("; ");
    if last.is_empty() { format!("{} is empty", path.display()) } else { last }
}
