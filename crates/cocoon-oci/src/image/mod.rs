//! Container images, read layer by layer.
//!
//! Entry points: [`open_archive`] (OCI-layout tar or docker-save tar, plain or compressed) and
//! [`from_registry`]. Both give an [`ImageSource`]: the image's digest, its config and its layers, lowest
//! first; [`ImageSource::open_layer`] gives a blocking reader of a layer's *uncompressed* tar.
//!
//! Invariants: only linux/amd64 images; every document is verified against its digest before it is
//! believed; a layer's digest, size and uncompressed digest are verified when the reader comes to its
//! end, so nothing of a layer may be used before [`LayerReader::finish`] said yes; every size is capped.

mod archive;
mod layer;

use std::sync::Arc;

use bytes::Bytes;
use thiserror::Error;
use tokio::io::AsyncReadExt as _;

pub use archive::{open_archive, open_archive_named};
pub use layer::LayerReader;

use crate::{
    digest,
    json::{Node, parse},
    manifest::{Descriptor, Document, MAX_MANIFEST, exact},
    media::{self, Kind},
    patience::{answered, lively},
    registry::{Registry, RegistryError},
};

/// Most layers of one image.
pub const MAX_LAYERS: usize = 512;
/// Most bytes of an image's config.
pub const MAX_CONFIG: u64 = 8 << 20;
/// Most uncompressed bytes of one layer, unless changed in [`ImageSource::max_layer`].
pub const MAX_LAYER: u64 = 32 << 30;

/// Why an image could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImageError {
    /// A clean "not there".
    #[error("image {0} is not in the registry")]
    NotFound(String),
    /// The archive could not be read.
    #[error("reading the image archive {path}")]
    Archive {
        /// Which file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The registry could not be asked.
    #[error("reading the image {reference}")]
    Registry {
        /// Which image.
        reference: String,
        /// Why.
        #[source]
        source: RegistryError,
    },
    /// This is not an image that can be used.
    #[error("{image} is not a usable container image: {message}")]
    Invalid {
        /// Which image.
        image: String,
        /// Which rule it breaks.
        message: String,
    },
}

/// One layer of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRef {
    /// Digest of the stored bytes (of a docker-save layer: of its tar).
    pub digest: String,
    /// Media type as the manifest says it.
    pub media_type: String,
    /// Stored bytes.
    pub size: u64,
    /// Digest of the uncompressed tar.
    pub diff_id: String,
}

/// An image whose layers can be opened.
#[derive(Debug)]
pub struct ImageSource {
    /// Digest of the manifest; of a docker-save archive, which has none, of the config.
    pub digest: String,
    /// The image's config, verbatim (JSON: environment, entry point, working folder).
    pub config: Bytes,
    /// Lowest first.
    pub layers: Vec<LayerRef>,
    /// Cap on one layer's uncompressed bytes.
    pub max_layer: u64,
    name: String,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    Registry { registry: Arc<dyn Registry>, repository: String, runtime: tokio::runtime::Handle },
    Archive(archive::Slices),
}

impl ImageSource {
    /// Opens layer `index` (0 is the lowest) as its uncompressed tar. Blocks: not for async code.
    pub fn open_layer(&self, index: usize) -> Result<LayerReader, ImageError> {
        let Some(layer) = self.layers.get(index) else {
            return Err(invalid(&self.name, format!("there is no layer {index}")));
        };
        let raw: Box<dyn std::io::Read + Send> = match &self.origin {
            Origin::Archive(slices) => Box::new(slices.open(index)),
            Origin::Registry { registry, repository, runtime } => {
                let named = format!("layer {}", layer.digest);
                let found = runtime.block_on(answered(&named, registry.get_blob(repository, &layer.digest)));
                let body = found
                    .map_err(|source| ImageError::Registry { reference: self.name.clone(), source })?
                    .ok_or_else(|| invalid(&self.name, format!("{named} is missing")))?;
                Box::new(tokio_util::io::SyncIoBridge::new_with_handle(lively(body, &named), runtime.clone()))
            }
        };
        LayerReader::new(raw, layer, self.max_layer).map_err(|source| ImageError::Archive {
            path: format!("{} (layer {})", self.name, layer.digest),
            source,
        })
    }
}

fn invalid(image: &str, message: impl Into<String>) -> ImageError {
    ImageError::Invalid { image: image.to_owned(), message: message.into() }
}

/// Reads an image's manifest and config from a registry. Must run on a tokio runtime, whose handle the
/// layer readers use later.
pub async fn from_registry(
    registry: Arc<dyn Registry>,
    repository: &str,
    reference: &str,
) -> Result<ImageSource, ImageError> {
    let name = crate::reference::local(repository, reference);
    let failed = |source| ImageError::Registry { reference: name.clone(), source };
    let get = async |reference: &str| {
        answered(&name, registry.get_manifest(repository, reference)).await.map_err(failed)
    };
    let mut found = get(reference).await?.ok_or_else(|| ImageError::NotFound(name.clone()))?;
    let mut document = parse_manifest(&name, &found.bytes)?;
    if document.is_index() {
        let child = platform_entry(&name, &document)?;
        let missing = || invalid(&name, format!("the manifest {} of its index is missing", child.digest));
        found = get(&child.digest).await?.ok_or_else(missing)?;
        if digest::of(&found.bytes) != child.digest {
            return Err(invalid(&name, format!("the manifest {} has another digest", child.digest)));
        }
        document = parse_manifest(&name, &found.bytes)?;
    }
    check_kind(&name, &document)?;
    let config = read_config(registry.as_ref(), repository, &name, &document.config).await?;
    let layers = layers_of(&name, &document, &config)?;
    let runtime = tokio::runtime::Handle::current();
    let origin = Origin::Registry { registry, repository: repository.to_owned(), runtime };
    Ok(ImageSource { digest: found.digest, config, layers, max_layer: MAX_LAYER, name, origin })
}

async fn read_config(
    registry: &dyn Registry,
    repository: &str,
    name: &str,
    descriptor: &Descriptor,
) -> Result<Bytes, ImageError> {
    let size = config_size(name, descriptor)?;
    let failed = |source| ImageError::Registry { reference: name.to_owned(), source };
    let named = format!("config {}", descriptor.digest);
    let body = answered(&named, registry.get_blob(repository, &descriptor.digest)).await.map_err(failed)?;
    let body = body.ok_or_else(|| invalid(name, format!("its config {} is missing", descriptor.digest)))?;
    let mut bytes = Vec::new();
    let read = lively(body, &named).take(size + 1).read_to_end(&mut bytes).await;
    read.map_err(|error| {
        failed(RegistryError::unavailable(format!("reading {}", descriptor.digest), error))
    })?;
    check_config(name, descriptor, &bytes)?;
    Ok(bytes.into())
}

fn config_size(name: &str, descriptor: &Descriptor) -> Result<u64, ImageError> {
    let size = descriptor.checked_size().map_err(|why| invalid(name, format!("config: {why}")))?;
    if size > MAX_CONFIG {
        return Err(invalid(name, format!("its config has {size} bytes (at most {MAX_CONFIG})")));
    }
    Ok(size)
}

fn check_config(name: &str, descriptor: &Descriptor, bytes: &[u8]) -> Result<(), ImageError> {
    if i64::try_from(bytes.len()) != Ok(descriptor.size) || digest::of(bytes) != descriptor.digest {
        return Err(invalid(name, format!("its config is not what {} says", descriptor.digest)));
    }
    Ok(())
}

fn parse_manifest(name: &str, bytes: &[u8]) -> Result<Document, ImageError> {
    if bytes.len() as u64 > MAX_MANIFEST {
        return Err(invalid(name, format!("its manifest has more than {MAX_MANIFEST} bytes")));
    }
    Document::parse(bytes).map_err(|why| invalid(name, format!("its manifest cannot be read: {why}")))
}

fn platform_entry<'a>(name: &str, index: &'a Document) -> Result<&'a Descriptor, ImageError> {
    exact(&index.manifests).ok_or_else(|| {
        let platforms: Vec<String> = index
            .manifests
            .iter()
            .filter_map(|entry| entry.platform.as_ref())
            .map(|platform| format!("{}/{}", platform.os, platform.architecture))
            .collect();
        invalid(name, format!("it has no linux/amd64 variant, only [{}]", platforms.join(", ")))
    })
}

fn check_kind(name: &str, document: &Document) -> Result<(), ImageError> {
    let kind =
        media::kind_of(&document.artifact_type, &document.config.media_type, &document.media_type, false);
    match kind {
        Kind::ContainerImage => Ok(()),
        Kind::Snapshot => Err(invalid(name, "it is a VM snapshot; clone from it instead")),
        Kind::CloudImage => Err(invalid(name, "it is an OS image; import it as a cloud image")),
        Kind::Index => Err(invalid(name, "its index points to another index")),
        Kind::Unknown => Err(invalid(name, "its manifest does not describe a container image")),
    }
}

/// The layers of a checked manifest, each with its uncompressed digest from the config.
fn layers_of(name: &str, document: &Document, config: &[u8]) -> Result<Vec<LayerRef>, ImageError> {
    let diff_ids = diff_ids(name, config)?;
    if document.layers.len() != diff_ids.len() {
        let message = format!("{} layers but {} diff ids", document.layers.len(), diff_ids.len());
        return Err(invalid(name, message));
    }
    let layers = document.layers.iter().zip(diff_ids).map(|(layer, diff_id)| {
        let size = layer.checked_size().map_err(|why| invalid(name, format!("layer: {why}")))?;
        if !layer.media_type.contains(".tar") && !layer.media_type.ends_with("rootfs.diff.tar") {
            return Err(invalid(name, format!("layer {} has the type {:?}", layer.digest, layer.media_type)));
        }
        let (digest, media_type) = (layer.digest.clone(), layer.media_type.clone());
        Ok(LayerRef { digest, media_type, size, diff_id })
    });
    layers.collect()
}

/// Checks the config's platform and returns `rootfs.diff_ids`.
fn diff_ids(name: &str, config: &[u8]) -> Result<Vec<String>, ImageError> {
    let bad = |why: String| invalid(name, format!("its config cannot be used: {why}"));
    let root = parse(config).map_err(bad)?;
    for (key, wanted) in [("os", "linux"), ("architecture", "amd64")] {
        let found = root.text(key).map_err(bad)?;
        if !found.is_empty() && found != wanted {
            return Err(invalid(name, format!("it is made for {key} {found}, not {wanted}")));
        }
    }
    let rootfs = root.field("rootfs").cloned().unwrap_or(Node::Null);
    let ids = rootfs.list("diff_ids").map_err(bad)?;
    if ids.len() > MAX_LAYERS {
        return Err(invalid(name, format!("{} layers (at most {MAX_LAYERS})", ids.len())));
    }
    let ids = ids.iter().map(|id| match id {
        Node::Text(text) if digest::is_valid(text) => Ok(text.clone()),
        _ => Err(bad("malformed diff id".to_owned())),
    });
    ids.collect()
}
