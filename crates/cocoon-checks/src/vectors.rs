//! Golden vectors: the same question put to our code as was put to the Go originals.
//!
//! [`check_folder`] reads every vector file of a folder and asks, for each vector, the checker of its
//! file and function ([`checkers`]) for our answer, in the shape of the vector's `out`. The answers are
//! compared as JSON values. Where we differ on purpose, [`intended`] says which vector, why, and what
//! exactly ours is; a listed vector that answers anything else, its original answer too, fails.

mod checkers;
mod cloudimg;
mod folder;
mod guest;
mod intended;
mod media;
mod meta;
mod net;
mod older;
mod quantities;
mod registry;
mod report;
mod snapshots;

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::Value;

use self::checkers::Answer;
use self::folder::{Level, Vector, VectorFile};
pub use self::guest::INHERITED;
use self::intended::Intended;
pub use self::report::Report;
use self::report::{FileReport, Outcome};

/// The vectors that are committed with this crate.
pub fn committed_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// Checks every vector file of `dir`. With `built_only`, vectors of parts that are not built are left
/// out; else they count as failed.
pub fn check_folder(dir: &Path, built_only: bool) -> Result<Report> {
    let intended = Intended::load()?;
    let mut report = Report::default();
    for file in folder::read(dir)? {
        report.files.push(check_file(&file, &intended, built_only));
    }
    Ok(report)
}

fn check_file(file: &VectorFile, intended: &Intended, built_only: bool) -> FileReport {
    let mut report = FileReport::of(file);
    for vector in &file.vectors {
        let outcome = match answer(file, vector) {
            Ok(Answer::Is(ours)) => compare(file, vector, ours, intended),
            Ok(Answer::NotBuilt) if file.level == Level::Informative => Outcome::NotApplicable,
            Ok(Answer::NotBuilt) if built_only => Outcome::LeftOut,
            Ok(Answer::NotBuilt) => Outcome::NotBuilt,
            Ok(Answer::NotApplicable) => Outcome::NotApplicable,
            Err(error) => Outcome::Failed(format!("the check itself failed: {error:#}")),
        };
        report.add(vector, outcome);
    }
    report
}

/// A panic in our code is a wrong answer to one vector, not the end of the run.
fn answer(file: &VectorFile, vector: &Vector) -> Result<Answer> {
    let asked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| checkers::answer(file, vector)));
    asked.unwrap_or_else(|_| anyhow::bail!("our code panicked; the message stands above"))
}

fn compare(file: &VectorFile, vector: &Vector, ours: Value, intended: &Intended) -> Outcome {
    let Some(difference) = intended.find(file, vector) else {
        return if ours == vector.output {
            Outcome::Passed
        } else if intended.explains(file, &vector.output, &ours) {
            Outcome::Intended
        } else {
            Outcome::Failed(report::difference(&vector.output, &ours))
        };
    };
    let wanted = difference.ours(&vector.output);
    if ours == wanted {
        Outcome::Intended
    } else {
        Outcome::Failed(format!(
            "listed as intended ({}), but differs in another way:\n{}",
            difference.reason,
            report::difference(&wanted, &ours)
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn outcome(ours: Value) -> Outcome {
        let listed = json!([
            { "file": "f", "ids": ["x"], "reason": "so", "set": { "/a": 2 } },
            { "file": "f", "whenever": "none", "original": "null", "reason": "so" },
        ]);
        let intended: Intended = serde_json::from_value(listed).unwrap();
        let vector: Vector = serde_json::from_value(json!({ "id": "x", "out": { "a": 1, "b": 1 } })).unwrap();
        let file =
            VectorFile { name: "f".into(), level: Level::Contract, vectors: vec![], folder: PathBuf::new() };
        compare(&file, &vector, ours, &intended)
    }

    #[test]
    fn a_listed_vector_must_differ_in_just_that_way() {
        assert_eq!(outcome(json!({ "a": 2, "b": 1 })), Outcome::Intended);
        for other in [json!({ "a": 1, "b": 1 }), json!({ "a": 2, "b": 2 }), json!({ "a": 3, "b": 1 })] {
            assert!(matches!(outcome(other), Outcome::Failed(_)));
        }
    }

    #[test]
    fn a_rule_for_a_file_explains_its_own_difference_alone() {
        let rules = json!([{ "file": "f", "whenever": "none", "original": "null", "reason": "so" }]);
        let intended: Intended = serde_json::from_value(rules).unwrap();
        let file =
            VectorFile { name: "f".into(), level: Level::Contract, vectors: vec![], folder: PathBuf::new() };
        let explained = |original: Value, ours: Value| intended.explains(&file, &original, &ours);
        assert!(explained(json!([{ "a": "null", "b": 1 }]), json!([{ "a": "none", "b": 1 }])));
        assert!(!explained(json!([{ "a": "null", "b": 1 }]), json!([{ "a": "none", "b": 2 }])));
        assert!(!explained(json!([{ "a": "other", "b": 1 }]), json!([{ "a": "none", "b": 1 }])));
    }

    #[test]
    fn a_folder_without_vectors_is_an_error_that_says_so() {
        let error = check_folder(Path::new("/nonexistent"), true).unwrap_err();
        assert!(error.to_string().contains("/nonexistent"), "{error}");
    }
}
