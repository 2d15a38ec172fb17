//! The last step of a push: a tag moves, if it may (design §5, "A tag is not overwritten blindly").
//!
//! Entry points: [`Tag::check`] and [`Tag::publish`]. Invariants: what the guard does not allow is not replaced by a
//! registry that can compare and put in one step, and by any other only if somebody else writes between our
//! look and our put; success is said only when the tag was read back and is ours (I4); doubt is an error (I5).

use bytes::Bytes;

use super::{PullError, PullOptions, PushError, TagGuard, is_consumed, pull::Source};
use crate::{
    manifest::OCI_MANIFEST,
    registry::{Manifest, Registry, RegistryError},
};

/// Tries to replace a tag that keeps moving among manifests that all may be replaced.
const TRIES: u32 = 3;

/// What a push would put under a tag, and under what condition.
pub(super) struct Tag<'a> {
    pub(super) registry: &'a dyn Registry,
    pub(super) repository: &'a str,
    pub(super) tag: &'a str,
    pub(super) guard: &'a TagGuard,
}

/// What the tag may be replaced from.
pub(super) enum From {
    Anything,
    /// This digest, or nothing.
    Seen(Option<String>),
}

impl Tag<'_> {
    /// Refuses when the tag points to something that may not be replaced. A manifest of this very `snapshot`
    /// may: only this pusher has it, so it is an earlier try whose end it did not hear of.
    pub(super) async fn check(&self, snapshot: Option<&str>) -> Result<From, PushError> {
        let TagGuard::AbsentOr(allowed) = self.guard else { return Ok(From::Anything) };
        let found = self.registry.get_manifest(self.repository, self.tag).await;
        let Some(found) = found.map_err(|error| self.failed(error))? else { return Ok(From::Seen(None)) };
        let digest = found.digest.clone();
        if allowed.contains(&digest) || is_consumed(&found.bytes) || self.holds(found, snapshot).await? {
            return Ok(From::Seen(Some(digest)));
        }
        Err(self.moved(digest))
    }

    /// Whether a manifest holds this snapshot.
    async fn holds(&self, found: Manifest, snapshot: Option<&str>) -> Result<bool, PushError> {
        let Some(snapshot) = snapshot.filter(|id| !id.is_empty()) else { return Ok(false) };
        let source = Source::new(self.registry, self.repository, self.tag, &PullOptions::default());
        match source.read(found).await {
            Ok(found) => Ok(found.config.snapshot_id == snapshot),
            Err(PullError::Registry { source, .. }) => Err(self.failed(source)),
            // Not a snapshot, or one that is not whole: not ours at any rate.
            Err(_) => Ok(false),
        }
    }

    /// Points the tag to the manifest if it may, and looks whether it does.
    pub(super) async fn publish(
        &self,
        digest: &str,
        manifest: &Bytes,
        snapshot: &str,
    ) -> Result<(), PushError> {
        for _ in 0..TRIES {
            let from = self.check(Some(snapshot)).await?;
            if self.replace(from, digest, manifest.clone()).await? {
                return Ok(());
            }
        }
        let what = format!("pointing {}:{} to {digest}", self.repository, self.tag);
        Err(self.failed(RegistryError::unavailable(what, "others are writing the same tag; push again")))
    }

    /// `false`: the tag moved since it was looked at, and stays.
    async fn replace(&self, from: From, digest: &str, manifest: Bytes) -> Result<bool, PushError> {
        let (registry, repository, tag) = (self.registry, self.repository, self.tag);
        let put = match from {
            From::Anything => registry.put_manifest(repository, tag, OCI_MANIFEST, manifest).await.map(Some),
            From::Seen(seen) => {
                registry.put_tag_if(repository, tag, seen.as_deref(), OCI_MANIFEST, manifest).await
            }
        };
        if matches!(put, Ok(None)) {
            return Ok(false);
        }
        let seen = registry.get_manifest(repository, tag).await;
        match (put, seen.map(|manifest| manifest.map(|manifest| manifest.digest))) {
            (Ok(Some(put)), Ok(Some(seen))) if put == digest && seen == digest => Ok(true),
            // The tag was seen, and it is not ours: the failure is all there is.
            (Err(error), Ok(seen)) if seen.as_deref() != Some(digest) => Err(self.failed(error)),
            (Err(error), _) | (Ok(_), Err(error)) => Err(self.unconfirmed(digest, error)),
            _ => Err(self.unconfirmed(digest, RegistryError::Corrupt { object: digest.to_owned() })),
        }
    }

    pub(super) fn failed(&self, source: RegistryError) -> PushError {
        PushError::Registry { repository: self.repository.to_owned(), tag: self.tag.to_owned(), source }
    }

    fn moved(&self, found: String) -> PushError {
        PushError::TagMoved { repository: self.repository.to_owned(), tag: self.tag.to_owned(), found }
    }

    fn unconfirmed(&self, digest: &str, source: RegistryError) -> PushError {
        let [repository, tag, digest] = [self.repository, self.tag, digest].map(str::to_owned);
        PushError::Unconfirmed { repository, tag, digest, source }
    }
}
