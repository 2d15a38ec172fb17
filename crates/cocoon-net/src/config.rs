//! What a host network of ours looks like.

use std::{net::Ipv4Addr, path::PathBuf, time::Duration};

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

/// One bridge with its addresses. Also kept as JSON in `state_dir/network.json`, so that engine, agent
/// and daemon of one host agree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkConfig {
    /// Bridge interface name, at most 15 bytes (`cni0` by contract; `cocoon up` picks `cocoon0`).
    pub bridge: String,
    /// Addresses for VMs.
    pub subnet: Ipv4Net,
    /// The bridge's own address, inside `subnet`.
    pub gateway: Ipv4Addr,
    /// Name servers handed out by DHCP.
    pub dns: Vec<Ipv4Addr>,
    /// How long a lease lasts.
    pub lease_time: Duration,
    /// VMs reach the world by masquerading behind the host.
    pub masquerade: bool,
    /// Ports are isolated from one another unless this is set.
    pub vm_to_vm: bool,
    /// `network.json`, `leases.json`, lock and saved sysctls.
    pub state_dir: PathBuf,
    /// Unix socket that takes lease releases.
    pub control_socket: PathBuf,
}

impl NetworkConfig {
    /// The lease file.
    #[must_use]
    pub fn lease_file(&self) -> PathBuf {
        self.state_dir.join("leases.json")
    }
}
