//! The network of all tests, shared by those inside the crate and those outside.

use std::{net::Ipv4Addr, path::Path, time::Duration};

use super::config::NetworkConfig;

/// A network for tests; everything of it is in `state_dir`.
pub(crate) fn network(state_dir: &Path) -> NetworkConfig {
    NetworkConfig {
        bridge: "cocoon0".to_owned(),
        subnet: "10.77.0.0/24".parse().unwrap(),
        gateway: Ipv4Addr::new(10, 77, 0, 1),
        dns: vec![Ipv4Addr::new(9, 9, 9, 9)],
        lease_time: Duration::from_secs(3600),
        masquerade: true,
        vm_to_vm: false,
        state_dir: state_dir.to_owned(),
        control_socket: state_dir.join("control.sock"),
    }
}
