//! What a pod says about itself.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::annotated::Annotated;
use crate::keys;

/// Whether a condition `Ready` is `True`.
pub fn is_pod_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Whether the phase is `Failed`. `Succeeded` is not terminal here.
pub fn is_pod_terminal(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Failed")
}

/// Whether any container reports running.
pub fn is_container_running(pod: &Pod) -> bool {
    let containers =
        pod.status.as_ref().and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
    containers.iter().any(|c| c.state.as_ref().is_some_and(|state| state.running.is_some()))
}

/// Whether the pod says it has a running VM: a running container and a VM id. Tests no readiness and
/// asks no VM.
pub fn vm_live(pod: &Pod) -> bool {
    is_container_running(pod) && !pod.annotation(keys::ANNOTATION_VM_ID).is_empty()
}

/// `namespace/name`.
pub fn pod_key(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

/// The pool a pod belongs to: the first that is not empty of node selector, labels and annotations,
/// else the default pool.
pub fn pod_node_pool(pod: &Pod) -> &str {
    let selector = pod.spec.as_ref().and_then(|spec| spec.node_selector.as_ref());
    [selector, pod.metadata.labels.as_ref(), pod.metadata.annotations.as_ref()]
        .into_iter()
        .flatten()
        .filter_map(|map| map.get(keys::LABEL_NODE_POOL))
        .find(|pool| !pool.is_empty())
        .map_or(keys::DEFAULT_NODE_POOL, String::as_str)
}

/// Whether the pod tolerates our nodes. Only the key counts: operator, value and effect are ignored, so
/// that every toleration bearing the key is gated.
pub fn has_cocoon_toleration_key(pod: &Pod) -> bool {
    let tolerations = pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
    tolerations.iter().any(|toleration| toleration.key.as_deref() == Some(keys::TOLERATION_KEY))
}

/// Name of the first owner of kind CocoonSet; `None` without one, and when that one has no name. It
/// proves nothing about who made the pod.
pub fn cocoon_set_owner_name(metadata: &ObjectMeta) -> Option<&str> {
    let owners = metadata.owner_references.as_deref().unwrap_or_default();
    let owner = owners.iter().find(|owner| owner.kind == keys::KIND_COCOON_SET)?;
    Some(owner.name.as_str()).filter(|name| !name.is_empty())
}

/// Whether a CocoonSet owns the object, by the kind of its owner reference.
pub fn is_owned_by_cocoon_set(metadata: &ObjectMeta) -> bool {
    cocoon_set_owner_name(metadata).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(json: serde_json::Value) -> Pod {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_vm_is_live_with_a_running_container_and_an_id() {
        let running = serde_json::json!({ "containerStatuses": [{
            "name": "agent", "ready": true, "restartCount": 0, "image": "", "imageID": "",
            "state": { "running": {} },
        }]});
        let with_id = serde_json::json!({ "annotations": { "vm.cocoonstack.io/id": "x" } });
        assert!(vm_live(&pod(serde_json::json!({ "metadata": with_id, "status": running }))));
        assert!(!vm_live(&pod(serde_json::json!({ "metadata": {}, "status": running }))));
        assert!(!vm_live(&pod(serde_json::json!({ "metadata": with_id, "status": {} }))));
    }

    #[test]
    fn succeeded_is_not_terminal() {
        assert!(!is_pod_terminal(&pod(serde_json::json!({ "status": { "phase": "Succeeded" } }))));
        assert!(is_pod_terminal(&pod(serde_json::json!({ "status": { "phase": "Failed" } }))));
    }
}
