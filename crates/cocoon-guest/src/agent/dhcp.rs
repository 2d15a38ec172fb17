//! Leases: one busybox `udhcpc` per NIC, started when the link is up, restarted for ever.
//!
//! Entry point: [`start`]. A clone changes its MAC while its link is down: [`Leases::stop`] ends the client
//! and takes the addresses away, [`Leases::resume`] lets a fresh one ask as soon as the link comes up.

use std::{
    collections::BTreeMap,
    path::Path,
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    process::{Child, Command},
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::sleep,
};

use super::{HOME, cmdline, network, network::Changes, reap::Claim, say};
use crate::sys;

/// Pause before a client that ended is started again.
const AGAIN: Duration = Duration::from_secs(1);
/// Places where an image that runs its own network management keeps it.
const OWN_MANAGEMENT: [&str; 4] = [
    "/etc/systemd/network",
    "/run/systemd/network",
    "/etc/netplan",
    "/etc/NetworkManager/system-connections",
];

enum Order {
    Stop(oneshot::Sender<()>),
    Resume,
}

/// The clients by interface.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leases(Arc<Mutex<BTreeMap<String, mpsc::Sender<Order>>>>);

impl Leases {
    fn clients(&self) -> MutexGuard<'_, BTreeMap<String, mpsc::Sender<Order>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self, interface: &str) -> Option<mpsc::Sender<Order>> {
        self.clients().get(interface).cloned()
    }

    /// Ends the client of `interface`, if there is one, and waits until it is gone.
    pub(crate) async fn stop(&self, interface: &str) {
        let Some(client) = self.client(interface) else { return };
        let (done, gone) = oneshot::channel();
        if client.send(Order::Stop(done)).await.is_ok() {
            drop(gone.await);
        }
    }

    /// Lets a fresh client start.
    pub(crate) async fn resume(&self, interface: &str) {
        if let Some(client) = self.client(interface) {
            drop(client.send(Order::Resume).await);
        }
    }
}

/// Starts a client for every NIC, now and later, unless the image manages its network itself.
pub(crate) fn start(tasks: &mut JoinSet<()>) -> Leases {
    let leases = Leases::default();
    if std::process::id() == 1 || !managed_by_image() {
        tasks.spawn(watch(leases.clone()));
    }
    leases
}

fn managed_by_image() -> bool {
    OWN_MANAGEMENT.iter().any(|dir| std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()))
}

async fn watch(leases: Leases) {
    let fixed = cmdline::parse(&std::fs::read_to_string("/proc/cmdline").unwrap_or_default()).fixed;
    let mut clients = JoinSet::new();
    let mut changes = match Changes::listen() {
        Ok(changes) => changes,
        Err(error) => return say(&format!("no news of network interfaces: {error}")),
    };
    loop {
        for interface in network::interfaces() {
            let known = leases.clients().contains_key(&interface);
            if known || fixed.iter().any(|nic| nic.interface == interface) {
                continue;
            }
            let (orders, inbox) = mpsc::channel(4);
            leases.clients().insert(interface.clone(), orders);
            clients.spawn(client(interface, inbox));
        }
        // New NICs are rare; this wait may be long.
        changes.next().await;
    }
}

async fn client(interface: String, mut orders: mpsc::Receiver<Order>) {
    if let Err(error) = sys::set_up(&interface, true) {
        say(&format!("{interface} stays down: {error}"));
    }
    let mut changes = match Changes::listen() {
        Ok(changes) => changes,
        Err(error) => return say(&format!("no DHCP on {interface}: {error}")),
    };
    loop {
        tokio::select! {
            biased;
            order = orders.recv() => if !obey(order, &mut orders).await { return } else { continue },
            () = changes.carrier(&interface) => {}
        }
        let pause = match spawn(&interface) {
            Ok(mut child) => {
                let _claim = child.id().and_then(Claim::new);
                tokio::select! {
                    order = orders.recv() => {
                        drop(child.kill().await);
                        if !obey(order, &mut orders).await { return } else { continue }
                    }
                    _ = child.wait() => AGAIN,
                }
            }
            Err(error) => {
                say(&format!("DHCP client of {interface}: {error}"));
                AGAIN * 10
            }
        };
        if !rest(pause, &mut orders).await {
            return;
        }
    }
}

/// Waits for `pause` or until an order was obeyed: who stops a client waits for its answer, and an interface
/// that came up again is not to wait. False when nobody gives orders any more.
async fn rest(pause: Duration, orders: &mut mpsc::Receiver<Order>) -> bool {
    tokio::select! {
        biased;
        order = orders.recv() => obey(order, orders).await,
        () = sleep(pause) => true,
    }
}

/// Stands still from a stop to the next resume. False when nobody gives orders any more.
async fn obey(order: Option<Order>, orders: &mut mpsc::Receiver<Order>) -> bool {
    let mut next = order;
    loop {
        match next {
            Some(Order::Stop(done)) => drop(done.send(())),
            Some(Order::Resume) => return true,
            None => return false,
        }
        next = orders.recv().await;
    }
}

fn spawn(interface: &str) -> std::io::Result<Child> {
    let home = Path::new(HOME);
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Command::new(home.join("busybox"))
        .args(["udhcpc", "-f", "-i", interface, "-t", "4", "-T", "1", "-A", "1"])
        .arg("-s")
        .arg(home.join("udhcpc.sh"))
        .args(["-x", &format!("hostname:{name}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn orders_are_obeyed_while_a_client_rests() {
        let (orders, mut inbox) = mpsc::channel(4);
        let leases = Leases::default();
        leases.clients().insert("eth0".into(), orders);
        let began = Instant::now();
        let resting = tokio::spawn(async move {
            let goes_on = rest(Duration::from_secs(10), &mut inbox).await;
            (goes_on, inbox)
        });
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, leases.stop("eth0")).await.unwrap();
        leases.resume("eth0").await;
        let (goes_on, mut inbox) = resting.await.unwrap();
        assert!(goes_on && began.elapsed().is_zero(), "neither waited for the pause");
        assert!(rest(Duration::from_secs(10), &mut inbox).await);
        assert_eq!(began.elapsed(), Duration::from_secs(10), "without orders the pause is kept");
        drop(leases);
        assert!(!rest(Duration::from_secs(10), &mut inbox).await);
    }
}
