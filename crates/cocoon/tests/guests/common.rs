//! What the end-to-end tests share: a lab, and pods made from a table of annotations.

use std::{sync::OnceLock, time::Duration};

use serde_json::{Value, json};
use xtask::{
    build::{self, Built},
    lab::Lab,
};

/// Ends a test that hangs; nothing waits for it otherwise.
pub(crate) const HANGS: Duration = Duration::from_secs(180);

/// The parts, built once for a test binary.
pub(crate) fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| build::everything().expect("the parts build; see the error above"))
}

/// A fresh `cocoon up`.
pub(crate) fn lab() -> Lab {
    Lab::start(built(), &[]).expect("cocoon up starts")
}

/// A pod in `default` with its right VM name and `annotations` over the usual ones; `null` removes one.
pub(crate) fn pod(name: &str, vm: &str, annotations: Value) -> Value {
    let mut all = json!({
        "vm.cocoonstack.io/name": vm,
        "cocoonset.cocoonstack.io/managed": "true",
        "cocoonset.cocoonstack.io/mode": "run",
        "cocoonset.cocoonstack.io/image": "cocoon-demo:1",
        "cocoonset.cocoonstack.io/snapshot-policy": "never",
    });
    for (key, value) in annotations.as_object().into_iter().flatten() {
        if value.is_null() {
            all.as_object_mut().expect("an object literal").remove(key);
        } else {
            all[key] = value.clone();
        }
    }
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "annotations": all},
        "spec": {
            "tolerations": [{"key": "virtual-kubelet.io/provider", "operator": "Exists"}],
            "containers": [{"name": "agent", "image": "cocoon-demo:1",
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}}],
        },
    })
}

/// Creates an object.
pub(crate) fn create(lab: &Lab, object: &Value) {
    let said =
        lab.kubectl_with(&["create", "-f", "-"], object.to_string().as_bytes()).expect("kubectl starts");
    assert_eq!(said.code, 0, "{}", said.stderr);
}

/// Waits until the pod satisfies `done`, and gives the pod.
pub(crate) fn wait_pod(lab: &Lab, name: &str, what: &str, done: impl Fn(&Value) -> bool) -> Value {
    lab.wait(what, HANGS, || Ok(lab.pod(name)?.filter(|pod| done(pod))))
        .unwrap_or_else(|error| panic!("{error:#}; pod: {:#?}", lab.pod(name)))
}

/// Waits until the pod's lifecycle is `failed` and gives its message.
pub(crate) fn wait_failed(lab: &Lab, name: &str) -> String {
    let pod = wait_pod(lab, name, "lifecycle failed", |pod| {
        xtask::story::annotation(pod, "vm.cocoonstack.io/lifecycle-state") == "failed"
    });
    xtask::story::annotation(&pod, "vm.cocoonstack.io/lifecycle-state-message")
}

/// Whether the pod has an event of `reason`.
pub(crate) fn has_event(lab: &Lab, pod: &str, reason: &str) -> bool {
    let events = lab.kubectl(&["get", "events", "-o", "json"]).expect("events");
    let events: Value = serde_json::from_str(&events).expect("JSON");
    events["items"].as_array().expect("a list").iter().any(|event| {
        let about =
            if event["involvedObject"].is_null() { &event["regarding"] } else { &event["involvedObject"] };
        about["name"] == pod && event["reason"] == reason
    })
}
