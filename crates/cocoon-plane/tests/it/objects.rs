//! Create, read, change, delete: what is allowed, what is refused and in which words.

use cocoon_plane::plane::User;
use serde_json::{Value, json};

use crate::support::{Client, PODS, admin, config_map, node, node_user, pod};

#[tokio::test]
async fn a_created_pod_has_the_fields_that_clients_rely_on() {
    let client = Client::admin().await;
    let made = client.post(PODS, &pod("a")).await;
    assert_eq!(made.code, 201, "{:?}", made.body);
    for (path, wanted) in [
        ("/status/phase", "Pending"),
        ("/status/qosClass", "BestEffort"),
        ("/spec/restartPolicy", "Always"),
        ("/metadata/namespace", "default"),
        ("/kind", "Pod"),
    ] {
        assert_eq!(made.text(path), wanted, "{path}");
    }
    assert!(!made.text("/metadata/uid").is_empty() && !made.text("/metadata/resourceVersion").is_empty());
    assert_eq!(client.get(&format!("{PODS}/a")).await.body, made.body);
}

#[tokio::test]
async fn refusals_have_the_code_and_reason_of_the_api() {
    let client = Client::admin().await;
    client.post(PODS, &pod("a")).await;
    let mut named = pod("a");
    named["metadata"]["namespace"] = "other".into();
    let mut versioned = pod("v");
    versioned["metadata"]["resourceVersion"] = "1".into();
    let huge = json!({ "data": { "x": "y".repeat(4 << 20) } });
    for (method, path, body, code, reason) in [
        ("POST", PODS, pod("a"), 409, "AlreadyExists"),
        ("POST", PODS, pod("A_"), 422, "Invalid"),
        ("POST", PODS, json!({ "metadata": { "name": "x" } }), 422, "Invalid"),
        ("POST", PODS, json!({ "kind": "Node", "metadata": { "name": "x" } }), 400, "BadRequest"),
        ("POST", PODS, json!([]), 400, "BadRequest"),
        ("POST", PODS, named, 400, "BadRequest"),
        ("POST", PODS, versioned, 400, "BadRequest"),
        ("POST", "/api/v1/namespaces/none/pods", pod("a"), 404, "NotFound"),
        ("POST", "/api/v1/pods", pod("a"), 405, "MethodNotAllowed"),
        ("POST", "/api/v1/namespaces/default/configmaps", huge, 413, "RequestEntityTooLarge"),
        ("GET", "/api/v1/namespaces/default/pods/none", json!({}), 404, "NotFound"),
        ("GET", "/api/v1/namespaces/default/nodes/none", json!({}), 404, "NotFound"),
        ("GET", "/apis/apps/v1/deployments", json!({}), 404, "NotFound"),
        ("GET", "/api/v1/pods?labelSelector=a%20b", json!({}), 400, "BadRequest"),
        ("GET", "/api/v1/pods?fieldSelector=spec.foo=1", json!({}), 400, "BadRequest"),
        ("GET", "/api/v1/pods?limit=x", json!({}), 400, "BadRequest"),
        ("GET", "/api/v1/pods?continue=x", json!({}), 400, "BadRequest"),
        ("GET", "/api/v1/pods?resourceVersion=999999", json!({}), 504, "Timeout"),
        ("GET", "/api/v1/pods?resourceVersion=1&resourceVersionMatch=Exact", json!({}), 410, "Expired"),
        ("PUT", "/api/v1/namespaces/default/pods/none", pod("none"), 404, "NotFound"),
        ("PUT", "/api/v1/namespaces/default/pods/a", pod("b"), 400, "BadRequest"),
        ("DELETE", "/api/v1/namespaces/kube-system", json!({}), 403, "Forbidden"),
        (
            "DELETE",
            "/api/v1/namespaces/default/pods/a",
            json!({ "preconditions": { "uid": "x" } }),
            409,
            "Conflict",
        ),
        ("DELETE", "/api/v1/pods", json!({}), 405, "MethodNotAllowed"),
        ("PATCH", "/api/v1/namespaces/default/pods/a", json!({}), 415, "UnsupportedMediaType"),
        ("POST", "/api/v1/namespaces/default/pods/a/attach", json!({}), 501, "NotImplemented"),
        ("GET", "/api/v1/namespaces/default/pods/a/log", json!({}), 400, "BadRequest"),
        ("GET", "/nothing/here", json!({}), 404, "NotFound"),
    ] {
        let answer = client.ask(method, path, "application/json", body.to_string()).await;
        assert_eq!((answer.code, answer.text("/reason")), (code, reason), "{method} {path}: {}", answer.body);
        assert_eq!((answer.text("/kind"), answer.text("/status")), ("Status", "Failure"));
        assert!(!answer.text("/message").is_empty());
    }
}

#[tokio::test]
async fn no_path_that_takes_a_body_takes_one_that_is_not_an_object() {
    let client = Client::admin().await;
    client.post(PODS, &pod("a")).await;
    let (access, identity) = ("/apis/authorization.k8s.io/v1", "/apis/authentication.k8s.io/v1");
    for (method, path) in [
        ("POST", format!("{access}/selfsubjectaccessreviews")),
        ("POST", format!("{access}/subjectaccessreviews")),
        ("POST", format!("{access}/selfsubjectrulesreviews")),
        ("POST", format!("{identity}/selfsubjectreviews")),
        ("POST", format!("{identity}/tokenreviews")),
        ("POST", PODS.to_owned()),
        ("POST", format!("{PODS}/a/binding")),
        ("POST", format!("{PODS}/a/eviction")),
        ("PUT", format!("{PODS}/a")),
        ("PUT", format!("{PODS}/a/status")),
        ("PUT", "/api/v1/namespaces/default/finalize".to_owned()),
        ("DELETE", format!("{PODS}/a")),
        ("DELETE", PODS.to_owned()),
    ] {
        for body in ["[]", "\"x\"", "1", "true", "null"] {
            let answer = client.ask(method, &path, "application/json", body).await;
            assert_eq!(answer.code, 400, "{method} {path} {body}: {}", answer.body);
        }
    }
    let patch = json!([{ "op": "replace", "path": "", "value": "x" }]).to_string();
    let answer = client.ask("PATCH", &format!("{PODS}/a"), "application/json-patch+json", patch).await;
    assert_eq!(answer.code, 400, "{}", answer.body);
}

#[tokio::test]
async fn a_finalize_or_binding_of_something_older_is_refused() {
    let client = Client::admin().await;
    let old = client.post("/api/v1/namespaces", &json!({ "metadata": { "name": "n" } })).await;
    client.post(PODS, &pod("a")).await;
    client.post("/api/v1/nodes", &node("n1")).await;
    let path = "/api/v1/namespaces/n/finalize";
    let binding = json!({ "target": { "kind": "Node", "name": "n1" } });
    for (field, value) in [("uid", json!("other")), ("resourceVersion", json!("1"))] {
        let mut space = old.body.clone();
        space["metadata"][field] = value.clone();
        space["spec"]["finalizers"] = json!([]);
        assert_eq!(client.put(path, &space).await.code, 409, "finalize with another {field}");
        let mut stale = binding.clone();
        stale["metadata"] = json!({ "name": "a", field: value });
        let answer = client.post(&format!("{PODS}/a/binding"), &stale).await;
        assert_eq!(answer.code, 409, "binding with another {field}: {}", answer.body);
    }
    let kept = client.get("/api/v1/namespaces/n").await;
    assert_eq!(kept.body["spec"]["finalizers"], json!(["kubernetes"]));
    let mut space = old.body.clone();
    space["spec"]["finalizers"] = json!([]);
    assert_eq!(client.put(path, &space).await.code, 200);
    assert_eq!(client.post(&format!("{PODS}/a/binding"), &binding).await.code, 201);
}

#[tokio::test]
async fn a_write_that_changes_nothing_makes_no_revision() {
    let client = Client::admin().await;
    let made = client.post(PODS, &pod("a")).await;
    let path = format!("{PODS}/a");
    for same in [
        client.merge(&path, &json!({})).await,
        client.merge(&path, &json!({ "metadata": { "labels": null } })).await,
        client
            .strategic(&path, &json!({ "spec": { "containers": [{ "name": "agent", "image": "x:1" }] } }))
            .await,
        client.put(&path, &made.body).await,
        client.ask("PATCH", &path, "application/json-patch+json", "[]").await,
    ] {
        assert_eq!(same.code, 200, "{}", same.body);
        assert_eq!(same.body, made.body);
    }
}

#[tokio::test]
async fn uid_and_revision_in_a_body_are_preconditions() {
    let client = Client::admin().await;
    let made = client.post(PODS, &pod("a")).await;
    let path = format!("{PODS}/a");
    let (uid, revision) = (made.text("/metadata/uid"), made.text("/metadata/resourceVersion"));
    let patch = |uid: &str, revision: &str, label: &str| json!({ "metadata": { "uid": uid, "resourceVersion": revision, "labels": { "l": label } } });
    for (path, body, code) in [
        (path.clone(), patch("other", revision, "1"), 409),
        (path.clone(), patch(uid, "1", "1"), 409),
        (path.clone(), patch(uid, revision, "1"), 200),
        (path.clone(), patch(uid, revision, "2"), 409),
        (format!("{path}/status"), patch("other", "", "3"), 409),
    ] {
        assert_eq!(client.merge(&path, &body).await.code, code, "{body}");
    }
    let mut stale = made.body.clone();
    stale["metadata"]["labels"] = json!({ "l": "4" });
    let answer = client.put(&path, &stale).await;
    assert_eq!((answer.code, answer.text("/reason")), (409, "Conflict"));
    assert!(answer.text("/message").contains("the object has been modified"));
}

#[tokio::test]
async fn the_status_changes_only_through_its_subresource() {
    let client = Client::admin().await;
    client.post(PODS, &pod("a")).await;
    let path = format!("{PODS}/a");
    let body = json!({ "metadata": { "labels": { "x": "y" } }, "status": { "phase": "Running", "podIP": "1.2.3.4" } });
    let main = client.merge(&path, &body).await;
    assert_eq!((main.text("/status/phase"), main.text("/metadata/labels/x")), ("Pending", "y"));
    let spec = json!({ "spec": { "containers": null }, "status": { "phase": "Running" } });
    let status = client.merge(&format!("{path}/status"), &spec).await;
    assert_eq!((status.code, status.text("/status/phase")), (200, "Running"), "{}", status.body);
    assert_eq!(status.text("/spec/containers/0/image"), "x:1");
    assert_eq!(status.text("/status/qosClass"), "BestEffort");
}

#[tokio::test]
async fn fields_that_do_not_belong_are_refused_warned_about_or_dropped() {
    let client = Client::admin().await;
    let text = pod("a").to_string().replace("\"image\"", "\"imagee\":\"y\",\"image\":\"x\",\"image\"");
    let ask = |mode: &str| {
        let (client, path, text) =
            (client.clone(), format!("{PODS}?dryRun=All&fieldValidation={mode}"), text.clone());
        async move { client.ask("POST", &path, "application/json", text).await }
    };
    let strict = ask("Strict").await;
    assert_eq!(strict.code, 400);
    for complaint in
        ["duplicate field \"spec.containers[0].image\"", "unknown field \"spec.containers[0].imagee\""]
    {
        assert!(strict.text("/message").contains(complaint), "{}", strict.text("/message"));
    }
    let warned = ask("Warn").await;
    assert_eq!((warned.code, warned.headers.get_all("warning").iter().count()), (201, 2));
    assert_eq!(warned.body.pointer("/spec/containers/0/imagee"), None);
    let ignored = ask("Ignore").await;
    assert_eq!((ignored.code, ignored.headers.contains_key("warning")), (201, false));
    assert_eq!(ask("Other").await.code, 400);
    client.post(PODS, &pod("b")).await;
    let patch = json!({ "metadata": { "labels": { "a": "b" } }, "spek": {} });
    let refused = client.merge(&format!("{PODS}/b?fieldValidation=Strict"), &patch).await;
    assert_eq!(refused.code, 400);
    let warned = client.merge(&format!("{PODS}/b"), &patch).await;
    assert_eq!((warned.code, warned.headers.contains_key("warning")), (200, true));
}

#[tokio::test]
async fn a_field_given_twice_is_told_of_by_every_verb_that_writes() {
    let client = Client::admin().await;
    client.post(PODS, &pod("b")).await;
    client.post("/api/v1/namespaces", &json!({ "metadata": { "name": "n" } })).await;
    let pod_path = format!("{PODS}/b");
    let twice = r#"{"metadata":{"name":"NAME","labels":{"a":"1","a":"2"}}"#;
    let body = |name: &str| format!("{}}}", twice.replace("NAME", name));
    let labels = r#"[{"op":"add","path":"/metadata/labels","path":"/metadata/labels","value":{},"x":1}]"#;
    let target = r#","target":{"kind":"Node","name":"n1"}}"#;
    for (method, path, content_type, body, code, warnings) in [
        ("PATCH", pod_path.clone(), "application/merge-patch+json", body("b"), 200, 1),
        ("PATCH", pod_path.clone(), "application/strategic-merge-patch+json", body("b"), 200, 1),
        ("PATCH", pod_path.clone(), "application/json-patch+json", labels.to_owned(), 200, 2),
        ("PUT", "/api/v1/namespaces/n/finalize".into(), "application/json", body("n"), 200, 1),
        (
            "POST",
            format!("{pod_path}/binding"),
            "application/json",
            twice.replace("NAME", "b") + target,
            201,
            1,
        ),
        ("POST", format!("{pod_path}/eviction"), "application/json", body("b"), 201, 1),
    ] {
        let path_strict = format!("{path}?fieldValidation=Strict");
        let strict = client.ask(method, &path_strict, content_type, body.clone()).await;
        assert_eq!(strict.code, 400, "{method} {path} {content_type}: {}", strict.body);
        assert!(strict.text("/message").contains("duplicate field"), "{}", strict.text("/message"));
        let warned = client.ask(method, &path, content_type, body).await;
        let told = warned.headers.get_all("warning").iter().count();
        assert_eq!((warned.code, told), (code, warnings), "{method} {path} {content_type}: {}", warned.body);
    }
}

#[tokio::test]
async fn metrics_are_for_those_who_run_the_system() {
    let client = Client::admin().await;
    let user = |name: &str, group: &str| User { name: name.into(), groups: vec![group.into()] };
    for (user, allowed) in [
        (admin(), true),
        (node_user("n1"), true),
        (user("prometheus", "system:monitoring"), true),
        (user("eve", "people"), false),
    ] {
        let client = client.as_user(user.clone());
        for path in ["/metrics", "/metrics/"] {
            assert_eq!(client.get(path).await.code == 200, allowed, "{user:?} {path}");
        }
        assert_eq!(client.get("/version").await.code, 200);
        let ask = json!({ "spec": { "nonResourceAttributes": { "verb": "get", "path": "/metrics" } } });
        let answer = client.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", &ask).await;
        assert_eq!(answer.body.pointer("/status/allowed"), Some(&json!(allowed)), "{user:?}");
    }
}

#[tokio::test]
async fn a_dry_run_changes_nothing() {
    let client = Client::admin().await;
    assert_eq!(client.post(&format!("{PODS}?dryRun=All"), &pod("a")).await.code, 201);
    assert_eq!(client.get(&format!("{PODS}/a")).await.code, 404);
    client.post(PODS, &pod("a")).await;
    let patched = client
        .merge(&format!("{PODS}/a?dryRun=All"), &json!({ "metadata": { "labels": { "a": "b" } } }))
        .await;
    assert_eq!(patched.text("/metadata/labels/a"), "b");
    client.delete(&format!("{PODS}/a?dryRun=All"), &json!({})).await;
    let kept = client.get(&format!("{PODS}/a")).await;
    assert_eq!((kept.code, kept.body.pointer("/metadata/labels")), (200, None));
}

#[tokio::test]
async fn names_are_generated_and_differ() {
    let client = Client::admin().await;
    let mut body = pod("x");
    body["metadata"] = json!({ "generateName": "web-" });
    let (one, two) = (client.post(PODS, &body).await, client.post(PODS, &body).await);
    assert_eq!((one.code, two.code), (201, 201));
    assert!(one.text("/metadata/name").starts_with("web-") && one.text("/metadata/name").len() == 9);
    assert_ne!(one.text("/metadata/name"), two.text("/metadata/name"));
}

#[tokio::test]
async fn a_bound_pod_is_given_time_and_goes_when_its_node_says_so() {
    let client = Client::admin().await;
    client.post("/api/v1/nodes", &node("n1")).await;
    let made = client.post(PODS, &pod("a")).await;
    let binding =
        json!({ "apiVersion": "v1", "kind": "Binding", "target": { "kind": "Node", "name": "n1" } });
    let path = format!("{PODS}/a");
    assert_eq!(client.post(&format!("{path}/binding"), &binding).await.code, 201);
    assert_eq!(client.post(&format!("{path}/binding"), &binding).await.code, 409);
    let marked = client.delete(&path, &json!({})).await;
    assert_eq!(marked.body.pointer("/metadata/deletionGracePeriodSeconds"), Some(&json!(30)));
    assert_eq!(client.get(&path).await.code, 200);
    let agent = client.as_user(node_user("n1"));
    let options = |uid: &str| json!({ "gracePeriodSeconds": 0, "preconditions": { "uid": uid } });
    assert_eq!(agent.delete(&path, &options("other")).await.code, 409);
    assert_eq!(
        client.as_user(node_user("n2")).delete(&path, &options(made.text("/metadata/uid"))).await.code,
        403
    );
    assert_eq!(agent.delete(&path, &options(made.text("/metadata/uid"))).await.code, 200);
    assert_eq!(client.get(&path).await.code, 404);
}

#[tokio::test]
async fn finalizers_hold_an_object_and_may_only_become_fewer() {
    let client = Client::admin().await;
    let maps = "/api/v1/namespaces/default/configmaps";
    let mut map = config_map("a");
    map["metadata"]["finalizers"] = json!(["x.io/one", "x.io/two"]);
    client.post(maps, &map).await;
    let path = format!("{maps}/a");
    let deleted = client.delete(&path, &json!({})).await;
    assert!(!deleted.text("/metadata/deletionTimestamp").is_empty(), "{}", deleted.body);
    let more =
        client.merge(&path, &json!({ "metadata": { "finalizers": ["x.io/one", "x.io/three"] } })).await;
    assert_eq!(more.code, 422);
    assert_eq!(client.merge(&path, &json!({ "metadata": { "finalizers": ["x.io/one"] } })).await.code, 200);
    assert_eq!(client.get(&path).await.code, 200);
    assert_eq!(client.merge(&path, &json!({ "metadata": { "finalizers": null } })).await.code, 200);
    assert_eq!(client.get(&path).await.code, 404);
}

#[tokio::test]
async fn lists_select_by_labels_and_fields_and_come_in_pieces_of_one_revision() {
    let client = Client::admin().await;
    for at in 0..7 {
        let mut body = pod(&format!("p{at}"));
        body["metadata"]["labels"] = json!({ "even": if at % 2 == 0 { "yes" } else { "no" } });
        client.post(PODS, &body).await;
    }
    let names = |body: &Value| {
        let items = body["items"].as_array().unwrap().iter();
        items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let some = client.get(&format!("{PODS}?labelSelector=even%20in%20(yes)")).await;
    assert_eq!(names(&some.body), ["p0", "p2", "p4", "p6"]);
    let one = client.get("/api/v1/pods?fieldSelector=metadata.name%3Dp3,status.phase!%3DRunning").await;
    assert_eq!(names(&one.body), ["p3"]);
    let first = client.get(&format!("{PODS}?limit=3")).await;
    assert_eq!(names(&first.body), ["p0", "p1", "p2"]);
    assert_eq!(first.body.pointer("/metadata/remainingItemCount"), Some(&json!(4)));
    client.delete(&format!("{PODS}/p4"), &json!({})).await;
    let next = client.get(&format!("{PODS}?limit=9&continue={}", first.text("/metadata/continue"))).await;
    assert_eq!(names(&next.body), ["p3", "p4", "p5", "p6"], "the second piece agrees with the first");
    assert_eq!(next.text("/metadata/resourceVersion"), first.text("/metadata/resourceVersion"));
    let other = client.get(&format!("/api/v1/pods?continue={}", first.text("/metadata/continue"))).await;
    assert_eq!(other.code, 400, "a token serves its own question only");
    let gone = client.delete(&format!("{PODS}?labelSelector=even%3Dno"), &json!({})).await;
    assert_eq!(names(&gone.body), ["p1", "p3", "p5"]);
}

#[tokio::test]
async fn events_are_one_store_with_two_views() {
    let client = Client::admin().await;
    let new = json!({
        "metadata": { "name": "e" }, "eventTime": "2026-01-01T00:00:00.000000Z", "action": "Start", "reason": "Booted",
        "note": "up", "type": "Normal", "reportingController": "c", "reportingInstance": "i",
        "regarding": { "kind": "Pod", "name": "a", "namespace": "default" },
    });
    let made = client.post("/apis/events.k8s.io/v1/namespaces/default/events", &new).await;
    assert_eq!((made.code, made.text("/note")), (201, "up"), "{}", made.body);
    let path = "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3Da,reason%3DBooted";
    let core = client.get(path).await;
    assert_eq!((core.text("/items/0/message"), core.text("/items/0/involvedObject/name")), ("up", "a"));
    assert_eq!(core.text("/items/0/apiVersion"), "v1");
    let series = json!({ "series": { "count": 2, "lastObservedTime": "2026-01-01T00:01:00.000000Z" } });
    let patched = client.merge("/apis/events.k8s.io/v1/namespaces/default/events/e", &series).await;
    assert_eq!((patched.code, patched.text("/apiVersion")), (200, "events.k8s.io/v1"), "{}", patched.body);
    let core = client.get("/api/v1/namespaces/default/events/e").await;
    assert_eq!(core.body.pointer("/series/count"), Some(&json!(2)));
}

#[tokio::test]
async fn secrets_take_plain_text_and_keep_it_encoded() {
    let client = Client::admin().await;
    let secret = json!({ "metadata": { "name": "s" }, "stringData": { "a": "b" } });
    let made = client.post("/api/v1/namespaces/default/secrets", &secret).await;
    assert_eq!((made.text("/data/a"), made.text("/type")), ("Yg==", "Opaque"));
    assert_eq!(made.body.get("stringData"), None);
    let bad = json!({ "metadata": { "name": "t" }, "data": { "a": "not base64!" } });
    assert_eq!(client.post("/api/v1/namespaces/default/secrets", &bad).await.code, 400);
}

#[tokio::test]
async fn a_table_has_a_row_for_each_object() {
    let client = Client::admin().await;
    client.post(PODS, &pod("a")).await;
    let request = http::Request::get(PODS).header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io");
    let response = client.send(request.body(axum::body::Body::empty()).unwrap()).await;
    let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    let table: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(
        (table["kind"].as_str(), table["columnDefinitions"][2]["name"].as_str()),
        (Some("Table"), Some("Status"))
    );
    assert_eq!(table["rows"][0]["cells"][0], "a");
    assert_eq!(table["rows"][0]["object"]["kind"], "PartialObjectMetadata");
}

#[tokio::test]
async fn a_lease_is_made_by_put_and_a_node_makes_only_its_own() {
    let client = Client::admin().await;
    let agent = client.as_user(node_user("n1"));
    let lease = |name: &str| json!({ "metadata": { "name": name }, "spec": { "holderIdentity": name, "leaseDurationSeconds": 40 } });
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
    assert_eq!(agent.put(&format!("{leases}/n1"), &lease("n1")).await.code, 201);
    assert_eq!(agent.put(&format!("{leases}/n2"), &lease("n2")).await.code, 403);
    assert_eq!(agent.post(leases, &lease("n3")).await.code, 403);
    assert_eq!(agent.post("/api/v1/nodes", &node("n2")).await.code, 403);
    assert_eq!(agent.post("/api/v1/nodes", &node("n1")).await.code, 201);
    assert_eq!(agent.get("/api/v1/pods").await.code, 403);
    assert_eq!(agent.get("/api/v1/pods?fieldSelector=spec.nodeName%3Dn1").await.code, 200);
    assert_eq!(agent.get("/api/v1/namespaces/default/secrets").await.code, 403);
    assert_eq!(agent.get("/api").await.code, 200);
}

#[tokio::test]
async fn discovery_and_documents_agree_with_what_is_served() {
    let client = Client::admin().await;
    let groups = client.get("/apis").await;
    for group in groups.body["groups"].as_array().unwrap() {
        let version = group["preferredVersion"]["groupVersion"].as_str().unwrap();
        assert_eq!(client.get(&format!("/apis/{version}")).await.code, 200, "{version}");
    }
    let core = client.get("/api/v1").await;
    for resource in core.body["resources"].as_array().unwrap() {
        let name = resource["name"].as_str().unwrap();
        if !name.contains('/') {
            assert_eq!(client.get(&format!("/api/v1/{name}")).await.code, 200, "{name}");
        }
    }
    let rules =
        client.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", &json!({ "spec": {} })).await;
    assert_eq!((rules.code, rules.text("/status/resourceRules/0/verbs/0")), (201, "*"));
    for (path, named) in [
        ("/apis/apps/v1/namespaces/default/deployments", "apps/v1, deployments"),
        ("/api/v1/namespaces/default/pods/a/ephemeralcontainers", "v1, pods/ephemeralcontainers"),
    ] {
        let refused = client.get(path).await;
        let message = refused.text("/message");
        // Clients know this by its beginning.
        assert!(message.starts_with("the server could not find the requested resource ("), "{message}");
        assert!(message.contains(named) && message.contains("kubectl api-resources"), "{message}");
        assert_eq!((refused.code, refused.text("/reason")), (404, "NotFound"));
    }
    let index = client.get("/openapi/v3").await;
    for (path, entry) in index.body["paths"].as_object().unwrap() {
        let document = client.get(entry["serverRelativeURL"].as_str().unwrap()).await;
        assert_eq!(document.code, 200, "{path}");
    }
    let old = client.get("/openapi/v2").await;
    assert_eq!((old.code, old.text("/swagger")), (200, "2.0"), "kubectl reads it before it sends a List");
    let document = client.get("/openapi/v3/api/v1").await;
    let patch = &document.body["paths"]["/api/v1/namespaces/{namespace}/pods/{name}"]["patch"];
    assert_eq!(
        patch["x-kubernetes-group-version-kind"],
        json!({ "group": "", "version": "v1", "kind": "Pod" })
    );
    let names: Vec<_> =
        patch["parameters"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    for wanted in ["dryRun", "fieldManager", "fieldValidation"] {
        assert!(names.contains(&wanted));
    }
}
