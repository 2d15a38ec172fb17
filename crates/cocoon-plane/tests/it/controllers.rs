//! Controllers, in virtual time.

use std::time::Duration;

use serde_json::json;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::support::{Client, PODS, config_map, node, pod};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

async fn started() -> (Client, tokio_util::sync::DropGuard) {
    let client = Client::admin().await;
    let shutdown = CancellationToken::new();
    let (plane, token) = (client.plane.clone(), shutdown.clone());
    tokio::spawn(async move { plane.run_controllers(token).await });
    (client, shutdown.drop_guard())
}

async fn settle() {
    sleep(Duration::from_millis(10)).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_put_on_a_node_as_soon_as_one_takes_it() {
    let (client, _guard) = started().await;
    client.post(PODS, &pod("a")).await;
    settle().await;
    let waiting = client.get(&format!("{PODS}/a")).await;
    assert_eq!(waiting.text("/status/conditions/0/reason"), "Unschedulable");
    client.post("/api/v1/nodes", &node("n1")).await;
    settle().await;
    let bound = client.get(&format!("{PODS}/a")).await;
    assert_eq!(bound.text("/spec/nodeName"), "n1");
    assert_eq!(bound.text("/status/conditions/0/status"), "True");
    let events = client.get("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3Da").await;
    let mut reasons: Vec<_> = events.body["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["reason"].as_str().unwrap().to_owned())
        .collect();
    reasons.sort();
    assert_eq!(reasons, ["FailedScheduling", "Scheduled"]);
}

#[tokio::test(start_paused = true)]
async fn a_full_node_takes_the_next_pod_when_one_left() {
    let (client, _guard) = started().await;
    let mut small = node("n1");
    small["status"]["allocatable"]["pods"] = "1".into();
    client.post("/api/v1/nodes", &small).await;
    client.post(PODS, &pod("a")).await;
    settle().await;
    client.post(PODS, &pod("b")).await;
    settle().await;
    assert_eq!(client.get(&format!("{PODS}/a")).await.text("/spec/nodeName"), "n1");
    assert_eq!(client.get(&format!("{PODS}/b")).await.text("/spec/nodeName"), "");
    client.delete(&format!("{PODS}/a"), &json!({ "gracePeriodSeconds": 0 })).await;
    settle().await;
    assert_eq!(client.get(&format!("{PODS}/b")).await.text("/spec/nodeName"), "n1");
}

#[tokio::test(start_paused = true)]
async fn dependents_go_with_their_owner_unless_someone_else_holds_them() {
    let (client, _guard) = started().await;
    let owner = |answer: &crate::support::Answer| {
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": answer.text("/metadata/name"),
                "uid": answer.text("/metadata/uid"), "blockOwnerDeletion": true })
    };
    let (one, two) =
        (client.post(MAPS, &config_map("one")).await, client.post(MAPS, &config_map("two")).await);
    let stranger =
        json!({ "apiVersion": "cocoonset.cocoonstack.io/v1", "kind": "CocoonSet", "name": "s", "uid": "s" });
    let never = json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": "never", "uid": "never" });
    for (name, owners) in [
        ("sole", json!([owner(&one)])),
        ("shared", json!([owner(&one), owner(&two)])),
        ("foreign", json!([stranger])),
        ("dangling", json!([never])),
    ] {
        let mut map = config_map(name);
        map["metadata"]["ownerReferences"] = owners;
        client.post(MAPS, &map).await;
    }
    settle().await;
    assert_eq!(client.get(&format!("{MAPS}/dangling")).await.code, 404);
    client.delete(&format!("{MAPS}/one"), &json!({})).await;
    settle().await;
    assert_eq!(client.get(&format!("{MAPS}/sole")).await.code, 404);
    assert_eq!(client.get(&format!("{MAPS}/foreign")).await.code, 200);
    let shared = client.get(&format!("{MAPS}/shared")).await;
    assert_eq!(shared.body["metadata"]["ownerReferences"].as_array().unwrap().len(), 1);
    client.delete(&format!("{MAPS}/two"), &json!({ "propagationPolicy": "Orphan" })).await;
    settle().await;
    assert_eq!(client.get(&format!("{MAPS}/two")).await.code, 404);
    let kept = client.get(&format!("{MAPS}/shared")).await;
    assert_eq!(
        (kept.code, kept.body["metadata"]["ownerReferences"].as_array().map(Vec::len)),
        (200, Some(0))
    );
}

#[tokio::test(start_paused = true)]
async fn a_foreground_delete_ends_after_its_dependents() {
    let (client, _guard) = started().await;
    let one = client.post(MAPS, &config_map("one")).await;
    let mut child = config_map("child");
    child["metadata"]["ownerReferences"] = json!([{ "apiVersion": "v1", "kind": "ConfigMap", "name": "one",
        "uid": one.text("/metadata/uid"), "blockOwnerDeletion": true }]);
    child["metadata"]["finalizers"] = json!(["x.io/hold"]);
    client.post(MAPS, &child).await;
    client.delete(&format!("{MAPS}/one"), &json!({ "propagationPolicy": "Foreground" })).await;
    settle().await;
    assert_eq!(client.get(&format!("{MAPS}/one")).await.code, 200, "the child is still there");
    client.merge(&format!("{MAPS}/child"), &json!({ "metadata": { "finalizers": null } })).await;
    settle().await;
    assert_eq!(client.get(&format!("{MAPS}/child")).await.code, 404);
    assert_eq!(client.get(&format!("{MAPS}/one")).await.code, 404);
}

#[tokio::test(start_paused = true)]
async fn a_namespace_is_furnished_emptied_and_removed() {
    let client = Client::admin().await;
    client.plane.publish_authority("PEM");
    let (plane, shutdown) = (client.plane.clone(), CancellationToken::new());
    let token = shutdown.clone();
    tokio::spawn(async move { plane.run_controllers(token).await });
    client.post("/api/v1/namespaces", &json!({ "metadata": { "name": "n" } })).await;
    settle().await;
    let certificate = client.get("/api/v1/namespaces/n/configmaps/kube-root-ca.crt").await;
    assert_eq!(certificate.body["data"]["ca.crt"], "PEM");
    assert_eq!(client.get("/api/v1/namespaces/n/serviceaccounts/default").await.code, 200);
    let mut bound = pod("a");
    bound["spec"]["nodeName"] = "n1".into();
    client.post("/api/v1/nodes", &node("n1")).await;
    client.post("/api/v1/namespaces/n/pods", &bound).await;
    assert_eq!(client.delete("/api/v1/namespaces/n", &json!({})).await.text("/status/phase"), "Terminating");
    settle().await;
    assert_eq!(client.get("/api/v1/namespaces/n").await.code, 200, "its pod is not finished");
    let refused = client.post("/api/v1/namespaces/n/configmaps", &config_map("late")).await;
    assert_eq!(refused.code, 403);
    client.delete("/api/v1/namespaces/n/pods/a", &json!({ "gracePeriodSeconds": 0 })).await;
    settle().await;
    assert_eq!(client.get("/api/v1/namespaces/n").await.code, 404);
    shutdown.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_silent_node_becomes_unknown_and_its_next_status_heals_it() {
    let (client, _guard) = started().await;
    client.post("/api/v1/nodes", &node("n1")).await;
    let lease = |at: u32| json!({ "metadata": { "name": "n1" }, "spec": { "renewTime": format!("2026-01-01T00:00:{at:02}.000000Z") } });
    let path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1";
    for at in 0..6 {
        client.put(path, &lease(at)).await;
        sleep(Duration::from_secs(10)).await;
        assert_eq!(client.get("/api/v1/nodes/n1").await.text("/status/conditions/0/status"), "True");
    }
    sleep(Duration::from_secs(50)).await;
    let lost = client.get("/api/v1/nodes/n1").await;
    assert_eq!(lost.text("/status/conditions/0/reason"), "NodeStatusUnknown");
    let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
    client.put(path, &lease(30)).await;
    client.merge("/api/v1/nodes/n1/status", &ready).await;
    sleep(Duration::from_secs(10)).await;
    assert_eq!(client.get("/api/v1/nodes/n1").await.text("/status/conditions/0/status"), "True");
}

#[tokio::test(start_paused = true)]
async fn only_pods_that_are_being_deleted_go_with_their_node() {
    let (client, _guard) = started().await;
    client.post("/api/v1/nodes", &node("n1")).await;
    for name in ["kept", "leaving"] {
        client.post(PODS, &pod(name)).await;
    }
    settle().await;
    client.delete(&format!("{PODS}/leaving"), &json!({})).await;
    client.delete("/api/v1/nodes/n1", &json!({})).await;
    sleep(Duration::from_secs(30)).await;
    assert_eq!(client.get(&format!("{PODS}/leaving")).await.code, 200);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(client.get(&format!("{PODS}/leaving")).await.code, 404);
    assert_eq!(client.get(&format!("{PODS}/kept")).await.code, 200);
}

#[tokio::test(start_paused = true)]
async fn events_are_forgotten_after_an_hour() {
    let (client, _guard) = started().await;
    client.post(PODS, &pod("a")).await;
    settle().await;
    let count = || async { client.get("/api/v1/events").await.body["items"].as_array().unwrap().len() };
    assert_eq!(count().await, 1);
    sleep(Duration::from_secs(3500)).await;
    assert_eq!(count().await, 1);
    sleep(Duration::from_secs(200)).await;
    assert_eq!(count().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_namespace_that_always_exists_comes_back() {
    let (client, _guard) = started().await;
    settle().await;
    for (name, code) in
        [("kube-node-lease", 200), ("default", 403), ("kube-system", 403), ("kube-public", 403)]
    {
        let path = format!("/api/v1/namespaces/{name}");
        let before = client.get(&path).await;
        assert_eq!(client.delete(&path, &json!({})).await.code, code, "{name}");
        settle().await;
        let after = client.get(&path).await;
        assert_eq!((after.code, after.text("/status/phase")), (200, "Active"), "{name}");
        assert_eq!(after.text("/metadata/uid") == before.text("/metadata/uid"), code == 403, "{name}");
        assert_eq!(client.get(&format!("{path}/serviceaccounts/default")).await.code, 200, "{name}");
    }
}
