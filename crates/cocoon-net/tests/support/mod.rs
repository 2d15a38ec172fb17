//! A host of its own for each test (a network namespace) and guests for it (namespaces wired to taps).
//!
//! Entry points: [`on_a_fresh_host`], [`Guest`], [`RawGuest`]. A test runs itself again under `unshare -n`, so the
//! machine's own network is never touched.

mod fixture;
pub(crate) mod sys;

use std::{
    io::{BufRead as _, BufReader},
    net::Ipv4Addr,
    os::fd::OwnedFd,
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use cocoon_net::{
    config::{self, NetworkConfig},
    daemon::{self, DaemonError, DaemonOptions},
    links::{self, Tap},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::task::JoinHandle as Task;
use tokio_util::sync::CancellationToken;

const INSIDE: &str = "COCOON_NET_TEST";
const VNET_HEADER: usize = 10;

/// Runs `body` in a network namespace of its own. `name` is the test's own name.
pub(crate) fn on_a_fresh_host<F: Future<Output = ()>>(name: &str, body: impl FnOnce() -> F) {
    if std::env::var(INSIDE).as_deref() == Ok(name) {
        ok("ip", "link set lo up");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(body());
    }
    need(&[
        ("unshare", "util-linux"),
        ("nsenter", "util-linux"),
        ("ip", "iproute2"),
        ("nft", "nftables"),
        ("busybox", "busybox-static"),
        ("iptables", "iptables"),
    ]);
    let status = Command::new("unshare")
        .arg("-n")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, name)
        .status()
        .unwrap();
    assert!(status.success(), "{name} failed in its own network namespace (root is needed)");
}

fn need(tools: &[(&str, &str)]) {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    for (tool, package) in tools {
        let found = path.split(':').any(|folder| Path::new(folder).join(tool).exists());
        assert!(found, "{tool} is missing; install it with `apt-get install {package}`");
    }
}

/// Runs a command of this host and returns what it printed; `arguments` are split at blanks.
pub(crate) fn ok(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split_whitespace()).output().unwrap();
    finished(&format!("{program} {arguments}"), output)
}

/// As [`ok`] through a shell.
pub(crate) fn shell(script: &str) -> String {
    finished(script, Command::new("sh").args(["-c", script]).output().unwrap())
}

fn finished(what: &str, output: Output) -> String {
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Everything about the host's network that a teardown must put back.
pub(crate) fn host_network() -> String {
    let links = shell("ip -o link show | sed 's/ state .*//'");
    let forward = std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap();
    format!(
        "{links}\n{}\n{}\nip_forward {forward}",
        ok("ip", "-4 -o addr show"),
        ok("nft", "-s list ruleset")
    )
}

/// The network of the tests, with folders that do not exist yet.
pub(crate) fn network(folder: &Path) -> NetworkConfig {
    NetworkConfig {
        state_dir: folder.join("net"),
        control_socket: folder.join("run/net.sock"),
        ..fixture::network(folder)
    }
}

/// A running daemon.
pub(crate) struct Daemon {
    stop: CancellationToken,
    task: Task<Result<(), DaemonError>>,
}

impl Daemon {
    pub(crate) async fn start(network: &NetworkConfig) -> Self {
        Self::sweeping(network, Duration::from_millis(300)).await
    }

    pub(crate) async fn sweeping(network: &NetworkConfig, sweep_every: Duration) -> Self {
        let stop = CancellationToken::new();
        let options = DaemonOptions { network: network.clone(), sweep_every };
        let task = tokio::spawn(daemon::run(options, stop.clone()));
        let socket = network.control_socket.clone();
        eventually("the daemon's control socket", || socket.exists() || task.is_finished()).await;
        if task.is_finished() {
            panic!("the daemon ended: {:?}", task.await);
        }
        Self { stop, task }
    }

    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

/// Ends a test that hangs; nothing waits for it otherwise.
pub(crate) const HANGS: Duration = Duration::from_secs(120);

/// Waits until `fact` holds.
pub(crate) async fn eventually(what: &str, mut fact: impl FnMut() -> bool) {
    let end = Instant::now() + HANGS;
    while !fact() {
        assert!(Instant::now() < end, "{what}: not within {HANGS:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A network namespace that lives as long as this value.
pub(crate) struct Namespace {
    keeper: Child,
}

impl Namespace {
    pub(crate) fn new() -> Self {
        let mut keeper = Command::new("unshare")
            .args(["-n", "sh", "-c", "ip link set lo up; echo ready; exec sleep infinity"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { keeper }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.keeper.id()
    }

    /// Runs a shell script in the namespace: success and what it printed, both streams. Waits without stopping the
    /// daemon, which runs on the same thread.
    pub(crate) async fn try_shell(&self, script: &str) -> (bool, String) {
        let output = tokio::process::Command::new("nsenter")
            .args(["-t", &self.pid().to_string(), "-n", "sh", "-c", &format!("exec 2>&1; {script}")])
            .output()
            .await
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(crate) async fn shell(&self, script: &str) -> String {
        let (success, text) = self.try_shell(script).await;
        assert!(success, "{script}: {text}");
        text
    }

    fn open_tap(&self, name: &str) -> OwnedFd {
        let (path, name) = (format!("/proc/{}/ns/net", self.pid()), name.to_owned());
        let opener = std::thread::spawn(move || {
            use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
            use std::os::fd::AsFd as _;
            let namespace = std::fs::File::open(path).unwrap();
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            sys::open_tap(&name).unwrap()
        });
        opener.join().unwrap()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

/// A guest with a network stack of its own: a namespace whose `eth0` is wired to a tap of the network.
pub(crate) struct Guest {
    pub(crate) inside: Namespace,
    pub(crate) tap: RawGuest,
    scripts: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    pumps: Vec<JoinHandle<()>>,
}

impl Guest {
    pub(crate) async fn new(network: &NetworkConfig, vm: &str, mac: &str) -> Self {
        let tap = RawGuest::new(network, vm, mac).await;
        let inside = Namespace::new();
        let eth0 = Arc::new(inside.open_tap("eth0"));
        inside.shell(&format!("ip link set eth0 address {mac} && ip link set eth0 up")).await;
        let stop = Arc::new(AtomicBool::new(false));
        let outward = pump(Arc::clone(&eth0), 0, Arc::clone(&tap.fd), VNET_HEADER, Arc::clone(&stop));
        let inward = pump(Arc::clone(&tap.fd), VNET_HEADER, eth0, 0, Arc::clone(&stop));
        let scripts = tempfile::tempdir().unwrap();
        udhcpc_script(&scripts.path().join("configure"));
        Self { inside, tap, scripts, stop, pumps: vec![outward, inward] }
    }

    /// Asks for an address with busybox and configures it; what udhcpc printed.
    pub(crate) async fn dhcp(&self) -> (bool, String) {
        let script = self.scripts.path().join("configure");
        let client = format!("busybox udhcpc -i eth0 -f -q -n -t 30 -T 1 -s {}", script.display());
        self.inside.try_shell(&client).await
    }

    pub(crate) async fn address(&self) -> Option<Ipv4Addr> {
        let text = self.inside.shell("ip -4 -o addr show dev eth0").await;
        text.split_whitespace().skip_while(|word| *word != "inet").nth(1)?.split('/').next()?.parse().ok()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for pump in self.pumps.drain(..) {
            let _ = pump.join();
        }
    }
}

fn udhcpc_script(path: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    let text = "#!/bin/sh\ncase $1 in bound|renew)\n  ip addr flush dev eth0; ip addr add $ip/$mask dev eth0; ip route replace default via $router;;\nesac\n";
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn pump(
    from: Arc<OwnedFd>,
    skip: usize,
    to: Arc<OwnedFd>,
    pad: usize,
    stop: Arc<AtomicBool>,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            let Some(packet) = receive(&from, Duration::from_millis(50)) else { continue };
            let frame = [&vec![0; pad], &packet[skip..]].concat();
            let _ = rustix::io::write(&*to, &frame);
        }
    })
}

fn receive(fd: &OwnedFd, patience: Duration) -> Option<Vec<u8>> {
    let mut waiting = [PollFd::new(fd, PollFlags::IN)];
    let patience = Timespec::try_from(patience).unwrap();
    if poll(&mut waiting, Some(&patience)).unwrap_or(0) == 0 {
        return None;
    }
    let mut buffer = vec![0; 65_536];
    let length = rustix::io::read(fd, &mut buffer).ok()?;
    buffer.truncate(length);
    Some(buffer)
}

/// The guest's end of a tap, for frames made by hand.
pub(crate) struct RawGuest {
    pub(crate) name: String,
    fd: Arc<OwnedFd>,
}

impl RawGuest {
    pub(crate) async fn new(network: &NetworkConfig, vm: &str, mac: &str) -> Self {
        let Tap { name, fd } = links::attach(network, vm, 0, mac).await.unwrap();
        Self { name, fd: Arc::new(fd) }
    }

    pub(crate) fn send(&self, frame: &[u8]) {
        let packet = [&[0; VNET_HEADER], frame].concat();
        rustix::io::write(&*self.fd, &packet).unwrap();
    }

    /// Whether a frame that fits comes within a short time.
    pub(crate) async fn hears(&self, fits: impl Fn(&[u8]) -> bool + Send + 'static) -> bool {
        let fd = Arc::clone(&self.fd);
        let listen = move || {
            let end = Instant::now() + Duration::from_millis(400);
            while let Some(left) = end.checked_duration_since(Instant::now()) {
                if receive(&fd, left).is_some_and(|packet| fits(&packet[VNET_HEADER..])) {
                    return true;
                }
            }
            false
        };
        tokio::task::spawn_blocking(listen).await.unwrap()
    }
}

/// Frames made by hand.
pub(crate) mod frames {
    use std::net::Ipv4Addr;

    pub(crate) type Mac = [u8; 6];
    pub(crate) const BROADCAST: Mac = [0xff; 6];

    pub(crate) fn mac(text: &str) -> Mac {
        text.parse::<cocoon_net::names::Mac>().unwrap().bytes()
    }

    pub(crate) fn ethernet(to: Mac, from: Mac, kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = [&to[..], &from, &kind.to_be_bytes(), payload].concat();
        frame.resize(frame.len().max(60), 0);
        frame
    }

    /// An ARP request for `target`; `from` is the frame's source, `sender` what the ARP message claims.
    pub(crate) fn arp(from: Mac, sender: (Mac, Ipv4Addr), target: Ipv4Addr) -> Vec<u8> {
        let (mac, ip) = sender;
        let message = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &mac, &ip.octets(), &[0; 6], &target.octets()].concat();
        ethernet(BROADCAST, from, 0x0806, &message)
    }

    pub(crate) fn is_arp_reply(frame: &[u8]) -> bool {
        frame.get(12..14) == Some(&[8, 6]) && frame.get(20..22) == Some(&[0, 2])
    }

    pub(crate) fn udp(
        from: Mac,
        to: Mac,
        source: (Ipv4Addr, u16),
        target: (Ipv4Addr, u16),
        data: &[u8],
    ) -> Vec<u8> {
        let udp_length = u16::try_from(8 + data.len()).unwrap();
        let udp =
            [&source.1.to_be_bytes()[..], &target.1.to_be_bytes(), &udp_length.to_be_bytes(), &[0, 0], data]
                .concat();
        let total = u16::try_from(20 + udp.len()).unwrap().to_be_bytes();
        let mut header =
            [&[0x45, 0][..], &total, &[0, 1, 0, 0, 64, 17, 0, 0], &source.0.octets(), &target.0.octets()]
                .concat();
        let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        let sum = !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap();
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        ethernet(to, from, 0x0800, &[header, udp].concat())
    }

    /// A DISCOVER of `client` in a frame of `from`.
    pub(crate) fn discover(from: Mac, client: Mac) -> Vec<u8> {
        dhcp(1, from, client, Ipv4Addr::UNSPECIFIED)
    }

    /// A REQUEST of a client that has the address already.
    pub(crate) fn renewal(client: Mac, address: Ipv4Addr) -> Vec<u8> {
        dhcp(3, client, client, address)
    }

    fn dhcp(kind: u8, from: Mac, client: Mac, address: Ipv4Addr) -> Vec<u8> {
        let mut message = vec![0; 236];
        message[..4].copy_from_slice(&[1, 1, 6, 0]);
        message[12..16].copy_from_slice(&address.octets());
        message[28..34].copy_from_slice(&client);
        message.extend([99, 130, 83, 99, 53, 1, kind, 255]);
        message.resize(300, 0);
        udp(from, BROADCAST, (address, 68), (Ipv4Addr::BROADCAST, 67), &message)
    }

    pub(crate) fn is_dhcp_reply(frame: &[u8]) -> bool {
        frame.get(12..14) == Some(&[8, 0]) && frame.get(34..36) == Some(&[0, 67])
    }
}
