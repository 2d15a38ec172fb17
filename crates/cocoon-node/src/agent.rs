//! The agent as a whole: what starts in which order, and what ends it.
//!
//! Entry points: [`Node::new`] and [`Node::run`]. Order at start: records and a complete list of pods,
//! then the owners, then the node object. Nothing acts on a partial view (I5), and nothing but the API
//! server is told that the node is there before it can serve.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, TcpListener},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use cocoon_kit::{backoff::Backoff, world::World};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{DeleteParams, Preconditions},
};
use thiserror::Error;
use tokio_util::sync::CancellationToken;

use crate::{
    arrivals,
    cluster::{Cluster, Show, Tone},
    config::NodeConfig,
    events::Events,
    kubelet, leases,
    node::{Health, Registrar},
    outbox::Outbox,
    owner::{
        Context,
        inbox::{Inbox, Listed},
    },
    planner::observation::PodKey,
    pods::{PodWatch, router::Router, table::PodTable},
    ports::{PortError, PortResult, Ports, VmView},
    reason::{Reason, Trouble},
    record::OwnerRecord,
    rounds::next_round,
    status::HostFacts,
};

/// How long the engine may take to list its VMs before it counts as not answering.
const LIST_LIMIT: Duration = Duration::from_secs(10);

/// Why an agent ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The kubelet port could not be served.
    #[error(
        "serving the kubelet port {address}, without which nobody gets logs of this node's pods or into them; VMs go \
         on, start the agent again, with another --kubelet-listen if that port cannot be had"
    )]
    Kubelet {
        /// Where it listened.
        address: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

/// One node agent.
#[derive(Debug)]
pub struct Node {
    config: NodeConfig,
    cluster: Arc<Kubernetes>,
    ports: Ports,
    world: Arc<dyn World>,
    table: Arc<PodTable>,
    address: IpAddr,
    sink: crate::events::EventSink,
}

/// The real [`Cluster`].
struct Kubernetes {
    client: Client,
    outbox: Outbox,
    events: Events,
    world: Arc<dyn World>,
}

impl std::fmt::Debug for Kubernetes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kubernetes")
    }
}

#[async_trait]
impl Cluster for Kubernetes {
    fn show(&self, show: Show, ack: Arc<Inbox>) {
        self.outbox.put(show, ack);
    }

    fn event(&self, key: &PodKey, uid: &str, tone: Tone, what: &Trouble) {
        self.events.tell(self.world.as_ref(), key, uid, tone, what);
    }

    async fn finalise(&self, key: &PodKey, uid: &str) -> PortResult<()> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let only = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let now = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(only),
            ..DeleteParams::default()
        };
        match api.delete(&key.name, &now).await {
            Ok(_) => Ok(()),
            // Not there, or another incarnation is: this one is over.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
            Err(error) => Err(PortError::caused(Reason::ApiUnavailable, format!("ending pod {key}"), error)),
        }
    }
}

impl Node {
    /// An agent that has not started yet.
    #[must_use]
    pub fn new(config: NodeConfig, client: Client, ports: Ports, world: Arc<dyn World>) -> Self {
        let address = config.address.or_else(|| ports.host.address()).unwrap_or(Ipv4Addr::LOCALHOST.into());
        let table = Arc::new(PodTable::default());
        let (events, sink) = Events::new(&config.name);
        let host = HostFacts { address: address.to_string() };
        let outbox = Outbox::new(client.clone(), Arc::clone(&world), host, Arc::clone(&table));
        let cluster = Arc::new(Kubernetes { client, outbox, events, world: Arc::clone(&world) });
        Self { config, cluster, ports, world, table, address, sink }
    }

    /// Runs until `shutdown`, or until the kubelet port fails. VMs go on without it.
    pub async fn run(self, kubelet: TcpListener, shutdown: CancellationToken) -> Result<(), NodeError> {
        let ending = shutdown.child_token();
        let context = Context::new(
            self.config.clone(),
            self.ports.clone(),
            Arc::clone(&self.world),
            Arc::clone(&self.cluster) as _,
            ending.clone(),
        );
        let server = kubelet::Server::new(Arc::clone(&context), Arc::clone(&self.table));
        let (client, outbox) = (self.cluster.client.clone(), self.cluster.outbox.clone());
        let events = tokio::spawn(self.sink.run(client.clone()));
        let work = Work { context: Arc::clone(&context), table: self.table, client, address: self.address };
        let port = kubelet.local_addr().map_or_else(|_| "(not bound)".to_owned(), |bound| bound.to_string());
        let result = tokio::select! {
            biased;
            () = shutdown.cancelled() => Ok(()),
            served = server.serve(kubelet, ending.clone()) => served.map_err(|source| {
                NodeError::Kubelet { address: port, source }
            }),
            () = work.run(ending.clone()) => Ok(()),
        };
        ending.cancel();
        context.drain().await;
        outbox.close().await;
        events.abort();
        result
    }
}

/// Everything but the kubelet port.
struct Work {
    context: Arc<Context>,
    table: Arc<PodTable>,
    client: Client,
    address: IpAddr,
}

impl Work {
    async fn run(self, shutdown: CancellationToken) {
        let context = Arc::clone(&self.context);
        let world = Arc::clone(&context.world);
        let watch = PodWatch::new(self.client.clone(), &context.config.name, self.table, Arc::clone(&world));
        let router = Router::new(Arc::clone(&context));
        let position = self.context.take_stock(&watch, &router).await;
        let health = Arc::new(Health::default());
        let registrar = Registrar::new(
            self.client,
            context.config.clone(),
            &context.ports,
            Arc::clone(&health),
            world,
            self.address,
        );
        tokio::join!(
            watch.follow(position, &router, shutdown.clone()),
            poll(&context, &health, shutdown.clone()),
            upkeep(&context, shutdown.clone()),
            arrivals::watch(&context, shutdown.clone()),
            leases::sweep(&context, shutdown.clone()),
            registrar.run(shutdown),
        );
    }
}

impl Context {
    /// Records, VMs and pods, all of them; then the owners may act. Returns the position to watch from.
    async fn take_stock(self: &Arc<Self>, watch: &PodWatch, router: &Router) -> String {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(30));
        let (records, changes, position) = loop {
            match self.read_all(watch).await {
                Ok(all) => break all,
                Err(trouble) => {
                    tracing::error!(%trouble, "cannot start yet");
                    tokio::time::sleep(backoff.next(self.world.as_ref())).await;
                }
            }
        };
        records.into_iter().for_each(|record| self.recall(record));
        changes.into_iter().for_each(|change| router.route(change));
        self.open.cancel();
        position
    }

    async fn read_all(
        &self,
        watch: &PodWatch,
    ) -> Result<(Vec<OwnerRecord>, Vec<crate::pods::table::Change>, String), Trouble> {
        let records = self.ports.records.load().await.map_err(|error| error.trouble())?;
        let (_, position) = watch.list().await.map_err(|error| {
            PortError::caused(Reason::ApiUnavailable, "listing the pods of this node", error).trouble()
        })?;
        Ok((records, watch.known(), position))
    }
}

/// Lists the engine's VMs again and again: what happened outside the agent reaches the owners.
async fn poll(context: &Arc<Context>, health: &Health, shutdown: CancellationToken) {
    let mut reported = BTreeSet::new();
    loop {
        let asked = context.world.instant();
        match tokio::time::timeout(LIST_LIMIT, context.ports.vms.list()).await {
            Ok(Ok(vms)) => {
                health.note(None);
                tell(context, &vms, asked);
                report_orphans(context, &vms, &mut reported);
            }
            Ok(Err(error)) => health.note(Some(error.trouble().message)),
            Err(_) => health
                .note(Some(format!("the engine did not list its VMs within {} s", LIST_LIMIT.as_secs()))),
        }
        if !next_round(context.config.poll, &shutdown).await {
            return;
        }
    }
}

/// The engine's upkeep of running VMs. Apart from the list, so that a hypervisor that does not answer never
/// makes the engine look dead.
pub(crate) async fn upkeep(context: &Arc<Context>, shutdown: CancellationToken) {
    let mut said = None;
    loop {
        let trouble = context.ports.upkeep.tend().await.err().map(|error| error.trouble());
        if trouble != said {
            trouble.iter().for_each(|trouble| tracing::warn!(%trouble, "VMs are not kept up"));
            said = trouble;
        }
        if !next_round(context.config.poll, &shutdown).await {
            return;
        }
    }
}

fn tell(context: &Context, vms: &[VmView], asked: tokio::time::Instant) {
    let by_name: BTreeMap<&str, &VmView> = vms.iter().map(|vm| (vm.name.as_str(), vm)).collect();
    for (name, inbox) in context.directory.owners() {
        let vm = by_name.get(name.as_str()).map(|vm| (*vm).clone());
        inbox.listed(Listed { vm, asked });
    }
}

/// A VM that no owner is about is never touched: without an owner record nobody can prove a claim.
fn report_orphans(context: &Context, vms: &[VmView], reported: &mut BTreeSet<String>) {
    let owned: BTreeSet<String> = context.directory.owners().into_iter().map(|(name, _)| name).collect();
    let orphans: BTreeSet<String> =
        vms.iter().filter(|vm| !owned.contains(&vm.name)).map(|vm| vm.name.clone()).collect();
    for orphan in orphans.difference(reported) {
        tracing::warn!(
            vm = orphan,
            reason = %Reason::OrphanVM,
            "VM {orphan} has no pod and no owner record; it is left alone, remove it with `cocoon vm rm --force {orphan}`"
        );
    }
    *reported = orphans;
}

#[cfg(test)]
mod tests {
    use cocoon_kit::world::RealWorld;

    use super::*;
    use crate::ports::fake::Fake;

    #[tokio::test]
    async fn an_agent_that_cannot_serve_its_kubelet_port_says_which_and_what_to_do() {
        let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::pending::<Result<http::Response<kube::client::Body>, tower::BoxError>>()
        });
        let (client, ports) = (Client::new(silent, "default"), Fake::default().ports(true));
        // Without a certificate: nobody can be let in.
        let node = Node::new(NodeConfig::new("n1"), client, ports, Arc::new(RealWorld));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let error = node.run(listener, CancellationToken::new()).await.unwrap_err().to_string();
        assert!(error.contains(&address) && error.contains("--kubelet-listen"), "{error}");
    }
}
