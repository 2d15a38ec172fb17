//! Developer commands as a library: it starts processes and links none of our crates, so that the
//! end-to-end tests of `crates/cocoon` can use the same lab and the same story as the demo.
//!
//! - [`host`]: Debian packages, kubectl, cargo-deny: what must be on the machine;
//! - [`build`]: the release binary with guest agent and shim, boot bundle, images;
//! - [`lab`]: a running `cocoon up` in a network namespace of its own;
//! - [`story`]: the ten steps of the README, each with its checks;
//! - [`demo`], [`stages`], [`bench`], [`soak`]: the commands.

pub mod arrows;
pub mod bench;
pub mod build;
pub mod bundle;
pub mod demo;
pub mod demo_image;
pub mod embed;
pub mod host;
pub mod lab;
pub mod soak;
pub mod stages;
pub mod story;

use std::path::PathBuf;

/// The repository's root folder.
#[must_use]
pub fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map_or_else(|| manifest.clone(), std::path::Path::to_owned)
}
