//! A plane in memory and a small client for it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use cocoon_kit::world::World;
use cocoon_plane::plane::{Plane, PlaneConfig, User};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;
use tower::ServiceExt as _;

/// Ends a test that hangs; nothing waits for it otherwise.
pub(crate) const HANGS: Duration = Duration::from_secs(120);

/// The clock that deadlines are counted by stands still; only the test moves it. Real connections need none,
/// so how fast the machine is has no say.
pub(crate) struct StillClock(#[expect(dead_code, reason = "held for its end")] std::sync::mpsc::Sender<()>);

impl StillClock {
    pub(crate) fn new() -> Self {
        let (held, end) = std::sync::mpsc::channel::<()>();
        // As long as something blocks, the runtime leaves a paused clock alone.
        tokio::task::spawn_blocking(move || end.recv_timeout(HANGS));
        tokio::time::pause();
        Self(held)
    }
}

/// A world whose clocks follow tokio's and whose randomness is a counter.
#[derive(Debug)]
pub(crate) struct TestWorld {
    start: Instant,
    next: AtomicU64,
}

impl TestWorld {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { start: Instant::now(), next: AtomicU64::new(1) })
    }
}

impl World for TestWorld {
    fn now(&self) -> jiff::Timestamp {
        let base: jiff::Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        base + Instant::now().duration_since(self.start)
    }

    fn instant(&self) -> Instant {
        Instant::now()
    }

    fn random(&self, out: &mut [u8]) {
        for byte in out {
            // A small generator: good enough to be different.
            let x = self.next.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
            *byte = ((x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 56) as u8;
        }
    }
}

pub(crate) fn admin() -> User {
    User { name: "admin".into(), groups: vec!["system:masters".into()] }
}

pub(crate) fn node_user(name: &str) -> User {
    User { name: format!("system:node:{name}"), groups: vec!["system:nodes".into()] }
}

pub(crate) async fn plane() -> Plane {
    let config = PlaneConfig { journal: None, tokens: vec![], kubelet_client: None };
    Plane::open(config, TestWorld::new()).await.unwrap()
}

/// Sends requests as one user.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) plane: Plane,
    pub(crate) user: User,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Value,
}

impl Answer {
    pub(crate) fn text(&self, path: &str) -> &str {
        self.body.pointer(path).and_then(Value::as_str).unwrap_or_default()
    }
}

impl Client {
    pub(crate) async fn admin() -> Self {
        Self { plane: plane().await, user: admin() }
    }

    pub(crate) fn as_user(&self, user: User) -> Self {
        Self { plane: self.plane.clone(), user }
    }

    pub(crate) async fn send(&self, request: http::Request<Body>) -> http::Response<Body> {
        self.plane.service(self.user.clone()).oneshot(request).await.unwrap()
    }

    pub(crate) async fn ask(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: impl Into<Body>,
    ) -> Answer {
        let request = http::Request::builder().method(method).uri(path).header("content-type", content_type);
        let response = self.send(request.body(body.into()).unwrap()).await;
        let (code, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        Answer { code, headers, body: serde_json::from_slice(&bytes).unwrap_or(Value::Null) }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", Body::empty()).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, "application/json", body.to_string()).await
    }

    pub(crate) async fn put(&self, path: &str, body: &Value) -> Answer {
        self.ask("PUT", path, "application/json", body.to_string()).await
    }

    pub(crate) async fn delete(&self, path: &str, options: &Value) -> Answer {
        self.ask("DELETE", path, "application/json", options.to_string()).await
    }

    /// A JSON merge patch.
    pub(crate) async fn merge(&self, path: &str, body: &Value) -> Answer {
        self.ask("PATCH", path, "application/merge-patch+json", body.to_string()).await
    }

    pub(crate) async fn strategic(&self, path: &str, body: &Value) -> Answer {
        self.ask("PATCH", path, "application/strategic-merge-patch+json", body.to_string()).await
    }

    /// The value of a metric.
    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let request = http::Request::get("/metrics").body(Body::empty()).unwrap();
        let text = self.send(request).await.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(text.to_vec()).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }

    pub(crate) async fn watch(&self, path: &str) -> Watch {
        let response = self.send(http::Request::get(path).body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), 200);
        Watch { body: response.into_body(), rest: Vec::new() }
    }
}

/// A watch under way.
pub(crate) struct Watch {
    body: Body,
    rest: Vec<u8>,
}

impl Watch {
    /// The next event; `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let frame = self.body.frame().await?.unwrap();
            self.rest.extend_from_slice(&frame.into_data().unwrap());
        }
    }

    /// Type and name of the next event.
    pub(crate) async fn pair(&mut self) -> (String, String) {
        let event = tokio::time::timeout(HANGS, self.next()).await.unwrap().unwrap();
        let word = |path: &str| event.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        (word("/type"), word("/object/metadata/name"))
    }

    /// Nothing comes.
    pub(crate) async fn is_silent(&mut self) -> bool {
        tokio::time::timeout(Duration::from_millis(200), self.next()).await.is_err()
    }
}

pub(crate) const PODS: &str = "/api/v1/namespaces/default/pods";

pub(crate) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": { "containers": [{ "name": "agent", "image": "x:1" }] },
    })
}

pub(crate) fn node(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": { "pool": "a" } },
        "status": {
            "allocatable": { "cpu": "4", "memory": "8Gi", "pods": "10" },
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}

pub(crate) fn config_map(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "a": "b" } })
}
