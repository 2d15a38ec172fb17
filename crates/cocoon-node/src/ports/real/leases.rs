//! DHCP leases: the daemon's file to read, its socket to give one back.

use std::{
    net::Ipv4Addr,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use cocoon_kit::world::World;
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
    world: Arc<dyn World>,
}

impl LeaseFile {
    /// The leases of this network; `world` says which of them have lapsed.
    #[must_use]
    pub fn new(network: &NetworkConfig, world: Arc<dyn World>) -> Self {
        let reader = Mutex::new(LeaseReader::new(network.lease_file()));
        Self { reader, control: network.control_socket.clone(), world }
    }
}

#[async_trait]
impl Leases for LeaseFile {
    async fn lookup(&self, mac: &str) -> PortResult<Option<Ipv4Addr>> {
        // A file of a few KiB, read again only when it changed: cheaper here than on another thread.
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let found = reader.lookup(mac, self.world.now());
        found.map_err(|error| {
            PortError::caused(Reason::ProbeFailed, format!("looking up the lease of {mac}"), error)
        })
    }

    async fn held(&self) -> PortResult<Vec<String>> {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let held = reader.held(self.world.now());
        held.map_err(|error| PortError::caused(Reason::CleanupFailed, "listing the leases", error))
    }

    async fn release(&self, mac: &str) -> PortResult<()> {
        let released = leases::release(&self.control, mac).await;
        released.map_err(|error| {
            PortError::caused(Reason::CleanupFailed, format!("releasing the lease of {mac}"), error)
        })
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    /// A world whose clock a test sets.
    #[derive(Debug)]
    struct At(Timestamp);

    impl World for At {
        fn now(&self) -> Timestamp {
            self.0
        }

        fn instant(&self) -> tokio::time::Instant {
            tokio::time::Instant::now()
        }

        fn random(&self, out: &mut [u8]) {
            out.fill(0);
        }
    }

    #[tokio::test]
    async fn whether_a_lease_has_lapsed_is_said_by_the_worlds_clock_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("leases.json");
        let (mac, ip) = ("02:00:00:00:00:01", Ipv4Addr::new(10, 0, 0, 9));
        let row = serde_json::json!([{"mac": mac, "ip": ip, "expiry": "2001-01-01T00:00:00Z"}]);
        std::fs::write(&file, row.to_string()).unwrap();
        for (now, live) in [("2000-12-31T23:59:59Z", true), ("2001-01-01T00:00:01Z", false)] {
            let leases = LeaseFile {
                reader: Mutex::new(LeaseReader::new(file.clone())),
                control: PathBuf::new(),
                world: Arc::new(At(now.parse().unwrap())),
            };
            assert_eq!(leases.lookup(mac).await.unwrap(), live.then_some(ip), "{now}");
            assert_eq!(leases.held().await.unwrap().len(), usize::from(live), "{now}");
        }
    }
}
