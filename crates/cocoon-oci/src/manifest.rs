//! OCI manifests and indexes: the fields that this crate acts on, read with the contract's leniency and
//! written with its exact bytes (`spec/snapshot-wire-format.md` §2).

use std::collections::BTreeMap;

use crate::{
    digest,
    json::{Node, Writer, parse},
};

/// The OCI image manifest's media type.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// The OCI image index's media type.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Docker's manifest, schema 2.
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// Docker's manifest list.
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
/// Layer and descriptor annotation: a file's name.
pub const TITLE: &str = "org.opencontainers.image.title";

/// Bytes of a manifest that are read at most.
pub const MAX_MANIFEST: u64 = 32 << 20;

/// A pointer to content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Media type of the content.
    pub media_type: String,
    /// Digest as written; not checked for form.
    pub digest: String,
    /// Stored bytes; may be negative in a hostile manifest.
    pub size: i64,
    /// Annotations.
    pub annotations: BTreeMap<String, String>,
    /// `os/architecture[/variant]` parts, when the descriptor carries a platform.
    pub platform: Option<Platform>,
}

/// What a descriptor in an index runs on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`.
    pub architecture: String,
}

/// A manifest or index, parsed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document {
    /// `mediaType`, possibly empty.
    pub media_type: String,
    /// `artifactType`, possibly empty.
    pub artifact_type: String,
    /// `config`.
    pub config: Descriptor,
    /// `layers`.
    pub layers: Vec<Descriptor>,
    /// `manifests` of an index.
    pub manifests: Vec<Descriptor>,
    /// `annotations`.
    pub annotations: BTreeMap<String, String>,
}

impl Document {
    /// Parses a manifest or index. The message says which field is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let root = parse(bytes)?;
        if root != Node::Null && !matches!(root, Node::Map(_)) {
            return Err("not a JSON object".to_owned());
        }
        root.int("schemaVersion")?;
        let config = match root.field("config") {
            None => Descriptor::default(),
            Some(node) => descriptor(node)?,
        };
        Ok(Self {
            media_type: root.text("mediaType")?,
            artifact_type: root.text("artifactType")?,
            config,
            layers: descriptors(&root, "layers")?,
            manifests: descriptors(&root, "manifests")?,
            annotations: root.texts("annotations")?,
        })
    }

    /// Everything that this document needs, in order.
    pub fn descriptors(&self) -> impl Iterator<Item = &Descriptor> {
        let config = (!self.config.digest.is_empty()).then_some(&self.config);
        config.into_iter().chain(&self.layers).chain(&self.manifests)
    }

    /// Every digest that this document needs, in order.
    pub fn references(&self) -> impl Iterator<Item = &str> {
        self.descriptors().map(|descriptor| descriptor.digest.as_str())
    }

    /// Whether this is an index of manifests rather than a manifest.
    #[must_use]
    pub fn is_index(&self) -> bool {
        matches!(self.media_type.as_str(), OCI_INDEX | DOCKER_LIST)
            || (self.config.media_type.is_empty() && !self.manifests.is_empty())
    }

    /// The exact bytes of a manifest as the contract writes it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::indented();
        writer.begin_map();
        writer.int_field("schemaVersion", 2);
        writer.text_field("mediaType", &self.media_type);
        writer.text_unless_empty("artifactType", &self.artifact_type);
        writer.key("config");
        write_descriptor(&mut writer, &self.config);
        writer.key("layers");
        if self.layers.is_empty() {
            writer.null();
        } else {
            writer.begin_list();
            self.layers.iter().for_each(|layer| write_descriptor(&mut writer, layer));
            writer.end_list();
        }
        if !self.annotations.is_empty() {
            writer.texts_field("annotations", &self.annotations);
        }
        writer.end_map();
        writer.finish().into_bytes()
    }
}

fn descriptors(root: &Node, name: &str) -> Result<Vec<Descriptor>, String> {
    root.list(name)?.iter().map(descriptor).collect()
}

fn descriptor(node: &Node) -> Result<Descriptor, String> {
    match node {
        Node::Null => return Ok(Descriptor::default()),
        Node::Map(_) => {}
        _ => return Err("a descriptor is not an object".to_owned()),
    }
    let platform = match node.field("platform") {
        None => None,
        Some(platform @ Node::Map(_)) => {
            Some(Platform { os: platform.text("os")?, architecture: platform.text("architecture")? })
        }
        Some(_) => return Err("a platform is not an object".to_owned()),
    };
    Ok(Descriptor {
        media_type: node.text("mediaType")?,
        digest: node.text("digest")?,
        size: node.int("size")?.unwrap_or_default(),
        annotations: node.texts("annotations")?,
        platform,
    })
}

fn write_descriptor(writer: &mut Writer, descriptor: &Descriptor) {
    writer.begin_map();
    writer.text_field("mediaType", &descriptor.media_type);
    writer.text_field("digest", &descriptor.digest);
    writer.int_field("size", descriptor.size);
    if !descriptor.annotations.is_empty() {
        writer.texts_field("annotations", &descriptor.annotations);
    }
    writer.end_map();
}

/// Picks from an index: linux/amd64, else the first entry with a platform whose architecture is known.
#[must_use]
pub fn pick(manifests: &[Descriptor]) -> Option<&Descriptor> {
    exact(manifests).or_else(|| {
        manifests.iter().find(|entry| {
            entry.platform.as_ref().is_some_and(|platform| {
                !platform.architecture.is_empty() && platform.architecture != "unknown"
            })
        })
    })
}

/// The linux/amd64 entry of an index.
#[must_use]
pub fn exact(manifests: &[Descriptor]) -> Option<&Descriptor> {
    manifests.iter().find(|entry| {
        entry
            .platform
            .as_ref()
            .is_some_and(|platform| platform.os == "linux" && platform.architecture == "amd64")
    })
}

impl Descriptor {
    /// The size, if digest and size have a possible form.
    pub(crate) fn checked_size(&self) -> Result<u64, String> {
        if !digest::is_valid(&self.digest) {
            return Err(format!("malformed digest {:?}", self.digest));
        }
        u64::try_from(self.size).map_err(|_| format!("negative size {} of {}", self.size, self.digest))
    }
}
