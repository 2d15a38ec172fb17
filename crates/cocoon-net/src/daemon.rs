//! The network daemon: serves DHCP on the bridge, keeps leases and filter rows in step, repairs the
//! network, and takes releases. A process of its own, which outlives the node agent.
//!
//! Entry point: [`run`]. One task owns the leases; packets, control requests and the sweep reach it in
//! turn. Invariants: one daemon a state folder; leases are durable and in the packet filter before an ACK
//! leaves; on shutdown bridge, rules and leases stay, since VMs live on.
//!
//! **When somebody takes our filter away** (`nft flush ruleset`), the kernel says so and it is put back at once: within
//! about a tenth of a second, a quarter if only rows are gone. Until then, and as long as no daemon runs, a
//! guest can use other addresses than its own, speak IPv6 to the bridge and reach the host's ports; a
//! connection to the host that it opens then lives on. It still has no MAC but its own and reaches no other
//! guest, since the bridge's ports are locked and isolated. A filter that cannot be put back closes the network:
//! taps are set down until it is.

use std::{
    io::{self, Seek as _, Write as _},
    net::{Ipv4Addr, SocketAddrV4},
    path::PathBuf,
    time::Duration,
};

use cocoon_kit::{
    failure::chain,
    files::{self, Lock},
};
use jiff::Timestamp;
use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;
use tokio::{
    net::UdpSocket,
    sync::mpsc,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{
    alarm::Alarm,
    bridge::{self, BridgeError, Look, State},
    claim::Claim,
    config::NetworkConfig,
    control::{self, Answer, Call, Request, Status},
    dhcp::{Effect, Outcome, Server, Settings, packet::Reply, table::Table},
    leases::{self, Lease, LeaseError, Parsed},
    links,
    names::Mac,
    nft, rules,
};

/// Packets answered with one save of the leases.
const BATCH: usize = 64;
/// How long a tap may take to be wired before it looks broken.
const SECOND_LOOK: Duration = Duration::from_millis(100);
/// From a repair that failed to the next try.
const REPAIR_AGAIN: Duration = Duration::from_millis(500);
/// Longer than any DHCP packet that comes over Ethernet.
const MAX_PACKET: usize = 2048;

/// How to run the daemon.
#[derive(Debug, Clone)]
pub struct DaemonOptions {
    /// The network to serve.
    pub network: NetworkConfig,
    /// How often lapsed leases are dropped and the network is looked after.
    pub sweep_every: Duration,
}

impl From<NetworkConfig> for DaemonOptions {
    fn from(network: NetworkConfig) -> Self {
        Self { network, sweep_every: Duration::from_secs(5) }
    }
}

/// Why the daemon did not start, or ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// Another daemon has this state folder.
    #[error(
        "a network daemon (pid {pid}) already runs on {folder}; stop it first, or use another state folder"
    )]
    Taken {
        /// The other daemon.
        pid: String,
        /// The state folder.
        folder: String,
    },
    /// Another daemon serves this bridge, from another state folder.
    #[error(
        "another network daemon already serves bridge {0} from another state folder; stop it first, or use another bridge"
    )]
    BridgeTaken(String),
    /// The network could not be made.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// The leases cannot be read.
    #[error(transparent)]
    Leases(#[from] LeaseError),
    /// A file or socket failed.
    #[error("{step} at {path}")]
    System {
        /// What was tried.
        step: &'static str,
        /// Where.
        path: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

pub(crate) fn lock_file(network: &NetworkConfig) -> PathBuf {
    network.state_dir.join("daemon.lock")
}

/// Serves the network until `shutdown`.
pub async fn run(options: DaemonOptions, shutdown: CancellationToken) -> Result<(), DaemonError> {
    let DaemonOptions { network, sweep_every } = options;
    let _lock = lock(&network)?;
    let _claim = claim(&network)?;
    let now = Timestamp::now();
    // Before anything is touched: a lease file that cannot be read must not cost anybody an address.
    let server = load(&network, now).await?;
    // Before the tables are made, so that no change of them goes unseen.
    let alarm = Alarm::open(&network.bridge).map_err(system("news of the packet filter", &network.bridge))?;
    let state = bridge::ensure(&network).await?;
    let socket = bind(&network)?;
    let path = network.control_socket.clone();
    let listener = control::listen(&path).map_err(system("control socket", &path.display().to_string()))?;
    let (sender, calls) = mpsc::channel(16);
    let control = tokio::spawn(control::serve(listener, sender, shutdown.clone()));
    tracing::info!(bridge = network.bridge, subnet = %network.subnet, leases = server.active(now), "network daemon serves");
    let mut daemon = Daemon { network, server, state, socket, alarm };
    daemon.serve(calls, sweep_every, &shutdown).await;
    let _ = std::fs::remove_file(&path);
    // It ends with the same token.
    let _ = control.await;
    Ok(())
}

/// Removes the network; see [`bridge::teardown`].
pub async fn teardown(network: &NetworkConfig, force: bool) -> Result<(), DaemonError> {
    Ok(bridge::teardown(network, force).await?)
}

fn lock(network: &NetworkConfig) -> Result<Lock, DaemonError> {
    let path = lock_file(network);
    let name = path.display().to_string();
    files::private_folder(&network.state_dir).map_err(system("state folder", &name))?;
    let Some(lock) = Lock::try_acquire(&path).map_err(system("lock", &name))? else {
        let pid = std::fs::read_to_string(&path).unwrap_or_default();
        let pid = if pid.trim().is_empty() { "unknown".to_owned() } else { pid.trim().to_owned() };
        return Err(DaemonError::Taken { pid, folder: network.state_dir.display().to_string() });
    };
    let note = || {
        let mut file = lock.file();
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    note().map_err(system("lock", &name))?;
    Ok(lock)
}

fn claim(network: &NetworkConfig) -> Result<Claim, DaemonError> {
    let taken = Claim::take(network).map_err(system("claim", &network.bridge))?;
    taken.ok_or_else(|| DaemonError::BridgeTaken(network.bridge.clone()))
}

async fn load(network: &NetworkConfig, now: Timestamp) -> Result<Server, DaemonError> {
    let pool = network.pool().map_err(BridgeError::from)?;
    let file = network.lease_file();
    // A file that was moved away costs no guest its address: it does not ask for it again for half a lease's time.
    let parsed = if file.exists() { leases::load(&file)? } else { in_use(network, now).await? };
    let settings = Settings {
        gateway: network.gateway,
        mask: network.subnet.netmask(),
        dns: network.dns.clone(),
        lease_time: network.lease_time,
    };
    let mut server = Server::new(settings, pool, parsed.live(now).into_values());
    if !parsed.doubtful.is_empty() {
        tracing::warn!(addresses = ?parsed.doubtful, "lease rows that cannot be read; their addresses are set aside for one lease time");
        let until = now.saturating_add(network.lease_time).unwrap_or(Timestamp::MAX);
        server.set_aside(parsed.doubtful, until);
    }
    Ok(server)
}

/// Leases for the addresses that an earlier daemon's filter lets guests use. They are in the file when this returns.
async fn in_use(network: &NetworkConfig, now: Timestamp) -> Result<Parsed, LeaseError> {
    let expiry = now.saturating_add(network.lease_time).unwrap_or(Timestamp::MAX);
    let rows = bridge::granted(network).await;
    let leases: Vec<Lease> =
        rows.into_iter().map(|(mac, ip)| Lease { mac: mac.to_string(), ip, expiry }).collect();
    if !leases.is_empty() {
        tracing::warn!(
            addresses = leases.len(),
            "there is no lease file; addresses in use are taken from the packet filter"
        );
        leases::save(&network.lease_file(), &leases)?;
    }
    Ok(Parsed { leases, ..Parsed::default() })
}

/// A socket that hears and speaks on the bridge only.
fn bind(network: &NetworkConfig) -> Result<UdpSocket, DaemonError> {
    let open = || {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
        socket.bind_device(Some(network.bridge.as_bytes()))?;
        socket.set_reuse_address(true)?;
        socket.set_broadcast(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 67).into())?;
        UdpSocket::from_std(socket.into())
    };
    open().map_err(system("DHCP socket (UDP 67)", &network.bridge))
}

fn system(step: &'static str, path: &str) -> impl FnOnce(io::Error) -> DaemonError + use<> {
    let path = path.to_owned();
    move |source| DaemonError::System { step, path, source }
}

struct Daemon {
    network: NetworkConfig,
    server: Server,
    state: State,
    socket: UdpSocket,
    alarm: Alarm,
}

impl Daemon {
    async fn serve(
        &mut self,
        mut calls: mpsc::Receiver<Call>,
        sweep_every: Duration,
        shutdown: &CancellationToken,
    ) {
        let mut sweep = interval(sweep_every);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                _ = sweep.tick() => self.sweep().await,
                () = self.alarm.rings() => {
                    self.mend().await;
                    self.alarm.rest();
                }
                Some((request, answer)) = calls.recv() => {
                    // A client that went away still gets what it asked for.
                    let _ = answer.send(self.answer(request).await);
                }
                ready = self.socket.readable() => match ready {
                    Ok(()) => self.receive().await,
                    Err(error) => {
                        tracing::warn!(%error, "DHCP socket");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
            }
        }
    }

    /// Answers the packets that are there.
    async fn receive(&mut self) {
        let now = Timestamp::now();
        let checkpoint = self.server.checkpoint();
        let lapsed = Outcome { effects: self.server.sweep(now), ..Outcome::default() };
        let mut outcomes = vec![lapsed];
        let mut buffer = vec![0; MAX_PACKET];
        while outcomes.len() <= BATCH {
            match self.socket.try_recv_from(&mut buffer) {
                Ok((length, _)) => {
                    outcomes.push(self.server.handle(buffer.get(..length).unwrap_or_default(), now))
                }
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        tracing::warn!(%error, "receiving on the DHCP socket");
                    }
                    break;
                }
            }
        }
        let effects: Vec<Effect> =
            outcomes.iter().flat_map(|outcome| outcome.effects.iter().copied()).collect();
        let done = self.commit(&effects).await;
        if let Err(message) = &done {
            tracing::error!(message, "leases could not be kept; nothing is granted");
            let failed = outcomes.iter().filter(|outcome| outcome.refusal.is_some()).count();
            self.undo(checkpoint, failed as u64).await;
        }
        for outcome in outcomes {
            let changed = !outcome.effects.is_empty();
            let reply = if done.is_err() && changed { outcome.refusal } else { outcome.reply };
            if let Some(reply) = reply {
                self.send(&reply).await;
            }
        }
    }

    async fn send(&self, reply: &Reply) {
        // The client asks again if this is lost.
        if let Err(error) = self.socket.send_to(&reply.bytes, (reply.to, 68)).await {
            tracing::warn!(to = %reply.to, %error, "sending a DHCP reply");
        }
    }

    /// Makes effects real: first the lease file, then the filter rows.
    async fn commit(&mut self, effects: &[Effect]) -> Result<(), String> {
        if effects.is_empty() {
            return Ok(());
        }
        self.save().await?;
        let bridge = &self.network.bridge;
        let text: String = effects
            .iter()
            .map(|effect| match *effect {
                Effect::Grant { mac, ip } => rules::add_address(bridge, mac, ip),
                Effect::Revoke { mac, ip } => rules::delete_address(bridge, mac, ip),
            })
            .collect();
        let Err(error) = nft::apply(&text).await else { return Ok(()) };
        // Most likely somebody flushed the filter. A repair puts in every row of the file just written.
        if self.repair().await { Ok(()) } else { Err(error.to_string()) }
    }

    /// Goes back to an earlier state; `failed` requests count as refused.
    async fn undo(&mut self, checkpoint: Table, failed: u64) {
        self.server.restore(checkpoint, failed);
        // The file may have been written before the packet filter refused.
        if let Err(message) = self.save().await {
            tracing::warn!(message, "the lease file may name an address that was not granted");
        }
    }

    async fn answer(&mut self, request: Request) -> Answer {
        match request {
            Request::Ping { .. } => Answer {
                version: Some(env!("CARGO_PKG_VERSION").to_owned()),
                pid: Some(std::process::id()),
                network: Some(self.network.clone()),
                ..Answer::done()
            },
            Request::Status { .. } => {
                let now = Timestamp::now();
                let status = Status {
                    lease_active: self.server.active(now),
                    pool_available: self.server.free(now),
                    counters: self.server.counters().clone(),
                };
                Answer { status: serde_json::to_value(status).ok(), ..Answer::done() }
            }
            Request::Release { release } => match release.parse::<Mac>() {
                Ok(mac) => self.release(mac).await,
                Err(error) => Answer::failed(error.to_string()),
            },
        }
    }

    async fn release(&mut self, mac: Mac) -> Answer {
        let checkpoint = self.server.checkpoint();
        let outcome = self.server.release(mac, Timestamp::now());
        match self.commit(&outcome.effects).await {
            Ok(()) => Answer::done(),
            Err(message) => {
                self.undo(checkpoint, 0).await;
                Answer::failed(message)
            }
        }
    }

    /// Drops lapsed leases and repairs the network. What fails is tried again by the next sweep.
    async fn sweep(&mut self) {
        let checkpoint = self.server.checkpoint();
        let effects = self.server.sweep(Timestamp::now());
        if let Err(message) = self.commit(&effects).await {
            tracing::warn!(message, "lapsed leases stay until the next sweep");
            self.undo(checkpoint, 0).await;
        }
        self.mend().await;
        bridge::coexist_with_others(&self.network).await;
    }

    /// Looks after the network and repairs it. The lease file comes first, since the filter goes by it.
    async fn mend(&mut self) {
        self.restore_file().await;
        match self.is_intact().await {
            Ok(true) => {}
            Ok(false) => drop(self.repair().await),
            Err(error) => tracing::warn!(error = chain(&error), "looking after the network"),
        }
    }

    /// Writes the lease file again if somebody took it away or changed it: the leases are this task's own.
    async fn restore_file(&self) {
        let kept = leases::parse(&leases::render(&self.server.leases())).unwrap_or_default().all();
        let found = leases::load(&self.network.lease_file()).map(|found| found.all());
        if found.is_ok_and(|found| found == kept) {
            return;
        }
        tracing::warn!(file = %self.network.lease_file().display(), "the lease file was changed by somebody else; it is written again");
        if let Err(message) = self.save().await {
            tracing::warn!(message, "the lease file cannot be written again now");
        }
    }

    async fn save(&self) -> Result<(), String> {
        let (file, rows) = (self.network.lease_file(), self.server.leases());
        let saved = tokio::task::spawn_blocking(move || leases::save(&file, &rows)).await;
        saved.map_err(|error| error.to_string())?.map_err(|error| chain(&error))
    }

    /// Looks twice, so that a tap that is just being made or removed is not taken for damage.
    async fn is_intact(&self) -> Result<bool, BridgeError> {
        match bridge::look(&self.network, &self.state).await? {
            Look::Intact => return Ok(true),
            Look::Broken => return Ok(false),
            Look::Unwired => tokio::time::sleep(SECOND_LOOK).await,
        }
        bridge::intact(&self.network, &self.state).await
    }

    /// Makes the network anew from kernel and lease file; whether that worked.
    async fn repair(&mut self) -> bool {
        tracing::warn!(
            bridge = self.network.bridge,
            "the network was changed by somebody else; it is repaired"
        );
        let state = match bridge::repair(&self.network).await {
            Ok(state) => state,
            Err(error) => {
                tracing::error!(error = chain(&error), "the network cannot be repaired now");
                self.alarm.ring_after(REPAIR_AGAIN);
                if !bridge::filtered(&self.network, &self.state).await {
                    self.cut_off().await;
                }
                return false;
            }
        };
        // A socket stays bound to the bridge that is gone.
        if state.index != self.state.index {
            match bind(&self.network) {
                Ok(socket) => self.socket = socket,
                Err(error) => {
                    tracing::error!(error = chain(&error), "DHCP cannot be served now");
                    return false;
                }
            }
        }
        self.state = state;
        true
    }

    /// A network whose filter cannot be put in force is closed until it can.
    async fn cut_off(&self) {
        match links::cut_off(&self.network).await {
            Ok(taps) => tracing::error!(taps, "taps are set down until the network is repaired"),
            Err(error) => {
                tracing::error!(error = chain(&error), "taps cannot be set down; guests may be unfiltered");
            }
        }
    }
}
