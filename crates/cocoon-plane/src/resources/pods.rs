//! Pods: defaults, rules, what an update may change, requests.
//!
//! Decided here: no service account volume is mounted, no tolerations for `not-ready` and `unreachable`
//! are added (nothing evicts by taint), no priority is resolved.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::quantity;
use crate::{
    error::Causes,
    json::{self, list, text},
    patch::strategic::Merge,
    validate,
};

pub(super) const SELECTABLE: &[&str] = &[
    "spec.nodeName",
    "status.phase",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "spec.hostNetwork",
    "status.podIP",
    "status.nominatedNodeName",
];

/// Lists that strategic merge joins; all others are replaced whole.
pub(super) const MERGE: &[(&str, Merge)] = &[
    ("metadata.ownerReferences", Merge::ByKey("uid")),
    ("metadata.finalizers", Merge::Set),
    ("spec.containers", Merge::ByKey("name")),
    ("spec.containers.env", Merge::ByKey("name")),
    ("spec.containers.ports", Merge::ByKey("containerPort")),
    ("spec.containers.volumeMounts", Merge::ByKey("mountPath")),
    ("spec.containers.volumeDevices", Merge::ByKey("devicePath")),
    ("spec.initContainers", Merge::ByKey("name")),
    ("spec.initContainers.env", Merge::ByKey("name")),
    ("spec.initContainers.ports", Merge::ByKey("containerPort")),
    ("spec.initContainers.volumeMounts", Merge::ByKey("mountPath")),
    ("spec.initContainers.volumeDevices", Merge::ByKey("devicePath")),
    ("spec.ephemeralContainers", Merge::ByKey("name")),
    ("spec.ephemeralContainers.env", Merge::ByKey("name")),
    ("spec.volumes", Merge::ByKey("name")),
    ("spec.imagePullSecrets", Merge::ByKey("name")),
    ("spec.hostAliases", Merge::ByKey("ip")),
    ("spec.topologySpreadConstraints", Merge::ByKey("topologyKey")),
    ("spec.schedulingGates", Merge::ByKey("name")),
    ("spec.resourceClaims", Merge::ByKey("name")),
    ("status.conditions", Merge::ByKey("type")),
    ("status.podIPs", Merge::ByKey("ip")),
    ("status.hostIPs", Merge::ByKey("ip")),
    ("status.resourceClaimStatuses", Merge::ByKey("name")),
];

/// Effects of taints.
pub(super) const EFFECTS: &[&str] = &["NoSchedule", "PreferNoSchedule", "NoExecute"];
const CONTAINERS: [&str; 2] = ["containers", "initContainers"];
const PROBES: [&str; 3] = ["livenessProbe", "readinessProbe", "startupProbe"];

fn each_container(pod: &mut Value, mut change: impl FnMut(&mut Value)) {
    for group in CONTAINERS {
        let items = pod.pointer_mut(&format!("/spec/{group}")).and_then(Value::as_array_mut);
        items.into_iter().flatten().filter(|item| item.is_object()).for_each(&mut change);
    }
}

pub(super) fn normalize(pod: &mut Value) {
    each_container(pod, |container| {
        for field in ["limits", "requests"] {
            if let Some(map) = container.pointer_mut(&format!("/resources/{field}")) {
                quantity::spell_out(map);
            }
        }
    });
    for volume in pod.pointer_mut("/spec/volumes").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(limit) = volume.pointer_mut("/emptyDir") {
            quantity::spell_out_field(limit, "sizeLimit");
        }
    }
}

pub(super) fn default(pod: &mut Value) {
    if !pod["spec"].is_object() {
        return;
    }
    let spec = json::object(pod, "spec");
    json::default(spec, "restartPolicy", "Always");
    json::default(spec, "dnsPolicy", "ClusterFirst");
    json::default(spec, "schedulerName", "default-scheduler");
    json::default(spec, "terminationGracePeriodSeconds", 30);
    json::default(spec, "enableServiceLinks", true);
    json::default(spec, "securityContext", json!({}));
    each_container(pod, default_container);
    for volume in pod.pointer_mut("/spec/volumes").and_then(Value::as_array_mut).into_iter().flatten() {
        default_volume(volume);
    }
}

fn default_container(container: &mut Value) {
    let image = text(container, "/image");
    let tag = image.rsplit('/').next().unwrap_or_default();
    let moving = !image.contains('@') && (tag.ends_with(":latest") || !tag.contains(':'));
    let map = json::map(container);
    json::default(map, "imagePullPolicy", if moving { "Always" } else { "IfNotPresent" });
    json::default(map, "terminationMessagePath", "/dev/termination-log");
    json::default(map, "terminationMessagePolicy", "File");
    json::default(map, "resources", json!({}));
    for port in map.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
        json::default(json::map(port), "protocol", "TCP");
    }
    for env in map.get_mut("env").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(Value::Object(field)) = env.pointer_mut("/valueFrom/fieldRef") {
            json::default(field, "apiVersion", "v1");
        }
    }
    for probe in PROBES {
        if let Some(probe) = map.get_mut(probe).filter(|probe| probe.is_object()) {
            default_probe(probe);
        }
    }
    // A limit without a request asks for the limit.
    if let Some(Value::Object(limits)) = container.pointer("/resources/limits").cloned() {
        let requests = json::object(&mut container["resources"], "requests");
        for (name, amount) in limits {
            json::default(requests, &name, amount);
        }
    }
}

fn default_probe(probe: &mut Value) {
    let map = json::map(probe);
    for (field, value) in
        [("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)]
    {
        json::default(map, field, value);
    }
    if let Some(Value::Object(get)) = map.get_mut("httpGet") {
        json::default(get, "path", "/");
        json::default(get, "scheme", "HTTP");
    }
}

fn default_volume(volume: &mut Value) {
    let map = json::map(volume);
    if map.keys().all(|key| key == "name") {
        map.insert("emptyDir".into(), json!({}));
    }
    for source in ["secret", "configMap", "projected", "downwardAPI"] {
        if let Some(Value::Object(source)) = map.get_mut(source) {
            json::default(source, "defaultMode", 420);
        }
    }
    if let Some(Value::Object(path)) = map.get_mut("hostPath") {
        json::default(path, "type", "");
    }
}

pub(super) fn create(pod: &mut Value) {
    let class = quality(pod);
    pod["status"] = json!({ "phase": "Pending", "qosClass": class });
}

/// The quality-of-service class: by whether CPU and memory are limited.
fn quality(pod: &Value) -> &'static str {
    let (mut any, mut guaranteed) = (false, true);
    for container in CONTAINERS.iter().flat_map(|group| list(pod, &format!("/spec/{group}"))) {
        for name in ["cpu", "memory"] {
            let amount = |field: &str| {
                let found = container.pointer(&format!("/resources/{field}/{name}")).and_then(Value::as_str);
                found.and_then(quantity::milli).filter(|amount| *amount > 0)
            };
            let (limit, request) = (amount("limits"), amount("requests"));
            any |= limit.is_some() || request.is_some();
            guaranteed &= limit.is_some() && limit == request;
        }
    }
    match (any, guaranteed) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

fn one_of(value: &Value, path: &str, field: &str, known: &[&str], causes: &mut Causes) {
    let found = text(value, path);
    if !known.contains(&found) {
        causes.unsupported(field, found, known);
    }
}

pub(super) fn validate(pod: &Value, causes: &mut Causes) {
    if list(pod, "/spec/containers").is_empty() {
        causes.required("spec.containers", "");
    }
    if !pod["spec"].is_object() {
        return;
    }
    one_of(pod, "/spec/restartPolicy", "spec.restartPolicy", &["Always", "OnFailure", "Never"], causes);
    let dns = &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];
    one_of(pod, "/spec/dnsPolicy", "spec.dnsPolicy", dns, causes);
    validate::labels(pod, "/spec/nodeSelector", "spec.nodeSelector", causes);
    if json::int(pod, "/spec/terminationGracePeriodSeconds").is_some_and(|seconds| seconds < 0) {
        let value = &pod["spec"]["terminationGracePeriodSeconds"];
        causes.invalid("spec.terminationGracePeriodSeconds", value, "must be greater than or equal to 0");
    }
    let volumes = validate_volumes(pod, causes);
    let mut names = BTreeSet::new();
    for group in CONTAINERS {
        for (at, container) in list(pod, &format!("/spec/{group}")).iter().enumerate() {
            let path = format!("spec.{group}[{at}]");
            let name = text(container, "/name");
            if !name.is_empty() && !names.insert(name) {
                causes.duplicate(format!("{path}.name"), name);
            }
            validate_container(container, &path, &volumes, causes);
        }
    }
    validate_tolerations(pod, causes);
}

fn validate_volumes<'a>(pod: &'a Value, causes: &mut Causes) -> BTreeSet<&'a str> {
    let mut names = BTreeSet::new();
    for (at, volume) in list(pod, "/spec/volumes").iter().enumerate() {
        let (name, field) = (text(volume, "/name"), format!("spec.volumes[{at}].name"));
        match validate::dns_label(name) {
            _ if name.is_empty() => causes.required(field, ""),
            Err(why) => causes.invalid(field, &name.into(), &why),
            Ok(()) if !names.insert(name) => causes.duplicate(field, name),
            Ok(()) => {}
        }
    }
    names
}

fn validate_container(container: &Value, path: &str, volumes: &BTreeSet<&str>, causes: &mut Causes) {
    let name = text(container, "/name");
    match validate::dns_label(name) {
        _ if name.is_empty() => causes.required(format!("{path}.name"), ""),
        Err(why) => causes.invalid(format!("{path}.name"), &name.into(), &why),
        Ok(()) => {}
    }
    let image = text(container, "/image");
    if image.is_empty() {
        causes.required(format!("{path}.image"), "");
    } else if image.trim() != image {
        let why = "must not have leading or trailing whitespace";
        causes.invalid(format!("{path}.image"), &image.into(), why);
    }
    let policies = &["Always", "IfNotPresent", "Never"];
    one_of(container, "/imagePullPolicy", &format!("{path}.imagePullPolicy"), policies, causes);
    for (at, port) in list(container, "/ports").iter().enumerate() {
        let number = json::int(port, "/containerPort").unwrap_or_default();
        if !(1..=65535).contains(&number) {
            let field = format!("{path}.ports[{at}].containerPort");
            causes.invalid(field, &number.into(), "must be between 1 and 65535, inclusive");
        }
    }
    for (at, env) in list(container, "/env").iter().enumerate() {
        if text(env, "/name").is_empty() {
            causes.required(format!("{path}.env[{at}].name"), "");
        }
    }
    for (at, mount) in list(container, "/volumeMounts").iter().enumerate() {
        if !volumes.contains(text(mount, "/name")) {
            causes.not_found(format!("{path}.volumeMounts[{at}].name"), text(mount, "/name"));
        }
        if text(mount, "/mountPath").is_empty() {
            causes.required(format!("{path}.volumeMounts[{at}].mountPath"), "");
        }
    }
    validate_resources(container, path, causes);
}

fn validate_resources(container: &Value, path: &str, causes: &mut Causes) {
    let map = |field: &str| container.pointer(&format!("/resources/{field}"));
    for field in ["limits", "requests"] {
        quantity::validate_map(map(field), &format!("{path}.resources.{field}"), causes);
    }
    let limits = map("limits").and_then(Value::as_object);
    for (name, limit) in limits.into_iter().flatten() {
        let request = map("requests").and_then(|requests| requests.get(name));
        let amount = |value: &Value| value.as_str().and_then(quantity::milli);
        if let (Some(limit), Some(request)) = (amount(limit), request)
            && amount(request).is_some_and(|request| request > limit)
        {
            let why = format!("must be less than or equal to {name} limit");
            causes.invalid(format!("{path}.resources.requests"), request, &why);
        }
    }
}

fn validate_tolerations(pod: &Value, causes: &mut Causes) {
    for (at, toleration) in list(pod, "/spec/tolerations").iter().enumerate() {
        let field = |name: &str| format!("spec.tolerations[{at}].{name}");
        let (key, operator) = (text(toleration, "/key"), text(toleration, "/operator"));
        match operator {
            "" | "Equal" if key.is_empty() => {
                causes.invalid(
                    field("operator"),
                    &operator.into(),
                    "operator must be Exists when `key` is empty",
                );
            }
            "" | "Equal" => {}
            "Exists" if text(toleration, "/value").is_empty() => {}
            "Exists" => {
                causes.invalid(
                    field("operator"),
                    &toleration["value"],
                    "value must be empty when `operator` is 'Exists'",
                );
            }
            other => causes.unsupported(field("operator"), other, &["Equal", "Exists"]),
        }
        let effect = text(toleration, "/effect");
        if !effect.is_empty() && !EFFECTS.contains(&effect) {
            causes.unsupported(field("effect"), effect, EFFECTS);
        }
    }
}

/// Only images, the deadline, more tolerations, fewer scheduling gates may change.
pub(super) fn update(old: &Value, new: &Value, causes: &mut Causes) {
    if list(old, "/spec/containers").len() != list(new, "/spec/containers").len()
        || list(old, "/spec/initContainers").len() != list(new, "/spec/initContainers").len()
    {
        causes.forbidden("spec.containers", "pod updates may not add or remove containers");
        return;
    }
    let mut masked = new["spec"].clone();
    mask_images(&old["spec"], &mut masked);
    let map = json::map(&mut masked);
    for field in ["activeDeadlineSeconds", "tolerations", "schedulingGates"] {
        json::put(map, field, old["spec"].get(field).cloned());
    }
    if old["spec"] != masked {
        causes.forbidden(
            "spec",
            "pod updates may not change fields other than `spec.containers[*].image`,\
             `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to \
             existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was \
             previously negative)",
        );
    }
    let kept = list(new, "/spec/tolerations");
    if list(old, "/spec/tolerations").iter().any(|toleration| !kept.contains(toleration)) {
        let why = "existing toleration can not be modified except its tolerationSeconds";
        causes.forbidden("spec.tolerations", why);
    }
    let gates = list(old, "/spec/schedulingGates");
    if list(new, "/spec/schedulingGates").iter().any(|gate| !gates.contains(gate)) {
        causes.forbidden("spec.schedulingGates", "only deletion is allowed, but found new scheduling gate");
    }
}

fn mask_images(old: &Value, new: &mut Value) {
    for group in CONTAINERS {
        let items = new.get_mut(group).and_then(Value::as_array_mut);
        for (at, item) in items.into_iter().flatten().enumerate() {
            let image = old.pointer(&format!("/{group}/{at}/image")).cloned();
            if item.is_object() {
                json::put(json::map(item), "image", image);
            }
        }
    }
}

/// What a pod asks of its node, in thousandths.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Requests(pub(crate) std::collections::BTreeMap<String, i128>);

impl Requests {
    /// The sum over the containers, or the largest init container where that is more.
    pub(crate) fn of(pod: &Value) -> Self {
        let mut sum = Self::default();
        for container in list(pod, "/spec/containers") {
            for (name, amount) in Self::of_container(container) {
                *sum.0.entry(name).or_default() += amount;
            }
        }
        for container in list(pod, "/spec/initContainers") {
            for (name, amount) in Self::of_container(container) {
                let slot = sum.0.entry(name).or_default();
                *slot = amount.max(*slot);
            }
        }
        *sum.0.entry("pods".into()).or_default() += 1000;
        sum
    }

    fn of_container(container: &Value) -> impl Iterator<Item = (String, i128)> {
        json::pairs(container, "/resources/requests")
            .filter_map(|(name, amount)| Some((name.to_owned(), quantity::milli(amount)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: Value) -> Value {
        let mut pod = json!({ "metadata": { "name": "a" }, "spec": spec });
        normalize(&mut pod);
        default(&mut pod);
        pod
    }

    fn complaints(pod: &Value) -> Vec<String> {
        let mut causes = Causes::default();
        validate(pod, &mut causes);
        causes.0.into_iter().map(|cause| cause.field).collect()
    }

    /// The pod as a client's create leaves it.
    fn created(resources: Value) -> Value {
        let containers = json!([{ "name": "a", "image": "x", "resources": resources }]);
        let mut pod = json!({ "metadata": { "name": "a" }, "spec": { "containers": containers } });
        let kind = crate::resources::by_table("pods").unwrap();
        normalize(&mut pod);
        let now = jiff::Timestamp::UNIX_EPOCH;
        crate::rules::prepare_create(kind, &mut pod, "default", "u".into(), now).unwrap();
        pod
    }

    #[test]
    fn a_limit_without_a_request_asks_for_the_limit_and_decides_the_class() {
        for (resources, class) in [
            (json!({}), "BestEffort"),
            (json!({ "limits": { "cpu": 1, "memory": "1Gi" } }), "Guaranteed"),
            (
                json!({ "limits": { "cpu": "1", "memory": "1Gi" }, "requests": { "cpu": "1000m" } }),
                "Guaranteed",
            ),
            (
                json!({ "limits": { "cpu": "1", "memory": "1Gi" }, "requests": { "cpu": "500m" } }),
                "Burstable",
            ),
            (json!({ "limits": { "cpu": "1" } }), "Burstable"),
            (json!({ "requests": { "cpu": "1", "memory": "1Gi" } }), "Burstable"),
        ] {
            let pod = created(resources.clone());
            assert_eq!(text(&pod, "/status/qosClass"), class, "{resources}");
            assert_eq!(text(&pod, "/spec/containers/0/imagePullPolicy"), "Always");
        }
        let limited = created(json!({ "limits": { "cpu": 1, "memory": "1Gi" } }));
        assert_eq!(Requests::of(&limited).0["cpu"], 1000);
    }

    #[test]
    fn a_bad_pod_is_told_each_of_its_faults() {
        assert_eq!(complaints(&pod(json!({}))), ["spec.containers"]);
        let bad = pod(json!({
            "restartPolicy": "Sometimes",
            "containers": [
                { "name": "A", "image": "", "volumeMounts": [{ "name": "nope", "mountPath": "/x" }] },
                { "name": "b", "image": "x", "resources": { "requests": { "cpu": "2" }, "limits": { "cpu": "1" } } },
                { "name": "b", "image": "x", "ports": [{ "containerPort": 0 }] }
            ],
            "tolerations": [{ "operator": "Exists", "value": "x" }, { "key": "a", "effect": "Never" }]
        }));
        assert_eq!(
            complaints(&bad),
            [
                "spec.restartPolicy",
                "spec.containers[0].name",
                "spec.containers[0].image",
                "spec.containers[0].volumeMounts[0].name",
                "spec.containers[1].resources.requests",
                "spec.containers[2].name",
                "spec.containers[2].ports[0].containerPort",
                "spec.tolerations[0].operator",
                "spec.tolerations[1].effect",
            ]
        );
    }

    #[test]
    fn an_update_may_change_images_and_add_tolerations_and_nothing_else() {
        let old =
            pod(json!({ "containers": [{ "name": "a", "image": "x:1" }], "tolerations": [{ "key": "a" }] }));
        for (path, value, allowed) in [
            ("/spec/containers/0/image", json!("x:2"), true),
            ("/spec/tolerations", json!([{ "key": "a" }, { "key": "b" }]), true),
            ("/spec/tolerations", json!([{ "key": "b" }]), false),
            ("/spec/containers/0/name", json!("b"), false),
            ("/spec/restartPolicy", json!("Never"), false),
            ("/spec/containers", json!([]), false),
        ] {
            let mut new = old.clone();
            *new.pointer_mut(path).unwrap() = value;
            let mut causes = Causes::default();
            update(&old, &new, &mut causes);
            assert_eq!(causes.0.is_empty(), allowed, "{path}");
        }
    }
}
