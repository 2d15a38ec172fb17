//! Patches: JSON, merge and strategic merge.
//!
//! Entry points: [`Patch::parse`], which also reports fields that do not belong, and [`Patch::apply`].
//! Server-side apply has its place in [`Patch::parse`] and is refused there until it is served.

pub(crate) mod strategic;

use std::collections::BTreeSet;

use json_patch::PatchOperation;
use serde_json::{Map, Value};

use crate::{error::ApiError, resources::Kind};

/// Most operations of one JSON patch.
const OPERATIONS: usize = 10_000;
/// Most unknown fields of a JSON patch that are looked at.
const FIELDS: usize = 32;
/// Most bytes that the copies of one JSON patch may make.
const COPIED: usize = 3 << 20;

/// A parsed patch.
#[derive(Debug)]
pub(crate) enum Patch {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
}

impl Patch {
    /// Reads a patch of the given content type (parameters already cut off). The texts are complaints about
    /// fields given twice, and unknown ones of a JSON patch.
    pub(crate) fn parse(content_type: &str, body: &[u8]) -> Result<(Self, Vec<String>), ApiError> {
        let unreadable =
            |error: serde_json::Error| ApiError::bad_request(format!("error decoding patch: {error}"));
        let read = || crate::fields::parse_json(body).map_err(unreadable);
        let object = || match read()? {
            found @ (Value::Object(_), _) => Ok(found),
            _ => Err(ApiError::bad_request("error decoding patch: a merge patch must be a JSON object")),
        };
        match content_type {
            "application/json-patch+json" => {
                let (value, mut complaints) = read()?;
                complaints.extend(unknown(&value));
                let patch: json_patch::Patch = serde_json::from_value(value).map_err(unreadable)?;
                if patch.0.len() > OPERATIONS {
                    let message = format!("The allowed maximum operations in a JSON patch is {OPERATIONS}");
                    return Err(ApiError::new(413, "RequestEntityTooLarge", message));
                }
                Ok((Self::Json(patch), complaints))
            }
            "application/merge-patch+json" => object().map(|(value, twice)| (Self::Merge(value), twice)),
            "application/strategic-merge-patch+json" => {
                object().map(|(value, twice)| (Self::Strategic(value), twice))
            }
            other => Err(unsupported(other)),
        }
    }

    /// `current` as the patch wants it.
    pub(crate) fn apply(&self, kind: &Kind, mut current: Value) -> Result<Value, ApiError> {
        match self {
            Self::Json(patch) => apply_json(patch, &mut current)?,
            Self::Merge(patch) => json_patch::merge(&mut current, patch),
            Self::Strategic(patch) => strategic::merge(kind.merge, &mut current, patch).map_err(|error| {
                ApiError::bad_request(format!("unable to apply the strategic merge patch: {error}"))
            })?,
        }
        Ok(current)
    }
}

/// Complaints about fields that the operations of a JSON patch do not have; one a field is enough.
fn unknown(operations: &Value) -> BTreeSet<String> {
    const KNOWN: [&str; 4] = ["op", "path", "from", "value"];
    let operations = operations.as_array().into_iter().flatten().filter_map(Value::as_object);
    let unknown = operations.flat_map(Map::keys).filter(|field| !KNOWN.contains(&field.as_str()));
    unknown.map(|field| format!("json patch unknown field \"{field}\"")).take(FIELDS).collect()
}

/// Operation by operation, so that a few copies cannot blow the object up.
fn apply_json(patch: &json_patch::Patch, current: &mut Value) -> Result<(), ApiError> {
    let mut copied = 0;
    for operation in &patch.0 {
        if let PatchOperation::Copy(copy) = operation {
            copied += current.pointer(copy.from.as_str()).map_or(0, |value| value.to_string().len());
        }
        if copied > COPIED {
            let message = format!("Unable to complete the JSON patch: it copies more than {COPIED} bytes");
            return Err(ApiError::new(413, "RequestEntityTooLarge", message));
        }
        json_patch::patch(current, std::slice::from_ref(operation)).map_err(|error| {
            let message = format!("the server rejected our request due to an error in our request: {error}");
            ApiError::new(422, "Invalid", message)
        })?;
    }
    Ok(())
}

fn unsupported(content_type: &str) -> ApiError {
    let apply = content_type.starts_with("application/apply-patch");
    let why = if apply { "server-side apply is not served by this release; " } else { "" };
    ApiError::new(
        415,
        "UnsupportedMediaType",
        format!(
            "{why}the body of the request was in an unknown format ({content_type}) - accepted media types include: \
             application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json"
        ),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::by_table;

    fn patched(content_type: &str, patch: &Value, current: Value) -> Result<Value, ApiError> {
        let kind = by_table("configmaps").ok_or_else(ApiError::no_path)?;
        Patch::parse(content_type, patch.to_string().as_bytes())?.0.apply(kind, current)
    }

    #[test]
    fn a_json_patch_cannot_blow_an_object_up() {
        let grow: Vec<_> =
            (0..60).map(|at| json!({ "op": "copy", "from": "/a", "path": format!("/a/{at}") })).collect();
        let error =
            patched("application/json-patch+json", &json!(grow), json!({ "a": { "x": "y" } })).unwrap_err();
        assert_eq!(error.code, 413);
    }

    #[test]
    fn a_patch_that_cannot_be_read_or_applied_is_refused() {
        for (content_type, patch, code) in [
            ("application/json-patch+json", json!({}), 400),
            ("application/json-patch+json", json!([{ "op": "remove", "path": "/none" }]), 422),
            ("application/json-patch+json", json!([{ "op": "test", "path": "/a", "value": 2 }]), 422),
            ("application/merge-patch+json", json!([]), 400),
            ("application/strategic-merge-patch+json", json!("x"), 400),
            ("application/apply-patch+yaml", json!({}), 415),
            ("application/json", json!({}), 415),
        ] {
            assert_eq!(
                patched(content_type, &patch, json!({ "a": 1 })).unwrap_err().code,
                code,
                "{content_type} {patch}"
            );
        }
    }
}
