//! What the host must have before anything is started.
//!
//! Entry point: [`check`]. Every missing part is named at once, with the command that installs it.

use std::path::Path;

use anyhow::bail;

use crate::cli::settings::found;

/// Programs of the host, and the Debian package of each.
const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-img", "qemu-utils"),
    ("nft", "nftables"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.erofs", "erofs-utils"),
];

/// Fails with all that is missing: root, programs, the boot bundle.
pub(super) fn check(qemu: &Path, bundle: &Path) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("cocoon up needs root for virtual machines, taps and the bridge; start it with sudo");
    }
    let mut missing: Vec<(String, &str)> = PROGRAMS
        .iter()
        .filter(|(program, _)| !on_path(Path::new(program)))
        .map(|(program, package)| ((*program).to_owned(), *package))
        .collect();
    if !on_path(qemu) {
        if qemu.components().count() > 1 {
            bail!(
                "--qemu {}: there is no such program; name the one to run, or leave the flag out",
                qemu.display()
            );
        }
        missing.push((qemu.display().to_string(), "qemu-system-x86"));
    }
    if !missing.is_empty() {
        let programs: Vec<_> = missing.iter().map(|(program, _)| program.as_str()).collect();
        let packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
        bail!(
            "missing on this host: {}; install with: apt-get install {}",
            programs.join(", "),
            packages.join(" ")
        );
    }
    if !bundle.join("bundle.json").exists() {
        bail!(
            "no boot bundle in {}; build it with `cargo xtask bundle` and name its folder with --boot-bundle",
            bundle.display()
        );
    }
    Ok(())
}

fn on_path(program: &Path) -> bool {
    found(program).is_file()
}

/// The host's name in the form of a node name: lower case, no dots at the ends.
pub(super) fn name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let name = name.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    if name.is_empty() { "cocoon".to_owned() } else { name.to_owned() }
}
