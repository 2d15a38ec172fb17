//! Pods that wait for an image, a snapshot or a VM that was missing go on when it comes, not when their back-off
//! says so.
//!
//! Entry point: [`watch`]. One look for all pods together: at most every [`EVERY`], and none while nobody waits,
//! so a waiting pod costs no engine call of its own. Invariants: only what was missing and is there now wakes
//! anybody, and only once; a look that failed wakes nobody (I5).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{
    owner::{Context, inbox::Inbox},
    ports::{Awaited, PortError, PortResult},
    reason::Reason,
    rounds::next_round,
};

/// Between two looks.
const EVERY: Duration = Duration::from_secs(2);

/// How long one look may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Who waits for what.
type Waiter = (String, Awaited);

/// Looks until `shutdown`.
pub(crate) async fn watch(context: &Arc<Context>, shutdown: CancellationToken) {
    let (mut told, mut said) = (BTreeSet::new(), None);
    while next_round(EVERY, &shutdown).await {
        let trouble = look(context, &mut told).await.err().map(|error| error.trouble());
        if trouble != said {
            trouble.iter().for_each(|trouble| tracing::warn!(%trouble, "pods wait longer than they must"));
            said = trouble;
        }
    }
}

/// `told` has those who were told already, until what they waited for is missing again.
async fn look(context: &Context, told: &mut BTreeSet<Waiter>) -> PortResult<()> {
    let owners = context.directory.owners();
    let waiting: Vec<(&String, &Arc<Inbox>, Awaited)> =
        owners.iter().filter_map(|(name, inbox)| Some((name, inbox, inbox.awaits()?))).collect();
    told.retain(|(name, _)| owners.iter().any(|(owner, _)| owner == name));
    let wanted: BTreeSet<Awaited> = waiting.iter().map(|(_, _, what)| what.clone()).collect();
    let here = here(context, &wanted).await?;
    told.retain(|(_, what)| here.contains(what) || !wanted.contains(what));
    for (name, inbox, what) in waiting {
        if here.contains(&what) && told.insert((name.clone(), what.clone())) {
            tracing::info!(vm = name, %what, "what the pod waited for is here");
            inbox.arrived();
        }
    }
    Ok(())
}

/// What of it is here now: VMs as their owners know, the rest by one question to the store.
async fn here(context: &Context, wanted: &BTreeSet<Awaited>) -> PortResult<BTreeSet<Awaited>> {
    let (vms, stored): (BTreeSet<Awaited>, BTreeSet<Awaited>) =
        wanted.iter().cloned().partition(|what| matches!(what, Awaited::Vm(_)));
    let runs = |what: &Awaited| matches!(what, Awaited::Vm(name) if context.directory.runs(name));
    let mut here: BTreeSet<Awaited> = vms.into_iter().filter(runs).collect();
    if !stored.is_empty() {
        let answer = tokio::time::timeout(LIMIT, context.ports.images.here(&stored)).await;
        here.extend(answer.unwrap_or_else(|_| {
            let message = format!("the images and tags were not listed within {} s", LIMIT.as_secs());
            Err(PortError::new(Reason::EngineUnavailable, message))
        })?);
    }
    Ok(here)
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::{
        owner::stage::{Stage, pod},
        ports::fake::{Fake, Held},
    };

    const IMAGE: &str = "cocoonset.cocoonstack.io/image";
    const MODE: &str = "cocoonset.cocoonstack.io/mode";
    const MINUTE: Duration = Duration::from_secs(60);

    /// A stage with a pod that failed for so long that its next try is minutes away.
    async fn long_failed(reason: Reason, extra: &[(&str, &str)]) -> Stage {
        let stage = Stage::new(true).await;
        stage.apply(pod("late-0", "u2", extra));
        stage.until("it fails", |stage| stage.told(reason)).await;
        tokio::time::sleep(15 * MINUTE).await;
        let before = stage.api.said.lock().unwrap().len();
        stage.until("it was just tried again", |stage| stage.api.said.lock().unwrap().len() > before).await;
        stage
    }

    fn import(fake: &Fake) {
        fake.world().images.push("late:1".into());
    }

    fn push(fake: &Fake) {
        fake.world().tags.insert("late:1".into(), Held { id: "L".into(), state: 0, ..Default::default() });
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_starts_within_seconds_of_the_arrival_of_what_it_was_made_of() {
        let clone = [(IMAGE, "late:1"), (MODE, "clone")];
        for (what, reason, extra, comes) in [
            ("an import", Reason::ImageNotFound, &clone[..1], import as fn(&Fake)),
            ("a push", Reason::SnapshotNotFound, &clone[..], push),
        ] {
            let stage = long_failed(reason, extra).await;
            comes(&stage.fake);
            let come = Instant::now();
            stage.until_lifecycle("u2", "ready").await;
            assert!(come.elapsed() < Duration::from_secs(5), "{what}: {:?}", come.elapsed());
            stage.assert_sound();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_fork_starts_within_seconds_of_its_source() {
        let source = cocoon_meta::vm_name_for_pod("default", "late-1");
        let fork = ("vm.cocoonstack.io/fork-from", source.as_str());
        let stage = long_failed(Reason::ForkSourceUnavailable, &[fork, (MODE, "clone")]).await;
        stage.apply(pod("late-1", "u3", &[]));
        let come = Instant::now();
        stage.until_lifecycle("u2", "ready").await;
        assert!(come.elapsed() < Duration::from_secs(8), "{:?}", come.elapsed());
        stage.assert_sound();
    }

    #[tokio::test(start_paused = true)]
    async fn something_else_that_comes_wakes_nobody_and_nobody_waits_without_a_missing_thing() {
        let stage = long_failed(Reason::ImageNotFound, &[(IMAGE, "late:1")]).await;
        let tries = stage.fake.calls("image");
        stage.fake.world().images.push("other:1".into());
        push(&stage.fake);
        stage.fake.world().tags.remove("late:1");
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(stage.fake.calls("image"), tries);
        import(&stage.fake);
        stage.until_lifecycle("u2", "ready").await;
        let looks = stage.fake.calls("here");
        tokio::time::sleep(MINUTE).await;
        assert_eq!(stage.fake.calls("here"), looks, "nobody waits, nobody looks");
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_fails_wakes_nobody_and_the_next_one_does() {
        let stage = long_failed(Reason::ImageNotFound, &[(IMAGE, "late:1")]).await;
        let tries = stage.fake.calls("image");
        stage.fake.fail("here", 5, Reason::EngineUnavailable);
        import(&stage.fake);
        tokio::time::sleep(5 * EVERY).await;
        assert_eq!(stage.fake.calls("image"), tries);
        stage.until_lifecycle("u2", "ready").await;
    }

    /// What is said to be here and is not found all the same wakes its pod once, not every two seconds.
    #[tokio::test(start_paused = true)]
    async fn a_thing_that_is_here_and_of_no_use_wakes_once() {
        let stage = long_failed(Reason::ImageNotFound, &[(IMAGE, "late:1")]).await;
        stage.fake.fail("image", 100_000, Reason::ImageNotFound);
        let tries = stage.fake.calls("image");
        import(&stage.fake);
        tokio::time::sleep(2 * EVERY).await;
        assert!(stage.fake.calls("image") > tries, "it was woken");
        tokio::time::sleep(MINUTE).await;
        // Every two seconds would be thirty; the back-off's first pauses are random.
        let more = stage.fake.calls("image") - tries;
        assert!((2..=8).contains(&more), "after that, its back-off rules: {more}");
    }

    /// Somebody imports and removes the image again and again: that is no way around the budget.
    #[tokio::test(start_paused = true)]
    async fn what_comes_and_goes_costs_one_attempt_a_minute_more_than_the_budget() {
        let stage = long_failed(Reason::ImageNotFound, &[(IMAGE, "late:1")]).await;
        stage.fake.fail("image", 100_000, Reason::ImageNotFound);
        let begun = Instant::now();
        while begun.elapsed() < 10 * MINUTE {
            import(&stage.fake);
            tokio::time::sleep(2 * EVERY).await;
            stage.fake.world().images.retain(|image| image != "late:1");
            tokio::time::sleep(2 * EVERY).await;
        }
        let world = stage.fake.world();
        let calls = world.calls.iter().zip(&world.called_at);
        let own = ["image late:1", "inspect vk-default-late-0", "snapshot fork-vk-default-late-0"];
        let at: Vec<Instant> = calls
            .filter(|(call, at)| **at >= begun && own.iter().any(|own| call.starts_with(own)))
            .map(|(_, at)| *at)
            .collect();
        let within = |from: &Instant| at.iter().filter(|at| *at >= from && **at - *from < MINUTE).count();
        let worst = at.iter().map(within).max().unwrap_or_default();
        assert!((2..=8).contains(&worst), "{worst} engine calls in a minute");
    }
}
