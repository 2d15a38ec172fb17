//! Annotations by which somebody meant something, and which mean nothing. Pure.
//!
//! Entry point: [`oddities`]. Nothing follows from them but an event: the contract reads such a key as absent.

use cocoon_meta::{VmSpec, keys};
use k8s_openapi::api::core::v1::Pod;

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

/// What is odd about a pod's annotations. `served`: the VM of this incarnation, once there is a record of it.
#[must_use]
pub fn oddities(pod: &Pod, served: Option<&str>) -> Vec<Trouble> {
    let Some(annotations) = &pod.metadata.annotations else { return Vec::new() };
    let managed = VmSpec::parse(pod).managed;
    let mut found = Vec::new();
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
    fn a_value_of_any_size_makes_a_message_of_a_size_that_an_event_takes() {
        let long = "ä".repeat(200_000);
        for key in [keys::ANNOTATION_HIBERNATE, "vm.cocoonstack.io/zzz", keys::ANNOTATION_VM_NAME] {
            let found = words(&[(key, &long)], Some("vm"));
            assert!(found.iter().all(|text| text.chars().count() < 1000), "{key}");
        }
    }
}
