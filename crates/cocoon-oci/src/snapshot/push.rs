//! The one way in: files from a folder or a tar become blobs, a config and a manifest (§6, §8).
//!
//! [`Entries`] is what differs between the two; everything else is here. A file in one piece goes by
//! itself, in order. A file in several pieces is read, compressed and hashed on blocking threads, as many
//! at a time as cores, and uploaded as many at a time as workers. Buffers never exceed the budget:
//! a worker holds one raw and one encoded piece. Equal blobs go up once. The manifest goes last.

use std::{
    collections::BTreeMap,
    fs::File,
    future::Future,
    io::{self, Read as _, Seek as _, Write as _},
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::sync::{OnceCell, Semaphore};

use super::{
    BASE_IMAGE_ANNOTATION, CREATED_ANNOTATION, PushError, PushOptions, Pushed, RESERVED_PREFIX,
    VM_ANNOTATION,
    config::{Config, FileRecord},
    plan::{MAX_PIECES, check_title},
    sparse::{Payload, Range},
    tag::Tag,
};
use crate::{
    digest::{self, Hasher},
    manifest::{Descriptor, Document, OCI_MANIFEST, TITLE},
    media,
    reference::{is_repository, is_tag},
    registry::{Body, Registry, RegistryError},
};

/// Files with a smaller payload are never compressed.
const MIN_COMPRESSED: u64 = 1 << 20;
/// Payloads up to this size are handled in memory when they go in one piece.
const IN_MEMORY: u64 = 8 << 20;
/// Chunk size that counts as "unset" and may be raised.
pub(super) const DEFAULT_CHUNK: u64 = 4 << 20;
/// Layers of a snapshot whose manifest stays below 4 MiB.
const FITTING_LAYERS: u64 = 8192;
const COUNT: &str = "cocoonstack.chunk.count";
const INDEX: &str = "cocoonstack.chunk.index";
const MIB: u64 = 1 << 20;

/// What is known of a file before its bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Head {
    pub(crate) name: String,
    pub(crate) mode: i64,
    /// Payload bytes.
    pub(crate) size: u64,
    /// Map text and logical size.
    pub(crate) sparse: Option<(String, i64)>,
    /// The length of its pieces, where the payload was made for it.
    pub(crate) stride: Option<u64>,
}

/// How payloads are cut now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    zstd: bool,
    chunk: u64,
    /// Layers for which the manifest has room.
    left: u64,
}

impl Cut {
    /// Whether a payload is compressed, and the length of its pieces.
    fn of(self, size: u64) -> (bool, u64) {
        let zstd = self.zstd && size >= MIN_COMPRESSED;
        if self.chunk == 0 || !(zstd || size > self.chunk) {
            return (zstd, size);
        }
        let mut chunk = self.chunk;
        if chunk == DEFAULT_CHUNK {
            // Each file may take half of what is left, so that the manifest stays below 4 MiB.
            chunk = chunk.max(size.div_ceil((self.left / 2).max(1)).next_multiple_of(MIB));
        }
        (zstd, chunk)
    }

    /// Length of the windows that a sparse file's data is rounded to, so that each of them is one piece, whatever
    /// becomes of the holes before it: what a later capture of the same memory has in common is found again.
    /// The zeros that come with it cost nothing once compressed, so without compression there are none.
    pub(crate) fn windows(self, logical: u64, payload: u64) -> Option<u64> {
        let (zstd, stride) = self.of(logical);
        (zstd && payload >= MIN_COMPRESSED && stride < logical).then_some(stride)
    }
}

/// A part of a payload: already read, or to be read by the worker.
#[derive(Debug)]
pub(crate) enum Block {
    Memory(Vec<u8>),
    Range(Range),
}

impl Block {
    fn into_vec(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Memory(bytes) => Ok(bytes),
            Self::Range(range) => range.to_vec(),
        }
    }
}

/// Where files come from.
#[async_trait]
pub(crate) trait Entries: Send {
    /// The next file, which will be cut as `cut` says; `None` only at a genuine end.
    async fn next(&mut self, cut: Cut) -> Result<Option<Head>, PushError>;
    /// The current file's next bytes, exactly that many.
    async fn take(&mut self, length: u64) -> Result<Block, PushError>;
    /// Like `take`, for more than fits in memory: a source that has no file gives fewer bytes.
    async fn take_large(&mut self, length: u64) -> Result<Block, PushError>;
    /// The snapshot's id, where it is known before the first file.
    fn snapshot_id(&self) -> Option<&str> {
        None
    }
    /// The snapshot's facts, after the last file; also the last chance to refuse.
    async fn facts(&mut self) -> Result<Config, PushError>;
}

/// Pushes all entries as `repository:tag`.
pub(crate) async fn run(
    registry: &dyn Registry,
    repository: &str,
    tag: &str,
    entries: &mut dyn Entries,
    options: &PushOptions,
) -> Result<Pushed, PushError> {
    let push = Push::new(registry, repository, tag, options)?;
    let _in_flight = registry.begin_push().await.map_err(|error| push.registry_error(error))?;
    push.named().check(entries.snapshot_id()).await?;
    let files = push.files(entries).await?;
    let facts = entries.facts().await?;
    push.finish(facts, files).await
}

/// Uploads the entries' blobs, cut as [`run`] cuts them, and nothing that names them. Returns the bytes sent.
pub(crate) async fn blobs(
    registry: &dyn Registry,
    repository: &str,
    entries: &mut dyn Entries,
    options: &PushOptions,
) -> Result<u64, PushError> {
    let push = Push::new(registry, repository, super::HIBERNATE_TAG, options)?;
    let _in_flight = registry.begin_push().await.map_err(|error| push.registry_error(error))?;
    push.files(entries).await?;
    Ok(push.sent.load(Ordering::Relaxed))
}

type Inflight<'a> = FuturesUnordered<BoxFuture<'a, Result<(), PushError>>>;

/// Runs `work` while uploads go on; an upload's failure ends it.
async fn alongside<T>(
    inflight: &mut Inflight<'_>,
    work: impl Future<Output = Result<T, PushError>>,
) -> Result<T, PushError> {
    let mut work = pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            Some(uploaded) = inflight.next(), if !inflight.is_empty() => uploaded?,
        }
    }
}

/// A stored blob.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stored {
    digest: String,
    size: u64,
}

/// A file whose pieces are stored or on their way.
struct Filed {
    head: Head,
    zstd: bool,
    pieces: Arc<Mutex<Vec<Option<Stored>>>>,
}

struct Push<'a> {
    registry: &'a dyn Registry,
    repository: &'a str,
    tag: &'a str,
    options: &'a PushOptions,
    level: i32,
    chunk: u64,
    workers: usize,
    cores: Semaphore,
    encoders: Arc<Encoders>,
    uploads: Mutex<BTreeMap<String, Arc<OnceCell<()>>>>,
    sent: AtomicU64,
    layers: AtomicU64,
}

impl<'a> Push<'a> {
    fn new(
        registry: &'a dyn Registry,
        repository: &'a str,
        tag: &'a str,
        options: &'a PushOptions,
    ) -> Result<Self, PushError> {
        if !is_repository(repository) || !is_tag(tag) {
            return Err(PushError::Invalid(format!("{repository:?}:{tag:?} is not a repository and tag")));
        }
        let reserved = |key: &&String| key.starts_with(RESERVED_PREFIX) || *key == CREATED_ANNOTATION;
        if let Some(key) = options.annotations.keys().find(reserved) {
            return Err(PushError::ReservedAnnotation(key.clone()));
        }
        let (chunk, workers) = workers(options)?;
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let level = options.zstd_level.clamp(0, 19);
        Ok(Self {
            registry,
            repository,
            tag,
            options,
            level,
            chunk,
            workers,
            cores: Semaphore::new(cores),
            encoders: Arc::new(Encoders { level, idle: Mutex::default() }),
            uploads: Mutex::default(),
            sent: AtomicU64::new(0),
            layers: AtomicU64::new(0),
        })
    }

    fn named(&self) -> Tag<'_> {
        let Self { registry, repository, tag, options, .. } = *self;
        Tag { registry, repository, tag, guard: &options.tag_guard }
    }

    fn registry_error(&self, source: RegistryError) -> PushError {
        self.named().failed(source)
    }

    fn cut(&self) -> Cut {
        let left = FITTING_LAYERS.saturating_sub(self.layers.load(Ordering::Relaxed));
        Cut { zstd: self.level > 0, chunk: self.chunk, left }
    }

    /// Whether a file is compressed, and the length of its pieces.
    fn cut_of(&self, head: &Head) -> Result<(bool, u64), PushError> {
        let (zstd, stride) = head.stride.map_or_else(|| self.cut().of(head.size), |stride| (true, stride));
        if head.size.div_ceil(stride.max(1)) > MAX_PIECES {
            let Head { name, size, .. } = head;
            return Err(PushError::Invalid(format!(
                "{name}: {size} bytes in pieces of {stride}: more than {MAX_PIECES}"
            )));
        }
        Ok((zstd, stride))
    }

    /// Uploads all files' blobs.
    async fn files(&self, entries: &mut dyn Entries) -> Result<Vec<Filed>, PushError> {
        let mut inflight = FuturesUnordered::new();
        let mut files = Vec::new();
        while let Some(head) = alongside(&mut inflight, entries.next(self.cut())).await? {
            check_title(&head.name).map_err(PushError::Invalid)?;
            if files.iter().any(|file: &Filed| file.head.name == head.name) {
                return Err(PushError::Invalid(format!("{:?} appears twice", head.name)));
            }
            files.push(self.file(head, entries, &mut inflight).await?);
        }
        while let Some(done) = inflight.next().await {
            done?;
        }
        Ok(files)
    }

    async fn file<'p>(
        &'p self,
        head: Head,
        entries: &mut dyn Entries,
        inflight: &mut Inflight<'p>,
    ) -> Result<Filed, PushError> {
        let (zstd, stride) = self.cut_of(&head)?;
        let count = head.size.div_ceil(stride.max(1)).max(1);
        self.layers.fetch_add(count, Ordering::Relaxed);
        if count == 1 {
            let stored = self.single(&head, zstd, entries, inflight).await?;
            return Ok(Filed { head, zstd, pieces: Arc::new(Mutex::new(vec![Some(stored)])) });
        }
        let pieces = Arc::new(Mutex::new(vec![None; usize::try_from(count).unwrap_or_default()]));
        for index in 0..count {
            while inflight.len() >= self.workers {
                if let Some(done) = inflight.next().await {
                    done?;
                }
            }
            let length = stride.min(head.size - index * stride);
            let block = alongside(inflight, entries.take(length)).await?;
            let (pieces, name) = (Arc::clone(&pieces), head.name.clone());
            inflight.push(Box::pin(async move {
                let stored = self.piece(&name, block, zstd).await?;
                let mut pieces = pieces.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(slot) = usize::try_from(index).ok().and_then(|index| pieces.get_mut(index)) {
                    *slot = Some(stored);
                }
                Ok(())
            }));
        }
        Ok(Filed { head, zstd, pieces })
    }

    /// A file in one layer.
    async fn single(
        &self,
        head: &Head,
        zstd: bool,
        entries: &mut dyn Entries,
        inflight: &mut Inflight<'_>,
    ) -> Result<Stored, PushError> {
        if head.size <= IN_MEMORY {
            let block = alongside(inflight, entries.take(head.size)).await?;
            return alongside(inflight, self.piece(&head.name, block, zstd)).await;
        }
        let range = alongside(inflight, spool(head, entries)).await?;
        let level = if zstd { self.level } else { 0 };
        let work = blocking(&head.name, move || encode_whole(range, level));
        let (stored, range) = alongside(inflight, work).await?;
        let body = reader_of(range);
        alongside(inflight, self.upload(&stored, Content::Body(body))).await?;
        Ok(stored)
    }

    /// Encodes, hashes and uploads one piece that fits in memory.
    async fn piece(&self, name: &str, block: Block, zstd: bool) -> Result<Stored, PushError> {
        let encoders = Arc::clone(&self.encoders);
        let encoded = {
            let _core = self.cores.acquire().await;
            blocking(name, move || {
                let raw = block.into_vec()?;
                let bytes = if zstd { encoders.encode(&raw)? } else { raw };
                let size = bytes.len() as u64;
                Ok((Stored { digest: digest::of(&bytes), size }, bytes))
            })
            .await?
        };
        let (stored, bytes) = encoded;
        self.upload(&stored, Content::Bytes(bytes.into())).await?;
        Ok(stored)
    }

    /// Puts a blob unless it is there; equal blobs of this push go once.
    async fn upload(&self, stored: &Stored, content: Content) -> Result<(), PushError> {
        let cell = {
            let mut uploads = self.uploads.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(uploads.entry(stored.digest.clone()).or_default())
        };
        let (repository, digest) = (self.repository, stored.digest.as_str());
        let put = async || {
            if self.registry.has_blob_of(repository, digest, stored.size).await? {
                return Ok(());
            }
            match content {
                Content::Bytes(bytes) => self.registry.put_bytes(repository, digest, bytes).await?,
                Content::Body(body) => self.registry.put_blob(repository, digest, stored.size, body).await?,
            }
            self.sent.fetch_add(stored.size, Ordering::Relaxed);
            Ok(())
        };
        cell.get_or_try_init(put).await.map_err(|error| self.registry_error(error))?;
        Ok(())
    }

    /// Config, then the manifest under its tag.
    async fn finish(&self, facts: Config, files: Vec<Filed>) -> Result<Pushed, PushError> {
        let (config, mut document) = self.describe(facts, files)?;
        let bytes = Bytes::from(config.to_bytes());
        let stored = Stored { digest: digest::of(&bytes), size: bytes.len() as u64 };
        self.upload(&stored, Content::Bytes(bytes)).await?;
        document.config = descriptor(media::SNAPSHOT_CONFIG.to_owned(), &stored, BTreeMap::new());
        let manifest = Bytes::from(document.to_bytes());
        let digest = digest::of(&manifest);
        self.named().publish(&digest, &manifest, &config.snapshot_id).await?;
        let layers = document.layers.iter().map(|layer| layer.size);
        let total = layers.chain([document.config.size]).map(i64::cast_unsigned).sum();
        Ok(Pushed { digest, sent: self.sent.load(Ordering::Relaxed), total })
    }

    fn describe(&self, mut config: Config, files: Vec<Filed>) -> Result<(Config, Document), PushError> {
        let mut document = Document { media_type: OCI_MANIFEST.to_owned(), ..Document::default() };
        let sized = self.level > 0 || self.chunk > 0;
        let mut encoded = false;
        for file in files {
            let pieces = std::mem::take(&mut *file.pieces.lock().unwrap_or_else(PoisonError::into_inner));
            let pieces: Option<Vec<Stored>> = pieces.into_iter().collect();
            let pieces =
                pieces.ok_or_else(|| PushError::Invalid(format!("{}: a piece is lost", file.head.name)))?;
            encoded |= file.zstd || pieces.len() > 1;
            config.files.insert(file.head.name.clone(), record(&file.head, &pieces, sized)?);
            document.layers.extend(layers(&file, &pieces));
        }
        let (version, kind) = if encoded { ("v2", media::SNAPSHOT_V2) } else { ("v1", media::SNAPSHOT_V1) };
        version.clone_into(&mut config.schema_version);
        kind.clone_into(&mut document.artifact_type);
        config.created_at = self.options.created.to_string();
        document.annotations = self.annotations();
        Ok((config, document))
    }

    fn annotations(&self) -> BTreeMap<String, String> {
        let mut annotations = self.options.annotations.clone();
        let created = self.options.created;
        let seconds = jiff::Timestamp::from_second(created.as_second()).unwrap_or(created);
        annotations.insert(CREATED_ANNOTATION.to_owned(), seconds.to_string());
        if !self.options.base_image.is_empty() {
            annotations.insert(BASE_IMAGE_ANNOTATION.to_owned(), self.options.base_image.clone());
        }
        if !self.options.vm_name.is_empty() {
            annotations.insert(VM_ANNOTATION.to_owned(), self.options.vm_name.clone());
        }
        annotations
    }
}

/// Chunk size and number of workers that keep the buffers within the budget.
fn workers(options: &PushOptions) -> Result<(u64, usize), PushError> {
    let concurrency = if options.concurrency == 0 { super::CONCURRENCY } else { options.concurrency };
    let budget = if options.memory_budget == 0 { super::MEMORY_BUDGET } else { options.memory_budget };
    let chunk = options.chunk_size;
    if chunk == 0 {
        return Ok((0, 1));
    }
    if budget / 4 < chunk {
        let message = format!("a memory budget of {budget} bytes is less than four chunks of {chunk}");
        return Err(PushError::Invalid(message));
    }
    let fitting = usize::try_from(budget / (2 * chunk) - 1).unwrap_or(usize::MAX);
    Ok((chunk, concurrency.min(fitting)))
}

fn record(head: &Head, pieces: &[Stored], sized: bool) -> Result<FileRecord, PushError> {
    let (sparse_map, sparse_size) = head.sparse.clone().unwrap_or_default();
    let size =
        i64::try_from(head.size).map_err(|_| PushError::Invalid(format!("{}: too large", head.name)))?;
    let several = pieces.len() > 1;
    Ok(FileRecord {
        mode: head.mode,
        sparse_map,
        sparse_size,
        size: if sized { size } else { 0 },
        chunks: pieces.iter().filter(|_| several).map(|piece| piece.digest.clone()).collect(),
    })
}

fn layers(file: &Filed, pieces: &[Stored]) -> impl Iterator<Item = Descriptor> {
    let raw = media::for_file(&file.head.name);
    let media_type = if file.zstd { media::with_zstd(raw) } else { raw.to_owned() };
    let count = pieces.len();
    pieces.iter().enumerate().map(move |(index, piece)| {
        let mut annotations = BTreeMap::from([(TITLE.to_owned(), file.head.name.clone())]);
        if count > 1 {
            annotations.insert(COUNT.to_owned(), count.to_string());
            annotations.insert(INDEX.to_owned(), index.to_string());
        }
        descriptor(media_type.clone(), piece, annotations)
    })
}

fn descriptor(media_type: String, stored: &Stored, annotations: BTreeMap<String, String>) -> Descriptor {
    let size = i64::try_from(stored.size).unwrap_or(i64::MAX);
    Descriptor { media_type, digest: stored.digest.clone(), size, annotations, platform: None }
}

enum Content {
    Bytes(Bytes),
    Body(Body),
}

/// Work for a blocking thread on behalf of a file.
async fn blocking<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PushError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.unwrap_or_else(|error| Err(io::Error::other(error)));
    done.map_err(|source| PushError::File { path: name.to_owned(), source })
}

/// A payload that is too large for memory, as something that can be read twice.
async fn spool(head: &Head, entries: &mut dyn Entries) -> Result<Range, PushError> {
    let mut file: Option<File> = None;
    let mut left = head.size;
    while left > 0 {
        let block = match entries.take_large(left).await? {
            Block::Range(range) if range.length == head.size => return Ok(range),
            block => block,
        };
        let mut target = match file.take() {
            Some(file) => file,
            None => blocking(&head.name, tempfile::tempfile).await?,
        };
        let work = move || {
            let bytes = block.into_vec()?;
            target.write_all(&bytes)?;
            Ok((target, bytes.len() as u64))
        };
        let (target, written) = blocking(&head.name, work).await?;
        left -= written.min(left);
        file = Some(target);
    }
    let file = match file {
        Some(file) => file,
        None => blocking(&head.name, tempfile::tempfile).await?,
    };
    Ok(Range::all(Arc::new(Payload::whole(file, head.size))))
}

/// Hashes a payload as it is, or compresses it into a temporary file on the way.
fn encode_whole(range: Range, level: i32) -> io::Result<(Stored, Range)> {
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; 1 << 20];
    if level == 0 {
        let mut reader = range.clone();
        loop {
            let read = reader.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            hasher.update(&buffer[..read]);
        }
        let size = hasher.length();
        return Ok((Stored { digest: hasher.finish(), size }, range));
    }
    let length = range.length;
    let mut encoder = zstd::stream::read::Encoder::new(range, level)?;
    encoder.set_pledged_src_size(Some(length))?;
    let mut target = tempfile::tempfile()?;
    loop {
        let read = encoder.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        target.write_all(&buffer[..read])?;
    }
    target.rewind()?;
    let size = hasher.length();
    let stored = Stored { digest: hasher.finish(), size };
    Ok((stored, Range::all(Arc::new(Payload::whole(target, size)))))
}

/// A range as a body, read on a blocking thread.
fn reader_of(mut range: Range) -> Body {
    let (blocks, mut queue) = tokio::sync::mpsc::channel::<io::Result<Bytes>>(2);
    tokio::task::spawn_blocking(move || {
        while range.length > 0 {
            let part = Range { length: range.length.min(MIB), ..range.clone() };
            let read = part.to_vec().map(Bytes::from);
            range.at += part.length;
            range.length -= part.length;
            let failed = read.is_err();
            if blocks.blocking_send(read).is_err() || failed {
                return;
            }
        }
    });
    // A reader that dies early gives a short body, which the registry refuses by size and digest.
    let stream = futures::stream::poll_fn(move |context| queue.poll_recv(context));
    Box::pin(tokio_util::io::StreamReader::new(stream))
}

/// Compression contexts, kept for the next piece.
struct Encoders {
    level: i32,
    idle: Mutex<Vec<zstd::bulk::Compressor<'static>>>,
}

impl Encoders {
    fn encode(&self, raw: &[u8]) -> io::Result<Vec<u8>> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut encoder = match idle {
            Some(encoder) => encoder,
            None => zstd::bulk::Compressor::new(self.level)?,
        };
        // One frame with its size in the header: its window is then no larger than the piece.
        let encoded = encoder.compress(raw)?;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(encoder);
        Ok(encoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn the_default_chunk_grows_so_that_the_manifest_stays_below_four_mebibytes() {
        let (registry, options) = (Memory::new(), PushOptions::default());
        let push = Push::new(&registry, "vm", "t", &options).unwrap();
        let piece = Stored { digest: digest::of(b""), size: u64::MAX >> 2 };
        let mut document = Document::default();
        for (name, size) in
            [("memory-ranges", 12_u64 << 40), ("cow.qcow2", 40 << 40), ("data-second.raw", 1 << 34)]
        {
            let head = Head { name: name.to_owned(), size, ..Head::default() };
            let (zstd, stride) = push.cut_of(&head).unwrap();
            let count = size.div_ceil(stride);
            push.layers.fetch_add(count, Ordering::Relaxed);
            let file = Filed { head, zstd, pieces: Arc::default() };
            let pieces = vec![piece.clone(); usize::try_from(count).unwrap()];
            document.layers.extend(layers(&file, &pieces));
        }
        assert!(document.layers.len() > 4096);
        assert!(document.to_bytes().len() < 4 << 20, "{} layers", document.layers.len());
        assert_eq!(push.cut().of(2 << 30).1, DEFAULT_CHUNK.max((2 << 30) / 1024));
    }

    #[test]
    fn workers_never_need_more_than_the_budget() {
        let options =
            |chunk_size, memory_budget| PushOptions { chunk_size, memory_budget, ..PushOptions::default() };
        assert_eq!(workers(&options(4 * MIB, 512 * MIB)).unwrap(), (4 * MIB, 8));
        assert_eq!(workers(&options(512 * MIB, 9216 * MIB)).unwrap().1, 8);
        assert_eq!(workers(&options(MIB, 4 * MIB)).unwrap().1, 1);
        assert!(workers(&options(MIB, 4 * MIB - 1)).is_err());
        assert_eq!(workers(&options(0, 0)).unwrap(), (0, 1));
    }
}
