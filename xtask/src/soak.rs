//! `cargo xtask soak NAME`: long runs that CI has no time for.

use std::{
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{build, host, lab::Lab, story};

/// What a soak takes.
#[derive(Debug, Args)]
pub struct Options {
    /// `story`: the demo's story again and again, every second run under `stress-ng --cpu 2`; `hardship`: the
    /// tests on hosts that fail, those that take minutes too.
    #[arg(default_value = "story")]
    name: String,
    /// How many runs.
    #[arg(long, default_value_t = 10)]
    runs: u32,
}

/// Runs it; the first failure ends it.
pub fn run(options: &Options) -> anyhow::Result<()> {
    host::packages(host::TESTS)?;
    match options.name.as_str() {
        "story" => stories(options),
        "hardship" => hardship(options),
        name => bail!("no soak is named {name:?}; there are: story, hardship"),
    }
}

fn hardship(options: &Options) -> anyhow::Result<()> {
    for number in 1..=options.runs {
        let begun = Instant::now();
        let tests = ["test", "--quiet", "-p", "cocoon", "--test", "guests", "hardship", "--"];
        let mut command = build::cargo(&tests);
        host::shown(command.args(["--include-ignored", "--test-threads=1"]))
            .with_context(|| format!("run {number}"))?;
        println!("run {number}: {:.1} s", begun.elapsed().as_secs_f64());
    }
    Ok(())
}

fn stories(options: &Options) -> anyhow::Result<()> {
    let built = build::everything()?;
    for number in 1..=options.runs {
        let load = (number % 2 == 0).then(Load::start).transpose()?;
        let begun = Instant::now();
        let mut lab = Lab::start(&built, &[])?;
        let rows = story::run(&mut lab, false).with_context(|| format!("run {number}"))?;
        let under = if load.is_some() { " under load" } else { "" };
        println!("run {number}{under}: {} rows, {:.1} s", rows.len(), begun.elapsed().as_secs_f64());
    }
    println!("{} passed, 0 failed", options.runs);
    Ok(())
}

/// Two busy cores until dropped.
struct Load(Child);

impl Load {
    fn start() -> anyhow::Result<Self> {
        let child = Command::new("stress-ng").args(["--cpu", "2", "--quiet"]).stdout(Stdio::null()).spawn();
        Ok(Self(child.context("starting stress-ng")?))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // SIGTERM, so that stress-ng ends its workers too.
        let _ = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}
