//! A host for tests with real guests: an engine on fresh folders, a tiny image, a network namespace.
//!
//! Entry points: [`on_a_fresh_host`], [`Host`]. A test runs itself again under `unshare -n`, so that the
//! machine's own network is never touched.

pub(crate) mod confinement;

use std::{
    future::Future,
    net::Ipv4Addr,
    os::unix::{fs::PermissionsExt, process::ExitStatusExt as _},
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use cocoon_engine::{
    engine::{Engine, EngineConfig, MemoryRecipe},
    model::{CloneIdentity, CloneSpec, RunSpec, Vm},
};
use cocoon_guest::host::{Exec, Output};
use cocoon_kit::world::RealWorld;
use cocoon_net::{config::NetworkConfig, daemon};
use tokio_util::sync::CancellationToken;

const INSIDE: &str = "COCOON_TEST_INSIDE";
const FOLDER: &str = "COCOON_TEST_FOLDER";
/// Ends a test that hangs; nothing waits for it otherwise.
pub(crate) const HANGS: Duration = Duration::from_secs(120);
pub(crate) const MIB: u64 = 1 << 20;

/// Runs `body` in a network namespace of its own. `name` is the test's own name.
pub(crate) fn on_a_fresh_host<F: Future<Output = ()>>(name: &str, body: impl FnOnce() -> F) {
    if std::env::var(INSIDE).as_deref() == Ok(name) {
        cocoon_kit::telemetry::init("info");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        return runtime.block_on(body());
    }
    let status = Command::new("unshare")
        .arg("-nm")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, name)
        .status()
        .expect("unshare is missing: apt-get install util-linux");
    assert!(status.success(), "{name} failed in its own network namespace (root is needed)");
}

/// An engine on fresh folders, with the image `tiny`. Dropped, it leaves nothing behind.
pub(crate) struct Host {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) engine: Engine,
    network: Option<CancellationToken>,
}

impl Host {
    /// Without a network.
    pub(crate) async fn new() -> Self {
        Self::with(|_| ()).await
    }

    /// With a bridge and a DHCP server.
    pub(crate) async fn networked() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let token = CancellationToken::new();
        let options =
            daemon::DaemonOptions { network: network.clone(), sweep_every: Duration::from_secs(60) };
        let ended = token.clone();
        tokio::spawn(async move { daemon::run(options, ended).await.unwrap() });
        until("the bridge", || async { network.control_socket.exists() }).await;
        let mut config = config(folder.path());
        config.network = Some(network);
        Self { engine: opened(config).await, folder, network: Some(token) }
    }

    /// With a changed configuration.
    pub(crate) async fn with(edit: impl FnOnce(&mut EngineConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(folder.path());
        edit(&mut config);
        Self { engine: opened(config).await, folder, network: None }
    }

    /// An engine that stands, on folders that go with it.
    pub(crate) const fn of(engine: Engine, folder: tempfile::TempDir) -> Self {
        Self { folder, engine, network: None }
    }

    /// A second engine on the same folders.
    pub(crate) async fn again(&self, memory: MemoryRecipe) -> Engine {
        let config = EngineConfig { memory, ..self.engine.config().clone() };
        Engine::open(config, Arc::new(RealWorld)).await.unwrap()
    }

    pub(crate) async fn run(&self, name: &str, memory: u64) -> Vm {
        let nics = usize::from(self.network.is_some());
        let spec = RunSpec { memory, nics, ..tiny(name) };
        let vm = self.engine.run(spec).await.unwrap_or_else(|error| panic!("run {name}: {}", chain(&error)));
        SEEN.lock().unwrap().push(vm.id.clone());
        vm
    }

    pub(crate) async fn clone_of(&self, snapshot: &str, name: &str, identity: CloneIdentity) -> Vm {
        clone_on(&self.engine, snapshot, name, identity).await
    }

    /// Runs a shell line in a guest; panics unless it succeeds.
    pub(crate) async fn sh(&self, vm: &str, line: &str) -> String {
        let output = self.try_sh(vm, line).await;
        let text = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
        assert_eq!(output.code, 0, "{line}: {text} {}", String::from_utf8_lossy(&output.stderr));
        text
    }

    pub(crate) async fn try_sh(&self, vm: &str, line: &str) -> Output {
        let limit = HANGS;
        let guest =
            self.engine.guest(vm, false, limit).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
        let argv = ["/bin/busybox", "sh", "-c", line].map(str::to_owned).to_vec();
        guest
            .output(Exec { argv, ..Exec::default() }, limit)
            .await
            .unwrap_or_else(|error| panic!("{}", chain(&error)))
    }

    /// Runs a VM whose agent is not the first process, and stops it for ever: ports open, nobody answers.
    pub(crate) async fn run_with_stopped_agent(&self, name: &str) {
        let nics = usize::from(self.network.is_some());
        let image = self.folder.path().join("init.tar");
        image_with(&image, Some("#!/bin/busybox sh\nwhile :; do sleep 1000; done\n"));
        self.engine.image_import("init", &[image]).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
        let spec = RunSpec { image: "init".into(), nics, ..tiny(name) };
        self.engine.run(spec).await.unwrap_or_else(|error| panic!("run {name}: {}", chain(&error)));
        self.sh(name, "(usleep 300000; kill -STOP $(pidof agent)) >/dev/null 2>&1 &").await;
        // One that is only slow would answer the second time.
        let mut unanswered = 0;
        while unanswered < 2 {
            let asked = self.engine.guest(name, false, Duration::from_secs(2)).await;
            unanswered = if asked.is_err() { unanswered + 1 } else { 0 };
            drop(asked);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Checks that nothing of any VM is left; removals of staged files may take a moment.
    pub(crate) async fn leaves_nothing(&self) {
        let begun = Instant::now();
        while !self.remains().is_empty() {
            assert!(begun.elapsed() < HANGS, "left behind: {:?}", self.remains());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Everything that an engine may leave behind, as lines.
    pub(crate) fn remains(&self) -> Vec<String> {
        let config = self.engine.config();
        let mut lines = Vec::new();
        let folders = [config.run_dir.clone(), config.log_dir.clone(), config.root_dir.join("locks")];
        for folder in folders.iter().chain(&[config.root_dir.join("snapshot/staging")]) {
            for entry in std::fs::read_dir(folder).unwrap() {
                lines.push(entry.unwrap().path().display().to_string());
            }
        }
        // Groups are the host's, so only those of this engine's VMs count.
        let seen = SEEN.lock().unwrap();
        lines.extend(seen.iter().filter(|id| group(id).exists()).map(|id| format!("control group {id}")));
        drop(seen);
        lines.extend(processes_in(self.folder.path()).into_iter().map(|pid| format!("process {pid}")));
        lines
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(token) = &self.network {
            token.cancel();
        }
        // A failed test must not leave guests: only what runs on our own folder is ended.
        for pid in processes_in(self.folder.path()) {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    }
}

/// Ids of VMs that tests of this process made.
static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn group(id: &str) -> PathBuf {
    let alone = Path::new("/sys/fs/cgroup/cgroup.procs").exists();
    Path::new(if alone { "/sys/fs/cgroup/cocoon" } else { "/sys/fs/cgroup/unified/cocoon" }).join(id)
}

/// Processes with an open file or socket log below `folder` (QEMU's standard output is its log there).
fn processes_in(folder: &Path) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let log = std::fs::read_link(format!("/proc/{pid}/fd/1")).unwrap_or_default();
        if log.starts_with(folder) {
            found.push(pid);
        }
    }
    found
}

pub(crate) async fn clone_on(engine: &Engine, snapshot: &str, name: &str, identity: CloneIdentity) -> Vm {
    let spec = CloneSpec { name: name.into(), snapshot: snapshot.into(), identity };
    let vm = engine.clone_vm(spec).await.unwrap_or_else(|error| panic!("clone {name}: {}", chain(&error)));
    SEEN.lock().unwrap().push(vm.id.clone());
    vm
}

/// Waits for it.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut check: impl FnMut() -> F) {
    let begun = Instant::now();
    while !check().await {
        assert!(begun.elapsed() < HANGS, "{what} did not come");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// An error with its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

/// That of [`Host::networked`].
pub(crate) fn network(folder: &Path) -> NetworkConfig {
    NetworkConfig {
        bridge: "cocotest0".into(),
        subnet: "10.88.0.0/24".parse().unwrap(),
        gateway: Ipv4Addr::new(10, 88, 0, 1),
        dns: vec![Ipv4Addr::new(10, 88, 0, 1)],
        lease_time: Duration::from_secs(3600),
        masquerade: false,
        vm_to_vm: true,
        state_dir: folder.join("net"),
        control_socket: folder.join("net.sock"),
    }
}

/// That of [`Host::new`].
pub(crate) fn config(folder: &Path) -> EngineConfig {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let bundle = target.join("bundle");
    assert!(bundle.join("vmlinuz").is_file(), "the boot bundle is missing: `cargo xtask bundle`");
    assert!(cocoon_engine::embed::guest_agent().is_some(), "the guest agent is missing: `cargo xtask embed`");
    EngineConfig {
        root_dir: folder.join("root"),
        run_dir: folder.join("root/run"),
        log_dir: folder.join("log"),
        boot_bundle: bundle,
        network: None,
        qemu: PathBuf::from("/usr/bin/qemu-system-x86_64"),
        memory: MemoryRecipe::Auto,
        boot_timeout: Duration::from_secs(90),
    }
}

async fn opened(config: EngineConfig) -> Engine {
    let image = config.root_dir.with_file_name("tiny.tar");
    let engine = Engine::open(config, Arc::new(RealWorld)).await.unwrap();
    image_with(&image, None);
    engine.image_import("tiny", &[image]).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
    engine
}

/// A root file system with busybox and nothing else, but perhaps an init of its own.
fn image_with(tar: &Path, init: Option<&str>) {
    let tree = tar.with_extension("tree");
    for folder in ["bin", "sbin", "dev", "etc", "proc", "sys", "tmp", "run", "var", "root"] {
        std::fs::create_dir_all(tree.join(folder)).unwrap();
    }
    std::fs::copy("/bin/busybox", tree.join("bin/busybox"))
        .expect("busybox is missing: apt-get install busybox-static");
    for applet in APPLETS {
        std::os::unix::fs::symlink("busybox", tree.join("bin").join(applet)).unwrap();
    }
    if let Some(script) = init {
        std::fs::write(tree.join("sbin/init"), script).unwrap();
        std::fs::set_permissions(tree.join("sbin/init"), PermissionsExt::from_mode(0o755)).unwrap();
    }
    let done = Command::new("tar").arg("-cf").arg(tar).arg("-C").arg(&tree).arg(".").status().unwrap();
    assert!(done.success());
}

const APPLETS: [&str; 19] = [
    "head", "sh", "cat", "ls", "sync", "ip", "sleep", "usleep", "dd", "md5sum", "seq", "cmp", "wc", "sed",
    "hostname", "true", "kill", "pidof", "echo",
];

/// Starts a VM in another process and kills that process after `delay`.
pub(crate) async fn killed_while_running(host: &Host, delay: Duration) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "runs_a_vm_for_another_test", "--ignored", "--nocapture"])
        .env(INSIDE, "runs_a_vm_for_another_test")
        .env(FOLDER, host.folder.path())
        .spawn()
        .unwrap();
    tokio::time::sleep(delay).await;
    child.kill().unwrap();
    let was_killed = child.wait().unwrap().signal().is_some();
    assert!(was_killed || !host.engine.list().await.unwrap().is_empty(), "the other process did nothing");
    nothing_of_it_starts().await;
}

/// Waits until no process that this program started still is this program: a killed engine may have been
/// starting one, and that one shares the engine's locks until it has become what it is to be.
pub(crate) async fn nothing_of_it_starts() {
    until("the start of what a killed engine was starting", || async { starting().is_empty() }).await;
}

/// Processes in our mount namespace that run this very program, other than this one. (A QEMU that starts leaves our
/// network namespace before it is one.)
fn starting() -> Vec<u32> {
    let of = |pid: &str, what: &str| std::fs::read_link(format!("/proc/{pid}/{what}")).ok();
    let [ours, here] = ["exe", "ns/mnt"].map(|what| of("self", what));
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
        .filter(|pid: &u32| *pid != std::process::id())
        .filter(|pid| of(&pid.to_string(), "exe") == ours && of(&pid.to_string(), "ns/mnt") == here)
        .collect()
}

/// A VM of the small image, with one processor and no network.
pub(crate) fn tiny(name: &str) -> RunSpec {
    let (memory, storage) = (256 * MIB, 256 * MIB);
    RunSpec { name: name.into(), image: "tiny".into(), cpu: 1, memory, storage, nics: 0 }
}

/// The other process of [`killed_while_running`].
pub(crate) async fn run_for_another_test() {
    let folder = std::env::var_os(FOLDER).expect("it is started by `killed_while_running` alone");
    let engine = Engine::open(config(Path::new(&folder)), Arc::new(RealWorld)).await.unwrap();
    let _ = engine.run(tiny("vm-killed")).await;
}
