//! The registry port.
//!
//! Callers act on "not there" and stop on "could not tell"; the two are never merged (I5).

use std::pin::Pin;

use async_trait::async_trait;
use bytes::Bytes;
use thiserror::Error;
use tokio::io::AsyncRead;

/// Why a registry did not do what was asked. "Not there" is never an error here: it is `None` or `false`.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The registry could not be asked, or gave no clear answer.
    #[error("registry unavailable: {what}")]
    Unavailable {
        /// What was tried, on which object.
        what: String,
        /// Why it failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Content does not have the digest or size it should have.
    #[error("content of {object} is not what its digest says")]
    Corrupt {
        /// Which blob or manifest.
        object: String,
    },
    /// The registry does not delete (400, 405).
    #[error("the registry refuses to delete {reference}")]
    DeleteRefused {
        /// Which tag or digest.
        reference: String,
    },
    /// The name or tag cannot exist.
    #[error("invalid repository, tag or digest {0:?}")]
    InvalidName(String),
}

impl RegistryError {
    /// "Could not tell", with what was tried on which object.
    pub fn unavailable(
        what: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Unavailable { what: what.into(), source: source.into() }
    }
}

/// A body that is read once, verified while it is read: a wrong digest or size surfaces as an I/O error
/// of kind `InvalidData` at its end.
pub type Body = Pin<Box<dyn AsyncRead + Send>>;

/// Says that a push goes on, until it is dropped; see [`Registry::begin_push`].
pub type PushHold = Box<dyn Send + Sync>;

/// A manifest as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The exact bytes.
    pub bytes: Bytes,
    /// Its media type.
    pub media_type: String,
    /// `sha256:<hex>` over `bytes`.
    pub digest: String,
}

/// A place for blobs and manifests. `repository` is relative to the registry's base; `reference` is a
/// tag or a digest.
#[async_trait]
pub trait Registry: Send + Sync + std::fmt::Debug {
    /// Begins a push: what is stored or found from here on is not collected while the answer is kept. This
    /// default is for registries that collect nothing while in use.
    async fn begin_push(&self) -> Result<PushHold, RegistryError> {
        Ok(Box::new(()))
    }
    /// Whether the blob is there.
    async fn has_blob(&self, repository: &str, digest: &str) -> Result<bool, RegistryError>;
    /// Whether the blob is there whole. A registry that keeps lengths takes a blob of another one as absent,
    /// so that it is sent again; this default cannot tell.
    async fn has_blob_of(&self, repository: &str, digest: &str, size: u64) -> Result<bool, RegistryError> {
        let _ = size;
        self.has_blob(repository, digest).await
    }
    /// Stores a blob; refuses content that does not match `digest` and `size`.
    async fn put_blob(
        &self,
        repository: &str,
        digest: &str,
        size: u64,
        body: Body,
    ) -> Result<(), RegistryError>;
    /// Stores a blob that is in memory; the same promise as [`Registry::put_blob`].
    async fn put_bytes(&self, repository: &str, digest: &str, bytes: Bytes) -> Result<(), RegistryError> {
        let size = bytes.len() as u64;
        self.put_blob(repository, digest, size, Box::pin(std::io::Cursor::new(bytes))).await
    }
    /// Reads a blob, verified. `None`: not there.
    async fn get_blob(&self, repository: &str, digest: &str) -> Result<Option<Body>, RegistryError>;
    /// Stores a manifest under a tag (or its digest), verbatim; returns its digest.
    async fn put_manifest(
        &self,
        repository: &str,
        reference: &str,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<String, RegistryError>;
    /// Points a tag to a manifest if it points to `expected` now (`None`: if it is not there); returns the
    /// manifest's digest, or `None` if the tag is elsewhere and stays. Looking and putting are one step: nobody
    /// else's write in between is lost.
    ///
    /// There is no default, because looking and then putting breaks the promise unseen. An implementation of
    /// the distribution API, which knows no conditional put, sends `If-Match` (`If-None-Match: *`) to a registry
    /// that is known to heed it; else it lets only one writer at a time have the tag (a lease that all writers
    /// honour), looks, puts, reads the tag back, and says in its own words what is left of the window: what is
    /// overwritten there cannot be had again (I3).
    async fn put_tag_if(
        &self,
        repository: &str,
        tag: &str,
        expected: Option<&str>,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<Option<String>, RegistryError>;
    /// Reads a manifest, verified. `None`: not there.
    async fn get_manifest(
        &self,
        repository: &str,
        reference: &str,
    ) -> Result<Option<Manifest>, RegistryError>;
    /// Deletes a tag or a digest; not there is success.
    async fn delete_manifest(&self, repository: &str, reference: &str) -> Result<(), RegistryError>;
    /// Deletes a tag if it points to `digest`; says whether it did. A tag that points elsewhere or is not
    /// there stays as it is. One step, and no default, as with [`Registry::put_tag_if`]: an implementation of
    /// the distribution API deletes under the same lease, never by digest alone, which would take every other
    /// tag of that manifest too.
    async fn delete_tag_if(&self, repository: &str, tag: &str, digest: &str) -> Result<bool, RegistryError>;
}
