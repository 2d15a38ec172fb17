//! Media types and kinds (`spec/snapshot-wire-format.md` §4, §13, §14).
//!
//! Entry points: [`for_file`] (which type a snapshot file's layer has), the predicates, [`classify`].

use crate::{
    json::{Node, parse},
    manifest::{DOCKER_LIST, OCI_INDEX},
};

/// Snapshot manifest, version 1 (`artifactType`).
pub const SNAPSHOT_V1: &str = "application/vnd.cocoonstack.snapshot.v1+json";
/// Snapshot manifest, version 2 (`artifactType`).
pub const SNAPSHOT_V2: &str = "application/vnd.cocoonstack.snapshot.v2+json";
/// Snapshot config blob of both versions.
pub const SNAPSHOT_CONFIG: &str = "application/vnd.cocoonstack.snapshot.config.v1+json";
/// OS image (`artifactType`).
pub const OS_IMAGE: &str = "application/vnd.cocoonstack.os-image.v1+json";
/// OS image, older name.
pub const WINDOWS_IMAGE: &str = "application/vnd.cocoonstack.windows-image.v1+json";
/// The config blob `{}`.
pub const EMPTY_CONFIG: &str = "application/vnd.oci.empty.v1+json";
/// Config of an OCI container image.
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Config of a Docker container image.
pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";

const VM_CONFIG: &str = "application/vnd.cocoonstack.vm.config+json";
const VM_STATE: &str = "application/vnd.cocoonstack.vm.state+json";
const VM_MEMORY: &str = "application/vnd.cocoonstack.vm.memory";
const VM_CIDATA: &str = "application/vnd.cocoonstack.vm.cidata";
const DISK_QCOW2: &str = "application/vnd.cocoonstack.disk.qcow2";
const DISK_RAW: &str = "application/vnd.cocoonstack.disk.raw";
const OTHER: &str = "application/octet-stream";
const SNAPSHOT_LAYERS: [&str; 7] = [VM_CONFIG, VM_STATE, VM_MEMORY, VM_CIDATA, DISK_QCOW2, DISK_RAW, OTHER];
const ZSTD: &str = "+zstd";

/// The raw media type of a snapshot file's layer.
#[must_use]
pub fn for_file(name: &str) -> &'static str {
    match name {
        "config.json" => VM_CONFIG,
        "state.json" => VM_STATE,
        "memory-ranges" => VM_MEMORY,
        "cidata.img" => VM_CIDATA,
        _ if name.ends_with(".qcow2") => DISK_QCOW2,
        _ if name.ends_with(".raw") => DISK_RAW,
        _ => OTHER,
    }
}

/// The compressed form of a media type.
#[must_use]
pub fn with_zstd(media_type: &str) -> String {
    format!("{media_type}{ZSTD}")
}

/// Whether content of this type is a zstd stream.
#[must_use]
pub fn is_zstd(media_type: &str) -> bool {
    media_type.ends_with(ZSTD)
}

/// The type without one `+zstd`.
#[must_use]
pub fn without_zstd(media_type: &str) -> &str {
    media_type.strip_suffix(ZSTD).unwrap_or(media_type)
}

/// Whether a snapshot layer may have this type.
#[must_use]
pub fn is_snapshot_layer(media_type: &str) -> bool {
    SNAPSHOT_LAYERS.contains(&without_zstd(media_type))
}

/// The format of an OS image's disk layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskFormat {
    /// qcow2.
    Qcow2,
    /// A plain disk image.
    Raw,
}

/// Format, and whether it is a part of a disk, if this is a disk layer of an OS image.
#[must_use]
pub fn disk(media_type: &str) -> Option<(DiskFormat, bool)> {
    let rest = media_type.strip_prefix("application/vnd.cocoonstack.")?;
    let rest = rest.strip_prefix("windows.").unwrap_or(rest).strip_prefix("disk.")?;
    match rest {
        "qcow2" => Some((DiskFormat::Qcow2, false)),
        "qcow2.part" => Some((DiskFormat::Qcow2, true)),
        "raw" => Some((DiskFormat::Raw, false)),
        "raw.part" => Some((DiskFormat::Raw, true)),
        _ => None,
    }
}

/// What a manifest describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A VM snapshot.
    Snapshot,
    /// An OS (cloud) image.
    CloudImage,
    /// An ordinary container image.
    ContainerImage,
    /// An index of manifests.
    Index,
    /// Anything else.
    Unknown,
}

impl Kind {
    /// The contract's word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::CloudImage => "cloud-image",
            Self::ContainerImage => "container-image",
            Self::Index => "image-index",
            Self::Unknown => "unknown",
        }
    }
}

/// Says what a manifest is from its own words (§14, first match wins). An error: this is no manifest.
pub fn classify(bytes: &[u8]) -> Result<Kind, String> {
    let root = parse(bytes)?;
    if root == Node::Null {
        return Ok(Kind::Unknown);
    }
    if !matches!(root, Node::Map(_)) {
        return Err("not a JSON object".to_owned());
    }
    root.map("config")?;
    let config = root.field("config").map(|config| config.text("mediaType")).transpose()?;
    let indexes = matches!(root.field("manifests"), Some(Node::List(items)) if !items.is_empty());
    Ok(kind_of(&root.text("artifactType")?, &config.unwrap_or_default(), &root.text("mediaType")?, indexes))
}

/// The rule of [`classify`] on the fields alone.
#[must_use]
pub fn kind_of(artifact_type: &str, config_type: &str, media_type: &str, has_manifests: bool) -> Kind {
    match (artifact_type, config_type, media_type) {
        (OS_IMAGE | WINDOWS_IMAGE, ..) => Kind::CloudImage,
        (SNAPSHOT_V1 | SNAPSHOT_V2, ..) => Kind::Snapshot,
        (_, OCI_CONFIG | DOCKER_CONFIG, _) => Kind::ContainerImage,
        (.., OCI_INDEX | DOCKER_LIST) => Kind::Index,
        (_, "", _) if has_manifests => Kind::Index,
        _ => Kind::Unknown,
    }
}
