//! A registry that stops answering, such as a folder on a server that went away.

#![allow(clippy::unwrap_used, clippy::unwrap_in_result, clippy::panic, clippy::expect_used)]

use std::{
    io::Write as _,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use cocoon_oci::{
    manifest::Document,
    memory::Memory,
    registry::{Body, Manifest, Registry, RegistryError},
    snapshot::{Envelope, PullError, PullOptions, PushOptions, SourceFile, pull_with, push, read},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, ReadBuf},
    time::Instant,
};

const VM: &str = "vk-prod-demo-0-71ea62";
/// The patience of a pull: 60 looks, a second each.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where it stops answering.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Where {
    Manifests,
    /// Before the first byte of this blob.
    Blob(String),
    /// After half of this blob.
    Middle(String),
    /// Nowhere, but each byte of this blob comes after a pause.
    Dribble(String, Duration),
    /// Nowhere, and this blob has no end.
    Endless(String),
}

#[derive(Debug)]
struct Silent {
    inner: Arc<Memory>,
    stops: Where,
}

/// A body whose every read waits first and gives a tenth of the whole.
struct Dribble {
    bytes: Bytes,
    step: usize,
    pause: Duration,
    wait: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl AsyncRead for Dribble {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let pause = self.pause;
        let wait = self.wait.get_or_insert_with(|| Box::pin(tokio::time::sleep(pause)));
        std::task::ready!(std::future::Future::poll(wait.as_mut(), context));
        self.wait = None;
        let length = self.step.min(buffer.remaining()).min(self.bytes.len());
        let part = self.bytes.split_to(length);
        buffer.put_slice(&part);
        Poll::Ready(Ok(()))
    }
}

/// Never says anything.
struct Nothing;

impl AsyncRead for Nothing {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        _: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Poll::Pending
    }
}

#[async_trait::async_trait]
impl Registry for Silent {
    async fn has_blob(&self, repository: &str, digest: &str) -> Result<bool, RegistryError> {
        self.inner.has_blob(repository, digest).await
    }
    async fn put_blob(&self, repo: &str, digest: &str, size: u64, body: Body) -> Result<(), RegistryError> {
        self.inner.put_blob(repo, digest, size, body).await
    }
    async fn get_blob(&self, repository: &str, digest: &str) -> Result<Option<Body>, RegistryError> {
        let bytes = || self.inner.blob(repository, digest).unwrap();
        match &self.stops {
            Where::Blob(at) if at == digest => std::future::pending().await,
            Where::Middle(at) if at == digest => {
                let bytes = bytes();
                let head = std::io::Cursor::new(bytes.slice(..bytes.len() / 2));
                Ok(Some(Box::pin(head.chain(Nothing))))
            }
            Where::Dribble(at, pause) if at == digest => {
                let bytes = bytes();
                let step = bytes.len().div_ceil(10);
                Ok(Some(Box::pin(Dribble { bytes, step, pause: *pause, wait: None })))
            }
            Where::Endless(at) if at == digest => Ok(Some(Box::pin(tokio::io::repeat(7)))),
            _ => self.inner.get_blob(repository, digest).await,
        }
    }
    async fn put_manifest(
        &self,
        repo: &str,
        reference: &str,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<String, RegistryError> {
        self.inner.put_manifest(repo, reference, media_type, bytes).await
    }
    async fn put_tag_if(
        &self,
        repo: &str,
        tag: &str,
        expected: Option<&str>,
        media_type: &str,
        bytes: Bytes,
    ) -> Result<Option<String>, RegistryError> {
        self.inner.put_tag_if(repo, tag, expected, media_type, bytes).await
    }
    async fn get_manifest(&self, repo: &str, reference: &str) -> Result<Option<Manifest>, RegistryError> {
        if self.stops == Where::Manifests {
            return std::future::pending().await;
        }
        self.inner.get_manifest(repo, reference).await
    }
    async fn delete_manifest(&self, repo: &str, reference: &str) -> Result<(), RegistryError> {
        self.inner.delete_manifest(repo, reference).await
    }
    async fn delete_tag_if(&self, repo: &str, tag: &str, digest: &str) -> Result<bool, RegistryError> {
        self.inner.delete_tag_if(repo, tag, digest).await
    }
}

/// A snapshot of a small file in one piece and a large one in several; its manifest.
async fn stocked() -> (Arc<Memory>, Document) {
    let registry = Arc::new(Memory::new());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("cocoon.json"), "{}").unwrap();
    let noise = (0..3_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8);
    let noise = noise.collect::<Vec<u8>>();
    std::fs::File::create(folder.path().join("memory-ranges")).unwrap().write_all(&noise).unwrap();
    let source =
        |name: &str| SourceFile { name: name.to_owned(), path: folder.path().join(name), mode: 0o600 };
    let files = [source("cocoon.json"), source("memory-ranges")];
    let envelope = Envelope {
        id: "s".to_owned(),
        hypervisor: "qemu".to_owned(),
        memory: 1 << 30,
        cpu: 2,
        ..Envelope::default()
    };
    let options = PushOptions { chunk_size: 1 << 20, memory_budget: 16 << 20, ..PushOptions::default() };
    push(registry.as_ref(), VM, "latest", &envelope, &files, &options).await.unwrap();
    let manifest = registry.get_manifest(VM, "latest").await.unwrap().unwrap();
    let document = Document::parse(&manifest.bytes).unwrap();
    assert!(document.layers.len() > 2, "one file in several pieces");
    (registry, document)
}

/// Pulls on virtual time, which goes on also while a blocking thread reads; with how long it took.
async fn pull_of(
    inner: &Arc<Memory>,
    stops: Where,
    concurrency: usize,
    to: &Path,
) -> (Option<PullError>, Duration) {
    let registry = Arc::new(Silent { inner: Arc::clone(inner), stops });
    let begun = Instant::now();
    let to = to.to_owned();
    let options = PullOptions { concurrency, memory_budget: 0 };
    let pulling = tokio::spawn(async move {
        let pulled = pull_with(registry.as_ref(), VM, "latest", &to, &options).await;
        (pulled.err(), begun.elapsed())
    });
    while !pulling.is_finished() {
        tokio::time::advance(Duration::from_millis(500)).await;
        std::thread::sleep(Duration::from_millis(1));
    }
    pulling.await.unwrap()
}

fn told(error: &PullError) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_gets_nothing_for_a_minute_fails_with_a_way_out_and_leaves_no_file() {
    let (registry, document) = stocked().await;
    let last = document.layers.last().unwrap().digest.clone();
    for stops in [
        Where::Manifests,
        Where::Blob(document.config.digest.clone()),
        Where::Blob(last.clone()),
        Where::Middle(document.config.digest.clone()),
        Where::Middle(last),
    ] {
        // One piece after the other, and some ahead.
        for concurrency in [1, 4] {
            let to = tempfile::tempdir().unwrap();
            let (error, _) = pull_of(&registry, stops.clone(), concurrency, to.path()).await;
            let error = error.expect("a pull that hangs is no pull");
            assert!(
                matches!(error, PullError::Registry { .. }),
                "the registry's fault, so it is tried again"
            );
            let text = told(&error);
            let object = match &stops {
                Where::Blob(digest) | Where::Middle(digest) => digest.as_str(),
                _ => VM,
            };
            for part in [object, VM, "for 60 seconds", "then try again"] {
                assert!(text.contains(part), "{stops:?} {concurrency}: {text}");
            }
            assert_eq!(std::fs::read_dir(to.path()).unwrap().count(), 0, "{stops:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_is_slow_but_gives_something_is_waited_for() {
    let (registry, document) = stocked().await;
    let config = document.config.digest.clone();
    let to = tempfile::tempdir().unwrap();
    let slow = Where::Dribble(config, PATIENCE / 2);
    let (error, took) = pull_of(&registry, slow, 4, to.path()).await;
    assert!(error.is_none(), "{error:?}");
    assert!(took > PATIENCE * 4, "far longer than the patience for one part: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_blob_without_an_end_is_read_as_far_as_the_manifest_says() {
    let (registry, document) = stocked().await;
    for digest in [&document.config.digest, &document.layers[0].digest, &document.layers[1].digest] {
        for concurrency in [1, 4] {
            let to = tempfile::tempdir().unwrap();
            let (error, _) = pull_of(&registry, Where::Endless(digest.clone()), concurrency, to.path()).await;
            let error = error.expect("a blob without an end is no blob");
            assert!(matches!(error, PullError::Invalid { .. }), "{error}");
            assert_eq!(std::fs::read_dir(to.path()).unwrap().count(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_look_at_a_silent_registry_fails_on_the_minute() {
    let (inner, _) = stocked().await;
    let begun = Instant::now();
    let registry = Silent { inner, stops: Where::Manifests };
    let error = read(&registry, VM, "latest").await.unwrap_err();
    assert!(told(&error).contains("60 seconds"), "{error}");
    assert!(
        (PATIENCE..PATIENCE + Duration::from_secs(2)).contains(&begun.elapsed()),
        "{:?}",
        begun.elapsed()
    );
}
