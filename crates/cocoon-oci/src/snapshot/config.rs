//! The config blob and the export envelope (§3): two spellings of one set of facts.
//!
//! Numbers are kept as the wire's signed integers; [`Envelope`] is the typed view for our engine.

use std::collections::{BTreeMap, BTreeSet};

use super::{Empty, Envelope};
use crate::json::{Node, Writer, parse, parse_first};

/// What the config blob says about one file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileRecord {
    /// Permission bits; 0 means 0640 on read.
    pub mode: i64,
    /// The sparse map, verbatim; empty for an ordinary file.
    pub sparse_map: String,
    /// Logical bytes of a sparse file.
    pub sparse_size: i64,
    /// Payload bytes before compression; 0 when not recorded.
    pub size: i64,
    /// Pieces in order; empty for a file in one piece.
    pub chunks: Vec<String>,
}

/// The config blob.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Config {
    /// `v1` or `v2`.
    pub schema_version: String,
    /// The engine's snapshot id.
    pub snapshot_id: String,
    /// Free text.
    pub description: String,
    /// Base image ref.
    pub image: String,
    /// Base image digest.
    pub image_digest: String,
    /// `oci` or `cloudimg`.
    pub image_type: String,
    /// Blob hexes that the snapshot needs.
    pub image_blob_ids: BTreeSet<String>,
    /// The true hypervisor.
    pub hypervisor: String,
    /// vCPUs.
    pub cpu: i64,
    /// Guest memory, bytes.
    pub memory: i64,
    /// Writable disk, bytes.
    pub storage: i64,
    /// NICs.
    pub nics: i64,
    /// Network name.
    pub network: String,
    /// Windows guest.
    pub windows: bool,
    /// Files by name.
    pub files: BTreeMap<String, FileRecord>,
    /// RFC 3339; empty when unset.
    pub created_at: String,
}

impl Config {
    /// Parses the config blob.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let root = parse(bytes)?;
        if root != Node::Null && !matches!(root, Node::Map(_)) {
            return Err("not a JSON object".to_owned());
        }
        let files = root.map("files")?.iter().map(|(name, node)| Ok((name.clone(), file_record(node)?)));
        Ok(Self {
            schema_version: root.text("schemaVersion")?,
            snapshot_id: root.text("snapshotId")?,
            files: files.collect::<Result<_, String>>()?,
            created_at: moment(&root)?,
            ..Self::read_facts(&root, &CONFIG_KEYS)?
        })
    }

    /// Reads `snapshot.json`. Only version 1 is known (§3).
    pub fn from_envelope(bytes: &[u8]) -> Result<Self, String> {
        let root = parse_first(bytes)?;
        match root.int("version")? {
            Some(1) => {}
            other => return Err(format!("envelope version {other:?}, not 1")),
        }
        root.map("config")?;
        let nothing = Node::Map(Vec::new());
        let node = root.field("config").unwrap_or(&nothing);
        Ok(Self { snapshot_id: node.text("id")?, ..Self::read_facts(node, &ENVELOPE_KEYS)? })
    }

    /// The facts that both spellings have.
    fn read_facts(node: &Node, keys: &[&str; 12]) -> Result<Self, String> {
        let [description, image, digest, kind, ids, hypervisor, cpu, memory, storage, nics, network, windows] =
            keys;
        let int = |name| node.int(name).map(Option::unwrap_or_default);
        Ok(Self {
            description: node.text(description)?,
            image: node.text(image)?,
            image_digest: node.text(digest)?,
            image_type: node.text(kind)?,
            image_blob_ids: node.map(ids)?.iter().map(|(id, _)| id.clone()).collect(),
            hypervisor: node.text(hypervisor)?,
            cpu: int(cpu)?,
            memory: int(memory)?,
            storage: int(storage)?,
            nics: int(nics)?,
            network: node.text(network)?,
            windows: node.flag(windows)?,
            ..Self::default()
        })
    }

    /// The exact bytes of the blob.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::compact();
        writer.begin_map();
        writer.text_field("schemaVersion", &self.schema_version);
        writer.text_field("snapshotId", &self.snapshot_id);
        self.write_facts(&mut writer, &CONFIG_KEYS);
        if !self.files.is_empty() {
            writer.key("files");
            writer.begin_map();
            for (name, record) in &self.files {
                writer.key(name);
                write_record(&mut writer, record);
            }
            writer.end_map();
        }
        writer.text_unless_empty("createdAt", &self.created_at);
        writer.end_map();
        writer.finish().into_bytes()
    }

    /// The exact text of `snapshot.json` for an importer that calls the snapshot `local_name`.
    #[must_use]
    pub fn envelope_text(&self, local_name: &str) -> String {
        let mut writer = Writer::indented();
        writer.begin_map();
        writer.int_field("version", 1);
        writer.key("config");
        writer.begin_map();
        writer.text_unless_empty("id", &self.snapshot_id);
        writer.text_field("name", local_name);
        self.write_facts(&mut writer, &ENVELOPE_KEYS);
        writer.end_map();
        writer.end_map();
        writer.finish() + "\n"
    }

    fn write_facts(&self, writer: &mut Writer, keys: &[&str; 12]) {
        let [description, image, digest, kind, ids, hypervisor, cpu, memory, storage, nics, network, windows] =
            keys;
        writer.text_unless_empty(description, &self.description);
        writer.text_unless_empty(image, &self.image);
        writer.text_unless_empty(digest, &self.image_digest);
        writer.text_unless_empty(kind, &self.image_type);
        if !self.image_blob_ids.is_empty() {
            writer.key(ids);
            writer.begin_map();
            for id in &self.image_blob_ids {
                writer.key(id);
                writer.begin_map();
                writer.end_map();
            }
            writer.end_map();
        }
        writer.text_unless_empty(hypervisor, &self.hypervisor);
        writer.int_unless_zero(cpu, self.cpu);
        writer.int_unless_zero(memory, self.memory);
        writer.int_unless_zero(storage, self.storage);
        writer.int_unless_zero(nics, self.nics);
        writer.text_unless_empty(network, &self.network);
        writer.true_unless_false(windows, self.windows);
    }

    /// The typed view. A negative number is refused.
    pub fn to_envelope(&self, name: &str) -> Result<Envelope, String> {
        let count =
            |what: &str, value: i64| u64::try_from(value).map_err(|_| format!("negative {what}: {value}"));
        Ok(Envelope {
            id: self.snapshot_id.clone(),
            name: name.to_owned(),
            description: self.description.clone(),
            image: self.image.clone(),
            image_digest: self.image_digest.clone(),
            image_type: self.image_type.clone(),
            image_blob_ids: self.image_blob_ids.iter().map(|id| (id.clone(), Empty {})).collect(),
            hypervisor: self.hypervisor.clone(),
            cpu: count("cpu", self.cpu)?,
            memory: count("memory", self.memory)?,
            storage: count("storage", self.storage)?,
            nics: count("nics", self.nics)?,
            network: self.network.clone(),
            windows: self.windows,
        })
    }

    /// The wire view of our engine's facts.
    pub fn of_envelope(envelope: &Envelope) -> Result<Self, String> {
        let int = |what: &str, value: u64| {
            i64::try_from(value).map_err(|_| format!("{what} is too large: {value}"))
        };
        Ok(Self {
            snapshot_id: envelope.id.clone(),
            description: envelope.description.clone(),
            image: envelope.image.clone(),
            image_digest: envelope.image_digest.clone(),
            image_type: envelope.image_type.clone(),
            image_blob_ids: envelope.image_blob_ids.keys().cloned().collect(),
            hypervisor: envelope.hypervisor.clone(),
            cpu: int("cpu", envelope.cpu)?,
            memory: int("memory", envelope.memory)?,
            storage: int("storage", envelope.storage)?,
            nics: int("nics", envelope.nics)?,
            network: envelope.network.clone(),
            windows: envelope.windows,
            ..Self::default()
        })
    }
}

const CONFIG_KEYS: [&str; 12] = [
    "description",
    "image",
    "imageDigest",
    "imageType",
    "imageBlobIds",
    "hypervisor",
    "cpu",
    "memory",
    "storage",
    "nics",
    "network",
    "windows",
];
const ENVELOPE_KEYS: [&str; 12] = [
    "description",
    "image",
    "image_digest",
    "image_type",
    "image_blob_ids",
    "hypervisor",
    "cpu",
    "memory",
    "storage",
    "nics",
    "network",
    "windows",
];

fn moment(root: &Node) -> Result<String, String> {
    let Some(field) = root.field("createdAt") else { return Ok(String::new()) };
    match field {
        Node::Text(text) if text.parse::<jiff::Timestamp>().is_ok() => Ok(text.clone()),
        _ => Err("createdAt is not a moment in RFC 3339".to_owned()),
    }
}

fn file_record(node: &Node) -> Result<FileRecord, String> {
    if *node != Node::Null && !matches!(node, Node::Map(_)) {
        return Err("a file record is not an object".to_owned());
    }
    let chunks = node.list("chunks")?.iter().map(|chunk| match chunk {
        Node::Text(text) => Ok(text.clone()),
        _ => Err("a chunk is not a string".to_owned()),
    });
    Ok(FileRecord {
        mode: node.int("mode")?.unwrap_or_default(),
        sparse_map: node.text("sparseMap")?,
        sparse_size: node.int("sparseSize")?.unwrap_or_default(),
        size: node.int("size")?.unwrap_or_default(),
        chunks: chunks.collect::<Result<_, _>>()?,
    })
}

fn write_record(writer: &mut Writer, record: &FileRecord) {
    writer.begin_map();
    writer.int_unless_zero("mode", record.mode);
    writer.text_unless_empty("sparseMap", &record.sparse_map);
    writer.int_unless_zero("sparseSize", record.sparse_size);
    writer.int_unless_zero("size", record.size);
    if !record.chunks.is_empty() {
        writer.key("chunks");
        writer.begin_list();
        record.chunks.iter().for_each(|chunk| writer.text(chunk));
        writer.end_list();
    }
    writer.end_map();
}
