//! The boot bundle: kernel and initrd for images that bring none, made from Debian packages.
//!
//! Entry point: [`run`]. Result: `target/bundle/{vmlinuz,initrd.img,bundle.json}`. The initrd holds kernel
//! modules and a static busybox and no `/init`: the engine appends its guest agent as a second archive.
//! A bundle made from the same package versions by the same recipe is kept.
//!
//! `bundle.json`: `{"version": 1, "kernel_version": "...", "vmlinuz_sha256": "...", "initrd_sha256": "..."}`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};

/// Part of the cache's key: to be raised when this file makes something else from the same packages.
const RECIPE: u32 = 1;
/// The package that depends on the newest small kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";
const BUSYBOX: &str = "busybox-static";
/// What a guest of ours needs; dependencies are found. Names that the kernel has built in are skipped.
const MODULES: [&str; 9] = [
    "virtio_pci",
    "virtio_net",
    "virtio_console",
    "virtio_blk",
    "virtio_rng",
    "erofs",
    "overlay",
    "fuse",
    "af_packet",
];

/// Makes the bundle. Returns its folder.
pub fn run() -> Result<PathBuf> {
    let root = crate::root();
    let bundle = root.join("target/bundle");
    let stamp_path = bundle.join("stamp");
    let old =
        fs::read_to_string(&stamp_path).ok().filter(|old| old.starts_with(&format!("recipe {RECIPE}\n")));
    let (kernel, stamp) = match wanted() {
        Ok(wanted) => wanted,
        // A machine whose package lists were cleaned away: what is here is good enough.
        Err(_) if old.is_some() => return Ok(bundle),
        Err(_) => {
            crate::host::apt_update()?;
            wanted()?
        }
    };
    if old.is_some_and(|old| old == stamp) {
        eprintln!("bundle: up to date ({})", bundle.display());
        return Ok(bundle);
    }
    let work = root.join("target/bundle-work");
    remove_dir(&work)?;
    fs::create_dir_all(&work)?;
    make(&kernel, &work, &bundle)?;
    fs::write(stamp_path, stamp)?;
    remove_dir(&work)?;
    eprintln!("bundle: made {}", bundle.display());
    Ok(bundle)
}

/// The kernel's package, and what the bundle is made of.
fn wanted() -> Result<(String, String)> {
    let kernel = kernel_package()?;
    let stamp = format!("recipe {RECIPE}\n{}\n{}\n", candidate(&kernel)?, candidate(BUSYBOX)?);
    Ok((kernel, stamp))
}

fn make(kernel: &str, work: &Path, bundle: &Path) -> Result<()> {
    let tree = work.join("tree");
    for package in [kernel, BUSYBOX] {
        eprintln!("bundle: fetching {package}");
        fetch(package, work, &tree)?;
    }
    let version = single(&tree.join("lib/modules"))?;
    let modules = load_order(&tree.join("lib/modules").join(&version))?;
    eprintln!("bundle: kernel {version}, {} modules", modules.len());

    fs::create_dir_all(bundle)?;
    let vmlinuz = bundle.join("vmlinuz");
    fs::copy(tree.join(format!("boot/vmlinuz-{version}")), &vmlinuz)?;
    let initrd = bundle.join("initrd.img");
    let archive = initrd_archive(&tree, &modules)?;
    fs::write(&initrd, gzip(&archive)?)?;
    let about = serde_json::json!({
        "version": 1,
        "kernel_version": version,
        "vmlinuz_sha256": sha256(&vmlinuz)?,
        "initrd_sha256": sha256(&initrd)?,
    });
    fs::write(bundle.join("bundle.json"), serde_json::to_string_pretty(&about)? + "\n")?;
    Ok(())
}

/// The package that `linux-image-cloud-amd64` stands for.
fn kernel_package() -> Result<String> {
    let text = output(Command::new("apt-cache").args(["depends", KERNEL]))?;
    let name = text.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
    name.map(str::to_owned).with_context(|| format!("apt knows no {KERNEL}; run `apt-get update` first"))
}

/// `name=version`, as apt would install it.
fn candidate(package: &str) -> Result<String> {
    let text = output(Command::new("apt-cache").args(["policy", package]))?;
    let version = text.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    version
        .map(|v| format!("{package}={v}"))
        .with_context(|| format!("apt has no {package}; run `apt-get update` first"))
}

fn fetch(package: &str, work: &Path, tree: &Path) -> Result<()> {
    // apt gives up root for the download, and then needs a folder that others may write to.
    let download = work.join(package);
    fs::create_dir_all(&download)?;
    let get = || {
        let mut command = Command::new("apt-get");
        command.args(["-q", "-o", "APT::Sandbox::User=root", "download", package]);
        checked(command.current_dir(&download).stdout(Stdio::null()))
    };
    // Lists that are too old name versions that are gone.
    get().or_else(|_| crate::host::apt_update().and_then(|()| get()))?;
    let file = download.join(single(&download)?);
    checked(Command::new("dpkg-deb").arg("-x").arg(file).arg(tree))
}

/// The one entry of a folder.
fn single(dir: &Path) -> Result<String> {
    let mut entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    let entry = entries.next().with_context(|| format!("{} is empty", dir.display()))??;
    ensure!(entries.next().is_none(), "{} holds more than one entry", dir.display());
    entry.file_name().into_string().map_err(|name| anyhow::anyhow!("{name:?} is no text"))
}

/// The wanted modules and what they depend on, dependencies first: names and contents.
fn load_order(modules: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = BTreeMap::new();
    find_modules(modules, &mut files)?;
    let builtin = builtin(modules)?;
    let mut order = Order { files, builtin, seen: BTreeSet::new(), sorted: Vec::new() };
    for name in MODULES {
        order.add(name)?;
    }
    Ok(order.sorted)
}

struct Order {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
    seen: BTreeSet<String>,
    sorted: Vec<(String, Vec<u8>)>,
}

impl Order {
    fn add(&mut self, name: &str) -> Result<()> {
        if self.builtin.contains(name) || !self.seen.insert(name.to_owned()) {
            return Ok(());
        }
        let path =
            self.files.get(name).with_context(|| format!("the kernel package has no module {name}"))?;
        let content = unpacked(path)?;
        for dependency in dependencies(&content) {
            self.add(&dependency)?;
        }
        self.sorted.push((name.to_owned(), content));
        Ok(())
    }
}

fn find_modules(dir: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            find_modules(&path, found)?;
        } else if let Some(name) = module_name(&path) {
            found.insert(name, path);
        }
    }
    Ok(())
}

/// `virtio-rng.ko.xz` is the module `virtio_rng`.
fn module_name(path: &Path) -> Option<String> {
    let (name, rest) = path.file_name()?.to_str()?.split_once(".ko")?;
    ["", ".xz", ".zst", ".gz"].contains(&rest).then(|| name.replace('-', "_"))
}

fn builtin(modules: &Path) -> Result<BTreeSet<String>> {
    let text = fs::read_to_string(modules.join("modules.builtin"))?;
    let mut names: BTreeSet<String> = text.lines().filter_map(|line| module_name(Path::new(line))).collect();
    // CONFIG_PACKET=y is listed by neither name in some kernels; it is always there in Debian's.
    names.insert("af_packet".into());
    Ok(names)
}

fn unpacked(path: &Path) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(|ext| ext.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return Ok(fs::read(path)?),
    };
    bytes(Command::new(tool).arg("-dc").arg(path))
}

/// A module names its dependencies in its `.modinfo` section.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let list = module[at + KEY.len()..].split(|&b| b == 0).next().unwrap_or_default();
    let list = String::from_utf8_lossy(list);
    list.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

fn initrd_archive(tree: &Path, modules: &[(String, Vec<u8>)]) -> Result<Vec<u8>> {
    let mut archive = Cpio::default();
    for dir in ["bin", "dev", "proc", "sys", "run", "tmp", "lib", "lib/modules", "lib/modules/cocoon"] {
        archive.dir(dir);
    }
    archive.file("bin/busybox", 0o755, &fs::read(tree.join("bin/busybox"))?);
    archive.link("bin/sh", "busybox");
    for (index, (name, content)) in modules.iter().enumerate() {
        archive.file(&format!("lib/modules/cocoon/{index:02}-{name}.ko"), 0o644, content);
    }
    Ok(archive.finish())
}

/// Fast to unpack matters more than small: guests without hardware help unpack it at every boot.
fn gzip(archive: &[u8]) -> Result<Vec<u8>> {
    let mut packed = filter(Command::new("gzip").args(["-1", "-n"]), archive)?;
    // A second archive may be appended: the kernel wants it at a multiple of four.
    packed.resize(packed.len().next_multiple_of(512), 0);
    Ok(packed)
}

/// Writes the `newc` archives that the kernel unpacks as initrd.
#[derive(Debug, Default)]
pub(crate) struct Cpio {
    bytes: Vec<u8>,
    inode: u32,
}

impl Cpio {
    /// Adds a folder.
    pub(crate) fn dir(&mut self, path: &str) {
        self.entry(path, 0o040_755, &[]);
    }

    /// Adds a file.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entry(path, 0o100_000 | mode, content);
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.entry(path, 0o120_777, target.as_bytes());
    }

    /// Ends the archive; its length is a multiple of 512.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        let fields = [
            self.inode as usize,
            mode as usize,
            0, // uid
            0, // gid
            1, // links
            0, // time
            content.len(),
            0, // device
            0,
            0, // special device
            0,
            path.len() + 1,
            0, // checksum
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// The SHA-256 of a file, hexadecimal.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let text = output(Command::new("sha256sum").arg("--").arg(path))?;
    let hex = text.split_ascii_whitespace().next().unwrap_or_default().trim_start_matches('\\');
    ensure!(hex.len() == 64, "sha256sum said {text:?}");
    Ok(hex.to_owned())
}

/// Runs a command to success.
pub(crate) fn checked(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| missing(command))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

/// What a command prints.
pub(crate) fn bytes(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stderr(Stdio::inherit()).output().with_context(|| missing(command))?;
    if !output.status.success() {
        bail!("{command:?} ended with {}", output.status);
    }
    Ok(output.stdout)
}

/// What a command prints, as text.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8(bytes(command)?)?)
}

/// Sends `input` through a command.
pub(crate) fn filter(command: &mut Command, input: &[u8]) -> Result<Vec<u8>> {
    use std::io::Write as _;
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().with_context(|| missing(command))?;
    let mut stdin = child.stdin.take().context("a piped child has a standard input")?;
    let output = std::thread::scope(|scope| {
        let feeder = scope.spawn(move || stdin.write_all(input));
        let output = child.wait_with_output();
        feeder.join().map_err(|_| anyhow::anyhow!("the feeding thread failed"))??;
        anyhow::Ok(output?)
    })?;
    if !output.status.success() {
        bail!("{command:?} ended with {}", output.status);
    }
    Ok(output.stdout)
}

fn missing(command: &Command) -> String {
    format!(
        "cannot run {0}; install the package that brings it (`apt-get install {0}`)",
        command.get_program().display()
    )
}

/// Removes a folder; its absence is as good.
pub(crate) fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| path.display().to_string())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_named_by_its_file_whatever_its_compression() {
        for (file, want) in [
            ("kernel/a/virtio-rng.ko", Some("virtio_rng")),
            ("erofs.ko.xz", Some("erofs")),
            ("modules.order", None),
            ("x.kopy", None),
        ] {
            assert_eq!(module_name(Path::new(file)).as_deref(), want, "{file}");
        }
    }

    #[test]
    fn dependencies_come_from_the_module_itself() {
        assert_eq!(dependencies(b"x\0depends=virtio-ring,virtio\0name=y\0"), ["virtio_ring", "virtio"]);
        assert!(dependencies(b"x\0depends=\0").is_empty());
        assert!(dependencies(b"x").is_empty());
    }

    #[test]
    fn archive_entries_stand_at_multiples_of_four() {
        let mut archive = Cpio::default();
        archive.dir("bin");
        archive.file("bin/a", 0o755, b"abc");
        archive.link("bin/b", "a");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 512, 0);
        let starts: Vec<usize> =
            bytes.windows(6).enumerate().filter(|(_, w)| *w == b"070701").map(|(at, _)| at).collect();
        assert_eq!(starts.len(), 4);
        assert!(starts.iter().all(|at| at % 4 == 0));
    }
}
