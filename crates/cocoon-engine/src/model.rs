//! Records and requests (`engine-cli` §1.1, §1.5, §1.6). Pure values.

use std::{collections::BTreeMap, path::PathBuf};

use cocoon_oci::snapshot::Empty;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The hypervisors of the contract, and ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hypervisor {
    /// QEMU: our embedded default.
    Qemu,
    /// Through a foreign engine only.
    CloudHypervisor,
    /// Through a foreign engine only.
    Firecracker,
}

/// States of `engine-cli` §2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmState {
    /// Name and id are reserved; nothing may rely on it yet.
    #[serde(rename = "creating")]
    Creating,
    /// Made, never started.
    #[serde(rename = "created")]
    Created,
    /// The hypervisor runs (perhaps paused: see [`Vm::paused`]).
    #[serde(rename = "running")]
    Running,
    /// Stopped in order.
    #[serde(rename = "stopped")]
    Stopped,
    /// A start or stop failed.
    #[serde(rename = "error")]
    Error,
    /// Derived, never stored: recorded as running, but the process is gone.
    #[serde(rename = "stopped (stale)")]
    Stale,
}

/// `config` of a VM object; zero values are omitted, except the name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmConfig {
    /// Name: `[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}`.
    pub name: String,
    /// vCPUs.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu: u64,
    /// Bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory: u64,
    /// Bytes of the writable disk.
    #[serde(skip_serializing_if = "is_zero")]
    pub storage: u64,
    /// Image ref as typed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image: String,
    /// `sha256:<hex>`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_digest: String,
    /// `oci` or `cloudimg`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_type: String,
    /// Network name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub network: String,
    /// Contract field; QEMU ignores it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub no_direct_io: bool,
    /// Windows guest (refused by QEMU in this release).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub windows: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
const fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// One NIC (`engine-cli` §7).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NetworkInterface {
    /// Host interface.
    pub tap: String,
    /// Guest MAC, lower case.
    pub mac: String,
    /// Always `bridge` here.
    pub backend: String,
    /// Bridge name.
    pub bridge_dev: String,
}

/// One disk (`engine-cli` §1.1 `storage_configs`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// Host path.
    pub path: String,
    /// Read-only.
    pub ro: bool,
    /// virtio serial: `cocoon-layer<N>` or `cocoon-cow`.
    pub serial: String,
    /// `layer`, `cow` or `data`.
    pub role: String,
}

/// A VM object, as `vm inspect` prints it. Unknown keys are ignored when read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// 26 upper-case base32 characters.
    pub id: String,
    /// The true hypervisor.
    pub hypervisor: Hypervisor,
    /// Reconciled with process liveness.
    pub state: VmState,
    /// Name, sizes, image.
    pub config: VmConfig,
    /// Hypervisor process; 0 unless running.
    pub pid: u32,
    /// QMP socket, running only.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub socket_path: String,
    /// NICs.
    pub network_configs: Vec<NetworkInterface>,
    /// Disks in the guest's order.
    pub storage_configs: Vec<Disk>,
    /// The guest was up once.
    pub first_booted: bool,
    /// Snapshots taken of this VM: keys are their ids.
    pub snapshot_ids: BTreeMap<String, Empty>,
    /// The guest is stopped by a capture (ours; absent is false).
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub paused: bool,
    /// Snapshot id that this VM was cloned from (ours), empty for a fresh boot.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub cloned_from: String,
    /// What is not as it should be although the VM runs (ours), such as links that stay down.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub warnings: Vec<String>,
    /// A clone whose guest has not taken its identity: its links stay down (ours; absent is false).
    /// `start` tries again.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub links_down: bool,
    /// QEMU stopped the guest because the file system of its disk is full (ours; absent is false). It goes
    /// on by [`crate::engine::Engine::tend`] once there is space, or by `start`. Never set together with
    /// `paused`.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub disk_full: bool,
    /// Raised with each change of state.
    #[serde(default)]
    pub transition_generation: u64,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
    /// Last start.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub started_at: Option<Timestamp>,
    /// Last stop.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stopped_at: Option<Timestamp>,
}

/// What `vm run` needs.
#[derive(Debug, Clone)]
pub struct RunSpec {
    /// VM name.
    pub name: String,
    /// Local image ref.
    pub image: String,
    /// vCPUs.
    pub cpu: u64,
    /// Bytes, at least 128 MiB here (the contract's CLI floor of 512 MiB is checked by the CLI).
    pub memory: u64,
    /// Bytes of the writable disk.
    pub storage: u64,
    /// NICs on the engine's bridge.
    pub nics: usize,
}

/// How a clone's guest sees itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloneIdentity {
    /// A new machine: new machine-id, host name, entropy (fork, clone).
    New,
    /// The same machine goes on: machine-id stays; clock, MAC and entropy are refreshed (wake).
    Same,
}

/// What `vm clone` needs. Sizes come from the snapshot.
#[derive(Debug, Clone)]
pub struct CloneSpec {
    /// New VM name.
    pub name: String,
    /// Snapshot reference (id, name or id prefix).
    pub snapshot: String,
    /// Identity of the clone.
    pub identity: CloneIdentity,
}

/// A snapshot object, as `snapshot inspect` prints it (`engine-cli` §1.5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Identity and configuration.
    #[serde(flatten)]
    pub envelope: cocoon_oci::snapshot::Envelope,
    /// When it was taken or imported.
    pub created_at: Timestamp,
    /// Folder with its files (never printed).
    #[serde(skip)]
    pub folder: PathBuf,
}

/// An image object (`engine-cli` §1.6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Digest.
    pub id: String,
    /// Ref as typed.
    pub name: String,
    /// `oci` or `cloudimg`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Bytes.
    pub size: u64,
    /// When it was imported.
    pub created_at: Timestamp,
}
