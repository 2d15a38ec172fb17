//! What somebody meant something by in a pod, and what means nothing, or something else. Pure.
//!
//! Entry point: [`oddities`]. Nothing follows but an event: the contract says how such a value is read, and a VM
//! has no use for most of what a pod can say about containers.

use std::collections::BTreeSet;

use cocoon_api::{AgentMode, OSType, SnapshotPolicy};
use cocoon_meta::{VmSpec, keys};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use crate::reason::{Reason, Trouble};

/// Prefix of one VM's metadata.
const OF_A_VM: &str = "vm.cocoonstack.io/";
/// Prefix of what a set says about its pods.
const OF_A_SET: &str = "cocoonset.cocoonstack.io/";

/// Keys that say yes by `true` alone.
const SWITCHES: [&str; 6] = [
    keys::ANNOTATION_HIBERNATE,
    keys::ANNOTATION_RESTORE_FROM_HIBERNATE,
    keys::ANNOTATION_KEEP_SNAPSHOT_ON_DELETE,
    keys::ANNOTATION_NO_DIRECT_IO,
    keys::ANNOTATION_FORCE_PULL,
    keys::ANNOTATION_MANAGED,
];

/// Keys of a VM that people or the operator set.
const SET_BY_PEOPLE: [&str; 12] = [
    keys::ANNOTATION_VM_NAME,
    keys::ANNOTATION_HIBERNATE,
    keys::ANNOTATION_RESTORE_FROM_HIBERNATE,
    keys::ANNOTATION_KEEP_SNAPSHOT_ON_DELETE,
    keys::ANNOTATION_FORK_FROM,
    keys::ANNOTATION_CLONE_FROM_DIR,
    keys::ANNOTATION_CONN_TYPE,
    keys::ANNOTATION_BACKEND,
    keys::ANNOTATION_NO_DIRECT_IO,
    keys::ANNOTATION_PROBE_PORT,
    keys::ANNOTATION_SNAPSHOT_ANNOTATIONS,
    keys::ANNOTATION_SNAPSHOT_REQUEST,
];

/// Keys of a VM that agents set.
const SET_BY_AGENTS: [&str; 11] = [
    keys::ANNOTATION_VM_ID,
    keys::ANNOTATION_IP,
    keys::ANNOTATION_VNC_PORT,
    keys::ANNOTATION_LIFECYCLE_STATE,
    keys::ANNOTATION_LIFECYCLE_OBSERVED_GENERATION,
    keys::ANNOTATION_LIFECYCLE_STATE_MESSAGE,
    keys::ANNOTATION_SNAPSHOT_STATUS,
    keys::ANNOTATION_POST_CLONE_HINT,
    keys::ANNOTATION_POST_CLONE_ERRORS,
    keys::ANNOTATION_POST_CLONE_STATE,
    keys::ANNOTATION_WOKEN_FROM,
];

/// Keys of a set that people or the operator set.
const OF_A_SET_BY_PEOPLE: [&str; 8] = [
    keys::ANNOTATION_MANAGED,
    keys::ANNOTATION_MODE,
    keys::ANNOTATION_IMAGE,
    keys::ANNOTATION_OS,
    keys::ANNOTATION_STORAGE,
    keys::ANNOTATION_SNAPSHOT_POLICY,
    keys::ANNOTATION_NETWORK,
    keys::ANNOTATION_FORCE_PULL,
];

/// Keys of a set that the operator alone sets, its labels too.
const OF_A_SET_BY_OPERATOR: [&str; 8] = [
    keys::LABEL_COCOON_SET,
    keys::LABEL_ROLE,
    keys::LABEL_SLOT,
    keys::ANNOTATION_COCOON_SET_GENERATION,
    keys::ANNOTATION_HIBERNATED_ON_NODE,
    keys::ANNOTATION_DEAD_LETTER,
    keys::ANNOTATION_DELETE_VM_NAMES,
    keys::ANNOTATION_REBUILD_HISTORY,
];

/// Keys with a vocabulary: key, known values, how any other is read.
const VOCABULARIES: [(&str, &[&str], &str); 3] = [
    (keys::ANNOTATION_MODE, AgentMode::VALUES, "clone"),
    (keys::ANNOTATION_SNAPSHOT_POLICY, SnapshotPolicy::VALUES, "always"),
    (keys::ANNOTATION_OS, OSType::VALUES, "linux"),
];

/// The volume that an API server gives every pod by itself.
const GIVEN_VOLUME: &str = "kube-api-access-";

/// The VM that a pod has, as far as its words about it may be odd.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Served<'a> {
    /// Its name.
    pub(crate) vm_name: &'a str,
    /// The image ref that it was made for; empty while it is being made, or when there was none.
    pub(crate) image: &'a str,
    /// The pod as it was judged before.
    pub(crate) before: Option<&'a Pod>,
}

/// What is odd about a pod's annotations and its spec. `served`: the VM of this incarnation, once there is a record of it.
#[must_use]
pub(crate) fn oddities(pod: &Pod, served: Option<Served<'_>>) -> Vec<Trouble> {
    let Some(annotations) = &pod.metadata.annotations else { return Vec::new() };
    let managed = VmSpec::parse(pod).managed;
    let ignored = pod.spec.as_ref().filter(|_| managed).and_then(ignored);
    let mut found: Vec<Trouble> = ignored.into_iter().collect();
    for (key, values, read_as) in VOCABULARIES.iter().filter(|_| managed) {
        let value = annotations.get(*key).map_or("", String::as_str);
        // The mode alone is read in any case.
        let lower = value.to_ascii_lowercase();
        let asked = if *key == keys::ANNOTATION_MODE { lower.as_str() } else { value };
        if !asked.is_empty() && !values.contains(&asked) {
            found.push(no_such_value(key, value, values, read_as));
        }
    }
    for (key, value) in annotations {
        let (key, value) = (key.as_str(), value.as_str());
        if SWITCHES.contains(&key) && !matches!(value, keys::TRUE | "false" | "") {
            found.push(no_switch(key, value));
        }
        if is_unknown(key, managed) {
            found.push(unknown(key, value));
        }
    }
    found.extend(served.into_iter().flat_map(|served| changed(pod, served)));
    found
}

/// Whether nobody knows a key of ours. A misspelt key of a set may be why the pod is not managed, so that does not
/// matter to it.
fn is_unknown(key: &str, managed: bool) -> bool {
    if key.starts_with(OF_A_SET) {
        return !OF_A_SET_BY_PEOPLE.contains(&key) && !OF_A_SET_BY_OPERATOR.contains(&key);
    }
    managed && key.starts_with(OF_A_VM) && !SET_BY_PEOPLE.contains(&key) && !SET_BY_AGENTS.contains(&key)
}

/// What was changed in a pod whose VM does not follow.
fn changed(pod: &Pod, served: Served<'_>) -> Vec<Trouble> {
    let spec = VmSpec::parse(pod);
    let mut found = Vec::new();
    if served.vm_name != spec.vm_name {
        found.push(renamed(served.vm_name, &spec.vm_name));
    }
    if served.image.is_empty() {
        return found;
    }
    if served.image != spec.image {
        found.push(another_image(&served, &format!("annotation {}", keys::ANNOTATION_IMAGE), &spec.image));
    }
    let before = served.before.map(container_image);
    let now = container_image(pod);
    if before.is_some_and(|before| before != now) && now != served.image {
        found.push(another_image(&served, "the container's image", now));
    }
    found
}

/// The image that the pod's one container names.
#[must_use]
pub(crate) fn container_image(pod: &Pod) -> &str {
    let container = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    container.and_then(|container| container.image.as_deref()).unwrap_or_default()
}

fn another_image(served: &Served<'_>, what: &str, image: &str) -> Trouble {
    let message = format!(
        "{what} was changed to {:?} while the pod has VM {}, which goes on with {:?}; a VM gets another image only \
         when its pod is deleted and created again, with annotation {key} set to that image; with another there it can \
         be hibernated but not woken",
        short(image),
        served.vm_name,
        short(served.image),
        key = keys::ANNOTATION_IMAGE
    );
    Trouble::new(Reason::ImageChanged, message)
}

/// A value as a message may carry it.
fn short(value: &str) -> String {
    value.chars().take(80).collect()
}

fn no_switch(key: &str, value: &str) -> Trouble {
    let message = format!(
        "annotation {key} is {:?}, which counts as absent; accepted is \"true\", or no such annotation",
        short(value)
    );
    Trouble::new(Reason::InvalidAnnotation, message)
}

fn no_such_value(key: &str, value: &str, values: &[&str], read_as: &str) -> Trouble {
    let meant = values.iter().find(|known| value.trim().eq_ignore_ascii_case(known));
    let meant = meant.map_or_else(String::new, |known| format!("write {known:?} if that is meant; "));
    let message = format!(
        "annotation {key} is {:?}, which is read as {read_as}; {meant}accepted are {}",
        short(value),
        values.join(", ")
    );
    Trouble::new(Reason::InvalidAnnotation, message)
}

/// One sentence about all that a VM makes nothing of.
fn ignored(spec: &PodSpec) -> Option<Trouble> {
    const MOST: usize = 8;
    let mut parts = ignored_of_pod(spec);
    if let Some(first) = spec.containers.first() {
        let name = short(&first.name);
        parts.extend(ignored_of(first).into_iter().map(|field| format!("{field} of container {name}")));
        parts.extend(
            resources_of(first).into_iter().map(|resource| format!("{resource} of container {name}")),
        );
    }
    if parts.is_empty() {
        return None;
    }
    let disk = if parts.iter().any(|part| part.starts_with(DISK)) {
        format!(" (annotation {} sets the size of the VM's disk)", keys::ANNOTATION_STORAGE)
    } else {
        String::new()
    };
    let more = parts.len().saturating_sub(MOST);
    parts.truncate(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let message = format!(
        "the pod is one VM, so this in its spec has no effect: {}{more}; take it out, and put into the image or \
         the guest what is needed{disk}",
        parts.join(", ")
    );
    Some(Trouble::new(Reason::NotSupported, message))
}

/// What a pod says beside its one container. What an API server or its admission fills in by itself is not meant.
fn ignored_of_pod(spec: &PodSpec) -> Vec<String> {
    let mut parts = Vec::new();
    let policy = spec.restart_policy.iter().filter(|policy| !matches!(policy.as_str(), "" | "Always"));
    parts.extend(policy.map(|policy| format!("restartPolicy {} (a VM is started again)", short(policy))));
    for (field, set) in
        [("hostNetwork", spec.host_network), ("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)]
    {
        parts.extend((set == Some(true)).then(|| field.to_owned()));
    }
    let account = spec.service_account_name.iter().filter(|name| !matches!(name.as_str(), "" | "default"));
    parts.extend(account.map(|name| format!("serviceAccountName {}", short(name))));
    let others = spec.containers.iter().skip(1).map(|one| format!("container {}", short(&one.name)));
    parts.extend(others);
    let init =
        spec.init_containers.iter().flatten().map(|one| format!("init container {}", short(&one.name)));
    parts.extend(init);
    let volumes = spec.volumes.iter().flatten().filter(|volume| !volume.name.starts_with(GIVEN_VOLUME));
    parts.extend(volumes.map(|volume| format!("volume {}", short(&volume.name))));
    parts
}

/// A resource that people take for the size of the disk.
const DISK: &str = "ephemeral-storage";

/// Resources that are no size of a VM.
fn resources_of(container: &Container) -> BTreeSet<String> {
    let resources = container.resources.iter();
    let maps = resources.flat_map(|resources| [&resources.limits, &resources.requests]);
    let names = maps.flatten().flat_map(|map| map.keys());
    names.filter(|name| !matches!(name.as_str(), "cpu" | "memory")).map(|name| short(name)).collect()
}

/// Fields of the one container that say what a VM is not told.
fn ignored_of(container: &Container) -> Vec<&'static str> {
    let filled = |list: Option<usize>| list.is_some_and(|length| length > 0);
    [
        ("command", filled(container.command.as_ref().map(Vec::len))),
        ("args", filled(container.args.as_ref().map(Vec::len))),
        ("env", filled(container.env.as_ref().map(Vec::len))),
        ("envFrom", filled(container.env_from.as_ref().map(Vec::len))),
        ("livenessProbe", container.liveness_probe.is_some()),
        ("readinessProbe", container.readiness_probe.is_some()),
        ("startupProbe", container.startup_probe.is_some()),
        ("lifecycle", container.lifecycle.is_some()),
    ]
    .into_iter()
    .filter_map(|(field, set)| set.then_some(field))
    .collect()
}

fn unknown(key: &str, value: &str) -> Trouble {
    let (prefix, known): (_, &[&str]) =
        if key.starts_with(OF_A_SET) { (OF_A_SET, &OF_A_SET_BY_PEOPLE) } else { (OF_A_VM, &SET_BY_PEOPLE) };
    let name = name_of(key);
    let mut names: Vec<&str> = known.iter().map(|key| name_of(key)).collect();
    names.sort_by_key(|known| distance(name, known));
    // The right name under the wrong one of our two prefixes.
    let elsewhere = OF_A_SET_BY_PEOPLE.iter().chain(&SET_BY_PEOPLE).find(|other| name_of(other) == name);
    let elsewhere = elsewhere.map_or_else(String::new, |other| format!("; {other} is known"));
    let message = format!(
        "annotation {} ({:?}) is unknown and nothing follows from it{elsewhere}; known after {prefix} are, the \
         nearest first, {}",
        short(key),
        short(value),
        names.join(", ")
    );
    Trouble::new(Reason::UnknownAnnotation, message)
}

/// A key without its prefix.
fn name_of(key: &str) -> &str {
    key.split_once('/').map_or(key, |(_, name)| name)
}

/// How many letters must be put in, taken out or replaced to come from one name to the other. Names are short:
/// Kubernetes takes 63 letters.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().take(63).collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, letter) in from.chars().take(63).enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, other) in to.iter().enumerate() {
            let replaced = corner + usize::from(letter != *other);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[to.len()]
}

fn renamed(vm_name: &str, named: &str) -> Trouble {
    let message = format!(
        "annotation {} was changed to {:?} while the pod has VM {vm_name}, which keeps its name; set it back to \
         {vm_name:?}, or delete the pod and make it anew",
        keys::ANNOTATION_VM_NAME,
        short(named)
    );
    Trouble::new(Reason::VMNameMismatch, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::stage::pod;

    fn words(extra: &[(&str, &str)], served: Option<&str>) -> Vec<String> {
        let served = served.map(|vm_name| Served { vm_name, image: "", before: None });
        let found = oddities(&pod("demo-0", "u1", extra), served);
        found.iter().map(|trouble| format!("{trouble}")).collect()
    }

    #[test]
    fn every_key_of_the_contract_is_known() {
        let source = include_str!("../../cocoon-meta/src/keys.rs");
        let ours = |text: &&str| text.starts_with(OF_A_VM) || text.starts_with(OF_A_SET);
        let keys: Vec<&str> = source.split('"').filter(ours).collect();
        assert!(keys.len() > 35, "{keys:?}");
        for key in keys {
            assert!(!is_unknown(key, true), "{key}");
        }
    }

    #[test]
    fn what_means_nothing_is_named_with_key_value_and_what_is_accepted() {
        let own = cocoon_meta::vm_name_for_pod("default", "demo-0");
        let unmanaged = ("cocoonset.cocoonstack.io/managed", "false");
        for (sentence, extra, served, expected) in [
            ("an ordinary pod", vec![], None, vec![]),
            ("true", vec![(keys::ANNOTATION_HIBERNATE, "true")], Some(own.as_str()), vec![]),
            ("false means no", vec![(keys::ANNOTATION_HIBERNATE, "false")], None, vec![]),
            ("yes", vec![(keys::ANNOTATION_HIBERNATE, "yes")], None, vec![["hibernate", "yes", "\"true\""]]),
            (
                "True",
                vec![(keys::ANNOTATION_FORCE_PULL, "True")],
                None,
                vec![["force-pull", "True", "\"true\""]],
            ),
            (
                "a misspelt key",
                vec![("vm.cocoonstack.io/hibernat", "true")],
                None,
                vec![["UnknownAnnotation", "vm.cocoonstack.io/hibernat", "hibernate"]],
            ),
            ("on a pod that is not managed", vec![unmanaged, ("vm.cocoonstack.io/x", "1")], None, vec![]),
            (
                "a misspelt key of a set",
                vec![("cocoonset.cocoonstack.io/snapshot-polcy", "never")],
                None,
                vec![["UnknownAnnotation", "snapshot-polcy", "nearest first, snapshot-policy,"]],
            ),
            (
                "a misspelt key of a set, for which the pod is not managed",
                vec![unmanaged, ("cocoonset.cocoonstack.io/manged", "true")],
                None,
                vec![["UnknownAnnotation", "manged", "nearest first, managed,"]],
            ),
            (
                "the other prefix",
                vec![("vm.cocoonstack.io/snapshot-policy", "never")],
                None,
                vec![["UnknownAnnotation", "; cocoonset.cocoonstack.io/snapshot-policy is known", "nearest"]],
            ),
            (
                "a policy in other letters",
                vec![(keys::ANNOTATION_SNAPSHOT_POLICY, "Never")],
                None,
                vec![["\"Never\"", "read as always", "write \"never\""]],
            ),
            ("what the operator sets", vec![(keys::LABEL_SLOT, "0")], None, vec![]),
            ("run in other letters", vec![(keys::ANNOTATION_MODE, "Run")], None, vec![]),
            ("an empty policy", vec![(keys::ANNOTATION_SNAPSHOT_POLICY, "")], None, vec![]),
            (
                "a mode that is none",
                vec![(keys::ANNOTATION_MODE, "explode")],
                None,
                vec![["explode", "read as clone", "clone, run"]],
            ),
            (
                "a policy that is none",
                vec![(keys::ANNOTATION_SNAPSHOT_POLICY, "perhaps")],
                None,
                vec![["perhaps", "read as always", "always, main-only, never"]],
            ),
            (
                "a system that is none",
                vec![(keys::ANNOTATION_OS, "beos")],
                None,
                vec![["beos", "linux", "android"]],
            ),
            (
                "a mode that is none on a pod that is not managed",
                vec![unmanaged, (keys::ANNOTATION_MODE, "explode")],
                None,
                vec![],
            ),
            ("of somebody else", vec![("example.com/hibernat", "true")], None, vec![]),
            (
                "another name",
                vec![("vm.cocoonstack.io/name", "vk-a-b-0-aaaaaa")],
                Some(own.as_str()),
                vec![["VMNameMismatch", "vk-a-b-0-aaaaaa", own.as_str()]],
            ),
            ("another name before there is a VM", vec![("vm.cocoonstack.io/name", "x")], None, vec![]),
        ] {
            let found = words(&extra, served);
            assert_eq!(found.len(), expected.len(), "{sentence}: {found:?}");
            for (found, parts) in found.iter().zip(expected) {
                assert!(parts.iter().all(|part| found.contains(part)), "{sentence}: {found}");
            }
        }
    }

    #[test]
    fn what_a_vm_makes_nothing_of_in_a_pods_spec_is_named_in_one_sentence() {
        let said = |spec: serde_json::Value, managed: &str| {
            let mut pod = pod("demo-0", "u1", &[("cocoonset.cocoonstack.io/managed", managed)]);
            pod.spec = serde_json::from_value(spec).unwrap();
            oddities(&pod, None)
        };
        let given = serde_json::json!({
            "containers": [{"name": "agent", "ports": [{"containerPort": 22}],
                "volumeMounts": [{"name": "kube-api-access-x", "mountPath": "/var/run"}], "env": []}],
            "volumes": [{"name": "kube-api-access-x", "projected": {}}],
            "restartPolicy": "Always", "hostNetwork": false, "serviceAccountName": "default",
        });
        assert_eq!(said(given, "true"), []);
        let rich = serde_json::json!({
            "containers": [{"name": "agent", "env": [{"name": "A", "value": "1"}], "command": ["sh"]}, {"name": "side"}],
            "initContainers": [{"name": "first"}],
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        });
        assert_eq!(said(rich.clone(), "false"), [], "not ours");
        let found = said(rich, "true");
        assert_eq!((found.len(), found[0].reason), (1, Reason::NotSupported), "{found:?}");
        for part in
            ["container side", "init container first", "volume host", "env of container agent", "command"]
        {
            assert!(found[0].message.contains(part), "{part}: {found:?}");
        }
        let many: Vec<_> =
            (0..500).map(|i| serde_json::json!({"name": "x".repeat(63) + &i.to_string()})).collect();
        let found = said(serde_json::json!({"containers": many}), "true");
        assert!(found[0].message.contains("and 491 more"), "{found:?}");
        assert!(found[0].message.chars().count() < 1000);
    }

    #[test]
    fn each_part_of_a_spec_that_a_vm_makes_nothing_of_is_named() {
        for (sentence, pointer, value, part) in [
            ("restart", "restartPolicy", serde_json::json!("Never"), "restartPolicy Never"),
            (
                "restart on failure",
                "restartPolicy",
                serde_json::json!("OnFailure"),
                "restartPolicy OnFailure",
            ),
            ("host network", "hostNetwork", true.into(), "hostNetwork"),
            ("host processes", "hostPID", true.into(), "hostPID"),
            ("account", "serviceAccountName", "builder".into(), "serviceAccountName builder"),
            ("args", "args", serde_json::json!(["x"]), "args of container agent"),
            (
                "a disk's limit",
                "resources",
                serde_json::json!({"limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "5Gi"}}),
                "ephemeral-storage of container agent",
            ),
            (
                "a disk's request",
                "resources",
                serde_json::json!({"requests": {"ephemeral-storage": "5Gi"}}),
                "cocoonset.cocoonstack.io/storage",
            ),
        ] {
            let mut spec = serde_json::json!({"containers": [{"name": "agent"}]});
            let of_container = matches!(pointer, "args" | "resources");
            let place = if of_container { &mut spec["containers"][0] } else { &mut spec };
            place[pointer] = value;
            let mut pod = pod("demo-0", "u1", &[]);
            pod.spec = serde_json::from_value(spec).unwrap();
            let found = oddities(&pod, None);
            assert_eq!((found.len(), found[0].reason), (1, Reason::NotSupported), "{sentence}: {found:?}");
            assert!(found[0].message.contains(part), "{sentence}: {found:?}");
        }
    }

    #[test]
    fn an_image_that_is_changed_under_a_vm_is_said_to_wait_for_a_new_pod() {
        let own = cocoon_meta::vm_name_for_pod("default", "demo-0");
        let before = pod("demo-0", "u1", &[]);
        let said = |pod: &Pod, image: &str| {
            let served = Served { vm_name: &own, image, before: Some(&before) };
            oddities(pod, Some(served))
        };
        assert_eq!(said(&before, "demo:latest"), []);
        let annotated = pod("demo-0", "u1", &[(keys::ANNOTATION_IMAGE, "demo:2")]);
        assert_eq!(said(&annotated, ""), [], "it is not made yet");
        let mut contained = pod("demo-0", "u1", &[]);
        contained.spec.as_mut().unwrap().containers[0].image = Some("demo:2".into());
        for pod in [annotated, contained] {
            let found = said(&pod, "demo:latest");
            assert_eq!((found.len(), found[0].reason), (1, Reason::ImageChanged), "{found:?}");
            for part in ["demo:2", "demo:latest", own.as_str(), "deleted and created", keys::ANNOTATION_IMAGE]
            {
                assert!(found[0].message.contains(part), "{part}: {found:?}");
            }
        }
    }

    #[test]
    fn the_distance_of_two_names_counts_letters() {
        for (from, to, letters) in [
            ("", "", 0),
            ("mode", "mode", 0),
            ("mod", "mode", 1),
            ("snapshot-polcy", "snapshot-policy", 1),
            ("", "os", 2),
            ("os", "", 2),
            ("abc", "xbz", 2),
        ] {
            assert_eq!(distance(from, to), letters, "{from} {to}");
        }
    }

    #[test]
    fn a_value_of_any_size_makes_a_message_of_a_size_that_an_event_takes() {
        let long = "ä".repeat(200_000);
        for key in [
            keys::ANNOTATION_HIBERNATE,
            "vm.cocoonstack.io/zzz",
            "cocoonset.cocoonstack.io/zzz",
            keys::ANNOTATION_VM_NAME,
        ] {
            let found = words(&[(key, &long)], Some("vm"));
            assert!(found.iter().all(|text| text.chars().count() < 1000), "{key}");
        }
    }
}
