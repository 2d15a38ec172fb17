//! An engine with a network, in folders that go when it is dropped.
//!
//! Entry point: [`Lab::start`]. The network is the real one: the daemon of the release binary, a
//! bridge, a tap and filters for each VM. VMs that are left are removed by [`Lab::end`].

use std::{
    net::Ipv4Addr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use cocoon_engine::{
    embed,
    engine::{Engine, EngineConfig, MemoryRecipe},
    model::{CloneIdentity, CloneSpec, RunSpec, Snapshot, Vm},
};
use cocoon_guest::host::Exec;
use cocoon_kit::world::RealWorld;
use cocoon_net::{
    config::NetworkConfig,
    control::{self, Request},
};
use rustix::process::{Pid, Signal, kill_process};

use super::Parts;

const IMAGE: &str = "cocoon-demo:1";
const QEMU: &str = "/usr/bin/qemu-system-x86_64";
const ANSWER: Duration = Duration::from_secs(60);

/// What the parts with guests need.
#[derive(Debug)]
pub(super) struct Lab {
    pub(super) engine: Engine,
    pub(super) network: NetworkConfig,
    pub(super) folder: tempfile::TempDir,
    daemon: Child,
}

impl Lab {
    /// Network daemon, engine, image.
    pub(super) async fn start(parts: &Parts) -> anyhow::Result<Self> {
        ensure!(
            embed::shim().is_some() && embed::guest_agent().is_some(),
            "parts are missing; {}",
            embed::REMEDY
        );
        let folder = scratch()?;
        let network = network(folder.path().join("net"))?;
        let daemon = daemon(parts, &network).await?;
        let at = |part: &str| folder.path().join(part);
        let config = EngineConfig {
            root_dir: at("engine"),
            run_dir: at("run"),
            log_dir: at("log"),
            boot_bundle: parts.bundle.clone(),
            network: Some(network.clone()),
            qemu: QEMU.into(),
            memory: MemoryRecipe::Auto,
            boot_timeout: Duration::from_secs(180),
        };
        let engine = Engine::open(config, Arc::new(RealWorld)).await?;
        let lab = Self { engine, network, folder, daemon };
        lab.engine.image_import(IMAGE, std::slice::from_ref(&parts.image)).await?;
        Ok(lab)
    }

    /// A snapshot of a guest with `mib` MiB of memory, a quarter of them in use.
    pub(super) async fn snapshot(&self, mib: u64) -> anyhow::Result<Snapshot> {
        let name = format!("source-{mib}");
        eprintln!("booting {name}");
        let (memory, storage) = (mib << 20, 1 << 30);
        let spec = RunSpec { name: name.clone(), image: IMAGE.into(), cpu: 1, memory, storage, nics: 1 };
        self.engine.run(spec).await?;
        let fill = format!(
            "mkdir -p /run/fill && mount -t tmpfs -o size={0}m fill /run/fill && yes cocoon | head -c {0}m > /run/fill/data",
            mib / 4
        );
        self.shell(&name, &fill).await.context("filling the guest's memory")?;
        let snapshot = self.engine.save(&name, &format!("snapshot-{mib}"), "bench").await?;
        self.engine.remove(&name, true).await?;
        Ok(snapshot)
    }

    /// A clone, by the call that is measured.
    pub(super) async fn clone_of(&self, snapshot: &Snapshot, name: &str) -> anyhow::Result<Vm> {
        let spec = CloneSpec {
            name: name.to_owned(),
            snapshot: snapshot.envelope.id.clone(),
            identity: CloneIdentity::New,
        };
        Ok(self.engine.clone_vm(spec).await?)
    }

    /// Runs a shell line in a guest.
    pub(super) async fn shell(&self, vm: &str, line: &str) -> anyhow::Result<String> {
        let guest = self.engine.guest(vm, false, ANSWER).await?;
        let argv = ["/bin/sh", "-c", line].map(str::to_owned).to_vec();
        let output = guest.output(Exec { argv, ..Exec::default() }, ANSWER * 3).await?;
        ensure!(
            output.code == 0,
            "{line}: exit code {}: {}",
            output.code,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Removes all VMs and ends the network.
    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        for vm in self.engine.list().await? {
            self.engine.remove(&vm.config.name, true).await?;
        }
        end(&mut self.daemon)?;
        Ok(cocoon_net::daemon::teardown(&self.network, false).await?)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// A folder on the disk that the program is on: run folders must not be in a tmpfs.
pub(super) fn scratch() -> anyhow::Result<tempfile::TempDir> {
    let near = std::env::current_exe()?;
    let near = near.parent().context("this program is nowhere")?;
    tempfile::Builder::new().prefix("bench-").tempdir_in(near).context("a scratch folder")
}

fn network(state_dir: PathBuf) -> anyhow::Result<NetworkConfig> {
    cocoon_kit::files::private_folder(&state_dir)?;
    let network = NetworkConfig {
        bridge: "cocoon0".into(),
        subnet: "172.31.240.0/24".parse().context("subnet")?,
        gateway: Ipv4Addr::new(172, 31, 240, 1),
        dns: vec![Ipv4Addr::new(8, 8, 8, 8)],
        lease_time: Duration::from_secs(24 * 3600),
        masquerade: true,
        vm_to_vm: false,
        control_socket: state_dir.join("control.sock"),
        state_dir,
    };
    std::fs::write(network.network_file(), serde_json::to_vec_pretty(&network)?)?;
    Ok(network)
}

async fn daemon(parts: &Parts, network: &NetworkConfig) -> anyhow::Result<Child> {
    let mut command = Command::new(&parts.cocoon);
    command.args(["net", "daemon", "--state-dir"]).arg(&network.state_dir).stdin(Stdio::null());
    let mut daemon = command.stdout(Stdio::null()).spawn().context("starting the network daemon")?;
    let begun = std::time::Instant::now();
    while control::ask(&network.control_socket, &Request::Ping { ping: true }).await.is_err() {
        if let Some(status) = daemon.try_wait()? {
            bail!("the network daemon ended: {status}");
        }
        ensure!(begun.elapsed() < Duration::from_secs(20), "the network daemon does not answer");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(daemon)
}

/// Asks a process to end, and waits for it.
pub(super) fn end(child: &mut Child) -> anyhow::Result<()> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process without an id")?;
    kill_process(pid, Signal::TERM).context("ending a process")?;
    let begun = std::time::Instant::now();
    while child.try_wait()?.is_none() {
        ensure!(begun.elapsed() < Duration::from_secs(30), "process {} does not end", child.id());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
