//! Snapshot artifacts: from the engine's store into a registry and back.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use cocoon_engine::{engine::Engine, error::LookupError};
use cocoon_kit::failure;
use cocoon_oci::{
    registry::Registry as Store,
    snapshot::{self, Envelope, Facts, PullError, PushError, PushOptions, Pushed, SourceFile, TagGuard},
};

use crate::{
    ports::{
        Guard, PortError, PortResult, PushRequest, Registry, SnapshotView, TagView,
        real::engine::{allocated, change, lookup, snapshot_view},
    },
    reason::Reason,
};

/// A registry of snapshot artifacts, fed from and into one engine.
#[derive(Debug, Clone)]
pub struct ArtifactRegistry {
    engine: Engine,
    store: Arc<dyn Store>,
    /// Bytes of snapshots a second of the last push that was long enough to be measured; 0 is none.
    throughput: Arc<AtomicU64>,
}

/// What a push must have sent for its time to say anything.
const MEASURABLE: u64 = 8 << 20;

/// Bytes of a snapshot that a push got through in a second. Blobs that were there already cost nothing and count
/// for nothing: of `raw` bytes only the part is taken that was sent, of all that is stored.
fn throughput(raw: u64, sent: u64, total: u64, took: Duration) -> Option<u64> {
    if sent < MEASURABLE || total == 0 {
        return None;
    }
    let through = u128::from(raw) * u128::from(sent.min(total)) / u128::from(total);
    let rate = through.saturating_mul(1000) / took.as_millis().max(1);
    Some(u64::try_from(rate).unwrap_or(u64::MAX).max(1))
}

/// A push under way. Dropped, it was cut off, mostly at the end of the guest's pause: less than all of the
/// snapshot gets through in that time, so the next one is known to be long.
struct UnderWay<'a> {
    throughput: &'a AtomicU64,
    raw: u64,
    begun: Instant,
}

impl UnderWay<'_> {
    /// It came to its end; a failure says nothing about the time that a push takes.
    fn ended(self, pushed: Option<&Pushed>) {
        let rate = pushed.and_then(|p| throughput(self.raw, p.sent, p.total, self.begun.elapsed()));
        if let Some(rate) = rate {
            self.throughput.store(rate, Ordering::Relaxed);
        }
        std::mem::forget(self);
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let Some(most) = self.raw.checked_div(self.begun.elapsed().as_secs()) else { return };
        let before = self.throughput.load(Ordering::Relaxed);
        if before == 0 || most < before {
            self.throughput.store(most.max(1), Ordering::Relaxed);
        }
    }
}

impl ArtifactRegistry {
    /// Snapshots of `engine` in `store`.
    #[must_use]
    pub fn new(engine: Engine, store: Arc<dyn Store>) -> Self {
        Self { engine, store, throughput: Arc::default() }
    }

    async fn source(&self, name: &str) -> PortResult<(Envelope, Vec<SourceFile>)> {
        let gone = |error| match error {
            LookupError::SnapshotNotFound(_) => {
                PortError::new(Reason::SnapshotNotFound, format!("snapshot {name} is not in the local store"))
            }
            error => lookup(&format!("reading snapshot {name}"), error),
        };
        let found = self.engine.snapshot(name).await.map_err(gone)?;
        let files = self.engine.snapshot_files(&found.envelope.id).await.map_err(gone)?;
        Ok((found.envelope, files))
    }
}

#[async_trait]
impl Registry for ArtifactRegistry {
    async fn facts(&self, repository: &str, tag: &str) -> PortResult<Option<TagView>> {
        let facts = snapshot::read(self.store.as_ref(), repository, tag).await;
        facts
            .map(|facts| facts.map(tag_view))
            .map_err(|error| pull(&format!("reading {repository}:{tag}"), error))
    }

    async fn push(&self, request: PushRequest) -> PortResult<String> {
        let PushRequest { snapshot: name, repository, tag, base_image, vm_name, annotations, guard } =
            request;
        let (envelope, files) = self.source(&name).await?;
        let tag_guard = match guard {
            Guard::Any => TagGuard::Any,
            Guard::AbsentOr(digests) => TagGuard::AbsentOr(digests),
        };
        let options = PushOptions { annotations, base_image, vm_name, tag_guard, ..PushOptions::default() };
        let paths: Vec<PathBuf> = files.iter().map(|file| file.path.clone()).collect();
        let raw = allocated(&format!("counting what snapshot {name} takes"), paths).await?;
        let under_way = UnderWay { throughput: &self.throughput, raw, begun: Instant::now() };
        let pushed =
            snapshot::push(self.store.as_ref(), &repository, &tag, &envelope, &files, &options).await;
        under_way.ended(pushed.as_ref().ok());
        let pushed = pushed.map_err(|error| push(&format!("pushing {repository}:{tag}"), error))?;
        tracing::info!(
            repository,
            tag,
            digest = pushed.digest,
            sent = pushed.sent,
            total = pushed.total,
            "pushed"
        );
        Ok(pushed.digest)
    }

    async fn push_blobs(&self, request: PushRequest) -> PortResult<u64> {
        let (_, files) = self.source(&request.snapshot).await?;
        let options = PushOptions::default();
        let sent = snapshot::push_blobs(self.store.as_ref(), &request.repository, &files, &options).await;
        sent.map_err(|error| push(&format!("pushing blobs of {} ahead", request.repository), error))
    }

    fn throughput(&self) -> Option<u64> {
        Some(self.throughput.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    async fn pull(&self, repository: &str, reference: &str, name: &str) -> PortResult<SnapshotView> {
        let what = format!("pulling {}", cocoon_oci::reference::local(repository, reference));
        let staging = self.engine.snapshot_staging().await;
        let staging =
            staging.map_err(|error| PortError::caused(Reason::EngineUnavailable, what.clone(), error))?;
        let pulled = snapshot::pull(self.store.as_ref(), repository, reference, staging.folder()).await;
        let (_, envelope) = pulled.map_err(|error| pull(&what, error))?;
        let adopted = self.engine.snapshot_adopt(staging, name, envelope).await;
        adopted.map(snapshot_view).map_err(|error| change(what, error))
    }

    async fn drop_tag(&self, repository: &str, tag: &str, digest: &str, snapshot: &str) -> PortResult<()> {
        let read = snapshot::read(self.store.as_ref(), repository, tag).await;
        let now = read.map_err(|error| pull(&format!("reading {repository}:{tag}"), error))?;
        let Some(now) = now.filter(|now| now.digest == digest) else { return Ok(()) };
        let dropped = snapshot::consume(self.store.as_ref(), repository, tag, &now).await;
        dropped.map(|_| ()).map_err(|error| {
            let what = format!("dropping {repository}:{tag} of snapshot {snapshot}");
            PortError::caused(Reason::RegistryUnavailable, what, error)
        })
    }
}

fn tag_view(mut facts: Facts) -> TagView {
    let vm_name = facts.annotations.remove(snapshot::VM_ANNOTATION).unwrap_or_default();
    TagView { digest: facts.digest, snapshot_id: facts.snapshot_id, base_image: facts.base_image, vm_name }
}

fn pull(what: &str, error: PullError) -> PortError {
    let reason = match &error {
        PullError::NotFound(_) => Reason::SnapshotNotFound,
        PullError::Invalid { .. } => Reason::SnapshotIncompatible,
        _ if failure::is_disk_full(&error) => Reason::DiskFull,
        _ => Reason::RegistryUnavailable,
    };
    PortError::caused(reason, what, error)
}

fn push(what: &str, error: PushError) -> PortError {
    let reason = match &error {
        PushError::TagMoved { .. } => Reason::TagMoved,
        PushError::ReservedAnnotation(_) => Reason::InvalidAnnotation,
        _ if failure::is_disk_full(&error) => Reason::DiskFull,
        _ => Reason::RegistryUnavailable,
    };
    PortError::caused(reason, what, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_push_that_was_cut_off_is_known_to_be_long_and_one_that_failed_says_nothing() {
        for (before, cut_off, after) in [
            (0, true, 1 << 20),
            (1 << 30, true, 1 << 20),
            (1 << 10, true, 1 << 10),
            (0, false, 0),
            (1 << 30, false, 1 << 30),
        ] {
            let throughput = AtomicU64::new(before);
            let begun = Instant::now().checked_sub(Duration::from_secs(64)).unwrap();
            let under_way = UnderWay { throughput: &throughput, raw: 64 << 20, begun };
            if cut_off {
                drop(under_way);
            } else {
                under_way.ended(None);
            }
            assert_eq!(throughput.into_inner(), after);
        }
        let throughput = AtomicU64::new(0);
        drop(UnderWay { throughput: &throughput, raw: 64 << 20, begun: Instant::now() });
        assert_eq!(throughput.into_inner(), 0, "called off at once");
    }

    #[test]
    fn throughput_counts_what_was_sent_and_says_nothing_of_a_small_push() {
        let second = Duration::from_secs(1);
        for (raw, sent, total, took, expected) in [
            (1 << 30, 256 << 20, 256 << 20, second, Some(1 << 30)),
            (1 << 30, 64 << 20, 256 << 20, second, Some(256 << 20)),
            (1 << 30, 256 << 20, 256 << 20, 10 * second, Some((1 << 30) / 10)),
            (1 << 30, 1 << 20, 256 << 20, second, None),
            (1 << 30, 256 << 20, 0, second, None),
            (u64::MAX, 256 << 20, 256 << 20, Duration::ZERO, Some(u64::MAX)),
        ] {
            assert_eq!(throughput(raw, sent, total, took), expected, "{raw} {sent} {total} {took:?}");
        }
    }
}
