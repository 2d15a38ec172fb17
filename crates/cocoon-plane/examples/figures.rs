//! Figures of the plane in memory: `cargo run -p cocoon-plane --example figures [PODS] [WATCHERS]`.
//! Prints how long a list of all pods takes, and how long a write takes to reach all watchers.

use std::{sync::Arc, time::Instant};

use axum::body::Body;
use cocoon_kit::world::RealWorld;
use cocoon_plane::plane::{Plane, PlaneConfig, Request, User};
use http_body_util::BodyExt as _;
use serde_json::json;
use tower::ServiceExt as _;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1).map(|word| word.parse::<usize>());
    let pods = arguments.next().unwrap_or(Ok(5000))?;
    let watchers = arguments.next().unwrap_or(Ok(50))?;
    let folder = std::env::temp_dir().join(format!("plane-figures-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let config = PlaneConfig { journal: Some(folder.join("plane.db")), tokens: vec![], kubelet_client: None };
    let plane = Plane::open(config, Arc::new(RealWorld)).await?;
    let begin = Instant::now();
    let mut made = tokio::task::JoinSet::new();
    for at in 0..pods {
        let plane = plane.clone();
        made.spawn(async move { send(&plane, "POST", PATH, pod(at)).await });
        if made.len() >= 64 {
            drop(made.join_next().await.ok_or("no task")???);
        }
    }
    while let Some(one) = made.join_next().await {
        drop(one??);
    }
    println!("create {pods} pods, 64 at once, durable: {:?} (memory {} MiB)", begin.elapsed(), memory()?);
    let begin = Instant::now();
    let user = User { name: "admin".into(), groups: vec!["system:masters".into()] };
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let request = http::Request::get("/api/v1/pods").header("accept", table).body(Body::empty())?;
    let bytes = plane.service(user).oneshot(request).await?.into_body().collect().await?.to_bytes();
    println!("table of {pods} pods: {:?}, {} bytes", begin.elapsed(), bytes.len());
    let mut times = Vec::new();
    for _ in 0..20 {
        let begin = Instant::now();
        let bytes = send(&plane, "GET", "/api/v1/pods", String::new()).await?.collect().await?.to_bytes();
        times.push((begin.elapsed(), bytes.len()));
    }
    times.sort();
    println!("list {pods} pods: median {:?}, {} bytes", times[10].0, times[10].1);
    fan_out(&plane, watchers).await?;
    println!("memory {} MiB", memory()?);
    drop(plane);
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

const PATH: &str = "/api/v1/namespaces/default/pods";

async fn fan_out(plane: &Plane, watchers: usize) -> Result<(), Failure> {
    let mut bodies = Vec::new();
    for _ in 0..watchers {
        let path = "/api/v1/pods?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        let mut body = send(plane, "GET", path, String::new()).await?;
        while !next(&mut body).await?.contains("initial-events-end") {}
        bodies.push(body);
    }
    let mut times = Vec::new();
    for round in 0..20 {
        let begin = Instant::now();
        let patch = json!({ "metadata": { "labels": { "round": round.to_string() } } }).to_string();
        let writing = tokio::spawn({
            let plane = plane.clone();
            async move { send(&plane, "PATCH", &format!("{PATH}/pod-0"), patch).await }
        });
        for body in &mut bodies {
            next(body).await?;
        }
        times.push(begin.elapsed());
        drop(writing.await??);
    }
    times.sort();
    println!("one durable write to {watchers} watchers: median {:?}, worst {:?}", times[10], times[19]);
    Ok(())
}

async fn next(body: &mut Body) -> Result<String, Failure> {
    let frame = body.frame().await.ok_or("the watch ended")??;
    Ok(String::from_utf8_lossy(frame.data_ref().ok_or("no data")?).into_owned())
}

async fn send(plane: &Plane, method: &str, path: &str, body: String) -> Result<Body, Failure> {
    let user = User { name: "admin".into(), groups: vec!["system:masters".into()] };
    let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let request: Request =
        http::Request::builder().method(method).uri(path).header("content-type", kind).body(body.into())?;
    let response = plane.service(user).oneshot(request).await?;
    if response.status().is_success() {
        Ok(response.into_body())
    } else {
        Err(format!("{path}: {}", response.status()).into())
    }
}

fn pod(at: usize) -> String {
    json!({
        "metadata": {
            "name": format!("pod-{at}"),
            "labels": { "cocoonset.cocoonstack.io/name": "demo", "cocoonset.cocoonstack.io/slot": at.to_string() },
            "annotations": { "vm.cocoonstack.io/name": format!("vk-default-pod-{at}"), "cocoonset.cocoonstack.io/mode": "run",
                "cocoonset.cocoonstack.io/image": "ghcr.io/cocoonstack/cocoon/ubuntu:24.04", "cocoonset.cocoonstack.io/managed": "true" },
        },
        "spec": { "containers": [{ "name": "agent", "image": "ghcr.io/cocoonstack/cocoon/ubuntu:24.04",
            "resources": { "limits": { "cpu": "1", "memory": "512Mi" } } }] },
    })
    .to_string()
}

/// Resident memory in MiB.
fn memory() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS")).ok_or("no VmRSS")?;
    Ok(line.split_whitespace().nth(1).ok_or("no size")?.parse::<u64>()? / 1024)
}
