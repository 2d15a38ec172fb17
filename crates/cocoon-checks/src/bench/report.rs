//! What was measured, as a table and as JSON; and the arithmetic of medians. Pure.

use std::fmt::Write as _;

use serde::Serialize;

/// One figure and its budget.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What was measured.
    pub what: String,
    /// Of budget and measured.
    pub unit: String,
    /// The most (or, for a number that must be reached, the least) that is allowed.
    pub budget: f64,
    /// The figure.
    pub measured: f64,
    /// Whether it keeps to its budget.
    pub within: bool,
}

impl Row {
    /// A figure that may be as high as its budget.
    #[must_use]
    pub fn at_most(what: impl Into<String>, unit: &str, budget: f64, measured: f64) -> Self {
        let (budget, measured) = (rounded(budget), rounded(measured));
        Self { what: what.into(), unit: unit.to_owned(), budget, measured, within: measured <= budget }
    }

    /// A figure that must be as high as its budget.
    #[must_use]
    pub fn at_least(what: impl Into<String>, unit: &str, budget: f64, measured: f64) -> Self {
        let row = Self::at_most(what, unit, budget, measured);
        Self { within: row.measured >= row.budget, ..row }
    }
}

/// All that was measured.
#[derive(Debug, Default)]
pub struct Report {
    /// The figures.
    pub rows: Vec<Row>,
    /// Parts that could not be measured, and why.
    pub failed: Vec<(String, anyhow::Error)>,
}

impl Report {
    /// An array of `{what, unit, budget, measured, within}`.
    pub fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(&self.rows)? + "\n")
    }

    /// For people.
    #[must_use]
    pub fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.what.chars().count()).max().unwrap_or(0).max(4);
        let mut text = format!("{:width$} {:>10} {:>10} {:6} within\n", "what", "measured", "budget", "unit");
        for Row { what, unit, budget, measured, within } in &self.rows {
            let within = if *within { "yes" } else { "NO" };
            // Writing to a String does not fail.
            let _ = writeln!(text, "{what:width$} {measured:>10} {budget:>10} {unit:6} {within}");
        }
        text
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// The median; 0 of nothing.
#[must_use]
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let at = |index: usize| sorted.get(index).copied().unwrap_or(0.0);
    if sorted.len().is_multiple_of(2) {
        f64::midpoint(at(middle.wrapping_sub(1)), at(middle))
    } else {
        at(middle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two_middle_ones() {
        for (values, expected) in [
            (&[][..], 0.0),
            (&[3.0], 3.0),
            (&[9.0, 1.0], 5.0),
            (&[7.0, 1.0, 2.0], 2.0),
            (&[4.0, 1.0, 2.0, 9.0], 3.0),
        ] {
            assert!((median(values) - expected).abs() < 1e-9, "{values:?}");
        }
    }

    #[test]
    fn a_row_has_exactly_the_five_keys_and_says_whether_it_is_within() {
        let report = Report { rows: vec![Row::at_most("clone", "x", 3.0, 3.0004)], failed: Vec::new() };
        let value: serde_json::Value = serde_json::from_str(&report.json().unwrap()).unwrap();
        let expected = serde_json::json!([{"what": "clone", "unit": "x", "budget": 3.0, "measured": 3.0, "within": true}]);
        assert_eq!(value, expected);
        assert!(!Row::at_most("", "", 3.0, 3.1).within);
        assert!(Row::at_least("", "", 16.0, 16.0).within);
        assert!(!Row::at_least("", "", 16.0, 15.0).within);
        assert!(report.table().contains("yes"));
    }
}
