//! List and watch against an API server of a few lines.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use cocoon_kit::world::RealWorld;
use http::{Request, Response};
use http_body_util::Full;
use kube::{Client, client::Body};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    config::NodeConfig,
    owner::{Context, stage},
    ports::fake::Fake,
};

/// Answers in order; the last one is repeated.
#[derive(Debug, Default)]
struct Script {
    asked: Vec<String>,
    lists: Vec<Value>,
    watches: Vec<(u16, String)>,
    /// Watches after those are closed at once instead of refused.
    closes: bool,
}

fn client(script: &Arc<Mutex<Script>>) -> Client {
    let script = Arc::clone(script);
    let service = tower::service_fn(move |request: Request<Body>| {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let mut script = script.lock().unwrap();
        let (code, body) = if query.contains("watch=true") {
            let position =
                query.split('&').find(|part| part.starts_with("resourceVersion=")).unwrap_or_default();
            script.asked.push(format!("watch {position}"));
            if script.watches.is_empty() {
                (if script.closes { 200 } else { 500 }, String::new())
            } else {
                script.watches.remove(0)
            }
        } else {
            script.asked.push("list".to_owned());
            let list = if script.lists.len() > 1 { script.lists.remove(0) } else { script.lists[0].clone() };
            (200, list.to_string())
        };
        async move {
            let response = Response::builder().status(code).header("content-type", "application/json");
            Ok::<_, tower::BoxError>(response.body(Full::new(Bytes::from(body))).unwrap())
        }
    });
    Client::new(service, "default")
}

fn list(version: &str, pods: &[Pod]) -> Value {
    json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": pods})
}

fn line(kind: &str, object: &Value) -> String {
    format!("{}\n", json!({"type": kind, "object": object}))
}

fn versioned(name: &str, uid: &str, version: &str) -> Value {
    let mut value = serde_json::to_value(stage::pod(name, uid, &[])).unwrap();
    value["metadata"]["resourceVersion"] = version.into();
    (value["kind"], value["apiVersion"]) = ("Pod".into(), "v1".into());
    value
}

#[tokio::test(start_paused = true)]
async fn a_watch_goes_on_where_it_was_lists_again_after_410_and_backs_off_when_refused() {
    let bookmark = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": "20"}});
    let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"});
    let script = Arc::new(Mutex::new(Script {
        lists: vec![list("10", &[stage::pod("a", "1", &[])]), list("50", &[stage::pod("b", "2", &[])])],
        watches: vec![
            (200, line("ADDED", &versioned("b", "2", "11")) + &line("BOOKMARK", &bookmark)),
            (200, line("ERROR", &gone)),
            (200, String::new()),
        ],
        ..Script::default()
    }));
    let table = follow_for_a_minute(&script).await;
    assert!(table.get("1").is_none() && table.get("2").is_some(), "the missed deletion was told");
    let asked = script.lock().unwrap().asked.clone();
    let expected =
        ["list", "watch resourceVersion=10", "watch resourceVersion=20", "list", "watch resourceVersion=50"];
    assert_eq!(asked[..5], expected);
    assert!(asked.len() < 20, "{} requests in a minute of trouble", asked.len());
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_closes_at_once_is_not_repeated_without_pause() {
    let lists = vec![list("10", &[stage::pod("a", "1", &[])])];
    let script = Arc::new(Mutex::new(Script { lists, closes: true, ..Script::default() }));
    follow_for_a_minute(&script).await;
    let asked = script.lock().unwrap().asked.len();
    assert!(asked < 20, "{asked} requests in a minute");
}

async fn follow_for_a_minute(script: &Arc<Mutex<Script>>) -> Arc<PodTable> {
    let (fake, token, world) = (Fake::default(), CancellationToken::new(), Arc::new(RealWorld));
    let api = Arc::new(stage::Api::default());
    let context =
        Context::new(NodeConfig::new("n1"), fake.ports(true), Arc::clone(&world) as _, api, token.clone());
    let router = Router::new(Arc::clone(&context));
    let table = Arc::new(PodTable::default());
    let watch = PodWatch::new(client(script), "n1", Arc::clone(&table), world);
    let (changes, position) = watch.list().await.unwrap();
    assert_eq!((changes.len(), position.as_str()), (1, "10"));
    let end = token.clone();
    tokio::join!(watch.follow(position, &router, token), async move {
        tokio::time::sleep(Duration::from_secs(60)).await;
        end.cancel();
    });
    table
}
