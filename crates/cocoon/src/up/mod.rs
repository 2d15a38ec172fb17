//! `cocoon up`: everything on one machine, with an embedded Kubernetes API.
//!
//! Entry point: [`run`]. Order: what the host must have, data folder, ports, certificates, network
//! daemon, engine, plane, node agent, rules. A part that ends takes the whole down. VMs and the network
//! daemon go on without us; the last one out takes the network down.

mod credentials;
mod folder;
mod host;
mod network;
mod spare;

use std::{
    io::Write as _,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Child,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Args;
use cocoon_engine::{
    engine::{Engine, EngineConfig, MemoryRecipe},
    model::VmState,
};
use cocoon_kit::{
    tasks::{Failure, Kind, Tasks},
    world::{RealWorld, World},
};
use cocoon_net::config::NetworkConfig;
use cocoon_node::{Node, NodeConfig, ports::Ports};
use cocoon_oci::{
    layout::{GRACE, OciLayout},
    registry::Registry,
};
use cocoon_plane::plane::{Plane, PlaneConfig, User};
use ipnet::Ipv4Net;
use k8s_openapi::{
    api::{coordination::v1::Lease, core::v1::Node as NodeObject},
    jiff::Timestamp,
};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{cli::settings::found, registry};
use credentials::{Credentials, KUBELET_CLIENT};
use folder::DataFolder;

/// What `cocoon up` takes.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  cocoon up --data-dir /var/lib/cocoon &\n  export KUBECONFIG=/var/lib/cocoon/kubeconfig\n  kubectl get nodes\n\nOCI_REGISTRY=oci-layout:PATH in the environment keeps saved VMs in that folder instead of <data-dir>/registry.\nVMs go on when it ends; the next `cocoon up` finds them again.\n\nExit status: 0 ended by a signal, 1 a part failed."
)]
pub struct UpArgs {
    /// Where everything is kept.
    #[arg(long, default_value = "/var/lib/cocoon")]
    data_dir: PathBuf,
    /// Address of the Kubernetes API.
    #[arg(long, default_value = "127.0.0.1:6443")]
    listen: SocketAddr,
    /// Address of the kubelet port.
    #[arg(long, default_value = "127.0.0.1:10250")]
    kubelet_listen: SocketAddr,
    /// Folder with kernel and initrd for images without their own (`cargo xtask bundle`).
    #[arg(long, default_value = "/usr/share/cocoon/bundle")]
    boot_bundle: PathBuf,
    /// Name of the node; the host's name by default.
    #[arg(long, env = "VK_NODE_NAME")]
    node_name: Option<String>,
    /// Group of nodes that this one belongs to, the label `cocoonstack.io/pool`.
    #[arg(long, env = "VK_NODE_POOL", default_value = "default")]
    pool: String,
    /// Name shared by the hosts that can wake one another's VMs, the label `cocoonstack.io/snapshot-cpu-class`.
    #[arg(long, env = "VK_SNAPSHOT_CPU_CLASS")]
    snapshot_class: Option<String>,
    /// Bridge interface of the VMs.
    #[arg(long, default_value = "cocoon0")]
    bridge: String,
    /// Addresses of the VMs.
    #[arg(long, default_value = "172.31.240.0/24")]
    subnet: Ipv4Net,
    /// Name servers for the VMs.
    #[arg(long, value_delimiter = ',', default_value = "8.8.8.8,1.1.1.1")]
    dns: Vec<Ipv4Addr>,
    /// QEMU program.
    #[arg(long, default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// How clones get their memory: `auto` maps it privately, `full-stream` loads all of it.
    #[arg(long, value_enum, default_value_t = Recipe::Auto)]
    memory: Recipe,
    /// Seconds that a hibernation may keep a guest paused; past it the guest goes on and it is tried again.
    #[arg(long, env = "VK_HIBERNATE_PAUSE_LIMIT", default_value_t = 120)]
    pause_limit: u64,
    /// Log filter, for example `info` or `cocoon_node=debug`.
    #[arg(long, env = "VK_LOG_LEVEL", default_value = "info")]
    pub log_level: String,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Recipe {
    Auto,
    FullStream,
}

/// What is open and checked; nothing of it runs yet, and the host is as it was.
struct Opened {
    node_name: String,
    kubeconfig: PathBuf,
    api: TcpListener,
    kubelet: TcpListener,
    credentials: Credentials,
    network: NetworkConfig,
    registry: Arc<OciLayout>,
    plane: Plane,
    engine: Engine,
    ports: Ports,
    world: Arc<dyn World>,
}

/// Runs until a signal comes or a part fails.
pub async fn run(args: &UpArgs) -> anyhow::Result<()> {
    let begun = Instant::now();
    raise_descriptors();
    let mut signals = Signals::install()?;
    host::check(&args.qemu, &args.boot_bundle)?;
    let folder = DataFolder::open(&args.data_dir)?;
    let opened = open(args, &folder).await.map_err(|error| spare::explained(folder.path(), error))?;
    let (engine, network) = (opened.engine.clone(), opened.network.clone());
    let tasks = Tasks::new();
    // From here on the host is changed: whatever happens, `leave` follows. A signal waits until the
    // network daemon answers, else it could not be ended.
    let served = match network::ensure(&network).await {
        Err(error) => Err(error),
        Ok(daemon) => tokio::select! {
            biased;
            () = signals.received() => Ok(()),
            served = serve(args, opened, daemon, &tasks, begun) => served,
        },
    };
    let served = served.map_err(|error| spare::explained(folder.path(), error));
    tasks.shutdown(Duration::from_secs(30)).await;
    let left = leave(&engine, &network).await;
    served.and(left)
}

/// Asks everything that may refuse.
async fn open(args: &UpArgs, folder: &DataFolder) -> anyhow::Result<Opened> {
    let (api, kubelet) =
        (bind(args.listen, "--listen").await?, bind(args.kubelet_listen, "--kubelet-listen").await?);
    let node_name = args.node_name.clone().unwrap_or_else(host::name);
    let addresses = [api.local_addr()?.ip(), kubelet.local_addr()?.ip()];
    let credentials = Credentials::load(&folder.join("pki"), &node_name, &addresses)?;
    let network = network::config(&args.bridge, args.subnet, &args.dns, &folder.join("net"))?;
    let world: Arc<dyn World> = Arc::new(RealWorld);
    let registry = Arc::new(open_registry(folder)?);
    let plane = open_plane(folder, &credentials, &world).await?;
    let engine = Engine::open(engine_config(args, folder, &network), Arc::clone(&world)).await?;
    let records = folder.join("node.db");
    let clock = Arc::clone(&world);
    let ports = cocoon_node::ports::real::in_folder(engine.clone(), &registry, &network, &records, clock)
        .context("opening the node's records")?;
    let kubeconfig = folder.join("kubeconfig");
    Ok(Opened {
        node_name,
        kubeconfig,
        api,
        kubelet,
        credentials,
        network,
        registry,
        plane,
        engine,
        ports,
        world,
    })
}

/// Starts all parts, says when everything is ready, then waits until one ends.
async fn serve(
    args: &UpArgs,
    opened: Opened,
    daemon: Option<Child>,
    tasks: &Tasks,
    begun: Instant,
) -> anyhow::Result<()> {
    let Opened { node_name, kubeconfig, api, kubelet, credentials, registry, plane, ports, world, .. } =
        opened;
    let (network, token) = (opened.network, tasks.token());
    let keep = async move {
        network::keep(&network, daemon, token).await;
        Ok(())
    };
    tasks.spawn("network", Kind::Vital, keep).await;
    let (folder, token) = (args.data_dir.clone(), tasks.token());
    let spare = async move {
        spare::keep(&folder, token).await;
        Ok(())
    };
    tasks.spawn("spare", Kind::Vital, spare).await;
    let started = world.now();
    credentials.write_kubeconfig(&kubeconfig, api.local_addr()?)?;
    serve_plane(tasks, &plane, api, &credentials).await;
    start_operator(tasks, &plane, &registry, &world).await;
    let client = client(&plane, node_user(&node_name));
    let config = node_config(args, &node_name, &kubelet, &credentials)?;
    let node = Node::new(config, client.clone(), ports, world);
    let (token, kubelet) = (tasks.token(), kubelet.into_std().context("kubelet port")?);
    tasks.spawn("node", Kind::Vital, async move { Ok(node.run(kubelet, token).await?) }).await;

    wait_for_node(&client, &node_name, started, &args.data_dir, tasks).await?;
    say(&format!("export KUBECONFIG={}", kubeconfig.display()));
    say(&format!("ready in {:.2} s", begun.elapsed().as_secs_f64()));
    bail!(tasks.ended().await.unwrap_or_else(|| "a part ended".into()))
}

/// Binds a port of ours. Certificates and kubeconfig name the address, so it must be one.
async fn bind(address: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    if address.ip().is_unspecified() {
        bail!(
            "{flag} {address}: name the address that clients use; {} is none, and in no certificate",
            address.ip()
        );
    }
    TcpListener::bind(address).await.with_context(|| {
        format!("port {address} cannot be had; end what uses it, or choose another with {flag}")
    })
}

fn engine_config(args: &UpArgs, folder: &DataFolder, network: &NetworkConfig) -> EngineConfig {
    EngineConfig {
        root_dir: folder.path().to_owned(),
        run_dir: folder.join("run"),
        log_dir: folder.join("log"),
        boot_bundle: args.boot_bundle.clone(),
        network: Some(network.clone()),
        qemu: found(&args.qemu),
        memory: match args.memory {
            Recipe::Auto => MemoryRecipe::Auto,
            Recipe::FullStream => MemoryRecipe::FullStream,
        },
        boot_timeout: Duration::from_secs(120),
    }
}

async fn open_plane(
    folder: &DataFolder,
    credentials: &Credentials,
    world: &Arc<dyn World>,
) -> anyhow::Result<Plane> {
    let config = PlaneConfig {
        journal: Some(folder.join("plane.db")),
        tokens: Vec::new(),
        kubelet_client: Some(Arc::clone(&credentials.kubelet_client)),
    };
    Ok(Plane::open(config, Arc::clone(world)).await?)
}

async fn serve_plane(tasks: &Tasks, plane: &Plane, listener: TcpListener, credentials: &Credentials) {
    let (server, tls, token) = (plane.clone(), Arc::clone(&credentials.api), tasks.token());
    let serve =
        async move { Ok(server.serve(listener, tls, token).await.context("the Kubernetes API's port")?) };
    tasks.spawn("api", Kind::Vital, serve).await;
    // Before the controllers: they put it into each namespace.
    plane.publish_authority(credentials.authority());
    let (controllers, token) = (plane.clone(), tasks.token());
    let controllers = async move {
        controllers.run_controllers(token).await;
        Ok(())
    };
    tasks.spawn("controllers", Kind::Vital, controllers).await;
}

fn open_registry(folder: &DataFolder) -> anyhow::Result<OciLayout> {
    let path = registry::folder(std::env::var_os(registry::VARIABLE), folder.path())?;
    folder.expect_registry(&path)?;
    let layout =
        OciLayout::open(&path).with_context(|| format!("opening the registry folder {}", path.display()))?;
    folder.remember_registry(&path)?;
    Ok(layout)
}

/// Rules over all pods, and the registry folder's housekeeping.
async fn start_operator(tasks: &Tasks, plane: &Plane, registry: &Arc<OciLayout>, world: &Arc<dyn World>) {
    let operator = User { name: "system:cocoon-operator".into(), groups: vec!["system:masters".into()] };
    let (client, world, token) = (client(plane, operator), Arc::clone(world), tasks.token());
    let tags: Arc<dyn Registry> = registry.clone();
    let rule = async move {
        cocoon_operator::hibernate_tags::run(client, tags, world, token).await;
        Ok(())
    };
    tasks.spawn("hibernate-tags", Kind::Vital, rule).await;
    let (layout, token) = (Arc::clone(registry), tasks.token());
    tasks.spawn("registry-collector", Kind::Vital, collect_blobs(layout, token)).await;
}

/// Removes blobs that no tag needs, at the start and again and again; younger ones may belong to a push.
async fn collect_blobs(layout: Arc<OciLayout>, ended: CancellationToken) -> Result<(), Failure> {
    const EVERY: Duration = Duration::from_secs(600);
    let mut said = String::new();
    loop {
        match layout.collect(GRACE).await {
            Ok(removed) => tracing::debug!(?removed, "registry folder collected"),
            Err(error) => {
                // A damaged manifest stays damaged: the same words once are enough.
                let words = cocoon_kit::failure::chain(&error);
                if words != said {
                    tracing::warn!(
                        error = words,
                        "the registry folder could not be collected; it is tried again"
                    );
                }
                said = words;
            }
        }
        tokio::select! {
            biased;
            () = ended.cancelled() => return Ok(()),
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

fn node_user(node: &str) -> User {
    User { name: format!("system:node:{node}"), groups: vec!["system:nodes".into()] }
}

/// A Kubernetes client whose transport is the plane in this process.
fn client(plane: &Plane, user: User) -> kube::Client {
    let service = plane.service(user);
    let service = tower::ServiceExt::map_request(service, |request: http::Request<kube::client::Body>| {
        request.map(axum::body::Body::new)
    });
    kube::Client::new(service, "default")
}

fn node_config(
    args: &UpArgs,
    name: &str,
    kubelet: &TcpListener,
    credentials: &Credentials,
) -> anyhow::Result<NodeConfig> {
    let address = kubelet.local_addr()?;
    Ok(NodeConfig {
        pool: args.pool.clone(),
        snapshot_class: args.snapshot_class.clone(),
        address: Some(address.ip()),
        kubelet_port: address.port(),
        kubelet_users: vec![KUBELET_CLIENT.to_owned()],
        pause_limit: Duration::from_secs(args.pause_limit),
        kubelet_tls: Some(Arc::clone(&credentials.kubelet)),
        ..NodeConfig::new(name)
    })
}

/// Waits until this start's agent has taken stock and reported: what the journal kept of an earlier
/// start does not count, so the lease must have been renewed since `started`.
async fn wait_for_node(
    client: &kube::Client,
    name: &str,
    started: Timestamp,
    folder: &Path,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    let nodes = kube::Api::<NodeObject>::all(client.clone());
    let leases = kube::Api::<Lease>::namespaced(client.clone(), "kube-node-lease");
    let begun = Instant::now();
    loop {
        let lease = leases.get_opt(name).await?;
        let renewed = lease.and_then(|lease| lease.spec?.renew_time).is_some_and(|time| time.0 >= started);
        if renewed && is_ready(nodes.get_opt(name).await?) {
            return Ok(());
        }
        if tasks.token().is_cancelled() {
            bail!(tasks.ended().await.unwrap_or_else(|| "ended before the node was ready".into()));
        }
        let limit = patience(spare::is_full(folder));
        if begun.elapsed() > limit {
            bail!("node {name} is not ready after {} s; the log says why", limit.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// How long a node may take. One whose report finds no space on the disk will not be ready later.
const fn patience(full: bool) -> Duration {
    Duration::from_secs(if full { 5 } else { 30 })
}

fn is_ready(node: Option<NodeObject>) -> bool {
    let conditions = node.and_then(|node| node.status?.conditions).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The signals that end us, heard from the first moment.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn install() -> anyhow::Result<Self> {
        let hear = |kind| signal(kind).context("listening for signals");
        Ok(Self { terminate: hear(SignalKind::terminate())?, interrupt: hear(SignalKind::interrupt())? })
    }

    async fn received(&mut self) {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The soft limit of descriptors is often 1024, fewer than the connections that the ports' own bounds allow.
fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    if let Err(error) = raised {
        tracing::warn!(%error, ?limit.current, "the limit of open files stays");
    }
}

/// A line on stdout. Nobody reading it, or a full disk behind it, is no reason to end.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// A capture may have outlasted the time that its owner had to end: its guest goes on when it is done.
async fn let_go(engine: &Engine, vm: &str) {
    const LIMIT: Duration = Duration::from_secs(30);
    let why = match tokio::time::timeout(LIMIT, engine.resume(vm)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => cocoon_kit::failure::chain(&error),
        Err(_) => format!("no end within {} s", LIMIT.as_secs()),
    };
    tracing::warn!(vm, why, "the guest may stand paused; `cocoon vm start {vm}` lets it go on");
}

/// VMs go on without us; without VMs the network is taken down.
async fn leave(engine: &Engine, network: &NetworkConfig) -> anyhow::Result<()> {
    let vms = engine.list().await.context("listing VMs at the end")?;
    if vms.is_empty() {
        return network::release(network).await;
    }
    let paused = vms.iter().filter(|vm| vm.state == VmState::Running && vm.paused);
    futures::future::join_all(paused.map(|vm| let_go(engine, &vm.config.name))).await;
    say(&format!(
        "{} VM(s) and the network go on; `cocoon up` with the same --data-dir finds them again",
        vms.len()
    ));
    Ok(())
}
