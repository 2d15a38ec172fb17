//! Snapshots as folders: what goes in comes out, tags move only when they may, doubt does nothing.

#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test that cannot go on must stop"
)]

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Seek as _, SeekFrom, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
};

use cocoon_oci::{
    digest,
    layout::OciLayout,
    manifest::{Document, OCI_MANIFEST},
    memory::Memory,
    registry::{Registry, RegistryError},
    snapshot::{
        Envelope, Facts, PullError, PullOptions, PushError, PushOptions, SourceFile, TagGuard, consume, pull,
        pull_with, push, push_blobs, read,
    },
};
use proptest::prelude::*;

const VM: &str = "vk-prod-demo-0-71ea62";

fn envelope(id: &str) -> Envelope {
    Envelope {
        id: id.to_owned(),
        hypervisor: "qemu".to_owned(),
        memory: 1 << 30,
        cpu: 2,
        ..Envelope::default()
    }
}

/// Writes (offset, length) runs of noise into a file of `logical` bytes.
fn sparse_file(path: &Path, logical: u64, runs: &[(u64, usize)]) {
    let mut file = File::create(path).unwrap();
    file.set_len(logical).unwrap();
    for (offset, length) in runs {
        let noise = (0..*length).map(|at| ((at * 2_654_435_761) >> 9) as u8 | 1).collect::<Vec<u8>>();
        file.seek(SeekFrom::Start(*offset)).unwrap();
        file.write_all(&noise).unwrap();
    }
    file.sync_all().unwrap();
}

fn source(folder: &Path, name: &str) -> SourceFile {
    SourceFile { name: name.to_owned(), path: folder.join(name), mode: 0o600 }
}

fn small() -> PushOptions {
    PushOptions { chunk_size: 1 << 20, memory_budget: 16 << 20, ..PushOptions::default() }
}

async fn pushed(
    registry: &dyn Registry,
    tag: &str,
    id: &str,
    options: &PushOptions,
) -> Result<String, PushError> {
    let folder = tempfile::tempdir().unwrap();
    sparse_file(&folder.path().join("memory-ranges"), 8 << 20, &[(0, 100_000), (4 << 20, 50_000)]);
    let files = [source(folder.path(), "memory-ranges")];
    push(registry, VM, tag, &envelope(id), &files, options).await.map(|pushed| pushed.digest)
}

#[tokio::test]
async fn a_folder_comes_back_with_its_bytes_modes_and_holes() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    std::fs::create_dir(&from).unwrap();
    std::fs::create_dir(&to).unwrap();
    sparse_file(&from.join("memory-ranges"), 64 << 20, &[(1 << 20, 3 << 20), (40 << 20, 5000)]);
    sparse_file(&from.join("cow.qcow2"), 200_000, &[(0, 200_000)]);
    sparse_file(&from.join("hole.raw"), 5 << 20, &[]);
    sparse_file(&from.join("empty"), 0, &[]);
    let names = ["memory-ranges", "cow.qcow2", "hole.raw", "empty"];
    let files: Vec<SourceFile> = names.iter().map(|name| source(&from, name)).collect();
    let layout = OciLayout::open(folder.path().join("registry")).unwrap();
    let given = Envelope { name: VM.to_owned(), ..envelope("s1") };
    let first = push(&layout, VM, "hibernate", &given, &files, &small()).await.unwrap();
    let (facts, back) = pull(&layout, VM, "hibernate", &to).await.unwrap();
    assert_eq!((back, facts.snapshot_id.as_str(), facts.hypervisor.as_str()), (given.clone(), "s1", "qemu"));
    for name in names {
        let (a, b) = (from.join(name), to.join(name));
        assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap(), "{name}");
        let (a, b) = (a.metadata().unwrap(), b.metadata().unwrap());
        assert_eq!(b.permissions().mode() & 0o777, 0o600);
        assert!(b.blocks() <= a.blocks() + 16, "{name}: {} blocks became {}", a.blocks(), b.blocks());
    }
    let again = push(&layout, VM, "hibernate", &given, &files, &small()).await.unwrap();
    // Not equal: the moment in the config has as many digits as it needs.
    assert!(again.total.abs_diff(first.total) <= 10, "{} and {}", again.total, first.total);
    assert!(again.sent < 4096, "a second push sends no file again, but sent {}", again.sent);
}

#[tokio::test]
async fn a_big_file_in_one_piece_travels_without_being_held_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    sparse_file(&folder.path().join("mem"), 30 << 20, &[(0, 9 << 20), (29 << 20, 4096)]);
    let registry = OciLayout::open(folder.path().join("registry")).unwrap();
    for zstd_level in [0, 3] {
        let to = tempfile::tempdir().unwrap();
        let options = PushOptions { zstd_level, chunk_size: 0, ..PushOptions::default() };
        let files = [source(folder.path(), "mem")];
        push(&registry, VM, "latest", &envelope("s"), &files, &options).await.unwrap();
        let document = registry.get_manifest(VM, "latest").await.unwrap().unwrap();
        let document = Document::parse(&document.bytes).unwrap();
        assert_eq!(document.layers.len(), 1);
        assert!(document.artifact_type.contains(if zstd_level == 0 { "v1" } else { "v2" }));
        pull(&registry, VM, "latest", to.path()).await.unwrap();
        assert_eq!(
            std::fs::read(folder.path().join("mem")).unwrap(),
            std::fs::read(to.path().join("mem")).unwrap()
        );
    }
}

#[tokio::test]
async fn blobs_that_went_ahead_name_nothing_and_are_not_sent_again() {
    let registry = Memory::new();
    let folder = tempfile::tempdir().unwrap();
    sparse_file(&folder.path().join("memory-ranges"), 8 << 20, &[(0, 3 << 20), (6 << 20, 70_000)]);
    sparse_file(&folder.path().join("cow.qcow2"), 900_000, &[(0, 900_000)]);
    let files = [source(folder.path(), "memory-ranges"), source(folder.path(), "cow.qcow2")];
    let sent = push_blobs(&registry, VM, &files, &small()).await.unwrap();
    assert!(sent > 100_000, "{sent}");
    assert_eq!(registry.get_manifest(VM, "hibernate").await.unwrap(), None, "no tag moved");
    let after = push(&registry, VM, "hibernate", &envelope("S1"), &files, &small()).await.unwrap();
    assert!(after.sent < 4096, "only the config: {} of {}", after.sent, after.total);
    let again = push_blobs(&registry, VM, &files, &small()).await.unwrap();
    assert_eq!(again, 0);
}

#[tokio::test]
async fn a_page_in_a_hole_costs_its_own_piece_and_moves_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let registry = OciLayout::open(folder.path().join("registry")).unwrap();
    let options = small();
    let (length, bulk) = (64 << 20, (40_u64 << 20, 5 << 20));
    let files = [source(folder.path(), "memory-ranges")];
    let mut sizes = Vec::new();
    for touched in [&[][..], &[(3_u64 << 20, 4096_usize)], &[(3 << 20, 4096), (20 << 20, 4096)]] {
        let runs: Vec<_> = touched.iter().copied().chain([(1 << 20, 70_000), bulk]).collect();
        sparse_file(&folder.path().join("memory-ranges"), length, &runs);
        let tag = format!("t{}", touched.len());
        let sent = push(&registry, VM, &tag, &envelope(&tag), &files, &options).await.unwrap().sent;
        sizes.push(sent);
        let to = tempfile::tempdir().unwrap();
        pull(&registry, VM, &tag, to.path()).await.unwrap();
        let (a, b) = (folder.path().join("memory-ranges"), to.path().join("memory-ranges"));
        assert_eq!(std::fs::read(&a).unwrap(), std::fs::read(&b).unwrap());
        let (a, b) = (a.metadata().unwrap(), b.metadata().unwrap());
        assert!(b.blocks() <= a.blocks() + 16, "holes come back as holes: {} and {}", a.blocks(), b.blocks());
    }
    let [all, one, another] = sizes.as_slice() else { panic!("{sizes:?}") };
    assert!(*all > 20_000 && one * 8 < *all && another * 8 < *all, "one piece and the config: {sizes:?}");
}

#[tokio::test]
async fn a_tag_is_overwritten_only_when_the_guard_allows_what_is_there() {
    let registry = Memory::new();
    let guarded = |allowed: &[&String]| PushOptions {
        tag_guard: TagGuard::AbsentOr(allowed.iter().map(|digest| (*digest).clone()).collect()),
        ..small()
    };
    let first = pushed(&registry, "hibernate", "one", &guarded(&[])).await.unwrap();
    let refused = pushed(&registry, "hibernate", "two", &guarded(&[])).await.unwrap_err();
    assert!(matches!(refused, PushError::TagMoved { found, .. } if found == first));
    assert_eq!(read(&registry, VM, "hibernate").await.unwrap().unwrap().snapshot_id, "one");
    let second = pushed(&registry, "hibernate", "two", &guarded(&[&first])).await.unwrap();
    assert_ne!(first, second);
    // The same content again replaces nothing.
    let created = jiff::Timestamp::UNIX_EPOCH;
    let fixed = PushOptions { created, ..guarded(&[&second]) };
    let third = pushed(&registry, "hibernate", "three", &fixed).await.unwrap();
    let repeat = PushOptions { created, tag_guard: TagGuard::AbsentOr(vec![third.clone()]), ..small() };
    assert_eq!(pushed(&registry, "hibernate", "three", &repeat).await.unwrap(), third);
}

#[tokio::test]
async fn an_artifact_says_whose_state_it_is_if_the_pusher_does() {
    let registry = Memory::new();
    for (vm_name, stamped) in [("", None), (VM, Some(VM))] {
        let options = PushOptions { vm_name: vm_name.to_owned(), ..small() };
        pushed(&registry, "hibernate", "s", &options).await.unwrap();
        let facts = read(&registry, VM, "hibernate").await.unwrap().unwrap();
        let found = facts.annotations.get(cocoon_oci::snapshot::VM_ANNOTATION);
        assert_eq!(found.map(String::as_str), stamped);
    }
}

#[tokio::test]
async fn doubt_about_the_tag_stops_a_push_and_is_no_absence() {
    let registry = Memory::new();
    registry.fail("hibernate");
    let options = PushOptions { tag_guard: TagGuard::AbsentOr(Vec::new()), ..small() };
    assert!(matches!(pushed(&registry, "hibernate", "s", &options).await, Err(PushError::Registry { .. })));
    assert!(matches!(read(&registry, VM, "hibernate").await, Err(PullError::Registry { .. })));
    assert_eq!(read(&registry, VM, "other").await.unwrap(), None);
}

#[tokio::test]
async fn a_push_that_cannot_be_read_back_says_that_the_tag_may_have_moved() {
    let registry = Memory::new();
    registry.fail_after_put("hibernate");
    let error = pushed(&registry, "hibernate", "s", &small()).await.unwrap_err();
    let PushError::Unconfirmed { digest, .. } = &error else { panic!("{error}") };
    assert!(registry.get_manifest(VM, digest).await.unwrap().is_some(), "the next try may call it its own");
}

#[tokio::test]
async fn the_next_try_of_an_unconfirmed_push_knows_its_own_manifest() {
    let registry = Memory::new();
    let options = |second| PushOptions {
        tag_guard: TagGuard::AbsentOr(Vec::new()),
        created: jiff::Timestamp::from_second(second).unwrap(),
        ..small()
    };
    registry.fail_after_put("hibernate");
    let error = pushed(&registry, "hibernate", "s", &options(1)).await.unwrap_err();
    let PushError::Unconfirmed { digest: first, .. } = error else { panic!("{error}") };
    registry.mend("hibernate");
    let other = pushed(&registry, "hibernate", "other", &options(2)).await.unwrap_err();
    assert!(
        matches!(other, PushError::TagMoved { found, .. } if found == first),
        "another snapshot is not it"
    );
    let second = pushed(&registry, "hibernate", "s", &options(2)).await.unwrap();
    assert_ne!(first, second, "made at another time");
    // What is there cannot be told from a snapshot of ours: doubt, not "moved".
    let manifest = registry.get_manifest(VM, "hibernate").await.unwrap().unwrap();
    let config = Document::parse(&manifest.bytes).unwrap().config.digest;
    registry.fail(&config);
    let doubt = pushed(&registry, "hibernate", "s", &options(3)).await.unwrap_err();
    assert!(matches!(doubt, PushError::Registry { .. }), "{doubt}");
}

/// A registry with its own ways.
#[derive(Debug)]
struct Odd<R> {
    registry: R,
    /// It answers every delete with "unsupported", as some do.
    stubborn: bool,
    /// Somebody else writes the tag just after this look at it (0: the first).
    rival_after: Option<u32>,
    looks: std::sync::atomic::AtomicU32,
}

impl<R> Odd<R> {
    fn stubborn(registry: R) -> Self {
        Self { registry, stubborn: true, rival_after: None, looks: 0.into() }
    }
}

#[async_trait::async_trait]
impl<R: Registry> Registry for Odd<R> {
    async fn has_blob(&self, repository: &str, digest: &str) -> Result<bool, RegistryError> {
        self.registry.has_blob(repository, digest).await
    }
    async fn put_blob(
        &self,
        repository: &str,
        digest: &str,
        size: u64,
        body: cocoon_oci::registry::Body,
    ) -> Result<(), RegistryError> {
        self.registry.put_blob(repository, digest, size, body).await
    }
    async fn get_blob(
        &self,
        repository: &str,
        digest: &str,
    ) -> Result<Option<cocoon_oci::registry::Body>, RegistryError> {
        self.registry.get_blob(repository, digest).await
    }
    async fn put_manifest(
        &self,
        repository: &str,
        reference: &str,
        media_type: &str,
        bytes: bytes::Bytes,
    ) -> Result<String, RegistryError> {
        self.registry.put_manifest(repository, reference, media_type, bytes).await
    }
    async fn put_tag_if(
        &self,
        repository: &str,
        tag: &str,
        expected: Option<&str>,
        media_type: &str,
        bytes: bytes::Bytes,
    ) -> Result<Option<String>, RegistryError> {
        self.registry.put_tag_if(repository, tag, expected, media_type, bytes).await
    }
    async fn get_manifest(
        &self,
        repository: &str,
        reference: &str,
    ) -> Result<Option<cocoon_oci::registry::Manifest>, RegistryError> {
        let found = self.registry.get_manifest(repository, reference).await;
        let look = self.looks.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        if self.rival_after == Some(look) {
            let bytes = bytes::Bytes::from_static(b"{}");
            self.registry.put_manifest(repository, reference, OCI_MANIFEST, bytes).await?;
        }
        found
    }
    async fn delete_manifest(&self, repository: &str, reference: &str) -> Result<(), RegistryError> {
        if self.stubborn {
            return Err(RegistryError::DeleteRefused { reference: reference.to_owned() });
        }
        self.registry.delete_manifest(repository, reference).await
    }
    async fn delete_tag_if(&self, repository: &str, tag: &str, digest: &str) -> Result<bool, RegistryError> {
        if self.stubborn && self.registry.get_manifest(repository, tag).await?.is_some() {
            return Err(RegistryError::DeleteRefused { reference: tag.to_owned() });
        }
        self.registry.delete_tag_if(repository, tag, digest).await
    }
}

#[tokio::test]
async fn a_registry_that_compares_and_puts_in_one_step_lets_nobody_elses_write_be_lost() {
    // The look before the blobs is the first, the one before the manifest the second.
    let registry = Odd { registry: Memory::new(), stubborn: false, rival_after: Some(1), looks: 0.into() };
    let options = PushOptions { tag_guard: TagGuard::AbsentOr(Vec::new()), ..small() };
    let error = pushed(&registry, "hibernate", "s", &options).await.unwrap_err();
    assert!(matches!(&error, PushError::TagMoved { found, .. } if *found == digest::of(b"{}")), "{error}");
    let there = registry.registry.get_manifest(VM, "hibernate").await.unwrap().unwrap();
    assert_eq!(&there.bytes[..], b"{}");
}

#[tokio::test]
async fn a_blob_that_a_crash_cut_is_sent_again() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    pushed(&layout, "latest", "s", &small()).await.unwrap();
    let manifest = layout.get_manifest(VM, "latest").await.unwrap().unwrap();
    let layers = Document::parse(&manifest.bytes).unwrap().layers;
    let path = folder.path().join("blobs/sha256").join(layers[0].digest.trim_start_matches("sha256:"));
    for cut in [0, 10] {
        File::options().write(true).open(&path).unwrap().set_len(cut).unwrap();
        let again = layout.put_manifest(VM, "other", OCI_MANIFEST, manifest.bytes.clone()).await;
        let error = std::error::Error::source(&again.unwrap_err()).unwrap().to_string();
        assert!(error.contains(&layers[0].digest) && error.contains("instead of"), "{error}");
        pushed(&layout, "latest", "s", &small()).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), layers[0].size.cast_unsigned());
        let to = tempfile::tempdir().unwrap();
        pull(&layout, VM, "latest", to.path()).await.unwrap();
    }
}

#[test]
fn callers_may_spawn_a_push_and_a_pull() {
    fn sendable<T: Send>(work: T) {
        drop(work);
    }
    let registry: &dyn Registry = &Memory::new();
    let (envelope, options, folder) = (envelope("s"), small(), Path::new("/nowhere"));
    let facts = Facts {
        digest: String::new(),
        snapshot_id: String::new(),
        base_image: String::new(),
        hypervisor: String::new(),
        annotations: BTreeMap::new(),
    };
    sendable(push(registry, VM, "latest", &envelope, &[], &options));
    sendable(pull(registry, VM, "latest", folder));
    sendable(read(registry, VM, "latest"));
    sendable(consume(registry, VM, "latest", &facts));
    sendable(cocoon_oci::stream::push_stream(registry, VM, "latest", &b""[..], &options));
    sendable(cocoon_oci::cloudimg::open(registry, VM, "latest"));
}

#[tokio::test]
async fn a_consumed_tag_reads_as_absent_and_may_be_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Odd::stubborn(OciLayout::open(folder.path()).unwrap());
    pushed(&registry, "hibernate", "one", &small()).await.unwrap();
    let facts = read(&registry, VM, "hibernate").await.unwrap().unwrap();
    assert!(consume(&registry, VM, "hibernate", &facts).await.unwrap());
    assert!(!consume(&registry, VM, "hibernate", &facts).await.unwrap(), "once is enough");
    assert!(registry.get_manifest(VM, "hibernate").await.unwrap().is_some());
    assert_eq!(read(&registry, VM, "hibernate").await.unwrap(), None);
    let to = tempfile::tempdir().unwrap();
    assert!(matches!(pull(&registry, VM, "hibernate", to.path()).await, Err(PullError::NotFound(_))));
    let options = PushOptions { tag_guard: TagGuard::AbsentOr(Vec::new()), ..small() };
    pushed(&registry, "hibernate", "two", &options).await.unwrap();
}

/// Consumes what was read before the VM hibernated again, and says what the tag holds then.
async fn consumed_too_late(registry: &dyn Registry) -> Option<String> {
    pushed(registry, "hibernate", "one", &small()).await.unwrap();
    let one = read(registry, VM, "hibernate").await.unwrap().unwrap();
    pushed(registry, "hibernate", "two", &small()).await.unwrap();
    assert!(!consume(registry, VM, "hibernate", &one).await.unwrap());
    read(registry, VM, "hibernate").await.unwrap().map(|facts| facts.snapshot_id)
}

#[tokio::test]
async fn a_tag_that_was_moved_since_it_was_read_is_not_consumed() {
    let [folder, stubborn] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let layout = OciLayout::open(folder.path()).unwrap();
    let no_delete = Odd::stubborn(OciLayout::open(stubborn.path()).unwrap());
    let registries: [&dyn Registry; 3] = [&Memory::new(), &layout, &no_delete];
    for registry in registries {
        assert_eq!(consumed_too_late(registry).await.as_deref(), Some("two"), "{registry:?}");
    }
}

#[tokio::test]
async fn only_a_tag_is_deleted_by_what_it_points_to() {
    let folder = tempfile::tempdir().unwrap();
    let layout = OciLayout::open(folder.path()).unwrap();
    let digest = pushed(&layout, "hibernate", "one", &small()).await.unwrap();
    pushed(&layout, "keep", "one", &PushOptions { tag_guard: TagGuard::Any, ..small() }).await.unwrap();
    let by_digest = layout.delete_tag_if(VM, &digest, &digest).await;
    assert!(matches!(by_digest, Err(RegistryError::InvalidName(_))), "{by_digest:?}");
    assert!(layout.delete_tag_if(VM, "hibernate", &digest).await.unwrap());
    assert!(!layout.delete_tag_if(VM, "hibernate", &digest).await.unwrap());
    assert!(read(&layout, VM, "keep").await.unwrap().is_some());
}

#[tokio::test]
async fn reserved_annotations_bad_names_and_missing_files_are_refused_by_name() {
    let registry = Memory::new();
    for key in ["cocoonstack.snapshot.id", "org.opencontainers.image.created"] {
        let annotations = [(key.to_owned(), "x".to_owned())].into();
        let options = PushOptions { annotations, ..small() };
        let error = pushed(&registry, "latest", "s", &options).await.unwrap_err();
        assert!(matches!(error, PushError::ReservedAnnotation(found) if found == key));
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x"), "x").unwrap();
    for name in ["", ".", "..", "a/b", "a\\b", "snapshot.json", "nul\0"] {
        let files = [SourceFile { name: name.to_owned(), ..source(folder.path(), "x") }];
        let error = push(&registry, VM, "latest", &envelope("s"), &files, &small()).await.unwrap_err();
        assert!(matches!(error, PushError::Invalid(_)), "{name:?}: {error}");
    }
    let files = [source(folder.path(), "gone")];
    let error = push(&registry, VM, "latest", &envelope("s"), &files, &small()).await.unwrap_err();
    assert!(error.to_string().contains("gone"), "{error}");
    assert_eq!(read(&registry, VM, "latest").await.unwrap(), None);
}

#[tokio::test]
async fn a_damaged_blob_fails_the_pull_and_leaves_an_empty_folder() {
    let registry = Memory::new();
    let folder = tempfile::tempdir().unwrap();
    sparse_file(&folder.path().join("memory-ranges"), 8 << 20, &[(0, 5 << 20)]);
    std::fs::write(folder.path().join("cocoon.json"), "{}").unwrap();
    let files = [source(folder.path(), "cocoon.json"), source(folder.path(), "memory-ranges")];
    push(&registry, VM, "latest", &envelope("s"), &files, &small()).await.unwrap();
    let manifest = registry.get_manifest(VM, "latest").await.unwrap().unwrap();
    let last = Document::parse(&manifest.bytes).unwrap().layers.pop().unwrap().digest;
    let mut blob = registry.blob(VM, &last).unwrap().to_vec();
    blob[100] ^= 1;
    registry.insert_raw(VM, &last, blob);
    for concurrency in [1, 4] {
        let to = tempfile::tempdir().unwrap();
        let options = PullOptions { concurrency, memory_budget: 0 };
        let error = pull_with(&registry, VM, "latest", to.path(), &options).await.unwrap_err();
        assert!(matches!(&error, PullError::Invalid { message, .. } if message.contains(&last)), "{error}");
        assert_eq!(std::fs::read_dir(to.path()).unwrap().count(), 0);
    }
    let full = tempfile::tempdir().unwrap();
    std::fs::write(full.path().join("x"), "x").unwrap();
    let error = pull(&registry, VM, "latest", full.path()).await.unwrap_err();
    assert!(matches!(error, PullError::File { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn any_sparse_file_comes_back_under_any_knobs(
        runs in prop::collection::vec((0_u64..40, 1_usize..400_000), 0..6),
        zstd_level in prop::sample::select(vec![0, 1, 3]),
        chunk in prop::sample::select(vec![0_u64, 1 << 18, 1 << 20]),
        prefetch in 1_usize..4,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let runs: Vec<_> = runs.into_iter().map(|(block, length)| (block * 100_000, length)).collect();
        sparse_file(&folder.path().join("mem"), 4_500_001, &runs);
        let options = PushOptions { zstd_level, chunk_size: chunk, ..PushOptions::default() };
        let to = tempfile::tempdir().unwrap();
        runtime.block_on(async {
            let registry = Memory::new();
            let files = [source(folder.path(), "mem")];
            push(&registry, VM, "latest", &envelope("s"), &files, &options).await.unwrap();
            let options = PullOptions { concurrency: prefetch, memory_budget: 0 };
            pull_with(&registry, VM, "latest", to.path(), &options).await.unwrap();
        });
        let [a, b] = [folder.path(), to.path()].map(|folder| std::fs::read(folder.join("mem")).unwrap());
        prop_assert!(a == b);
    }

    #[test]
    fn a_hostile_manifest_or_config_never_panics_and_writes_nothing(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        in_config in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let to = tempfile::tempdir().unwrap();
        let failed = runtime.block_on(async {
            let registry = Memory::new();
            pushed(&registry, "latest", "s", &small()).await.unwrap();
            let manifest = registry.get_manifest(VM, "latest").await.unwrap().unwrap().bytes;
            let document = Document::parse(&manifest).unwrap();
            let config = registry.blob(VM, &document.config.digest).unwrap();
            let damage = |bytes: &[u8]| {
                let mut bytes = bytes.to_vec();
                for (at, byte) in &flips {
                    let at = at.index(bytes.len());
                    bytes[at] = *byte;
                }
                bytes
            };
            let mut manifest = manifest.to_vec();
            if in_config {
                let config = damage(&config);
                let text = String::from_utf8(manifest).unwrap();
                manifest = text.replace(&document.config.digest, &digest::of(&config)).into_bytes();
                registry.insert(VM, config);
            } else {
                manifest = damage(&manifest);
            }
            registry.insert_manifest(VM, "latest", OCI_MANIFEST, manifest);
            pull(&registry, VM, "latest", to.path()).await.is_err()
        });
        let left = std::fs::read_dir(to.path()).unwrap().count();
        prop_assert!(!failed || left == 0);
    }
}

/// Processor seconds of this process so far.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    ticks / 100.0
}

/// Not a test: prints how fast guest memory goes in and out. `cargo test -p cocoon-oci --release --test
/// snapshot -- --ignored speed --nocapture`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn speed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory-ranges");
    let programs = ["/usr/bin/qemu-system-x86_64", "/usr/bin/skopeo", "/usr/bin/perl"];
    let program: Vec<u8> = programs.iter().filter_map(|path| std::fs::read(path).ok()).flatten().collect();
    let mut file = File::create(&path).unwrap();
    file.set_len(512 << 20).unwrap();
    // A guest's memory: programs, half of them twice, and pages of zeros.
    let mut total = 0;
    for round in 0..4 {
        file.seek(SeekFrom::Start(round * (96 << 20) + round * 4096)).unwrap();
        let part = &program[..program.len().min(64 << 20)];
        file.write_all(part).unwrap();
        file.write_all(&vec![0; 8 << 20]).unwrap();
        total += part.len() + (8 << 20);
    }
    drop(file);
    for (level, chunk) in [(1, 4 << 20), (3, 4 << 20), (0, 4 << 20)] {
        let registry = OciLayout::open(folder.path().join(format!("registry-{level}"))).unwrap();
        let options = PushOptions { zstd_level: level, chunk_size: chunk, ..PushOptions::default() };
        let files = [source(folder.path(), "memory-ranges")];
        let (start, busy) = (std::time::Instant::now(), processor_seconds());
        let pushed = push(&registry, VM, "hibernate", &envelope("s"), &files, &options).await.unwrap();
        let (push_time, push_busy) = (start.elapsed().as_secs_f64(), processor_seconds() - busy);
        let to = tempfile::tempdir().unwrap();
        let (start, busy) = (std::time::Instant::now(), processor_seconds());
        pull(&registry, VM, "hibernate", to.path()).await.unwrap();
        let (pull_time, pull_busy) = (start.elapsed().as_secs_f64(), processor_seconds() - busy);
        let rate = |time: f64| total as f64 / time / 1e6;
        println!(
            "level {level}: {} MB in, {} MB stored; push {:.0} MB/s ({:.0} per busy core), pull {:.0} MB/s ({:.0})",
            total / 1_000_000,
            pushed.total / 1_000_000,
            rate(push_time),
            rate(push_busy),
            rate(pull_time),
            rate(pull_busy)
        );
    }
}
