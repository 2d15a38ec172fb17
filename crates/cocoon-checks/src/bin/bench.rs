//! `bench NAME …`: measures; see [`cocoon_checks::bench`]. `cargo xtask bench` calls it.

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use cocoon_checks::bench::{self, Part, Parts};

/// Measures speed and memory. The exit status says whether it could measure, not whether all was within.
#[derive(Parser)]
#[command(name = "bench", version)]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Clones against QEMU's own restore, 16 clones at once, the agent's own share, `cocoon up` at rest.
    Slice(Slice),
}

#[derive(clap::Args)]
struct Slice {
    /// The release binary.
    #[arg(long)]
    cocoon: PathBuf,
    /// Folder with kernel and initrd.
    #[arg(long)]
    bundle: PathBuf,
    /// Archive of the image `cocoon-demo:1`.
    #[arg(long)]
    image: PathBuf,
    /// Where the JSON goes.
    #[arg(long)]
    out: PathBuf,
    /// Runs that a median is taken of.
    #[arg(long, default_value_t = 20)]
    runs: usize,
    /// Only these parts.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
}

fn main() -> anyhow::Result<ExitCode> {
    let Bench::Slice(slice) = Arguments::parse().bench;
    let parts = Parts { cocoon: slice.cocoon, bundle: slice.bundle, image: slice.image, runs: slice.runs };
    let report = bench::slice(&parts, &slice.only)?;
    std::fs::write(&slice.out, report.json()?)?;
    print!("{}", report.table());
    for (part, error) in &report.failed {
        eprintln!("{part}: could not be measured: {error:#}");
    }
    Ok(if report.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
