//! The layout folder: names, damage, crashes, full disks, collection beside pushes.

#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test that cannot go on must stop"
)]

use std::{path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use cocoon_oci::{
    digest,
    layout::OciLayout,
    manifest::{Descriptor, Document, OCI_MANIFEST},
    media,
    memory::Memory,
    registry::{Registry, RegistryError},
};
use tokio::io::AsyncReadExt as _;

async fn blob(registry: &dyn Registry, bytes: &[u8]) -> Descriptor {
    let digest = digest::of(bytes);
    registry.put_bytes("vm", &digest, Bytes::copy_from_slice(bytes)).await.unwrap();
    let media_type = "application/octet-stream".to_owned();
    Descriptor { media_type, digest, size: bytes.len() as i64, ..Descriptor::default() }
}

async fn manifest(registry: &dyn Registry, layers: &[&[u8]]) -> Document {
    let mut document = Document { media_type: OCI_MANIFEST.to_owned(), ..Document::default() };
    document.config =
        Descriptor { media_type: media::EMPTY_CONFIG.to_owned(), ..blob(registry, b"{}").await };
    for layer in layers {
        document.layers.push(blob(registry, layer).await);
    }
    document
}

async fn put(
    layout: &OciLayout,
    repository: &str,
    tag: &str,
    document: &Document,
) -> Result<String, RegistryError> {
    layout.put_manifest(repository, tag, OCI_MANIFEST, document.to_bytes().into()).await
}

async fn body(layout: &OciLayout, digest: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    layout.get_blob("vm", digest).await.unwrap()?.read_to_end(&mut bytes).await.unwrap();
    Some(bytes)
}

fn files_below(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[tokio::test]
async fn names_point_and_are_forgotten_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let document = manifest(&layout, &[b"layer"]).await;
    let digest = put(&layout, "vm", "latest", &document).await.unwrap();
    put(&layout, "vm", "hibernate", &document).await.unwrap();
    put(&layout, "other", "latest", &document).await.unwrap();
    for reference in ["latest", "hibernate", &digest] {
        let found = layout.get_manifest("vm", reference).await.unwrap().unwrap();
        assert_eq!((found.digest.as_str(), &found.bytes[..]), (digest.as_str(), &document.to_bytes()[..]));
        assert_eq!(found.media_type, OCI_MANIFEST);
    }
    layout.delete_manifest("vm", "hibernate").await.unwrap();
    layout.delete_manifest("vm", "hibernate").await.unwrap();
    assert_eq!(layout.get_manifest("vm", "hibernate").await.unwrap(), None);
    assert!(layout.get_manifest("vm", "latest").await.unwrap().is_some());
    // UP-44: by digest, every tag of the repository goes, and only of that one.
    put(&layout, "vm", "hibernate", &document).await.unwrap();
    layout.delete_manifest("vm", &digest).await.unwrap();
    for reference in ["latest", "hibernate", &digest] {
        assert_eq!(layout.get_manifest("vm", reference).await.unwrap(), None, "{reference}");
    }
    assert_eq!(layout.tags().await.unwrap(), [("other".to_owned(), "latest".to_owned())]);
    layout.collect(Duration::ZERO).await.unwrap();
    put(&layout, "vm", "hibernate", &document).await.unwrap();
}

#[tokio::test]
async fn collection_takes_what_nothing_needs_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let shared = manifest(&layout, &[b"shared", b"kept"]).await;
    put(&layout, "vm", "latest", &shared).await.unwrap();
    let gone = manifest(&layout, &[b"shared", b"dropped"]).await;
    put(&layout, "vm", "hibernate", &gone).await.unwrap();
    layout.delete_manifest("vm", "hibernate").await.unwrap();
    let stray = blob(&layout, b"stray").await;
    std::fs::write(folder.path().join(".tmp/123-4-5"), "left over").unwrap();

    let within_grace = layout.collect(Duration::from_secs(3600)).await.unwrap();
    assert_eq!((within_grace.blobs, within_grace.temporaries), (0, 1));
    assert!(layout.has_blob("vm", &stray.digest).await.unwrap());
    let collected = layout.collect(Duration::ZERO).await.unwrap();
    assert_eq!(collected.blobs, 3, "the layer, the manifest and the stray");
    for layer in &shared.layers {
        assert!(body(&layout, &layer.digest).await.is_some());
    }
    assert!(!layout.has_blob("vm", &gone.layers[1].digest).await.unwrap());
}

#[tokio::test]
async fn a_manifest_whose_blobs_were_collected_is_refused_and_the_tag_stays() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let first = manifest(&layout, &[b"one"]).await;
    let digest = put(&layout, "vm", "hibernate", &first).await.unwrap();
    let second = manifest(&layout, &[b"two"]).await;
    layout.collect(Duration::ZERO).await.unwrap();
    let error = put(&layout, "vm", "hibernate", &second).await.unwrap_err();
    assert!(error.to_string().contains("push again"), "{error}");
    assert_eq!(layout.get_manifest("vm", "hibernate").await.unwrap().unwrap().digest, digest);
}

#[tokio::test]
async fn damage_is_an_error_and_never_an_absence() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let document = manifest(&layout, &[b"layer"]).await;
    let digest = put(&layout, "vm", "hibernate", &document).await.unwrap();
    let index = folder.path().join("index.json");
    let good = std::fs::read(&index).unwrap();
    for bad in [&b""[..], b"{", b"[]", b"{\"schemaVersion\":2}", b"{\"schemaVersion\":2,\"manifests\":[{}]}"]
    {
        std::fs::write(&index, bad).unwrap();
        assert!(matches!(layout.get_manifest("vm", "x").await, Err(RegistryError::Unavailable { .. })));
        assert!(layout.delete_manifest("vm", "x").await.is_err());
        assert!(put(&layout, "vm", "x", &document).await.is_err());
        assert!(layout.collect(Duration::ZERO).await.is_err());
        assert!(OciLayout::open(folder.path()).is_err());
    }
    std::fs::remove_file(&index).unwrap();
    assert!(layout.get_manifest("vm", "x").await.is_err());
    assert!(OciLayout::open(folder.path()).is_err());
    std::fs::write(&index, good).unwrap();
    let stored = |digest: &str| folder.path().join("blobs/sha256").join(digest::hex_of(digest).unwrap());
    std::fs::write(stored(&digest), "x").unwrap();
    assert!(matches!(layout.get_manifest("vm", "hibernate").await, Err(RegistryError::Corrupt { .. })));
    std::fs::remove_file(stored(&digest)).unwrap();
    assert!(matches!(layout.get_manifest("vm", "hibernate").await, Err(RegistryError::Corrupt { .. })));
    std::fs::write(stored(&document.layers[0].digest), "other").unwrap();
    assert!(layout.get_blob("vm", &document.layers[0].digest).await.is_err());
    std::fs::remove_dir_all(folder.path()).unwrap();
    assert!(
        layout.has_blob("vm", &document.layers[0].digest).await.is_err(),
        "an unmounted folder is no absence"
    );
}

#[tokio::test]
async fn wrong_content_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let digest = digest::of(b"right");
    for (size, bytes) in [(5, &b"wrong"[..]), (5, b"righ"), (5, b"right+"), (4, b"righ")] {
        let put = layout.put_blob("vm", &digest, size, Box::pin(bytes)).await;
        assert!(matches!(put, Err(RegistryError::Corrupt { .. })), "{put:?}");
    }
    assert_eq!(files_below(&folder.path().join("blobs/sha256")), 0);
    assert_eq!(files_below(&folder.path().join(".tmp")), 0);
    for bad in ["", "../x", "A", "a//b"] {
        assert!(matches!(layout.has_blob(bad, &digest).await, Err(RegistryError::InvalidName(_))), "{bad}");
    }
    assert!(matches!(layout.has_blob("vm", "sha256:../../x").await, Err(RegistryError::InvalidName(_))));
    assert!(matches!(layout.get_manifest("vm", "../x").await, Err(RegistryError::InvalidName(_))));
}

#[tokio::test]
async fn a_truncated_blob_of_a_crashed_machine_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let stored = blob(&layout, b"content").await;
    std::fs::write(folder.path().join("blobs/sha256").join(digest::hex_of(&stored.digest).unwrap()), "")
        .unwrap();
    blob(&layout, b"content").await;
    assert_eq!(body(&layout, &stored.digest).await.unwrap(), b"content");
}

#[tokio::test]
async fn a_large_blob_streams_and_is_verified_at_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let bytes: Vec<u8> = (0..9_000_000_u32).map(|at| (at / 7) as u8).collect();
    let digest = digest::of(&bytes);
    layout
        .put_blob("vm", &digest, bytes.len() as u64, Box::pin(std::io::Cursor::new(bytes.clone())))
        .await
        .unwrap();
    assert!(body(&layout, &digest).await.unwrap() == bytes);
    let mut damaged = bytes;
    damaged[8_900_000] ^= 1;
    std::fs::write(folder.path().join("blobs/sha256").join(digest::hex_of(&digest).unwrap()), damaged)
        .unwrap();
    let mut read = Vec::new();
    let error =
        layout.get_blob("vm", &digest).await.unwrap().unwrap().read_to_end(&mut read).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_pushers_and_a_collector_at_once_lose_no_tag() {
    let folder = tempfile::tempdir().unwrap();
    let tasks = (0..8).map(|number: u8| {
        // A handle each, as processes have.
        let layout = Arc::new(OciLayout::open(folder.path()).unwrap());
        tokio::spawn(async move {
            for round in 0..6_u8 {
                let document = manifest(layout.as_ref(), &[&[number, round], b"common"]).await;
                put(&layout, &format!("vm{number}"), &format!("t{round}"), &document).await.unwrap();
                layout.collect(Duration::from_secs(60)).await.unwrap();
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let layout = OciLayout::open(folder.path()).unwrap();
    assert_eq!(layout.tags().await.unwrap().len(), 48);
    for (repository, tag) in layout.tags().await.unwrap() {
        let found = layout.get_manifest(&repository, &tag).await.unwrap().unwrap();
        for layer in Document::parse(&found.bytes).unwrap().layers {
            assert!(body(&layout, &layer.digest).await.is_some());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_reads_manifests_holds_up_no_pusher_and_takes_nothing_of_its_push() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Arc::new(OciLayout::open(folder.path()).unwrap());
    let old = manifest(layout.as_ref(), &[b"old"]).await;
    let digest = put(&layout, "vm", "latest", &old).await.unwrap();
    let stray = blob(layout.as_ref(), b"stray").await;
    // A manifest that takes as long to read as the test likes.
    let slow = folder.path().join("blobs/sha256").join(digest::hex_of(&digest).unwrap());
    std::fs::remove_file(&slow).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &slow, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let collecting = tokio::spawn({
        let layout = Arc::clone(&layout);
        async move { layout.collect(Duration::ZERO).await }
    });
    // Opening waits for the reader.
    let mut pipe = tokio::task::spawn_blocking({
        let slow = slow.clone();
        move || std::fs::File::options().write(true).open(slow).unwrap()
    })
    .await
    .unwrap();
    let new = manifest(layout.as_ref(), &[b"new"]).await;
    let pushing = put(&layout, "vm", "hibernate", &new);
    tokio::time::timeout(Duration::from_secs(120), pushing)
        .await
        .expect("the collector holds the lock")
        .unwrap();
    std::io::Write::write_all(&mut pipe, &old.to_bytes()).unwrap();
    drop(pipe);
    let collected = collecting.await.unwrap().unwrap();
    assert_eq!(collected.blobs, 1);
    assert!(!layout.has_blob("vm", &stray.digest).await.unwrap());
    for layer in new.layers.iter().chain(&old.layers) {
        assert!(body(&layout, &layer.digest).await.is_some());
    }
    assert!(layout.get_manifest("vm", "hibernate").await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_who_replace_or_drop_the_same_manifest_one_wins() {
    let folder = tempfile::tempdir().unwrap();
    one_wins(Arc::new(OciLayout::open(folder.path()).unwrap())).await;
    one_wins(Arc::new(Memory::new())).await;
}

async fn one_wins(registry: Arc<dyn Registry>) {
    let mut expected = None;
    for round in 0..5_u8 {
        let tries = (0..6_u8).map(|number| {
            let (registry, expected) = (Arc::clone(&registry), expected.clone());
            tokio::spawn(async move {
                let bytes = manifest(registry.as_ref(), &[&[round, number]]).await.to_bytes().into();
                registry.put_tag_if("vm", "t", expected.as_deref(), OCI_MANIFEST, bytes).await.unwrap()
            })
        });
        let mut won = Vec::new();
        for one in tries.collect::<Vec<_>>() {
            won.extend(one.await.unwrap());
        }
        assert_eq!(won.len(), 1, "{won:?}");
        assert_eq!(registry.get_manifest("vm", "t").await.unwrap().unwrap().digest, won[0]);
        expected = won.pop();
    }
    let late: Bytes = manifest(registry.as_ref(), &[b"late"]).await.to_bytes().into();
    let put = registry.put_tag_if("vm", "t", None, OCI_MANIFEST, late.clone()).await;
    assert_eq!(put.unwrap(), None, "a tag that is there is not absent");
    let there = expected.unwrap();
    let by_digest = registry.put_tag_if("vm", &there, Some(&there), OCI_MANIFEST, late).await;
    assert!(matches!(by_digest, Err(RegistryError::InvalidName(_))), "only tags move");
    let other = digest::of(b"another manifest");
    assert!(!registry.delete_tag_if("vm", "t", &other).await.unwrap(), "it points elsewhere");
    let drops = (0..6).map(|_| {
        let (registry, there) = (Arc::clone(&registry), there.clone());
        tokio::spawn(async move { registry.delete_tag_if("vm", "t", &there).await.unwrap() })
    });
    let mut dropped = 0;
    for one in drops.collect::<Vec<_>>() {
        dropped += u32::from(one.await.unwrap());
    }
    assert_eq!((dropped, registry.get_manifest("vm", "t").await.unwrap()), (1, None));
}

/// Needs root, as the whole test run does: a small tmpfs is the only honest full disk.
#[tokio::test]
async fn a_full_disk_says_so_and_leaves_the_tag_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let mount = |arguments: &[&str]| {
        let run = std::process::Command::new(arguments[0]).args(&arguments[1..]).status().unwrap();
        assert!(run.success(), "{arguments:?} (run the tests as root)");
    };
    let path = folder.path().to_str().unwrap();
    mount(&["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path]);
    let outcome = tokio::spawn({
        let path = path.to_owned();
        async move {
            let layout = OciLayout::open(&path).unwrap();
            let document = manifest(&layout, &[b"small"]).await;
            let digest = put(&layout, "vm", "hibernate", &document).await.unwrap();
            let big: Vec<u8> = (0..4 << 20).map(|at: u32| (at >> 3) as u8).collect();
            let error = layout.put_bytes("vm", &digest::of(&big), big.into()).await.unwrap_err();
            assert!(error.to_string().contains("disk is full"), "{error}");
            assert_eq!(layout.get_manifest("vm", "hibernate").await.unwrap().unwrap().digest, digest);
            assert_eq!(files_below(&Path::new(&path).join(".tmp")), 0);
        }
    });
    let outcome = outcome.await;
    mount(&["umount", path]);
    outcome.unwrap();
}
