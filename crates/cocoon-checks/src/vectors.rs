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
