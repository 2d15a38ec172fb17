//! Which checker answers which vector.

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::folder::{Vector, VectorFile};
use super::{cloudimg, guest, media, meta, net, older, quantities, snapshots};

/// What our code says to one vector.
pub(crate) enum Answer {
    /// Its answer, in the shape of the vector's `out`.
    Is(Value),
    /// The part that would answer does not exist yet.
    NotBuilt,
    /// An informative vector about something that is no rule of ours.
    NotApplicable,
}

/// Asks our code.
pub(crate) fn answer(file: &VectorFile, vector: &Vector) -> Result<Answer> {
    match file.name.as_str() {
        "annotations" => meta::annotations(vector).map(Answer::Is),
        "policy" => meta::policy(vector).map(Answer::Is),
        "vm_names_documented" => meta::names(vector).map(Answer::Is),
        "vm_names" => older::names(vector),
        "vk_provider" => older::agent(vector),
        "quantities" => quantities::answer(vector).map(Answer::Is),
        "references" => media::references(vector),
        "media_types" => media::types(vector),
        "snapshot_artifacts" => snapshots::artifact(&file.folder, vector),
        "snapshot_push" => snapshots::push(vector),
        "snapshot_read" => snapshots::read(vector),
        "cloudimg" => cloudimg::answer(vector),
        "guest_agent" => guest::answer(vector),
        "cocoon_net" => net::answer(vector),
        _ => Ok(Answer::NotBuilt),
    }
}

/// A vector of a function that its file is not known to have.
pub(crate) fn unknown_function<T>(vector: &Vector) -> Result<T> {
    bail!("no checker knows the function {:?}", vector.function)
}

impl Vector {
    /// A text of the input; absent is empty.
    pub(crate) fn text(&self, name: &str) -> &str {
        self.input.get(name).and_then(Value::as_str).unwrap_or_default()
    }

    /// A switch of the input; absent is off.
    pub(crate) fn flag(&self, name: &str) -> bool {
        self.input.get(name).and_then(Value::as_bool).unwrap_or_default()
    }

    /// A part of the input, parsed.
    pub(crate) fn parse<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let value = self.input.get(name).cloned().unwrap_or(Value::Null);
        serde_json::from_value(value).with_context(|| format!("the input {name:?} has another form"))
    }
}

/// The answer of something that refuses.
pub(crate) fn refused() -> Value {
    json!({ "ok": false, "error": true })
}
