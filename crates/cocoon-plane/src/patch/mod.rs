//! Patches: JSON, merge and strategic merge.
//!
//! Entry points: [`Patch::parse`] and [`Patch::apply`]. Server-side apply has its place in
//! [`Patch::parse`] and is refused there until it is served.

pub(crate) mod strategic;

use serde_json::Value;

use crate::{error::ApiError, resources::Kind};

/// Most operations of one JSON patch.
const OPERATIONS: usize = 10_000;

/// A parsed patch.
#[derive(Debug)]
pub(crate) enum Patch {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
}

impl Patch {
    /// Reads a patch of the given content type (parameters already cut off).
    pub(crate) fn parse(content_type: &str, body: &[u8]) -> Result<Self, ApiError> {
        let unreadable =
            |error: serde_json::Error| ApiError::bad_request(format!("error decoding patch: {error}"));
        let object = || match serde_json::from_slice(body).map_err(unreadable)? {
            value @ Value::Object(_) => Ok(value),
            _ => Err(ApiError::bad_request("error decoding patch: a merge patch must be a JSON object")),
        };
        match content_type {
            "application/json-patch+json" => {
                let patch: json_patch::Patch = serde_json::from_slice(body).map_err(unreadable)?;
                if patch.0.len() > OPERATIONS {
                    let message = format!("The allowed maximum operations in a JSON patch is {OPERATIONS}");
                    return Err(ApiError::new(413, "RequestEntityTooLarge", message));
                }
                Ok(Self::Json(patch))
            }
            "application/merge-patch+json" => object().map(Self::Merge),
            "application/strategic-merge-patch+json" => object().map(Self::Strategic),
            other => Err(unsupported(other)),
        }
    }

    /// `current` as the patch wants it.
    pub(crate) fn apply(&self, kind: &Kind, mut current: Value) -> Result<Value, ApiError> {
        match self {
            Self::Json(patch) => json_patch::patch(&mut current, patch).map_err(|error| {
                let message =
                    format!("the server rejected our request due to an error in our request: {error}");
                ApiError::new(422, "Invalid", message)
            })?,
            Self::Merge(patch) => json_patch::merge(&mut current, patch),
            Self::Strategic(patch) => strategic::merge(kind.merge, &mut current, patch).map_err(|error| {
                ApiError::bad_request(format!("unable to apply the strategic merge patch: {error}"))
            })?,
        }
        Ok(current)
    }
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
