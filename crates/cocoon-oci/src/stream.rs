//! The export tar, in and out (`spec/snapshot-wire-format.md` §5, §8, §9; `spec/engine-cli.md` §3).
//!
//! Entry points: [`push_stream`] (an exporter's tar becomes an artifact) and [`pull_stream`] (an artifact
//! becomes the tar an importer reads). A tar is an envelope `snapshot.json` and flat files; a sparse file
//! carries its map in private PAX records and its data extents as its body.
//!
//! Invariants: a tar that ends early, or without its end marker, is refused and moves no tag; a pull that
//! fails ends without an end marker, so that no importer can take it for whole. After the end marker the
//! tar is read to its end: an exporter that pads must not die of a closed pipe.

use std::collections::BTreeMap;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::{
    manifest::OCI_MANIFEST,
    registry::{Manifest, Registry},
    snapshot::{
        Facts, PullError, PullOptions, PushError, PushOptions, Pushed,
        config::Config,
        plan::{self, ENVELOPE_NAME, FilePlan},
        pull::{Sink, Source},
        push::{self, Block, Cut, Entries, Head},
    },
    tarfmt::{self, Assembler, BLOCK, Fed, Member, padding},
};

const SPARSE_MAP: &str = "COCOON.sparse.map";
const SPARSE_SIZE: &str = "COCOON.sparse.size";
/// Most bytes of an envelope.
const MAX_ENVELOPE: u64 = 64 << 20;
/// Bytes read of a large file at a time.
const STEP: u64 = 1 << 20;

/// Pushes an exporter's tar as `repository:tag`; the manifest goes last. An empty tag means `latest`.
pub async fn push_stream(
    registry: &dyn Registry,
    repository: &str,
    tag: &str,
    tar: impl AsyncRead + Send + Unpin,
    options: &PushOptions,
) -> Result<Pushed, PushError> {
    let tag = if tag.is_empty() { crate::reference::DEFAULT_TAG } else { tag };
    let mut entries = TarEntries { tar, left: 0, pad: 0, facts: None };
    push::run(registry, repository, tag, &mut entries, options).await
}

/// A tar as a source of files.
struct TarEntries<R> {
    tar: R,
    /// Bytes of the current member that were not taken yet.
    left: u64,
    pad: u64,
    facts: Option<Config>,
}

fn cut_short(error: std::io::Error) -> PushError {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => PushError::Invalid(
            "the exporter's tar ends early; nothing was published, export again".to_owned(),
        ),
        _ => PushError::File { path: "the exporter's tar".to_owned(), source: error },
    }
}

fn not_a_tar(why: impl std::fmt::Display) -> PushError {
    PushError::Invalid(format!("the exporter's tar cannot be read: {why}"))
}

impl<R: AsyncRead + Send + Unpin> TarEntries<R> {
    async fn block(&mut self) -> Result<[u8; BLOCK], PushError> {
        let mut block = [0; BLOCK];
        self.tar.read_exact(&mut block).await.map_err(cut_short)?;
        Ok(block)
    }

    async fn bytes(&mut self, length: u64) -> Result<Vec<u8>, PushError> {
        let mut bytes = Vec::with_capacity(usize::try_from(length.min(8 << 20)).unwrap_or_default());
        let read = (&mut self.tar).take(length).read_to_end(&mut bytes).await.map_err(cut_short)?;
        if read as u64 != length {
            return Err(cut_short(std::io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(bytes)
    }

    async fn skip(&mut self, length: u64) -> Result<(), PushError> {
        let mut body = (&mut self.tar).take(length);
        let skipped = tokio::io::copy(&mut body, &mut tokio::io::sink()).await.map_err(cut_short)?;
        if skipped == length { Ok(()) } else { Err(cut_short(std::io::ErrorKind::UnexpectedEof.into())) }
    }

    /// The next member, after what is left of the one before; `None` after a whole end marker.
    async fn member(&mut self) -> Result<Option<Member>, PushError> {
        let rest = std::mem::take(&mut self.left) + std::mem::take(&mut self.pad);
        self.skip(rest).await?;
        let mut assembler = Assembler::default();
        loop {
            let block = self.block().await?;
            match assembler.feed(&block).map_err(not_a_tar)? {
                Fed::Zero => break,
                Fed::Extension(size) => {
                    let body = self.bytes(size).await?;
                    self.skip(padding(size)).await?;
                    assembler.extension(&body).map_err(not_a_tar)?;
                }
                Fed::Member(member) => {
                    self.left = member.size;
                    self.pad = padding(member.size);
                    return Ok(Some(member));
                }
            }
        }
        if self.block().await?.iter().any(|byte| *byte != 0) {
            return Err(not_a_tar("its end marker is broken"));
        }
        tokio::io::copy(&mut self.tar, &mut tokio::io::sink()).await.map_err(cut_short)?;
        Ok(None)
    }

    async fn envelope(&mut self) -> Result<(), PushError> {
        if self.left > MAX_ENVELOPE {
            return Err(PushError::Invalid(format!("{ENVELOPE_NAME} has {} bytes", self.left)));
        }
        let length = std::mem::take(&mut self.left);
        let bytes = self.bytes(length).await?;
        let facts = Config::from_envelope(&bytes);
        self.facts = Some(facts.map_err(|why| PushError::Invalid(format!("{ENVELOPE_NAME}: {why}")))?);
        Ok(())
    }
}

/// Sparse map and logical size of a member, checked as the reader will check them.
fn sparse_of(member: &Member) -> Result<Option<(String, i64)>, PushError> {
    let bad = |why: String| PushError::Invalid(format!("{}: {why}", member.name));
    let map = member.pax.get(SPARSE_MAP).filter(|map| !map.is_empty());
    let Some(map) = map else { return Ok(None) };
    let size = member.pax.get(SPARSE_SIZE).ok_or_else(|| bad("a sparse map without a size".to_owned()))?;
    let size: i64 = size.parse().map_err(|_| bad(format!("a sparse size of {size:?}")))?;
    let logical = u64::try_from(size).map_err(|_| bad(format!("a sparse size of {size}")))?;
    crate::snapshot::sparse::parse_map(map, logical, member.size).map_err(bad)?;
    Ok(Some((map.clone(), size)))
}

#[async_trait]
impl<R: AsyncRead + Send + Unpin> Entries for TarEntries<R> {
    async fn next(&mut self, _: Cut) -> Result<Option<Head>, PushError> {
        while let Some(member) = self.member().await? {
            if !member.is_file() {
                continue;
            }
            if member.name == ENVELOPE_NAME {
                self.envelope().await?;
                continue;
            }
            let sparse = sparse_of(&member)?;
            let Member { name, mode, size, .. } = member;
            // The exporter's payload goes as it is.
            return Ok(Some(Head { name, mode, size, sparse, stride: None }));
        }
        Ok(None)
    }

    async fn take(&mut self, length: u64) -> Result<Block, PushError> {
        let bytes = self.bytes(length).await?;
        self.left -= length;
        Ok(Block::Memory(bytes))
    }

    async fn take_large(&mut self, length: u64) -> Result<Block, PushError> {
        self.take(length.min(STEP)).await
    }

    async fn facts(&mut self) -> Result<Config, PushError> {
        let missing = || PushError::Invalid(format!("the exporter's tar has no {ENVELOPE_NAME}"));
        self.facts.take().ok_or_else(missing)
    }
}

/// How a pulled tar is dressed.
#[derive(Debug, Clone)]
pub struct Dress<'a> {
    /// The name that the importer shall use.
    pub local_name: &'a str,
    /// Modification time of every member.
    pub now: jiff::Timestamp,
    /// Knobs.
    pub options: PullOptions,
}

/// Writes the tar of a snapshot's tag or digest. `Err` leaves the tar without its end marker: the importer
/// must be stopped then.
pub async fn pull_stream(
    registry: &dyn Registry,
    repository: &str,
    reference: &str,
    dress: &Dress<'_>,
    tar: impl AsyncWrite + Send + Unpin,
) -> Result<Facts, PullError> {
    let source = Source::new(registry, repository, reference, &dress.options);
    match source.manifest(reference).await? {
        Some(manifest) if !crate::snapshot::is_consumed(&manifest.bytes) => {
            write_tar(&source, manifest, dress, tar).await
        }
        _ => Err(PullError::NotFound(source.name)),
    }
}

/// [`pull_stream`] for a caller that already has the manifest.
pub async fn pull_stream_of(
    registry: &dyn Registry,
    repository: &str,
    manifest: impl Into<Bytes>,
    dress: &Dress<'_>,
    tar: impl AsyncWrite + Send + Unpin,
) -> Result<Facts, PullError> {
    let bytes: Bytes = manifest.into();
    let digest = crate::digest::of(&bytes);
    let source = Source::new(registry, repository, &digest, &dress.options);
    if repository.is_empty() {
        return Err(source.invalid("there is no repository name"));
    }
    let manifest = Manifest { bytes, media_type: OCI_MANIFEST.to_owned(), digest };
    write_tar(&source, manifest, dress, tar).await
}

async fn write_tar(
    source: &Source<'_>,
    manifest: Manifest,
    dress: &Dress<'_>,
    tar: impl AsyncWrite + Send + Unpin,
) -> Result<Facts, PullError> {
    let found = source.read(manifest).await?;
    let files = plan::files(&found.document, &found.config).map_err(|why| source.invalid(why))?;
    let mut sink = TarSink { tar, now: dress.now.as_second(), pad: 0 };
    let envelope = found.config.envelope_text(dress.local_name);
    sink.header(ENVELOPE_NAME, 0o644, envelope.len() as u64, &BTreeMap::new()).await?;
    sink.write(envelope.as_bytes()).await?;
    sink.end().await?;
    source.files(&files, &mut sink).await?;
    sink.write(&[0; 2 * BLOCK]).await?;
    sink.tar.flush().await.map_err(unwritten)?;
    Ok(found.facts())
}

/// The exact `snapshot.json` that a config blob becomes.
pub fn envelope_of(config: &[u8], local_name: &str) -> Result<String, String> {
    Ok(Config::parse(config)?.envelope_text(local_name))
}

/// A tar as a target of files.
struct TarSink<W> {
    tar: W,
    now: i64,
    pad: u64,
}

fn unwritten(source: std::io::Error) -> PullError {
    PullError::File { path: "the importer's tar".to_owned(), source }
}

impl<W: AsyncWrite + Send + Unpin> TarSink<W> {
    async fn write(&mut self, bytes: &[u8]) -> Result<(), PullError> {
        self.tar.write_all(bytes).await.map_err(unwritten)
    }

    async fn header(
        &mut self,
        name: &str,
        mode: i64,
        size: u64,
        pax: &BTreeMap<String, String>,
    ) -> Result<(), PullError> {
        let header = tarfmt::header(name, mode, size, self.now, pax);
        let header =
            header.map_err(|why| unwritten(std::io::Error::new(std::io::ErrorKind::InvalidInput, why)))?;
        self.pad = padding(size);
        self.write(&header).await
    }
}

#[async_trait]
impl<W: AsyncWrite + Send + Unpin> Sink for TarSink<W> {
    async fn begin(&mut self, file: &FilePlan) -> Result<(), PullError> {
        let mut pax = BTreeMap::new();
        if let Some(sparse) = &file.sparse {
            pax.insert(SPARSE_MAP.to_owned(), sparse.text.clone());
            pax.insert(SPARSE_SIZE.to_owned(), sparse.logical.to_string());
        }
        self.header(&file.name, file.mode, file.payload, &pax).await
    }

    async fn data(&mut self, bytes: Bytes) -> Result<(), PullError> {
        self.write(&bytes).await
    }

    async fn end(&mut self) -> Result<(), PullError> {
        let zeros = [0; BLOCK];
        let pad = usize::try_from(std::mem::take(&mut self.pad)).unwrap_or_default();
        self.write(&zeros[..pad]).await
    }
}
