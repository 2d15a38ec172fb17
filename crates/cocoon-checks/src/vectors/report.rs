//! What came out: one line a file, every difference, and the totals.

use std::fmt;

use serde_json::Value;

use super::folder::{Level, Vector, VectorFile};

/// Longest text of a value in a difference.
const SHOWN: usize = 400;

/// Outcome of one vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Our answer is the original's.
    Passed,
    /// It differs in just the way that is listed.
    Intended,
    /// It differs; the text shows how.
    Failed(String),
    /// The part that answers does not exist yet; counts as failed.
    NotBuilt,
    /// The same, not counted.
    LeftOut,
    /// Informative, and not a rule of ours.
    NotApplicable,
}

/// Outcome of one file.
#[derive(Debug, Default)]
pub(crate) struct FileReport {
    name: String,
    level: Level,
    passed: usize,
    intended: usize,
    not_built: usize,
    left_out: usize,
    not_applicable: usize,
    failures: Vec<(String, String)>,
}

impl FileReport {
    /// Nothing checked yet.
    pub(crate) fn of(file: &VectorFile) -> Self {
        Self { name: file.name.clone(), level: file.level, ..Self::default() }
    }

    pub(crate) fn add(&mut self, vector: &Vector, outcome: Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Intended => self.intended += 1,
            Outcome::NotBuilt => self.not_built += 1,
            Outcome::LeftOut => self.left_out += 1,
            Outcome::NotApplicable => self.not_applicable += 1,
            Outcome::Failed(how) => {
                let case = vector.input.get("case").and_then(Value::as_str).unwrap_or(&vector.function);
                self.failures.push((format!("{} ({case})", vector.id), how));
            }
        }
    }

    fn good(&self) -> usize {
        self.passed + self.intended
    }

    fn bad(&self) -> usize {
        self.failures.len() + self.not_built
    }
}

impl fmt::Display for FileReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.level == Level::Informative { " (informative)" } else { "" };
        for (vector, how) in &self.failures {
            let word = if self.level == Level::Informative { "differs" } else { "FAILED" };
            writeln!(f, "{word} {} {vector}\n{how}", self.name)?;
        }
        write!(f, "{:<22}{} passed, {} failed", self.name, self.good(), self.bad())?;
        for (count, what) in [
            (self.intended, "of them differ as intended"),
            (self.not_built, "not built"),
            (self.left_out, "not built, left out"),
            (self.not_applicable, "not applicable"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        writeln!(f, "{mark}")
    }
}

/// Outcome of a folder. Its text ends with the line `N passed, N failed`, contract vectors alone.
#[derive(Debug, Default)]
pub struct Report {
    pub(crate) files: Vec<FileReport>,
}

impl Report {
    /// Contract vectors that answer as they should.
    pub fn passed(&self) -> usize {
        self.of(Level::Contract).map(FileReport::good).sum()
    }

    /// Contract vectors that do not, those of parts not built included.
    pub fn failed(&self) -> usize {
        self.of(Level::Contract).map(FileReport::bad).sum()
    }

    fn of(&self, level: Level) -> impl Iterator<Item = &FileReport> {
        self.files.iter().filter(move |file| file.level == level)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            write!(f, "{file}")?;
        }
        let sum = |count: fn(&FileReport) -> usize| self.of(Level::Informative).map(count).sum::<usize>();
        writeln!(
            f,
            "informative: {} agree, {} differ, {} not applicable",
            sum(FileReport::good),
            sum(FileReport::bad),
            sum(|file| file.not_applicable)
        )?;
        writeln!(f, "{} passed, {} failed", self.passed(), self.failed())
    }
}

/// Both values, or only the members that differ when both are objects.
pub(crate) fn difference(expected: &Value, got: &Value) -> String {
    let mut lines = Vec::new();
    collect("", expected, got, &mut lines);
    lines.join("\n")
}

fn collect(path: &str, expected: &Value, got: &Value, lines: &mut Vec<String>) {
    if expected == got {
        return;
    }
    match (expected, got) {
        (Value::Object(left), Value::Object(right)) => {
            let mut names: Vec<&String> = left.keys().chain(right.keys()).collect();
            names.sort();
            names.dedup();
            for name in names {
                let (l, r) = (left.get(name), right.get(name));
                match (l, r) {
                    (Some(l), Some(r)) => collect(&format!("{path}/{name}"), l, r, lines),
                    (l, r) => lines.push(line(&format!("{path}/{name}"), l, r)),
                }
            }
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            for (at, (l, r)) in left.iter().zip(right).enumerate() {
                collect(&format!("{path}/{at}"), l, r, lines);
            }
        }
        _ => lines.push(line(path, Some(expected), Some(got))),
    }
}

fn line(path: &str, expected: Option<&Value>, got: Option<&Value>) -> String {
    let path = if path.is_empty() { "/" } else { path };
    format!("    at {path}\n      expected {}\n      got      {}", shown(expected), shown(got))
}

fn shown(value: Option<&Value>) -> String {
    let Some(value) = value else { return "nothing".to_owned() };
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}… ({} characters)", &text[..cut], text.chars().count()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_members_that_differ_are_shown() {
        let text = difference(&json!({"a": 1, "b": {"c": 2}}), &json!({"a": 1, "b": {"c": 3}, "d": 4}));
        assert_eq!(
            text,
            "    at /b/c\n      expected 2\n      got      3\n    at /d\n      expected nothing\n      got      4"
        );
    }

    #[test]
    fn a_long_value_is_cut_at_a_character() {
        let long = Value::String("ü".repeat(2 * SHOWN));
        assert!(shown(Some(&long)).ends_with("… (802 characters)"));
    }

    #[test]
    fn the_last_line_counts_contract_vectors_alone() {
        let vector: Vector = serde_json::from_value(json!({"id": "x"})).unwrap();
        let mut contract = FileReport::default();
        contract.add(&vector, Outcome::Passed);
        contract.add(&vector, Outcome::NotBuilt);
        let mut informative = FileReport { level: Level::Informative, ..FileReport::default() };
        informative.add(&vector, Outcome::Failed("so".into()));
        let text = Report { files: vec![contract, informative] }.to_string();
        assert_eq!(text.lines().last(), Some("1 passed, 1 failed"));
        assert!(text.contains("informative: 0 agree, 1 differ, 0 not applicable"));
    }
}
