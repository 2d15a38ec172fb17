//! The one way out: a checked plan becomes files in a folder or members of a tar (§9).
//!
//! [`Sink`] is what differs; everything else is here. A file in several pieces is fetched and decoded some
//! pieces ahead, within the budget; a file in one piece streams. Blobs are verified by the registry while
//! they are read, sizes and totals here; no piece decodes to more than its ceiling.

use std::io::{self, Read as _};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt as _, stream::FuturesOrdered};
use tokio::{io::AsyncReadExt as _, sync::mpsc};

use super::{
    Facts, PullError, PullOptions,
    config::Config,
    is_consumed,
    plan::{self, FilePlan, Piece},
};
use crate::{
    digest,
    manifest::{Document, MAX_MANIFEST, pick},
    media::{self, Kind},
    patience::{answered, lively},
    reference::local,
    registry::{Body, Manifest, Registry, RegistryError},
};

/// Bytes handed to a sink at a time when streaming.
const BLOCK: usize = 1 << 20;
/// Pieces above this size are streamed, never held whole.
const MAX_BUFFERED: u64 = 1 << 30;

/// Where files go. Every error names what could not be written.
#[async_trait]
pub(crate) trait Sink: Send {
    /// A file begins.
    async fn begin(&mut self, file: &FilePlan) -> Result<(), PullError>;
    /// Its next bytes.
    async fn data(&mut self, bytes: Bytes) -> Result<(), PullError>;
    /// All its bytes have come.
    async fn end(&mut self) -> Result<(), PullError>;
}

/// A snapshot in a registry, found and read as far as its config.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) digest: String,
    pub(crate) document: Document,
    pub(crate) config: Config,
}

impl Found {
    pub(crate) fn facts(&self) -> Facts {
        let annotations = self.document.annotations.clone();
        Facts {
            digest: self.digest.clone(),
            snapshot_id: self.config.snapshot_id.clone(),
            base_image: annotations.get(super::BASE_IMAGE_ANNOTATION).cloned().unwrap_or_default(),
            hypervisor: self.config.hypervisor.clone(),
            annotations,
        }
    }
}

/// One pull: the registry, what is pulled and how errors name it.
pub(crate) struct Source<'a> {
    pub(crate) registry: &'a dyn Registry,
    pub(crate) repository: &'a str,
    pub(crate) name: String,
    pub(crate) options: PullOptions,
}

impl<'a> Source<'a> {
    pub(crate) fn new(
        registry: &'a dyn Registry,
        repository: &'a str,
        reference: &str,
        options: &PullOptions,
    ) -> Self {
        Self { registry, repository, name: local(repository, reference), options: options.clone() }
    }

    pub(crate) fn invalid(&self, message: impl Into<String>) -> PullError {
        PullError::Invalid { reference: self.name.clone(), message: message.into() }
    }

    fn failed(&self, source: RegistryError) -> PullError {
        PullError::Registry { reference: self.name.clone(), source }
    }

    /// Finds a tag or digest. `None`: not there, or consumed.
    pub(crate) async fn find(&self, reference: &str) -> Result<Option<Found>, PullError> {
        match self.manifest(reference).await? {
            None => Ok(None),
            Some(manifest) if is_consumed(&manifest.bytes) => Ok(None),
            Some(manifest) => self.read(manifest).await.map(Some),
        }
    }

    /// A manifest as the registry has it.
    pub(crate) async fn manifest(&self, reference: &str) -> Result<Option<Manifest>, PullError> {
        let found = answered(&self.name, self.registry.get_manifest(self.repository, reference)).await;
        found.map_err(|error| self.failed(error))
    }

    /// Reads a manifest (through an index, if it is one) and its config.
    pub(crate) async fn read(&self, manifest: Manifest) -> Result<Found, PullError> {
        let mut manifest = manifest;
        let mut document = self.parse(&manifest.bytes)?;
        if self.kind(&manifest.bytes)? == Kind::Index {
            let child =
                pick(&document.manifests).ok_or_else(|| self.invalid("its index has no usable platform"))?;
            child.checked_size().map_err(|why| self.invalid(format!("index: {why}")))?;
            let found = self.manifest(&child.digest).await?;
            manifest =
                found.ok_or_else(|| self.invalid(format!("the manifest {} is missing", child.digest)))?;
            if digest::of(&manifest.bytes) != child.digest {
                return Err(self.invalid(format!("the manifest {} has another digest", child.digest)));
            }
            document = self.parse(&manifest.bytes)?;
        }
        plan::check_manifest(&document).map_err(|why| self.invalid(why))?;
        let config = self.config(&document).await?;
        Ok(Found { digest: manifest.digest, document, config })
    }

    fn kind(&self, bytes: &[u8]) -> Result<Kind, PullError> {
        media::classify(bytes).map_err(|why| self.invalid(format!("its manifest cannot be read: {why}")))
    }

    fn parse(&self, bytes: &[u8]) -> Result<Document, PullError> {
        if bytes.len() as u64 > MAX_MANIFEST {
            return Err(self.invalid(format!("its manifest has more than {MAX_MANIFEST} bytes")));
        }
        Document::parse(bytes).map_err(|why| self.invalid(format!("its manifest cannot be read: {why}")))
    }

    async fn config(&self, document: &Document) -> Result<Config, PullError> {
        let piece =
            Piece { digest: document.config.digest.clone(), stored: document.config.size.cast_unsigned() };
        let bytes = self.stored(&piece, "config").await?;
        Config::parse(&bytes).map_err(|why| self.invalid(format!("its config cannot be read: {why}")))
    }

    async fn open(&self, piece: &Piece, what: &str) -> Result<Body, PullError> {
        let named = format!("{what}, blob {}", piece.digest);
        let body = answered(&named, self.registry.get_blob(self.repository, &piece.digest)).await;
        let body = body.map_err(|error| self.failed(error))?;
        let body = body.ok_or_else(|| self.invalid(format!("{what}: blob {} is missing", piece.digest)))?;
        Ok(lively(body, &named))
    }

    /// Why a body could not be read: what it is not is the artifact's fault, the rest is the registry's.
    fn broken(&self, what: &str, error: io::Error) -> PullError {
        match error.kind() {
            io::ErrorKind::InvalidData => self.invalid(format!("{what}: {error}")),
            _ => self.failed(RegistryError::unavailable(format!("reading {what}"), error)),
        }
    }

    /// A whole blob in memory, of exactly its stated size.
    async fn stored(&self, piece: &Piece, what: &str) -> Result<Vec<u8>, PullError> {
        let body = self.open(piece, what).await?;
        let mut bytes = Vec::with_capacity(usize::try_from(piece.stored).unwrap_or_default().min(8 << 20));
        let read = body.take(piece.stored + 1).read_to_end(&mut bytes).await;
        read.map_err(|error| self.broken(what, error))?;
        if bytes.len() as u64 != piece.stored {
            return Err(
                self.invalid(format!("{what}: {} does not have {} bytes", piece.digest, piece.stored))
            );
        }
        Ok(bytes)
    }

    /// Rebuilds every file in `sink`.
    pub(crate) async fn files(&self, files: &[FilePlan], sink: &mut dyn Sink) -> Result<(), PullError> {
        let window = self.window(files);
        for file in files {
            sink.begin(file).await?;
            let total = match window {
                Some(window) if file.pieces.len() > 1 => self.ahead(file, window, sink).await?,
                _ => self.streamed(file, sink).await?,
            };
            if total != file.payload {
                let message = format!("{} came to {total} bytes, not {}", file.name, file.payload);
                return Err(self.invalid(message));
            }
            sink.end().await?;
        }
        Ok(())
    }

    /// How many pieces may be fetched ahead; `None`: stream one at a time.
    fn window(&self, files: &[FilePlan]) -> Option<usize> {
        let encoded = || files.iter().filter(|file| file.pieces.len() > 1);
        let largest_in = encoded().flat_map(|file| &file.pieces).map(|piece| piece.stored).max()?;
        let largest_out = encoded().map(|file| file.ceiling).max()?;
        if largest_in > MAX_BUFFERED || largest_out > MAX_BUFFERED {
            return None;
        }
        let spare = self.options.budget().checked_sub(largest_out)?;
        let fitting = spare / (largest_in + largest_out).max(1);
        let window = self.options.concurrency().min(usize::try_from(fitting).unwrap_or(usize::MAX));
        (window >= 2).then_some(window)
    }

    /// Pieces are fetched and decoded ahead while earlier ones are written.
    async fn ahead(&self, file: &FilePlan, window: usize, sink: &mut dyn Sink) -> Result<u64, PullError> {
        let (ready, mut queue) = mpsc::channel::<Bytes>(1);
        let fetch = async move {
            // Not `iter().map().buffered()`: its closure would keep callers from spawning this future.
            let mut waiting = file.pieces.iter();
            let mut inflight = FuturesOrdered::new();
            loop {
                for piece in waiting.by_ref().take(window - inflight.len()) {
                    inflight.push_back(self.decoded(file, piece));
                }
                let Some(decoded) = inflight.next().await else { return Ok(()) };
                if ready.send(decoded?).await.is_err() {
                    return Ok(()); // the writer failed and says why
                }
            }
        };
        let write = async {
            let mut total = 0;
            while let Some(bytes) = queue.recv().await {
                total += bytes.len() as u64;
                if total > file.payload {
                    return Err(self.invalid(format!("{} has more than {} bytes", file.name, file.payload)));
                }
                sink.data(bytes).await?;
            }
            Ok(total)
        };
        futures::pin_mut!(fetch, write);
        match futures::future::select(fetch, write).await {
            futures::future::Either::Left((fetched, write)) => fetched.and(write.await),
            futures::future::Either::Right((written, fetch)) => {
                let total = written?;
                fetch.await.map(|()| total)
            }
        }
    }

    async fn decoded(&self, file: &FilePlan, piece: &Piece) -> Result<Bytes, PullError> {
        let bytes = self.stored(piece, &file.name).await?;
        if !file.zstd {
            return Ok(bytes.into());
        }
        let ceiling = file.ceiling;
        let decoded = tokio::task::spawn_blocking(move || decode(&bytes, ceiling)).await;
        let decoded = decoded.unwrap_or_else(|error| Err(io::Error::other(error)));
        let decoded =
            decoded.map_err(|error| self.broken(&format!("{} ({})", file.name, piece.digest), error))?;
        Ok(decoded.into())
    }

    /// Pieces one after the other, block by block.
    async fn streamed(&self, file: &FilePlan, sink: &mut dyn Sink) -> Result<u64, PullError> {
        let mut total = 0;
        for piece in &file.pieces {
            let body = self.open(piece, &file.name).await?;
            let mut blocks = blocks(body, piece.clone(), file.zstd);
            while let Some(block) = blocks.recv().await {
                let block = match block {
                    Ok(block) if block.is_empty() => break,
                    Ok(block) => block,
                    Err(error) => {
                        return Err(self.broken(&format!("{} ({})", file.name, piece.digest), error));
                    }
                };
                total += block.len() as u64;
                if total > file.payload {
                    return Err(self.invalid(format!("{} has more than {} bytes", file.name, file.payload)));
                }
                sink.data(block).await?;
            }
        }
        Ok(total)
    }
}

fn bad(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// Decodes a piece of whole frames to at most `ceiling` bytes, with a window no larger than that.
fn decode(bytes: &[u8], ceiling: u64) -> io::Result<Vec<u8>> {
    if window_size(bytes).is_some_and(|window| window > ceiling) {
        return Err(bad(format!("its window is larger than a piece can be ({ceiling} bytes)")));
    }
    let mut decoder = zstd::Decoder::with_buffer(bytes)?;
    let expected = usize::try_from(ceiling).unwrap_or_default().min(8 << 20);
    let mut decoded = Vec::with_capacity(expected);
    let read = (&mut decoder).take(ceiling + 1).read_to_end(&mut decoded);
    read.map_err(|error| bad(format!("not a zstd stream: {error}")))?;
    if decoded.len() as u64 > ceiling {
        return Err(bad(format!("it decodes to more than {ceiling} bytes")));
    }
    Ok(decoded)
}

/// The window that the first frame of a zstd stream asks for.
fn window_size(bytes: &[u8]) -> Option<u64> {
    let [0x28, 0xb5, 0x2f, 0xfd, descriptor, rest @ ..] = bytes else { return None };
    let single = descriptor & 0x20 != 0;
    if !single {
        let byte = u64::from(*rest.first()?);
        let base = 1_u64 << (10 + (byte >> 3));
        return Some(base + (base / 8) * (byte & 7));
    }
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size = rest.get(dictionary..)?;
    let field = |length: usize| {
        let bytes = size.get(..length)?;
        Some(bytes.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte)))
    };
    match descriptor >> 6 {
        0 => field(1),
        1 => Some(field(2)? + 256),
        2 => field(4),
        _ => field(8),
    }
}

/// Reads (and decodes) a body on a blocking thread. An empty block says that all is verified.
fn blocks(body: Body, piece: Piece, zstd: bool) -> mpsc::Receiver<io::Result<Bytes>> {
    let (sender, receiver) = mpsc::channel(2);
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || {
        let body = tokio_util::io::SyncIoBridge::new_with_handle(body, runtime);
        let stored = Exact { inner: body, left: piece.stored };
        let done = if zstd { send_decoded(stored, &sender) } else { send_blocks(stored, &sender) };
        let _ = sender.blocking_send(done.map(|()| Bytes::new()));
    });
    receiver
}

fn send_blocks(mut reader: impl io::Read, sender: &mpsc::Sender<io::Result<Bytes>>) -> io::Result<()> {
    loop {
        let mut block = Vec::with_capacity(BLOCK);
        (&mut reader).take(BLOCK as u64).read_to_end(&mut block)?;
        if block.is_empty() || sender.blocking_send(Ok(block.into())).is_err() {
            return Ok(());
        }
    }
}

fn send_decoded(stored: impl io::Read, sender: &mpsc::Sender<io::Result<Bytes>>) -> io::Result<()> {
    let mut buffered = io::BufReader::with_capacity(BLOCK / 4, stored);
    send_blocks(zstd::Decoder::with_buffer(&mut buffered)?, sender)?;
    // Whatever follows the last frame is read too, so that the body comes to its verified end.
    if io::copy(&mut buffered, &mut io::sink())? > 0 {
        return Err(bad("bytes after its compressed data"));
    }
    Ok(())
}

/// A reader of exactly `left` bytes: fewer or more are an error.
struct Exact<R> {
    inner: R,
    left: u64,
}

impl<R: io::Read> io::Read for Exact<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        let read = self.inner.read(buffer)? as u64;
        if read == 0 && self.left > 0 {
            return Err(bad(format!("it ends {} bytes early", self.left)));
        }
        self.left = self.left.checked_sub(read).ok_or_else(|| bad("it is longer than stated"))?;
        Ok(usize::try_from(read).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_of_a_frame_with_a_size_is_its_content() {
        let content = vec![1; 5000];
        let mut encoder = zstd::bulk::Compressor::new(1).unwrap();
        assert_eq!(window_size(&encoder.compress(&content).unwrap()), Some(5000));
        assert_eq!(window_size(b"no frame"), None);
    }

    #[test]
    fn a_piece_that_decodes_past_its_ceiling_is_refused_before_it_fills_memory() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
        assert!(decode(&bomb, 1 << 20).is_err());
    }
}
