//! Rule (a) of "one life of a hibernate tag": the tag goes once its pod is live and ready again.
//!
//! Entry point: [`run`]. The decision is [`may_drop`], a pure function. Invariants: a tag is deleted only if
//! it is the pod's own (its VM name follows from namespace and name, whatever the annotation says) and the
//! snapshot behind it is the one that the pod says it woke from (I3); a registry that cannot be asked changes
//! nothing (I5). A registry that refuses deletions gets an empty manifest annotated as consumed instead.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use cocoon_kit::{backoff::Backoff, failure, world::World};
use cocoon_meta::{
    HibernateState, LifecycleState, LifecycleStatus, VmSpec, is_pod_ready, vm_live, vm_name_for_pod,
    woken_from,
};
use cocoon_oci::{
    registry::{Registry, RegistryError},
    snapshot::{self, HIBERNATE_TAG, PullError},
};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use thiserror::Error;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Why a consumed tag is still there.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DropError {
    /// The tag could not be read.
    #[error("reading {0}:hibernate")]
    Read(String, #[source] PullError),
    /// The tag could not be deleted or emptied.
    #[error("dropping {0}:hibernate")]
    Delete(String, #[source] RegistryError),
}

/// What a pod allows: the repository whose `hibernate` tag may go, and the snapshot it woke from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Consumed {
    /// VM name, the repository.
    pub vm_name: String,
    /// Snapshot id.
    pub woken_from: String,
}

/// Whether this pod has consumed its tag: managed, live, ready, not asked to hibernate, not going away, and
/// the VM's name its own. The older unhashed name is refused: whether a node adopted the VM is not to be seen
/// here, and another pod could have the same.
#[must_use]
pub fn may_drop(pod: &Pod) -> Option<Consumed> {
    let spec = VmSpec::parse(pod);
    let woken_from = woken_from(pod)?.to_owned();
    let settled = vm_live(pod)
        && is_pod_ready(pod)
        && LifecycleStatus::read(pod).state == LifecycleState::Ready
        && !HibernateState::read(pod).0
        && pod.metadata.deletion_timestamp.is_none();
    (spec.managed && settled && owns_name(pod, &spec))
        .then_some(Consumed { vm_name: spec.vm_name, woken_from })
}

fn owns_name(pod: &Pod, spec: &VmSpec) -> bool {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    spec.vm_name == vm_name_for_pod(namespace, &pod.name_any())
}

/// Watches all pods and drops consumed tags until `shutdown`.
pub async fn run(
    client: Client,
    registry: Arc<dyn Registry>,
    world: Arc<dyn World>,
    shutdown: CancellationToken,
) {
    let mut dropper = Dropper::new(registry, world);
    let stream = watcher(Api::<Pod>::all(client), watcher::Config::default()).default_backoff();
    let mut stream = std::pin::pin!(stream);
    loop {
        let due = dropper.due();
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            event = stream.next() => match event {
                Some(Ok(event)) => dropper.see(event).await,
                Some(Err(error)) => tracing::debug!(%error, "watching pods"),
                None => return,
            },
            () = tokio::time::sleep_until(due) => dropper.retry().await,
        }
    }
}

/// The longest sleep when nothing is owed.
const IDLE: Duration = Duration::from_secs(60);

/// What could not be done yet.
struct Owed {
    consumed: Consumed,
    backoff: Backoff,
    /// When it is tried again, whatever else happens meanwhile.
    due: Instant,
}

struct Dropper {
    registry: Arc<dyn Registry>,
    world: Arc<dyn World>,
    /// Pod UID to the snapshot whose tag is known to be gone, so that later events cost nothing.
    done: BTreeMap<String, String>,
    /// Pod UID to what could not be done yet.
    owed: BTreeMap<String, Owed>,
    /// The pods of a list that is being read; those that are not in it went while nobody watched.
    listed: Option<BTreeSet<String>>,
}

impl Dropper {
    fn new(registry: Arc<dyn Registry>, world: Arc<dyn World>) -> Self {
        Self { registry, world, done: BTreeMap::new(), owed: BTreeMap::new(), listed: None }
    }

    async fn see(&mut self, event: watcher::Event<Pod>) {
        match event {
            watcher::Event::Apply(pod) => self.pod(&pod).await,
            watcher::Event::InitApply(pod) => {
                self.listed.get_or_insert_default().insert(pod.uid().unwrap_or_default());
                self.pod(&pod).await;
            }
            watcher::Event::Delete(pod) => {
                let uid = pod.uid().unwrap_or_default();
                self.done.remove(&uid);
                self.owed.remove(&uid);
            }
            watcher::Event::Init => self.listed = Some(BTreeSet::new()),
            watcher::Event::InitDone => {
                if let Some(listed) = self.listed.take() {
                    self.done.retain(|uid, _| listed.contains(uid));
                    self.owed.retain(|uid, _| listed.contains(uid));
                }
            }
        }
    }

    async fn pod(&mut self, pod: &Pod) {
        let uid = pod.uid().unwrap_or_default();
        let Some(consumed) = may_drop(pod) else {
            self.owed.remove(&uid);
            return;
        };
        let done = self.done.get(&uid) == Some(&consumed.woken_from);
        let waits = self.owed.get(&uid).is_some_and(|owed| owed.consumed == consumed);
        if !done && !waits {
            let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
            self.attempt(uid, consumed, backoff).await;
        }
    }

    fn due(&self) -> Instant {
        let first = self.owed.values().map(|owed| owed.due).min();
        first.unwrap_or_else(|| self.world.instant() + IDLE)
    }

    async fn retry(&mut self) {
        let now = self.world.instant();
        let due: Vec<String> =
            self.owed.iter().filter(|(_, owed)| owed.due <= now).map(|(uid, _)| uid.clone()).collect();
        for uid in due {
            if let Some(owed) = self.owed.remove(&uid) {
                self.attempt(uid, owed.consumed, owed.backoff).await;
            }
        }
    }

    async fn attempt(&mut self, uid: String, consumed: Consumed, mut backoff: Backoff) {
        match drop_tag(&*self.registry, &consumed).await {
            Ok(dropped) => {
                if dropped {
                    tracing::info!(
                        vm = consumed.vm_name,
                        snapshot = consumed.woken_from,
                        "consumed hibernate tag dropped"
                    );
                }
                self.owed.remove(&uid);
                self.done.insert(uid, consumed.woken_from);
            }
            Err(error) => {
                tracing::warn!(vm = consumed.vm_name, error = %failure::chain(&error), "a consumed hibernate tag stays for now");
                let due = self.world.instant() + backoff.next(&*self.world);
                self.owed.insert(uid, Owed { consumed, backoff, due });
            }
        }
    }
}

/// Drops the tag if the snapshot behind it is the consumed one; says whether it did.
pub async fn drop_tag(registry: &dyn Registry, consumed: &Consumed) -> Result<bool, DropError> {
    let name = &consumed.vm_name;
    let facts = snapshot::read(registry, name, HIBERNATE_TAG)
        .await
        .map_err(|error| DropError::Read(name.clone(), error))?;
    let Some(facts) = facts.filter(|facts| facts.snapshot_id == consumed.woken_from) else {
        return Ok(false);
    };
    snapshot::consume(registry, name, HIBERNATE_TAG, &facts)
        .await
        .map_err(|error| DropError::Delete(name.clone(), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The VM name of the pod `ns/a`.
    const NAME_OF_A: &str = "vk-ns-a-09ac74";

    /// A pod that has consumed its tag, with `change` applied to its JSON.
    fn pod(change: impl FnOnce(&mut serde_json::Value)) -> Pod {
        let mut pod = serde_json::json!({
            "metadata": {"name": "a", "namespace": "ns", "annotations": {
                "vm.cocoonstack.io/name": NAME_OF_A,
                "vm.cocoonstack.io/id": "VM",
                "vm.cocoonstack.io/woken-from": "SNAP",
                "vm.cocoonstack.io/lifecycle-state": "ready",
                "cocoonset.cocoonstack.io/managed": "true",
            }},
            "status": {
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": "agent", "ready": true, "restartCount": 0, "image": "", "imageID": "",
                    "state": {"running": {}}}],
            },
        });
        change(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    fn dropper() -> Dropper {
        let registry = Arc::new(cocoon_oci::memory::Memory::new());
        Dropper::new(registry, Arc::new(cocoon_kit::world::RealWorld))
    }

    #[tokio::test(start_paused = true)]
    async fn pods_that_went_while_nobody_watched_are_forgotten() {
        let mut dropper = dropper();
        for uid in ["stays", "went"] {
            dropper.see(watcher::Event::Apply(pod(|pod| pod["metadata"]["uid"] = uid.into()))).await;
        }
        assert_eq!(dropper.done.len(), 2);
        dropper.see(watcher::Event::Init).await;
        dropper.see(watcher::Event::InitApply(pod(|pod| pod["metadata"]["uid"] = "stays".into()))).await;
        dropper.see(watcher::Event::InitDone).await;
        assert_eq!(dropper.done.into_keys().collect::<Vec<_>>(), ["stays"]);
    }

    #[tokio::test(start_paused = true)]
    async fn events_neither_delay_nor_hasten_a_retry() {
        let mut dropper = dropper();
        let owed = pod(|pod| pod["metadata"]["uid"] = "u".into());
        let consumed = may_drop(&owed).unwrap();
        let due = Instant::now() + Duration::from_secs(30);
        let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
        dropper.owed.insert("u".into(), Owed { consumed, backoff, due });
        dropper.see(watcher::Event::Apply(owed)).await;
        dropper.retry().await;
        assert_eq!((dropper.due(), dropper.owed.len()), (due, 1));
        tokio::time::advance(Duration::from_secs(30)).await;
        dropper.retry().await;
        assert!(dropper.owed.is_empty());
    }

    #[test]
    fn a_live_ready_woken_pod_has_consumed_its_tag() {
        let consumed = may_drop(&pod(|_| {})).unwrap();
        assert_eq!(consumed, Consumed { vm_name: NAME_OF_A.into(), woken_from: "SNAP".into() });
    }

    #[test]
    fn a_tag_stays_while_anything_about_the_pod_is_unsettled() {
        type Change = fn(&mut serde_json::Value);
        let unsettled: [(&str, Change); 10] = [
            ("another pod's vm", |pod| {
                pod["metadata"]["annotations"]["vm.cocoonstack.io/name"] =
                    cocoon_meta::vm_name_for_pod("ns", "b").into()
            }),
            ("a name without its hash", |pod| {
                pod["metadata"]["annotations"]["vm.cocoonstack.io/name"] = "vk-ns-a".into()
            }),
            ("no vm name", |pod| pod["metadata"]["annotations"]["vm.cocoonstack.io/name"] = "".into()),
            ("unmanaged", |pod| {
                pod["metadata"]["annotations"]["cocoonset.cocoonstack.io/managed"] = "no".into()
            }),
            ("no vm", |pod| pod["metadata"]["annotations"]["vm.cocoonstack.io/id"] = "".into()),
            ("never woken", |pod| pod["metadata"]["annotations"]["vm.cocoonstack.io/woken-from"] = "".into()),
            ("not ready", |pod| pod["status"]["conditions"][0]["status"] = "False".into()),
            ("lifecycle", |pod| {
                pod["metadata"]["annotations"]["vm.cocoonstack.io/lifecycle-state"] = "creating".into()
            }),
            ("asked to sleep", |pod| {
                pod["metadata"]["annotations"]["vm.cocoonstack.io/hibernate"] = "true".into()
            }),
            ("going away", |pod| pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into()),
        ];
        for (what, change) in unsettled {
            assert_eq!(may_drop(&pod(change)), None, "{what}");
        }
    }
}
