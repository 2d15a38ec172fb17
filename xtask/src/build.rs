//! What is built once and then reused: the release binary, the boot bundle, the images.
//!
//! Entry points: [`everything`] and [`images`]. Each step is skipped when its inputs did not change.

use std::{path::PathBuf, process::Command};

use crate::{bundle, demo_image, embed, host, root};

/// Where the parts are.
#[derive(Debug, Clone)]
pub struct Built {
    /// The release binary.
    pub cocoon: PathBuf,
    /// Folder with kernel and initrd.
    pub bundle: PathBuf,
    /// The demo's image, an OCI archive.
    pub demo_image: PathBuf,
    /// An image without a kernel.
    pub plain_image: PathBuf,
}

/// Boot bundle, the parts that the binary embeds, and the demo's images.
pub fn images() -> anyhow::Result<(PathBuf, PathBuf, PathBuf)> {
    host::packages(host::BUNDLE)?;
    let (bundle, parts) = (bundle::run()?, embed::run()?);
    let demo_image = demo_image::run(&bundle, &parts)?;
    Ok((bundle, demo_image, demo_image::plain_image()?))
}

/// Everything that the demo and the tests with guests need.
pub fn everything() -> anyhow::Result<Built> {
    host::packages(host::BUILD)?;
    host::packages(host::RUNTIME)?;
    let (bundle, demo_image, plain_image) = images()?;
    Ok(Built { cocoon: binary()?, bundle, demo_image, plain_image })
}

/// The release binary; [`images`] made what it embeds. `$COCOON_BIN` names another one to use instead.
fn binary() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("COCOON_BIN") {
        return Ok(named.into());
    }
    let mut build = cargo(&["build", "--release", "--quiet", "-p", "cocoon"]);
    // Asked of git, for `cocoon version`; a tree without git builds too. Only the binary itself reads them.
    for (name, arguments) in [
        ("COCOON_GIT_HASH", ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"].as_slice()),
        ("COCOON_BUILT", &["show", "--no-patch", "--format=%cI", "HEAD"]),
    ] {
        let said = Command::new("git").current_dir(root()).args(arguments).output();
        if let Some(said) = said.ok().filter(|said| said.status.success()) {
            build.env(name, String::from_utf8_lossy(&said.stdout).trim());
        }
    }
    host::shown(&mut build)?;
    Ok(root().join("target/release/cocoon"))
}

/// The cargo that runs us, else the one on PATH, in the workspace.
///
/// What `cargo run` and `cargo test` set for their child is taken away: build scripts that watch such
/// variables (ring's does) would run again, and all that stands on them would be built anew.
#[must_use]
pub fn cargo(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
    let mut command = Command::new(program);
    command.current_dir(root()).args(arguments);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_MANIFEST") || text.starts_with("CARGO_PKG") {
            command.env_remove(name);
        }
    }
    command
}
