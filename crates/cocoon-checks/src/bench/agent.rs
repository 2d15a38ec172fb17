//! The agent's own share of create, hibernate and wake: the real agent and the real embedded API, both
//! with their journals on disk as in `cocoon up`, over an engine, a registry and guests that take no
//! time ([`super::instant`]).
//!
//! The clock starts before the request goes out and stops when a watch shows the pod where it should
//! be, so the API's and the scheduler's time is in the figure too.

use std::{path::Path, pin::Pin, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use cocoon_kit::{
    tls::{self, Authority},
    world::{RealWorld, World},
};
use cocoon_meta::{is_pod_ready, keys, vm_name_for_pod};
use cocoon_node::{Node, NodeConfig};
use cocoon_plane::plane::{Plane, PlaneConfig, User};
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams},
};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Parts, Row, instant, lab::scratch, report::median};

const NODE: &str = "bench";
/// Ends a measurement that hangs; no figure is near it.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs the agent and takes pods through their lives, one after the other.
pub(super) async fn measure(parts: &Parts) -> anyhow::Result<Vec<Row>> {
    let folder = scratch()?;
    let world: Arc<dyn World> = Arc::new(RealWorld);
    let config = PlaneConfig {
        journal: Some(folder.path().join("plane.db")),
        tokens: Vec::new(),
        kubelet_client: None,
    };
    let plane = Plane::open(config, Arc::clone(&world)).await?;
    let ending = CancellationToken::new();
    let (controllers, token) = (plane.clone(), ending.clone());
    let controllers = tokio::spawn(async move { controllers.run_controllers(token).await });
    let kubelet = std::net::TcpListener::bind("127.0.0.1:0").context("kubelet port")?;
    kubelet.set_nonblocking(true)?;
    let user = User { name: format!("system:node:{NODE}"), groups: vec!["system:nodes".into()] };
    let config = NodeConfig { kubelet_tls: Some(certificate(folder.path())?), ..NodeConfig::new(NODE) };
    let node = Node::new(config, client(&plane, user), instant::ports(folder.path())?, world);
    let node = tokio::spawn(node.run(kubelet, ending.clone()));
    let admin = User { name: "admin".into(), groups: vec!["system:masters".into()] };
    let rows = lives(&client(&plane, admin), parts.runs).await;
    ending.cancel();
    node.await?.context("the node agent")?;
    controllers.await?;
    rows
}

/// The kubelet port does not open without one.
fn certificate(folder: &Path) -> anyhow::Result<Arc<rustls::ServerConfig>> {
    let authority = Authority::load_or_create(&folder.join("pki"), "bench")?;
    let server = authority.issue_server(NODE, &["localhost"], &[[127, 0, 0, 1].into()])?;
    Ok(tls::server_config(&server, authority.certificate())?)
}

/// A client whose transport is the plane in this process, as in `cocoon up`.
fn client(plane: &Plane, user: User) -> Client {
    let service = plane.service(user);
    let service = tower::ServiceExt::map_request(service, |request: http::Request<kube::client::Body>| {
        request.map(axum::body::Body::new)
    });
    Client::new(service, "default")
}

async fn lives(client: &Client, runs: usize) -> anyhow::Result<Vec<Row>> {
    wait_for_node(&Api::all(client.clone())).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let mut times = [const { Vec::new() }; 3];
    for run in 0..runs {
        let name = format!("bench-{run}");
        let life = one(&pods, &name).await.with_context(|| format!("pod {name}"))?;
        eprintln!("{name}: create {:.1} ms, hibernate {:.1} ms, wake {:.1} ms", life[0], life[1], life[2]);
        for (all, one) in times.iter_mut().zip(life) {
            all.push(one);
        }
    }
    let row = |(what, times): (&str, &Vec<f64>)| {
        Row::at_most(format!("agent's own share of {what}, p50"), "ms", 10.0, median(times))
    };
    Ok(["create", "hibernate", "wake"].into_iter().zip(&times).map(row).collect())
}

async fn wait_for_node(nodes: &Api<NodeObject>) -> anyhow::Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < LIMIT {
        let node = nodes.get_opt(NODE).await?;
        let conditions = node.and_then(|node| node.status?.conditions).unwrap_or_default();
        if conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True") {
            return Ok(());
        }
        sleep(Duration::from_millis(20)).await;
    }
    bail!("the node is not ready after {} s", LIMIT.as_secs())
}

/// Create, hibernate, wake of one pod, in milliseconds; then it is deleted.
async fn one(pods: &Api<Pod>, name: &str) -> anyhow::Result<[f64; 3]> {
    let only = WatchParams::default().fields(&format!("metadata.name={name}"));
    let mut watch: Watch = Box::pin(pods.watch(&only, "0").await?);
    let pod = pod(name)?;
    let hibernate = |value: serde_json::Value| {
        Patch::Merge(json!({ "metadata": { "annotations": { keys::ANNOTATION_HIBERNATE: value } } }))
    };
    let begun = Instant::now();
    pods.create(&PostParams::default(), &pod).await?;
    until(&mut watch, |pod| state(pod) == "ready" && is_pod_ready(pod)).await.context("create")?;
    let created = begun.elapsed();
    settled().await;
    let begun = Instant::now();
    pods.patch(name, &PatchParams::default(), &hibernate("true".into())).await?;
    until(&mut watch, |pod| state(pod) == "hibernated").await.context("hibernate")?;
    let hibernated = begun.elapsed();
    settled().await;
    let begun = Instant::now();
    pods.patch(name, &PatchParams::default(), &hibernate(serde_json::Value::Null)).await?;
    until(&mut watch, |pod| state(pod) == "ready" && is_pod_ready(pod)).await.context("wake")?;
    let woken = begun.elapsed();
    pods.delete(name, &DeleteParams::default()).await?;
    Ok([created, hibernated, woken].map(|time| time.as_secs_f64() * 1000.0))
}

/// What still goes on after an operation is not to be counted as the next one's.
async fn settled() {
    sleep(Duration::from_millis(200)).await;
}

fn state(pod: &Pod) -> &str {
    let annotations = pod.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(keys::ANNOTATION_LIFECYCLE_STATE)).map_or("", String::as_str)
}

type Watch = Pin<Box<dyn Stream<Item = kube::Result<WatchEvent<Pod>>> + Send>>;

async fn until(watch: &mut Watch, done: impl Fn(&Pod) -> bool) -> anyhow::Result<()> {
    let mut last = None;
    let waiting = async {
        while let Some(event) = watch.next().await {
            if let WatchEvent::Added(pod) | WatchEvent::Modified(pod) = event? {
                if done(&pod) {
                    return Ok(());
                }
                last = Some(pod);
            }
        }
        bail!("the watch ended")
    };
    match timeout(LIMIT, waiting).await {
        Ok(done) => done,
        Err(_) => bail!("not there after {} s; the pod is {:?}", LIMIT.as_secs(), last.as_ref().map(state)),
    }
}

fn pod(name: &str) -> anyhow::Result<Pod> {
    Ok(serde_json::from_value(json!({
        "metadata": {
            "name": name,
            "annotations": {
                keys::ANNOTATION_VM_NAME: vm_name_for_pod("default", name),
                keys::ANNOTATION_MANAGED: "true",
                keys::ANNOTATION_MODE: "run",
                keys::ANNOTATION_IMAGE: "bench:1",
                keys::ANNOTATION_SNAPSHOT_POLICY: "never",
            },
        },
        "spec": {
            "nodeSelector": { keys::LABEL_NODE_POOL: keys::DEFAULT_NODE_POOL },
            "tolerations": [{ "key": keys::TOLERATION_KEY, "operator": "Exists" }],
            "containers": [{ "name": "agent", "image": "bench:1" }],
        },
    }))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn the_agents_own_share_can_be_measured() {
        let none = std::path::PathBuf::new;
        let parts = Parts { cocoon: none(), bundle: none(), image: none(), runs: 1 };
        let rows = measure(&parts).await.unwrap();
        assert_eq!(rows.len(), 3);
    }
}
