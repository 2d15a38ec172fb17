//! DHCP leases: the daemon's file to read, its socket to give one back and to ask whether there are more.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use cocoon_kit::world::World;
use cocoon_net::{
    config::NetworkConfig,
    control::{self, Request},
    leases::{self, LeaseReader},
};

use crate::{
    ports::{Leases, PortError, PortResult},
    reason::{Reason, Trouble},
};

/// A daemon that says nothing for so long does not answer guests either.
const ANSWER: Duration = Duration::from_secs(3);

/// The lease file and the control socket of one network.
#[derive(Debug)]
pub struct LeaseFile {
    reader: Mutex<LeaseReader>,
    network: NetworkConfig,
    world: Arc<dyn World>,
}

impl LeaseFile {
    /// The leases of this network; `world` says which of them have lapsed.
    #[must_use]
    pub fn new(network: &NetworkConfig, world: Arc<dyn World>) -> Self {
        let reader = Mutex::new(LeaseReader::new(network.lease_file()));
        Self { reader, network: network.clone(), world }
    }

    fn down(&self, how: &str) -> Trouble {
        let folder = self.network.state_dir.display();
        let message = format!(
            "the network daemon of {folder} {how}, so no guest gets an address; it is started again every few seconds \
             if it is gone, and {folder}/daemon.log says why that fails; if it was stopped, let it go on or end it (its \
             process id is in {folder}/daemon.lock)"
        );
        Trouble::new(Reason::NetworkDaemonDown, message)
    }

    fn full(&self) -> Trouble {
        let message = format!(
            "all addresses of {} are taken; delete or hibernate pods that can do without theirs, or end all VMs and \
             start again with a larger --subnet",
            self.network.subnet
        );
        Trouble::new(Reason::NoFreeAddress, message)
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
        let released = leases::release(&self.network.control_socket, mac).await;
        released.map_err(|error| {
            PortError::caused(Reason::CleanupFailed, format!("releasing the lease of {mac}"), error)
        })
    }

    async fn obstacle(&self) -> Option<Trouble> {
        let asked = control::ask(&self.network.control_socket, &Request::Status { status: true });
        match tokio::time::timeout(ANSWER, asked).await {
            Ok(Ok(answer)) => {
                let free = answer.status.and_then(|status| status.get("pool_available")?.as_u64());
                (free == Some(0)).then(|| self.full())
            }
            Ok(Err(error)) if nobody_listens(&error) => Some(self.down("does not run")),
            Ok(Err(_)) | Err(_) => Some(self.down("does not answer")),
        }
    }
}

fn nobody_listens(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::ConnectionRefused | std::io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use tokio::{
        io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
        net::UnixListener,
    };

    use super::*;

    fn network(folder: &std::path::Path) -> NetworkConfig {
        NetworkConfig {
            bridge: "cocoon0".into(),
            subnet: "172.31.242.0/30".parse().unwrap(),
            gateway: [172, 31, 242, 1].into(),
            dns: Vec::new(),
            lease_time: Duration::from_secs(60),
            masquerade: true,
            vm_to_vm: false,
            state_dir: folder.to_owned(),
            control_socket: folder.join("control.sock"),
        }
    }

    /// What is said of a daemon that answers so, or never.
    async fn met(leases: &LeaseFile, answer: Option<&str>) -> Option<Trouble> {
        let _ = std::fs::remove_file(&leases.network.control_socket);
        let listener = UnixListener::bind(&leases.network.control_socket).unwrap();
        let answer = answer.map(|answer| format!("{answer}\n"));
        let daemon = tokio::spawn(async move {
            let mut stream = BufReader::new(listener.accept().await.unwrap().0);
            stream.read_line(&mut String::new()).await.unwrap();
            let Some(answer) = answer else { std::future::pending().await };
            stream.write_all(answer.as_bytes()).await.unwrap();
        });
        let said = leases.obstacle().await;
        daemon.abort();
        said
    }

    #[tokio::test(start_paused = true)]
    async fn whether_there_is_an_address_is_asked_of_the_daemon_and_said_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let world = Arc::new(At(Timestamp::UNIX_EPOCH));
        let leases = LeaseFile::new(&network(folder.path()), world);
        let gone = leases.obstacle().await.unwrap();
        assert_eq!(gone.reason, Reason::NetworkDaemonDown);
        assert!(gone.message.contains("does not run") && gone.message.contains("daemon.log"), "{gone}");
        let mute = met(&leases, None).await.unwrap();
        assert_eq!(mute.reason, Reason::NetworkDaemonDown);
        assert!(mute.message.contains("does not answer") && mute.message.contains("daemon.lock"), "{mute}");
        for (free, full) in [(0, true), (1, false)] {
            let answer = format!(r#"{{"ok":true,"status":{{"pool_available":{free}}}}}"#);
            let said = met(&leases, Some(&answer)).await;
            assert_eq!(said.as_ref().map(|said| said.reason), full.then_some(Reason::NoFreeAddress));
            assert!(said.is_none_or(|said| said.message.contains("172.31.242.0/30")));
        }
        for unclear in [r#"{"error":"no"}"#, r#"{"ok":true,"status":{}}"#] {
            assert_eq!(met(&leases, Some(unclear)).await, None, "{unclear}");
        }
    }

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
                network: network(folder.path()),
                world: Arc::new(At(now.parse().unwrap())),
            };
            assert_eq!(leases.lookup(mac).await.unwrap(), live.then_some(ip), "{now}");
            assert_eq!(leases.held().await.unwrap().len(), usize::from(live), "{now}");
        }
    }
}
