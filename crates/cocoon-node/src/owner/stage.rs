//! A stage for owner tests: fake ports, a fake API server, and an agent that can be killed.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use cocoon_kit::world::RealWorld;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{
    Context,
    inbox::{Inbox, Listed},
};
use crate::{
    cluster::{Cluster, Show, Tone},
    config::NodeConfig,
    planner::{PAUSE_LIMIT, observation::PodKey},
    pods::{router::Router, table::Change},
    ports::{PortResult, Vms as _, fake::Fake},
    reason::{Reason, Trouble},
    status,
};

/// The fake API server.
#[derive(Debug, Default)]
pub(crate) struct Api {
    pods: Mutex<BTreeMap<String, Pod>>,
    pub(crate) events: Mutex<Vec<Trouble>>,
    /// The same, each time that it was said.
    pub(crate) said: Mutex<Vec<Trouble>>,
    pub(crate) writes: Mutex<u32>,
    /// How often a pod became ready.
    turned_ready: Mutex<u32>,
    /// When something was written, events too.
    pub(crate) written_at: Mutex<Vec<tokio::time::Instant>>,
    router: Mutex<Option<Weak<Router>>>,
}

impl Api {
    fn pods(&self) -> MutexGuard<'_, BTreeMap<String, Pod>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn route(&self, change: Change) {
        let router = self.router.lock().unwrap().as_ref().and_then(Weak::upgrade);
        if let Some(router) = router {
            router.route(change);
        }
    }

    /// How often a pod became ready.
    pub(crate) fn said_ready(&self) -> u32 {
        *self.turned_ready.lock().unwrap()
    }

    fn store(&self, pod: Pod) {
        let before =
            self.pods().get(pod.metadata.uid.as_deref().unwrap()).is_some_and(cocoon_meta::is_pod_ready);
        if cocoon_meta::is_pod_ready(&pod) && !before {
            *self.turned_ready.lock().unwrap() += 1;
        }
        self.pods().insert(pod.metadata.uid.clone().unwrap(), pod.clone());
        self.route(Change::Seen(Arc::new(pod)));
    }

    fn wrote(&self) {
        *self.writes.lock().unwrap() += 1;
        self.written_at.lock().unwrap().push(tokio::time::Instant::now());
    }

    fn merge(pod: &Pod, patch: &Value) -> Pod {
        let mut value = serde_json::to_value(pod).unwrap();
        json_patch::merge(&mut value, patch);
        serde_json::from_value(value).unwrap()
    }
}

#[async_trait]
impl Cluster for Api {
    fn show(&self, show: Show, ack: Arc<Inbox>) {
        let uid = show.pod.metadata.uid.clone().unwrap();
        let Some(mut pod) = self.pods().get(&uid).cloned() else { return ack.accepted(show.version) };
        let host = status::HostFacts::default();
        let status = status::status_patch(&pod, &show.view, &host, jiff::Timestamp::UNIX_EPOCH);
        let changed = status.is_some();
        for patch in [status].into_iter().flatten() {
            self.wrote();
            pod = Self::merge(&pod, &patch);
        }
        let annotations = status::annotation_patch(&pod, &show.view);
        let changed = changed || annotations.is_some();
        for patch in [annotations].into_iter().flatten() {
            self.wrote();
            pod = Self::merge(&pod, &patch);
        }
        if changed {
            self.store(pod);
        }
        ack.accepted(show.version);
    }

    fn event(&self, _key: &PodKey, _uid: &str, _tone: Tone, what: &Trouble) {
        self.said.lock().unwrap().push(what.clone());
        let mut events = self.events.lock().unwrap();
        if !events.contains(what) {
            events.push(what.clone());
            self.written_at.lock().unwrap().push(tokio::time::Instant::now());
        }
    }

    async fn finalise(&self, _key: &PodKey, uid: &str) -> PortResult<()> {
        let pod = self.pods().remove(uid);
        if let Some(pod) = pod {
            self.route(Change::Gone(Arc::new(pod)));
        }
        Ok(())
    }
}

/// Everything a test needs.
pub(crate) struct Stage {
    pub(crate) fake: Fake,
    pub(crate) api: Arc<Api>,
    pub(crate) context: Arc<Context>,
    router: Arc<Router>,
    registry: bool,
    pause_limit: Duration,
    poller: tokio::task::JoinHandle<()>,
}

impl Stage {
    pub(crate) async fn new(registry: bool) -> Self {
        let fake = Fake::default();
        fake.world().images.push("demo:latest".to_owned());
        Self::start(fake, Arc::new(Api::default()), registry, PAUSE_LIMIT)
    }

    /// The same with another limit for the pause of a guest.
    pub(crate) fn with_pause_limit(self, limit: Duration) -> Self {
        self.poller.abort();
        self.context.shutdown.cancel();
        Self::start(self.fake, self.api, self.registry, limit)
    }

    fn start(fake: Fake, api: Arc<Api>, registry: bool, pause_limit: Duration) -> Self {
        let context = Context::new(
            NodeConfig { pause_limit, ..NodeConfig::new("node") },
            fake.ports(registry),
            Arc::new(RealWorld),
            Arc::clone(&api) as _,
            CancellationToken::new(),
        );
        let router = Arc::new(Router::new(Arc::clone(&context)));
        let records: Vec<_> = fake.world().records.values().cloned().collect();
        records.into_iter().for_each(|record| context.recall(record));
        *api.router.lock().unwrap() = Some(Arc::downgrade(&router));
        let pods: Vec<Pod> = api.pods().values().cloned().collect();
        pods.into_iter().for_each(|pod| router.route(Change::Seen(Arc::new(pod))));
        context.open.cancel();
        let poller = tokio::spawn(poll(Arc::clone(&context), fake.clone()));
        let (watcher, ended) = (Arc::clone(&context), context.shutdown.clone());
        context.spawn(async move { crate::arrivals::watch(&watcher, ended).await });
        Self { fake, api, context, router, registry, pause_limit, poller }
    }

    /// Kills the agent where it is and starts it again.
    pub(crate) async fn restart(self) -> Self {
        self.poller.abort();
        self.context.kill().await;
        *self.api.router.lock().unwrap() = None;
        drop(self.router);
        Self::start(self.fake, self.api, self.registry, self.pause_limit)
    }

    pub(crate) fn apply(&self, pod: Pod) {
        self.api.store(pod);
    }

    /// Merges annotations into a pod (`None` removes).
    pub(crate) fn annotate(&self, uid: &str, changes: &[(&str, Option<&str>)]) {
        let annotations: BTreeMap<&str, Option<&str>> = changes.iter().copied().collect();
        let pod = self.api.pods()[uid].clone();
        self.api.store(Api::merge(&pod, &json!({"metadata": {"annotations": annotations}})));
    }

    pub(crate) fn delete(&self, uid: &str) {
        let pod = self.api.pods()[uid].clone();
        self.api.store(Api::merge(&pod, &json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})));
    }

    /// Takes the pod out of the API without any grace.
    pub(crate) fn force_delete(&self, uid: &str) {
        let pod = self.api.pods().remove(uid).unwrap();
        self.api.route(Change::Gone(Arc::new(pod)));
    }

    pub(crate) fn pod(&self, uid: &str) -> Option<Pod> {
        self.api.pods().get(uid).cloned()
    }

    pub(crate) fn annotation(&self, uid: &str, key: &str) -> String {
        let pod = self.pod(uid).unwrap_or_default();
        pod.metadata.annotations.unwrap_or_default().get(key).cloned().unwrap_or_default()
    }

    pub(crate) fn lifecycle(&self, uid: &str) -> String {
        self.annotation(uid, "vm.cocoonstack.io/lifecycle-state")
    }

    pub(crate) fn told(&self, reason: Reason) -> bool {
        self.api.events.lock().unwrap().iter().any(|event| event.reason == reason)
    }

    /// Waits (in paused time) until `check` holds.
    pub(crate) async fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        for _ in 0..20_000 {
            if check(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!(
            "never: {what}\nevents {:#?}\npods {:#?}\nworld {:#?}",
            self.api.events.lock().unwrap(),
            self.api.pods(),
            self.fake.world()
        );
    }

    pub(crate) async fn until_lifecycle(&self, uid: &str, state: &str) {
        self.until(&format!("{uid} {state}"), |stage| stage.lifecycle(uid) == state).await;
    }

    pub(crate) fn assert_sound(&self) {
        let broken = self.fake.world().broken.clone();
        assert!(broken.is_empty(), "{broken:?}");
    }
}

async fn poll(context: Arc<Context>, fake: Fake) {
    loop {
        let asked = tokio::time::Instant::now();
        if let Ok(vms) = fake.list().await {
            for (name, inbox) in context.directory.owners() {
                let vm = vms.iter().find(|vm| vm.name == name).cloned();
                inbox.listed(Listed { vm, asked });
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Reason and message of the pod's condition `Ready`; `None`: it is true.
pub(crate) fn not_ready(stage: &Stage, uid: &str) -> Option<(String, String)> {
    let conditions = stage.pod(uid)?.status?.conditions?;
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready")?;
    (ready.status == "False").then(|| (ready.reason.unwrap_or_default(), ready.message.unwrap_or_default()))
}

/// A managed pod of the default namespace that boots an image.
pub(crate) fn pod(name: &str, uid: &str, extra: &[(&str, &str)]) -> Pod {
    let mut annotations = json!({
        "vm.cocoonstack.io/name": cocoon_meta::vm_name_for_pod("default", name),
        "cocoonset.cocoonstack.io/managed": "true",
        "cocoonset.cocoonstack.io/mode": "run",
        "cocoonset.cocoonstack.io/image": "demo:latest",
        "cocoonset.cocoonstack.io/snapshot-policy": "always",
    });
    for (key, value) in extra {
        annotations[*key] = (*value).into();
    }
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "default", "uid": uid, "resourceVersion": "1",
            "annotations": annotations},
        "spec": {"nodeName": "node", "containers": [{"name": "agent", "image": "demo:latest"}]},
    }))
    .unwrap()
}
