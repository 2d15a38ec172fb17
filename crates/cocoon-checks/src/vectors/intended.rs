//! Where we differ from the originals on purpose: `intended.json`.
//!
//! Each entry names a file, the vectors (by id, or by the name of their case), the reason, and what our
//! answer is instead: `ours` is the whole answer, or `set` gives single members of it by JSON pointer
//! and leaves the rest as it was. An entry with `whenever` instead of vectors holds for a whole file: a
//! member where our answer is that text may differ, from `original` alone when the entry names it. Without
//! it, the text must be one that a checker gives only after it made sure that it is true.

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
    whenever: Option<Value>,
    original: Option<Value>,
}

impl Intended {
    /// Reads the list that is built in.
    pub(crate) fn load() -> Result<Self> {
        serde_json::from_str(LIST).context("src/vectors/intended.json is malformed")
    }

    /// Whether the entries that hold for the whole file explain every difference between two answers.
    pub(crate) fn explains(&self, file: &VectorFile, original: &Value, ours: &Value) -> bool {
        let rules: Vec<&Difference> = self
            .0
            .iter()
            .filter(|difference| difference.file == file.name && difference.whenever.is_some())
            .collect();
        same_but(original, ours, &rules)
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

/// Whether two answers are the same, leaving out members that a rule explains.
fn same_but(original: &Value, ours: &Value, rules: &[&Difference]) -> bool {
    let explained = |rule: &&Difference| {
        rule.whenever.as_ref() == Some(ours) && rule.original.as_ref().is_none_or(|from| from == original)
    };
    match (original, ours) {
        _ if original == ours || rules.iter().any(explained) => true,
        (Value::Object(left), Value::Object(right)) => {
            left.len() == right.len()
                && right.iter().all(|(name, ours)| left.get(name).is_some_and(|l| same_but(l, ours, rules)))
        }
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(l, r)| same_but(l, r, rules))
        }
        _ => false,
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
