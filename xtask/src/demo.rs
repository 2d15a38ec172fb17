//! `cargo xtask demo`: all the set-up and the main job, with its timings.

use std::{io::IsTerminal as _, time::Instant};

use anyhow::{Context as _, bail};
use clap::Args;

use crate::{build, host, lab::Lab, story};

/// What the demo takes.
#[derive(Debug, Args)]
pub struct Options {
    /// Skip the story: leave the system running and print what to try and how to end it.
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
        bail!("virtual machines with network need root; type: sudo env \"PATH=$PATH\" cargo xtask demo");
    }
    let begun = Instant::now();
    let built = build::everything()?;
    eprintln!("set-up took {:.1} s", begun.elapsed().as_secs_f64());
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
    // Who watches has seen it grow.
    if !(std::io::stdout().is_terminal() && std::io::stderr().is_terminal()) {
        println!("{}", story::table(&rows));
    }
    println!("{}", acceleration(&lab));
    let claims = rows.iter().filter(|row| row.took.is_none()).count();
    println!("{claims} claims checked, all hold; the story took {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// What the engine found out by booting a probe, as its log says it.
fn acceleration(lab: &Lab) -> &'static str {
    let log = std::fs::read_to_string(lab.log()).unwrap_or_default();
    if log.contains("accelerator=\"kvm\"") {
        "guests ran with KVM"
    } else {
        "there is no usable KVM here: guests ran under software emulation, several times slower; all else is the same"
    }
}

fn kept(mut lab: Lab) -> anyhow::Result<()> {
    story::import_images(&lab)?;
    let (kubectl, namespace) = (lab.kubectl_program().display(), lab.namespace());
    let (demo, fork) = (story::example(story::DEMO), story::example(story::FORKS[0]));
    let pid = lab.pid().context("cocoon up is not running")?;
    let key = "vm.cocoonstack.io/hibernate";
    println!(
        "The system runs; the story was skipped. Its network is a namespace of its own, so enter that first:\n\n  \
         ip netns exec {namespace} bash\n  \
         export KUBECONFIG={}\n  \
         export COCOON_ROOT_DIR={}\n  \
         export COCOON_BOOT_BUNDLE={}\n\n\
         Then try, in this order:\n\n  \
         {kubectl} apply -f {demo}\n  \
         {kubectl} wait --for=condition=Ready pod {}\n  \
         {kubectl} exec {} -- uname -a\n  \
         {kubectl} annotate pod {} {key}=true      # hibernate\n  \
         {kubectl} wait --for=jsonpath='{{.metadata.annotations.vm\\.cocoonstack\\.io/lifecycle-state}}'=hibernated pod {}\n  \
         {kubectl} annotate pod {} {key}-          # wake\n  \
         {kubectl} apply -f {fork}                # a fork: same memory, identity of its own\n  \
         {} vm list\n\n\
         To end it, in this order (a pod deleted first leaves no VM behind):\n\n  \
         {kubectl} delete pods --all -A && kill {pid} && sleep 3\n  \
         exit\n  \
         ip netns del {namespace} && rm -rf {}",
        lab.kubeconfig().display(),
        lab.data().display(),
        lab.built().bundle.display(),
        story::DEMO,
        story::DEMO,
        story::DEMO,
        story::DEMO,
        story::DEMO,
        lab.built().cocoon.display(),
        lab.scratch().display(),
    );
    lab.keep();
    Ok(())
}
