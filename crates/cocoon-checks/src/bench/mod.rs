//! `bench slice`: speed and memory of issue 3, measured on this machine.
//!
//! Entry point: [`slice`]. Every figure is a ratio within one run, or one with a budget of its own;
//! times are medians of interleaved runs. Guests run in the network namespace that the caller made for
//! us: a namespace with other links than `lo` is refused.

mod agent;
mod clones;
mod herd;
mod idle;
mod instant;
mod lab;
mod memory;
mod phases;
mod report;
mod rival;

use std::{path::PathBuf, process::Command};

use anyhow::{Context as _, ensure};

pub use self::report::{Report, Row};

/// What is measured with what.
#[derive(Debug, Clone)]
pub struct Parts {
    /// The release binary.
    pub cocoon: PathBuf,
    /// Folder with kernel and initrd.
    pub bundle: PathBuf,
    /// Archive of the demo's image.
    pub image: PathBuf,
    /// Runs that a median is taken of.
    pub runs: usize,
}

/// A part of the bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// `cocoon up` without VMs.
    Idle,
    /// The agent's own share.
    Agent,
    /// One clone after the other, against QEMU itself.
    Clones,
    /// Sixteen clones at once.
    Herd,
}

const ALL: [Part; 4] = [Part::Idle, Part::Agent, Part::Clones, Part::Herd];

/// Measures the parts in `only`, or all.
pub fn slice(parts: &Parts, only: &[Part]) -> anyhow::Result<Report> {
    ensure!(rustix::process::geteuid().is_root(), "virtual machines need root; type: sudo cargo xtask bench");
    ensure!(parts.runs > 0, "--runs must be at least 1");
    own_namespace()?;
    let phases = phases::listen();
    let runtime = tokio::runtime::Runtime::new().context("starting a runtime")?;
    let mut report = Report::default();
    for part in ALL.into_iter().filter(|part| only.is_empty() || only.contains(part)) {
        eprintln!("--- {part:?}");
        let measured = match part {
            Part::Idle => idle::measure(parts),
            Part::Agent => runtime.block_on(agent::measure(parts)),
            Part::Clones => runtime.block_on(clones::measure(parts, &phases)),
            Part::Herd => runtime.block_on(herd::measure(parts)),
        };
        match measured {
            Ok(rows) => report.rows.extend(rows),
            Err(error) => report.failed.push((format!("{part:?}").to_lowercase(), error)),
        }
    }
    Ok(report)
}

/// Refuses a namespace that has more than a loopback interface, and brings that one up.
fn own_namespace() -> anyhow::Result<()> {
    let links: Vec<_> = std::fs::read_dir("/proc/sys/net/ipv4/conf")?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| !matches!(name.as_str(), "all" | "default" | "lo"))
        .collect();
    ensure!(
        links.is_empty(),
        "this network namespace has {}; start the bench in one of its own: unshare --net bench slice …",
        links.join(", ")
    );
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().context("starting ip")?;
    ensure!(up.success(), "ip link set lo up: {up}");
    Ok(())
}
