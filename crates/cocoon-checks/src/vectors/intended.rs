//! Where we differ from the originals on purpose: `intended.json`.
//!
//! Each entry names a file, the vectors (by id, or by the name of their case), the reason, and what our
//! answer is instead: `ours` is the whole answer, or `set` gives single members of it by JSON pointer
//! and leaves the rest as it was. An entry with `whenever` instead of vectors holds for a whole file: a
//! member where our answer is that text may differ, and a checker gives the text only when it has made
//! sure that it is true.

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::folder::{Vector, VectorFile};

const LIST: &str = include_str!("intended.json");

/// The list.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub(crate) struct Intended(Vec<Difference>);

/// One intended difference.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Difference {
    file: String,
    #[serde(default)]
    ids: Vec<String>,
    #[serde(default)]
    cases: Vec<String>,
    /// Why we differ.
    pub(crate) reason: String,
    ours: Option<Value>,
    #[serde(default)]
    set: Map<String, Value>,
    whenever: Option<String>,
}

impl Intended {
    /// Reads the list that is built in.
    pub(crate) fn load() -> Result<Self> {
        serde_json::from_str(LIST).context("src/vectors/intended.json is malformed")
    }

    /// The entry of a file whose mark explains every difference between two answers, if any.
    pub(crate) fn explains(&self, file: &VectorFile, original: &Value, ours: &Value) -> bool {
        let marks = self.0.iter().filter(|difference| difference.file == file.name);
        marks
            .filter_map(|difference| difference.whenever.as_deref())
            .any(|mark| same_but(original, ours, mark))
    }

    /// The entry that covers a vector, if any.
    pub(crate) fn find(&self, file: &VectorFile, vector: &Vector) -> Option<&Difference> {
        let case = vector.input.get("case").and_then(Value::as_str);
        self.0.iter().find(|difference| {
            difference.file == file.name
                && (difference.ids.contains(&vector.id)
                    || case.is_some_and(|case| difference.cases.iter().any(|listed| listed == case)))
        })
    }
}

impl Difference {
    /// What our answer is, given the original's.
    pub(crate) fn ours(&self, original: &Value) -> Value {
        let mut answer = self.ours.clone().unwrap_or_else(|| original.clone());
        for (pointer, value) in &self.set {
            if let Some(member) = answer.pointer_mut(pointer) {
                *member = value.clone();
            }
        }
        answer
    }
}

/// Whether two answers are the same, leaving out members where ours is `mark`.
fn same_but(original: &Value, ours: &Value, mark: &str) -> bool {
    match (original, ours) {
        (_, Value::String(text)) if text == mark => true,
        (Value::Object(left), Value::Object(right)) => {
            left.len() == right.len()
                && right.iter().all(|(name, ours)| left.get(name).is_some_and(|l| same_but(l, ours, mark)))
        }
        _ => original == ours,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_entry_has_a_reason_and_a_difference() {
        for difference in &Intended::load().unwrap().0 {
            assert!(!difference.reason.is_empty());
            if difference.whenever.is_some() {
                continue;
            }
            assert!(!difference.ids.is_empty() || !difference.cases.is_empty(), "{difference:?}");
            assert!(difference.ours.is_some() || !difference.set.is_empty(), "{difference:?}");
        }
    }
}
