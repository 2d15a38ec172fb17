//! Snapshot artifacts, written and read (cocoon-oci).

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cocoon_oci::manifest::{Document, OCI_MANIFEST};
use cocoon_oci::memory::Memory;
use cocoon_oci::registry::{Manifest, Registry as _};
use cocoon_oci::snapshot::{PullOptions, PushOptions, TagGuard};
use cocoon_oci::stream::{Dress, envelope_of, pull_stream, pull_stream_of, push_stream};
use cocoon_oci::{digest, reference};
use flate2::read::GzDecoder;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::checkers::{Answer, refused, unknown_function};
use super::folder::Vector;
use super::registry::{block_on, null_if_empty, with_blobs};

const MIB: u64 = 1 << 20;
/// The original's push budget when unset; ours is smaller (a knob, design section 5).
const ORIGINAL_PUSH_BUDGET: u64 = 9216 * MIB;
/// The clock of the vectors that name none.
const CLOCK: &str = "2026-01-02T03:04:05Z";

fn ungzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut plain = Vec::new();
    GzDecoder::new(bytes).read_to_end(&mut plain)?;
    Ok(plain)
}

fn options(options: &Value, clock: &str) -> Result<PushOptions> {
    let number = |name: &str| options[name].as_i64().unwrap_or_default().max(0).unsigned_abs();
    let text = |name: &str| options[name].as_str().unwrap_or_default().to_owned();
    let given: Option<BTreeMap<String, String>> = serde_json::from_value(options["annotations"].clone())?;
    let mut annotations: BTreeMap<String, String> =
        [("source", text("source")), ("revision", text("revision"))]
            .into_iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| (format!("org.opencontainers.image.{name}"), value))
            .collect();
    annotations.extend(given.unwrap_or_default());
    let budget = number("memory_budget_mib") * MIB;
    Ok(PushOptions {
        zstd_level: i32::try_from(options["zstd_level"].as_i64().unwrap_or_default())?,
        chunk_size: number("chunk_size_mib") * MIB,
        concurrency: usize::try_from(number("concurrency"))?,
        memory_budget: if budget == 0 { ORIGINAL_PUSH_BUDGET } else { budget },
        annotations,
        base_image: text("base_image"),
        vm_name: String::new(),
        created: clock.parse().context("clock")?,
        tag_guard: TagGuard::Any,
    })
}

// ---- writer edge cases -------------------------------------------------------------------------

pub(crate) fn push(vector: &Vector) -> Result<Answer> {
    if vector.function != "push" {
        return unknown_function(vector);
    }
    let asked = &vector.input["options"];
    let name = asked["name"].as_str().unwrap_or_default();
    let tag = asked["tag"].as_str().unwrap_or_default();
    let registry = Memory::new();
    for digest in vector.input["present_blobs"].as_array().into_iter().flatten() {
        registry.insert_raw(name, digest.as_str().unwrap_or_default(), Vec::new());
    }
    let tar = STANDARD.decode(vector.text("stream_tar_gz_b64"))?;
    let tar = ungzip(&tar)?;
    let options = options(asked, vector.text("clock"))?;
    block_on(async {
        let pushed = push_stream(&registry, name, tag, tar.as_slice(), &options).await;
        let tag = if tag.is_empty() { reference::DEFAULT_TAG } else { tag };
        let manifest = registry.get_manifest(name, tag).await?;
        let puts = in_any_order(null_if_empty(registry.puts()), &vector.output["blob_puts"]);
        let (Ok(pushed), Some(manifest)) = (pushed, &manifest) else {
            let mut ours = refused();
            ours["manifest_put"] = manifest.is_some().into();
            ours["blob_puts"] = puts;
            return Ok(Answer::Is(ours));
        };
        let (document, config) = opened(&registry, name, manifest, vector)?;
        Ok(Answer::Is(json!({
            "ok": true,
            "tag": tag,
            "manifest_put": true,
            "manifest": String::from_utf8_lossy(&manifest.bytes),
            "manifest_digest": pushed.digest,
            "config": config,
            "layer_count": document.layers.len(),
            "total_size": pushed.total,
            "blob_puts": puts,
        })))
    })
}

/// Pieces of one file are sent side by side, so their order is nobody's contract: the same blobs in
/// another order count as the expected ones.
fn in_any_order(ours: Value, expected: &Value) -> Value {
    let sorted = |list: &Value| {
        let mut texts: Vec<String> = list.as_array().into_iter().flatten().map(Value::to_string).collect();
        texts.sort();
        texts
    };
    if ours.is_array() && sorted(&ours) == sorted(expected) { expected.clone() } else { ours }
}

/// The manifest, parsed, and the text of its config blob.
fn opened(registry: &Memory, name: &str, manifest: &Manifest, vector: &Vector) -> Result<(Document, String)> {
    let document = Document::parse(&manifest.bytes).map_err(anyhow::Error::msg)?;
    let config = registry.blob(name, &document.config.digest);
    let config = config.with_context(|| format!("{}: the config blob is not there", vector.id))?;
    Ok((document, String::from_utf8(config.to_vec())?))
}

// ---- reader edge cases -------------------------------------------------------------------------

pub(crate) fn read(vector: &Vector) -> Result<Answer> {
    let ours = match vector.function.as_str() {
        "stream" => stream(vector)?,
        "envelope" => {
            let config = serde_json::to_vec(&vector.input["config"])?;
            envelope_of(&config, vector.text("local_name")).map_err(anyhow::Error::msg)?.into()
        }
        _ => return unknown_function(vector),
    };
    Ok(Answer::Is(ours))
}

fn stream(vector: &Vector) -> Result<Value> {
    let asked = &vector.input["stream"];
    let number = |name: &str| asked[name].as_u64().unwrap_or_default();
    let name = asked["name"].as_str().unwrap_or_default();
    let registry = with_blobs(vector, name)?;
    let dress = Dress {
        local_name: asked["local_name"].as_str().unwrap_or_default(),
        now: CLOCK.parse()?,
        options: PullOptions {
            concurrency: usize::try_from(number("concurrency"))?,
            memory_budget: number("memory_budget_mib") * MIB,
        },
    };
    let mut tar = Vec::new();
    let manifest = vector.text("manifest").as_bytes().to_vec();
    let pulled =
        block_on(async { Ok(pull_stream_of(&registry, name, manifest, &dress, &mut tar).await.is_ok()) })?;
    if !pulled {
        return Ok(refused());
    }
    Ok(json!({
        "ok": true,
        "tar_size": tar.len(),
        "tar_sha256": digest::of(&tar),
        "entries": entries(&tar)?,
    }))
}

/// The members of a tar, read by other code than that which wrote it.
fn entries(tar: &[u8]) -> Result<Vec<Value>> {
    let mut archive = tar::Archive::new(tar);
    let mut found = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let mut pax = Map::new();
        for extension in entry.pax_extensions()?.into_iter().flatten() {
            let extension = extension?;
            if extension.key()?.starts_with("COCOON.") {
                pax.insert(extension.key()?.to_owned(), extension.value()?.into());
            }
        }
        let mut body = Vec::new();
        entry.read_to_end(&mut body)?;
        let mut member = json!({
            "name": String::from_utf8_lossy(&entry.path_bytes()),
            "size": body.len(),
            "mode": entry.header().mode()?,
            "body_b64": STANDARD.encode(&body),
        });
        if !pax.is_empty() {
            member["pax"] = pax.into();
        }
        found.push(member);
    }
    Ok(found)
}

// ---- whole artifacts ---------------------------------------------------------------------------

/// One artifact of the index: written byte for byte (where the writer is deterministic), and read byte for
/// byte, the original's as well as ours.
pub(crate) fn artifact(folder: &Path, vector: &Vector) -> Result<Answer> {
    let case = Case { folder, vector };
    let (export, import) = (case.tar("stream")?, case.tar("import_tar")?);
    ensure!(digest::of(&export) == case.text("stream_sha256"), "the exporter's stream is another one");
    ensure!(digest::of(&import) == case.text("import_tar_sha256"), "the importer's tar is another one");
    let options = options(&vector.extra["options"], case.text("clock"))?;
    block_on(async {
        let theirs = case.registry()?;
        case.reads(&theirs, &import).await.context("reading the original's artifact")?;
        let ours = Memory::new();
        let (name, tag) = (case.text("name"), case.text("tag"));
        let pushed = push_stream(&ours, name, tag, export.as_slice(), &options).await?;
        let manifest = ours.get_manifest(name, tag).await?.context("nothing was pushed")?;
        ensure!(
            manifest.digest == pushed.digest,
            "the push says {}, the tag is {}",
            pushed.digest,
            manifest.digest
        );
        case.written(&ours, &manifest, pushed.total)?;
        case.reads(&ours, &import).await.context("reading our artifact")?;
        Ok(Answer::Is(vector.output.clone()))
    })
}

struct Case<'a> {
    folder: &'a Path,
    vector: &'a Vector,
}

impl Case<'_> {
    fn text(&self, name: &str) -> &str {
        let member =
            if name == "name" { &self.vector.extra["options"]["name"] } else { &self.vector.extra[name] };
        member.as_str().unwrap_or_default()
    }

    fn file(&self, path: &str) -> Result<Vec<u8>> {
        let path = self.folder.join(path);
        std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn tar(&self, name: &str) -> Result<Vec<u8>> {
        ungzip(&self.file(self.text(name))?)
    }

    /// The original's artifact.
    fn registry(&self) -> Result<Memory> {
        let memory = Memory::new();
        for blob in self.vector.extra["blobs"].as_array().into_iter().flatten() {
            let digest = blob.as_str().unwrap_or_default();
            let bytes = self.file(&format!("blobs/{}", digest.replace(':', "/")))?;
            memory.insert_raw(self.text("name"), digest, bytes);
        }
        let manifest = self.file(self.text("manifest"))?;
        memory.insert_manifest(self.text("name"), self.text("tag"), OCI_MANIFEST, manifest);
        Ok(memory)
    }

    /// What a pull writes is the importer's tar.
    async fn reads(&self, registry: &Memory, import: &[u8]) -> Result<()> {
        let now: Timestamp = self.text("clock").parse().context("clock")?;
        let dress =
            Dress { local_name: self.text("import_local_name"), now, options: PullOptions::default() };
        let mut tar = Vec::new();
        pull_stream(registry, self.text("name"), self.text("tag"), &dress, &mut tar).await?;
        ensure!(tar == import, "the tar differs: {}", first_difference(&tar, import));
        Ok(())
    }

    /// Manifest and config are the original's, byte for byte. Compressed pieces depend on the encoder, so
    /// there only the shape must agree.
    fn written(&self, ours: &Memory, manifest: &Manifest, total: u64) -> Result<()> {
        let (document, config) = opened(ours, self.text("name"), manifest, self.vector)?;
        let layers = self.vector.extra["layer_count"].as_u64();
        ensure!(
            Some(document.layers.len() as u64) == layers,
            "{} layers, not {layers:?}",
            document.layers.len()
        );
        let expected = self.file(self.text("manifest"))?;
        if self.vector.extra["writer_deterministic"] != true {
            let theirs = Document::parse(&expected).map_err(anyhow::Error::msg)?;
            return same_shape(&document, &theirs);
        }
        let wanted = self.file(self.text("config"))?;
        ensure!(
            config.as_bytes() == wanted,
            "the config differs: {}",
            first_difference(config.as_bytes(), &wanted)
        );
        let difference = first_difference(&manifest.bytes, &expected);
        ensure!(manifest.bytes == expected, "the manifest differs: {difference}");
        ensure!(manifest.digest == self.text("manifest_digest"), "the digest is {}", manifest.digest);
        ensure!(Some(total) == self.vector.extra["total_size"].as_u64(), "the total size is {total}");
        Ok(())
    }
}

/// The same layers but for their bytes.
fn same_shape(ours: &Document, theirs: &Document) -> Result<()> {
    ensure!(ours.artifact_type == theirs.artifact_type, "the artifact type is {}", ours.artifact_type);
    ensure!(ours.annotations == theirs.annotations, "the annotations are {:?}", ours.annotations);
    for (at, (ours, theirs)) in ours.layers.iter().zip(&theirs.layers).enumerate() {
        ensure!(ours.media_type == theirs.media_type, "layer {at} has the type {}", ours.media_type);
        ensure!(ours.annotations == theirs.annotations, "layer {at} is annotated {:?}", ours.annotations);
    }
    Ok(())
}

fn first_difference(ours: &[u8], theirs: &[u8]) -> String {
    let at = ours.iter().zip(theirs).position(|(l, r)| l != r).unwrap_or(ours.len().min(theirs.len()));
    let around = |bytes: &[u8]| {
        let part = bytes.get(at.saturating_sub(40)..(at + 80).min(bytes.len())).unwrap_or_default();
        String::from_utf8_lossy(part).into_owned()
    };
    let (l, r) = (around(ours), around(theirs));
    format!("byte {at} of {} and {}: {l:?} where {r:?} is expected", ours.len(), theirs.len())
}
