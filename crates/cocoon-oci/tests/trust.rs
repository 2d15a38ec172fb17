//! The layout trusts content, not names and lengths; and what a collector may take while pushes go on.

#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test that cannot go on must stop"
)]

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use cocoon_oci::{
    digest,
    layout::{GRACE, OciLayout},
    manifest::{Descriptor, Document, OCI_MANIFEST},
    media,
    registry::Registry as _,
    snapshot::{Envelope, PushOptions, Pushed, SourceFile, pull, push},
};
use tokio::io::AsyncReadExt as _;

fn stored(layout: &OciLayout, digest: &str) -> PathBuf {
    layout.path().join("blobs/sha256").join(digest::hex_of(digest).unwrap())
}

/// Zeros of the same length in the same file, as a crashed machine leaves them.
fn zero(path: &Path) {
    let length = path.metadata().unwrap().len();
    let file = File::create(path).unwrap();
    file.set_len(length).unwrap();
}

fn set_age(path: &Path, age: Duration) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - age).unwrap();
}

async fn blob(layout: &OciLayout, bytes: &[u8]) -> String {
    let digest = digest::of(bytes);
    layout.put_bytes("vm", &digest, Bytes::copy_from_slice(bytes)).await.unwrap();
    digest
}

async fn read(layout: &OciLayout, digest: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    layout.get_blob("vm", digest).await.unwrap().unwrap().read_to_end(&mut bytes).await.unwrap();
    bytes
}

async fn hibernate(layout: &OciLayout, content: &[u8]) -> Pushed {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory-ranges");
    std::fs::write(&path, content).unwrap();
    let files = [SourceFile { name: "memory-ranges".to_owned(), path, mode: 0o600 }];
    let options = PushOptions { chunk_size: 1 << 20, memory_budget: 16 << 20, ..PushOptions::default() };
    let envelope = Envelope { id: "s".to_owned(), hypervisor: "qemu".to_owned(), ..Envelope::default() };
    push(layout, "vm", "hibernate", &envelope, &files, &options).await.unwrap()
}

async fn woken(layout: &OciLayout) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    pull(layout, "vm", "hibernate", folder.path()).await.unwrap();
    std::fs::read(folder.path().join("memory-ranges")).unwrap()
}

async fn layers(layout: &OciLayout) -> Vec<Descriptor> {
    let manifest = layout.get_manifest("vm", "hibernate").await.unwrap().unwrap();
    Document::parse(&manifest.bytes).unwrap().layers
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state as u8)
    };
    std::iter::from_fn(next).take(length).collect()
}

#[tokio::test]
async fn a_push_replaces_blobs_that_have_their_length_but_not_their_content() {
    let folder = tempfile::tempdir().unwrap();
    let content = noise(3 << 20);
    let layout = OciLayout::open(folder.path()).unwrap();
    let first = hibernate(&layout, &content).await;
    // Once in the process that wrote them, and once in one that never saw them.
    for layout in [layout, OciLayout::open(folder.path()).unwrap()] {
        let damaged = layers(&layout).await;
        for layer in &damaged {
            zero(&stored(&layout, &layer.digest));
        }
        let again = hibernate(&layout, &content).await;
        let sizes: i64 = damaged.iter().map(|layer| layer.size).sum();
        assert!(again.sent >= sizes.cast_unsigned(), "{again:?}");
        // Not equal: the moment in the config has as many digits as it needs.
        assert!(again.total.abs_diff(first.total) <= 10, "{} and {}", again.total, first.total);
        assert!(woken(&layout).await == content);
    }
}

#[tokio::test]
async fn what_this_process_wrote_or_read_through_is_not_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let content = noise(3 << 20);
    let writer = OciLayout::open(folder.path()).unwrap();
    let first = hibernate(&writer, &content).await;
    for _ in 0..3 {
        assert!(hibernate(&writer, &content).await.sent < 4096);
    }
    assert_eq!(writer.bytes_verified(), 0, "it wrote them");

    let reader = OciLayout::open(folder.path()).unwrap();
    woken(&reader).await;
    assert!(hibernate(&reader, &content).await.sent < 4096);
    assert_eq!(reader.bytes_verified(), 0, "it pulled them");

    let stranger = OciLayout::open(folder.path()).unwrap();
    hibernate(&stranger, &content).await;
    let once = stranger.bytes_verified();
    assert!(once > 0 && once <= first.total, "{once} of {}", first.total);
    hibernate(&stranger, &content).await;
    assert_eq!(stranger.bytes_verified(), once, "each is read once");
}

#[tokio::test]
async fn a_blob_that_streams_through_to_its_end_is_known_and_one_that_is_left_early_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let digest = blob(&OciLayout::open(folder.path()).unwrap(), &noise(9 << 20)).await;
    let layout = OciLayout::open(folder.path()).unwrap();
    let mut body = layout.get_blob("vm", &digest).await.unwrap().unwrap();
    body.read_exact(&mut [0; 10]).await.unwrap();
    drop(body);
    assert!(layout.has_blob("vm", &digest).await.unwrap());
    assert_eq!(layout.bytes_verified(), 9 << 20);
    let layout = OciLayout::open(folder.path()).unwrap();
    read(&layout, &digest).await;
    assert!(layout.has_blob("vm", &digest).await.unwrap());
    assert_eq!(layout.bytes_verified(), 0);
}

#[tokio::test]
async fn a_manifest_over_a_blob_without_its_content_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let descriptor = |media_type: &str, digest: String, size| Descriptor {
        media_type: media_type.to_owned(),
        digest,
        size,
        ..Descriptor::default()
    };
    let document = Document {
        media_type: OCI_MANIFEST.to_owned(),
        config: descriptor(media::EMPTY_CONFIG, blob(&layout, b"{}").await, 2),
        layers: vec![descriptor("application/octet-stream", blob(&layout, b"layer").await, 5)],
        ..Document::default()
    };
    zero(&stored(&layout, &document.layers[0].digest));
    for layout in [&layout, &OciLayout::open(folder.path()).unwrap()] {
        let put = layout.put_manifest("vm", "hibernate", OCI_MANIFEST, document.to_bytes().into()).await;
        let error = put.unwrap_err();
        let why = std::error::Error::source(&error).unwrap().to_string();
        assert!(
            error.to_string().contains("push again") && why.contains(&document.layers[0].digest),
            "{why}"
        );
        assert_eq!(layout.get_manifest("vm", "hibernate").await.unwrap(), None);
    }
}

#[tokio::test]
async fn what_a_push_stored_or_found_stays_as_long_as_the_push_lives() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    // Handles of their own, as processes have.
    let collector = OciLayout::open(folder.path()).unwrap();
    let [older, found] = [blob(&layout, b"older").await, blob(&layout, b"found").await];
    for digest in [&older, &found] {
        set_age(&stored(&layout, digest), Duration::from_secs(7200));
    }
    let push = layout.begin_push().await.unwrap();
    let written = blob(&layout, b"written").await;
    assert!(layout.has_blob_of("vm", &found, 5).await.unwrap());
    // No grace at all, as if the push lasted longer than any.
    let collected = collector.collect(Duration::ZERO).await.unwrap();
    assert_eq!((collected.blobs, collected.temporaries), (1, 0), "{collected:?}");
    assert!(!layout.has_blob("vm", &older).await.unwrap());
    // The kernel's clock for new files is up to a tick behind.
    tokio::time::sleep(Duration::from_millis(30)).await;
    let second = collector.begin_push().await.unwrap();
    drop(push);
    assert_eq!(
        collector.collect(Duration::ZERO).await.unwrap().blobs,
        2,
        "a later push keeps nothing earlier"
    );
    assert!(!layout.has_blob("vm", &written).await.unwrap());
    drop(second);
    assert_eq!(std::fs::read_dir(folder.path().join(".tmp")).unwrap().count(), 0);
}

#[tokio::test]
async fn grace_counts_from_the_last_use() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let [used, unused] = [blob(&layout, b"used").await, blob(&layout, b"unused").await];
    assert_eq!(layout.collect(GRACE).await.unwrap().blobs, 0);
    for digest in [&used, &unused] {
        set_age(&stored(&layout, digest), GRACE + Duration::from_secs(1));
    }
    assert!(layout.has_blob_of("vm", &used, 4).await.unwrap());
    assert_eq!(layout.collect(GRACE).await.unwrap().blobs, 1);
    assert!(layout.has_blob("vm", &used).await.unwrap());
}

#[tokio::test]
async fn a_manifest_that_cannot_be_read_is_named_and_keeps_every_blob_until_its_tag_goes() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    hibernate(&layout, &noise(1 << 20)).await;
    let manifest = layout.get_manifest("vm", "hibernate").await.unwrap().unwrap();
    zero(&stored(&layout, &manifest.digest));
    let before = std::fs::read_dir(folder.path().join("blobs/sha256")).unwrap().count();
    let left = folder.path().join(".tmp/push-1-2-3");
    std::fs::write(&left, "").unwrap();
    let error = layout.collect(Duration::ZERO).await.unwrap_err().to_string();
    assert!(error.contains("vm:hibernate") && error.contains("index.json"), "{error}");
    assert!(!left.exists(), "what no manifest can need goes all the same");
    assert_eq!(std::fs::read_dir(folder.path().join("blobs/sha256")).unwrap().count(), before);
    layout.delete_manifest("vm", "hibernate").await.unwrap();
    assert_eq!(layout.collect(Duration::ZERO).await.unwrap().blobs, before as u64);
}

/// What one verification costs: `cargo test -p cocoon-oci --test trust -- --ignored --nocapture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn cost_of_a_verification() {
    let folder = tempfile::tempdir().unwrap();
    let writer = OciLayout::open(folder.path()).unwrap();
    let mut digests = Vec::new();
    for number in 0..64_u8 {
        let mut bytes = noise(4 << 20);
        bytes[0] = number;
        digests.push(blob(&writer, &bytes).await);
    }
    let layout = OciLayout::open(folder.path()).unwrap();
    for round in ["hashed", "known"] {
        let start = std::time::Instant::now();
        for digest in &digests {
            assert!(layout.has_blob_of("vm", digest, 4 << 20).await.unwrap());
        }
        let took = start.elapsed();
        println!("{round}: {:?} per MiB, {:?} per 4 MiB blob", took / 256, took / 64);
    }
    assert_eq!(layout.bytes_verified(), 256 << 20);
}
