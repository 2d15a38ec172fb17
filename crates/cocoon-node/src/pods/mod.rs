//! The pods of this node: list, watch, and the way to their owners.
//!
//! Entry points: [`PodWatch::list`] (a complete list, or an error) and [`PodWatch::follow`], which never
//! ends by itself. Bookmarks move the position; 410 lists again; everything else backs off, and so does a
//! watch that is closed before it told anything.

pub(crate) mod router;
pub(crate) mod table;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use cocoon_kit::{backoff::Backoff, world::World};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{ListParams, WatchEvent, WatchParams},
};
use tokio_util::sync::CancellationToken;

use self::{
    router::Router,
    table::{Change, PodTable},
};

const FIRST_DELAY: Duration = Duration::from_millis(800);
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// A watch ends by itself after this long.
const WATCH_SECONDS: u32 = 290;

/// The watch of one node's pods.
pub(crate) struct PodWatch {
    api: Api<Pod>,
    selector: String,
    table: Arc<PodTable>,
    world: Arc<dyn World>,
}

impl std::fmt::Debug for PodWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodWatch").field("selector", &self.selector).finish_non_exhaustive()
    }
}

/// Why a watch ended.
enum End {
    /// The position is too old.
    Expired,
    /// The server closed it in order.
    Closed,
    /// It was closed at once, without a word.
    Silent,
    Failed(kube::Error),
}

impl PodWatch {
    /// Pods bound to `node`.
    #[must_use]
    pub(crate) fn new(client: Client, node: &str, table: Arc<PodTable>, world: Arc<dyn World>) -> Self {
        Self { api: Api::all(client), selector: format!("spec.nodeName={node}"), table, world }
    }

    /// A complete list, as changes against the table, and the position to watch from.
    pub(crate) async fn list(&self) -> kube::Result<(Vec<Change>, String)> {
        let list = self.api.list(&ListParams::default().fields(&self.selector)).await?;
        let position = list.metadata.resource_version.unwrap_or_default();
        Ok((self.table.replace(list.items), position))
    }

    /// Everything that is known, oldest first, as changes: for the first telling.
    #[must_use]
    pub(crate) fn known(&self) -> Vec<Change> {
        let mut pods = self.table.all();
        pods.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0));
        pods.into_iter().map(Change::Seen).collect()
    }

    /// Follows changes from `position` until `shutdown`.
    pub(crate) async fn follow(&self, mut position: String, router: &Router, shutdown: CancellationToken) {
        let mut backoff = Backoff::new(FIRST_DELAY, LONGEST_DELAY);
        while !shutdown.is_cancelled() {
            let end = tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                end = self.watch(&mut position, router, &mut backoff) => end,
            };
            let relist = match end {
                End::Closed => false,
                End::Expired => true,
                End::Silent => {
                    tracing::warn!("the watch of pods was closed at once, without a word");
                    self.pause(&mut backoff, &shutdown).await;
                    false
                }
                End::Failed(error) => {
                    tracing::warn!(error = %error, "watching pods failed");
                    self.pause(&mut backoff, &shutdown).await;
                    false
                }
            };
            if relist {
                position = self.relist(router, &mut backoff, &shutdown).await;
            }
        }
    }

    async fn pause(&self, backoff: &mut Backoff, shutdown: &CancellationToken) {
        let delay = backoff.next(self.world.as_ref());
        tokio::select! {
            biased;
            () = shutdown.cancelled() => {}
            () = tokio::time::sleep(delay) => {}
        }
    }

    async fn relist(&self, router: &Router, backoff: &mut Backoff, shutdown: &CancellationToken) -> String {
        while !shutdown.is_cancelled() {
            match self.list().await {
                Ok((changes, position)) => {
                    changes.into_iter().for_each(|change| router.route(change));
                    return position;
                }
                Err(error) => {
                    tracing::warn!(error = %error, "listing pods failed");
                    self.pause(backoff, shutdown).await;
                }
            }
        }
        String::new()
    }

    async fn watch(&self, position: &mut String, router: &Router, backoff: &mut Backoff) -> End {
        let params = WatchParams::default().fields(&self.selector).timeout(WATCH_SECONDS);
        let stream = match self.api.watch(&params, position).await {
            Ok(stream) => stream,
            Err(kube::Error::Api(status)) if status.code == 410 => return End::Expired,
            Err(error) => return End::Failed(error),
        };
        let (mut stream, begun, mut silent) = (std::pin::pin!(stream), self.world.instant(), true);
        while let Some(event) = stream.next().await {
            match event {
                Ok(event) => match self.take(event, position, router) {
                    Ok(()) => backoff.reset(),
                    Err(end) => return end,
                },
                Err(error) => return End::Failed(error),
            }
            silent = false;
        }
        if silent && self.world.instant() < begun + FIRST_DELAY { End::Silent } else { End::Closed }
    }

    fn take(&self, event: WatchEvent<Pod>, position: &mut String, router: &Router) -> Result<(), End> {
        let change = match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                advance(position, pod.metadata.resource_version.as_deref());
                self.table.apply(pod)
            }
            WatchEvent::Deleted(pod) => {
                advance(position, pod.metadata.resource_version.as_deref());
                self.table.remove(&pod)
            }
            WatchEvent::Bookmark(mark) => {
                *position = mark.metadata.resource_version;
                None
            }
            WatchEvent::Error(status) if status.code == 410 => return Err(End::Expired),
            WatchEvent::Error(status) => return Err(End::Failed(kube::Error::Api(status))),
        };
        if let Some(change) = change {
            router.route(change);
        }
        Ok(())
    }
}

fn advance(position: &mut String, version: Option<&str>) {
    if let Some(version) = version {
        version.clone_into(position);
    }
}
