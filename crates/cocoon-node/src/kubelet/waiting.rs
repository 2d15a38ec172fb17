//! Why a pod's container cannot be read or entered just now, in the kubelet's words. Pure.
//!
//! Entry points: [`for_logs`] and [`for_exec`]. The reason is the one that the pod itself shows; a
//! hibernated pod's answer has the command that wakes it.

use cocoon_meta::keys;
use k8s_openapi::api::core::v1::Pod;

use crate::reason::Reason;

/// The answer to a request for the logs of a container without a console.
#[must_use]
pub(crate) fn for_logs(pod: &Pod) -> String {
    let (container, name) = (container(pod), pod.metadata.name.as_deref().unwrap_or_default());
    let state = if has_ended(pod) { "has terminated" } else { "is waiting to start" };
    format!("container {container:?} in pod {name:?} {state}: {}", why(pod))
}

/// The answer to an exec into a container that does not run.
#[must_use]
pub(crate) fn for_exec(pod: &Pod) -> String {
    format!("container not running: {}", why(pod))
}

/// The name of the pod's only container.
#[must_use]
pub(crate) fn container(pod: &Pod) -> &str {
    let first = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    first.map_or("", |container| container.name.as_str())
}

/// The command that wakes the pod.
fn wake(pod: &Pod) -> String {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    format!("kubectl annotate pod -n {namespace} {name} {}-", keys::ANNOTATION_HIBERNATE)
}

fn why(pod: &Pod) -> String {
    let Some((reason, message)) = shown(pod) else {
        return "its VM is not up; see kubectl describe pod".to_owned();
    };
    let known = if message.is_empty() { reason.clone() } else { format!("{reason}: {message}") };
    let asked = pod.metadata.annotations.as_ref().is_some_and(|a| a.contains_key(keys::ANNOTATION_HIBERNATE));
    if reason != Reason::Hibernated.to_string() {
        return known;
    }
    if asked {
        format!("{known}: {}", wake(pod))
    } else {
        format!("{known}; it is being woken, try again in some seconds")
    }
}

fn state(pod: &Pod) -> Option<&k8s_openapi::api::core::v1::ContainerState> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()?.state.as_ref()
}

fn has_ended(pod: &Pod) -> bool {
    state(pod).is_some_and(|state| state.terminated.is_some())
}

/// Reason and message that the pod shows: of its container, else of its readiness.
fn shown(pod: &Pod) -> Option<(String, String)> {
    let text = |text: Option<&String>| text.cloned().unwrap_or_default();
    let of_container = state(pod).and_then(|state| {
        let waiting = state.waiting.as_ref().map(|w| (w.reason.as_ref(), w.message.as_ref()));
        waiting.or_else(|| state.terminated.as_ref().map(|t| (t.reason.as_ref(), t.message.as_ref())))
    });
    let of_pod = || {
        let conditions = pod.status.as_ref()?.conditions.as_ref()?;
        let ready = conditions.iter().find(|c| c.type_ == "Ready" && c.status != "True")?;
        Some((ready.reason.as_ref(), ready.message.as_ref()))
    };
    let (reason, message) = of_container.or_else(of_pod)?;
    reason.map(|reason| (reason.clone(), text(message)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(annotations: serde_json::Value, status: serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"namespace": "default", "name": "demo-0", "annotations": annotations},
            "spec": {"containers": [{"name": "agent"}]},
            "status": status,
        }))
        .unwrap()
    }

    fn in_state(state: serde_json::Value) -> serde_json::Value {
        json!({"containerStatuses": [{"name": "agent", "state": state, "image": "", "imageID": "", "ready": false, "restartCount": 0}]})
    }

    #[test]
    fn the_reason_is_the_pods_own_and_a_hibernated_pod_says_how_it_is_woken() {
        let asked = json!({"vm.cocoonstack.io/hibernate": "true"});
        let waiting = |reason: &str| in_state(json!({"waiting": {"reason": reason, "message": "M"}}));
        let not_ready = json!({"conditions": [{"type": "Ready", "status": "False", "reason": "Hibernating", "message": "M"}]});
        for (pod, logs, exec) in [
            (
                pod(asked.clone(), waiting("Hibernated")),
                "container \"agent\" in pod \"demo-0\" is waiting to start: Hibernated: M: \
                 kubectl annotate pod -n default demo-0 vm.cocoonstack.io/hibernate-",
                "container not running: Hibernated: M: \
                 kubectl annotate pod -n default demo-0 vm.cocoonstack.io/hibernate-",
            ),
            (
                pod(json!({}), waiting("Hibernated")),
                "container \"agent\" in pod \"demo-0\" is waiting to start: Hibernated: M; it is being woken, \
                 try again in some seconds",
                "container not running: Hibernated: M; it is being woken, try again in some seconds",
            ),
            (
                pod(json!({}), waiting("ContainerCreating")),
                "container \"agent\" in pod \"demo-0\" is waiting to start: ContainerCreating: M",
                "container not running: ContainerCreating: M",
            ),
            (
                pod(
                    json!({}),
                    in_state(json!({"terminated": {"exitCode": 1, "reason": "VMGone", "message": "M"}})),
                ),
                "container \"agent\" in pod \"demo-0\" has terminated: VMGone: M",
                "container not running: VMGone: M",
            ),
            (
                pod(asked, not_ready),
                "container \"agent\" in pod \"demo-0\" is waiting to start: Hibernating: M",
                "container not running: Hibernating: M",
            ),
        ] {
            assert_eq!(for_logs(&pod), logs);
            assert_eq!(for_exec(&pod), exec);
        }
        let silent = for_exec(&pod(json!({}), json!({})));
        assert!(silent.contains("kubectl describe pod"), "{silent}");
    }
}
