//! What is built once and then reused: the release binary, the boot bundle, the images.
//!
//! Entry points: [`everything`] and [`images`]. Each step is skipped when its inputs did not change.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

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
    let build = ["build", "--release", "--quiet", "-p", "cocoon"];
    host::shown(Command::new(cargo()).current_dir(root()).args(build))?;
    Ok(root().join("target/release/cocoon"))
}

/// The cargo that runs us, else the one on PATH.
#[must_use]
pub fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| Path::new("cargo").to_owned(), PathBuf::from)
}
