//! Images, from real archives to what a guest would mount. Needs root, skopeo, erofs-utils, qemu-utils.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "the helpers of these tests may panic, as the tests may"
)]

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use cocoon_engine::{
    db::Db,
    error::{BringUpError, ImportError, LookupError},
    image::{ImportOptions, Setuid, Store},
};
use cocoon_oci::memory::Memory;

/// A folder with a store.
struct Host {
    folder: tempfile::TempDir,
    store: Store,
}

impl Host {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::open(&folder.path().join("engine.db")).unwrap();
        let store = Store::open(&folder.path().join("root"), db).await.unwrap();
        Self { folder, store }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A layer made by the ordinary tar program from files; content `-> x` makes a link.
    fn layer(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
        let tree = self.path(&format!("{name}.tree"));
        for (path, content) in files {
            let path = tree.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match content.strip_prefix("-> ") {
                Some(target) => symlink(target, path).unwrap(),
                None => fs::write(path, content).unwrap(),
            }
        }
        let tar = self.path(name);
        run("tar", &["-cf", tar.to_str().unwrap(), "-C", tree.to_str().unwrap(), "."]);
        tar
    }

    /// An OCI layout in a folder, with the given uncompressed layers.
    fn layout(&self, name: &str, layers: &[PathBuf]) -> PathBuf {
        let folder = self.path(name);
        fs::create_dir_all(folder.join("blobs/sha256")).unwrap();
        let blob = |bytes: &[u8]| {
            let digest = sha256(bytes);
            fs::write(folder.join("blobs/sha256").join(&digest), bytes).unwrap();
            (digest, bytes.len())
        };
        let layers: Vec<_> = layers.iter().map(|path| blob(&fs::read(path).unwrap())).collect();
        let ids: Vec<_> = layers.iter().map(|(digest, _)| format!("sha256:{digest}")).collect();
        let config = serde_json::json!({
            "architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": ids}
        });
        let (config, config_size) = blob(config.to_string().as_bytes());
        let layer = |(digest, size): &(String, usize)| {
            serde_json::json!({"mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": format!("sha256:{digest}"), "size": size})
        };
        let manifest = serde_json::json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": format!("sha256:{config}"), "size": config_size},
            "layers": layers.iter().map(layer).collect::<Vec<_>>(),
        });
        let (manifest, size) = blob(manifest.to_string().as_bytes());
        let index = serde_json::json!({"schemaVersion": 2, "manifests": [{
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": format!("sha256:{manifest}"),
            "size": size, "annotations": {"org.opencontainers.image.ref.name": "it"}}]});
        fs::write(folder.join("index.json"), index.to_string()).unwrap();
        fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        folder
    }

    /// An archive of a kind that skopeo knows, from a layout.
    fn archive(&self, kind: &str, layout: &Path, name: &str) -> PathBuf {
        let to = self.path(name);
        let from = format!("oci:{}:it", layout.display());
        let target = format!("{kind}:{}:demo:latest", to.display());
        run("skopeo", &["--insecure-policy", "copy", "--quiet", &from, &target]);
        to
    }

    /// All files of an erofs disk, as `path content`.
    fn files(&self, disk: &Path) -> Vec<String> {
        let to = tempfile::tempdir_in(self.folder.path()).unwrap();
        let extract = format!("--extract={}", to.path().display());
        run("fsck.erofs", &[&extract, "--overwrite", disk.to_str().unwrap()]);
        let mut all = Vec::new();
        collect(to.path(), to.path(), &mut all);
        all.sort();
        all
    }

    /// A bundle of tiny boot files.
    fn bundle(&self) -> PathBuf {
        let folder = self.path("bundle");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("vmlinuz"), "bundle kernel").unwrap();
        fs::write(folder.join("initrd.img"), "bundle initrd").unwrap();
        folder
    }
}

fn collect(root: &Path, folder: &Path, all: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            collect(root, &path, all);
        } else {
            let name = path.strip_prefix(root).unwrap().display().to_string();
            let content = if path.is_symlink() {
                format!("-> {}", fs::read_link(&path).unwrap().display())
            } else {
                fs::read_to_string(&path).unwrap()
            };
            all.push(format!("{name} {content}"));
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let done = Command::new(program).args(arguments).output();
    let done = done
        .unwrap_or_else(|error| panic!("{program}: {error}; apt-get install skopeo erofs-utils qemu-utils"));
    assert!(done.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    hex::encode(sha2::Sha256::digest(bytes))
}

fn temp_is_empty(host: &Host) -> bool {
    fs::read_dir(host.path("root/oci/temp")).unwrap().next().is_none()
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_of_oci_and_docker_archives_become_disks_lowest_first() {
    let host = Host::new().await;
    let low = host.layer("low.tar", &[("etc/motd", "low"), ("bin/sh", "-> busybox"), ("bin/busybox", "box")]);
    let high = host.layer("high.tar", &[("etc/motd", "high")]);
    let layout = host.layout("layout", &[low, high]);
    for kind in ["oci-archive", "docker-archive"] {
        let archive = host.archive(kind, &layout, kind);
        let image = host.store.import(&format!("demo-{kind}:1"), &[archive]).await.unwrap();
        assert!(image.id.starts_with("sha256:") && image.kind == "oci" && image.size > 0, "{image:?}");
        let set = match host.store.boot_set(&image.name, &host.bundle()).await {
            Ok(set) => set,
            // A build without the embedded agent says what to run; the disks are looked at below then.
            Err(BringUpError::HostMissing { remedy, .. }) if remedy.contains("xtask embed") => continue,
            Err(other) => panic!("{kind}: {other:?}"),
        };
        assert_eq!(set.layers.len(), 2, "{kind}");
        assert_eq!(host.files(&set.layers[0].path), ["bin/busybox box", "bin/sh -> busybox", "etc/motd low"]);
        assert_eq!(host.files(&set.layers[1].path), ["etc/motd high"]);
        assert_eq!(fs::metadata(&set.layers[0].path).unwrap().mode() & 0o777, 0o444);
        assert_eq!(set.blob_ids.len(), 3);
    }
    assert!(temp_is_empty(&host));
}

/// A registry with everything of a layout, as `demo:1`.
fn registry(layout: &Path) -> Memory {
    let registry = Memory::new();
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let manifest = index["manifests"][0]["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
    for blob in fs::read_dir(layout.join("blobs/sha256")).unwrap() {
        let blob = blob.unwrap();
        let bytes = fs::read(blob.path()).unwrap();
        if blob.file_name() == manifest {
            registry.insert_manifest("demo", "1", "application/vnd.oci.image.manifest.v1+json", bytes);
        } else {
            registry.insert("demo", bytes);
        }
    }
    registry
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_pulled_from_a_registry_and_a_lie_is_found() {
    let host = Host::new().await;
    let low = host.layer("low.tar", &[("a", "a"), ("b", "b"), ("vmlinuz", "k"), ("initrd.img", "i")]);
    let high = host.layer("high.tar", &[(".wh.b", ""), ("c", "c")]);
    let low_digest = format!("sha256:{}", sha256(&fs::read(&low).unwrap()));
    let layout = host.layout("layout", &[low, high]);

    let lying = registry(&layout);
    lying.insert_raw("demo", &low_digest, vec![0_u8; 10_240]);
    let broken = registry(&layout);
    broken.fail(&low_digest);
    for (what, registry, reference) in
        [("lie", &lying, "1"), ("broken", &broken, "1"), ("absent", &lying, "2")]
    {
        let error = host.store.pull("x", registry, "demo", reference).await.expect_err(what);
        assert!(error.to_string().contains('x'), "{what}: {error}");
        assert!(fs::read_dir(host.path("root/oci/blobs")).unwrap().next().is_none(), "{what}");
        assert!(temp_is_empty(&host), "{what}");
    }

    let image = host.store.pull("demo:1", &registry(&layout), "demo", "1").await.unwrap();
    let set = host.store.boot_set("demo:1", Path::new("/")).await.unwrap();
    assert_eq!(set.layers.len(), 1, "a layer that deletes is merged with the ones below");
    assert_eq!(host.files(&set.layers[0].path), ["a a", "c c", "initrd.img i", "vmlinuz k"]);
    let index = fs::read_to_string(layout.join("index.json")).unwrap();
    assert!(index.contains(&image.id), "the image's id is its manifest's digest");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_with_kernel_and_initrd_boots_with_its_own() {
    let host = Host::new().await;
    let low = host.layer("low.tar", &[("boot/vmlinuz-1", "old kernel"), ("boot/initrd.img-1", "initrd")]);
    let high = host.layer("high.tar", &[("boot/vmlinuz-2", "new kernel"), ("vmlinuz", "-> boot/vmlinuz-2")]);
    let image = host.store.import("own", &[low, high]).await.unwrap();
    let set = host.store.boot_set("own", Path::new("/nonexistent")).await.unwrap();
    assert_eq!(fs::read_to_string(&set.kernel).unwrap(), "new kernel");
    assert_eq!(fs::read_to_string(&set.initrd).unwrap(), "initrd");
    assert_eq!(set.kernel_digest, format!("sha256:{}", sha256(b"new kernel")));
    assert_eq!(set.image, image);
    let again = host.store.boot_set_by_digests(&set.recorded(), Path::new("/nonexistent")).await.unwrap();
    assert_eq!((&again.layers, &again.kernel, &again.blob_ids), (&set.layers, &set.kernel, &set.blob_ids));
    let mut other = set.recorded();
    other.layers[0].digest = format!("sha256:{}", "0".repeat(64));
    let error = host.store.boot_set_by_digests(&other, Path::new("/")).await.unwrap_err().to_string();
    assert!(error.contains(&other.layers[0].digest) && error.contains("image import own"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kernel_without_an_initrd_is_refused_and_says_what_lacks() {
    let host = Host::new().await;
    let layer = host.layer("l.tar", &[("boot/vmlinuz", "kernel"), ("boot/initrd.img", "-> gone")]);
    let error = host.store.import("half", &[layer]).await.unwrap_err().to_string();
    assert!(error.contains("vmlinuz") && error.contains("no initrd.img"), "{error}");
    assert!(matches!(host.store.get("half").await, Err(LookupError::ImageNotFound(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn files_deleted_by_a_layer_are_gone_in_what_the_guest_mounts() {
    let host = Host::new().await;
    let low = host
        .layer("low.tar", &[("etc/secret", "s"), ("etc/kept", "k"), ("opt/old/a", "a"), ("opt/old/b", "b")]);
    let high =
        host.layer("high.tar", &[("etc/.wh.secret", ""), ("opt/old/.wh..wh..opq", ""), ("opt/old/new", "n")]);
    let top = host.layer("top.tar", &[("top", "t")]);
    let archive = host.archive("oci-archive", &host.layout("layout", &[low, high, top]), "a.tar");
    host.store.import("white", &[archive]).await.unwrap();
    let disks: Vec<_> =
        fs::read_dir(host.path("root/oci/blobs")).unwrap().map(|e| e.unwrap().path()).collect();
    // The lowest layer had been built before the second said that it needs it; gc takes it.
    assert_eq!(disks.len(), 2, "{disks:?}");
    assert_eq!(host.store.collect(&BTreeSet::new()).await.unwrap().len(), 1);
    let merged = fs::read_dir(host.path("root/oci/blobs")).unwrap().next().unwrap().unwrap().path();
    assert_eq!(host.files(&merged), ["etc/kept k", "opt/old/new n", "top t"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_was_imported_alone_still_deletes_in_another_image() {
    let host = Host::new().await;
    let base = host.layer("base.tar", &[("etc/secret", "s"), ("etc/kept", "k")]);
    let diff = host.layer("diff.tar", &[("etc/.wh.secret", ""), ("etc/new", "n")]);
    host.store.import("diff", std::slice::from_ref(&diff)).await.unwrap();
    host.store.import("both", &[base, diff.clone()]).await.unwrap();
    host.store.import("again", &[diff]).await.unwrap();
    host.store.remove("diff").await.unwrap();
    host.store.remove("again").await.unwrap();
    host.store.collect(&BTreeSet::new()).await.unwrap();
    let disks: Vec<_> =
        fs::read_dir(host.path("root/oci/blobs")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(disks.len(), 1, "{disks:?}");
    assert_eq!(host.files(&disks[0]), ["etc/kept k", "etc/new n"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_unpacks_to_too_much_is_refused_before_it_is_read_to_its_end() {
    let host = Host::new().await;
    let layer = host.layer("zeros.tar", &[("zeros", &"\0".repeat(4 << 20))]);
    run("gzip", &["-k", layer.to_str().unwrap()]);
    let bomb = host.path("zeros.tar.gz");
    let how = ImportOptions { max_bytes: 1 << 20, ..ImportOptions::default() };
    let error = host.store.import_with("bomb", std::slice::from_ref(&bomb), how).await.unwrap_err();
    assert!(matches!(&error, ImportError::Hostile { .. }), "{error}");
    assert!(error.to_string().contains("more unpacked bytes"), "{error}");
    host.store.import("enough", &[bomb]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_content_is_built_once_also_by_two_at_a_time() {
    let host = Host::new().await;
    let layer = host.layer("l.tar", &[("a", "a")]);
    let files = [layer];
    let (one, two) = tokio::join!(host.store.import("one", &files), host.store.import("two", &files));
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(one.id, two.id);
    let blobs =
        || fs::read_dir(host.path("root/oci/blobs")).unwrap().map(|e| e.unwrap().metadata().unwrap().ino());
    let before: Vec<_> = blobs().collect();
    assert_eq!(before.len(), 1);
    host.store.import("three", &files).await.unwrap();
    assert_eq!(blobs().collect::<Vec<_>>(), before, "nothing was built again");
    let names: Vec<_> = host.store.list().await.unwrap().into_iter().map(|image| image.name).collect();
    assert_eq!(names, ["one", "three", "two"]);
    assert_eq!(host.store.get(&one.id[..20]).await.unwrap().id, one.id);
    host.store.remove(&one.id).await.unwrap();
    assert!(host.store.list().await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_tree_gives_the_same_disk() {
    let mut contents = Vec::new();
    for _ in 0..2 {
        let host = Host::new().await;
        let layer = host.layer(
            "l.tar",
            &[
                ("etc/a", "a"),
                ("usr/b", "b"),
                ("c", "-> usr/b"),
                ("boot/vmlinuz", "k"),
                ("boot/initrd.img", "i"),
            ],
        );
        // Times and the order of folders differ; the content of the layer is what counts.
        let fixed = host.path("fixed.tar");
        run(
            "tar",
            &[
                "--sort=name",
                "--mtime=@0",
                "-cf",
                fixed.to_str().unwrap(),
                "-C",
                host.path("l.tar.tree").to_str().unwrap(),
                ".",
            ],
        );
        drop(layer);
        host.store.import("x", &[fixed]).await.unwrap();
        contents.push(host.store.boot_set("x", Path::new("/")).await.unwrap().recorded());
    }
    assert_eq!(contents[0], contents[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn setuid_programs_are_refused_unless_stripped_and_the_choice_is_remembered() {
    let host = Host::new().await;
    let layer = host.layer("l.tar", &[("bin/su", "su")]);
    fs::set_permissions(host.path("l.tar.tree/bin/su"), fs::Permissions::from_mode(0o4755)).unwrap();
    run("tar", &["-cf", layer.to_str().unwrap(), "-C", host.path("l.tar.tree").to_str().unwrap(), "."]);
    let files = [layer];
    let strip = ImportOptions { setuid: Setuid::Strip, ..ImportOptions::default() };
    for round in 0..2 {
        match host.store.import("s", &files).await.unwrap_err() {
            ImportError::Hostile { entry, reason, .. } => {
                assert!(
                    entry.ends_with("bin/su") && reason.contains("--strip-setuid"),
                    "{round}: {entry} {reason}"
                );
            }
            other => panic!("{round}: {other:?}"),
        }
        host.store.import_with("s", &files, strip).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_are_no_image_are_refused_and_leave_nothing() {
    let host = Host::new().await;
    let layer = host.layer("l.tar", &[("a", "a")]);
    let write = |name: &str, bytes: &[u8]| {
        fs::write(host.path(name), bytes).unwrap();
        host.path(name)
    };
    let plain = host.path("plain.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", plain.to_str().unwrap(), "1M"]);
    let backed = host.path("backed.qcow2");
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "/etc/passwd", backed.to_str().unwrap(), "1M"],
    );
    let data = host.path("data.qcow2");
    let option = format!("data_file={}", host.path("data.raw").display());
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &option, data.to_str().unwrap(), "1M"]);
    let junk = write("junk", &[b'j'; 2000]);
    let cut = write("cut.tar", &fs::read(&layer).unwrap()[..700]);
    let pipe = host.path("pipe");
    run("mkfifo", &[pipe.to_str().unwrap()]);
    let no_layer = write("broken.tar", &{
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(2);
        tar.append_data(&mut header, "oci-layout", &b"{}"[..]).unwrap();
        tar.into_inner().unwrap()
    });
    for (files, word) in [
        (vec![plain], "qcow2 cloud images are not taken in this release"),
        (vec![backed], "backing or data file"),
        (vec![data], "backing or data file"),
        (vec![junk.clone()], "neither a tar"),
        (vec![junk.clone()], "gzip or zstd"),
        (vec![junk.clone()], "xz -d"),
        (vec![host.path("root")], "is a folder; pack it"),
        (
            vec![host.path("root")],
            &format!("tar -C {} -cf - . | cocoon image import", host.path("root").display()),
        ),
        (vec!["/dev/null".into()], "must be a regular file"),
        (vec![pipe], "must be a regular file"),
        (vec![write("empty", b"")], "neither a tar"),
        (vec![cut], ""),
        (vec![no_layer], "oci-layout"),
        (vec![layer.clone(), junk], "every file must be a plain tar"),
        (vec![], "no archive"),
        (vec![host.path("gone")], "gone"),
    ] {
        let error = host.store.import("bad", &files).await.expect_err(&format!("{files:?}")).to_string();
        assert!(error.contains("bad") && error.contains(word), "{files:?}: {error}");
    }
    for name in ["", "a b", "a\nb"] {
        assert!(host.store.import(name, std::slice::from_ref(&layer)).await.is_err(), "{name:?}");
    }
    assert!(host.store.list().await.unwrap().is_empty() && temp_is_empty(&host));
    assert!(fs::read_dir(host.path("root/oci/blobs")).unwrap().next().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn gc_takes_what_no_image_and_no_caller_needs() {
    let host = Host::new().await;
    let kept = host.layer("a.tar", &[("a", "a"), ("vmlinuz", "k"), ("initrd.img", "i")]);
    let gone = host.layer("b.tar", &[("b", "b"), ("vmlinuz", "k2"), ("initrd.img", "i2")]);
    host.store.import("kept", &[kept]).await.unwrap();
    host.store.import("gone", std::slice::from_ref(&gone)).await.unwrap();
    let needed = host.store.boot_set("gone", Path::new("/")).await.unwrap().blob_ids;
    host.store.remove("gone").await.unwrap();
    assert!(host.store.collect(&needed).await.unwrap().is_empty(), "a VM still uses it");
    let taken = host.store.collect(&BTreeSet::new()).await.unwrap();
    assert_eq!(taken.len(), 2, "one disk and its boot files: {taken:?}");
    assert!(host.store.boot_set("kept", Path::new("/")).await.is_ok());
    host.store.import("gone", &[gone]).await.unwrap();
    assert!(host.store.boot_set("gone", Path::new("/")).await.is_ok(), "what gc took is built again");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_import_brings_back_boot_files_that_were_lost_and_leaves_the_disk_alone() {
    let host = Host::new().await;
    let layer = [host.layer("a.tar", &[("a", "a"), ("vmlinuz", "k"), ("initrd.img", "i")])];
    let whole = host.store.import("x", &layer).await.unwrap();
    let set = host.store.boot_set("x", Path::new("/")).await.unwrap();
    let disk = fs::metadata(&set.layers[0].path).unwrap().ino();
    let (recorded, files) = (set.recorded(), [set.kernel.clone(), set.initrd.clone()]);
    let folder = files[0].parent().unwrap().to_owned();
    drop(set);
    for lost in [vec![&files[0]], vec![&files[1]], files.iter().collect()] {
        for file in lost {
            fs::remove_file(file).unwrap();
        }
        // Nor is the folder itself needed.
        let _ = fs::remove_dir(&folder);
        let error = host.store.boot_set("x", Path::new("/")).await.unwrap_err();
        let said = cocoon_kit::failure::chain(&error);
        assert!(said.contains("import the image again"), "{said}");
        let again = host.store.import("x", &layer).await.unwrap();
        assert_eq!((&again.id, again.size), (&whole.id, whole.size));
        let set = host.store.boot_set("x", Path::new("/")).await.unwrap();
        assert_eq!(set.recorded(), recorded);
        assert_eq!(files.each_ref().map(|file| fs::read(file).unwrap()), [b"k", b"i"]);
        assert_eq!(fs::metadata(&set.layers[0].path).unwrap().ino(), disk, "snapshots rely on its bytes");
    }
    assert!(temp_is_empty(&host));
}

#[tokio::test(flavor = "multi_thread")]
async fn boot_files_of_a_bundle_that_were_lost_are_made_again() {
    let host = Host::new().await;
    let layer = host.layer("a.tar", &[("a", "a")]);
    host.store.import("x", &[layer]).await.unwrap();
    let first = host.store.boot_set("x", &host.bundle()).await.unwrap();
    for lost in [&first.kernel, &first.initrd] {
        for from_snapshot in [false, true] {
            fs::remove_file(lost).unwrap();
            let bundle = host.path("bundle");
            let set = if from_snapshot {
                host.store.boot_set_by_digests(&first.recorded(), &bundle).await.unwrap()
            } else {
                host.store.boot_set("x", &bundle).await.unwrap()
            };
            assert_eq!(set.recorded(), first.recorded());
            assert!(set.kernel.is_file() && set.initrd.is_file());
        }
    }
}

/// Needs root, as all of these do: a small tmpfs is the only honest full disk.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_whose_disk_finds_no_space_is_refused_with_the_way_out() {
    let host = Host::new().await;
    let noise: String = (0..400_000_u32).map(|at| format!("{:08x}", at.wrapping_mul(0x9e37_79b1))).collect();
    let layer = host.layer("a.tar", &[("noise", &noise)]);
    let (temp, size) = (host.path("root/oci/temp"), "size=4700k");
    // The tree has room, its disk beside it has not.
    run("mount", &["-t", "tmpfs", "-o", size, "tmpfs", temp.to_str().unwrap()]);
    let failed = host.store.import("x", &[layer]).await;
    let left = fs::read_dir(&temp).unwrap().count();
    run("umount", &["-l", temp.to_str().unwrap()]);
    let said = cocoon_kit::failure::chain(&failed.unwrap_err());
    for part in ["image x: mkfs.erofs", "is full", "--root-dir"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(left, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn gc_waits_for_whoever_is_about_to_use_blobs() {
    let host = Host::new().await;
    let layer = host.layer("a.tar", &[("vmlinuz", "k"), ("initrd.img", "i")]);
    host.store.import("x", &[layer]).await.unwrap();
    let set = host.store.boot_set("x", Path::new("/")).await.unwrap();
    host.store.remove("x").await.unwrap();
    let needed = BTreeSet::new();
    let collect = host.store.collect(&needed);
    tokio::pin!(collect);
    let early = tokio::time::timeout(std::time::Duration::from_millis(300), &mut collect).await;
    assert!(early.is_err(), "gc must not run while a boot set is held");
    assert!(set.kernel.exists());
    drop(set);
    assert_eq!(collect.await.unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_writable_disk_is_an_empty_ext4_and_comes_from_a_template() {
    let host = Host::new().await;
    let size = 10 << 30;
    for name in ["one.qcow2", "two.qcow2"] {
        host.store.writable_disk(size, &host.path(name)).await.unwrap();
        let info = run("qemu-img", &["info", "--output=json", host.path(name).to_str().unwrap()]);
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        assert_eq!((&info["format"], &info["virtual-size"]), (&"qcow2".into(), &size.into()), "{info}");
        assert!(info["backing-filename"].is_null());
        run("qemu-img", &["check", "-q", host.path(name).to_str().unwrap()]);
    }
    let raw = host.path("raw");
    run(
        "qemu-img",
        &["convert", "-O", "raw", host.path("two.qcow2").to_str().unwrap(), raw.to_str().unwrap()],
    );
    run("e2fsck", &["-fn", raw.to_str().unwrap()]);
    assert!(host.store.writable_disk(size, &host.path("one.qcow2")).await.is_err(), "never overwritten");
    assert!(host.store.writable_disk(5, &host.path("tiny")).await.is_err());
}
