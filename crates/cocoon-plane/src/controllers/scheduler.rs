//! Puts pods without a node on one.
//!
//! Entry point: [`run`]. Where a pod goes is decided in [`decision`], which is pure; this file keeps what is
//! known of nodes and pods, and writes what was decided. Invariant: a decision counts for the next one before
//! it is written.

mod decision;

use std::{collections::BTreeMap, sync::Arc};

use futures::{
    FutureExt as _,
    future::{BoxFuture, join_all},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use self::decision::{Decision, Node, Usage, decide};
use super::{emit, row};
use crate::{
    error::ApiError,
    json::{list, text},
    objects::WriteOptions,
    plane::Inner,
    resources::Requests,
    rules::{self, Part, bound, set_condition},
    selector::Selection,
    store::{Change, Filter, Notice, Object, Subscription},
};

/// Pods that are decided about together; their writes share a batch of the journal.
const CHUNK: usize = 32;

struct Scheduler {
    inner: Arc<Inner>,
    nodes: BTreeMap<String, Node>,
    usage: Usage,
    pods: Subscription,
    node_events: Subscription,
}

/// Runs until `shutdown`.
pub(super) async fn run(inner: Arc<Inner>, shutdown: CancellationToken) {
    while !shutdown.is_cancelled() {
        let mut scheduler = Scheduler::start(Arc::clone(&inner));
        // Ends when a queue overflowed: then everything is read anew.
        let _ = shutdown.run_until_cancelled(scheduler.work()).await;
    }
}

impl Scheduler {
    fn start(inner: Arc<Inner>) -> Self {
        let filter = |table| Filter { table: Some(table), ..Filter::default() };
        let mut store = inner.objects.store();
        let (pods, node_events) = (store.subscribe(&filter("pods")), store.subscribe(&filter("nodes")));
        let (known, _) = store.list(&filter("pods"));
        let (nodes, _) = store.list(&filter("nodes"));
        drop(store);
        let nodes =
            nodes.iter().map(|node| Node::of(&node.value())).map(|node| (node.name.clone(), node)).collect();
        let mut scheduler = Self { inner, nodes, usage: Usage::default(), pods, node_events };
        for pod in known {
            scheduler.count(Change::Added, &pod);
        }
        scheduler
    }

    async fn work(&mut self) {
        let mut due = true;
        let (mut pods, mut nodes) = (Vec::new(), Vec::new());
        loop {
            if due && let Err(error) = self.pass().await {
                tracing::warn!(%error, "scheduling failed, trying again");
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                continue;
            }
            tokio::select! {
                biased;
                count = self.node_events.queue.recv_many(&mut nodes, 256) => if count == 0 { return },
                count = self.pods.queue.recv_many(&mut pods, 256) => if count == 0 { return },
            }
            due = false;
            for notice in nodes.drain(..) {
                due |= self.see_node(&notice);
            }
            for notice in pods.drain(..) {
                if let Notice::Change(change, pod) = notice {
                    due |= self.count(change, &pod);
                }
            }
        }
    }

    /// True if the node changed in something that matters here.
    fn see_node(&mut self, notice: &Notice) -> bool {
        let Notice::Change(change, object) = notice else { return false };
        if *change == Change::Deleted {
            self.nodes.remove(&*object.key.name);
            return false;
        }
        let node = Node::of(&object.value());
        let old = self.nodes.insert(node.name.clone(), node.clone());
        old.as_ref() != Some(&node)
    }

    /// Keeps the usage; true if a pod waits or room was made.
    fn count(&mut self, change: Change, pod: &Object) -> bool {
        let Ok(kind) = row("pods") else { return false };
        let node = pod.field(kind, "spec.nodeName");
        let over = matches!(pod.field(kind, "status.phase"), "Succeeded" | "Failed");
        if change == Change::Deleted || over {
            return self.usage.remove(&pod.uid);
        }
        if node.is_empty() {
            return true;
        }
        // Requests of a pod never change; only its node does, once.
        if !self.usage.knows(&pod.uid) {
            self.usage.add(&pod.uid, node, Requests::of(&pod.value()));
        }
        false
    }

    /// Decides about all pods that wait, oldest first.
    async fn pass(&mut self) -> Result<(), ApiError> {
        let kind = row("pods")?;
        let selection = Selection::parse(kind, "", "spec.nodeName=").map_err(ApiError::internal)?;
        let waiting = Filter { table: Some("pods"), namespace: None, selection };
        let (objects, _) = self.inner.objects.store().list(&waiting);
        let mut pods: Vec<_> = objects
            .into_iter()
            .filter(|object| !object.deleting)
            .map(|object| (text(&object.value(), "/metadata/creationTimestamp").to_owned(), object))
            .collect();
        pods.sort_by(|(a, x), (b, y)| (a, &x.key).cmp(&(b, &y.key)));
        for pods in pods.chunks(CHUNK) {
            self.place(pods.iter().map(|(_, object)| object)).await?;
        }
        Ok(())
    }

    /// Decides one after the other, writes side by side.
    async fn place(&mut self, pods: impl Iterator<Item = &Arc<Object>>) -> Result<(), ApiError> {
        let mut decided = Vec::new();
        for object in pods {
            let pod = object.value();
            let gated = !list(&pod, "/spec/schedulingGates").is_empty();
            if gated || text(&pod, "/spec/schedulerName") != "default-scheduler" {
                continue;
            }
            let decision = decide(&pod, self.nodes.values(), &self.usage);
            if let Decision::Bind(node) = &decision {
                // Counted at once: the next pod must see it.
                self.usage.add(&object.uid, node, Requests::of(&pod));
            }
            decided.push((pod, object, decision));
        }
        let this = &*self;
        let writes: Vec<BoxFuture<'_, Result<bool, ApiError>>> = decided
            .iter()
            .map(|(pod, object, decision)| this.carry_out(pod, object, decision).boxed())
            .collect();
        let done = join_all(writes).await;
        for ((_, object, _), done) in decided.iter().zip(&done) {
            if !matches!(done, Ok(true)) {
                self.usage.remove(&object.uid);
            }
        }
        done.into_iter().find_map(Result::err).map_or(Ok(()), Err)
    }

    /// True if what was decided stands.
    async fn carry_out(&self, pod: &Value, object: &Object, decision: &Decision) -> Result<bool, ApiError> {
        match decision {
            Decision::Bind(node) => self.bind(pod, object, node).await,
            Decision::Nowhere(why) => self.complain(pod, object, why).await.map(|()| true),
        }
    }

    /// True if the pod is now bound to `node`.
    async fn bind(&self, pod: &Value, object: &Object, node: &str) -> Result<bool, ApiError> {
        let kind = row("pods")?;
        let now = rules::stamp(self.inner.objects.world().now());
        let bind = |old: Value| {
            rules::check_preconditions(kind, &old, &object.uid, "")?;
            bound(kind, old, node, &now)
        };
        let (objects, key) = (&self.inner.objects, &object.key);
        let options = WriteOptions::default();
        match objects.update(kind, &key.namespace, &key.name, Part::Inner, options, bind).await {
            Ok(_) => {
                let message = format!("Successfully assigned {}/{} to {node}", key.namespace, key.name);
                emit(&self.inner, pod, "Normal", "Scheduled", &message, "default-scheduler").await;
                Ok(true)
            }
            // Deleted, replaced or bound by somebody else meanwhile: its events come.
            Err(error) if matches!(error.code, 404 | 409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes why a pod waits, once.
    async fn complain(&self, pod: &Value, object: &Object, why: &str) -> Result<(), ApiError> {
        let kind = row("pods")?;
        let known = list(pod, "/status/conditions").iter().any(|c| {
            text(c, "/type") == "PodScheduled" && text(c, "/status") == "False" && text(c, "/message") == why
        });
        if known {
            return Ok(());
        }
        let now = rules::stamp(self.inner.objects.world().now());
        let tell = |mut old: Value| {
            rules::check_preconditions(kind, &old, &object.uid, "")?;
            let condition = json!({
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why,
                "lastTransitionTime": now,
            });
            if text(&old, "/spec/nodeName").is_empty() {
                set_condition(&mut old, condition);
            }
            Ok(old)
        };
        let (namespace, name) = (&object.key.namespace, &object.key.name);
        match self
            .inner
            .objects
            .update(kind, namespace, name, Part::Inner, WriteOptions::default(), tell)
            .await
        {
            Ok(_) => {
                emit(&self.inner, pod, "Warning", "FailedScheduling", why, "default-scheduler").await;
                Ok(())
            }
            Err(error) if matches!(error.code, 404 | 409) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
