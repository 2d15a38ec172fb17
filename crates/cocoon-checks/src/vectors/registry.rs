//! A registry in memory, filled from a vector.

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cocoon_oci::manifest::OCI_MANIFEST;
use cocoon_oci::memory::Memory;
use serde_json::Value;

use super::folder::Vector;

/// The blobs of the vector, each under the digest it is said to have, in one repository.
pub(crate) fn with_blobs(vector: &Vector, repository: &str) -> Result<Memory> {
    let memory = Memory::new();
    for (digest, bytes) in vector.input["blobs_b64"].as_object().into_iter().flatten() {
        memory.insert_raw(repository, digest, STANDARD.decode(bytes.as_str().unwrap_or_default())?);
    }
    for (name, manifest) in vector.input["child_manifests"].as_object().into_iter().flatten() {
        let (repository, reference) = name.split_once(':').context("a child manifest without repository")?;
        let text = manifest.as_str().unwrap_or_default().to_owned();
        memory.insert_manifest(repository, reference, OCI_MANIFEST, text);
    }
    Ok(memory)
}

/// A runtime for one question.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// `null` for an empty list, as the originals write it.
pub(crate) fn null_if_empty(list: Vec<String>) -> Value {
    if list.is_empty() { Value::Null } else { list.into() }
}
