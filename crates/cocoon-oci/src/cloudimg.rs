//! OS (cloud) images (`spec/snapshot-wire-format.md` §13): the disk layers of an artifact, one after the
//! other.
//!
//! Entry point: [`open`]. Stricter than the reference: formats do not mix, parts have titles of their own,
//! and a whole disk stands alone. Every part is verified while it is read.

use std::{collections::BTreeSet, io};

use bytes::Bytes;
use futures::StreamExt as _;
use tokio::io::AsyncReadExt as _;

use crate::{
    digest,
    manifest::{Document, MAX_MANIFEST, TITLE, pick},
    media::{self, DiskFormat, Kind},
    patience::{answered, lively},
    reference::local,
    registry::{Manifest, Registry},
    snapshot::PullError,
};

/// One disk layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Digest of its bytes.
    pub digest: String,
    /// Its bytes.
    pub size: u64,
}

/// An OS image, found and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloudImage {
    /// Manifest digest.
    pub digest: String,
    /// The disk's format.
    pub format: DiskFormat,
    /// Disk layers in the order in which they form the disk.
    pub parts: Vec<Part>,
}

impl CloudImage {
    /// Bytes of the whole disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.parts.iter().map(|part| part.size).fold(0, u64::saturating_add)
    }
}

/// Chooses and orders the disk layers of a manifest. The message says which rule it breaks.
pub fn parts(document: &Document) -> Result<(DiskFormat, Vec<Part>), String> {
    let kind =
        media::kind_of(&document.artifact_type, &document.config.media_type, &document.media_type, false);
    if kind != Kind::CloudImage {
        return Err(format!("it is no OS image but {}", kind.as_str()));
    }
    let mut disks = Vec::new();
    for layer in &document.layers {
        if let Some((format, part)) = media::disk(&layer.media_type) {
            let title = layer.annotations.get(TITLE).map_or("", String::as_str);
            disks.push((
                title,
                format,
                part,
                Part { digest: layer.digest.clone(), size: layer.checked_size()? },
            ));
        }
    }
    disks.sort_by_key(|(title, ..)| *title);
    let Some((_, format, ..)) = disks.first() else { return Err("it has no disk layer".to_owned()) };
    let format = *format;
    if disks.iter().any(|(_, other, ..)| *other != format) {
        return Err("its disk layers are of different formats".to_owned());
    }
    if disks.len() > 1 {
        if disks.iter().any(|(_, _, part, _)| !part) {
            return Err("it has more than one disk, or parts beside a whole disk".to_owned());
        }
        let titles: BTreeSet<&str> = disks.iter().map(|(title, ..)| *title).collect();
        if titles.len() != disks.len() || titles.contains("") {
            return Err("its parts have no titles of their own, so their order is unknown".to_owned());
        }
    }
    Ok((format, disks.into_iter().map(|(.., part)| part).collect()))
}

/// Finds an OS image. An index is followed to its linux/amd64 manifest.
pub async fn open(
    registry: &dyn Registry,
    repository: &str,
    reference: &str,
) -> Result<CloudImage, PullError> {
    let name = local(repository, reference);
    let failed = |source| PullError::Registry { reference: name.clone(), source };
    let invalid = |message: String| PullError::Invalid { reference: name.clone(), message };
    let get = async |reference: &str| {
        answered(&name, registry.get_manifest(repository, reference)).await.map_err(failed)
    };
    let mut manifest = get(reference).await?.ok_or_else(|| PullError::NotFound(name.clone()))?;
    let mut document = parse(&manifest).map_err(invalid)?;
    if document.is_index() && document.artifact_type.is_empty() {
        let child = pick(&document.manifests)
            .ok_or_else(|| invalid("its index has no usable platform".to_owned()))?;
        let found = get(&child.digest).await?.filter(|found| digest::of(&found.bytes) == child.digest);
        manifest = found.ok_or_else(|| invalid(format!("the manifest {} is missing", child.digest)))?;
        document = parse(&manifest).map_err(invalid)?;
    }
    let (format, parts) = parts(&document).map_err(invalid)?;
    Ok(CloudImage { digest: manifest.digest, format, parts })
}

fn parse(manifest: &Manifest) -> Result<Document, String> {
    if manifest.bytes.len() as u64 > MAX_MANIFEST {
        return Err(format!("its manifest has more than {MAX_MANIFEST} bytes"));
    }
    Document::parse(&manifest.bytes).map_err(|why| format!("its manifest cannot be read: {why}"))
}

/// Streams the disk. Use nothing of it before its end came without an error.
pub fn stream<'a>(
    registry: &'a dyn Registry,
    repository: &'a str,
    image: &'a CloudImage,
) -> impl futures::Stream<Item = io::Result<Bytes>> + Send + 'a {
    futures::stream::iter(&image.parts).map(move |part| part_blocks(registry, repository, part)).flatten()
}

enum Step<'a> {
    Open(&'a Part),
    Read(crate::registry::Body, u64),
}

fn part_blocks<'a>(
    registry: &'a dyn Registry,
    repository: &'a str,
    part: &'a Part,
) -> impl futures::Stream<Item = io::Result<Bytes>> + Send + 'a {
    Box::pin(futures::stream::try_unfold(Step::Open(part), move |step| async move {
        let (mut body, left) = match step {
            Step::Read(body, left) => (body, left),
            Step::Open(part) => {
                let named = format!("blob {}", part.digest);
                let found = answered(&named, registry.get_blob(repository, &part.digest)).await;
                let body =
                    found.map_err(io::Error::other)?.ok_or_else(|| bad(format!("{named} is missing")))?;
                (lively(body, &named), part.size)
            }
        };
        let mut block = Vec::with_capacity(256 << 10);
        if body.read_buf(&mut block).await? == 0 {
            return if left == 0 {
                Ok(None)
            } else {
                Err(bad(format!("{} ends {left} bytes early", part.digest)))
            };
        }
        let left = left.checked_sub(block.len() as u64);
        let left = left.ok_or_else(|| bad(format!("{} is longer than {} bytes", part.digest, part.size)))?;
        Ok(Some((Bytes::from(block), Step::Read(body, left))))
    }))
}

fn bad(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}
