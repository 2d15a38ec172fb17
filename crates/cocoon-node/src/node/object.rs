//! The node object as values. Pure.
//!
//! Entry points: [`main_patch`] (labels, taint, provider id) and [`status_patch`]; `None` says that the
//! API has it already. Taints and conditions of others are kept.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Taint};
use serde_json::{Map, Value, json};

use crate::{config::NodeConfig, ports::HostView};

/// What is true of the node now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    /// The host.
    pub host: HostView,
    /// Bytes of the data file system that are this agent's VMs' (so that they are not counted twice).
    pub used_by_vms: u64,
    /// Why the engine does not answer.
    pub engine_fault: Option<String>,
    /// Why no guest gets an address, when that lasts.
    pub network_fault: Option<String>,
    /// The node's address.
    pub address: String,
}

/// Free disk below this part of all of it is pressure.
const DISK_PRESSURE_PART: u64 = 20;
/// Free memory below this is pressure.
const MEMORY_PRESSURE: u64 = 100 << 20;
/// Heartbeats are written at least this often, in seconds, even when nothing changed.
pub(crate) const HEARTBEAT_SECONDS: i64 = 60;

fn labels(config: &NodeConfig) -> Map<String, Value> {
    let mut labels = Map::new();
    let mut set = |key: &str, value: &str| labels.insert(key.to_owned(), value.into());
    set("type", "virtual-kubelet");
    set("kubernetes.io/role", "agent");
    set("kubernetes.io/hostname", &config.name);
    set("kubernetes.io/os", "linux");
    set("kubernetes.io/arch", arch());
    set("node-role.kubernetes.io/cocoon-vm", "");
    set(cocoon_meta::keys::LABEL_NODE_POOL, &config.pool);
    let class = config.snapshot_class.as_deref().map_or(Value::Null, Into::into);
    labels.insert(cocoon_meta::keys::LABEL_SNAPSHOT_COMPATIBILITY_CLASS.to_owned(), class);
    labels
}

/// Kubernetes' word for this machine's architecture.
fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The object to create when there is none.
#[must_use]
pub(crate) fn new(config: &NodeConfig) -> Value {
    let mut labels = labels(config);
    labels.retain(|_, value| !value.is_null());
    let mut spec = json!({"taints": [taint()]});
    if let Some(id) = &config.provider_id {
        spec["providerID"] = id.as_str().into();
    }
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": config.name, "labels": labels}, "spec": spec})
}

fn taint() -> Value {
    json!({"key": cocoon_meta::keys::TOLERATION_KEY, "value": "cocoon", "effect": "NoSchedule"})
}

/// What is missing on the main resource.
#[must_use]
pub(crate) fn main_patch(node: &Node, config: &NodeConfig) -> Option<Value> {
    let mut patch = Map::new();
    let present = node.metadata.labels.clone().unwrap_or_default();
    let wrong: Map<String, Value> = labels(config)
        .into_iter()
        .filter(|(key, value)| present.get(key).map(String::as_str) != value.as_str())
        .collect();
    let mut metadata = json!({"resourceVersion": node.metadata.resource_version});
    let labelled = !wrong.is_empty();
    if labelled {
        metadata["labels"] = wrong.into();
    }
    let spec = spec_patch(node, config);
    if !labelled && spec.is_none() {
        return None;
    }
    patch.insert("metadata".to_owned(), metadata);
    if let Some(spec) = spec {
        patch.insert("spec".to_owned(), spec);
    }
    Some(Value::Object(patch))
}

fn spec_patch(node: &Node, config: &NodeConfig) -> Option<Value> {
    let spec = node.spec.clone().unwrap_or_default();
    let taints: Vec<Taint> = spec.taints.unwrap_or_default();
    let mut patch = Map::new();
    if !taints.iter().any(|taint| taint.key == cocoon_meta::keys::TOLERATION_KEY) {
        let mut all: Vec<Value> =
            taints.iter().filter_map(|taint| serde_json::to_value(taint).ok()).collect();
        all.push(taint());
        patch.insert("taints".to_owned(), all.into());
    }
    if let Some(id) = config.provider_id.as_ref().filter(|id| spec.provider_id.as_ref() != Some(id)) {
        patch.insert("providerID".to_owned(), id.as_str().into());
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// The status patch, when something changed or the heartbeat is due.
#[must_use]
pub(crate) fn status_patch(node: &Node, config: &NodeConfig, facts: &Facts, now: Timestamp) -> Option<Value> {
    let old = node.status.clone().unwrap_or_default();
    let conditions = old.conditions.clone().unwrap_or_default();
    let ours = our_conditions(facts);
    let settled = ours.iter().all(|ours| {
        conditions.iter().any(|c| {
            c.type_ == ours.kind && c.status == ours.status && c.reason.as_deref() == Some(ours.reason)
        })
    });
    let beat = conditions.iter().find(|c| c.type_ == "Ready").and_then(|c| c.last_heartbeat_time.as_ref());
    let due = beat.is_none_or(|beat| now.duration_since(beat.0).as_secs() >= HEARTBEAT_SECONDS);
    let fixed = fixed_status(config, facts);
    let current = serde_json::to_value(&old).unwrap_or(Value::Null);
    let mut merged = current.clone();
    json_patch::merge(&mut merged, &fixed);
    if settled && !due && merged == current {
        return None;
    }
    let mut status = fixed;
    status["conditions"] = merge_conditions(&conditions, &ours, now);
    Some(json!({"metadata": {"resourceVersion": node.metadata.resource_version}, "status": status}))
}

/// Everything but the conditions.
fn fixed_status(config: &NodeConfig, facts: &Facts) -> Value {
    let host = &facts.host;
    json!({
        "capacity": quantities(config, facts, false),
        "allocatable": quantities(config, facts, true),
        "addresses": [
            {"type": "InternalIP", "address": facts.address},
            {"type": "Hostname", "address": config.name},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": config.kubelet_port}},
        "nodeInfo": {
            "architecture": arch(),
            "bootID": host.boot_id,
            "containerRuntimeVersion": format!("cocoon://{}", config.version),
            "kernelVersion": host.kernel,
            "kubeProxyVersion": "",
            "kubeletVersion": format!("v{}", config.version),
            "machineID": host.machine_id,
            "operatingSystem": "linux",
            "osImage": host.os_image,
            "systemUUID": host.system_uuid,
        },
    })
}

/// Capacity, or what pods may use of it. Free disk moves all the time, so it is rounded down to 256 MiB:
/// a node must not be written at each breath of its file system.
fn quantities(config: &NodeConfig, facts: &Facts, allocatable: bool) -> Value {
    const STEP: u64 = 256 << 20;
    let left = u64::from(100_u8.saturating_sub(config.reserve_percent));
    let part = |value: u64| {
        if allocatable {
            u64::try_from(u128::from(value) * u128::from(left) / 100).unwrap_or(u64::MAX)
        } else {
            value
        }
    };
    let over = config.overrides;
    let free = facts.host.disk_available.saturating_add(facts.used_by_vms);
    let disk = over.storage.unwrap_or(if allocatable { free } else { facts.host.disk });
    json!({
        "cpu": part(over.cpu.unwrap_or(facts.host.cpus)).to_string(),
        "memory": part(over.memory.unwrap_or(facts.host.memory)).to_string(),
        "ephemeral-storage": (part(disk) / STEP * STEP).to_string(),
        "pods": config.pods.to_string(),
    })
}

struct Ours {
    kind: &'static str,
    status: &'static str,
    reason: &'static str,
    message: String,
}

fn our_conditions(facts: &Facts) -> Vec<Ours> {
    let host = &facts.host;
    let fault = facts.engine_fault.clone().or_else(|| host.data_folder_fault.clone());
    let condition = |kind, bad: bool, words: [&'static str; 2], message: &str| Ours {
        kind,
        status: if bad { "True" } else { "False" },
        reason: words[usize::from(bad)],
        message: message.to_owned(),
    };
    let disk = host.disk > 0 && host.disk_available < host.disk / DISK_PRESSURE_PART;
    let memory = host.memory > 0 && host.memory_available < MEMORY_PRESSURE;
    let processes = host.processes.0.saturating_mul(10) > host.processes.1.saturating_mul(9);
    vec![
        Ours {
            kind: "Ready",
            status: if fault.is_some() { "False" } else { "True" },
            reason: if fault.is_some() { "EngineUnavailable" } else { "KubeletReady" },
            message: fault.unwrap_or_else(|| "cocoon node agent is ready".to_owned()),
        },
        condition(
            "DiskPressure",
            disk,
            ["KubeletHasNoDiskPressure", "KubeletHasDiskPressure"],
            "free space of the data folder",
        ),
        condition(
            "MemoryPressure",
            memory,
            ["KubeletHasSufficientMemory", "KubeletHasInsufficientMemory"],
            "memory available on the host",
        ),
        condition(
            "PIDPressure",
            processes,
            ["KubeletHasSufficientPID", "KubeletHasInsufficientPID"],
            "process ids of the host",
        ),
        condition(
            "NetworkUnavailable",
            facts.network_fault.is_some(),
            ["RouteCreated", "NetworkDaemonDown"],
            facts.network_fault.as_deref().unwrap_or("VMs reach the host's bridge"),
        ),
    ]
}

fn merge_conditions(old: &[NodeCondition], ours: &[Ours], now: Timestamp) -> Value {
    let seconds = |at: Timestamp| Timestamp::from_second(at.as_second()).unwrap_or(at).to_string();
    let foreign = old.iter().filter(|c| !ours.iter().any(|ours| ours.kind == c.type_));
    let mut all: Vec<Value> = foreign.filter_map(|c| serde_json::to_value(c).ok()).collect();
    for ours in ours {
        let before = old.iter().find(|c| c.type_ == ours.kind && c.status == ours.status);
        let since = before.and_then(|c| c.last_transition_time.as_ref()).map_or(now, |time| time.0);
        all.push(json!({
            "type": ours.kind, "status": ours.status, "reason": ours.reason, "message": ours.message,
            "lastHeartbeatTime": seconds(now), "lastTransitionTime": seconds(since),
        }));
    }
    all.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        let host = HostView {
            cpus: 32,
            memory: 64 << 30,
            memory_available: 32 << 30,
            disk: 100 << 30,
            disk_available: 50 << 30,
            processes: (100, 32768),
            ..HostView::default()
        };
        Facts {
            host,
            used_by_vms: 10 << 30,
            engine_fault: None,
            network_fault: None,
            address: "127.0.0.1".into(),
        }
    }

    fn applied(mut node: Value, patches: &[Option<Value>]) -> Node {
        for patch in patches.iter().flatten() {
            json_patch::merge(&mut node, patch);
        }
        serde_json::from_value(node).unwrap()
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_settled_node_is_written_only_when_its_heartbeat_is_due() {
        let config = NodeConfig::new("n1");
        let node: Node = serde_json::from_value(new(&config)).unwrap();
        assert_eq!(main_patch(&node, &config), None);
        let patch = status_patch(&node, &config, &facts(), at(1000));
        let node = applied(new(&config), &[patch]);
        assert_eq!(status_patch(&node, &config, &facts(), at(1030)), None);
        assert!(status_patch(&node, &config, &facts(), at(1060)).is_some());
    }

    #[test]
    fn labels_taints_and_conditions_that_somebody_changed_are_put_right_and_foreign_ones_are_kept() {
        let config = NodeConfig::new("n1");
        let mut value = new(&config);
        let fresh: Node = serde_json::from_value(value.clone()).unwrap();
        json_patch::merge(&mut value, &status_patch(&fresh, &config, &facts(), at(0)).unwrap());
        value["metadata"]["labels"] = json!({"mine": "1", "cocoonstack.io/pool": "other"});
        value["spec"]["taints"] = json!([{"key": "foreign", "effect": "NoExecute"}]);
        value["status"]["conditions"][0]["status"] = "False".into();
        value["status"]["conditions"]
            .as_array_mut()
            .unwrap()
            .push(json!({"type": "Frozen", "status": "True"}));
        let node: Node = serde_json::from_value(value.clone()).unwrap();
        let healed =
            applied(value, &[main_patch(&node, &config), status_patch(&node, &config, &facts(), at(5))]);
        let labels = healed.metadata.labels.unwrap();
        assert_eq!((labels["mine"].as_str(), labels["cocoonstack.io/pool"].as_str()), ("1", "default"));
        let taints = healed.spec.unwrap().taints.unwrap();
        assert_eq!(
            taints.iter().map(|t| t.key.as_str()).collect::<Vec<_>>(),
            ["foreign", "virtual-kubelet.io/provider"]
        );
        let conditions = healed.status.unwrap().conditions.unwrap();
        let status = |kind: &str| conditions.iter().find(|c| c.type_ == kind).unwrap().status.clone();
        assert_eq!((status("Ready").as_str(), status("Frozen").as_str()), ("True", "True"));
    }

    #[test]
    fn allocatable_is_capacity_less_the_reserve_and_pods_stay() {
        let config = NodeConfig::new("n1");
        let found = quantities(&config, &facts(), true);
        assert_eq!((found["cpu"].as_str(), found["pods"].as_str()), (Some("25"), Some("256")));
        assert_eq!(found["ephemeral-storage"], (48_u64 << 30).to_string());
    }

    #[test]
    fn a_network_daemon_that_is_down_makes_the_network_unavailable_and_the_node_stays_ready() {
        let config = NodeConfig::new("n1");
        let node: Node = serde_json::from_value(new(&config)).unwrap();
        for (fault, status, reason) in
            [(None, "False", "RouteCreated"), (Some("it is down"), "True", "NetworkDaemonDown")]
        {
            let facts = Facts { network_fault: fault.map(str::to_owned), ..facts() };
            let patch = status_patch(&node, &config, &facts, at(0)).unwrap();
            let conditions = patch["status"]["conditions"].as_array().unwrap();
            let find = |kind: &str| conditions.iter().find(|one| one["type"] == kind).unwrap();
            let network = find("NetworkUnavailable");
            assert_eq!(
                (network["status"].as_str(), network["reason"].as_str()),
                (Some(status), Some(reason))
            );
            assert!(fault.is_none_or(|fault| network["message"] == fault));
            assert_eq!(find("Ready")["status"], "True");
        }
    }

    #[test]
    fn an_engine_that_does_not_answer_makes_the_node_not_ready_with_its_reason() {
        let config = NodeConfig::new("n1");
        let node: Node = serde_json::from_value(new(&config)).unwrap();
        let facts = Facts { engine_fault: Some("listing VMs: disk I/O error".into()), ..facts() };
        let patch = status_patch(&node, &config, &facts, at(0)).unwrap();
        let ready = &patch["status"]["conditions"][0];
        assert_eq!(
            (ready["status"].as_str(), ready["reason"].as_str()),
            (Some("False"), Some("EngineUnavailable"))
        );
        assert!(ready["message"].as_str().unwrap().contains("disk I/O error"));
    }
}
