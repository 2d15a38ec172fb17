//! What is built once and then reused: the release binary, the boot bundle, the images.
//!
//! Entry points: [`binary`] and [`everything`]. Each step is skipped when its inputs did not change.

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

/// The release binary with guest agent and shim inside. `$COCOON_BIN` names another one to try instead.
pub fn binary() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("COCOON_BIN") {
        return Ok(named.into());
    }
    embed::run()?;
    host::shown(Command::new(cargo()).current_dir(root()).args([
        "build",
        "--release",
        "--quiet",
        "-p",
        "cocoon",
    ]))?;
    Ok(root().join("target/release/cocoon"))
}

/// The demo's images; the boot bundle comes before them.
pub fn images() -> anyhow::Result<(PathBuf, PathBuf, PathBuf)> {
    host::packages(host::BUNDLE)?;
    let bundle = bundle::run()?;
    embed::run()?;
    Ok((bundle, demo_image::run()?, demo_image::plain_image()?))
}

/// Everything that the demo and the tests with guests need.
pub fn everything() -> anyhow::Result<Built> {
    host::packages(host::BUILD)?;
    host::packages(host::RUNTIME)?;
    let (bundle, demo_image, plain_image) = images()?;
    Ok(Built { cocoon: binary()?, bundle, demo_image, plain_image })
}

/// The cargo that runs us, else the one on PATH.
#[must_use]
pub fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| Path::new("cargo").to_owned(), PathBuf::from)
}
