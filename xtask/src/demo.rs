//! `cargo xtask demo`: all the set-up and the main job, with its timings.

use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{build, host, lab::Lab, story};

/// What the demo takes.
#[derive(Debug, Args)]
pub struct Options {
    /// Leave the system running and print how to use it.
    #[arg(long)]
    keep: bool,
    /// More arguments for `cocoon up`, behind `--`: for example `-- --memory full-stream`.
    #[arg(last = true)]
    up: Vec<String>,
}

/// Sets up, runs the story, prints the table. An error means that a claim did not hold.
pub fn run(options: &Options) -> anyhow::Result<()> {
    if !host::is_root() {
        host::packages(host::RUNTIME)?;
        bail!("virtual machines with network need root; type: sudo -E cargo xtask demo");
    }
    let begun = Instant::now();
    let built = build::everything()?;
    eprintln!("set-up took {:.1} s", begun.elapsed().as_secs_f64());
    acceleration();
    let begun = Instant::now();
    let arguments: Vec<&str> = options.up.iter().map(String::as_str).collect();
    let mut lab = Lab::start(&built, &arguments)?;
    if options.keep {
        return kept(lab);
    }
    let rows = match story::run(&mut lab, true) {
        Ok(rows) => rows,
        Err(error) => {
            eprintln!("the end of the log of cocoon up:\n{}", lab.log_tail(40));
            return Err(error);
        }
    };
    println!("{}", story::table(&rows));
    let claims = rows.iter().filter(|row| row.took.is_none()).count();
    println!("{claims} claims checked, all hold; the story took {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// Says what there is instead of hardware acceleration. The engine finds out for itself by booting.
fn acceleration() {
    let usable = std::env::var_os("COCOON_ASSUME_KVM").is_some();
    if !usable {
        println!(
            "no KVM is used unless a probe guest boots with it; under QEMU's software emulation guests run \
             5 to 20 times slower, and everything works"
        );
    }
}

fn kept(mut lab: Lab) -> anyhow::Result<()> {
    story::import_images(&lab)?;
    let enter = format!("ip netns exec {}", lab.namespace());
    println!("running; its network is a namespace of its own, so enter it first:");
    println!("  {enter} bash");
    println!("  export KUBECONFIG={}", lab.kubeconfig().display());
    println!("  kubectl apply -f {}", story::example(story::DEMO));
    println!("to end it: kubectl delete pods --all; kill {}", lab.pid().context("cocoon up is not running")?);
    println!("and then: ip netns del {}", lab.namespace());
    lab.keep();
    Ok(())
}
