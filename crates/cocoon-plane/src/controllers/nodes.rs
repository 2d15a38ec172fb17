//! Node health, pods of nodes that are gone, old events.
//!
//! A node whose lease and heartbeat stand still for [`GRACE`] becomes `Ready=Unknown`; its agent's next status
//! write heals it. No pod is evicted for that. Pods that are being deleted and whose node object is gone for
//! [`GRACE`] are removed: nobody is left to finish them; pods that nobody deletes are left alone.
//! Staleness is measured by the monotonic clock from when a value was first seen, so neither a wrong clock of
//! a node nor a restart of the plane makes a node look dead.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::{emit, row};
use crate::{
    error::ApiError,
    json::{list, text},
    objects::WriteOptions,
    plane::Inner,
    rules::{self, DeleteOptions, Part, set_condition},
    store::{Filter, Object},
};

/// How long a node may be silent.
const GRACE: Duration = Duration::from_secs(40);
const TICK: Duration = Duration::from_secs(5);
/// How long an event is kept after it was seen last.
const EVENT_LIFE: i64 = 3600;
/// Ticks between two looks for old events.
const SWEEP: u32 = 12;

/// Values that should move, with the time at which each was first seen.
#[derive(Debug, Default)]
struct Seen(BTreeMap<String, (String, Instant)>);

impl Seen {
    /// How long `key` has had `value`.
    fn since(&mut self, key: &str, value: &str, now: Instant) -> Duration {
        match self.0.get(key) {
            Some((known, since)) if known == value => now.duration_since(*since),
            _ => {
                self.0.insert(key.to_owned(), (value.to_owned(), now));
                Duration::ZERO
            }
        }
    }

    fn keep(&mut self, wanted: impl Fn(&str) -> bool) {
        self.0.retain(|key, _| wanted(key));
    }
}

/// Runs until `shutdown`.
pub(super) async fn run(inner: Arc<Inner>, shutdown: CancellationToken) {
    let (mut beats, mut missing) = (Seen::default(), Seen::default());
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut count = 0_u32;
    while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
        let now = inner.objects.world().instant();
        let mut done = watch_nodes(&inner, &mut beats, now).await;
        done = done.and(finish_orphans(&inner, &mut missing, now).await);
        if count.is_multiple_of(SWEEP) {
            done = done.and(sweep_events(&inner).await);
        }
        count = count.wrapping_add(1);
        if let Err(error) = done {
            tracing::warn!(%error, "node controller failed, trying again");
        }
    }
}

fn all(inner: &Inner, table: &'static str) -> Vec<Arc<Object>> {
    inner.objects.store().list(&Filter { table: Some(table), ..Filter::default() }).0
}

async fn watch_nodes(inner: &Inner, beats: &mut Seen, now: Instant) -> Result<(), ApiError> {
    let nodes = all(inner, "nodes");
    beats.keep(|name| nodes.iter().any(|node| &*node.key.name == name));
    let leases = row("leases.coordination.k8s.io")?;
    for node in nodes {
        let name = &*node.key.name;
        let lease = inner.objects.find(leases, "kube-node-lease", name).map(|lease| lease.value());
        let renewed = lease.as_ref().map_or("", |lease| text(lease, "/spec/renewTime"));
        let value = node.value();
        let beat =
            format!("{renewed} {}", ready(&value).map_or("", |ready| text(ready, "/lastHeartbeatTime")));
        if beats.since(name, &beat, now) > GRACE
            && ready(&value).is_none_or(|r| text(r, "/status") != "Unknown")
        {
            lose(inner, &node, &value).await?;
        }
    }
    Ok(())
}

fn ready(node: &Value) -> Option<&Value> {
    list(node, "/status/conditions").iter().find(|condition| text(condition, "/type") == "Ready")
}

async fn lose(inner: &Inner, node: &Object, value: &Value) -> Result<(), ApiError> {
    let kind = row("nodes")?;
    let now = rules::stamp(inner.objects.world().now());
    let mark = |mut value: Value| {
        rules::check_preconditions(kind, &value, &node.uid, "")?;
        let beat = ready(&value).map_or(Value::Null, |ready| ready["lastHeartbeatTime"].clone());
        let mut condition = json!({
            "type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.", "lastTransitionTime": now,
        });
        if !beat.is_null() {
            condition["lastHeartbeatTime"] = beat;
        }
        set_condition(&mut value, condition);
        Ok(value)
    };
    let name = &*node.key.name;
    match inner.objects.update(kind, "", name, Part::Inner, WriteOptions::default(), mark).await {
        Ok(_) => {
            let message = format!("Node {name} status is now: NodeNotReady");
            emit(inner, value, "Normal", "NodeNotReady", &message, "node-controller").await;
            Ok(())
        }
        Err(error) if matches!(error.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

async fn finish_orphans(inner: &Inner, missing: &mut Seen, now: Instant) -> Result<(), ApiError> {
    let (kind, nodes) = (row("pods")?, row("nodes")?);
    let pods: Vec<_> = all(inner, "pods")
        .into_iter()
        .filter(|pod| pod.deleting)
        .filter(|pod| {
            let node = pod.field(kind, "spec.nodeName");
            !node.is_empty() && inner.objects.find(nodes, "", node).is_none()
        })
        .collect();
    missing.keep(|uid| pods.iter().any(|pod| &*pod.uid == uid));
    for pod in pods {
        if missing.since(&pod.uid, "", now) > GRACE {
            let options =
                DeleteOptions { grace: Some(0), uid: (*pod.uid).into(), ..DeleteOptions::default() };
            match inner.objects.delete(kind, &pod.key.namespace, &pod.key.name, &options).await {
                Err(error) if !matches!(error.code, 404 | 409) => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

async fn sweep_events(inner: &Inner) -> Result<(), ApiError> {
    let kind = row("events")?;
    let now = inner.objects.world().now();
    for event in all(inner, "events") {
        let value = event.value();
        let seen =
            ["/series/lastObservedTime", "/lastTimestamp", "/eventTime", "/metadata/creationTimestamp"]
                .iter()
                .filter_map(|path| text(&value, path).parse::<Timestamp>().ok())
                .max();
        if seen.is_none_or(|seen| now.as_second() - seen.as_second() > EVENT_LIFE) {
            let options = DeleteOptions { uid: (*event.uid).into(), ..DeleteOptions::default() };
            match inner.objects.delete(kind, &event.key.namespace, &event.key.name, &options).await {
                Err(error) if !matches!(error.code, 404 | 409) => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}
