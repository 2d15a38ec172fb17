//! DHCP leases: the daemon's file to read, its socket to give one back.

use std::{
    net::Ipv4Addr,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use async_trait::async_trait;
use cocoon_net::{
    config::NetworkConfig,
    leases::{self, LeaseReader},
};

use crate::{
    ports::{Leases, PortError, PortResult},
    reason::Reason,
};

/// The lease file and the control socket of one network.
#[derive(Debug)]
pub struct LeaseFile {
    reader: Mutex<LeaseReader>,
    control: PathBuf,
}

impl LeaseFile {
    /// The leases of this network.
    #[must_use]
    pub fn new(network: &NetworkConfig) -> Self {
        let reader = Mutex::new(LeaseReader::new(network.lease_file()));
        Self { reader, control: network.control_socket.clone() }
    }
}

#[async_trait]
impl Leases for LeaseFile {
    async fn lookup(&self, mac: &str) -> PortResult<Option<Ipv4Addr>> {
        // A file of a few KiB, read again only when it changed: cheaper here than on another thread.
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let found = reader.lookup(mac, jiff::Timestamp::now());
        found.map_err(|error| {
            PortError::caused(Reason::ProbeFailed, format!("looking up the lease of {mac}"), error)
        })
    }

    async fn held(&self) -> PortResult<Vec<String>> {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let held = reader.held(jiff::Timestamp::now());
        held.map_err(|error| PortError::caused(Reason::CleanupFailed, "listing the leases", error))
    }

    async fn release(&self, mac: &str) -> PortResult<()> {
        let released = leases::release(&self.control, mac).await;
        released.map_err(|error| {
            PortError::caused(Reason::CleanupFailed, format!("releasing the lease of {mac}"), error)
        })
    }
}
