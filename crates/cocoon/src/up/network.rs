//! The network daemon as a process of its own, which outlives `cocoon up` while guests run.
//!
//! Entry points: [`ensure`] (find it or start it) and [`release`] (end it and take the network down).

use std::{
    net::Ipv4Addr,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail};
use cocoon_kit::files;
use cocoon_net::{bridge, config::NetworkConfig, daemon};
use ipnet::Ipv4Net;
use tokio::time::{Instant, sleep};

/// File that engine, agent and daemon of one host agree by.
pub const NETWORK_FILE: &str = "network.json";

/// The network of a data folder: the first host of `subnet` is the bridge.
pub fn config(bridge: &str, subnet: Ipv4Net, dns: &[Ipv4Addr], state_dir: &Path) -> anyhow::Result<NetworkConfig> {
    let gateway = subnet.hosts().next().with_context(|| format!("--subnet {subnet} has no room for VMs"))?;
    Ok(NetworkConfig {
        bridge: bridge.to_owned(),
        subnet,
        gateway,
        dns: dns.to_vec(),
        lease_time: Duration::from_secs(24 * 3600),
        masquerade: true,
        vm_to_vm: false,
        state_dir: state_dir.to_owned(),
        control_socket: state_dir.join("control.sock"),
    })
}

/// Makes sure that the daemon of this network runs; starts it from our own binary if it does not.
pub async fn ensure(network: &NetworkConfig) -> anyhow::Result<()> {
    let text = serde_json::to_vec_pretty(network).context("network.json")?;
    let file = network.state_dir.join(NETWORK_FILE);
    if daemon::ping(&network.control_socket).await.is_ok() {
        let running = std::fs::read(&file).unwrap_or_default();
        if running != text {
            bail!(
                "the network of {} runs with other settings; end its VMs and start again, or use the settings of {}",
                network.state_dir.display(),
                file.display()
            );
        }
        return Ok(());
    }
    files::replace(&file, &text, 0o600).with_context(|| format!("writing {}", file.display()))?;
    let mut child = spawn(network)?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while daemon::ping(&network.control_socket).await.is_err() {
        if let Some(status) = child.try_wait()? {
            bail!("the network daemon ended ({status}): {}", log_tail(network));
        }
        if Instant::now() > deadline {
            bail!("the network daemon did not answer within 10 s: {}", log_tail(network));
        }
        sleep(Duration::from_millis(5)).await;
    }
    // Reaped by whoever comes after us: it is meant to live on.
    drop(child);
    Ok(())
}

fn spawn(network: &NetworkConfig) -> anyhow::Result<Child> {
    let log = network.state_dir.join("daemon.log");
    let log = std::fs::File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    Command::new("/proc/self/exe")
        .args(["net", "daemon", "--state-dir"])
        .arg(&network.state_dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .context("starting the network daemon")
}

fn log_tail(network: &NetworkConfig) -> String {
    let text = std::fs::read_to_string(network.state_dir.join("daemon.log")).unwrap_or_default();
    text.lines().rev().take(3).collect::<Vec<_>>().join(" / ")
}

/// Ends the daemon, waits for it, takes bridge, rules and sysctls back.
pub async fn release(network: &NetworkConfig) -> anyhow::Result<()> {
    daemon::stop(&network.control_socket).await.context("ending the network daemon")?;
    bridge::teardown(network).await.context("taking the network down")
}
