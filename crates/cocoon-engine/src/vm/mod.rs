//! VMs: bring-up and teardown as phases that unwind.
//!
//! What all of them share stands here: the open engine ([`Shared`]), the lock of a VM, small steps.
//! Invariants: whoever changes a VM holds its lock, for one operation; the record exists before
//! anything else of the VM and goes last.

pub(crate) mod bring_up;
pub(crate) mod capture;
pub(crate) mod clone;
pub(crate) mod guest;
pub(crate) mod memory;
pub(crate) mod power;
pub(crate) mod reserve;
pub(crate) mod tear_down;
pub(crate) mod tend;
pub(crate) mod unreached;
pub(crate) mod whose;

use std::{
    future::Future,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use cocoon_kit::{files::Lock, world::World};

use self::whose::Whose;
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
            records: Records::open(db.clone(), &config.root_dir, &config.run_dir).await?,
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

    /// The VM's hypervisor, if it runs: one that holds this very folder's disk. That it cannot be looked at is an error and no answer (I5): whoever takes a
    /// running VM for a stopped one starts it a second time or removes it.
    pub(crate) fn process_of(&self, record: &Record) -> Result<Option<Process>, Fault> {
        let Some(noted) = record.noted() else { return Ok(None) };
        let process = noted.process;
        let step =
            || format!("seeing whether QEMU of VM {} (process {}) runs", record.vm.config.name, process.pid);
        let run = self.run_folder(&record.vm.id);
        let ours = process.alive().and_then(|alive| Ok(alive && noted.whose(&run)? == Whose::Ours));
        Ok(ours.map_err(|error| Fault::new(step(), error))?.then_some(process))
    }

    /// Writes a changed record with its time and generation.
    pub(crate) async fn save(&self, record: &mut Record) -> Result<(), Fault> {
        record.vm.updated_at = self.world.now();
        self.records.save(record).await
    }

    /// The object that users see: stored state against the process, and what its guest was last seen
    /// doing.
    pub(crate) fn shown(&self, record: Record) -> Result<Vm, Fault> {
        let process = self.process_of(&record)?;
        Ok(self.shown_with(record, process))
    }

    /// [`Shared::shown`] for who has just seen whether the hypervisor runs.
    #[must_use]
    pub(crate) fn shown_with(&self, record: Record, process: Option<Process>) -> Vm {
        let alive = process.is_some();
        let mut vm = record.vm;
        vm.links_down = record.links_down && alive;
        let starved = process.is_some_and(|process| self.watch.starved(&vm.id, process));
        vm.disk_full = starved && vm.state == VmState::Running && !vm.paused;
        if vm.disk_full {
            vm.warnings.push(tend::sentence(&vm.config.name, &self.run_folder(&vm.id).0));
        }
        if vm.state == VmState::Running && !alive {
            vm.state = if record.stop_ordered { VmState::Stopped } else { VmState::Stale };
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
    let mut qmp = opened
        .map_err(|error| Fault::new(format!("monitor of VM {vm}"), unreached::explained(run, vm, error)))?;
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
        // Without an answer it is looked again: whoever works has a limit of his own.
        while process.alive().unwrap_or(true) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = death => Err(Fault::new(format!("QEMU of VM {vm} ended"), tail(&log.qemu()))),
    }
}

/// The last lines of a log, for an error message. The guest's are what it likes, so they are cut and without
/// control characters.
#[must_use]
pub(crate) fn tail(path: &Path) -> String {
    const LINES: usize = 5;
    const LONGEST: usize = 200;
    let text =
        std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let plain = |line: &str| line.chars().filter(|c| !c.is_control()).take(LONGEST).collect::<String>();
    let last = text.lines().rev().map(|line| plain(line.trim())).filter(|line| !line.is_empty()).take(LINES);
    let last: Vec<String> = last.collect();
    if last.is_empty() { "nothing".to_owned() } else { last.into_iter().rev().collect::<Vec<_>>().join("; ") }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        fs::File,
        process::{Child, Command},
    };

    use cocoon_kit::world::RealWorld;
    use rustix::process::{Resource, Rlimit, setrlimit};

    use super::{reserve::blank, *};
    use crate::{
        engine::{Engine, MemoryRecipe},
        error::ChangeError,
        model::VmConfig,
        qemu::memory::FileId,
    };

    /// Fresh folders, and no QEMU.
    pub(crate) fn config(folder: &Path) -> EngineConfig {
        EngineConfig {
            root_dir: folder.join("root"),
            run_dir: folder.join("run"),
            log_dir: folder.join("log"),
            boot_bundle: folder.join("bundle"),
            network: None,
            qemu: "qemu".into(),
            memory: MemoryRecipe::Auto,
            boot_timeout: Duration::from_secs(1),
        }
    }

    /// Something that runs and is taken for a QEMU; it goes with the test.
    pub(super) struct Runs(pub(super) Child);

    impl Drop for Runs {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A running VM `vm-a`.
    pub(super) async fn running(shared: &Shared) -> (Record, Runs) {
        let id = "A".repeat(26);
        cocoon_kit::files::private_folder(&shared.run_folder(&id).0).unwrap();
        let disk = File::create_new(shared.run_folder(&id).cow()).unwrap();
        let on_disk = FileId::of(&disk).unwrap();
        let runs = Runs(Command::new("sleep").arg("600").stdin(disk).spawn().unwrap());
        let config = VmConfig { name: "vm-a".into(), ..VmConfig::default() };
        let mut record = Record::new(blank(id, config, shared.world.now()));
        record.vm.state = VmState::Running;
        record.process = Process::of_pid(runs.0.id());
        record.disk = Some(on_disk);
        (shared.records.reserve(record).await.unwrap(), runs)
    }

    #[test]
    fn the_end_of_a_log_is_short_and_cannot_speak_to_a_terminal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.log");
        assert_eq!(tail(&path), "nothing");
        std::fs::write(&path, format!("1\n2\n\n3\n4\n\x1b[2J5\n{}\n\r\n", "6".repeat(9000))).unwrap();
        assert_eq!(tail(&path), format!("2; 3; 4; [2J5; {}", "6".repeat(200)));
    }

    const FOLDER: &str = "COCOON_TEST_FOLDER";
    /// Descriptors of the process that has too few.
    const DESCRIPTORS: u64 = 64;

    #[tokio::test]
    async fn a_hypervisor_that_cannot_be_looked_at_is_never_taken_for_one_that_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let shared = Shared::open(config(folder.path()), Arc::new(RealWorld)).await.unwrap();
        let (record, mut runs) = running(&shared).await;
        let other = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "vm::tests::has_too_few_descriptors_for_another_test",
                "--ignored",
                "--nocapture",
            ])
            .env(FOLDER, folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&other.stdout) + String::from_utf8_lossy(&other.stderr);
        assert!(other.status.success(), "{said}");
        assert!(said.contains("1 passed"), "{said}");
        assert_eq!(shared.records.list().await.unwrap(), [record]);
        assert!(runs.0.try_wait().unwrap().is_none(), "it was ended");
    }

    #[tokio::test]
    #[ignore = "no test: the other process of the one above, which starts it"]
    async fn has_too_few_descriptors_for_another_test() {
        let Some(folder) = std::env::var_os(FOLDER) else { return };
        let engine = Engine::open(config(Path::new(&folder)), Arc::new(RealWorld)).await.unwrap();
        let limit = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
        setrlimit(Resource::Nofile, limit).unwrap();
        let mut taken = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            taken.push(file);
        }
        let mut answers = Vec::new();
        for free in 0..12 {
            println!("{free} descriptors are free");
            answers.push(answer(&engine).await);
            taken.pop();
        }
        assert_eq!((answers.first(), answers.last()), (Some(&false), Some(&true)), "{answers:?}");
    }

    /// Whether the engine knew that VM `vm-a` runs; that it does not run would be a lie.
    async fn answer(engine: &Engine) -> bool {
        let listed = engine.list().await;
        if let Ok(vms) = &listed {
            assert_eq!(vms.iter().map(|vm| vm.state).collect::<Vec<_>>(), [VmState::Running]);
        }
        let shown = engine.inspect("vm-a").await;
        assert!(shown.as_ref().map_or(true, |vm| vm.state == VmState::Running), "{shown:?}");
        let size = engine.capture_size("vm-a").await;
        let removed = engine.remove("vm-a", false).await.unwrap_err();
        assert!(
            matches!(removed, ChangeError::ForceRequired(_) | ChangeError::Fault(_)) || doubted(&removed)
        );
        let limit = Duration::from_millis(1);
        let changes = [
            engine.capture("vm-a", "s").await.map(drop).unwrap_err(),
            engine.resume("vm-a").await.unwrap_err(),
            engine.guest("vm-a", false, limit).await.map(drop).unwrap_err(),
        ];
        for error in changes {
            assert!(matches!(error, ChangeError::Fault(_)) || doubted(&error), "{error}");
        }
        assert!(listed.is_ok() || size.is_err());
        listed.is_ok() && matches!(removed, ChangeError::ForceRequired(_))
    }

    fn doubted(error: &ChangeError) -> bool {
        matches!(error, ChangeError::Lookup(LookupError::Fault(_)))
    }
}
