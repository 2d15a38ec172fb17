//! The engine's one entry point.
//!
//! Invariants: a VM has one owner at a time (a lock file per VM that spans processes); every failed
//! bring-up is unwound; a base memory or disk file that anything maps is never written.

use std::{path::PathBuf, sync::Arc, time::Duration};

use cocoon_kit::world::World;
use cocoon_net::config::NetworkConfig;
use cocoon_oci::snapshot::{Envelope, SourceFile};

use crate::{
    error::{BringUpError, ChangeError, Fault, ImportError, LookupError},
    gc,
    model::{CloneSpec, Image, RunSpec, Snapshot, Vm, VmState},
    room::{self, Faulty},
    snapshot::{adopt, store::Stage},
    vm::{
        Shared, blocking, bring_up,
        capture::{self, Wish},
        clone, guest, power, tear_down, tend, unreached,
    },
};

/// Whether clones map guest memory privately (ARCHITECTURE.md, "The memory recipe").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryRecipe {
    /// Private mapping where this QEMU version was tested, else the full stream.
    #[default]
    Auto,
    /// Always the full stream (slower, for tests and doubt).
    FullStream,
}

/// Where things are and what the host allows.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Images, snapshots, records (`--root-dir`).
    pub root_dir: PathBuf,
    /// Run folders with the VMs' disks (`--run-dir`); not a tmpfs.
    pub run_dir: PathBuf,
    /// Logs and consoles (`--log-dir`).
    pub log_dir: PathBuf,
    /// Folder with `vmlinuz`, `initrd.img`, `bundle.json`, for images without a kernel.
    pub boot_bundle: PathBuf,
    /// The bridge for NICs; `None`: VMs have no NIC.
    pub network: Option<NetworkConfig>,
    /// `qemu-system-x86_64`.
    pub qemu: PathBuf,
    /// Memory of clones.
    pub memory: MemoryRecipe,
    /// How long a fresh guest may take to answer.
    pub boot_timeout: Duration,
}

/// Runs what must not stop half way, such as a capture with the guest frozen, even if the caller goes
/// away.
async fn to_the_end<T: Send + 'static, E: From<Fault> + Send + 'static>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Result<T, E> {
    match tokio::spawn(work).await {
        Ok(done) => done,
        Err(panicked) => Err(Fault::new("an engine operation", panicked).into()),
    }
}

/// The engine. Cheap to clone; all clones are one engine.
#[derive(Debug, Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

/// A folder for a snapshot that is being pulled; dropped without [`Engine::snapshot_adopt`], it is removed.
#[derive(Debug)]
pub struct Staging {
    stage: Stage,
}

impl Staging {
    /// Where the files go.
    #[must_use]
    pub fn folder(&self) -> &std::path::Path {
        self.stage.folder()
    }
}

impl Engine {
    /// Opens the folders and the records, and takes down what a crash left half made; refuses a data
    /// folder of another version.
    pub async fn open(config: EngineConfig, world: Arc<dyn World>) -> Result<Self, Fault> {
        let shared = Arc::new(Shared::open(config, world).await?);
        let leavings =
            [gc::half_made(&shared).await, gc::strays(&shared).await, shared.snapshots.collect().await];
        for left in leavings {
            match left {
                Ok(gone) => gone.iter().for_each(|what| tracing::info!(what, "removed what a crash left")),
                // The engine serves all the same; `gc` says it again.
                Err(error) => tracing::warn!(%error, "what a crash left could not be removed"),
            }
        }
        Ok(Self { shared })
    }

    /// What was done; a full disk with what it lacks.
    fn told<T, E: Faulty>(&self, done: Result<T, E>) -> Result<T, E> {
        done.map_err(|error| room::explained(&self.shared.config, error))
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.shared.config
    }

    /// Boots a VM from a local image and waits until its agent answers.
    pub async fn run(&self, spec: RunSpec) -> Result<Vm, BringUpError> {
        self.told(bring_up::run(&self.shared, spec).await)
    }

    /// Clones a snapshot: private memory, disk overlay, NIC down until the guest has its identity.
    pub async fn clone_vm(&self, spec: CloneSpec) -> Result<Vm, BringUpError> {
        self.told(clone::clone_vm(&self.shared, spec).await)
    }

    /// All VMs, oldest first, with `creating` ones, reconciled with their processes. One whose process cannot be
    /// looked at makes it an error: neither it nor a list without it would be true.
    pub async fn list(&self) -> Result<Vec<Vm>, LookupError> {
        let records = self.shared.records.list().await?;
        tend::glance(&self.shared, &records).await?;
        let shown = records.into_iter().map(|record| self.shared.shown(record));
        Ok(shown.collect::<Result<_, _>>()?)
    }

    /// One VM by id, name or unique id prefix of at least three characters.
    pub async fn inspect(&self, vm: &str) -> Result<Vm, LookupError> {
        let record = self.shared.records.find(vm).await?;
        tend::glance(&self.shared, std::slice::from_ref(&record)).await?;
        Ok(self.shared.shown(record)?)
    }

    /// The upkeep of running VMs, for whoever keeps the host to call about once a second: cuts their logs,
    /// sees which guests QEMU stopped because the file system of their disk is full ([`Vm::disk_full`]), and
    /// lets those go on once 64 MiB are free there. Never touches a guest that a capture paused. Returns a
    /// line for each guest that goes on.
    pub async fn tend(&self) -> Result<Vec<String>, Fault> {
        tend::all(&self.shared).await
    }

    /// Cold start from the VM's own disk. Running already is success; a paused guest is resumed, one that
    /// stands still on a full disk tries again, and a clone whose guest has not taken its identity yet is
    /// asked again. Goes on to its end if the caller does not wait for it.
    pub async fn start(&self, vm: &str) -> Result<Vm, BringUpError> {
        let (shared, vm) = (Arc::clone(&self.shared), vm.to_owned());
        self.told(to_the_end(async move { power::start(&shared, &vm).await }).await)
    }

    /// Ends the hypervisor: the guest's power button first, killed after `timeout` or with `force`.
    pub async fn stop(&self, vm: &str, force: bool, timeout: Duration) -> Result<(), ChangeError> {
        let (shared, vm) = (Arc::clone(&self.shared), vm.to_owned());
        self.told(to_the_end(async move { power::stop(&shared, &vm, force, timeout).await }).await)
    }

    /// Removes a VM and all that belongs to it: process, taps, rules, folders, record.
    pub async fn remove(&self, vm: &str, force: bool) -> Result<(), ChangeError> {
        let (shared, vm) = (Arc::clone(&self.shared), vm.to_owned());
        self.told(to_the_end(async move { tear_down::remove(&shared, &vm, force).await }).await)
    }

    /// Removes a VM that [`Engine::capture`] left paused, if its guest has not run since the capture that
    /// made the snapshot with id `snapshot`; else [`ChangeError::WentOn`], and the VM stays. What decides
    /// is asked under the VM's lock, so nobody can let the guest go on in between.
    pub async fn remove_captured(&self, vm: &str, snapshot: &str) -> Result<(), ChangeError> {
        let (shared, vm, snapshot) = (Arc::clone(&self.shared), vm.to_owned(), snapshot.to_owned());
        self.told(to_the_end(async move { tear_down::remove_captured(&shared, &vm, &snapshot).await }).await)
    }

    /// Saves a snapshot named `name`; the guest pauses for the capture only, and one that an earlier
    /// [`Engine::capture`] left paused stays paused. The name is checked first.
    pub async fn save(&self, vm: &str, name: &str, description: &str) -> Result<Snapshot, ChangeError> {
        let wish = Wish { name: name.to_owned(), description: description.to_owned(), keep_paused: false };
        self.take(vm, wish).await
    }

    /// Like [`Engine::save`], but the guest stays paused until [`Engine::resume`] or [`Engine::remove`].
    /// An older snapshot of that name is replaced only once the new one is complete. A failed capture
    /// resumes the guest.
    pub async fn capture(&self, vm: &str, name: &str) -> Result<Snapshot, ChangeError> {
        let wish = Wish { name: name.to_owned(), description: String::new(), keep_paused: true };
        self.take(vm, wish).await
    }

    /// Bytes that a capture would hold at most: the memory that was ever touched, what a clone has of its base
    /// included, and the disk. `None`: the VM does not run.
    pub async fn capture_size(&self, vm: &str) -> Result<Option<u64>, LookupError> {
        capture::size(&self.shared, vm).await
    }

    async fn take(&self, vm: &str, wish: Wish) -> Result<Snapshot, ChangeError> {
        let (shared, vm) = (Arc::clone(&self.shared), vm.to_owned());
        self.told(to_the_end(async move { capture::snapshot(&shared, &vm, wish).await }).await)
    }

    /// Lets a paused guest go on. Not paused is success.
    pub async fn resume(&self, vm: &str) -> Result<(), ChangeError> {
        self.told(capture::let_go_by_name(&self.shared, vm).await)
    }

    /// An open channel to the guest agent; [`ChangeError::DiskFull`] at once for a guest that stands still for
    /// want of space. `agent_port` is true for the holder of `agent.lock` (the node
    /// agent), else a free port for one CLI call is claimed.
    pub async fn guest(&self, vm: &str, agent_port: bool, limit: Duration) -> Result<GuestPort, ChangeError> {
        let record = self.shared.records.find(vm).await?;
        let name = record.vm.config.name.clone();
        if record.vm.state != VmState::Running || self.shared.process_of(&record)?.is_none() {
            return Err(ChangeError::NotRunning(name));
        }
        tend::no_space(&self.shared, &record).await?;
        let run = self.shared.run_folder(&record.vm.id);
        let open = guest::open(&run, agent_port, limit).await.map_err(|error| {
            let error = unreached::explained(&run, &name, error);
            Fault::new(format!("guest of VM {name}"), error)
        })?;
        Ok(GuestPort { channel: open.channel, _lock: open.lock })
    }

    /// The guest's console so far (`console.log` in the VM's log folder), cut when it grew too long.
    pub async fn console(&self, vm: &str) -> Result<PathBuf, LookupError> {
        let record = self.shared.records.find(vm).await?;
        let logs = self.shared.log_folder(&record.vm.id);
        let path = logs.console();
        blocking("logs of a VM", move || {
            guest::trim_logs(&logs);
            Ok::<_, std::convert::Infallible>(())
        })
        .await?;
        Ok(path)
    }

    /// All complete snapshots.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>, LookupError> {
        Ok(self.shared.snapshots.list().await?)
    }

    /// One complete snapshot by id, name or unique id prefix.
    pub async fn snapshot(&self, snapshot: &str) -> Result<Snapshot, LookupError> {
        self.shared.snapshots.find(snapshot).await
    }

    /// Removes a snapshot; VMs cloned from it keep what they need.
    pub async fn snapshot_remove(&self, snapshot: &str) -> Result<(), LookupError> {
        self.shared.snapshots.remove(snapshot).await
    }

    /// The files of a snapshot, for a push. They do not change while the snapshot exists.
    pub async fn snapshot_files(&self, snapshot: &str) -> Result<Vec<SourceFile>, LookupError> {
        let found = self.shared.snapshots.find(snapshot).await?;
        Ok(blocking("files of a snapshot", move || adopt::files(&found.folder)).await?)
    }

    /// An empty folder on the store's file system, for a pull.
    pub async fn snapshot_staging(&self) -> Result<Staging, Fault> {
        let id = self.shared.world.engine_id();
        let stage = self.told(self.shared.snapshots.stage(&id))?;
        Ok(Staging { stage })
    }

    /// Checks the pulled files (all of `qemu.json`, qcow2 headers, sizes) and makes them the snapshot
    /// `name`, replacing an older one of that name. Keeps `envelope.id` when no snapshot has it yet.
    pub async fn snapshot_adopt(
        &self,
        staging: Staging,
        name: &str,
        envelope: Envelope,
    ) -> Result<Snapshot, ChangeError> {
        self.told(adopt::adopt(&self.shared, staging.stage, name, envelope).await)
    }

    /// Imports an image from archive files: an OCI or docker archive, or root file system layers (tar,
    /// lowest first). The same name is replaced. Bytes are streamed; nothing hostile is unpacked.
    pub async fn image_import(&self, name: &str, files: &[PathBuf]) -> Result<Image, ImportError> {
        self.told(self.shared.images.import(name, files).await)
    }

    /// [`Engine::image_import`] with choices, such as taking setuid programs without their rights.
    pub async fn image_import_with(
        &self,
        name: &str,
        files: &[PathBuf],
        how: crate::image::ImportOptions,
    ) -> Result<Image, ImportError> {
        self.told(self.shared.images.import_with(name, files, how).await)
    }

    /// Imports a container image that a registry holds.
    pub async fn image_pull(
        &self,
        name: &str,
        registry: &dyn cocoon_oci::registry::Registry,
        repository: &str,
        reference: &str,
    ) -> Result<Image, ImportError> {
        self.told(self.shared.images.pull(name, registry, repository, reference).await)
    }

    /// All images.
    pub async fn images(&self) -> Result<Vec<Image>, LookupError> {
        self.shared.images.list().await
    }

    /// One image by ref or digest.
    pub async fn image(&self, image: &str) -> Result<Image, LookupError> {
        self.shared.images.get(image).await
    }

    /// Forgets an image; its blobs go at gc.
    pub async fn image_remove(&self, image: &str) -> Result<(), LookupError> {
        self.shared.images.remove(image).await
    }

    /// Removes what nothing needs: blobs, folders without record, half-made VMs without an owner, taps.
    /// Does the upkeep of [`Engine::tend`] afterwards: there may be space again.
    pub async fn gc(&self) -> Result<Vec<String>, Fault> {
        let mut lines = gc::all(&self.shared).await?;
        lines.extend(tend::all(&self.shared).await?);
        Ok(lines)
    }
}

/// A channel to the guest, with the port lock that makes it ours.
#[derive(Debug)]
pub struct GuestPort {
    channel: cocoon_guest::host::Channel,
    _lock: cocoon_kit::files::Lock,
}

impl std::ops::Deref for GuestPort {
    type Target = cocoon_guest::host::Channel;

    fn deref(&self) -> &Self::Target {
        &self.channel
    }
}
