//! What skopeo, a stranger's tool, makes of our layout, and what we make of its archives.

#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test that cannot go on must stop"
)]

use std::{io::Read as _, path::Path, process::Command, sync::Arc};

use cocoon_oci::{
    digest, image,
    layout::OciLayout,
    manifest::{Descriptor, Document, OCI_MANIFEST},
    media,
    registry::Registry as _,
    snapshot::{Envelope, PushOptions, SourceFile, pull, push},
};

fn skopeo(arguments: &[&str]) -> Vec<u8> {
    let run = Command::new("skopeo").arg("--insecure-policy").args(arguments).output();
    let run = run.expect("skopeo is missing: apt-get install skopeo");
    assert!(run.status.success(), "skopeo {arguments:?}: {}", String::from_utf8_lossy(&run.stderr));
    run.stdout
}

fn tar_of(name: &str, content: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    builder.append_data(&mut header, name, content).unwrap();
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::new();
    flate2::bufread::GzEncoder::new(bytes, flate2::Compression::fast()).read_to_end(&mut encoded).unwrap();
    encoded
}

/// Puts a two-layer image (the first gzip, the second as said) into the layout; returns the uncompressed tars.
async fn put_image(layout: &OciLayout, architecture: &str, second: &str) -> Vec<Vec<u8>> {
    let tars = vec![tar_of("etc/one", b"first"), tar_of("etc/two", &vec![7; 100_000])];
    let packed = match second {
        "tar+zstd" => zstd::encode_all(tars[1].as_slice(), 3).unwrap(),
        _ => tars[1].clone(),
    };
    let stored = [gzip(&tars[0]), packed];
    let types = ["tar+gzip", second];
    let config = serde_json::json!({
        "architecture": architecture, "os": "linux", "config": {},
        "rootfs": {"type": "layers", "diff_ids": tars.iter().map(|tar| digest::of(tar)).collect::<Vec<_>>()},
    });
    let mut document = Document { media_type: OCI_MANIFEST.to_owned(), ..Document::default() };
    document.config = put(layout, media::OCI_CONFIG, config.to_string().into_bytes()).await;
    for (bytes, kind) in stored.into_iter().zip(types) {
        let media_type = format!("application/vnd.oci.image.layer.v1.{kind}");
        document.layers.push(put(layout, &media_type, bytes).await);
    }
    layout.put_manifest("app", "v1", OCI_MANIFEST, document.to_bytes().into()).await.unwrap();
    tars
}

async fn put(layout: &OciLayout, media_type: &str, bytes: Vec<u8>) -> Descriptor {
    let (digest, size) = (digest::of(&bytes), bytes.len() as i64);
    layout.put_bytes("app", &digest, bytes.into()).await.unwrap();
    Descriptor { media_type: media_type.to_owned(), digest, size, ..Descriptor::default() }
}

async fn read_layers(source: image::ImageSource) -> Vec<Vec<u8>> {
    let read = move || {
        let layers = 0..source.layers.len();
        let read = layers.map(|index| {
            let mut reader = source.open_layer(index).unwrap();
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).unwrap();
            reader.finish().unwrap();
            bytes
        });
        read.collect()
    };
    tokio::task::spawn_blocking(read).await.unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test]
async fn an_image_reads_the_same_from_the_layout_and_from_both_archives_of_skopeo() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path().join("layout")).unwrap();
    let tars = put_image(&layout, "amd64", "tar").await;
    let source = image::from_registry(Arc::new(layout.clone()), "app", "v1").await.unwrap();
    assert_eq!(source.digest, layout.get_manifest("app", "v1").await.unwrap().unwrap().digest);
    assert_eq!(read_layers(source).await, tars);
    let from = format!("oci:{}:app:v1", text(layout.path()));
    for kind in ["oci-archive", "docker-archive"] {
        let path = folder.path().join(kind);
        skopeo(&["copy", &from, &format!("{kind}:{}:app:v1", text(&path))]);
        assert_eq!(read_layers(image::open_archive(&path).unwrap()).await, tars, "{kind}");
        let packed = folder.path().join("packed.gz");
        std::fs::write(&packed, gzip(&std::fs::read(&path).unwrap())).unwrap();
        assert_eq!(read_layers(image::open_archive(&packed).unwrap()).await, tars, "{kind}, gzip");
    }
    // And back: what skopeo copies into a layout of ours, we read.
    let from = format!("oci-archive:{}", text(&folder.path().join("oci-archive")));
    skopeo(&["copy", &from, &format!("oci:{}:again:v2", text(layout.path()))]);
    let source = image::from_registry(Arc::new(layout), "again", "v2").await.unwrap();
    assert_eq!(read_layers(source).await, tars);
}

#[tokio::test]
async fn an_image_for_another_processor_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    put_image(&layout, "arm64", "tar").await;
    let error = image::from_registry(Arc::new(layout), "app", "v1").await.unwrap_err();
    assert!(error.to_string().contains("app:v1") && error.to_string().contains("arm64"), "{error}");
}

#[tokio::test]
async fn a_changed_layer_is_found_out_at_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    put_image(&layout, "amd64", "tar+zstd").await;
    let mut source = image::from_registry(Arc::new(layout), "app", "v1").await.unwrap();
    source.layers[1].diff_id = digest::of(b"else");
    source.max_layer = 5_000;
    let [first, second] = tokio::task::spawn_blocking(move || {
        let cap = source.open_layer(1).unwrap().finish().unwrap_err().to_string();
        source.max_layer = 1 << 30;
        [cap, source.open_layer(1).unwrap().finish().unwrap_err().to_string()]
    })
    .await
    .unwrap();
    assert!(first.contains("more than 5000 bytes"), "{first}");
    assert!(second.contains("unpacks to"), "{second}");
}

#[tokio::test]
async fn skopeo_inspects_and_copies_a_hibernation_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path().join("registry")).unwrap();
    let memory = folder.path().join("memory-ranges");
    std::fs::write(&memory, (0..9_000_000_u32).map(|at| (at >> 10) as u8).collect::<Vec<u8>>()).unwrap();
    let files = [SourceFile { name: "memory-ranges".to_owned(), path: memory.clone(), mode: 0o600 }];
    let envelope = Envelope { id: "s1".to_owned(), hypervisor: "qemu".to_owned(), ..Envelope::default() };
    let vm = "vk-prod-demo-0-71ea62";
    let pushed = push(&layout, vm, "hibernate", &envelope, &files, &PushOptions::default()).await.unwrap();

    let name = format!("oci:{}:{vm}:hibernate", text(layout.path()));
    let raw = skopeo(&["inspect", "--raw", &name]);
    assert_eq!(digest::of(&raw), pushed.digest);
    let copy = OciLayout::open(folder.path().join("copy")).unwrap();
    skopeo(&["copy", &name, &format!("oci:{}:{vm}:hibernate", text(copy.path()))]);
    let target = folder.path().join("target");
    std::fs::create_dir(&target).unwrap();
    let (facts, read) = pull(&copy, vm, "hibernate", &target).await.unwrap();
    assert_eq!((facts.digest, read.id.as_str()), (pushed.digest, "s1"));
    assert_eq!(std::fs::read(target.join("memory-ranges")).unwrap(), std::fs::read(&memory).unwrap());
}
