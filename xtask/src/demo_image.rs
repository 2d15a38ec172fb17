//! The two images of the demo, made from Debian's busybox and the boot bundle.
//!
//! - [`run`]: `target/demo/demo-image.tar`, image `cocoon-demo:1`: an OCI layout in a tar, a layer of
//!   userland and a layer with kernel, initrd and the program `counter`. It boots on its own.
//! - [`plain_image`]: `target/demo/plain-image.tar`, image `cocoon-plain:1`: what `docker save` writes, one
//!   layer of userland, no kernel. It boots with the bundle.
//!
//! Files, times and owners are fixed, so the same inputs give the same digests.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::bundle::{Cpio, bytes, checked, output, remove_dir, sha256};

/// To be raised when this file makes something else from the same inputs.
const RECIPE: u32 = 1;
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Applets that would take over PID 1, or are no commands.
const NO_LINK: [&str; 3] = ["busybox", "init", "linuxrc"];
const COUNTER: &str = include_str!("../../examples/images/counter");
/// Small files of `/etc`.
const ETC: [(&str, &str); 6] = [
    ("passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
    ("group", "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n"),
    ("shells", "/bin/sh\n"),
    ("profile", "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"),
    ("os-release", "ID=cocoon-demo\nNAME=\"cocoon demo\"\nPRETTY_NAME=\"cocoon demo (busybox)\"\n"),
    ("hosts", "127.0.0.1\tlocalhost\n::1\tlocalhost\n"),
];

/// Makes the demo's image of the boot bundle and the guest agent in `parts`. Returns its archive.
pub fn run(bundle: &Path, parts: &Path) -> Result<PathBuf> {
    let agent = parts.join("cocoon-guest-agent");
    let about: Value = serde_json::from_slice(&fs::read(bundle.join("bundle.json"))?)?;
    let busybox = busybox()?;
    let stamp = format!("recipe {RECIPE}\n{about}\n{}\n{}\n{COUNTER}", sha256(&agent)?, sha256(&busybox)?);
    cached("demo-image", &stamp, |work, archive| {
        let version = about["kernel_version"].as_str().context("bundle.json names no kernel_version")?;
        let layout = Layout::new(&work.join("layout"))?;
        let boot = work.join("boot");
        lay_out_boot(&boot, bundle, &agent, version)?;
        let userland = work.join("userland");
        lay_out_userland(&userland, &busybox)?;
        let layers = [layout.layer(&userland)?, layout.layer(&boot)?];
        layout.finish("cocoon-demo:1", &layers)?;
        tar(&layout.root, archive)
    })
}

/// Makes the image without a kernel. Returns its archive.
pub fn plain_image() -> Result<PathBuf> {
    let busybox = busybox()?;
    let stamp = format!("recipe {RECIPE}\n{}\n", sha256(&busybox)?);
    cached("plain-image", &stamp, |work, archive| {
        let layout = Layout::new(&work.join("layout"))?;
        let userland = work.join("userland");
        lay_out_userland(&userland, &busybox)?;
        layout.finish("cocoon-plain:1", &[layout.layer(&userland)?])?;
        // An ordinary tool makes the ordinary archive.
        checked(
            Command::new("skopeo")
                .args(["--insecure-policy", "copy", "--quiet"])
                .arg(format!("oci:{}:cocoon-plain:1", layout.root.display()))
                .arg(format!("docker-archive:{}:cocoon-plain:1", archive.display())),
        )
    })
}

/// Makes `target/demo/NAME.tar` unless it was made from the same `stamp`.
fn cached(name: &str, stamp: &str, make: impl FnOnce(&Path, &Path) -> Result<()>) -> Result<PathBuf> {
    let demo = crate::root().join("target/demo");
    let archive = demo.join(format!("{name}.tar"));
    let stamp_path = demo.join(format!("{name}.stamp"));
    if archive.exists() && fs::read_to_string(&stamp_path).is_ok_and(|old| old == stamp) {
        eprintln!("{name}: up to date ({})", archive.display());
        return Ok(archive);
    }
    let work = demo.join(format!("{name}.work"));
    remove_dir(&work)?;
    fs::create_dir_all(&work)?;
    let fresh = work.join("archive.tar");
    make(&work, &fresh)?;
    fs::rename(&fresh, &archive)?;
    fs::write(stamp_path, stamp)?;
    remove_dir(&work)?;
    eprintln!("{name}: made {}", archive.display());
    Ok(archive)
}

/// A static busybox: the one of the boot bundle's package, as installed on this machine.
fn busybox() -> Result<PathBuf> {
    let path = PathBuf::from("/bin/busybox");
    anyhow::ensure!(path.exists(), "no /bin/busybox; run `apt-get install busybox-static`");
    Ok(path)
}

fn lay_out_userland(root: &Path, busybox: &Path) -> Result<()> {
    const DIRS: [&str; 16] = [
        "bin",
        "sbin",
        "dev",
        "etc",
        "home",
        "mnt",
        "opt",
        "proc",
        "root",
        "run",
        "srv",
        "sys",
        "tmp",
        "usr/bin",
        "usr/local/bin",
        "var/log",
    ];
    for dir in DIRS {
        fs::create_dir_all(root.join(dir))?;
    }
    fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777))?;
    fs::set_permissions(root.join("root"), fs::Permissions::from_mode(0o700))?;
    fs::copy(busybox, root.join("bin/busybox"))?;
    let applets = output(Command::new(busybox).arg("--list"))?;
    for applet in applets.lines().filter(|applet| !NO_LINK.contains(applet)) {
        symlink("busybox", root.join("bin").join(applet)).with_context(|| format!("link {applet}"))?;
    }
    for (name, text) in ETC {
        fs::write(root.join("etc").join(name), text)?;
    }
    Ok(())
}

fn lay_out_boot(root: &Path, bundle: &Path, agent: &Path, version: &str) -> Result<()> {
    let (boot, programs) = (root.join("boot"), root.join("usr/bin"));
    fs::create_dir_all(&boot)?;
    fs::create_dir_all(&programs)?;
    fs::copy(bundle.join("vmlinuz"), boot.join(format!("vmlinuz-{version}")))?;
    let mut archive = Cpio::default();
    archive.file("init", 0o755, &fs::read(agent)?);
    let mut initrd = fs::read(bundle.join("initrd.img"))?;
    initrd.extend(archive.finish());
    fs::write(boot.join(format!("initrd.img-{version}")), initrd)?;
    fs::write(programs.join("counter"), COUNTER)?;
    fs::set_permissions(programs.join("counter"), fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// An OCI image layout in a folder.
struct Layout {
    root: PathBuf,
}

/// A blob that was put in a layout.
struct Blob {
    digest: String,
    size: u64,
    /// Digest of the layer before compression; for layers only.
    unpacked: String,
}

impl Blob {
    fn descriptor(&self, media_type: &str) -> Value {
        json!({ "mediaType": media_type, "digest": self.digest, "size": self.size })
    }
}

impl Layout {
    fn new(root: &Path) -> Result<Self> {
        fs::create_dir_all(root.join("blobs/sha256"))?;
        fs::write(root.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
        Ok(Self { root: root.to_owned() })
    }

    /// Packs a folder as a layer.
    fn layer(&self, folder: &Path) -> Result<Blob> {
        let unpacked = folder.with_extension("tar");
        tar(folder, &unpacked)?;
        let packed = bytes(Command::new("gzip").args(["-6", "-n", "-c"]).arg(&unpacked))?;
        Ok(Blob { unpacked: format!("sha256:{}", sha256(&unpacked)?), ..self.put(&packed)? })
    }

    fn put(&self, content: &[u8]) -> Result<Blob> {
        let temporary = self.root.join("blob");
        fs::write(&temporary, content)?;
        let hex = sha256(&temporary)?;
        fs::rename(&temporary, self.root.join("blobs/sha256").join(&hex))?;
        Ok(Blob { digest: format!("sha256:{hex}"), size: content.len() as u64, unpacked: String::new() })
    }

    /// Writes config, manifest and index.
    fn finish(&self, name: &str, layers: &[Blob]) -> Result<()> {
        let diff_ids: Vec<&str> = layers.iter().map(|layer| layer.unpacked.as_str()).collect();
        let config = self.put(&serde_json::to_vec(&json!({
            "created": "1970-01-01T00:00:00Z",
            "architecture": "amd64",
            "os": "linux",
            "config": { "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["/bin/sh"] },
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        }))?)?;
        let layers: Vec<Value> = layers.iter().map(|layer| layer.descriptor(LAYER)).collect();
        let manifest = self.put(&serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.descriptor(CONFIG),
            "layers": layers,
        }))?)?;
        let mut entry = manifest.descriptor(MANIFEST);
        entry["platform"] = json!({ "architecture": "amd64", "os": "linux" });
        entry["annotations"] = json!({ "org.opencontainers.image.ref.name": name });
        let index = json!({ "schemaVersion": 2, "manifests": [entry] });
        fs::write(self.root.join("index.json"), serde_json::to_vec(&index)?)?;
        Ok(())
    }
}

/// Packs a folder's content, the same bytes for the same content.
fn tar(folder: &Path, archive: &Path) -> Result<()> {
    checked(
        Command::new("tar")
            .args(["--create", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"])
            .arg("--file")
            .arg(archive)
            .arg("--directory")
            .arg(folder)
            .arg("."),
    )
}
