//! From a view to the bodies of patches. Pure.
//!
//! Entry points: [`status_patch`] and [`annotation_patch`]; `None` says that the API has it already.
//! Invariants: conditions of others are kept; a transition time changes only with its status; every body
//! carries the UID (I8), a status body also the resourceVersion it was computed from.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use serde_json::{Map, Value, json};

use crate::view::{Container, View};

/// Conditions that are the agent's to write.
const OURS: [&str; 3] = ["Initialized", "Ready", "ContainersReady"];

/// Facts of the node that every pod status carries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HostFacts {
    /// The node's address.
    pub address: String,
}

/// The merge patch for `/status`, or `None` when the pod shows it already.
#[must_use]
pub(crate) fn status_patch(pod: &Pod, view: &View, host: &HostFacts, now: Timestamp) -> Option<Value> {
    let wanted = status(pod, view, host, now);
    let current = serde_json::to_value(&pod.status).unwrap_or(Value::Null);
    let mut merged = current.clone();
    json_patch::merge(&mut merged, &wanted);
    if normalised(merged) == normalised(current) {
        return None;
    }
    let metadata = json!({"uid": pod.metadata.uid, "resourceVersion": pod.metadata.resource_version});
    Some(json!({"metadata": metadata, "status": wanted}))
}

/// Through the typed form, so that two spellings of one value compare equal.
fn normalised(value: Value) -> Value {
    let typed: Option<k8s_openapi::api::core::v1::PodStatus> = serde_json::from_value(value).ok();
    serde_json::to_value(typed).unwrap_or(Value::Null)
}

/// The merge patch for annotations, or `None` when the pod has them already.
#[must_use]
pub(crate) fn annotation_patch(pod: &Pod, view: &View) -> Option<Value> {
    let present = pod.metadata.annotations.as_ref();
    let changes: cocoon_meta::AnnotationChanges = view
        .annotations
        .iter()
        .filter(|(key, value)| present.and_then(|map| map.get(*key)) != value.as_ref())
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    if changes.is_empty() {
        return None;
    }
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    Some(cocoon_meta::annotations_merge_patch_for(&changes, uid, None))
}

fn status(pod: &Pod, view: &View, host: &HostFacts, now: Timestamp) -> Value {
    let old = pod.status.clone().unwrap_or_default();
    let start = old.start_time.as_ref().map(|time| time.0).or(view.accepted);
    let ips: Vec<Value> = view.ip.iter().map(|ip| json!({"ip": ip.to_string()})).collect();
    let mut out = Map::new();
    let mut set = |key: &str, value: Value| out.insert(key.to_owned(), value);
    set("phase", view.phase.word().into());
    set("conditions", conditions(&old.conditions.unwrap_or_default(), view, now));
    set("podIP", view.ip.map_or(Value::Null, |ip| ip.to_string().into()));
    set("podIPs", if ips.is_empty() { Value::Null } else { ips.into() });
    if !host.address.is_empty() {
        set("hostIP", host.address.clone().into());
        set("hostIPs", json!([{"ip": host.address}]));
    }
    if let Some(start) = start {
        set("startTime", time(start));
    }
    set("containerStatuses", json!([container(pod, view, now)]));
    let (reason, message) = match (&view.container, view.phase) {
        (Container::Terminated { why, .. }, crate::view::PodPhase::Failed) => {
            (why.reason.to_string().into(), why.message.clone().into())
        }
        _ => (Value::Null, Value::Null),
    };
    set("reason", reason);
    set("message", message);
    Value::Object(out)
}

fn time(at: Timestamp) -> Value {
    // Kubernetes keeps whole seconds; more would differ from what comes back.
    Timestamp::from_second(at.as_second()).map_or(Value::Null, |at| at.to_string().into())
}

fn conditions(old: &[PodCondition], view: &View, now: Timestamp) -> Value {
    let foreign = old.iter().filter(|condition| !OURS.contains(&condition.type_.as_str()));
    let mut all: Vec<Value> = foreign.map(|c| serde_json::to_value(c).unwrap_or(Value::Null)).collect();
    for kind in OURS {
        let why = view.not_ready.as_ref().filter(|_| kind != "Initialized");
        let status = if why.is_some() { "False" } else { "True" };
        let before = old.iter().find(|condition| condition.type_ == kind && condition.status == status);
        let since = before.and_then(|c| c.last_transition_time.as_ref()).map_or(now, |time| time.0);
        let mut condition = json!({"type": kind, "status": status, "lastTransitionTime": time(since)});
        if let Some(why) = why {
            condition["reason"] = why.reason.to_string().into();
            condition["message"] = why.message.clone().into();
        }
        all.push(condition);
    }
    all.into()
}

fn container(pod: &Pod, view: &View, now: Timestamp) -> Value {
    let spec = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    let name = spec.map_or("agent", |container| container.name.as_str());
    let image = spec.and_then(|container| container.image.clone()).unwrap_or_default();
    let old = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref()?.first());
    let running = matches!(view.container, Container::Running(_));
    let state = match &view.container {
        Container::Waiting(why) => {
            json!({"waiting": {"reason": why.reason.to_string(), "message": why.message}})
        }
        Container::Running(since) => {
            let shown = old.and_then(|status| status.state.as_ref()?.running.as_ref()?.started_at.as_ref());
            let since = since.or(shown.map(|time| time.0)).unwrap_or(now);
            json!({"running": {"startedAt": time(since)}})
        }
        Container::Terminated { code, why } => {
            let shown =
                old.and_then(|status| status.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref());
            let at = shown.map_or(now, |time| time.0);
            json!({"terminated": {"exitCode": code, "reason": why.reason.to_string(), "message": why.message,
                "finishedAt": time(at), "startedAt": time(view.accepted.unwrap_or(at))}})
        }
    };
    let mut out = json!({
        "name": name, "image": image, "imageID": image, "state": state, "lastState": {},
        "ready": running && view.not_ready.is_none(), "started": running, "restartCount": view.restarts,
    });
    if !view.vm_id.is_empty() {
        out["containerID"] = format!("cocoon://{}", view.vm_id).into();
    }
    out
}
