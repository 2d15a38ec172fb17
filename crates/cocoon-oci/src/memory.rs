//! A registry in memory, for tests and for checking golden vectors.
//!
//! It keeps the port's promises (bodies are verified, "not there" is not an error) and records what was
//! put, in order. [`Memory::insert_raw`] and [`Memory::fail`] make it lie or break on purpose.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::io::AsyncReadExt as _;

use crate::{
    digest,
    reference::is_tag,
    registry::{Body, Manifest, Registry, RegistryError},
};

#[derive(Debug, Default)]
struct State {
    blobs: BTreeMap<(String, String), Bytes>,
    manifests: BTreeMap<(String, String), Manifest>,
    puts: Vec<String>,
    failing: BTreeSet<String>,
    hidden: BTreeSet<String>,
}

impl State {
    fn point(&mut self, repository: &str, reference: &str, media_type: &str, bytes: Bytes) -> String {
        let digest = digest::of(&bytes);
        let manifest = Manifest { bytes, media_type: media_type.to_owned(), digest: digest.clone() };
        self.manifests.insert(key(repository, &digest), manifest.clone());
        self.manifests.insert(key(repository, reference), manifest);
        if let Some(hidden) = self.hidden.take(reference) {
            self.failing.insert(hidden);
        }
        digest
    }
}

/// A registry in memory.
#[derive(Debug, Default)]
pub struct Memory {
    state: Mutex<State>,
}

impl Memory {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a blob under its true digest, which is returned.
    pub fn insert(&self, repository: &str, bytes: impl Into<Bytes>) -> String {
        let bytes = bytes.into();
        let digest = digest::of(&bytes);
        self.insert_raw(repository, &digest, bytes);
        digest
    }

    /// Puts a blob under any digest, true or not.
    pub fn insert_raw(&self, repository: &str, digest: &str, bytes: impl Into<Bytes>) {
        self.state().blobs.insert((repository.to_owned(), digest.to_owned()), bytes.into());
    }

    /// Puts a manifest under any reference; nothing is checked.
    pub fn insert_manifest(
        &self,
        repository: &str,
        reference: &str,
        media_type: &str,
        bytes: impl Into<Bytes>,
    ) {
        let bytes = bytes.into();
        let manifest = Manifest { digest: digest::of(&bytes), bytes, media_type: media_type.to_owned() };
        self.state().manifests.insert((repository.to_owned(), reference.to_owned()), manifest);
    }

    /// From now on every request that names `object` (a digest, tag or repository) cannot be answered.
    pub fn fail(&self, object: &str) {
        self.state().failing.insert(object.to_owned());
    }

    /// `object` can be asked again.
    pub fn mend(&self, object: &str) {
        self.state().failing.remove(object);
    }

    /// Once a manifest was put under `reference`, that reference can be asked no more.
    pub fn fail_after_put(&self, reference: &str) {
        self.state().hidden.insert(reference.to_owned());
    }

    /// Digests of blobs that were put, in order.
    #[must_use]
    pub fn puts(&self) -> Vec<String> {
        self.state().puts.clone()
    }

    /// A stored blob.
    #[must_use]
    pub fn blob(&self, repository: &str, digest: &str) -> Option<Bytes> {
        self.state().blobs.get(&(repository.to_owned(), digest.to_owned())).cloned()
    }

    fn ready(&self, objects: [&str; 2]) -> Result<(), RegistryError> {
        let state = self.state();
        match objects.into_iter().find(|object| state.failing.contains(*object)) {
            Some(object) => Err(RegistryError::unavailable(format!("asking for {object}"), "made to fail")),
            None => Ok(()),
        }
    }
}

fn key(repository: &str, reference: &str) -> (String, String) {
    (repository.to_owned(), reference.to_owned())
}

fn check_tag(tag: &str) -> Result<(), RegistryError> {
    if is_tag(tag) { Ok(()) } else { Err(RegistryError::InvalidName(tag.to_owned())) }
}

#[async_trait]
impl Registry for Memory {
    async fn has_blob(&self, repository: &str, digest: &str) -> Result<bool, RegistryError> {
        self.ready([repository, digest])?;
        Ok(self.blob(repository, digest).is_some())
    }

    async fn put_blob(
        &self,
        repository: &str,
        digest: &str,
        size: u64,
        mut body: Body,
    ) -> Result<(), RegistryError> {
        self.ready([repository, digest])?;
        let mut bytes = Vec::new();
        let read = body.read_to_end(&mut bytes).await;
        read.map_err(|error| RegistryError::unavailable(format!("reading the body of {digest}"), error))?;
        if bytes.len() as u64 != size || digest::of(&bytes) != digest {
            return Err(RegistryError::Corrupt { object: digest.to_owned() });
        }
        let mut state = self.state();
        state.puts.push(digest.to_owned());
        state.blobs.insert(key(repository, digest), bytes.into());
        Ok(())
    }

    async fn get_blob(&self, repository: &str, digest: &str) -> Result<Option<Body>, RegistryError> {
        self.ready([repository, digest])?;
        let Some(bytes) = self.blob(repository, digest) else { return Ok(None) };
        let sound = digest::of(&bytes) == digest;
        let head = io::Cursor::new(bytes);
        if sound {
            return Ok(Some(Box::pin(head)));
        }
        let corrupt = RegistryError::Corrupt { object: digest.to_owned() };
        let error = io::Error::new(io::ErrorKind::InvalidData, corrupt);
        let tail = tokio_util::io::StreamReader::new(futures::stream::iter([Err::<Bytes, _>(error)]));
        Ok(Some(Box::pin(head.chain(tail))))
    }

    async fn put_manifest(
        &self,
        repository: &str,
        reference: &str,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<String, RegistryError> {
        self.ready([repository, reference])?;
        Ok(self.state().point(repository, reference, media_type, bytes))
    }

    async fn put_tag_if(
        &self,
        repository: &str,
        tag: &str,
        expected: Option<&str>,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<Option<String>, RegistryError> {
        self.ready([repository, tag])?;
        check_tag(tag)?;
        let mut state = self.state();
        let now = state.manifests.get(&key(repository, tag)).map(|manifest| manifest.digest.as_str());
        let ours = now == expected;
        Ok(ours.then(|| state.point(repository, tag, media_type, bytes)))
    }

    async fn get_manifest(
        &self,
        repository: &str,
        reference: &str,
    ) -> Result<Option<Manifest>, RegistryError> {
        self.ready([repository, reference])?;
        Ok(self.state().manifests.get(&key(repository, reference)).cloned())
    }

    async fn delete_manifest(&self, repository: &str, reference: &str) -> Result<(), RegistryError> {
        self.ready([repository, reference])?;
        let mut state = self.state();
        if digest::is_valid(reference) {
            state
                .manifests
                .retain(|(owner, _), manifest| owner != repository || manifest.digest != reference);
        } else {
            state.manifests.remove(&key(repository, reference));
        }
        Ok(())
    }

    async fn delete_tag_if(&self, repository: &str, tag: &str, digest: &str) -> Result<bool, RegistryError> {
        self.ready([repository, tag])?;
        check_tag(tag)?;
        let mut state = self.state();
        let key = key(repository, tag);
        let ours = state.manifests.get(&key).is_some_and(|manifest| manifest.digest == digest);
        if ours {
            state.manifests.remove(&key);
        }
        Ok(ours)
    }
}
