//! A pod's resources as the sizes of its VM (`node-agent` §6.4). Pure.
//!
//! Entry points: [`sizes`] and [`bytes`]. Weight and quota are host-side and not built here.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::api::resource::Quantity};

use crate::{
    planner::observation::Sizes,
    reason::{Reason, Trouble},
};

/// What the engine takes at the least.
const LEAST_MEMORY: u64 = 128 << 20;

/// Disks are made of whole pieces of so many bytes.
const DISK_PIECE: u64 = 1 << 20;

/// vCPU = CPU limit, else request, rounded up; memory = request, else limit; disk = `storage`, rounded up to whole
/// MiB, so that `10G` is as good as `10Gi`. What is not said comes from `defaults`.
pub(crate) fn sizes(pod: &Pod, storage: &str, defaults: Sizes) -> Result<Sizes, Trouble> {
    let resources = pod.spec.as_ref().and_then(|spec| spec.containers.first()?.resources.as_ref());
    let limits = resources.and_then(|r| r.limits.as_ref());
    let requests = resources.and_then(|r| r.requests.as_ref());
    let cpu = resource(limits, "cpu")?.or(resource(requests, "cpu")?);
    let memory = resource(requests, "memory")?.or(resource(limits, "memory")?).unwrap_or(defaults.memory);
    if memory < LEAST_MEMORY {
        let message = format!(
            "resource memory: {memory} bytes are too few, a VM needs at least {}Mi ({LEAST_MEMORY} bytes)",
            LEAST_MEMORY >> 20
        );
        return Err(Trouble::new(Reason::InvalidResources, message));
    }
    let annotation = cocoon_meta::keys::ANNOTATION_STORAGE;
    let storage = if storage.is_empty() { defaults.storage } else { whole(annotation, storage)? };
    // What is too large to be rounded is too large for the engine, which says so.
    let storage = storage.checked_next_multiple_of(DISK_PIECE).unwrap_or(storage);
    Ok(Sizes { cpu: cpu.unwrap_or(defaults.cpu).max(1), memory, storage })
}

fn resource(map: Option<&BTreeMap<String, Quantity>>, name: &str) -> Result<Option<u64>, Trouble> {
    map.and_then(|map| map.get(name))
        .map(|quantity| whole(&format!("resource {name}"), &quantity.0))
        .transpose()
}

/// A quantity in whole units, rounded up. Negative ones are refused: nothing here can be less than 0.
fn whole(what: &str, text: &str) -> Result<u64, Trouble> {
    // A text without a digit is 0 for Kubernetes' reader; nobody means that here.
    let quantity =
        text.parse::<cocoon_api::Quantity>().ok().filter(|_| text.contains(|c: char| c.is_ascii_digit()));
    quantity.and_then(|quantity| quantity.value()).and_then(|value| u64::try_from(value).ok()).ok_or_else(
        || {
            let message =
                format!("{what}: {text:?} is not a resource quantity; write for example 500m, 2, 1Gi or 10G");
            Trouble::new(Reason::InvalidResources, message)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: Sizes = Sizes { cpu: 1, memory: 512 << 20, storage: 10 << 30 };

    fn pod(resources: &serde_json::Value) -> Pod {
        let spec = serde_json::json!({"containers": [{"name": "agent", "resources": resources}]});
        serde_json::from_value(serde_json::json!({"metadata": {}, "spec": spec})).unwrap()
    }

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, expected) in [
            ("1Gi", 1 << 30),
            ("10G", 10_000_000_000),
            ("1.5Ki", 1536),
            ("500m", 1),
            ("2", 2),
            ("1e3", 1000),
            ("1E", 1_000_000_000_000_000_000),
            ("1500u", 1),
            ("0", 0),
            ("+5", 5),
            (".5k", 500),
        ] {
            assert_eq!(whole("a", text), Ok(expected), "{text}");
        }
        for text in ["", "Gi", "1X", "-1", "1 Gi", "1.2.3", "1e99", "９"] {
            assert_eq!(whole("a", text).unwrap_err().reason, Reason::InvalidResources, "{text}");
        }
    }

    #[test]
    fn cpu_takes_the_limit_first_and_memory_the_request_first() {
        let resources = serde_json::json!({
            "limits": {"cpu": "2500m", "memory": "2Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}
        });
        let found = sizes(&pod(&resources), "20Gi", DEFAULTS).unwrap();
        assert_eq!(found, Sizes { cpu: 3, memory: 1 << 30, storage: 20 << 30 });
        assert_eq!(sizes(&pod(&serde_json::json!({})), "", DEFAULTS).unwrap(), DEFAULTS);
    }

    #[test]
    fn a_disk_is_rounded_up_to_what_can_be_made() {
        for (text, mebibytes) in [("10G", 9537), ("20G", 19074), ("1", 1), ("16Mi", 16), ("20Gi", 20 << 10)] {
            let found = sizes(&pod(&serde_json::json!({})), text, DEFAULTS).unwrap();
            assert_eq!(found.storage, mebibytes << 20, "{text}");
        }
    }

    #[test]
    fn too_little_memory_is_named_with_the_least_that_does() {
        let trouble =
            sizes(&pod(&serde_json::json!({"limits": {"memory": "100M"}})), "", DEFAULTS).unwrap_err();
        assert!(trouble.message.contains("memory") && trouble.message.contains("128Mi"), "{trouble:?}");
    }
}
