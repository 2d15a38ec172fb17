//! Watches: nothing missed, nothing twice, too old is told at once (UP-60).

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::support::{Client, PODS, config_map, pod};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_then_watch_sees_each_object_exactly_once() {
    let client = Client::admin().await;
    for round in 0..1000 {
        let made = {
            let (client, body) = (client.clone(), config_map(&format!("m{round}")));
            tokio::spawn(async move { client.post(MAPS, &body).await.code })
        };
        if round % 3 == 0 {
            tokio::task::yield_now().await;
        }
        let list = client.get(MAPS).await;
        let mut seen = BTreeMap::<String, usize>::new();
        for item in list.body["items"].as_array().unwrap() {
            *seen.entry(item["metadata"]["name"].as_str().unwrap().to_owned()).or_default() += 1;
        }
        let revision = list.text("/metadata/resourceVersion").to_owned();
        let mut watch =
            client.watch(&format!("{MAPS}?watch=true&resourceVersion={revision}&timeoutSeconds=600")).await;
        assert_eq!(made.await.unwrap(), 201);
        let name = format!("m{round}");
        if !seen.contains_key(&name) {
            let (kind, name) = watch.pair().await;
            assert_eq!(kind, "ADDED");
            *seen.entry(name).or_default() += 1;
        }
        assert_eq!(seen.get(&name), Some(&1), "round {round}");
        assert!(seen.values().all(|count| *count == 1));
        assert_eq!(client.delete(&format!("{MAPS}/{name}"), &json!({})).await.code, 200);
    }
}

#[tokio::test]
async fn a_watch_from_a_compacted_revision_is_told_410_first() {
    let client = Client::admin().await;
    let mut big = config_map("big");
    big["data"] = json!({ "a": "x".repeat(1 << 20) });
    client.post(MAPS, &big).await;
    for round in 0..20 {
        client.merge(&format!("{MAPS}/big"), &json!({ "data": { "round": round.to_string() } })).await;
    }
    let mut watch = client.watch("/api/v1/configmaps?watch=true&resourceVersion=5").await;
    let event = watch.next().await.unwrap();
    assert_eq!((event["type"].as_str(), event["object"]["code"].as_u64()), (Some("ERROR"), Some(410)));
    assert_eq!(event["object"]["reason"], "Expired");
    assert!(watch.next().await.is_none());
    let mut future = client.watch("/api/v1/configmaps?watch=true&resourceVersion=99999").await;
    assert_eq!(future.next().await.unwrap()["object"]["code"], 410);
}

#[tokio::test]
async fn an_object_that_enters_or_leaves_the_selection_is_added_or_deleted() {
    let client = Client::admin().await;
    let mut watch = client.watch(&format!("{PODS}?watch=1&labelSelector=on")).await;
    client.post(PODS, &pod("a")).await;
    let set = |value: Value| json!({ "metadata": { "labels": { "on": value } } });
    let path = format!("{PODS}/a");
    client.merge(&path, &set("1".into())).await;
    assert_eq!(watch.pair().await, ("ADDED".into(), "a".into()));
    client.merge(&path, &set("2".into())).await;
    assert_eq!(watch.pair().await, ("MODIFIED".into(), "a".into()));
    let left = client.merge(&path, &set(Value::Null)).await;
    let event = watch.next().await.unwrap();
    assert_eq!(event["type"], "DELETED");
    assert_eq!(event["object"]["metadata"]["labels"]["on"], "2", "as the watcher knew it");
    assert_eq!(event["object"]["metadata"]["resourceVersion"], left.body["metadata"]["resourceVersion"]);
    client.delete(&path, &json!({})).await;
    assert!(watch.is_silent().await);
}

#[tokio::test]
async fn initial_events_end_with_a_marked_bookmark() {
    let client = Client::admin().await;
    for name in ["a", "b"] {
        client.post(PODS, &pod(name)).await;
    }
    let query =
        "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let mut watch = client.watch(&format!("{PODS}?{query}")).await;
    assert_eq!(watch.pair().await, ("ADDED".into(), "a".into()));
    assert_eq!(watch.pair().await, ("ADDED".into(), "b".into()));
    let end = watch.next().await.unwrap();
    assert_eq!(end["type"], "BOOKMARK");
    assert_eq!(end["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
    client.post(PODS, &pod("c")).await;
    assert_eq!(watch.pair().await, ("ADDED".into(), "c".into()));
}

#[tokio::test(start_paused = true)]
async fn bookmarks_come_each_minute_and_a_watch_ends_at_its_limit() {
    let client = Client::admin().await;
    let mut watch =
        client.watch(&format!("{PODS}?watch=true&allowWatchBookmarks=true&timeoutSeconds=150")).await;
    let started = tokio::time::Instant::now();
    for _ in 0..2 {
        assert_eq!(watch.next().await.unwrap()["type"], "BOOKMARK");
    }
    assert!(watch.next().await.is_none());
    assert_eq!(started.elapsed().as_secs(), 150);
}

#[tokio::test]
async fn a_watcher_that_does_not_keep_up_is_ended() {
    let client = Client::admin().await;
    let mut watch = client.watch(&format!("{MAPS}?watch=true")).await;
    client.post(MAPS, &config_map("a")).await;
    for round in 0..4200 {
        client.merge(&format!("{MAPS}/a"), &json!({ "data": { "round": round.to_string() } })).await;
    }
    let mut count = 0;
    while watch.next().await.is_some() {
        count += 1;
    }
    assert!((4096..4201).contains(&count), "{count}");
}
