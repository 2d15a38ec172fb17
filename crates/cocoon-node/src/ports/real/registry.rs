//! Snapshot artifacts: from the engine's store into a registry and back.

use std::sync::Arc;

use async_trait::async_trait;
use cocoon_engine::{engine::Engine, error::LookupError};
use cocoon_oci::{
    registry::Registry as Store,
    snapshot::{self, Envelope, Facts, PullError, PushError, PushOptions, SourceFile, TagGuard},
};

use crate::{
    ports::{
        Guard, PortError, PortResult, PushRequest, Registry, SnapshotView, TagView,
        real::engine::{change, is_disk_full, lookup, snapshot_view},
    },
    reason::Reason,
};

/// A registry of snapshot artifacts, fed from and into one engine.
#[derive(Debug, Clone)]
pub struct ArtifactRegistry {
    engine: Engine,
    store: Arc<dyn Store>,
}

impl ArtifactRegistry {
    /// Snapshots of `engine` in `store`.
    #[must_use]
    pub fn new(engine: Engine, store: Arc<dyn Store>) -> Self {
        Self { engine, store }
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
        let PushRequest { snapshot: name, repository, tag, base_image, annotations, guard } = request;
        let (envelope, files) = self.source(&name).await?;
        let tag_guard = match guard {
            Guard::Any => TagGuard::Any,
            Guard::AbsentOr(digests) => TagGuard::AbsentOr(digests),
        };
        let options = PushOptions { annotations, base_image, tag_guard, ..PushOptions::default() };
        let pushed =
            snapshot::push(self.store.as_ref(), &repository, &tag, &envelope, &files, &options).await;
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

fn tag_view(facts: Facts) -> TagView {
    TagView { digest: facts.digest, snapshot_id: facts.snapshot_id, base_image: facts.base_image }
}

fn pull(what: &str, error: PullError) -> PortError {
    let reason = match &error {
        PullError::NotFound(_) => Reason::SnapshotNotFound,
        PullError::Invalid { .. } => Reason::SnapshotIncompatible,
        _ if is_disk_full(&error) => Reason::DiskFull,
        _ => Reason::RegistryUnavailable,
    };
    PortError::caused(reason, what, error)
}

fn push(what: &str, error: PushError) -> PortError {
    let reason = match &error {
        PushError::TagMoved { .. } => Reason::TagMoved,
        PushError::ReservedAnnotation(_) => Reason::InvalidAnnotation,
        _ if is_disk_full(&error) => Reason::DiskFull,
        _ => Reason::RegistryUnavailable,
    };
    PortError::caused(reason, what, error)
}
