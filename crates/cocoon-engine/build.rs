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
    // The folder is watched, not the files: a file that does not exist would rebuild the crate each time.
    fs::create_dir_all(&source)?;
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={}", source.display());
    for part in PARTS {
        let path = source.join(part);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        fs::write(out.join(part), bytes)?;
    }
    Ok(())
}
