//! Views on their way to the API: latest wins, one writer a pod, retried until accepted or the pod is gone.
//!
//! Entry point: [`Outbox`]. Status goes first and annotations after it, so `ready` is in the status before
//! the lifecycle says so (I4). Invariants: one slot a pod incarnation, one request at a time in it (I9);
//! every body carries the UID (I8).

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cocoon_kit::{backoff::Backoff, world::World};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::Value;
use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    cluster::Show,
    owner::inbox::Inbox,
    planner::observation::PodKey,
    pods::table::PodTable,
    status::{HostFacts, annotation_patch, status_patch},
    wish,
};

/// Requests at once of all pods.
const CONCURRENCY: usize = 32;
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// Conflicts in a row before a delay.
const CONFLICTS: u32 = 4;

#[derive(Debug)]
struct Slot {
    show: Show,
    ack: Arc<Inbox>,
    dirty: bool,
}

#[derive(Debug, Default)]
struct State {
    slots: BTreeMap<(PodKey, String), Slot>,
    tasks: JoinSet<()>,
}

/// The outbox of one node. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    client: Transport,
    world: Arc<dyn World>,
    host: HostFacts,
    table: Arc<PodTable>,
    permits: Arc<Semaphore>,
    state: Arc<Mutex<State>>,
}

/// A client that can be shown in debug output.
#[derive(Clone)]
struct Transport(Client);

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

/// How a delivery ended.
enum Delivery {
    Accepted,
    /// The pod, or this incarnation of it, is not there any more.
    Gone,
    Failed(kube::Error),
    /// Somebody else writes it all the time.
    Contended,
}

impl Outbox {
    /// An empty outbox.
    #[must_use]
    pub(crate) fn new(client: Client, world: Arc<dyn World>, host: HostFacts, table: Arc<PodTable>) -> Self {
        let permits = Arc::new(Semaphore::new(CONCURRENCY));
        Self { client: Transport(client), world, host, table, permits, state: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the pod show this; what waits of an older view is dropped.
    pub(crate) fn put(&self, show: Show, ack: Arc<Inbox>) {
        let (key, uid) = (wish::key(&show.pod), show.pod.metadata.uid.clone().unwrap_or_default());
        let mut state = self.state();
        while state.tasks.try_join_next().is_some() {}
        let slot = Slot { show, ack, dirty: true };
        if state.slots.insert((key.clone(), uid.clone()), slot).is_none() {
            let writer = self.clone();
            state.tasks.spawn(async move { writer.write(key, uid).await });
        }
    }

    /// Ends all writers.
    pub(crate) async fn close(&self) {
        let mut tasks = std::mem::take(&mut self.state().tasks);
        tasks.shutdown().await;
    }

    async fn write(&self, key: PodKey, uid: String) {
        let mut backoff = Backoff::new(FIRST_DELAY, LONGEST_DELAY);
        let mut latest: Option<Pod> = None;
        while let Some((show, ack)) = self.take(&key, &uid) {
            match self.deliver(&key, &uid, &show, &mut latest).await {
                Delivery::Accepted => {
                    backoff.reset();
                    ack.accepted(show.version);
                }
                Delivery::Gone => {
                    self.state().slots.remove(&(key, uid));
                    ack.accepted(show.version);
                    return;
                }
                Delivery::Failed(error) => {
                    tracing::warn!(pod = %key, error = %error, "pod not updated yet");
                    self.again(&key, &uid);
                    tokio::time::sleep(backoff.next(self.world.as_ref())).await;
                }
                Delivery::Contended => {
                    self.again(&key, &uid);
                    tokio::time::sleep(backoff.next(self.world.as_ref())).await;
                }
            }
        }
    }

    /// The newest view, if it was not delivered yet; else the slot is closed.
    fn take(&self, key: &PodKey, uid: &str) -> Option<(Show, Arc<Inbox>)> {
        let mut state = self.state();
        let id = (key.clone(), uid.to_owned());
        let slot = state.slots.get_mut(&id)?;
        if !std::mem::take(&mut slot.dirty) {
            state.slots.remove(&id);
            return None;
        }
        Some((slot.show.clone(), Arc::clone(&slot.ack)))
    }

    fn again(&self, key: &PodKey, uid: &str) {
        if let Some(slot) = self.state().slots.get_mut(&(key.clone(), uid.to_owned())) {
            slot.dirty = true;
        }
    }

    async fn deliver(&self, key: &PodKey, uid: &str, show: &Show, latest: &mut Option<Pod>) -> Delivery {
        let Ok(_permit) = self.permits.acquire().await else { return Delivery::Gone };
        let api: Api<Pod> = Api::namespaced(self.client.0.clone(), &key.namespace);
        let seen = self.table.get(uid).unwrap_or_else(|| Arc::clone(&show.pod));
        let mut pod = match latest.take() {
            Some(pod) if newer(&pod, &seen) => pod,
            _ => seen.as_ref().clone(),
        };
        for _ in 0..CONFLICTS {
            match self.send(&api, key, show, pod).await {
                Ok(written) => {
                    *latest = Some(written);
                    return Delivery::Accepted;
                }
                Err(kube::Error::Api(status)) if status.code == 404 => return Delivery::Gone,
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Delivery::Failed(error),
            }
            // Somebody else wrote meanwhile, or the pod was made anew.
            match api.get_opt(&key.name).await {
                Ok(Some(fresh)) if fresh.metadata.uid.as_deref() == Some(uid) => pod = fresh,
                Ok(_) => return Delivery::Gone,
                Err(error) => return Delivery::Failed(error),
            }
        }
        Delivery::Contended
    }

    async fn send(&self, api: &Api<Pod>, key: &PodKey, show: &Show, mut pod: Pod) -> kube::Result<Pod> {
        let params = PatchParams::default();
        if let Some(body) = status_patch(&pod, &show.view, &self.host, self.world.now()) {
            pod = api.patch_status(&key.name, &params, &merge(body)).await?;
        }
        if let Some(body) = annotation_patch(&pod, &show.view) {
            pod = api.patch(&key.name, &params, &merge(body)).await?;
        }
        Ok(pod)
    }
}

const fn merge(body: Value) -> Patch<Value> {
    Patch::Merge(body)
}

/// Whether our last answer is at least as new as what the watch brought. Versions are opaque; but ours
/// was read later than what the watch had then, so it is preferred unless the watch moved on.
fn newer(ours: &Pod, seen: &Pod) -> bool {
    let number = |pod: &Pod| pod.metadata.resource_version.as_deref().and_then(|v| v.parse::<u64>().ok());
    ours.metadata.uid == seen.metadata.uid && number(ours) >= number(seen)
}
