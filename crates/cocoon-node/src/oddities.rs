//! What somebody meant something by in a pod, and what means nothing, or something else. Pure.
//!
//! Entry point: [`oddities`]. Nothing follows but an event: the contract says how such a value is read, and a VM
//! has no use for most of what a pod can say about containers.

use cocoon_api::{AgentMode, OSType, SnapshotPolicy};
use cocoon_meta::{VmSpec, keys};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use crate::reason::{Reason, Trouble};

/// Prefix of one VM's metadata.
const OF_A_VM: &str = "vm.cocoonstack.io/";

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

/// Keys with a vocabulary: key, known values, how any other is read.
const VOCABULARIES: [(&str, &[&str], &str); 3] = [
    (keys::ANNOTATION_MODE, AgentMode::VALUES, "clone"),
    (keys::ANNOTATION_SNAPSHOT_POLICY, SnapshotPolicy::VALUES, "always"),
    (keys::ANNOTATION_OS, OSType::VALUES, "linux"),
];

/// The volume that an API server gives every pod by itself.
const GIVEN_VOLUME: &str = "kube-api-access-";

/// What is odd about a pod's annotations and its spec. `served`: the VM of this incarnation, once there is a record of it.
#[must_use]
pub(crate) fn oddities(pod: &Pod, served: Option<&str>) -> Vec<Trouble> {
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
        let known = SET_BY_PEOPLE.contains(&key) || SET_BY_AGENTS.contains(&key);
        if managed && key.starts_with(OF_A_VM) && !known {
            found.push(unknown(key, value));
        }
    }
    let named = annotations.get(keys::ANNOTATION_VM_NAME).map_or("", String::as_str);
    if let Some(vm_name) = served.filter(|vm_name| *vm_name != named) {
        found.push(renamed(vm_name, named));
    }
    found
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
    let message = format!(
        "annotation {key} is {:?}, which is read as {read_as}; accepted are {}",
        short(value),
        values.join(", ")
    );
    Trouble::new(Reason::InvalidAnnotation, message)
}

/// One sentence about all that a VM makes nothing of.
fn ignored(spec: &PodSpec) -> Option<Trouble> {
    const MOST: usize = 8;
    let mut parts = Vec::new();
    let others = spec.containers.iter().skip(1).map(|one| format!("container {}", short(&one.name)));
    parts.extend(others);
    let init =
        spec.init_containers.iter().flatten().map(|one| format!("init container {}", short(&one.name)));
    parts.extend(init);
    let volumes = spec.volumes.iter().flatten().filter(|volume| !volume.name.starts_with(GIVEN_VOLUME));
    parts.extend(volumes.map(|volume| format!("volume {}", short(&volume.name))));
    if let Some(first) = spec.containers.first() {
        parts.extend(
            ignored_of(first).into_iter().map(|field| format!("{field} of container {}", short(&first.name))),
        );
    }
    if parts.is_empty() {
        return None;
    }
    let more = parts.len().saturating_sub(MOST);
    parts.truncate(MOST);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let message = format!(
        "the pod is one VM, so this in its spec has no effect: {}{more}; take it out, and put into the image or \
         the guest what is needed",
        parts.join(", ")
    );
    Some(Trouble::new(Reason::NotSupported, message))
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
    let known = SET_BY_PEOPLE.map(|key| key.trim_start_matches(OF_A_VM)).join(", ");
    let message = format!(
        "annotation {} ({:?}) is unknown and nothing follows from it; known after {OF_A_VM} are {known}",
        short(key),
        short(value)
    );
    Trouble::new(Reason::UnknownAnnotation, message)
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
        let found = oddities(&pod("demo-0", "u1", extra), served);
        found.iter().map(|trouble| format!("{trouble}")).collect()
    }

    #[test]
    fn every_key_of_the_contract_is_known() {
        let source = include_str!("../../cocoon-meta/src/keys.rs");
        let keys: Vec<&str> = source.split('"').filter(|text| text.starts_with(OF_A_VM)).collect();
        assert!(keys.len() > 20, "{keys:?}");
        for key in keys {
            assert!(SET_BY_PEOPLE.contains(&key) || SET_BY_AGENTS.contains(&key), "{key}");
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
    fn a_value_of_any_size_makes_a_message_of_a_size_that_an_event_takes() {
        let long = "ä".repeat(200_000);
        for key in [keys::ANNOTATION_HIBERNATE, "vm.cocoonstack.io/zzz", keys::ANNOTATION_VM_NAME] {
            let found = words(&[(key, &long)], Some("vm"));
            assert!(found.iter().all(|text| text.chars().count() < 1000), "{key}");
        }
    }
}
