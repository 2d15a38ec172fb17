//! The export tar: what is cut short is refused, what is odd but whole is taken.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

use std::collections::BTreeMap;

use cocoon_oci::{
    memory::Memory,
    registry::Registry as _,
    snapshot::{PullOptions, PushError, PushOptions, Pushed, read},
    stream::{Dress, pull_stream, push_stream},
};
use proptest::prelude::*;

const ENVELOPE: &str =
    r#"{"version":1,"config":{"id":"s1","name":"n","hypervisor":"firecracker","memory":4096}}"#;

fn append(builder: &mut tar::Builder<Vec<u8>>, name: &str, body: &[u8]) {
    let mut header = tar::Header::new_gnu();
    header.set_size(body.len() as u64);
    header.set_mode(0o640);
    builder.append_data(&mut header, name, body).unwrap();
}

/// A tar as a stranger's library writes it: GNU headers, long names, sparse records.
fn export(mem: usize) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    append(&mut builder, "snapshot.json", ENVELOPE.as_bytes());
    let map = br#"[{"o":4096,"l":10},{"o":100000,"l":5}]"#;
    let records = [("COCOON.sparse.map", &map[..]), ("COCOON.sparse.size", b"200000")];
    builder.append_pax_extensions(records).unwrap();
    append(&mut builder, "cow.raw", b"0123456789abcde");
    append(&mut builder, "mem", &(0..mem).map(|at| (at >> 3) as u8).collect::<Vec<_>>());
    append(&mut builder, &"long-".repeat(40), b"x");
    builder.into_inner().unwrap()
}

async fn take(registry: &Memory, tar: &[u8], options: &PushOptions) -> Result<Pushed, PushError> {
    push_stream(registry, "vm", "", tar, options).await
}

fn fixed(zstd_level: i32, chunk_size: u64) -> PushOptions {
    let annotations = BTreeMap::new();
    let created = jiff::Timestamp::UNIX_EPOCH;
    PushOptions { zstd_level, chunk_size, annotations, created, ..PushOptions::default() }
}

async fn give(registry: &Memory) -> Vec<u8> {
    let now = jiff::Timestamp::UNIX_EPOCH;
    let dress = Dress { local_name: "local", now, options: PullOptions::default() };
    let mut tar = Vec::new();
    pull_stream(registry, "vm", "latest", &dress, &mut tar).await.unwrap();
    tar
}

#[tokio::test]
async fn one_tar_gives_the_same_tar_back_whatever_the_knobs() {
    let tar = export(9 << 20);
    let mut given = Vec::new();
    for (level, chunk) in [(0, 0), (1, 0), (3, 1 << 20)] {
        let registry = Memory::new();
        take(&registry, &tar, &fixed(level, chunk)).await.unwrap();
        given.push(give(&registry).await);
        let facts = read(&registry, "vm", "latest").await.unwrap().unwrap();
        assert_eq!((facts.snapshot_id.as_str(), facts.hypervisor.as_str()), ("s1", "firecracker"));
    }
    assert!(given.windows(2).all(|pair| pair[0] == pair[1]));
    // And once more around: our own tar is a fixed point.
    let registry = Memory::new();
    take(&registry, &given[0], &fixed(1, 1 << 20)).await.unwrap();
    assert!(give(&registry).await == given[0]);
}

#[tokio::test]
async fn an_exporter_may_pad_after_the_end() {
    let plain = export(100);
    let mut given = Vec::new();
    for padding in [0, 1, 512, 64 << 10] {
        let (registry, mut tar) = (Memory::new(), plain.clone());
        tar.resize(plain.len() + padding, 0);
        let pushed = take(&registry, &tar, &fixed(0, 0)).await.unwrap();
        given.push((pushed.digest, give(&registry).await));
    }
    assert!(given.windows(2).all(|pair| pair[0] == pair[1]), "padding changes what is published");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_tar_that_is_cut_anywhere_publishes_nothing(at in any::<prop::sample::Index>()) {
        let tar = export(5000);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let registry = Memory::new();
            let cut = at.index(tar.len());
            assert!(take(&registry, &tar[..cut], &fixed(0, 0)).await.is_err(), "cut at {cut} of {}", tar.len());
            assert_eq!(registry.get_manifest("vm", "latest").await.unwrap(), None);
        });
    }

    #[test]
    fn a_damaged_tar_never_panics(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut tar = export(600);
        for (at, byte) in flips {
            let at = at.index(tar.len());
            tar[at] = byte;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _ = runtime.block_on(take(&Memory::new(), &tar, &fixed(0, 0)));
    }
}
