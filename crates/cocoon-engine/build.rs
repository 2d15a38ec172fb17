//! Embeds the guest agent and the shim that `cargo xtask embed` built into `target/embed`.
//!
//! A part that is not there is embedded empty, so that a plain `cargo build` works; the engine then
//! says what to run.

use std::{env, fs, io, path::PathBuf};

const PARTS: [&str; 2] = ["cocoon-guest-agent", "libcocoon_shim.so"];

fn main() -> io::Result<()> {
    let missing = |name| io::Error::other(format!("cargo did not set {name}"));
    let manifest =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or_else(|| missing("CARGO_MANIFEST_DIR"))?);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or_else(|| missing("OUT_DIR"))?);
    let source = manifest.join("../../target/embed");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=COCOON_EMBED_DIR");
    let source = env::var_os("COCOON_EMBED_DIR").map_or(source, PathBuf::from);
    for part in PARTS {
        let path = source.join(part);
        println!("cargo::rerun-if-changed={}", path.display());
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        fs::write(out.join(part), bytes)?;
    }
    Ok(())
}
