//! The outbox against an API server of a few lines.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use cocoon_kit::world::RealWorld;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use k8s_openapi::api::core::v1::Pod;
use kube::{Client, client::Body};
use serde_json::{Value, json};

use crate::{
    cluster::Show,
    outbox::Outbox,
    owner::{inbox::Inbox, stage::pod},
    pods::table::PodTable,
    reason::{Reason, Trouble},
    status::HostFacts,
    view,
};

/// One pod, versions, and injected answers.
#[derive(Debug, Default)]
struct Server {
    pod: Option<Value>,
    version: u64,
    seen: Vec<(String, Value)>,
    /// Status codes to answer the next writes with.
    broken: Vec<u16>,
}

type Shared = Arc<Mutex<Server>>;

fn client(server: &Shared) -> Client {
    let server = Arc::clone(server);
    let service = tower::service_fn(move |request: Request<Body>| {
        let server = Arc::clone(&server);
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let answer = server.lock().unwrap().answer(&parts.method, parts.uri.path(), &body);
            let (code, value) = answer;
            let response = Response::builder().status(code).header("content-type", "application/json");
            Ok::<_, tower::BoxError>(response.body(Full::new(Bytes::from(value.to_string()))).unwrap())
        }
    });
    Client::new(service, "default")
}

fn failure(code: u16) -> (u16, Value) {
    (
        code,
        json!({"kind": "Status", "status": "Failure", "code": code, "reason": "Injected", "message": "no"}),
    )
}

impl Server {
    fn set(&mut self, pod: &Pod) {
        self.version += 1;
        let mut value = serde_json::to_value(pod).unwrap();
        value["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.pod = Some(value);
    }

    fn answer(&mut self, method: &Method, path: &str, body: &[u8]) -> (u16, Value) {
        let Some(pod) = self.pod.clone() else { return failure(404) };
        if *method == Method::GET {
            return (200, pod);
        }
        let patch: Value = serde_json::from_slice(body).unwrap();
        self.seen.push((path.rsplit('/').next().unwrap().to_owned(), patch.clone()));
        if let Some(code) = self.broken.pop() {
            return failure(code);
        }
        let asked = &patch["metadata"];
        let stale = |key: &str| !asked[key].is_null() && asked[key] != pod["metadata"][key];
        if stale("uid") || stale("resourceVersion") {
            return failure(409);
        }
        let mut merged = pod;
        json_patch::merge(&mut merged, &patch);
        self.version += 1;
        merged["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.pod = Some(merged.clone());
        (200, merged)
    }
}

fn shown() -> view::View {
    view::refused(&Trouble::new(Reason::ImageNotFound, "image x is nowhere"), 3)
}

fn outbox(server: &Shared) -> Outbox {
    let table = Arc::new(PodTable::default());
    Outbox::new(client(server), Arc::new(RealWorld), HostFacts::default(), table)
}

async fn accepted(inbox: &Inbox, version: u64) {
    for _ in 0..2000 {
        if inbox.last_accepted() >= version {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("never accepted");
}

fn show(version: u64) -> Show {
    Show { pod: Arc::new(pod("demo-0", "u1", &[])), view: shown(), version }
}

fn words(server: &Shared) -> Vec<String> {
    server.lock().unwrap().seen.iter().map(|(what, _)| what.clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn status_goes_before_annotations_and_what_is_there_already_is_not_written_again() {
    let server = Shared::default();
    server.lock().unwrap().set(&pod("demo-0", "u1", &[]));
    let (outbox, inbox) = (outbox(&server), Arc::new(Inbox::default()));
    outbox.put(show(1), Arc::clone(&inbox));
    accepted(&inbox, 1).await;
    assert_eq!(words(&server), ["status", "demo-0"]);
    outbox.put(show(2), Arc::clone(&inbox));
    accepted(&inbox, 2).await;
    let pod: Pod = serde_json::from_value(server.lock().unwrap().pod.clone().unwrap()).unwrap();
    assert_eq!(pod.metadata.annotations.unwrap()["vm.cocoonstack.io/lifecycle-state"], "failed");
    let every_uid = server.lock().unwrap().seen.iter().all(|(_, body)| body["metadata"]["uid"] == "u1");
    assert!(every_uid);
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_read_again_and_conditions_of_others_are_kept() {
    let server = Shared::default();
    let mut theirs = pod("demo-0", "u1", &[]);
    let scheduled = json!({"conditions": [{"type": "PodScheduled", "status": "True"}]});
    theirs.status = serde_json::from_value(scheduled).unwrap();
    for _ in 0..5 {
        server.lock().unwrap().set(&theirs);
    }
    let (outbox, inbox) = (outbox(&server), Arc::new(Inbox::default()));
    outbox.put(show(1), Arc::clone(&inbox));
    accepted(&inbox, 1).await;
    assert_eq!(words(&server), ["status", "status", "demo-0"]);
    let status = server.lock().unwrap().pod.clone().unwrap()["status"].clone();
    let kinds: Vec<&str> =
        status["conditions"].as_array().unwrap().iter().map(|c| c["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["PodScheduled", "Initialized", "Ready", "ContainersReady"]);
}

#[tokio::test(start_paused = true)]
async fn an_api_in_trouble_is_asked_again_until_it_accepts() {
    let server = Shared::default();
    server.lock().unwrap().set(&pod("demo-0", "u1", &[]));
    server.lock().unwrap().broken = vec![500; 6];
    let (outbox, inbox) = (outbox(&server), Arc::new(Inbox::default()));
    outbox.put(show(1), Arc::clone(&inbox));
    accepted(&inbox, 1).await;
    assert!(server.lock().unwrap().broken.is_empty());
}

#[tokio::test(start_paused = true)]
async fn another_incarnation_of_the_pod_is_never_written() {
    let server = Shared::default();
    server.lock().unwrap().set(&pod("demo-0", "u2", &[]));
    let (outbox, inbox) = (outbox(&server), Arc::new(Inbox::default()));
    outbox.put(show(1), Arc::clone(&inbox));
    accepted(&inbox, 1).await;
    let annotations: BTreeMap<String, String> = serde_json::from_value(
        server.lock().unwrap().pod.clone().unwrap()["metadata"]["annotations"].clone(),
    )
    .unwrap();
    assert!(!annotations.contains_key("vm.cocoonstack.io/lifecycle-state"));
    server.lock().unwrap().pod = None;
    outbox.put(show(2), Arc::clone(&inbox));
    accepted(&inbox, 2).await;
}
