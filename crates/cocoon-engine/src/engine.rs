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
    model::{CloneSpec, Image, RunSpec, Snapshot, Vm},
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

/// The engine. Cheap to clone; all clones are one engine.
#[derive(Debug, Clone)]
pub struct Engine {
    config: Arc<EngineConfig>,
    world: Arc<dyn World>,
}

/// A folder for a snapshot that is being pulled; dropped without [`Engine::snapshot_adopt`], it is removed.
#[derive(Debug)]
pub struct Staging {
    folder: PathBuf,
}

impl Staging {
    /// Where the files go.
    #[must_use]
    pub fn folder(&self) -> &std::path::Path {
        &self.folder
    }
}

fn not_built(what: &str) -> Fault {
    Fault::new(what, "not built yet")
}

impl Engine {
    /// Opens the folders and the records; refuses a data folder of another version.
    pub async fn open(config: EngineConfig, world: Arc<dyn World>) -> Result<Self, Fault> {
        Ok(Self { config: Arc::new(config), world })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        let _ = &self.world;
        &self.config
    }

    /// Boots a VM from a local image and waits until its agent answers.
    pub async fn run(&self, spec: RunSpec) -> Result<Vm, BringUpError> {
        Err(not_built(&spec.name).into())
    }

    /// Clones a snapshot: private memory, disk overlay, NIC down until the guest has its identity.
    pub async fn clone_vm(&self, spec: CloneSpec) -> Result<Vm, BringUpError> {
        Err(not_built(&spec.name).into())
    }

    /// All VMs, oldest first, with `creating` ones, reconciled with their processes.
    pub async fn list(&self) -> Result<Vec<Vm>, LookupError> {
        Err(not_built("list").into())
    }

    /// One VM by id, name or unique id prefix of at least three characters.
    pub async fn inspect(&self, vm: &str) -> Result<Vm, LookupError> {
        Err(not_built(vm).into())
    }

    /// Cold start from the VM's own disk. Running already is success; a paused guest is resumed.
    pub async fn start(&self, vm: &str) -> Result<Vm, BringUpError> {
        Err(not_built(vm).into())
    }

    /// Ends the hypervisor: the guest's power button first, killed after `timeout` or with `force`.
    pub async fn stop(&self, vm: &str, force: bool, timeout: Duration) -> Result<(), ChangeError> {
        let _ = (force, timeout);
        Err(not_built(vm).into())
    }

    /// Removes a VM and all that belongs to it: process, taps, rules, folders, record.
    pub async fn remove(&self, vm: &str, force: bool) -> Result<(), ChangeError> {
        let _ = force;
        Err(not_built(vm).into())
    }

    /// Saves a snapshot named `name`; the guest pauses for the capture only. The name is checked first.
    pub async fn save(&self, vm: &str, name: &str, description: &str) -> Result<Snapshot, ChangeError> {
        let _ = (name, description);
        Err(not_built(vm).into())
    }

    /// Like [`Engine::save`], but the guest stays paused until [`Engine::resume`] or [`Engine::remove`].
    /// An older snapshot of that name is replaced only once the new one is complete. A failed capture
    /// resumes the guest.
    pub async fn capture(&self, vm: &str, name: &str) -> Result<Snapshot, ChangeError> {
        let _ = name;
        Err(not_built(vm).into())
    }

    /// Lets a paused guest go on. Not paused is success.
    pub async fn resume(&self, vm: &str) -> Result<(), ChangeError> {
        Err(not_built(vm).into())
    }

    /// An open channel to the guest agent. `agent_port` is true for the holder of `agent.lock` (the node
    /// agent), else a free port for one CLI call is claimed.
    pub async fn guest(&self, vm: &str, agent_port: bool, limit: Duration) -> Result<GuestPort, ChangeError> {
        let _ = (agent_port, limit);
        Err(not_built(vm).into())
    }

    /// The guest's console so far (`console.log` in the VM's log folder).
    pub async fn console(&self, vm: &str) -> Result<PathBuf, LookupError> {
        Err(not_built(vm).into())
    }

    /// All complete snapshots.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>, LookupError> {
        Err(not_built("snapshots").into())
    }

    /// One complete snapshot by id, name or unique id prefix.
    pub async fn snapshot(&self, snapshot: &str) -> Result<Snapshot, LookupError> {
        Err(not_built(snapshot).into())
    }

    /// Removes a snapshot; VMs cloned from it keep what they need.
    pub async fn snapshot_remove(&self, snapshot: &str) -> Result<(), LookupError> {
        Err(not_built(snapshot).into())
    }

    /// The files of a snapshot, for a push. They do not change while the snapshot exists.
    pub async fn snapshot_files(&self, snapshot: &str) -> Result<Vec<SourceFile>, LookupError> {
        Err(not_built(snapshot).into())
    }

    /// An empty folder on the store's file system, for a pull.
    pub async fn snapshot_staging(&self) -> Result<Staging, Fault> {
        Err(not_built("staging"))
    }

    /// Checks the pulled files (all of `qemu.json`, qcow2 headers, sizes) and makes them the snapshot
    /// `name`, replacing an older one of that name. Keeps `envelope.id` when no other snapshot has it.
    pub async fn snapshot_adopt(&self, staging: Staging, name: &str, envelope: Envelope) -> Result<Snapshot, ChangeError> {
        let _ = (staging, name, envelope);
        Err(not_built("adopt").into())
    }

    /// Imports an image from archive files: an OCI or docker archive, or root file system layers (tar,
    /// lowest first). The same name is replaced. Bytes are streamed; nothing hostile is unpacked.
    pub async fn image_import(&self, name: &str, files: &[PathBuf]) -> Result<Image, ImportError> {
        let _ = (name, files);
        Err(not_built(name).into())
    }

    /// Imports a container image that a registry holds.
    pub async fn image_pull(
        &self,
        name: &str,
        registry: &dyn cocoon_oci::registry::Registry,
        repository: &str,
        reference: &str,
    ) -> Result<Image, ImportError> {
        let _ = (registry, repository, reference);
        Err(not_built(name).into())
    }

    /// All images.
    pub async fn images(&self) -> Result<Vec<Image>, LookupError> {
        Err(not_built("images").into())
    }

    /// One image by ref or digest.
    pub async fn image(&self, image: &str) -> Result<Image, LookupError> {
        Err(not_built(image).into())
    }

    /// Forgets an image; its blobs go at gc.
    pub async fn image_remove(&self, image: &str) -> Result<(), LookupError> {
        Err(not_built(image).into())
    }

    /// Removes what nothing needs: blobs, folders without record, half-made VMs without an owner, taps.
    pub async fn gc(&self) -> Result<Vec<String>, Fault> {
        Err(not_built("gc"))
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
