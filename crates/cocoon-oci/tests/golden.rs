//! The golden vectors of references, media types, snapshots and OS images, made by the original programs.
//!
//! `STRICTER` lists the vectors where our rules differ on purpose, each with its reason; a vector on it
//! must differ, so the list cannot rot.

#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test that cannot go on must stop"
)]

use std::{
    collections::BTreeMap,
    io::Read as _,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use cocoon_oci::{
    cloudimg, digest, manifest, media,
    memory::Memory,
    reference,
    registry::Registry as _,
    snapshot::{PullOptions, PushOptions, TagGuard},
    stream::{Dress, envelope_of, pull_stream, pull_stream_of, push_stream},
};
use futures::{StreamExt as _, TryStreamExt as _};
use serde_json::Value;

/// (vector, why we differ).
const STRICTER: &[(&str, &str)] = &[
    ("spush-0010", "a tar cut inside its padding is refused, not published without layers"),
    ("spush-0012", "a tar without an end marker is refused"),
    ("spush-0024", "a negative sparse size is refused on push too: nobody could pull it"),
    ("spush-0028", "file names with slashes are refused: they leave the snapshot's folder"),
    ("spush-0029", "the created annotation cannot be replaced by the caller"),
    ("sread-0010", "a config blob of another size than its descriptor says"),
    ("sread-0015", "a config without schemaVersion disagrees with the artifact type"),
    ("sread-0016", "schemaVersion and artifact type must agree"),
    ("sread-0018", "its files are not in the config"),
    ("sread-0030", "titles with slashes"),
    ("sread-0032", "the title ."),
    ("sread-0033", "the title .."),
    ("sread-0035", "titles with backslashes"),
    ("sread-0036", "absolute titles"),
    ("sread-0037", "a layer that the config does not list"),
    ("sread-0039", "a layer that the config does not list"),
    ("sread-0040", "two raw layers of one title"),
    ("sread-0048", "a sparse map that does not add up to the payload"),
    ("sread-0049", "a sparse map that is no JSON"),
    ("sread-0051", "a layer that the config does not list"),
    ("sread-0053", "a file of the config without a layer"),
    ("sread-0057", "schemaVersion and artifact type must agree"),
    ("sread-0070", "a piece of the title that the order does not use"),
    ("sread-0090", "a piece of the title that the order does not use"),
    ("sread-0095", "schemaVersion and artifact type must agree"),
    ("sread-0101", "the vector's blob does not have the digest under which it is stored"),
    ("sread-0109", "the index names its child by a malformed digest"),
    ("sread-0110", "the index names its child by a malformed digest"),
    ("sread-0111", "the index names its child by a malformed digest"),
    ("cimg-0005", "qcow2 and raw parts mixed, and a whole disk beside parts"),
    ("cimg-0006", "a part beside a whole disk"),
    ("cimg-0010", "parts of one title have no order"),
    ("cimg-0011", "a part without a title has no place in the order"),
];

fn golden() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cocoon-checks/golden");
    if here.is_dir() { here } else { PathBuf::from("/work/shared/golden") }
}

fn vectors(file: &str) -> Vec<Value> {
    let path = golden().join(file);
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let root: Value = serde_json::from_slice(&text).unwrap();
    root["vectors"].as_array().unwrap().clone()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(bytes).read_to_end(&mut plain).unwrap();
    plain
}

/// Collects differences; a vector on the list must differ.
#[derive(Default)]
struct Verdict(Vec<String>);

impl Verdict {
    fn check(&mut self, id: &str, outcome: Result<(), String>) {
        let listed = STRICTER.iter().any(|(listed, _)| *listed == id);
        match (outcome, listed) {
            (Err(why), false) => self.0.push(format!("{id}: {why}")),
            (Ok(()), true) => self.0.push(format!("{id}: listed as stricter but agrees")),
            _ => {}
        }
    }

    fn end(self) {
        assert!(self.0.is_empty(), "\n{}", self.0.join("\n"));
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, ours: T, theirs: T) -> Result<(), String> {
    if ours == theirs { Ok(()) } else { Err(format!("{what}:\n   ours {ours:?}\n theirs {theirs:?}")) }
}

#[test]
fn references_parse_and_join_like_the_original() {
    let mut verdict = Verdict::default();
    for vector in vectors("references.json") {
        let (input, out) = (&vector["in"], &vector["out"]);
        let outcome = match text(&vector, "fn") {
            "parse_ref" => {
                let (repository, tag) = reference::split(text(input, "ref"));
                let relative = reference::Relative::parse(text(input, "ref")).is_ok();
                same("split", (repository, tag), (text(out, "repo"), text(out, "tag"))).and(same(
                    "relative",
                    Some(relative),
                    out["is_relative"].as_bool(),
                ))
            }
            "registry_ref" => {
                let full =
                    reference::join(text(input, "base"), text(input, "repo"), text(input, "reference"));
                same("join", full.ok(), out["name"].as_str().map(str::to_owned))
            }
            "sha256_hex" => {
                let ours = digest::of(text(input, "data").as_bytes());
                same("digest", digest::hex_of(&ours), out.as_str())
            }
            other => Err(format!("unknown function {other}")),
        };
        verdict.check(text(&vector, "id"), outcome);
    }
    verdict.end();
}

#[test]
fn media_types_and_kinds_are_those_of_the_original() {
    let mut verdict = Verdict::default();
    for vector in vectors("media_types.json") {
        let (input, out) = (&vector["in"], &vector["out"]);
        let outcome = match text(&vector, "fn") {
            "media_type_for_file" => {
                let ours = media::for_file(text(input, "name"));
                same(
                    "type",
                    (ours, media::with_zstd(ours).as_str()),
                    (text(out, "media_type"), text(out, "zstd")),
                )
            }
            "media_type_predicates" => {
                let name = text(input, "media_type");
                let ours = serde_json::json!({
                    "is_disk": media::disk(name).is_some(), "is_snapshot_layer": media::is_snapshot_layer(name),
                    "is_zstd": media::is_zstd(name), "stripped": media::without_zstd(name),
                });
                same("predicates", &ours, out)
            }
            "classify" => {
                let bytes = text(input, "manifest").as_bytes();
                let kind = media::classify(bytes);
                same("error", kind.is_err(), out["error"] == true)
                    .and(same("kind", kind.map_or("unknown", media::Kind::as_str), text(out, "kind")))
                    .and(same("parse", manifest::Document::parse(bytes).is_err(), out["parse_error"] == true))
            }
            other => Err(format!("unknown function {other}")),
        };
        verdict.check(text(&vector, "id"), outcome);
    }
    verdict.end();
}

/// The original's options; what is zero or negative there is off or its own default.
fn options(input: &Value, clock: &str) -> PushOptions {
    let number = |key: &str| u64::try_from(input[key].as_i64().unwrap_or_default()).unwrap_or_default();
    let mut annotations: BTreeMap<String, String> =
        serde_json::from_value(input["annotations"].clone()).unwrap_or_default();
    for key in ["source", "revision"] {
        if !text(input, key).is_empty() {
            let entry = annotations.entry(format!("org.opencontainers.image.{key}"));
            entry.or_insert_with(|| text(input, key).to_owned());
        }
    }
    let budget = match number("memory_budget_mib") {
        0 => 9216,
        given => given,
    };
    PushOptions {
        zstd_level: i32::try_from(number("zstd_level")).unwrap(),
        chunk_size: number("chunk_size_mib") << 20,
        concurrency: usize::try_from(number("concurrency")).unwrap(),
        memory_budget: budget << 20,
        annotations,
        base_image: text(input, "base_image").to_owned(),
        vm_name: String::new(),
        created: clock.parse().unwrap(),
        tag_guard: TagGuard::Any,
    }
}

#[tokio::test]
async fn edge_cases_of_the_writer_come_out_like_the_original() {
    let mut verdict = Verdict::default();
    for vector in vectors("snapshot_push.json") {
        let (input, out) = (&vector["in"], &vector["out"]);
        let registry = Memory::new();
        let tar = gunzip(&STANDARD.decode(text(input, "stream_tar_gz_b64")).unwrap());
        for present in input["present_blobs"].as_array().into_iter().flatten() {
            registry.insert_raw("vm", present.as_str().unwrap(), Vec::new());
        }
        let knobs = &input["options"];
        let (name, tag) = (text(knobs, "name"), text(knobs, "tag"));
        let pushed = push_stream(&registry, name, tag, &*tar, &options(knobs, text(input, "clock"))).await;
        let outcome = match pushed {
            Err(error) => same("ok", false, out["ok"] == true).map_err(|why| format!("{why} ({error})")),
            Ok(pushed) => check_push(&registry, &pushed, out).await,
        };
        verdict.check(text(&vector, "id"), outcome);
    }
    verdict.end();
}

async fn check_push(
    registry: &Memory,
    pushed: &cocoon_oci::snapshot::Pushed,
    out: &Value,
) -> Result<(), String> {
    same("ok", true, out["ok"] == true)?;
    let manifest = registry.get_manifest("vm", text(out, "tag")).await.unwrap().unwrap();
    let document = manifest::Document::parse(&manifest.bytes).unwrap();
    let config = registry.blob("vm", &document.config.digest).unwrap();
    same("config", std::str::from_utf8(&config).unwrap(), text(out, "config"))?;
    same("manifest", std::str::from_utf8(&manifest.bytes).unwrap(), text(out, "manifest"))?;
    same("digest", pushed.digest.as_str(), text(out, "manifest_digest"))?;
    same("layers", Some(document.layers.len() as u64), out["layer_count"].as_u64())?;
    same("total", Some(pushed.total), out["total_size"].as_u64())?;
    let mut ours = registry.puts();
    let mut theirs: Vec<String> = serde_json::from_value(out["blob_puts"].clone()).unwrap();
    if document.layers.iter().any(|layer| layer.annotations.contains_key("cocoonstack.chunk.index")) {
        // Pieces go up in parallel: their order is chance, there as here.
        ours.sort();
        theirs.sort();
    }
    same("puts", ours, theirs)
}

async fn pull(
    registry: &Memory,
    repository: &str,
    manifest: &str,
    dress: &Dress<'_>,
) -> Result<Vec<u8>, String> {
    let mut tar = Vec::new();
    let pulled = pull_stream_of(registry, repository, manifest.to_owned(), dress, &mut tar).await;
    pulled.map(|_| tar).map_err(|error| error.to_string())
}

#[tokio::test]
async fn what_a_reader_accepts_it_turns_into_the_tar_of_the_original() {
    let mut verdict = Verdict::default();
    for vector in vectors("snapshot_read.json") {
        let (input, out) = (&vector["in"], &vector["out"]);
        let outcome = if text(&vector, "fn") == "envelope" {
            let config = input["config"].to_string();
            same(
                "envelope",
                envelope_of(config.as_bytes(), text(input, "local_name")).ok().as_deref(),
                out.as_str(),
            )
        } else {
            read_vector(input, out).await
        };
        verdict.check(text(&vector, "id"), outcome);
    }
    verdict.end();
}

async fn read_vector(input: &Value, out: &Value) -> Result<(), String> {
    let registry = Memory::new();
    let knobs = &input["stream"];
    let repository = text(knobs, "name");
    for (digest, blob) in input["blobs_b64"].as_object().unwrap() {
        registry.insert_raw(repository, digest, STANDARD.decode(blob.as_str().unwrap()).unwrap());
    }
    for (name, child) in input["child_manifests"].as_object().into_iter().flatten() {
        let (_, reference) = name.split_once(':').unwrap();
        registry.insert_manifest(
            repository,
            reference,
            manifest::OCI_MANIFEST,
            child.as_str().unwrap().to_owned(),
        );
    }
    let number = |key: &str| knobs[key].as_u64().unwrap_or_default();
    let options = PullOptions {
        concurrency: usize::try_from(number("concurrency")).unwrap(),
        memory_budget: number("memory_budget_mib") << 20,
    };
    let now = "2026-01-02T03:04:05Z".parse().unwrap();
    let dress = Dress { local_name: text(knobs, "local_name"), now, options };
    match pull(&registry, repository, text(input, "manifest"), &dress).await {
        Err(error) => same("ok", false, out["ok"] == true).map_err(|why| format!("{why} ({error})")),
        Ok(tar) => same("ok", true, out["ok"] == true)
            .and_then(|()| same("tar", digest::of(&tar).as_str(), text(out, "tar_sha256"))),
    }
}

#[tokio::test]
async fn os_images_stream_like_the_original() {
    let mut verdict = Verdict::default();
    for vector in vectors("cloudimg.json") {
        let (input, out) = (&vector["in"], &vector["out"]);
        let registry = Memory::new();
        for (digest, blob) in input["blobs_b64"].as_object().into_iter().flatten() {
            registry.insert_raw("img", digest, STANDARD.decode(blob.as_str().unwrap()).unwrap());
        }
        registry.insert_manifest("img", "t", manifest::OCI_MANIFEST, text(input, "manifest").to_owned());
        let streamed = async {
            let image = cloudimg::open(&registry, "img", "t").await.map_err(|error| error.to_string())?;
            let blocks: Result<Vec<_>, _> = cloudimg::stream(&registry, "img", &image).try_collect().await;
            Ok::<_, String>(blocks.map_err(|error| error.to_string())?.concat())
        };
        let outcome = match streamed.await {
            Err(error) => same("ok", false, out["ok"] == true).map_err(|why| format!("{why} ({error})")),
            Ok(bytes) => same("stream", STANDARD.encode(bytes).as_str(), text(out, "stream_b64")),
        };
        verdict.check(text(&vector, "id"), outcome);
    }
    verdict.end();
}

#[tokio::test]
async fn whole_artifacts_are_written_and_read_byte_for_byte() {
    let folder = golden().join("snapshot_artifacts");
    let file = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let cases = vectors("snapshot_artifacts/index.json");
    let checks = cases.iter().map(|case| async {
        let stored = case_reads(case, &file).await;
        stored.and(case_writes(case, &file).await).map_err(|why| format!("{}: {why}", text(case, "id")))
    });
    let outcomes: Vec<Result<(), String>> = futures::stream::iter(checks).buffered(1).collect().await;
    let wrong: Vec<String> = outcomes.into_iter().filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn dress(case: &Value) -> Dress<'_> {
    let now = text(case, "clock").parse().unwrap();
    Dress { local_name: text(case, "import_local_name"), now, options: PullOptions::default() }
}

/// The original's artifact becomes the original's tar.
async fn case_reads(case: &Value, file: &impl Fn(&str) -> Vec<u8>) -> Result<(), String> {
    let registry = Memory::new();
    for blob in case["blobs"].as_array().unwrap() {
        let digest = blob.as_str().unwrap();
        let name = format!("blobs/sha256/{}", digest::hex_of(digest).unwrap());
        registry.insert_raw("vm", digest, file(&name));
    }
    let manifest = String::from_utf8(file(text(case, "manifest"))).unwrap();
    let tar = pull(&registry, "vm", &manifest, &dress(case)).await?;
    same("imported tar", tar == gunzip(&file(text(case, "import_tar"))), true)
}

/// The original's tar becomes the original's artifact, and ours reads back as the original's tar.
async fn case_writes(case: &Value, file: &impl Fn(&str) -> Vec<u8>) -> Result<(), String> {
    let registry = Memory::new();
    let tar = gunzip(&file(text(case, "stream")));
    let knobs = options(&case["options"], text(case, "clock"));
    let pushed = push_stream(&registry, "vm", text(case, "tag"), &*tar, &knobs).await;
    let pushed = pushed.map_err(|error| error.to_string())?;
    let manifest = registry.get_manifest("vm", text(case, "tag")).await.unwrap().unwrap();
    if case["writer_deterministic"] == true {
        let document = manifest::Document::parse(&manifest.bytes).unwrap();
        let config = registry.blob("vm", &document.config.digest).unwrap();
        same(
            "config",
            String::from_utf8_lossy(&config),
            String::from_utf8_lossy(&file(text(case, "config"))),
        )?;
        let theirs = file(text(case, "manifest"));
        same("manifest", String::from_utf8_lossy(&manifest.bytes), String::from_utf8_lossy(&theirs))?;
        same("digest", pushed.digest.as_str(), text(case, "manifest_digest"))?;
        same("total", Some(pushed.total), case["total_size"].as_u64())?;
    }
    let mut back = Vec::new();
    let pulled = pull_stream(&registry, "vm", text(case, "tag"), &dress(case), &mut back).await;
    pulled.map_err(|error| error.to_string())?;
    same("tar of our own artifact", back == gunzip(&file(text(case, "import_tar"))), true)
}
