//! Developer commands: `cargo xtask` lists them. The work is in the library beside this file.

use std::{path::PathBuf, process::ExitCode};

use clap::{CommandFactory as _, Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Developer commands of cocoon", arg_required_else_help = false)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Set everything up and run the story of the README with real virtual machines.
    Demo(xtask::demo::Options),
    /// Everything that must pass, as CI runs it.
    Test(xtask::stages::Options),
    /// Measure: prints a table, writes target/bench/NAME.json. Without a name: lists the benches.
    Bench {
        /// Which bench.
        name: Option<String>,
    },
    /// Long runs: `story` repeats the demo's story, half of it under load.
    Soak(xtask::soak::Options),
    /// Check golden vectors of a folder (default: the committed ones).
    Vectors {
        /// Folder with vector files.
        folder: Option<PathBuf>,
        /// Leave vectors of parts that are not built yet out of the count.
        #[arg(long)]
        built_only: bool,
    },
    /// Build the boot bundle (kernel and initrd for images without their own) from Debian packages.
    Bundle,
    /// Build guest agent and shim, for embedding into the binary.
    Embed,
    /// Build the demo's image and the plain image without a kernel.
    Images,
    /// Check advisories (needs the internet).
    Audit,
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        None => {
            for command in Arguments::command().get_subcommands() {
                println!("{:10} {}", command.get_name(), command.get_about().unwrap_or_default());
            }
            Ok(())
        }
        Some(command) => run(command),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Demo(options) => xtask::demo::run(&options),
        Command::Test(options) => xtask::stages::run(&options),
        Command::Bench { name } => xtask::bench::run(name.as_deref()),
        Command::Soak(options) => xtask::soak::run(&options),
        Command::Vectors { folder, built_only } => xtask::stages::vectors(folder.as_deref(), built_only),
        Command::Bundle => {
            xtask::host::packages(xtask::host::BUNDLE)?;
            report(&xtask::bundle::run()?)
        }
        Command::Embed => report(&xtask::embed::run()?),
        Command::Images => {
            xtask::build::images()?;
            report(&xtask::root().join("target/demo"))
        }
        Command::Audit => xtask::stages::audit(),
    }
}

#[expect(clippy::unnecessary_wraps, reason = "an arm of the match above")]
fn report(path: &std::path::Path) -> anyhow::Result<()> {
    println!("{}", path.display());
    Ok(())
}
