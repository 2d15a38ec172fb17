//! What the agent needs from the world, as narrow async traits with small values of its own.
//!
//! Entry point: [`Ports`]. `real` has the adapters, `fake` (tests) the in-memory ones.
//! No trait has default bodies: what an adapter leaves out must not compile (a removal that asks nothing, a size
//! that is nothing). Invariants: "not there" is `None`, never an error, and only ever the authoritative answer (I5);
//! [`Records::put`] returns after the row would survive a power cut.

#[cfg(test)]
pub mod fake;
pub mod real;

use std::{
    collections::{BTreeMap, BTreeSet},
    error::Error as StdError,
    fmt,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use cocoon_guest::host::{Exec, ExecSession};
use thiserror::Error;

use crate::{
    reason::{Reason, Trouble},
    record::OwnerRecord,
};

/// Why a port did not do what was asked.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct PortError {
    /// The stable word.
    pub reason: Reason,
    /// What was tried, on which object.
    pub message: String,
    #[source]
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl PortError {
    /// An error that carries no other.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), source: None }
    }

    /// An error with its cause.
    pub fn caused(
        reason: Reason,
        message: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self { reason, message: message.into(), source: Some(source.into()) }
    }

    /// The whole chain in one sentence, for a pod's status.
    #[must_use]
    pub fn trouble(&self) -> Trouble {
        Trouble::new(self.reason, cocoon_kit::failure::chain(self))
    }
}

/// Shorthand.
pub type PortResult<T> = Result<T, PortError>;

/// A VM's state as the planner needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmPhase {
    /// Reserved, not usable; its maker may be dead.
    Creating,
    /// The guest runs.
    Running,
    /// The guest is paused by a capture.
    Paused,
    /// There is a disk and no process.
    Stopped,
}

/// A VM as the planner needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmView {
    /// Engine id.
    pub id: String,
    /// Name.
    pub name: String,
    /// State.
    pub phase: VmPhase,
    /// Hypervisor process; 0 without one.
    pub pid: u32,
    /// NICs' addresses, lower case.
    pub macs: Vec<String>,
    /// The true hypervisor.
    pub hypervisor: String,
    /// It was up before: there is a state on its disk.
    pub came_up: bool,
    /// It runs without network: its guest has not taken its new identity. `start` tries again.
    pub links_down: bool,
    /// Somebody had it stopped, and it did; a process that ended by itself is not that.
    pub stopped_in_order: bool,
    /// When its process was last started, if the engine says so.
    pub started_at: Option<jiff::Timestamp>,
    /// Its guest stands still because the file system of its disk is full: the engine's sentence about that.
    pub starved: Option<String>,
    /// It runs, and this tap of it was deleted under its hypervisor: its guest reaches nobody.
    pub lost_tap: Option<String>,
}

/// What `run` needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRequest {
    /// VM name.
    pub name: String,
    /// Local image ref.
    pub image: String,
    /// vCPUs.
    pub cpu: u64,
    /// Bytes.
    pub memory: u64,
    /// Bytes of the writable disk.
    pub storage: u64,
}

/// What `clone` needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloneRequest {
    /// New VM name.
    pub name: String,
    /// Snapshot id or name.
    pub snapshot: String,
    /// The same machine goes on (wake), or a new one begins (clone, fork).
    pub same_machine: bool,
}

/// A complete local snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotView {
    /// Its id.
    pub id: String,
    /// Its local name.
    pub name: String,
    /// The true hypervisor.
    pub hypervisor: String,
}

/// What a tag holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TagView {
    /// Manifest digest.
    pub digest: String,
    /// Snapshot id.
    pub snapshot_id: String,
    /// Image ref of the VM it was taken of; empty when not stamped.
    pub base_image: String,
    /// Name of the VM whose state it is; empty when not stamped (other writers do not).
    pub vm_name: String,
}

/// What a tag may hold for it to be overwritten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guard {
    /// Whatever it holds.
    Any,
    /// Nothing, something consumed, or one of these digests.
    AbsentOr(Vec<String>),
}

/// A push of a local snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushRequest {
    /// Local snapshot (id or name).
    pub snapshot: String,
    /// Repository, relative to the base.
    pub repository: String,
    /// Tag.
    pub tag: String,
    /// Image ref to stamp.
    pub base_image: String,
    /// Name of the VM to stamp: whose state it is.
    pub vm_name: String,
    /// The caller's annotations.
    pub annotations: BTreeMap<String, String>,
    /// When the tag may be overwritten.
    pub guard: Guard,
}

/// The life of virtual machines.
#[async_trait]
pub trait Vms: Send + Sync + fmt::Debug {
    /// All of them, complete or an error.
    async fn list(&self) -> PortResult<Vec<VmView>>;
    /// One by name or id. `None`: the engine says that there is none.
    async fn inspect(&self, vm: &str) -> PortResult<Option<VmView>>;
    /// Boots a VM from a local image and waits for its agent.
    async fn run(&self, request: RunRequest) -> PortResult<VmView>;
    /// Clones a snapshot.
    async fn clone_vm(&self, request: CloneRequest) -> PortResult<VmView>;
    /// Cold start from its own disk.
    async fn start(&self, vm: &str) -> PortResult<VmView>;
    /// Removes it with all that belongs to it; not there is success.
    async fn remove(&self, vm: &str) -> PortResult<()>;
    /// Like [`Vms::remove`], but only if the guest has not run since the capture that made `snapshot`, else
    /// [`Reason::HibernateOutrun`]: somebody else (the engine's command line) may have let it go on, and what it did since is nowhere
    /// else (I3).
    async fn remove_captured(&self, vm: &str, snapshot: &str) -> PortResult<()>;
    /// Saves `name` and leaves the guest paused.
    async fn capture(&self, vm: &str, name: &str) -> PortResult<SnapshotView>;
    /// Saves `name`; the guest goes on.
    async fn save(&self, vm: &str, name: &str) -> PortResult<SnapshotView>;
    /// Lets a paused guest go on.
    async fn resume(&self, vm: &str) -> PortResult<()>;
}

/// Care for all virtual machines at once, and figures about them; nothing of a VM's life depends on it.
#[async_trait]
pub trait Upkeep: Send + Sync + fmt::Debug {
    /// The upkeep of running VMs, about once a second: logs are cut, guests that stood still for want of space go
    /// on.
    async fn tend(&self) -> PortResult<()>;
    /// Bytes that a capture of the VM would have, about: memory that its guest touched, and its writable disks.
    /// `None`: the VM does not run, or nobody can tell.
    async fn capture_size(&self, vm: &str) -> PortResult<Option<u64>>;
    /// Bytes of the data file system that the VMs' own writable disks take now.
    async fn disk_used(&self) -> PortResult<u64>;
}

/// Local snapshots.
#[async_trait]
pub trait Snapshots: Send + Sync + fmt::Debug {
    /// One complete snapshot by name.
    async fn get(&self, name: &str) -> PortResult<Option<SnapshotView>>;
    /// Removes it; not there is success.
    async fn remove(&self, name: &str) -> PortResult<()>;
}

/// Something that a pod's VM is made of and that was missing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Awaited {
    /// An image, as the pod names it.
    Image(String),
    /// A snapshot in the registry: repository and tag or digest.
    Snapshot(String, String),
    /// A VM of this node, by name.
    Vm(String),
}

impl fmt::Display for Awaited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(image) => write!(f, "image {image}"),
            Self::Snapshot(repository, reference) => {
                write!(f, "snapshot {}", cocoon_oci::reference::local(repository, reference))
            }
            Self::Vm(name) => write!(f, "VM {name}"),
        }
    }
}

/// Images to boot from.
#[async_trait]
pub trait Images: Send + Sync + fmt::Debug {
    /// Makes the image local; returns the local ref to run. `force` asks the registry again.
    async fn ensure(&self, image: &str, force: bool) -> PortResult<String>;
    /// Which of these images and snapshots [`Images::ensure`] or a pull would find now. Asked every few seconds for
    /// all pods at once, so it must cost next to nothing; what cannot tell so cheaply knows of none.
    async fn here(&self, wanted: &BTreeSet<Awaited>) -> PortResult<BTreeSet<Awaited>>;
}

/// A command that runs in a guest.
#[derive(Debug)]
pub struct GuestSession {
    /// Its streams.
    pub session: ExecSession,
    /// What the session needs to live: the channel it runs on.
    pub keep: Arc<dyn std::any::Any + Send + Sync>,
}

/// The way into guests.
#[async_trait]
pub trait Guest: Send + Sync + fmt::Debug {
    /// Starts a command.
    async fn exec(&self, vm: &str, exec: Exec) -> PortResult<GuestSession>;
    /// The console log so far.
    async fn console(&self, vm: &str) -> PortResult<PathBuf>;
}

/// Snapshot artifacts in a registry.
#[async_trait]
pub trait Registry: Send + Sync + fmt::Debug {
    /// What a tag holds. `None`: a clean "not there", or consumed.
    async fn facts(&self, repository: &str, tag: &str) -> PortResult<Option<TagView>>;
    /// Pushes a local snapshot; returns the manifest digest.
    async fn push(&self, request: PushRequest) -> PortResult<String>;
    /// Pushes a local snapshot's blobs and nothing that names them; the request's tag is left alone. Returns
    /// the bytes sent. What cannot do so does nothing.
    async fn push_blobs(&self, request: PushRequest) -> PortResult<u64>;
    /// Bytes of snapshots a second that the last measured push of this process got through; `None`: none was
    /// measured.
    fn throughput(&self) -> Option<u64>;
    /// Pulls a tag or digest as the local snapshot `name`.
    async fn pull(&self, repository: &str, reference: &str, name: &str) -> PortResult<SnapshotView>;
    /// Empties `tag` if it still holds `digest`; not there is success.
    async fn drop_tag(&self, repository: &str, tag: &str, digest: &str, snapshot: &str) -> PortResult<()>;
}

/// DHCP leases.
#[async_trait]
pub trait Leases: Send + Sync + fmt::Debug {
    /// The live address of a MAC.
    async fn lookup(&self, mac: &str) -> PortResult<Option<Ipv4Addr>>;
    /// The MACs that hold a lease now, complete or an error. What cannot tell has none.
    async fn held(&self) -> PortResult<Vec<String>>;
    /// Gives the lease back; none is success.
    async fn release(&self, mac: &str) -> PortResult<()>;
    /// Why no guest can be given an address now (`NoFreeAddress` or `NetworkDaemonDown`), in words that do not change
    /// while that lasts; `None`: it can, or that is not known.
    async fn obstacle(&self) -> Option<Trouble> {
        None
    }
}

/// Asks whether a guest is reachable.
#[async_trait]
pub trait Prober: Send + Sync + fmt::Debug {
    /// TCP connect with a port, else an ICMP echo. The text says why not.
    async fn probe(&self, ip: Ipv4Addr, port: Option<u16>, limit: Duration) -> Result<(), String>;
    /// Whether the address is this host's own now, so that no VM has it. Answers at once.
    fn is_own(&self, ip: Ipv4Addr) -> bool;
}

/// Durable owner records.
#[async_trait]
pub trait Records: Send + Sync + fmt::Debug {
    /// All of them.
    async fn load(&self) -> PortResult<Vec<OwnerRecord>>;
    /// Writes one, durably.
    async fn put(&self, record: &OwnerRecord) -> PortResult<()>;
    /// Forgets one, durably; not there is success.
    async fn forget(&self, vm_name: &str) -> PortResult<()>;
}

/// What the host is and how it does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostView {
    /// Logical CPUs.
    pub cpus: u64,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes of memory available now.
    pub memory_available: u64,
    /// Bytes of the data file system.
    pub disk: u64,
    /// Bytes free there.
    pub disk_available: u64,
    /// Process ids in use and the limit.
    pub processes: (u64, u64),
    /// Kernel release.
    pub kernel: String,
    /// Name of the operating system.
    pub os_image: String,
    /// `/etc/machine-id`.
    pub machine_id: String,
    /// This boot.
    pub boot_id: String,
    /// The hardware's UUID.
    pub system_uuid: String,
    /// Why the data folder does not take a write now; `None`: it does.
    pub data_folder_fault: Option<String>,
}

/// The host.
#[async_trait]
pub trait Host: Send + Sync + fmt::Debug {
    /// What the host is and how it does, now.
    async fn view(&self) -> HostView;
    /// A usable address of the host, when none is configured.
    fn address(&self) -> Option<IpAddr>;
}

/// All ports of one agent.
#[derive(Debug, Clone)]
pub struct Ports {
    /// Virtual machines.
    pub vms: Arc<dyn Vms>,
    /// Care for them, and figures.
    pub upkeep: Arc<dyn Upkeep>,
    /// Local snapshots.
    pub snapshots: Arc<dyn Snapshots>,
    /// Images.
    pub images: Arc<dyn Images>,
    /// Guests.
    pub guest: Arc<dyn Guest>,
    /// The registry; `None` runs without one.
    pub registry: Option<Arc<dyn Registry>>,
    /// Leases.
    pub leases: Arc<dyn Leases>,
    /// Probes.
    pub prober: Arc<dyn Prober>,
    /// Owner records.
    pub records: Arc<dyn Records>,
    /// The host.
    pub host: Arc<dyn Host>,
}

/// The names of all VMs in a list.
#[must_use]
pub fn names(vms: &[VmView]) -> BTreeSet<&str> {
    vms.iter().map(|vm| vm.name.as_str()).collect()
}
