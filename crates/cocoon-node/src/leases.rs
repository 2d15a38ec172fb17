//! Leases that nobody owns any more are given back.
//!
//! Entry point: [`sweep`]. It needs no memory of who had which lease, so whatever an owner forgot, failed to
//! release or was killed over is made up for. Invariants: only a complete, successful list of VMs counts (I5);
//! a lease goes only when it was without a VM in two sweeps in a row. A VM's addresses are in the engine's
//! records before it has a link, and leases are read before VMs, so a VM in the making is never taken for gone.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    owner::Context,
    ports::{PortError, PortResult, VmView},
    reason::Reason,
    rounds::next_round,
};

/// Between two sweeps.
const EVERY: Duration = Duration::from_secs(60);

/// Leases that one sweep gives back at most; the next goes on.
const MOST: usize = 64;

/// How long one answer may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Sweeps until `shutdown`. `before` lives only here: an agent that starts again watches for a while first.
pub(crate) async fn sweep(context: &Arc<Context>, shutdown: CancellationToken) {
    let mut before = BTreeSet::new();
    while next_round(EVERY, &shutdown).await {
        before = match once(context, &before).await {
            Ok(remember) => remember,
            Err(error) => {
                tracing::debug!(error = %error.trouble(), "no leases are swept this time");
                BTreeSet::new()
            }
        };
    }
}

async fn once(context: &Context, before: &BTreeSet<String>) -> PortResult<BTreeSet<String>> {
    let ports = &context.ports;
    let leases = in_time("listing the leases", ports.leases.held()).await?;
    let vms = in_time("listing the VMs", ports.vms.list()).await?;
    let (release, remember) = unowned(&leases, &vms, before);
    for mac in &release {
        if let Err(error) = in_time("releasing a lease", ports.leases.release(mac)).await {
            // The others would fare alike; this one is still known.
            tracing::warn!(mac, error = %error.trouble(), "a lease without a VM stays until the next sweep");
            break;
        }
        tracing::info!(mac, "a lease without a VM was given back");
    }
    Ok(remember)
}

/// Which leases go now, and which are remembered because they belong to no VM of this complete list.
#[must_use]
pub(crate) fn unowned(
    leases: &[String],
    vms: &[VmView],
    before: &BTreeSet<String>,
) -> (Vec<String>, BTreeSet<String>) {
    let owned: BTreeSet<String> =
        vms.iter().flat_map(|vm| &vm.macs).map(|mac| mac.to_ascii_lowercase()).collect();
    let remember: BTreeSet<String> =
        leases.iter().map(|mac| mac.to_ascii_lowercase()).filter(|mac| !owned.contains(mac)).collect();
    (remember.intersection(before).take(MOST).cloned().collect(), remember)
}

async fn in_time<T>(what: &str, answer: impl Future<Output = PortResult<T>>) -> PortResult<T> {
    tokio::time::timeout(LIMIT, answer).await.unwrap_or_else(|_| {
        let message = format!("{what}: no answer within {} s", LIMIT.as_secs());
        Err(PortError::new(Reason::CleanupFailed, message))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::stage::{Stage, pod};

    const LOST: &str = "02:aa:00:00:00:01";

    fn vm(mac: &str) -> VmView {
        let macs = vec![mac.to_owned()];
        VmView {
            id: String::new(),
            name: String::new(),
            phase: crate::ports::VmPhase::Creating,
            pid: 0,
            macs,
            hypervisor: String::new(),
            came_up: false,
            links_down: false,
            stopped_in_order: false,
            started_at: None,
            starved: None,
            lost_tap: None,
        }
    }

    #[test]
    fn a_lease_goes_when_no_vm_had_it_twice_in_a_row() {
        for (sentence, leases, vms, before, release, remember) in [
            ("nothing", &[][..], &[][..], &[][..], &[][..], &[][..]),
            ("of a VM", &["a"], &["a"], &[], &[], &[]),
            ("of a VM, in other letters", &["A"], &["a"], &["a"], &[], &[]),
            ("for the first time", &["a"], &[], &[], &[], &["a"]),
            ("again", &["a"], &[], &["a"], &["a"], &["a"]),
            ("a VM has it now", &["a"], &["a"], &["a"], &[], &[]),
            ("gone by itself", &[], &[], &["a"], &[], &[]),
            ("one of each", &["a", "b", "c"], &["a"], &["b"], &["b"], &["b", "c"]),
        ] {
            let own = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
            let vms: Vec<VmView> = vms.iter().map(|mac| vm(mac)).collect();
            let found = unowned(&own(leases), &vms, &own(before).into_iter().collect());
            assert_eq!(found.0, own(release), "{sentence}");
            assert_eq!(found.1, own(remember).into_iter().collect(), "{sentence}");
        }
    }

    #[test]
    fn one_sweep_is_bounded_and_the_rest_is_remembered() {
        let leases: Vec<String> = (0..MOST + 5).map(|index| format!("{index:04}")).collect();
        let (release, remember) = unowned(&leases, &[], &leases.iter().cloned().collect());
        assert_eq!((release.len(), remember.len()), (MOST, MOST + 5));
    }

    async fn swept(stage: &Stage, sweeps: u32) {
        let ended = CancellationToken::new();
        let (context, token) = (Arc::clone(&stage.context), ended.clone());
        let sweeper = tokio::spawn(async move { sweep(&context, token).await });
        tokio::time::sleep(EVERY * sweeps + Duration::from_secs(30)).await;
        ended.cancel();
        sweeper.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_vm_that_is_gone_left_is_given_back_and_what_a_vm_has_stays() {
        let stage = Stage::new(true).await;
        stage.apply(pod("demo-0", "u1", &[]));
        stage.until_lifecycle("u1", "ready").await;
        let mac = stage.fake.world().vms.values().next().unwrap().view.macs[0].clone();
        stage.fake.world().leases.extend([mac.clone(), LOST.to_owned()]);
        swept(&stage, 1).await;
        assert_eq!(stage.fake.calls("release"), 0, "once is not enough");
        stage.fake.fail("release", 1, Reason::CleanupFailed);
        swept(&stage, 3).await;
        assert_eq!(stage.fake.world().leases, BTreeSet::from([mac]), "a release that failed is repeated");
        assert_eq!(stage.fake.calls("release"), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_given_back_on_a_list_that_failed_and_then_it_takes_two_more() {
        for call in ["list", "held"] {
            let stage = Stage::new(true).await;
            stage.fake.world().leases.insert(LOST.to_owned());
            stage.fake.fail(call, 10_000, Reason::EngineUnavailable);
            swept(&stage, 5).await;
            assert_eq!(stage.fake.calls("release"), 0, "{call}");
        }
    }
}
