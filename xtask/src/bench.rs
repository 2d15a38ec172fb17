//! `cargo xtask bench NAME`: measures; says what was measured, not whether it was within its budget.
//!
//! The benches themselves are the binary `bench` of `cocoon-checks`; guests run in a network namespace
//! of their own. Results go to `target/bench/NAME.json`.

use std::process::Command;

use anyhow::bail;

use crate::{build, host, root};

const BENCHES: &[(&str, &str)] =
    &[("slice", "clone against QEMU's own restore, 16 clones at once, the agent's own share, idle memory")];

/// Runs one bench, or lists them.
pub fn run(name: Option<&str>) -> anyhow::Result<()> {
    let Some(name) = name else {
        for (name, what) in BENCHES {
            println!("{name:10} {what}");
        }
        return Ok(());
    };
    if !BENCHES.iter().any(|(known, _)| *known == name) {
        bail!("no bench is named {name:?}; `cargo xtask bench` lists them");
    }
    let built = build::everything()?;
    // Both packages: so that dependencies have the features that they have in `cocoon`, and are there already.
    let build = ["build", "--release", "--quiet", "-p", "cocoon", "-p", "cocoon-checks", "--bin", "bench"];
    host::shown(&mut build::cargo(&build))?;
    let out = root().join("target/bench");
    std::fs::create_dir_all(&out)?;
    host::shown(
        Command::new("unshare")
            .arg("--net")
            .arg(root().join("target/release/bench"))
            .arg(name)
            .arg("--cocoon")
            .arg(&built.cocoon)
            .arg("--bundle")
            .arg(&built.bundle)
            .arg("--image")
            .arg(&built.demo_image)
            .arg("--out")
            .arg(out.join(format!("{name}.json"))),
    )
}
