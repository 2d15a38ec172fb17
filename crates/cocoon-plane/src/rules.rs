//! What a create, an update or a delete makes of an object: pure functions.
//!
//! Entry points: [`prepare_create`], [`prepare_update`], [`plan_delete`]. Invariants: system fields
//! (uid, creation and deletion stamps, generation) come from here alone; the status changes only
//! through the status subresource, everything else only outside of it.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    error::{ApiError, Causes},
    json::{self, int, list, text},
    resources::Kind,
    validate,
};

/// Fields of the metadata that clients do not set.
const SYSTEM: [&str; 6] = [
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "namespace",
];
pub(crate) const FOREGROUND: &str = "foregroundDeletion";
pub(crate) const ORPHAN: &str = "orphan";

/// What part of an object a write may touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Everything but the status.
    Main,
    /// The status, labels and annotations.
    Status,
    /// Inside the plane: anything, without rules about changes.
    Inner,
}

/// A stamp as the API writes it: whole seconds.
pub(crate) fn stamp(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Drops what a client cannot set, fills in what the server sets. The name must be there.
pub(crate) fn prepare_create(
    kind: &Kind,
    value: &mut Value,
    namespace: &str,
    uid: String,
    now: Timestamp,
) -> Result<(), ApiError> {
    let metadata = json::object(value, "metadata");
    for field in SYSTEM.iter().chain(&["selfLink", "managedFields", "resourceVersion"]) {
        metadata.remove(*field);
    }
    metadata.insert("uid".into(), uid.into());
    metadata.insert("creationTimestamp".into(), stamp(now).into());
    if kind.namespaced {
        metadata.insert("namespace".into(), namespace.into());
    }
    if kind.generation {
        metadata.insert("generation".into(), 1.into());
    }
    if kind.status && !kind.keeps_status {
        json::map(value).remove("status");
    }
    // What is decided at creation rests on the defaults: a pod's class on its requests.
    (kind.hooks.default)(value);
    (kind.hooks.create)(value);
    let mut causes = Causes::default();
    check_name(kind, value, &mut causes);
    validate::metadata(value, &mut causes);
    (kind.hooks.validate)(value, &mut causes);
    causes.into_result(kind, text(value, "/metadata/name"))
}

fn check_name(kind: &Kind, value: &Value, causes: &mut Causes) {
    let name = text(value, "/metadata/name");
    if name.is_empty() {
        causes.required("metadata.name", "name or generateName is required");
    } else if let Err(why) = (kind.hooks.name)(name) {
        causes.invalid("metadata.name", &name.into(), &why);
    }
}

/// `new` with everything that this write may not touch taken from `old`, and checked.
pub(crate) fn prepare_update(kind: &Kind, old: &Value, new: Value, part: Part) -> Result<Value, ApiError> {
    let name = text(old, "/metadata/name");
    check_preconditions(kind, old, text(&new, "/metadata/uid"), text(&new, "/metadata/resourceVersion"))?;
    let mut new = match part {
        Part::Status => status_of(old, new),
        Part::Main | Part::Inner => new,
    };
    keep_system_fields(kind, old, &mut new);
    kind.stamp(&mut new);
    if part == Part::Main {
        if kind.status {
            let status = old.get("status").cloned();
            json::put(json::map(&mut new), "status", status);
        }
        (kind.hooks.default)(&mut new);
        if kind.generation && old.get("spec") != new.get("spec") {
            raise_generation(&mut new);
        }
    }
    let mut causes = Causes::default();
    if part != Part::Inner {
        validate::metadata(&new, &mut causes);
        keep_finalizers_shrinking(old, &new, &mut causes);
        (kind.hooks.validate)(&new, &mut causes);
    }
    if part == Part::Main {
        (kind.hooks.update)(old, &new, &mut causes);
    }
    causes.into_result(kind, name)?;
    Ok(new)
}

/// A status write: only the status, labels and annotations come from the body.
fn status_of(old: &Value, mut new: Value) -> Value {
    let mut kept = old.clone();
    let class = old.pointer("/status/qosClass").cloned();
    json::put(json::map(&mut kept), "status", json::map(&mut new).remove("status"));
    if let (Some(class), Some(Value::Object(status))) = (class, kept.get_mut("status")) {
        // Decided at creation; a writer of the whole status need not know it.
        json::default(status, "qosClass", class);
    }
    let metadata = json::object(&mut kept, "metadata");
    for field in ["labels", "annotations"] {
        json::put(metadata, field, new.pointer(&format!("/metadata/{field}")).cloned());
    }
    kept
}

fn keep_system_fields(kind: &Kind, old: &Value, new: &mut Value) {
    let metadata = json::object(new, "metadata");
    metadata.remove("managedFields");
    metadata.remove("selfLink");
    for field in SYSTEM.iter().chain(&["name", "resourceVersion", "generateName"]) {
        json::put(metadata, field, old.pointer(&format!("/metadata/{field}")).cloned());
    }
    if !kind.generation {
        metadata.remove("generation");
    }
}

fn keep_finalizers_shrinking(old: &Value, new: &Value, causes: &mut Causes) {
    if text(old, "/metadata/deletionTimestamp").is_empty() {
        return;
    }
    let before = list(old, "/metadata/finalizers");
    if list(new, "/metadata/finalizers").iter().any(|finalizer| !before.contains(finalizer)) {
        let why = "no new finalizers can be added if the object is being deleted";
        causes.forbidden("metadata.finalizers", why);
    }
}

fn raise_generation(value: &mut Value) {
    let generation = int(value, "/metadata/generation").unwrap_or_default();
    json::object(value, "metadata").insert("generation".into(), (generation + 1).into());
}

/// 409 unless `uid` and `revision`, where given, are the object's.
pub(crate) fn check_preconditions(
    kind: &Kind,
    old: &Value,
    uid: &str,
    revision: &str,
) -> Result<(), ApiError> {
    let name = text(old, "/metadata/name");
    let own = text(old, "/metadata/uid");
    if !uid.is_empty() && uid != own {
        let why = format!("Precondition failed: UID in precondition: {uid}, UID in object meta: {own}");
        return Err(ApiError::conflict(kind, name, &why));
    }
    if !revision.is_empty() && revision != "0" && revision != text(old, "/metadata/resourceVersion") {
        return Err(ApiError::modified(kind, name));
    }
    Ok(())
}

/// Whether an object that is being deleted has nothing left to wait for.
pub(crate) fn is_finished(value: &Value) -> bool {
    !text(value, "/metadata/deletionTimestamp").is_empty()
        && list(value, "/metadata/finalizers").is_empty()
        && list(value, "/spec/finalizers").is_empty()
        && int(value, "/metadata/deletionGracePeriodSeconds").unwrap_or_default() == 0
}

/// What to do with dependents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Propagation {
    #[default]
    Background,
    Foreground,
    Orphan,
}

/// How a delete was asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeleteOptions {
    pub(crate) grace: Option<i64>,
    pub(crate) uid: String,
    pub(crate) revision: String,
    pub(crate) propagation: Propagation,
    pub(crate) dry_run: bool,
}

/// What a delete does.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Deletion {
    /// It is already on its way.
    Nothing,
    /// Someone must finish it.
    Mark(Value),
    Remove,
}

/// Decides a delete: what has finalizers or time left is marked, the rest is removed.
pub(crate) fn plan_delete(
    kind: &Kind,
    old: &Value,
    options: &DeleteOptions,
    now: Timestamp,
) -> Result<Deletion, ApiError> {
    check_preconditions(kind, old, &options.uid, &options.revision)?;
    let grace = if kind.table == "pods" { pod_grace(old, options.grace) } else { 0 };
    let deleting = !text(old, "/metadata/deletionTimestamp").is_empty();
    let current = int(old, "/metadata/deletionGracePeriodSeconds").unwrap_or_default();
    let mut marked = old.clone();
    let added = add_propagation(&mut marked, options.propagation);
    if deleting && grace >= current && !added && !is_finished(old) {
        return Ok(Deletion::Nothing);
    }
    let grace = if deleting { grace.min(current) } else { grace };
    if !deleting || grace < current {
        let until = now.checked_add(jiff::SignedDuration::from_secs(grace)).unwrap_or(now);
        let metadata = json::object(&mut marked, "metadata");
        metadata.insert("deletionTimestamp".into(), stamp(until).into());
        metadata.insert("deletionGracePeriodSeconds".into(), grace.into());
    }
    if !deleting && kind.generation {
        raise_generation(&mut marked);
    }
    if kind.table == "namespaces" {
        json::object(&mut marked, "status").insert("phase".into(), "Terminating".into());
    }
    if is_finished(&marked) { Ok(Deletion::Remove) } else { Ok(Deletion::Mark(marked)) }
}

/// Only a pod that a node may be running is given time.
fn pod_grace(pod: &Value, asked: Option<i64>) -> i64 {
    let over = matches!(text(pod, "/status/phase"), "Succeeded" | "Failed");
    if over || text(pod, "/spec/nodeName").is_empty() {
        return 0;
    }
    match asked.or_else(|| int(pod, "/spec/terminationGracePeriodSeconds")).unwrap_or(30) {
        negative if negative < 0 => 1,
        grace => grace,
    }
}

/// Adds the finalizer of a foreground or orphaning delete; true if it was not there.
fn add_propagation(value: &mut Value, propagation: Propagation) -> bool {
    let finalizer = match propagation {
        Propagation::Background => return false,
        Propagation::Foreground => FOREGROUND,
        Propagation::Orphan => ORPHAN,
    };
    if list(value, "/metadata/finalizers").iter().any(|known| known == finalizer) {
        return false;
    }
    if let Some(metadata) = value.get_mut("metadata") {
        json::array(metadata, "finalizers").push(finalizer.into());
    }
    true
}

/// `pod`, bound to `node`.
pub(crate) fn bound(kind: &Kind, mut pod: Value, node: &str, now: &str) -> Result<Value, ApiError> {
    let name = text(&pod, "/metadata/name");
    let current = text(&pod, "/spec/nodeName");
    if !current.is_empty() {
        let why = format!("pod {name} is already assigned to node \"{current}\"");
        return Err(ApiError::conflict(kind, name, &why));
    }
    if !text(&pod, "/metadata/deletionTimestamp").is_empty() {
        let why = format!("pod {name} is being deleted, cannot be assigned to a host");
        return Err(ApiError::conflict(kind, name, &why));
    }
    json::object(&mut pod, "spec").insert("nodeName".into(), node.into());
    let condition = json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": now });
    set_condition(&mut pod, condition);
    Ok(pod)
}

/// Puts a condition in the place of the one with its type; true if something changed.
pub(crate) fn set_condition(object: &mut Value, condition: Value) -> bool {
    let status = json::map(object).entry("status").or_insert(Value::Null);
    let conditions = json::array(status, "conditions");
    match conditions.iter_mut().find(|old| old["type"] == condition["type"]) {
        Some(old) if *old == condition => false,
        Some(old) => {
            *old = condition;
            true
        }
        None => {
            conditions.push(condition);
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::by_table;

    fn now() -> Timestamp {
        "2026-01-01T00:00:00Z".parse().unwrap()
    }

    fn pod(node: &str, extra: Value) -> Value {
        let mut pod = json!({
            "metadata": { "name": "a", "uid": "u", "resourceVersion": "5", "generation": 1 },
            "spec": { "nodeName": node, "terminationGracePeriodSeconds": 30 }, "status": { "phase": "Running" }
        });
        json_patch::merge(&mut pod, &extra);
        pod
    }

    fn plan(pod: &Value, grace: Option<i64>, propagation: Propagation) -> Deletion {
        let options = DeleteOptions { grace, propagation, ..DeleteOptions::default() };
        plan_delete(by_table("pods").unwrap(), pod, &options, now()).unwrap()
    }

    #[test]
    fn only_a_pod_that_a_node_may_run_is_given_time() {
        let background = Propagation::Background;
        assert_eq!(plan(&pod("", json!({})), None, background), Deletion::Remove);
        assert_eq!(
            plan(&pod("n", json!({ "status": { "phase": "Failed" } })), None, background),
            Deletion::Remove
        );
        assert_eq!(plan(&pod("n", json!({})), Some(0), background), Deletion::Remove);
        let Deletion::Mark(marked) = plan(&pod("n", json!({})), None, background) else {
            panic!("not marked")
        };
        assert_eq!(text(&marked, "/metadata/deletionTimestamp"), "2026-01-01T00:00:30Z");
        assert_eq!(int(&marked, "/metadata/deletionGracePeriodSeconds"), Some(30));
        assert_eq!(int(&marked, "/metadata/generation"), Some(2));
        assert_eq!(plan(&marked, None, background), Deletion::Nothing);
        assert_eq!(plan(&marked, Some(60), background), Deletion::Nothing);
        let Deletion::Mark(sooner) = plan(&marked, Some(1), background) else { panic!("not shortened") };
        assert_eq!(int(&sooner, "/metadata/deletionGracePeriodSeconds"), Some(1));
        assert_eq!(plan(&marked, Some(0), background), Deletion::Remove);
    }

    #[test]
    fn finalizers_hold_an_object_until_they_are_gone() {
        let held = pod("", json!({ "metadata": { "finalizers": ["x/y"] } }));
        let Deletion::Mark(mut marked) = plan(&held, None, Propagation::Background) else {
            panic!("not marked")
        };
        assert!(!is_finished(&marked));
        marked["metadata"]["finalizers"] = json!([]);
        assert!(is_finished(&marked));
        assert!(matches!(plan(&pod("", json!({})), None, Propagation::Foreground), Deletion::Mark(_)));
    }

    #[test]
    fn preconditions_that_do_not_hold_are_conflicts() {
        let options = DeleteOptions { uid: "other".into(), ..DeleteOptions::default() };
        let error = plan_delete(by_table("pods").unwrap(), &pod("", json!({})), &options, now()).unwrap_err();
        assert_eq!((error.code, error.reason), (409, "Conflict"));
        let stale = json!({ "metadata": { "resourceVersion": "4" } });
        let error =
            prepare_update(by_table("pods").unwrap(), &pod("", json!({})), stale, Part::Main).unwrap_err();
        assert_eq!(error.code, 409);
    }

    #[test]
    fn a_status_write_changes_status_labels_and_annotations_only() {
        let old = pod(
            "n",
            json!({ "metadata": { "ownerReferences": [] }, "spec": { "containers": [{ "name": "c", "image": "i" }] } }),
        );
        let mut old = old;
        (by_table("pods").unwrap().hooks.default)(&mut old);
        let body = json!({
            "metadata": { "labels": { "a": "b" }, "finalizers": ["x/y"], "name": "z" },
            "spec": { "nodeName": "other" }, "status": { "phase": "Failed" }
        });
        let new = prepare_update(by_table("pods").unwrap(), &old, body, Part::Status).unwrap();
        assert_eq!(new["spec"], old["spec"]);
        assert_eq!(text(&new, "/status/phase"), "Failed");
        assert_eq!(new["metadata"]["labels"], json!({ "a": "b" }));
        assert_eq!(new["metadata"].get("finalizers"), None);
        assert_eq!(text(&new, "/metadata/name"), "a");
    }
}
