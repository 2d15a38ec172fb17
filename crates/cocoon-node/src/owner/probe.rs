//! Asking a guest whether it is reachable, in a task of its own that only tells changes.
//!
//! Entry point: [`ProbeTask`]. Fast until the first success, then every 5 s; not ready again only after
//! three failures in a row (`node-agent` §3). The address is looked up again with every sample, so a new
//! lease is seen.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use tokio::{sync::watch, task::JoinHandle, time::Instant};

use crate::{
    owner::{Context, inbox::Inbox},
    planner::observation::{Process, Reach},
    reason::Trouble,
};

const FIRST: Duration = Duration::from_millis(100);
const SLOWEST_BEFORE_READY: Duration = Duration::from_secs(1);
const WHEN_READY: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(3);
const FAILURES: u32 = 3;
/// A guest may take so long to ask for an address before anybody looks whether it can have one, and between two looks.
const LEASE_PATIENCE: Duration = Duration::from_secs(5);

/// What is probed; another target is another task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) process: Process,
    pub(super) macs: Vec<String>,
    /// A fixed address (unmanaged pods); else the lease's.
    pub(super) fixed: Option<Ipv4Addr>,
    pub(super) port: Option<u16>,
}

impl Target {
    /// Whether the guest of another target is found where this one's is.
    pub(super) fn same_address(&self, other: &Self) -> bool {
        self.process.vm_id == other.process.vm_id && self.macs == other.macs && self.fixed == other.fixed
    }
}

/// A running probe; ends when dropped, and what it said with it.
#[derive(Debug)]
pub(super) struct ProbeTask {
    pub(super) target: Target,
    said: watch::Receiver<Option<Reach>>,
    task: JoinHandle<()>,
}

impl Drop for ProbeTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ProbeTask {
    pub(super) fn start(context: &Arc<Context>, inbox: &Arc<Inbox>, target: Target) -> Self {
        let (tell, said) = watch::channel(None);
        let probe = keep_asking(Arc::clone(context), Arc::clone(inbox), target.clone(), tell);
        Self { target, said, task: tokio::spawn(probe) }
    }

    /// What it said last.
    pub(super) fn said(&self) -> Option<Reach> {
        self.said.borrow().clone()
    }
}

/// Thresholds and intervals: pure.
#[derive(Debug, Default)]
struct Gauge {
    ready: bool,
    failures: u32,
    tries: u32,
}

impl Gauge {
    fn sample(&mut self, success: bool) {
        if success {
            (self.ready, self.failures, self.tries) = (true, 0, 0);
            return;
        }
        self.failures = self.failures.saturating_add(1);
        if self.ready && self.failures >= FAILURES {
            (self.ready, self.tries) = (false, 0);
        }
    }

    fn pause(&mut self) -> Duration {
        if self.ready {
            return WHEN_READY;
        }
        let grown = FIRST.mul_f64(1.5_f64.powi(i32::try_from(self.tries.min(20)).unwrap_or(20)));
        self.tries = self.tries.saturating_add(1);
        grown.min(SLOWEST_BEFORE_READY)
    }
}

/// A guest that has no address yet: since when, and whether it can have one.
#[derive(Debug, Default)]
struct Lack {
    since: Option<Instant>,
    asked: Option<Instant>,
    obstacle: Option<Trouble>,
}

impl Lack {
    /// Why it can have none, once it has waited for some time; asked again only after some more.
    async fn obstacle(&mut self, context: &Context) -> Option<Trouble> {
        let now = context.world.instant();
        let long = |from: Instant| now.duration_since(from) >= LEASE_PATIENCE;
        if long(*self.since.get_or_insert(now)) && self.asked.is_none_or(long) {
            self.asked = Some(now);
            self.obstacle = context.ports.leases.obstacle().await;
        }
        self.obstacle.clone()
    }
}

async fn keep_asking(
    context: Arc<Context>,
    inbox: Arc<Inbox>,
    target: Target,
    tell: watch::Sender<Option<Reach>>,
) {
    let (mut gauge, mut lack) = (Gauge::default(), Lack::default());
    loop {
        let (ip, outcome) = sample(&context, &target).await;
        gauge.sample(outcome.is_ok());
        let obstacle = if ip.is_none() && target.fixed.is_none() && !gauge.ready {
            lack.obstacle(&context).await
        } else {
            lack = Lack::default();
            None
        };
        let message = if gauge.ready { String::new() } else { outcome.err().unwrap_or_default() };
        let reach = Reach { of: target.process.clone(), ip, ready: gauge.ready, message, obstacle };
        if tell.send_if_modified(|told| told.replace(reach.clone()) != Some(reach)) {
            inbox.ring();
        }
        tokio::time::sleep(gauge.pause()).await;
    }
}

async fn sample(context: &Context, target: &Target) -> (Option<Ipv4Addr>, Result<(), String>) {
    let ip = match address(context, target).await {
        Ok(ip) => ip,
        Err(why) => return (None, Err(why)),
    };
    let Some(ip) = ip else { return (None, Err("waiting for a DHCP lease".to_owned())) };
    let probe = context.ports.prober.probe(ip, target.port, TIMEOUT);
    let outcome = tokio::time::timeout(TIMEOUT, probe).await;
    (Some(ip), outcome.unwrap_or_else(|_| Err(format!("{ip} did not answer within {} s", TIMEOUT.as_secs()))))
}

async fn address(context: &Context, target: &Target) -> Result<Option<Ipv4Addr>, String> {
    if let Some(ip) = target.fixed {
        // Its pod is told why by the owner, which looks again when this is news.
        let own = context.ports.prober.is_own(ip);
        return if own { Err(format!("{ip} is an address of this node itself")) } else { Ok(Some(ip)) };
    }
    for mac in &target.macs {
        let found = context.ports.leases.lookup(mac).await.map_err(|error| error.trouble().message)?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_success_makes_it_ready_and_only_three_failures_in_a_row_undo_that() {
        let mut gauge = Gauge::default();
        let mut seen = Vec::new();
        for success in [false, true, false, false, true, false, false, false, true] {
            gauge.sample(success);
            seen.push(gauge.ready);
        }
        assert_eq!(seen, [false, true, true, true, true, true, true, false, true]);
    }

    #[test]
    fn the_pause_grows_to_a_second_before_ready_and_is_five_seconds_after() {
        let mut gauge = Gauge::default();
        let pauses: Vec<_> = (0..10).map(|_| gauge.pause()).collect();
        assert_eq!(pauses[0], FIRST);
        assert_eq!(pauses[9], SLOWEST_BEFORE_READY);
        gauge.sample(true);
        assert_eq!(gauge.pause(), WHEN_READY);
    }
}
