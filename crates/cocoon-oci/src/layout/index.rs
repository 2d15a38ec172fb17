//! `index.json`: which names point to which manifests.
//!
//! An entry's `org.opencontainers.image.ref.name` is `repository:tag` (or `repository@digest` for a
//! manifest that was put by digest), which is what `skopeo inspect --raw oci:PATH:repository:tag` looks
//! for. Fields that are not ours are kept. Anything unreadable is an error and never "empty" (I5).

use std::{io, path::Path};

use cocoon_kit::files;
use serde_json::{Map, Value, json};

use crate::{
    digest,
    reference::{local, split},
    registry::RegistryError,
};

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const MAX_INDEX: u64 = 64 << 20;

/// The parsed `index.json`.
#[derive(Debug)]
pub(super) struct Index {
    root: Map<String, Value>,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) digest: String,
    pub(super) media_type: String,
}

impl Entry {
    /// The repository that the entry's name belongs to.
    pub(super) fn repository(&self) -> &str {
        self.name.split_once('@').map_or_else(|| split(&self.name).0, |(repository, _)| repository)
    }

    /// The tag, unless the entry was put by digest.
    pub(super) fn tag(&self) -> Option<&str> {
        (!self.name.contains('@') && !self.name.is_empty()).then(|| split(&self.name).1)
    }
}

fn path(root: &Path) -> std::path::PathBuf {
    root.join("index.json")
}

fn broken(root: &Path, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> RegistryError {
    let file = path(root);
    RegistryError::unavailable(
        format!("reading {} (restore or repair the file; it is not taken as empty)", file.display()),
        why,
    )
}

impl Index {
    /// The content of a new layout.
    pub(super) fn empty_text() -> String {
        json!({"schemaVersion": 2, "mediaType": crate::manifest::OCI_INDEX, "manifests": []}).to_string()
    }

    /// Reads and checks the file.
    pub(super) fn read(root: &Path) -> Result<Self, RegistryError> {
        let bytes = read_capped(&path(root), MAX_INDEX).map_err(|error| broken(root, error))?;
        let value = serde_json::from_slice(&bytes).map_err(|error| broken(root, error))?;
        let Value::Object(map) = value else { return Err(broken(root, "not a JSON object")) };
        let index = Self { root: map };
        index.check().map_err(|why| broken(root, why))?;
        Ok(index)
    }

    fn check(&self) -> Result<(), String> {
        if self.root.get("schemaVersion").and_then(Value::as_u64) != Some(2) {
            return Err("schemaVersion is not 2".to_owned());
        }
        let Some(Value::Array(entries)) = self.root.get("manifests") else {
            return Err("there is no list of manifests".to_owned());
        };
        for entry in entries {
            let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or_default();
            if !digest::is_valid(text("digest")) {
                return Err(format!("an entry has the digest {:?}", text("digest")));
            }
            if text("mediaType").is_empty() {
                return Err(format!("the entry of {} has no media type", text("digest")));
            }
        }
        Ok(())
    }

    fn raw(&self) -> &[Value] {
        self.root.get("manifests").and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// All entries, in the file's order.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> {
        self.raw().iter().map(entry_of)
    }

    /// The entry of a tag or digest of one repository.
    pub(super) fn find(&self, repository: &str, reference: &str) -> Option<Entry> {
        if digest::is_valid(reference) {
            return self
                .entries()
                .find(|entry| entry.repository() == repository && entry.digest == reference);
        }
        let name = local(repository, reference);
        self.entries().find(|entry| entry.name == name)
    }

    /// Points `repository` and `reference` to a manifest.
    pub(super) fn point(&mut self, repository: &str, reference: &str, target: &Target<'_>) {
        let name = local(repository, reference);
        let entry = json!({
            "mediaType": target.media_type,
            "digest": target.digest,
            "size": target.size,
            "annotations": {REF_NAME: name},
        });
        if let Some(Value::Array(entries)) = self.root.get_mut("manifests") {
            entries.retain(|entry| entry_of(entry).name != name);
            entries.push(entry);
        }
    }

    /// Removes a tag, or every name of a digest in one repository. Whether anything was there.
    pub(super) fn forget(&mut self, repository: &str, reference: &str) -> bool {
        let by_digest = digest::is_valid(reference);
        let name = local(repository, reference);
        let Some(Value::Array(entries)) = self.root.get_mut("manifests") else { return false };
        let before = entries.len();
        entries.retain(|raw| {
            let entry = entry_of(raw);
            let hit = if by_digest {
                entry.repository() == repository && entry.digest == reference
            } else {
                entry.name == name
            };
            !hit
        });
        entries.len() != before
    }

    /// Replaces the file durably. The caller holds the layout's lock.
    pub(super) fn write(&self, root: &Path) -> Result<(), RegistryError> {
        let text = serde_json::to_vec(&self.root).map_err(|error| broken(root, error))?;
        files::replace(&path(root), &text, 0o644).map_err(|error| {
            let file = path(root);
            RegistryError::unavailable(
                format!("writing {} (the tag is as it was; free disk space, then try again)", file.display()),
                error,
            )
        })
    }
}

/// What a name points to.
#[derive(Debug)]
pub(super) struct Target<'a> {
    pub(super) digest: &'a str,
    pub(super) media_type: &'a str,
    pub(super) size: usize,
}

fn entry_of(raw: &Value) -> Entry {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    Entry {
        name: text(raw.get("annotations").and_then(|annotations| annotations.get(REF_NAME))),
        digest: text(raw.get("digest")),
        media_type: text(raw.get("mediaType")),
    }
}

/// Reads a whole file that must not be larger than `cap`.
pub(super) fn read_capped(path: &Path, cap: u64) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(cap + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > cap {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("larger than {cap} bytes")));
    }
    Ok(bytes)
}
