//! The network daemon as a process of its own, which outlives `cocoon up` while guests run.
//!
//! Entry points: [`ensure`] (find it or start it), [`keep`] (start it again) and [`release`] (end it and
//! take the network down).

use std::{
    io::{self, ErrorKind},
    net::Ipv4Addr,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail};
use cocoon_kit::files;
use cocoon_net::{
    bridge::BridgeError,
    config::NetworkConfig,
    control::{self, Answer, Request},
    daemon::{self, DaemonError},
};
use ipnet::Ipv4Net;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

/// Its first answer comes after bridge and filter are made, by several calls of `nft`, each of which a busy host may
/// hold up.
const FIRST_ANSWER: Duration = Duration::from_secs(60);
/// What it is at when it is told to end may be such a call.
const ENDS: Duration = Duration::from_secs(30);

/// The network of a data folder: the first host of `subnet` is the bridge.
pub(super) fn config(
    bridge: &str,
    subnet: Ipv4Net,
    dns: &[Ipv4Addr],
    state_dir: &Path,
) -> anyhow::Result<NetworkConfig> {
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

/// Makes sure that the daemon of this network runs; starts it from our own binary if it does not, and then
/// gives its process.
pub(super) async fn ensure(network: &NetworkConfig) -> anyhow::Result<Option<Child>> {
    network.check()?;
    match ping(network).await {
        Ok(daemon) => return agree(network, daemon.network).map(|()| None),
        Err(error) if nobody_listens(&error) => {}
        // Its settings are not to be replaced under it.
        Err(error) => {
            return Err(error).with_context(|| {
                format!(
                    "the network daemon of {} does not answer; let it go on if it was stopped, or end it (its process id is in {})",
                    network.state_dir.display(),
                    network.state_dir.join("daemon.lock").display()
                )
            });
        }
    }
    let file = network.network_file();
    let text = serde_json::to_vec_pretty(network).context("network.json")?;
    files::replace(&file, &text, 0o600).with_context(|| format!("writing {}", file.display()))?;
    let log = network.state_dir.join("daemon.log");
    let (mut child, said_before) = spawn(network, &log)?;
    let deadline = Instant::now() + FIRST_ANSWER;
    while ping(network).await.is_err() {
        if let Some(status) = child.try_wait()? {
            bail!("the network daemon ended ({status}): {}", last_words(&log, said_before));
        }
        if Instant::now() > deadline {
            // Nobody could find it again.
            child.kill().and_then(|()| child.wait()).context("ending the network daemon")?;
            bail!(
                "the network daemon did not answer within {} s: {}",
                FIRST_ANSWER.as_secs(),
                last_words(&log, said_before)
            );
        }
        sleep(Duration::from_millis(5)).await;
    }
    Ok(Some(child))
}

/// A network that runs goes by the settings that its daemon has, not by those of a file.
fn agree(network: &NetworkConfig, running: Option<NetworkConfig>) -> anyhow::Result<()> {
    if running.as_ref() == Some(network) {
        return Ok(());
    }
    let running = running.map(|running| format!(" ({} on {})", running.subnet, running.bridge));
    bail!(
        "the network of {} runs with other settings{}; end its VMs and start again, or use those settings",
        network.state_dir.display(),
        running.unwrap_or_default()
    )
}

/// Starts the daemon again whenever it is gone: without it no new guest has an address, and a filter
/// that somebody took away stays away.
///
/// `daemon` is its process if we started it. One that is only busy is not gone.
pub(super) async fn keep(network: &NetworkConfig, mut daemon: Option<Child>, ended: CancellationToken) {
    const LOOK: Duration = Duration::from_secs(2);
    loop {
        tokio::select! {
            biased;
            () = ended.cancelled() => return,
            () = sleep(LOOK) => {}
        }
        // Reaped here; it is meant to outlive us, and then somebody else does that.
        if daemon.as_mut().is_some_and(|child| child.try_wait().is_ok_and(|ended| ended.is_some())) {
            daemon = None;
        }
        if !ping(network).await.is_err_and(|error| nobody_listens(&error)) {
            continue;
        }
        match ensure(network).await {
            Ok(started) => {
                tracing::warn!("the network daemon was gone; it runs again");
                daemon = started;
            }
            Err(error) => tracing::error!(error = format!("{error:#}"), "the network daemon does not run"),
        }
    }
}

fn nobody_listens(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
}

/// The new process, and how long the log was before it.
fn spawn(network: &NetworkConfig, log: &Path) -> anyhow::Result<(Child, u64)> {
    // Appended to: an earlier daemon may still be writing. It says little; what is long is cut.
    let opened = || {
        let file = std::fs::File::options().create(true).append(true).open(log)?;
        if file.metadata()?.len() > 1 << 20 {
            file.set_len(0)?;
        }
        let length = file.metadata()?.len();
        io::Result::Ok((file, length))
    };
    let (file, length) = opened().with_context(|| format!("opening {}", log.display()))?;
    let child = Command::new("/proc/self/exe")
        .args(["net", "daemon", "--state-dir"])
        .arg(&network.state_dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(file)
        .spawn()
        .context("starting the network daemon")?;
    Ok((child, length))
}

/// The last lines of the log, the newest first, of those behind its first `before` bytes.
fn last_words(log: &Path, before: u64) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = text.get(usize::try_from(before).unwrap_or(usize::MAX)..).unwrap_or_default();
    let lines: Vec<_> = String::from_utf8_lossy(text).lines().rev().take(3).map(str::to_owned).collect();
    if lines.is_empty() { format!("it wrote nothing to {}", log.display()) } else { lines.join(" / ") }
}

/// What the daemon says of itself, if one answers.
async fn ping(network: &NetworkConfig) -> io::Result<Answer> {
    control::ask(&network.control_socket, &Request::Ping { ping: true }).await
}

/// Ends the daemon, waits for it, takes bridge, rules and sysctls back.
pub(super) async fn release(network: &NetworkConfig) -> anyhow::Result<()> {
    let deadline = Instant::now() + ENDS;
    if let Ok(daemon) = ping(network).await {
        let pid = daemon
            .pid
            .map(i32::try_from)
            .transpose()?
            .context("the network daemon does not say who it is")?;
        let process = Pid::from_raw(pid).context("the network daemon has no process id")?;
        kill_process(process, Signal::TERM).context("ending the network daemon")?;
        while ping(network).await.is_ok() {
            if Instant::now() > deadline {
                bail!(
                    "the network daemon (pid {pid}) does not end; end it by hand and run `cocoon net teardown --state-dir {}`",
                    network.state_dir.display()
                );
            }
            sleep(Duration::from_millis(5)).await;
        }
    }
    loop {
        match daemon::teardown(network, false).await {
            // It answers no more, and ends when it is done with what it is at.
            Err(DaemonError::Bridge(BridgeError::DaemonRuns(..))) if Instant::now() < deadline => {}
            done => return done.context("taking the network down"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
        net::UnixListener,
    };

    use super::*;

    fn network(folder: &Path, subnet: &str) -> NetworkConfig {
        config("cocoon0", subnet.parse().unwrap(), &[], folder).unwrap()
    }

    /// What `ensure` says of a daemon that answers a ping with `answer`, or never.
    async fn meets(network: &NetworkConfig, answer: Option<Answer>) -> Result<bool, String> {
        let _ = std::fs::remove_file(&network.control_socket);
        let listener = UnixListener::bind(&network.control_socket).unwrap();
        let daemon = tokio::spawn(async move {
            let mut stream = BufReader::new(listener.accept().await.unwrap().0);
            stream.read_line(&mut String::new()).await.unwrap();
            let Some(answer) = answer else { std::future::pending().await };
            let text = serde_json::to_string(&answer).unwrap() + "\n";
            stream.write_all(text.as_bytes()).await.unwrap();
        });
        let met = ensure(network).await;
        daemon.abort();
        met.map(|started| started.is_some()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn only_what_the_present_daemon_wrote_is_its_last_words() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("daemon.log");
        assert!(last_words(&log, 0).contains("wrote nothing to"));
        std::fs::write(&log, "old\none\ntwo\nthree\nfour\n").unwrap();
        assert_eq!(last_words(&log, 0), "four / three / two");
        assert_eq!(last_words(&log, 18), "four");
        // Cut by somebody meanwhile.
        for before in [23, 99] {
            assert!(last_words(&log, before).contains("wrote nothing to"), "{before}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_runs_is_used_with_its_own_settings_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = (network(folder.path(), "10.77.0.0/24"), network(folder.path(), "10.78.0.0/24"));
        let says = |network| Some(Answer { network, ..Answer::done() });
        // The file is what an attempt with other settings left.
        std::fs::write(ours.network_file(), serde_json::to_vec_pretty(&ours).unwrap()).unwrap();
        assert_eq!(meets(&ours, says(Some(ours.clone()))).await, Ok(false));
        for answer in [says(Some(theirs.clone())), says(None)] {
            let error = meets(&ours, answer).await.unwrap_err();
            assert!(error.contains("other settings"), "{error}");
        }
        std::fs::write(ours.network_file(), "as it was").unwrap();
        let error = meets(&ours, None).await.unwrap_err();
        assert!(error.contains("does not answer") && error.contains("daemon.lock"), "{error}");
        assert_eq!(std::fs::read_to_string(ours.network_file()).unwrap(), "as it was");
    }
}
