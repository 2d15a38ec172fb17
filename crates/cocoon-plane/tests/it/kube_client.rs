//! The plane through `kube`, as the node agent uses it.

use std::collections::BTreeSet;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Pod},
    events::v1::Event as NewEvent,
};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent, WatchParams},
    runtime::{
        events::{Event, EventType, Recorder, Reporter},
        watcher,
    },
};
use serde_json::json;
use tower::ServiceExt as _;

use crate::support::{self, admin, node_user};

fn client(plane: &cocoon_plane::plane::Plane, user: cocoon_plane::plane::User) -> Client {
    let service = plane
        .service(user)
        .map_request(|request: http::Request<kube::client::Body>| request.map(axum::body::Body::new));
    Client::new(service, "default")
}

fn typed<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).unwrap()
}

#[tokio::test]
async fn both_kinds_of_watcher_see_what_happens() {
    for streaming in [false, true] {
        let plane = support::plane().await;
        let pods: Api<Pod> = Api::default_namespaced(client(&plane, admin()));
        pods.create(&PostParams::default(), &typed(support::pod("a"))).await.unwrap();
        let config = watcher::Config::default();
        let config = if streaming { config.streaming_lists() } else { config };
        let mut events = Box::pin(watcher(pods.clone(), config));
        let mut seen = BTreeSet::new();
        loop {
            match events.try_next().await.unwrap().unwrap() {
                watcher::Event::InitApply(pod) => {
                    seen.insert(pod.metadata.name.unwrap());
                }
                watcher::Event::InitDone => break,
                _ => {}
            }
        }
        assert_eq!(seen, BTreeSet::from(["a".to_owned()]));
        pods.create(&PostParams::default(), &typed(support::pod("b"))).await.unwrap();
        let watcher::Event::Apply(pod) = events.try_next().await.unwrap().unwrap() else {
            panic!("no event")
        };
        assert_eq!(pod.metadata.name.as_deref(), Some("b"));
        pods.delete("b", &DeleteParams::default()).await.unwrap();
        let watcher::Event::Delete(_) = events.try_next().await.unwrap().unwrap() else {
            panic!("no deletion")
        };
    }
}

#[tokio::test]
async fn a_bookmark_is_read_by_every_typed_client() {
    async fn check<K>(api: Api<K>)
    where
        K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + 'static,
    {
        let params = WatchParams::default().initial_events();
        let mut events = Box::pin(api.watch(&params, "0").await.unwrap());
        loop {
            match events.next().await.unwrap().unwrap() {
                WatchEvent::Bookmark(_) => return,
                WatchEvent::Added(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    let plane = support::plane().await;
    let client = client(&plane, admin());
    check::<Pod>(Api::all(client.clone())).await;
    check::<Node>(Api::all(client.clone())).await;
    check::<Lease>(Api::all(client.clone())).await;
    check::<NewEvent>(Api::all(client.clone())).await;
    check::<k8s_openapi::api::core::v1::Event>(Api::all(client.clone())).await;
    check::<k8s_openapi::api::core::v1::Namespace>(Api::all(client.clone())).await;
    check::<k8s_openapi::api::core::v1::Secret>(Api::all(client.clone())).await;
}

#[tokio::test]
async fn a_node_agent_registers_renews_reports_and_finishes() {
    let plane = support::plane().await;
    let (admin, agent) = (client(&plane, admin()), client(&plane, node_user("n1")));
    let nodes: Api<Node> = Api::all(agent.clone());
    let missing = nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(json!({}))).await;
    assert!(matches!(missing, Err(kube::Error::Api(status)) if status.code == 404));
    nodes.create(&PostParams::default(), &typed(support::node("n1"))).await.unwrap();
    let beat = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }] } });
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Strategic(beat)).await.unwrap();

    let leases: Api<Lease> = Api::namespaced(agent.clone(), "kube-node-lease");
    let lease = json!({ "metadata": { "name": "n1" }, "spec": { "holderIdentity": "n1", "leaseDurationSeconds": 40,
        "renewTime": "2026-01-01T00:00:00.000001Z" } });
    let made = leases.create(&PostParams::default(), &typed(lease)).await.unwrap();
    let renewed = leases.replace("n1", &PostParams::default(), &made).await.unwrap();
    assert_eq!(made.metadata.resource_version, renewed.metadata.resource_version);

    let mut pod = support::pod("a");
    pod["spec"]["nodeName"] = "n1".into();
    let made = Api::<Pod>::default_namespaced(admin.clone())
        .create(&PostParams::default(), &typed(pod))
        .await
        .unwrap();
    let own =
        Api::<Pod>::all(agent.clone()).list(&ListParams::default().fields("spec.nodeName=n1")).await.unwrap();
    assert_eq!(own.items.len(), 1);
    let pods: Api<Pod> = Api::default_namespaced(agent.clone());
    let uid = made.metadata.uid.clone().unwrap();
    let status = json!({ "metadata": { "uid": uid }, "status": { "phase": "Running", "podIP": "10.0.0.1" } });
    pods.patch_status("a", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    let marks = json!({ "metadata": { "uid": uid, "annotations": { "vm.cocoonstack.io/id": "X" } } });
    pods.patch("a", &PatchParams::default(), &Patch::Merge(marks)).await.unwrap();

    let reporter = Reporter { controller: "cocoon".into(), instance: Some("n1".into()) };
    let reference = k8s_openapi::api::core::v1::ObjectReference {
        kind: Some("Pod".into()),
        name: Some("a".into()),
        namespace: Some("default".into()),
        uid: Some(uid.clone()),
        ..Default::default()
    };
    let event = Event {
        type_: EventType::Normal,
        reason: "Woken".into(),
        note: Some("up again".into()),
        action: "Wake".into(),
        secondary: None,
    };
    let recorder = Recorder::new(agent.clone(), reporter);
    for _ in 0..2 {
        recorder.publish(&event, &reference).await.unwrap();
    }
    let told = Api::<k8s_openapi::api::core::v1::Event>::default_namespaced(admin.clone());
    let told = told.list(&ListParams::default().fields("involvedObject.name=a")).await.unwrap();
    assert_eq!(told.items[0].message.as_deref(), Some("up again"));

    Api::<Pod>::default_namespaced(admin).delete("a", &DeleteParams::default()).await.unwrap();
    let finish = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(Preconditions { uid: Some(uid), resource_version: None }),
        ..DeleteParams::default()
    };
    pods.delete("a", &finish).await.unwrap();
    assert!(pods.get_opt("a").await.unwrap().is_none());
}
