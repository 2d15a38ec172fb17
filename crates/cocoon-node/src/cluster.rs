//! What owners need from Kubernetes, as a port.
//!
//! Entry point: [`Cluster`]. The real one is `outbox` (views), `events` and a delete; tests have a fake.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;

use crate::{
    owner::inbox::Inbox, planner::observation::PodKey, ports::PortResult, reason::Trouble, view::View,
};

/// A view with its number, so that its acceptance can be told from an older one's.
#[derive(Debug, Clone)]
pub struct Show {
    /// The pod, as last seen.
    pub pod: Arc<Pod>,
    /// What it should show.
    pub view: View,
    /// Grows with each change of the view.
    pub version: u64,
}

/// How loud an event is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Something was achieved.
    Normal,
    /// Something went wrong.
    Warning,
}

/// Kubernetes, as owners see it.
#[async_trait]
pub trait Cluster: Send + Sync + fmt::Debug {
    /// Makes the pod show this, latest wins; `ack` hears when the API has it.
    fn show(&self, show: Show, ack: Arc<Inbox>);
    /// Tells people, at most once in a while for the same words.
    fn event(&self, key: &PodKey, uid: &str, tone: Tone, what: &Trouble);
    /// Ends the pod: grace 0, this incarnation only. Not there is success.
    async fn finalise(&self, key: &PodKey, uid: &str) -> PortResult<()>;
}
