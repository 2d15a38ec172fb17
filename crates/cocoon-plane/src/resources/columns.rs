//! What `kubectl get` shows of each kind.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::json::{flag, int, list, text};

/// A table column.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) format: &'static str,
    pub(crate) about: &'static str,
    /// Shown only with `-o wide`.
    pub(crate) wide: bool,
}

const fn column(name: &'static str, about: &'static str) -> Column {
    Column { name, kind: "string", format: "", about, wide: false }
}

const fn wide(name: &'static str, about: &'static str) -> Column {
    Column { name, kind: "string", format: "", about, wide: true }
}

const NAME: Column = Column {
    name: "Name",
    kind: "string",
    format: "name",
    about: "Name must be unique within a namespace.",
    wide: false,
};
const AGE: Column = column("Age", "How long ago the object was created.");

pub(super) const NAME_AND_AGE: &[Column] = &[NAME, AGE];
pub(super) const POD: &[Column] = &[
    NAME,
    column("Ready", "Ready containers of all."),
    column("Status", "What the pod is doing."),
    column("Restarts", "How often its containers were restarted, and when last."),
    AGE,
    wide("IP", "Address of the pod."),
    wide("Node", "Where it runs."),
    wide("Nominated Node", "Where it may run once others left."),
    wide("Readiness Gates", "Gates passed of all."),
];
pub(super) const NODE: &[Column] = &[
    NAME,
    column("Status", "Whether it takes pods."),
    column("Roles", "Its roles."),
    AGE,
    column("Version", "Version of its agent."),
    wide("Internal-IP", "Address inside the cluster."),
    wide("External-IP", "Address outside the cluster."),
    wide("OS-Image", "Its operating system."),
    wide("Kernel-Version", "Its kernel."),
    wide("Container-Runtime", "What runs its pods."),
];
pub(super) const NAMESPACE: &[Column] = &[NAME, column("Status", "Active or Terminating."), AGE];
pub(super) const EVENT: &[Column] = &[
    column("Last Seen", "When it happened last."),
    column("Type", "Normal or Warning."),
    column("Reason", "Its stable reason word."),
    column("Object", "What it is about."),
    wide("Subobject", "Which part of it."),
    wide("Source", "Who said so."),
    column("Message", "What happened."),
    wide("First Seen", "When it happened first."),
    wide("Count", "How often it happened."),
    wide("Name", "Name of the event."),
];
pub(super) const SECRET: &[Column] = &[
    NAME,
    column("Type", "Its type."),
    Column { kind: "integer", ..column("Data", "How many entries.") },
    AGE,
];
pub(super) const CONFIG_MAP: &[Column] =
    &[NAME, Column { kind: "integer", ..column("Data", "How many entries.") }, AGE];
pub(super) const SERVICE_ACCOUNT: &[Column] =
    &[NAME, Column { kind: "integer", ..column("Secrets", "How many secrets.") }, AGE];
pub(super) const LEASE: &[Column] = &[NAME, column("Holder", "Who holds it."), AGE];

/// A duration as short as people like it, such as `5m30s` or `3d4h`.
pub(crate) fn human(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    let joined = |big: i64, unit: &str, small: i64, rest: &str| {
        if small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{rest}") }
    };
    match seconds {
        i64::MIN..-1 => "<invalid>".into(),
        -1 => "0s".into(),
        0..120 => format!("{seconds}s"),
        120..600 => joined(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => joined(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => joined(days, "d", hours % 24, "h"),
        691_200..63_072_000 => format!("{days}d"),
        63_072_000..252_288_000 => joined(days / 365, "y", days % 365, "d"),
        _ => format!("{}y", days / 365),
    }
}

fn since(stamp: &str, now: Timestamp) -> Option<String> {
    let stamp: Timestamp = stamp.parse().ok()?;
    // Whole seconds, as stamps have them: a fresh object is 0 s old, never "<invalid>".
    Some(human(now.as_second() - stamp.as_second()))
}

fn since_or_unknown(stamp: &str, now: Timestamp) -> Value {
    since(stamp, now).unwrap_or_else(|| "<unknown>".into()).into()
}

/// Age of an object.
pub(crate) fn age(object: &Value, now: Timestamp) -> Value {
    since_or_unknown(text(object, "/metadata/creationTimestamp"), now)
}

fn or_none(found: &str) -> Value {
    if found.is_empty() { "<none>".into() } else { found.into() }
}

fn name(object: &Value) -> Value {
    text(object, "/metadata/name").into()
}

pub(super) fn name_and_age(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), age(object, now)]
}

pub(super) fn pod(pod: &Value, now: Timestamp) -> Vec<Value> {
    let statuses = list(pod, "/status/containerStatuses");
    let ready =
        statuses.iter().filter(|s| flag(s, "/ready") && s.pointer("/state/running").is_some()).count();
    let all = list(pod, "/spec/containers").len();
    let gates = list(pod, "/spec/readinessGates");
    let passed = gates.iter().filter(|gate| condition(pod, text(gate, "/conditionType")) == "True").count();
    let gates = if gates.is_empty() { "<none>".into() } else { format!("{passed}/{}", gates.len()) };
    vec![
        name(pod),
        format!("{ready}/{all}").into(),
        pod_state(pod).into(),
        restarts(statuses, now),
        age(pod, now),
        or_none(text(pod, "/status/podIP")),
        or_none(text(pod, "/spec/nodeName")),
        or_none(text(pod, "/status/nominatedNodeName")),
        gates.into(),
    ]
}

/// The status of the condition `kind`.
fn condition<'a>(object: &'a Value, kind: &str) -> &'a str {
    let found = list(object, "/status/conditions").iter().find(|c| text(c, "/type") == kind);
    found.map_or("", |condition| text(condition, "/status"))
}

fn pod_state(pod: &Value) -> String {
    let phase = text(pod, "/status/phase");
    let own = text(pod, "/status/reason");
    if pod.pointer("/metadata/deletionTimestamp").is_some() {
        return if own == "NodeLost" { "Unknown".into() } else { "Terminating".into() };
    }
    if let Some(waiting) = init_state(pod) {
        return waiting;
    }
    let statuses = list(pod, "/status/containerStatuses");
    let mut state = if own.is_empty() { phase.to_owned() } else { own.to_owned() };
    let gated = list(pod, "/status/conditions")
        .iter()
        .any(|c| text(c, "/type") == "PodScheduled" && text(c, "/reason") == "SchedulingGated");
    if gated {
        state = "SchedulingGated".into();
    }
    if let Some(shown) = statuses.iter().find_map(container_state) {
        state = shown;
    }
    let running = statuses.iter().any(|s| s.pointer("/state/running").is_some() && flag(s, "/ready"));
    match (state.as_str(), running) {
        ("Completed", true) if condition(pod, "Ready") == "True" => "Running".into(),
        ("Completed", true) => "NotReady".into(),
        _ => state,
    }
}

/// Why a container is not running.
fn container_state(status: &Value) -> Option<String> {
    let waiting = text(status, "/state/waiting/reason");
    if !waiting.is_empty() {
        return Some(waiting.into());
    }
    let ended = status.pointer("/state/terminated")?;
    let (reason, signal) = (text(ended, "/reason"), int(ended, "/signal").unwrap_or_default());
    Some(match (reason, signal) {
        ("", 0) => format!("ExitCode:{}", int(ended, "/exitCode").unwrap_or_default()),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.into(),
    })
}

fn init_state(pod: &Value) -> Option<String> {
    let statuses = list(pod, "/status/initContainerStatuses");
    let all = list(pod, "/spec/initContainers").len();
    for (at, status) in statuses.iter().enumerate() {
        if int(status, "/state/terminated/exitCode") == Some(0) || flag(status, "/started") {
            continue;
        }
        return Some(match container_state(status) {
            Some(reason) if reason != "PodInitializing" => format!("Init:{reason}"),
            _ => format!("Init:{at}/{all}"),
        });
    }
    None
}

fn restarts(statuses: &[Value], now: Timestamp) -> Value {
    let count: i64 = statuses.iter().filter_map(|s| int(s, "/restartCount")).sum();
    let last = statuses.iter().map(|s| text(s, "/lastState/terminated/finishedAt")).max().unwrap_or_default();
    match since(last, now).filter(|_| count > 0) {
        Some(ago) => format!("{count} ({ago} ago)").into(),
        None => count.to_string().into(),
    }
}

pub(super) fn node(node: &Value, now: Timestamp) -> Vec<Value> {
    let address = |kind: &str| {
        let found = list(node, "/status/addresses").iter().find(|a| text(a, "/type") == kind);
        or_none(found.map_or("", |address| text(address, "/address")))
    };
    let info = |field: &str| {
        let found = text(node, &format!("/status/nodeInfo/{field}"));
        if found.is_empty() { Value::from("<unknown>") } else { found.into() }
    };
    vec![
        name(node),
        node_state(node).into(),
        node_roles(node),
        age(node, now),
        text(node, "/status/nodeInfo/kubeletVersion").into(),
        address("InternalIP"),
        address("ExternalIP"),
        info("osImage"),
        info("kernelVersion"),
        info("containerRuntimeVersion"),
    ]
}

fn node_state(node: &Value) -> String {
    let ready = match condition(node, "Ready") {
        "True" => "Ready",
        "" => "Unknown",
        _ => "NotReady",
    };
    if flag(node, "/spec/unschedulable") { format!("{ready},SchedulingDisabled") } else { ready.into() }
}

fn node_roles(node: &Value) -> Value {
    let mut roles: Vec<&str> = crate::json::pairs(node, "/metadata/labels")
        .filter_map(|(key, value)| match key.strip_prefix("node-role.kubernetes.io/") {
            Some(role) => Some(role),
            None => (key == "kubernetes.io/role").then_some(value),
        })
        .filter(|role| !role.is_empty())
        .collect();
    roles.sort_unstable();
    roles.dedup();
    or_none(&roles.join(","))
}

pub(super) fn namespace(namespace: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(namespace), text(namespace, "/status/phase").into(), age(namespace, now)]
}

pub(super) fn event(event: &Value, now: Timestamp) -> Vec<Value> {
    // Of the core or of the newer form.
    let either = |one: &str, other: &str| {
        let found = text(event, one);
        if found.is_empty() { text(event, other).to_owned() } else { found.to_owned() }
    };
    let at = either("/eventTime", "/metadata/creationTimestamp");
    let first = either("/firstTimestamp", "/deprecatedFirstTimestamp");
    let first = if first.is_empty() { at.clone() } else { first };
    let series = text(event, "/series/lastObservedTime").to_owned();
    let last = either("/lastTimestamp", "/deprecatedLastTimestamp");
    let last = [series, last, first.clone()].into_iter().find(|stamp| !stamp.is_empty()).unwrap_or_default();
    let count = int(event, "/series/count")
        .or_else(|| int(event, "/count"))
        .or_else(|| int(event, "/deprecatedCount"));
    let kind = either("/involvedObject/kind", "/regarding/kind").to_lowercase();
    let about = either("/involvedObject/name", "/regarding/name");
    let source = either("/source/component", "/reportingComponent");
    let source = if source.is_empty() { text(event, "/reportingController").to_owned() } else { source };
    let host = text(event, "/source/host");
    let last_seen = if count.unwrap_or(1) > 1 {
        let (last, first) = (since(&last, now), since(&first, now));
        format!("{} (x{} over {})", last.unwrap_or_default(), count.unwrap_or(1), first.unwrap_or_default())
            .into()
    } else {
        since_or_unknown(&last, now)
    };
    vec![
        last_seen,
        text(event, "/type").into(),
        text(event, "/reason").into(),
        format!("{kind}/{about}").into(),
        either("/involvedObject/fieldPath", "/regarding/fieldPath").into(),
        if host.is_empty() { source.into() } else { format!("{source}, {host}").into() },
        either("/message", "/note").trim().into(),
        since_or_unknown(&first, now),
        count.unwrap_or(1).to_string().into(),
        name(event),
    ]
}

fn entries(object: &Value, fields: &[&str]) -> Value {
    let count: usize =
        fields.iter().filter_map(|f| object.get(f)).filter_map(Value::as_object).map(|m| m.len()).sum();
    json!(count)
}

pub(super) fn secret(secret: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(secret), text(secret, "/type").into(), entries(secret, &["data"]), age(secret, now)]
}

pub(super) fn config_map(map: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(map), entries(map, &["data", "binaryData"]), age(map, now)]
}

pub(super) fn service_account(account: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(account), json!(list(account, "/secrets").len()), age(account, now)]
}

pub(super) fn lease(lease: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(lease), text(lease, "/spec/holderIdentity").into(), age(lease, now)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        for (seconds, wanted) in [
            (-5, "<invalid>"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (330, "5m30s"),
            (3700, "61m"),
            (10_800, "3h"),
            (12_000, "3h20m"),
            (100_000, "27h"),
            (180_000, "2d2h"),
            (864_000, "10d"),
            (63_072_000, "2y"),
        ] {
            assert_eq!(human(seconds), wanted);
        }
    }

    #[test]
    fn a_pods_state_is_its_most_telling_reason() {
        let waiting = json!({ "status": { "phase": "Running", "containerStatuses": [
            { "ready": false, "state": { "waiting": { "reason": "Hibernated" } } }
        ] } });
        assert_eq!(pod_state(&waiting), "Hibernated");
        let leaving = json!({ "metadata": { "deletionTimestamp": "x" }, "status": { "phase": "Running" } });
        assert_eq!(pod_state(&leaving), "Terminating");
        assert_eq!(pod_state(&json!({ "status": { "phase": "Pending" } })), "Pending");
    }
}
