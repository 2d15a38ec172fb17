//! An OCI image-layout folder as a registry.
//!
//! Entry point: [`OciLayout::open`]. One layout holds any number of repositories: blobs are shared, names
//! are `repository:tag` in `index.json`, so `skopeo inspect --raw oci:PATH:vmname:hibernate` and
//! `skopeo copy` read it. Any number of processes may use one folder at a time.
//!
//! Invariants: a name points to a manifest only when everything that the manifest needs is on disk and
//! verified; a crash or a full disk leaves every name as it was (left-overs are collected later); damage
//! is an error, never "not there".

mod collect;
mod index;
mod store;
mod trust;

use std::{
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use tokio::{io::AsyncReadExt as _, sync::mpsc};

pub use collect::Collected;
use store::{Now, Opened, Store};

use crate::{
    digest::{self, Hasher},
    reference::{is_repository, is_tag},
    registry::{Body, Manifest, PushHold, Registry, RegistryError},
};

/// How long a blob that nothing needs is kept after its last use; see [`OciLayout::collect`].
pub const GRACE: Duration = Duration::from_secs(15 * 60);
/// Blobs up to this size are read and verified before the first byte is handed out.
const WHOLE: u64 = 8 << 20;
/// Block of a streamed blob; at most [`QUEUE`] of them wait.
const BLOCK: usize = 256 << 10;
const QUEUE: usize = 4;

/// A registry in a folder.
#[derive(Debug, Clone)]
pub struct OciLayout {
    store: Arc<Store>,
}

impl OciLayout {
    /// Opens the layout at `path`; a missing or empty folder becomes a new one.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RegistryError> {
        Ok(Self { store: Arc::new(Store::open(path.as_ref())?) })
    }

    /// The layout's folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.store.root
    }

    /// All tags, as (repository, tag), in the index's order.
    pub async fn tags(&self) -> Result<Vec<(String, String)>, RegistryError> {
        self.blocking(|store| {
            let index = index::Index::read(&store.root)?;
            let named = index
                .entries()
                .filter_map(|entry| entry.tag().map(|tag| (entry.repository().to_owned(), tag.to_owned())));
            Ok(named.collect())
        })
        .await
    }

    /// Bytes of stored blobs that were read because a push wanted to reuse them and this process had not
    /// verified them yet, or they had changed since.
    #[must_use]
    pub fn bytes_verified(&self) -> u64 {
        self.store.verified.bytes()
    }

    /// Removes blobs that no manifest of `index.json` needs, that nobody stored or asked to reuse within
    /// `grace`, and that no push in flight can have used; and left-overs of dead writers. [`GRACE`] is enough,
    /// because:
    ///
    /// - a blob's time stamp is renewed when it is stored and each time that a push asks for it, so its age
    ///   counts from its last use;
    /// - a push of any process holds a locked file in `.tmp` ([`Registry::begin_push`]) for as long as it
    ///   lives, and nothing that was used since the oldest such file was made is taken, however long the push;
    /// - the looks at these and the removal are under the layout's lock, which storing and asking share: a
    ///   push that begins later finds the blob gone and sends it;
    /// - so grace only has to cover the time from a push's end to a next one that wants its blobs (a retry,
    ///   [`crate::snapshot::push_blobs`] before the push), and there a loss costs bytes, not correctness;
    /// - a writer that holds nothing (blobs put one by one, a clock set back meanwhile) and comes too late fails
    ///   at its manifest, which is only accepted while all that it needs is there: no tag moves.
    ///
    /// Pushes hardly wait for it: manifests are read before the layout is locked, and only those that came
    /// meanwhile under the lock. A tag whose manifest cannot be read is an error that names it, and no blob goes
    /// until it is restored or deleted: what it needs is unknown.
    pub async fn collect(&self, grace: Duration) -> Result<Collected, RegistryError> {
        self.blocking(move |store| store.collect(grace)).await
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, RegistryError> + Send + 'static,
    ) -> Result<T, RegistryError> {
        let store = Arc::clone(&self.store);
        let joined = tokio::task::spawn_blocking(move || work(&store)).await;
        joined.unwrap_or_else(|error| Err(RegistryError::unavailable("working in the OCI layout", error)))
    }
}

fn check(repository: &str, reference: Option<&str>) -> Result<(), RegistryError> {
    if !is_repository(repository) {
        return Err(RegistryError::InvalidName(repository.to_owned()));
    }
    match reference {
        Some(reference) if !is_tag(reference) && !digest::is_valid(reference) => {
            Err(RegistryError::InvalidName(reference.to_owned()))
        }
        _ => Ok(()),
    }
}

fn check_tag(repository: &str, tag: &str) -> Result<(), RegistryError> {
    check(repository, None)?;
    if is_tag(tag) { Ok(()) } else { Err(RegistryError::InvalidName(tag.to_owned())) }
}

#[async_trait]
impl Registry for OciLayout {
    async fn begin_push(&self) -> Result<PushHold, RegistryError> {
        let mark = self.blocking(Store::mark_push).await?;
        Ok(Box::new(mark))
    }

    async fn has_blob(&self, repository: &str, digest: &str) -> Result<bool, RegistryError> {
        check(repository, None)?;
        let digest = digest.to_owned();
        self.blocking(move |store| store.reuse(&digest, None)).await
    }

    async fn has_blob_of(&self, repository: &str, digest: &str, size: u64) -> Result<bool, RegistryError> {
        check(repository, None)?;
        let digest = digest.to_owned();
        self.blocking(move |store| store.reuse(&digest, Some(size))).await
    }

    async fn put_blob(
        &self,
        repository: &str,
        digest: &str,
        size: u64,
        mut body: Body,
    ) -> Result<(), RegistryError> {
        check(repository, None)?;
        let (blocks, queue) = mpsc::channel(QUEUE);
        let writing = {
            let digest = digest.to_owned();
            self.blocking(move |store| receive(store, &digest, size, queue))
        };
        let reading = async move {
            loop {
                let mut block = BytesMut::with_capacity(BLOCK);
                let read = fill(&mut body, &mut block).await;
                let end = !matches!(read, Ok(1..));
                let part = read.map(|_| block.freeze());
                if blocks.send(part).await.is_err() || end {
                    return;
                }
            }
        };
        let (written, ()) = tokio::join!(writing, reading);
        written
    }

    async fn put_bytes(&self, repository: &str, digest: &str, bytes: Bytes) -> Result<(), RegistryError> {
        check(repository, None)?;
        let digest = digest.to_owned();
        self.blocking(move |store| store.put(&digest, &bytes)).await
    }

    async fn get_blob(&self, repository: &str, digest: &str) -> Result<Option<Body>, RegistryError> {
        check(repository, None)?;
        let digest = digest.to_owned();
        self.blocking(move |store| {
            let Some(Opened { file, stamp }) = store.open_blob(&digest)? else { return Ok(None) };
            if stamp.length() > WHOLE {
                let verified = Arc::clone(&store.verified);
                return Ok(Some(streamed(file, digest, move |digest| verified.record(digest, stamp))));
            }
            let mut bytes = Vec::with_capacity(usize::try_from(stamp.length()).unwrap_or_default());
            let read = file.take(WHOLE + 1).read_to_end(&mut bytes);
            read.map_err(|error| RegistryError::unavailable(format!("reading blob {digest}"), error))?;
            if digest::of(&bytes) != digest {
                return Err(RegistryError::Corrupt { object: digest });
            }
            store.verified.record(&digest, stamp);
            Ok(Some(Box::pin(io::Cursor::new(bytes)) as Body))
        })
        .await
    }

    async fn put_manifest(
        &self,
        repository: &str,
        reference: &str,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<String, RegistryError> {
        check(repository, Some(reference))?;
        let [repository, reference, media_type] = [repository, reference, media_type].map(str::to_owned);
        let put = self.blocking(move |store| {
            store.put_manifest(&repository, &reference, &media_type, &bytes, &Now::Any)
        });
        // Any is always met.
        put.await.map(Option::unwrap_or_default)
    }

    async fn put_tag_if(
        &self,
        repository: &str,
        tag: &str,
        expected: Option<&str>,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<Option<String>, RegistryError> {
        check_tag(repository, tag)?;
        let [repository, tag, media_type] = [repository, tag, media_type].map(str::to_owned);
        let expected = Now::At(expected.map(str::to_owned));
        self.blocking(move |store| store.put_manifest(&repository, &tag, &media_type, &bytes, &expected))
            .await
    }

    async fn get_manifest(
        &self,
        repository: &str,
        reference: &str,
    ) -> Result<Option<Manifest>, RegistryError> {
        check(repository, Some(reference))?;
        let [repository, reference] = [repository, reference].map(str::to_owned);
        self.blocking(move |store| store.manifest(&repository, &reference)).await
    }

    async fn delete_manifest(&self, repository: &str, reference: &str) -> Result<(), RegistryError> {
        check(repository, Some(reference))?;
        let [repository, reference] = [repository, reference].map(str::to_owned);
        self.blocking(move |store| store.delete(&repository, &reference)).await
    }

    async fn delete_tag_if(&self, repository: &str, tag: &str, digest: &str) -> Result<bool, RegistryError> {
        check_tag(repository, tag)?;
        let [repository, tag, digest] = [repository, tag, digest].map(str::to_owned);
        self.blocking(move |store| store.delete_tag_if(&repository, &tag, &digest)).await
    }
}

/// Reads until the block is full or the body ends.
async fn fill(body: &mut Body, block: &mut BytesMut) -> io::Result<usize> {
    while block.len() < BLOCK {
        if body.read_buf(block).await? == 0 {
            break;
        }
    }
    Ok(block.len())
}

/// The blocking end of a put: an empty block ends the body; a closed queue is an aborted caller.
fn receive(
    store: &Store,
    digest: &str,
    size: u64,
    mut queue: mpsc::Receiver<io::Result<Bytes>>,
) -> Result<(), RegistryError> {
    let mut incoming = store.begin(digest, size)?;
    loop {
        match queue.blocking_recv() {
            Some(Ok(block)) if block.is_empty() => return incoming.commit(),
            Some(Ok(block)) => incoming.write(&block)?,
            Some(Err(error)) => {
                return Err(RegistryError::unavailable(format!("reading the body of {digest}"), error));
            }
            None => {
                return Err(RegistryError::unavailable(format!("storing {digest}"), "the push was given up"));
            }
        }
    }
}

/// Streams a large blob through a reading and hashing thread.
fn streamed(file: std::fs::File, digest: String, verified: impl FnOnce(&str) + Send + 'static) -> Body {
    let (blocks, mut queue) = mpsc::channel::<io::Result<Bytes>>(QUEUE);
    tokio::task::spawn_blocking(move || {
        match send_verified(file, &digest, &blocks) {
            Ok(true) => {
                verified(&digest);
                let _ = blocks.blocking_send(Ok(Bytes::new()));
            }
            Ok(false) => {} // the caller stopped reading
            Err(error) => {
                let _ = blocks.blocking_send(Err(error));
            }
        }
    });
    let mut ended = false;
    let stream = futures::stream::poll_fn(move |context| {
        queue.poll_recv(context).map(|part| match part {
            // The reader's promise that all was verified.
            Some(Ok(block)) if block.is_empty() => {
                ended = true;
                None
            }
            Some(part) => Some(part),
            None if ended => None,
            None => Some(Err(io::Error::other("the blob's reader stopped early"))),
        })
    });
    Box::pin(tokio_util::io::StreamReader::new(stream))
}

/// Whether all was sent and is the blob; `false` if nobody wants the rest.
fn send_verified(
    mut file: std::fs::File,
    digest: &str,
    blocks: &mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<bool> {
    let mut hasher = Hasher::default();
    loop {
        let mut block = Vec::with_capacity(BLOCK);
        (&mut file).take(BLOCK as u64).read_to_end(&mut block)?;
        if block.is_empty() {
            if hasher.finish() != digest {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    RegistryError::Corrupt { object: digest.to_owned() },
                ));
            }
            return Ok(true);
        }
        hasher.update(&block);
        if blocks.blocking_send(Ok(block.into())).is_err() {
            return Ok(false);
        }
    }
}

/// The layout's folder named by `oci-layout:PATH`.
#[must_use]
pub fn path_of(value: &str) -> Option<PathBuf> {
    let path = value.strip_prefix("oci-layout:")?;
    (!path.is_empty()).then(|| PathBuf::from(path))
}
