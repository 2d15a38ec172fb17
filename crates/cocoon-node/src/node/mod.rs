//! The node object and its lease: registered, kept right, healed after foreign edits and deletions.
//!
//! Entry point: [`Registrar::run`]. Every interval it reads node and lease and writes what is wrong, so
//! any edit by somebody else lasts at most one interval.

pub(crate) mod object;

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use cocoon_kit::world::World;
use k8s_openapi::{
    api::{
        coordination::v1::{Lease, LeaseSpec},
        core::v1::Node,
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::object::Facts;
use crate::{
    config::NodeConfig,
    ports::{Host, Leases, Ports, Upkeep},
    reason::Reason,
};

/// Between two looks at node and lease.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
/// After a failure.
const AGAIN: Duration = Duration::from_secs(2);
const LEASE_SECONDS: i32 = 40;
const LEASES: &str = "kube-node-lease";

/// What the poller knows about the engine.
#[derive(Debug)]
pub(crate) struct Health {
    verdict: watch::Sender<Verdict>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    NotAskedYet,
    Well,
    Fault(String),
}

impl Default for Health {
    fn default() -> Self {
        Self { verdict: watch::Sender::new(Verdict::NotAskedYet) }
    }
}

impl Health {
    /// Notes whether the engine answered.
    pub(crate) fn note(&self, fault: Option<String>) {
        let now = fault.map_or(Verdict::Well, Verdict::Fault);
        self.verdict.send_if_modified(|verdict| {
            let changed = std::mem::discriminant(verdict) != std::mem::discriminant(&now);
            *verdict = now;
            changed
        });
    }

    fn fault(&self) -> Option<String> {
        match &*self.verdict.borrow() {
            Verdict::Fault(message) => Some(message.clone()),
            Verdict::NotAskedYet | Verdict::Well => None,
        }
    }
}

/// Keeps node and lease.
#[derive(Clone)]
pub(crate) struct Registrar {
    nodes: Api<Node>,
    leases: Api<Lease>,
    config: NodeConfig,
    host: Arc<dyn Host>,
    upkeep: Arc<dyn Upkeep>,
    /// What the VMs' disks took when the engine last said so.
    used_by_vms: Arc<AtomicU64>,
    addresses: Arc<dyn Leases>,
    /// The network daemon did not answer at the last look.
    daemon_down: Arc<AtomicBool>,
    health: Arc<Health>,
    world: Arc<dyn World>,
    address: IpAddr,
}

impl std::fmt::Debug for Registrar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registrar").field("node", &self.config.name).finish_non_exhaustive()
    }
}

impl Registrar {
    /// A registrar of the node that `config` names.
    #[must_use]
    pub(crate) fn new(
        client: Client,
        config: NodeConfig,
        ports: &Ports,
        health: Arc<Health>,
        world: Arc<dyn World>,
        address: IpAddr,
    ) -> Self {
        let nodes = Api::all(client.clone());
        let leases = Api::namespaced(client, LEASES);
        let (host, upkeep) = (Arc::clone(&ports.host), Arc::clone(&ports.upkeep));
        let addresses = Arc::clone(&ports.leases);
        let (used_by_vms, daemon_down) = (Arc::default(), Arc::default());
        Self {
            nodes,
            leases,
            config,
            host,
            upkeep,
            used_by_vms,
            addresses,
            daemon_down,
            health,
            world,
            address,
        }
    }

    /// Until `shutdown`. The first look waits until the engine has answered, or failed to: a node that
    /// says Ready has an engine. Later turns are told within seconds.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        let mut health = self.health.verdict.subscribe();
        if *health.borrow_and_update() == Verdict::NotAskedYet {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                _ = health.changed() => {}
            }
        }
        loop {
            health.mark_unchanged();
            let turned = async {
                // An engine that comes and goes is not told more often than this.
                tokio::time::sleep(AGAIN).await;
                health.changed().await
            };
            let pause = match self.once().await {
                Ok(()) => INTERVAL,
                Err(error) => {
                    tracing::warn!(node = self.config.name, error = %error, "node or lease not written");
                    AGAIN
                }
            };
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                _ = turned => {}
            }
        }
    }

    /// One look at node and lease, with what it takes to put them right.
    pub(crate) async fn once(&self) -> kube::Result<()> {
        let node = self.node().await?;
        self.lease(&node).await
    }

    async fn node(&self) -> kube::Result<Node> {
        let (name, params) = (self.config.name.as_str(), PatchParams::default());
        let mut node = match self.nodes.get_opt(name).await? {
            Some(node) => node,
            None => self.create().await?,
        };
        if let Some(patch) = object::main_patch(&node, &self.config) {
            node = self.nodes.patch(name, &params, &Patch::Merge(patch)).await?;
        }
        let facts = self.facts().await;
        if let Some(patch) = object::status_patch(&node, &self.config, &facts, self.world.now()) {
            node = self.nodes.patch_status(name, &params, &Patch::Merge(patch)).await?;
        }
        Ok(node)
    }

    async fn create(&self) -> kube::Result<Node> {
        let node: Node =
            serde_json::from_value(object::new(&self.config)).map_err(kube::Error::SerdeError)?;
        self.nodes.create(&PostParams::default(), &node).await
    }

    async fn facts(&self) -> Facts {
        Facts {
            host: self.host.view().await,
            used_by_vms: self.used_by_vms().await,
            engine_fault: self.health.fault(),
            network_fault: self.network_fault().await,
            address: self.address.to_string(),
        }
    }

    /// A daemon that is started again in between is no news: it must be away at two looks in a row.
    async fn network_fault(&self) -> Option<String> {
        let obstacle = self.addresses.obstacle().await;
        let down = obstacle.filter(|trouble| trouble.reason == Reason::NetworkDaemonDown);
        let before = self.daemon_down.swap(down.is_some(), Ordering::Relaxed);
        down.filter(|_| before).map(|trouble| trouble.message)
    }

    /// An engine that does not answer leaves it at what it said last: the node must not shrink by that.
    async fn used_by_vms(&self) -> u64 {
        if let Ok(Ok(used)) = tokio::time::timeout(AGAIN, self.upkeep.disk_used()).await {
            self.used_by_vms.store(used, Ordering::Relaxed);
        }
        self.used_by_vms.load(Ordering::Relaxed)
    }

    async fn lease(&self, node: &Node) -> kube::Result<()> {
        let name = self.config.name.as_str();
        let fresh = self.fresh_lease(node);
        match self.leases.get_opt(name).await? {
            None => self.leases.create(&PostParams::default(), &fresh).await.map(drop),
            Some(found) => {
                let version = found.metadata.resource_version;
                let metadata = ObjectMeta { resource_version: version, ..fresh.metadata };
                let lease = Lease { metadata, spec: fresh.spec };
                self.leases.replace(name, &PostParams::default(), &lease).await.map(drop)
            }
        }
    }

    fn fresh_lease(&self, node: &Node) -> Lease {
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.config.name.clone(),
            uid: node.metadata.uid.clone().unwrap_or_default(),
            ..OwnerReference::default()
        };
        Lease {
            metadata: ObjectMeta {
                name: Some(self.config.name.clone()),
                namespace: Some(LEASES.to_owned()),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.config.name.clone()),
                lease_duration_seconds: Some(LEASE_SECONDS),
                renew_time: Some(MicroTime(self.world.now())),
                ..LeaseSpec::default()
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use cocoon_kit::world::RealWorld;
    use http_body_util::Full;

    use super::*;
    use crate::{ports::fake::Fake, reason::Trouble};

    #[test]
    fn only_a_turn_wakes_the_registrar_and_the_newest_words_are_told() {
        let health = Health::default();
        let mut told = health.verdict.subscribe();
        told.mark_unchanged();
        for (fault, wakes) in [(Some("a"), true), (Some("b"), false), (None, true), (None, false)] {
            health.note(fault.map(str::to_owned));
            assert_eq!(told.has_changed().unwrap(), wakes, "{fault:?}");
            assert_eq!(health.fault().as_deref(), fault);
            told.mark_unchanged();
        }
    }

    fn registrar(fake: &Fake) -> Registrar {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Ok::<_, tower::BoxError>(http::Response::new(Full::new(Bytes::new())))
        });
        Registrar::new(
            Client::new(service, "default"),
            NodeConfig::new("n1"),
            &fake.ports(true),
            Arc::default(),
            Arc::new(RealWorld),
            [127, 0, 0, 1].into(),
        )
    }

    #[tokio::test]
    async fn a_network_daemon_counts_as_down_when_it_is_away_twice_in_a_row_and_a_full_pool_does_not() {
        let fake = Fake::default();
        let registrar = registrar(&fake);
        let (down, full) = (Some(Reason::NetworkDaemonDown), Some(Reason::NoFreeAddress));
        for (obstacle, fault) in [
            (None, false),
            (down, false),
            (down, true),
            (None, false),
            (down, false),
            (full, false),
            (full, false),
        ] {
            fake.world().leaseless = obstacle.map(|reason| Trouble::new(reason, "why"));
            assert_eq!(registrar.facts().await.network_fault.is_some(), fault, "{obstacle:?}");
        }
    }

    #[tokio::test]
    async fn what_the_vms_disks_take_is_given_back_to_allocatable_and_no_answer_changes_nothing() {
        let fake = Fake::default();
        let registrar = registrar(&fake);
        assert_eq!(registrar.facts().await.used_by_vms, 0);
        fake.world().disk_used = 7 << 30;
        assert_eq!(registrar.facts().await.used_by_vms, 7 << 30);
        fake.fail("disk", 1, Reason::EngineUnavailable);
        assert_eq!(registrar.facts().await.used_by_vms, 7 << 30, "the engine did not answer");
        fake.world().disk_used = 1 << 30;
        assert_eq!(registrar.facts().await.used_by_vms, 1 << 30, "a VM went");
    }
}
