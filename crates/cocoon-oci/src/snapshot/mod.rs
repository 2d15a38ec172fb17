//! Snapshot artifacts (`spec/snapshot-wire-format.md`).
//!
//! Entry points: [`push`] from a folder of files, [`pull`] into one, [`read`] for the facts alone,
//! [`consume`] when a tag has served its purpose. The tar form is [`crate::stream`]; both share one
//! pipeline in (`push`) and one out (`pull`).
//!
//! Invariants: a tag changes only after every blob is stored, and never over something that the
//! [`TagGuard`] does not allow; a pull writes nothing before the whole artifact passed the rules, and what
//! it wrote is removed when it fails; buffers stay within the budget, whatever the snapshot's size.

pub mod config;
mod folder;
pub(crate) mod plan;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod sparse;
mod tag;
mod unpack;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    digest,
    manifest::{Descriptor, Document, OCI_MANIFEST},
    media,
    registry::{Registry, RegistryError},
};

/// The tag of a hibernation snapshot.
pub const HIBERNATE_TAG: &str = "hibernate";
/// Manifest annotation: image ref the VM was created from.
pub const BASE_IMAGE_ANNOTATION: &str = "cocoonstack.snapshot.baseimage";
/// Manifest annotation: name of the VM whose state it is. Of ours: artifacts of other writers lack it.
pub const VM_ANNOTATION: &str = "cocoonstack.snapshot.vm";
/// Manifest annotation of an emptied tag: the snapshot id that was consumed. Readers take it as absent.
pub const CONSUMED_ANNOTATION: &str = "cocoonstack.snapshot.consumed";

/// Manifest annotation: when the artifact was made.
pub const CREATED_ANNOTATION: &str = "org.opencontainers.image.created";
/// Annotation keys with this prefix belong to the format.
pub const RESERVED_PREFIX: &str = "cocoonstack.";
/// Uploads, or pieces fetched ahead, at once when unset.
pub const CONCURRENCY: usize = 8;
/// Bytes of buffers of one push or pull when unset.
pub const MEMORY_BUDGET: u64 = 512 << 20;
/// Compression when unset. Measured on pages of programs (two busy cores): level 1 takes 329 MB/s per core to
/// 29 % of the size, level 3 takes 206 MB/s to 26 %; the test `speed` prints both.
pub const ZSTD_LEVEL: i32 = 1;

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
    /// Bytes; 0 is off. Exactly 4 MiB (the default) is raised for huge files, so that the manifest stays
    /// below 4 MiB.
    pub chunk_size: u64,
    /// Uploads at once; 0 takes the default.
    pub concurrency: usize,
    /// Bytes of buffers at once; 0 takes the default, less than four chunks is refused.
    pub memory_budget: u64,
    /// Caller's manifest annotations; reserved keys are refused.
    pub annotations: BTreeMap<String, String>,
    /// Image ref for [`BASE_IMAGE_ANNOTATION`]; empty leaves it out.
    pub base_image: String,
    /// Name of the VM for [`VM_ANNOTATION`]; empty leaves it out.
    pub vm_name: String,
    /// `org.opencontainers.image.created`.
    pub created: jiff::Timestamp,
    /// What the tag may point to for it to be overwritten.
    pub tag_guard: TagGuard,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self {
            zstd_level: ZSTD_LEVEL,
            chunk_size: push::DEFAULT_CHUNK,
            concurrency: CONCURRENCY,
            memory_budget: MEMORY_BUDGET,
            annotations: BTreeMap::new(),
            base_image: String::new(),
            vm_name: String::new(),
            created: jiff::Timestamp::now(),
            tag_guard: TagGuard::Any,
        }
    }
}

/// Knobs of a pull. Zero takes the default.
#[derive(Debug, Clone, Default)]
pub struct PullOptions {
    /// Pieces fetched ahead; 1 streams.
    pub concurrency: usize,
    /// Bytes of buffers at once.
    pub memory_budget: u64,
}

impl PullOptions {
    pub(crate) const fn concurrency(&self) -> usize {
        if self.concurrency == 0 { CONCURRENCY } else { self.concurrency }
    }

    pub(crate) const fn budget(&self) -> u64 {
        if self.memory_budget == 0 { MEMORY_BUDGET } else { self.memory_budget }
    }
}

/// Design §5, "A tag is not overwritten blindly".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TagGuard {
    /// Overwrite whatever is there.
    Any,
    /// Absent, consumed, one of these manifest digests, or the very snapshot that is pushed (an earlier try
    /// whose end was not heard of).
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

/// Why a push failed. The tag is as it was, unless it is [`PushError::Unconfirmed`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PushError {
    /// The tag points to something that this pusher neither wrote nor woke from.
    #[error(
        "{repository}:{tag} was moved by somebody else (now {found}) and is left as it is; look whose it is, \
         and if nobody needs it delete the tag, then push again"
    )]
    TagMoved {
        /// Repository.
        repository: String,
        /// Tag.
        tag: String,
        /// The digest found.
        found: String,
    },
    /// The manifest was sent, but whether the tag points to it could not be seen: it is there, or the tag is
    /// as it was, or somebody else has moved it meanwhile.
    #[error(
        "{repository}:{tag} was pushed as {digest}, but the registry does not confirm it; look at the tag, then push again"
    )]
    Unconfirmed {
        /// Repository.
        repository: String,
        /// Tag.
        tag: String,
        /// The digest of the manifest that was sent. A push of the same snapshot may replace it.
        digest: String,
        /// Why.
        #[source]
        source: RegistryError,
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
    let facts = config::Config::of_envelope(envelope).map_err(PushError::Invalid)?;
    let mut entries = folder::Folder::new(files, facts);
    push::run(registry, repository, tag, &mut entries, options).await
}

/// Uploads the blobs of `files` and nothing that names them: no config, no manifest, no tag. A [`push`] of the
/// same bytes with the same options finds them there. Returns the bytes sent.
pub async fn push_blobs(
    registry: &dyn Registry,
    repository: &str,
    files: &[SourceFile],
    options: &PushOptions,
) -> Result<u64, PushError> {
    let mut entries = folder::Folder::new(files, config::Config::default());
    push::blobs(registry, repository, &mut entries, options).await
}

/// Pulls a snapshot into `folder` (which must exist and be empty), sparse, every byte verified.
pub async fn pull(
    registry: &dyn Registry,
    repository: &str,
    reference: &str,
    folder: &Path,
) -> Result<(Facts, Envelope), PullError> {
    pull_with(registry, repository, reference, folder, &PullOptions::default()).await
}

/// [`pull`] with knobs. When it fails, the files that it made are removed.
pub async fn pull_with(
    registry: &dyn Registry,
    repository: &str,
    reference: &str,
    folder: &Path,
    options: &PullOptions,
) -> Result<(Facts, Envelope), PullError> {
    let source = pull::Source::new(registry, repository, reference, options);
    let found = source.find(reference).await?.ok_or_else(|| PullError::NotFound(source.name.clone()))?;
    let files = plan::files(&found.document, &found.config).map_err(|why| source.invalid(why))?;
    let envelope = found.config.to_envelope(repository).map_err(|why| source.invalid(why))?;
    let mut unpack = unpack::Unpack::into_empty(folder).await?;
    source.files(&files, &mut unpack).await?;
    unpack.finish().await?;
    Ok((found.facts(), envelope))
}

/// Reads what the registry knows about a snapshot. `None`: not there, or consumed.
pub async fn read(
    registry: &dyn Registry,
    repository: &str,
    reference: &str,
) -> Result<Option<Facts>, PullError> {
    let source = pull::Source::new(registry, repository, reference, &PullOptions::default());
    Ok(source.find(reference).await?.map(|found| found.facts()))
}

/// Removes a tag whose snapshot was woken, if it still points to the artifact that `facts` were read from
/// (a VM that hibernated again has moved it); says whether it did. Where the registry refuses to delete, the
/// tag is overwritten by an empty manifest that says so, which [`read`] and [`pull`] take as absent
/// (design §5).
pub async fn consume(
    registry: &dyn Registry,
    repository: &str,
    tag: &str,
    facts: &Facts,
) -> Result<bool, RegistryError> {
    match registry.delete_tag_if(repository, tag, &facts.digest).await {
        Err(RegistryError::DeleteRefused { .. }) => {}
        other => return other,
    }
    let empty = digest::of(b"{}");
    registry.put_bytes(repository, &empty, bytes::Bytes::from_static(b"{}")).await?;
    let config = Descriptor {
        media_type: media::EMPTY_CONFIG.to_owned(),
        digest: empty,
        size: 2,
        ..Descriptor::default()
    };
    let document = Document {
        media_type: OCI_MANIFEST.to_owned(),
        artifact_type: media::EMPTY_CONFIG.to_owned(),
        layers: vec![config.clone()],
        config,
        annotations: BTreeMap::from([(CONSUMED_ANNOTATION.to_owned(), facts.snapshot_id.clone())]),
        ..Document::default()
    };
    // A refused delete says nothing about where the tag points now.
    let expected = Some(facts.digest.as_str());
    let put = registry.put_tag_if(repository, tag, expected, OCI_MANIFEST, document.to_bytes().into()).await;
    put.map(|put| put.is_some())
}

/// Whether a manifest is that of a consumed tag.
pub(crate) fn is_consumed(manifest: &[u8]) -> bool {
    Document::parse(manifest).is_ok_and(|document| document.annotations.contains_key(CONSUMED_ANNOTATION))
}
