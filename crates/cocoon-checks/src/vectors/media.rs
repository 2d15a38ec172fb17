//! References, media types and the classification of manifests (cocoon-oci).

use anyhow::Result;
use cocoon_oci::manifest::Document;
use cocoon_oci::{digest, media, reference};
use serde_json::{Value, json};

use super::checkers::{Answer, refused, unknown_function};
use super::folder::Vector;

pub(crate) fn references(vector: &Vector) -> Result<Answer> {
    let ours = match vector.function.as_str() {
        "parse_ref" => {
            let (repo, tag) = reference::split(vector.text("ref"));
            let is_relative = reference::Relative::parse(vector.text("ref")).is_ok();
            json!({ "repo": repo, "tag": tag, "is_relative": is_relative })
        }
        "registry_ref" => {
            let identifier = vector.text("reference");
            match reference::join(vector.text("base"), vector.text("repo"), identifier) {
                Ok(name) => json!({ "ok": true, "name": name, "identifier": identifier }),
                Err(_) => refused(),
            }
        }
        "sha256_hex" => {
            let digest = digest::of(vector.text("data").as_bytes());
            digest::hex_of(&digest).into()
        }
        _ => return unknown_function(vector),
    };
    Ok(Answer::Is(ours))
}

pub(crate) fn types(vector: &Vector) -> Result<Answer> {
    let ours = match vector.function.as_str() {
        "media_type_for_file" => {
            let raw = media::for_file(vector.text("name"));
            json!({ "media_type": raw, "zstd": media::with_zstd(raw) })
        }
        "media_type_predicates" => {
            let given = vector.text("media_type");
            json!({
                "is_disk": media::disk(given).is_some(),
                "is_snapshot_layer": media::is_snapshot_layer(given),
                "is_zstd": media::is_zstd(given),
                "stripped": media::without_zstd(given),
            })
        }
        "classify" => classify(vector),
        _ => return unknown_function(vector),
    };
    Ok(Answer::Is(ours))
}

/// From the bytes, and (where the vector asks) from the parsed document.
fn classify(vector: &Vector) -> Value {
    let bytes = vector.text("manifest").as_bytes();
    let kind = media::classify(bytes);
    let document = Document::parse(bytes);
    let mut ours = json!({
        "error": kind.is_err().then_some(true),
        "kind": kind.unwrap_or(media::Kind::Unknown).as_str(),
    });
    if vector.output.get("parse_error").is_some() {
        ours["parse_error"] = document.is_err().then_some(true).into();
    } else if let Ok(document) = document {
        let kind = media::kind_of(
            &document.artifact_type,
            &document.config.media_type,
            &document.media_type,
            !document.manifests.is_empty(),
        );
        ours["kind_parsed"] = kind.as_str().into();
    }
    ours
}
