//! What a reader accepts (§10): a manifest and config become a [`Plan`] or a message, without I/O.
//!
//! Nothing is written before a plan exists, so a snapshot that breaks a rule leaves no trace.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    config::{Config, FileRecord},
    sparse::{Extent, parse_map},
};
use crate::{
    digest,
    manifest::{Descriptor, Document, TITLE},
    media::{self, SNAPSHOT_CONFIG, SNAPSHOT_V1, SNAPSHOT_V2},
};

/// Most bytes of a config blob.
pub(crate) const MAX_CONFIG: u64 = 64 << 20;
/// Most pieces of one file.
pub(crate) const MAX_PIECES: u64 = 1 << 20;
/// The name under which the envelope travels.
pub(crate) const ENVELOPE_NAME: &str = "snapshot.json";
/// Permission bits of a file whose record has none.
const DEFAULT_MODE: i64 = 0o640;

/// One file to be rebuilt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FilePlan {
    pub(crate) name: String,
    pub(crate) mode: i64,
    pub(crate) sparse: Option<Sparse>,
    /// Bytes of the payload.
    pub(crate) payload: u64,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) zstd: bool,
    /// No piece may decode to more.
    pub(crate) ceiling: u64,
}

/// A sparse file's map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sparse {
    pub(crate) text: String,
    pub(crate) logical: u64,
    pub(crate) extents: Vec<Extent>,
}

/// One stored piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) digest: String,
    pub(crate) stored: u64,
}

/// Whether a name can be a file of a snapshot.
pub(crate) fn check_title(title: &str) -> Result<(), String> {
    let bad =
        title.is_empty() || title.contains(['/', '\\', '\0']) || matches!(title, "." | ".." | ENVELOPE_NAME);
    if bad { Err(format!("the file name {title:?} is not allowed")) } else { Ok(()) }
}

/// Checks the manifest as far as it goes without the config.
pub(crate) fn check_manifest(document: &Document) -> Result<(), String> {
    match document.artifact_type.as_str() {
        SNAPSHOT_V1 | SNAPSHOT_V2 => {}
        "" => return Err("its manifest has no artifact type, so it is no snapshot".to_owned()),
        other => return Err(format!("it has the artifact type {other:?}, which is no snapshot known here")),
    }
    if document.config.media_type != SNAPSHOT_CONFIG {
        return Err(format!("its config has the type {:?}", document.config.media_type));
    }
    let size = document.config.checked_size().map_err(|why| format!("config: {why}"))?;
    if size > MAX_CONFIG {
        return Err(format!("its config has {size} bytes (at most {MAX_CONFIG})"));
    }
    Ok(())
}

/// All files, in order of first appearance.
pub(crate) fn files(document: &Document, config: &Config) -> Result<Vec<FilePlan>, String> {
    let version = if document.artifact_type == SNAPSHOT_V1 { "v1" } else { "v2" };
    if config.schema_version != version {
        return Err(format!("its config says {:?}, its manifest {version:?}", config.schema_version));
    }
    let stored = stored_sizes(&document.layers)?;
    let mut order = Vec::new();
    let mut groups: BTreeMap<&str, Vec<&Descriptor>> = BTreeMap::new();
    for layer in &document.layers {
        let title = layer.annotations.get(TITLE).map_or("", String::as_str);
        check_title(title)?;
        if !media::is_snapshot_layer(&layer.media_type) {
            return Err(format!("{title} has the media type {:?}", layer.media_type));
        }
        let group = groups.entry(title).or_default();
        if group.is_empty() {
            order.push(title);
        }
        group.push(layer);
    }
    if let Some(name) = config.files.keys().find(|name| !groups.contains_key(name.as_str())) {
        return Err(format!("{name} has no layer"));
    }
    let plan = |title: &&str| {
        let record = config.files.get(*title).ok_or_else(|| format!("{title} is not in the config"))?;
        file(title, &groups[*title], record, &stored, version).map_err(|why| format!("{title}: {why}"))
    };
    order.iter().map(plan).collect()
}

/// Stored size by digest; a digest has one size wherever it appears.
fn stored_sizes(layers: &[Descriptor]) -> Result<BTreeMap<&str, u64>, String> {
    let mut sizes = BTreeMap::new();
    for layer in layers {
        let size = layer.checked_size()?;
        if sizes.insert(layer.digest.as_str(), size).is_some_and(|other| other != size) {
            return Err(format!("{} appears with two sizes", layer.digest));
        }
    }
    Ok(sizes)
}

fn file(
    name: &str,
    layers: &[&Descriptor],
    record: &FileRecord,
    stored: &BTreeMap<&str, u64>,
    version: &str,
) -> Result<FilePlan, String> {
    let zstd = layers.iter().filter(|layer| media::is_zstd(&layer.media_type)).count();
    if zstd != 0 && zstd != layers.len() {
        return Err("some of its pieces are compressed and some are not".to_owned());
    }
    let zstd = zstd != 0;
    if version == "v1" && (zstd || !record.chunks.is_empty()) {
        return Err("compressed or cut in a version 1 snapshot".to_owned());
    }
    let pieces = pieces(layers, record, stored)?;
    let size = u64::try_from(record.size).map_err(|_| format!("negative size {}", record.size))?;
    let encoded = zstd || !record.chunks.is_empty();
    let total: u64 = pieces.iter().map(|piece| piece.stored).fold(0, u64::saturating_add);
    if encoded && size == 0 {
        return Err("no size is recorded".to_owned());
    }
    if !zstd && size != 0 && total != size {
        return Err(format!("its pieces have {total} bytes, {size} are recorded"));
    }
    let payload = if encoded { size } else { total };
    let sparse = sparse(record, payload)?;
    let mode = if record.mode == 0 { DEFAULT_MODE } else { record.mode };
    if !(0..=0o7777).contains(&mode) {
        return Err(format!("mode {mode:o}"));
    }
    let ceiling = ceiling(payload, pieces.len() as u64);
    Ok(FilePlan { name: name.to_owned(), mode, sparse, payload, pieces, zstd, ceiling })
}

/// Pieces are cut at equal distances, so none can be longer than this.
fn ceiling(payload: u64, pieces: u64) -> u64 {
    match pieces {
        0 | 1 => payload,
        several => payload.saturating_sub(1) / (several - 1) + 1,
    }
}

fn pieces(
    layers: &[&Descriptor],
    record: &FileRecord,
    stored: &BTreeMap<&str, u64>,
) -> Result<Vec<Piece>, String> {
    if record.chunks.is_empty() {
        let [layer] = layers else { return Err(format!("{} layers but no order of them", layers.len())) };
        let stored = stored.get(layer.digest.as_str()).copied().unwrap_or_default();
        return Ok(vec![Piece { digest: layer.digest.clone(), stored }]);
    }
    if record.chunks.len() as u64 > MAX_PIECES {
        return Err(format!("{} pieces (at most {MAX_PIECES})", record.chunks.len()));
    }
    let used: BTreeSet<&str> = record.chunks.iter().map(String::as_str).collect();
    if let Some(layer) = layers.iter().find(|layer| !used.contains(layer.digest.as_str())) {
        return Err(format!("its piece {} is not in the order", layer.digest));
    }
    let piece = |digest: &String| match stored.get(digest.as_str()) {
        Some(stored) if digest::is_valid(digest) => Ok(Piece { digest: digest.clone(), stored: *stored }),
        _ => Err(format!("its piece {digest} has no layer")),
    };
    record.chunks.iter().map(piece).collect()
}

fn sparse(record: &FileRecord, payload: u64) -> Result<Option<Sparse>, String> {
    if record.sparse_map.is_empty() {
        return Ok(None);
    }
    let logical = u64::try_from(record.sparse_size).unwrap_or_default();
    let extents = parse_map(&record.sparse_map, logical, payload)?;
    Ok(Some(Sparse { text: record.sparse_map.clone(), logical, extents }))
}
