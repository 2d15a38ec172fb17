//! `vectors [DIR] [--built-only]`: checks every vector file of a folder; see [`cocoon_checks::vectors`].

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use cocoon_checks::vectors;

/// Checks that our code answers as the golden vectors say.
#[derive(Parser)]
#[command(name = "vectors", version)]
struct Arguments {
    /// Folder with vector files; the committed one when not given.
    dir: Option<PathBuf>,
    /// Leave out the vectors of parts that are not built yet, instead of counting them as failed.
    #[arg(long)]
    built_only: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    let (name, value) = vectors::INHERITED;
    if std::env::var_os(name).is_none() {
        // Guest sessions inherit the agent's environment, and some vectors look at it.
        let mut again = Command::new(std::env::current_exe()?);
        return Err(again.args(std::env::args_os().skip(1)).env(name, value).exec().into());
    }
    let dir = arguments.dir.unwrap_or_else(vectors::committed_folder);
    let report = vectors::check_folder(&dir, arguments.built_only)?;
    print!("{report}");
    Ok(if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
