//! Snapshot artifacts (`spec/snapshot-wire-format.md`).
//!
//! Entry points: [`push`] from a folder of files, [`pull`] into one, [`read`] for the facts alone.

use std::{collections::BTreeMap, path::{Path, PathBuf}};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::registry::{Registry, RegistryError};

/// The tag of a hibernation snapshot.
pub const HIBERNATE_TAG: &str = "hibernate";
/// Manifest annotation: image ref the VM was created from.
pub const BASE_IMAGE_ANNOTATION: &str = "cocoonstack.snapshot.baseimage";
/// Manifest annotation of an emptied tag: the snapshot id that was consumed. Readers take it as absent.
pub const CONSUMED_ANNOTATION: &str = "cocoonstack.snapshot.consumed";

/// What `snapshot.json` says about a snapshot (§3, envelope keys).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Envelope {
    /// The engine's snapshot id.
    pub id: String,
    /// Local name.
    pub name: String,
    /// Free text.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Base image ref.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image: String,
    /// Base image digest.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_digest: String,
    /// `oci` or `cloudimg`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub image_type: String,
    /// Blob hexes that the snapshot needs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub image_blob_ids: BTreeMap<String, Empty>,
    /// The true hypervisor.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hypervisor: String,
    /// vCPUs.
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu: u64,
    /// Guest memory, bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory: u64,
    /// Writable disk, bytes.
    #[serde(skip_serializing_if = "is_zero")]
    pub storage: u64,
    /// NICs.
    #[serde(skip_serializing_if = "is_zero")]
    pub nics: u64,
    /// CNI network name; empty is the default.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub network: String,
    /// Windows guest.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub windows: bool,
}

/// `{}` in JSON.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Empty {}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
const fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// One file of a snapshot. Holes are found in the file itself (`SEEK_DATA`).
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// Flat name, the layer's title.
    pub name: String,
    /// Where it is; must not change during the push.
    pub path: PathBuf,
    /// Permission bits to record.
    pub mode: u32,
}

/// Knobs of a push. `Default` is what design §5 "Knobs left unset" says.
#[derive(Debug, Clone)]
pub struct PushOptions {
    /// 0 is off.
    pub zstd_level: i32,
    /// Bytes; 0 is off.
    pub chunk_size: u64,
    /// Uploads at once.
    pub concurrency: usize,
    /// Bytes of buffers at once.
    pub memory_budget: u64,
    /// Caller's manifest annotations; reserved keys are refused.
    pub annotations: BTreeMap<String, String>,
    /// Image ref for [`BASE_IMAGE_ANNOTATION`]; empty leaves it out.
    pub base_image: String,
    /// `org.opencontainers.image.created`.
    pub created: jiff::Timestamp,
    /// What the tag may point to for it to be overwritten.
    pub tag_guard: TagGuard,
}

/// Design §5, "A tag is not overwritten blindly".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TagGuard {
    /// Overwrite whatever is there.
    Any,
    /// Absent, consumed, or one of these manifest digests.
    AbsentOr(Vec<String>),
}

/// What a push left in the registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Manifest digest.
    pub digest: String,
    /// Bytes sent (blobs that were there already do not count).
    pub sent: u64,
    /// Stored bytes of all layers and the config.
    pub total: u64,
}

/// What the registry knows about a snapshot, without its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Manifest digest.
    pub digest: String,
    /// `snapshotId` of the config.
    pub snapshot_id: String,
    /// [`BASE_IMAGE_ANNOTATION`], empty when absent.
    pub base_image: String,
    /// The true hypervisor.
    pub hypervisor: String,
    /// All manifest annotations.
    pub annotations: BTreeMap<String, String>,
}

/// Why a push failed. The tag is as it was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PushError {
    /// The tag points to something that this pusher neither wrote nor woke from.
    #[error("{repository}:{tag} was moved by somebody else (now {found})")]
    TagMoved {
        /// Repository.
        repository: String,
        /// Tag.
        tag: String,
        /// The digest found.
        found: String,
    },
    /// An annotation key is reserved.
    #[error("annotation {0:?} is reserved")]
    ReservedAnnotation(String),
    /// A file of the snapshot could not be read.
    #[error("reading {path}")]
    File {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The snapshot cannot be written in this format.
    #[error("snapshot cannot be pushed: {0}")]
    Invalid(String),
    /// The registry.
    #[error("pushing {repository}:{tag}")]
    Registry {
        /// Repository.
        repository: String,
        /// Tag.
        tag: String,
        /// Why.
        #[source]
        source: RegistryError,
    },
}

/// Why a pull failed. Nothing of it may be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PullError {
    /// A clean "not there" (or a consumed tag).
    #[error("{0} is not in the registry")]
    NotFound(String),
    /// The artifact is not a snapshot that a reader may accept (§10).
    #[error("{reference} is not a usable snapshot: {message}")]
    Invalid {
        /// Which.
        reference: String,
        /// Which rule it breaks.
        message: String,
    },
    /// A file could not be written (disk full, for example).
    #[error("writing {path}")]
    File {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The registry.
    #[error("pulling {reference}")]
    Registry {
        /// Which.
        reference: String,
        /// Why.
        #[source]
        source: RegistryError,
    },
}

/// Pushes `files` as `repository:tag`; the manifest goes last.
pub async fn push(
    registry: &dyn Registry,
    repository: &str,
    tag: &str,
    envelope: &Envelope,
    files: &[SourceFile],
    options: &PushOptions,
) -> Result<Pushed, PushError> {
    let _ = (registry, envelope, files, options);
    Err(PushError::Invalid(format!("{repository}:{tag}: not built")))
}

/// Pulls a snapshot into `folder` (which must exist and be empty), sparse, every byte verified.
pub async fn pull(
    registry: &dyn Registry,
    repository: &str,
    reference: &str,
    folder: &Path,
) -> Result<(Facts, Envelope), PullError> {
    let _ = (registry, folder);
    Err(PullError::NotFound(format!("{repository}:{reference}")))
}

/// Reads what the registry knows about a snapshot. `None`: not there, or consumed.
pub async fn read(registry: &dyn Registry, repository: &str, reference: &str) -> Result<Option<Facts>, PullError> {
    let _ = (registry, repository, reference);
    Ok(None)
}
