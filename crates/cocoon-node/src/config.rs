//! What an agent is told at its start.
//!
//! Entry point: [`NodeConfig`]. Built by the caller (which reads `VK_*` and flags); nothing here reads
//! the environment.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use crate::planner::observation::Sizes;

/// Capacity that replaces what is detected (`VK_NODE_CPU`, `VK_NODE_MEM`, `VK_NODE_STORAGE`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Overrides {
    /// CPUs.
    pub cpu: Option<u64>,
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Bytes of disk, total and available.
    pub storage: Option<u64>,
}

/// The agent's configuration.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Node name (`VK_NODE_NAME`, `cocoon-pool`).
    pub name: String,
    /// Label `cocoonstack.io/pool` (`VK_NODE_POOL`, `default`).
    pub pool: String,
    /// Label `cocoonstack.io/snapshot-cpu-class` (`VK_SNAPSHOT_CPU_CLASS`, unset).
    pub snapshot_class: Option<String>,
    /// `spec.providerID` (`VK_PROVIDER_ID`, unset).
    pub provider_id: Option<String>,
    /// The node's address (`VK_NODE_IP`, else detected).
    pub address: Option<IpAddr>,
    /// Port of the kubelet API, as the node object tells it.
    pub kubelet_port: u16,
    /// How the kubelet port shows itself and whose client certificates it takes
    /// (`cocoon_kit::tls::server_config`); `None`: the port refuses every connection.
    pub kubelet_tls: Option<Arc<rustls::ServerConfig>>,
    /// Users that may call the kubelet port (common names of client certificates).
    pub kubelet_users: Vec<String>,
    /// Groups that may (organisations of client certificates).
    pub kubelet_groups: Vec<String>,
    /// What a pod's backend means on this node: contract name → true hypervisor.
    pub backends: BTreeMap<String, String>,
    /// Sizes of a VM whose pod does not say (`vm run`'s defaults: 2, 1 GiB, 10 GiB).
    pub defaults: Sizes,
    /// Pods that fit (`VK_NODE_PODS`, 256).
    pub pods: u32,
    /// Part of the host that is kept back, in percent (`VK_RESERVE_PERCENT`, 20).
    pub reserve_percent: u8,
    /// Capacity that replaces what is detected.
    pub overrides: Overrides,
    /// Version, for the node object.
    pub version: String,
    /// How often the engine's VMs are listed, to see what happened outside the agent.
    pub poll: Duration,
    /// How long a fork waits for its source's baseline.
    pub fork_deadline: Duration,
    /// The longest pause of a guest by a hibernation (`VK_HIBERNATE_PAUSE_LIMIT`, 120 s).
    pub pause_limit: Duration,
    /// How long a shutdown waits for steps under way.
    pub shutdown_limit: Duration,
}

impl NodeConfig {
    /// The defaults of design and contract, for a node of this name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        let contract = ["cloud-hypervisor", "firecracker", "qemu"];
        Self {
            name: name.into(),
            pool: cocoon_meta::keys::DEFAULT_NODE_POOL.to_owned(),
            snapshot_class: None,
            provider_id: None,
            address: None,
            kubelet_port: 10250,
            kubelet_tls: None,
            kubelet_users: vec!["cocoon-apiserver".to_owned()],
            kubelet_groups: vec!["system:masters".to_owned()],
            backends: contract.into_iter().map(|name| (name.to_owned(), "qemu".to_owned())).collect(),
            defaults: Sizes { cpu: 2, memory: 1 << 30, storage: 10 << 30 },
            pods: 256,
            reserve_percent: 20,
            overrides: Overrides::default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            poll: Duration::from_secs(1),
            fork_deadline: Duration::from_secs(60),
            pause_limit: crate::planner::PAUSE_LIMIT,
            shutdown_limit: Duration::from_secs(20),
        }
    }
}
