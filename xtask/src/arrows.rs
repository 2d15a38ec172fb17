//! The crate graph is the one that ARCHITECTURE.md writes down.
//!
//! Entry point: [`check`]. Reads the table under "## Crates" and `cargo metadata`; an arrow that the
//! table does not have, or a crate that it does not name, is a failure. Dev-dependencies do not count.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::{build::cargo, root};

type Graph = BTreeMap<String, BTreeSet<String>>;

/// Fails with one line for each wrong arrow.
pub fn check() -> anyhow::Result<()> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).context("ARCHITECTURE.md")?;
    let (written, built) = (written(&text), built()?);
    let wrong = differences(&written, &built);
    if !wrong.is_empty() {
        bail!("the crate graph is not the one of ARCHITECTURE.md:\n{}", wrong.join("\n"));
    }
    println!("{} crates, every arrow is written down", built.len());
    Ok(())
}

fn differences(written: &Graph, built: &Graph) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, uses) in built {
        match written.get(name) {
            None => wrong.push(format!("{name} is not in the table")),
            Some(allowed) => {
                wrong.extend(uses.difference(allowed).map(|other| format!("{name} may not use {other}")));
            }
        }
    }
    wrong
}

/// The table's rows: crate name to the crates it may use. "any" and "all but" are spelled out from the rows.
fn written(text: &str) -> Graph {
    let rows: Vec<(String, String)> = text
        .lines()
        .filter_map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
            let name = cells.first()?.strip_prefix('`')?.strip_suffix('`')?;
            Some((name.to_owned(), (*cells.get(2)?).to_owned()))
        })
        .collect();
    let all: BTreeSet<String> = rows.iter().map(|(name, _)| name.clone()).collect();
    rows.iter().map(|(name, cell)| (name.clone(), allowed(cell, &all))).collect()
}

fn allowed(cell: &str, all: &BTreeSet<String>) -> BTreeSet<String> {
    let full = |short: &str| format!("cocoon-{}", short.trim());
    if cell == "any" {
        return all.clone();
    }
    if let Some(except) = cell.strip_prefix("all but ") {
        let except: BTreeSet<_> = except.split(" and ").map(full).collect();
        return all.difference(&except).cloned().collect();
    }
    cell.split(',').map(|name| full(name.split('(').next().unwrap_or_default())).collect()
}

fn built() -> anyhow::Result<Graph> {
    let output = cargo(&["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .output()
        .context("cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let list = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let packages = list(&metadata, "packages");
    let names: BTreeSet<_> = packages.iter().map(|package| text(package, "name")).collect();
    let uses = |package: &Value| {
        list(package, "dependencies")
            .iter()
            .filter(|dependency| dependency["kind"].is_null())
            .map(|dependency| text(dependency, "name"))
            .filter(|name| names.contains(name))
            .collect()
    };
    Ok(packages.iter().map(|package| (text(package, "name"), uses(package))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "| crate | owns | may use |\n|---|---|---|\n| `cocoon-a` | x | – |\n| `cocoon-b` | x | a |\n| `cocoon` | x | all but b |\n";

    #[test]
    fn an_arrow_that_the_table_does_not_have_is_named() {
        let built: Graph = [("cocoon-a".to_owned(), BTreeSet::from(["cocoon-b".to_owned()]))].into();
        assert_eq!(differences(&written(TABLE), &built), ["cocoon-a may not use cocoon-b"]);
    }

    #[test]
    fn all_but_leaves_the_named_crate_out() {
        let written = written(TABLE);
        assert!(written["cocoon"].contains("cocoon-a") && !written["cocoon"].contains("cocoon-b"));
    }

    #[test]
    fn a_crate_without_a_row_is_named() {
        let built: Graph = [("cocoon-new".to_owned(), BTreeSet::new())].into();
        assert_eq!(differences(&written(TABLE), &built), ["cocoon-new is not in the table"]);
    }
}
