//! A live capture that goes ahead of a hibernation whose push would be long.

use std::time::Duration;

use super::{
    stage::Stage,
    tests::{HIBERNATE, booted, gone, reach, state_of},
};
use crate::{ports::VmPhase, reason::Reason, record::Phase};

/// A pod whose capture takes a hundred seconds to push.
async fn large() -> (Stage, String) {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.live();
    {
        let mut world = stage.fake.world();
        (world.throughput, world.capture_size) = (Some(10 << 20), 1000 << 20);
    }
    (stage, vm)
}

fn live_copies(stage: &Stage) -> usize {
    stage.fake.world().snapshots.keys().filter(|name| name.starts_with("live-")).count()
}

fn skipped(stage: &Stage) -> usize {
    let events = stage.api.said.lock().unwrap();
    events.iter().filter(|event| event.reason == Reason::HibernatePrepushFailed).count()
}

#[tokio::test(start_paused = true)]
async fn the_bulk_goes_while_the_guest_runs_and_what_it_did_meanwhile_is_saved_too() {
    let (stage, vm) = large().await;
    stage.fake.world().slow.insert("blobs".into(), Duration::from_secs(90));
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until("ahead", |stage| stage.fake.calls("blobs") == 1).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(stage.fake.world().vms[&vm].view.phase, VmPhase::Running, "the guest is not paused for that");
    assert_eq!(stage.lifecycle("u1"), "hibernating");
    stage.fake.live();
    stage.until_lifecycle("u1", "hibernated").await;
    let calls = stage.fake.world().calls.clone();
    let at = |call: &str| calls.iter().position(|c| c.starts_with(call)).unwrap();
    assert!(at("blobs") < at("drop live-") && at("drop live-") < at("capture") && at("capture") < at("push"));
    assert_eq!(stage.fake.world().ahead, [1]);
    assert_eq!(stage.fake.world().tags[&format!("{vm}:hibernate")].state, 2);
    assert_eq!((live_copies(&stage), stage.fake.calls("blobs"), skipped(&stage)), (0, 1, 0));
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_short_push_and_one_of_unknown_length_go_at_once() {
    for (throughput, asked) in [(Some(50 << 20), 1), (None, 0)] {
        let (stage, _) = large().await;
        stage.fake.world().throughput = throughput;
        stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
        stage.until_lifecycle("u1", "hibernated").await;
        assert_eq!((stage.fake.calls("blobs"), stage.fake.calls("size")), (0, asked));
    }
}

#[tokio::test(start_paused = true)]
async fn where_a_pause_may_only_be_short_a_shorter_push_counts_as_long() {
    for (limit, ahead) in [(30, 1), (60, 0)] {
        let (stage, _) = large().await;
        let stage = stage.with_pause_limit(Duration::from_secs(limit));
        // Estimated: 18 s.
        stage.fake.world().throughput = Some(55 << 20);
        stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
        stage.until_lifecycle("u1", "hibernated").await;
        assert_eq!(stage.fake.calls("blobs"), ahead, "{limit}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_guest_does_after_its_push_was_cut_off_goes_ahead_too() {
    let (stage, vm) = large().await;
    let stage = stage.with_pause_limit(Duration::from_secs(30));
    stage.fake.world().slow.insert("push".into(), Duration::from_secs(1000));
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until("cut off", |stage| stage.told(Reason::HibernatePauseLimit)).await;
    stage.until("goes on", |stage| stage.fake.world().vms[&vm].view.phase == VmPhase::Running).await;
    assert_eq!(stage.fake.calls("blobs"), 1);
    stage.fake.live();
    stage.fake.world().slow.clear();
    stage.until_lifecycle("u1", "hibernated").await;
    let ahead = stage.fake.world().ahead.clone();
    assert!(ahead.len() == 2 && ahead[1] > ahead[0], "{ahead:?}");
    assert_eq!(live_copies(&stage), 0);
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn whatever_fails_ahead_only_skips_it_with_one_event() {
    for (call, reason) in [
        ("save", Reason::DiskFull),
        ("save", Reason::EngineUnavailable),
        ("blobs", Reason::RegistryUnavailable),
        ("size", Reason::EngineUnavailable),
        ("drop", Reason::EngineUnavailable),
    ] {
        let (stage, vm) = large().await;
        stage.fake.fail(call, 1, reason);
        stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
        let begun = tokio::time::Instant::now();
        stage.until_lifecycle("u1", "hibernated").await;
        assert!(begun.elapsed() < Duration::from_secs(3), "{call}: it waits for nothing");
        assert_eq!(skipped(&stage), usize::from(call == "save" || call == "blobs"), "{call}");
        assert!(!stage.told(reason), "{call}: no failure of the pod");
        assert_eq!(stage.fake.world().tags[&format!("{vm}:hibernate")].state, 1);
        stage.assert_sound();
    }
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_never_ends_the_push_ahead_does_not_hold_the_hibernation_for_ever() {
    let (stage, _) = large().await;
    stage.fake.world().slow.insert("blobs".into(), Duration::from_secs(1_000_000));
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    tokio::time::sleep(Duration::from_secs(1900)).await;
    stage.until_lifecycle("u1", "hibernated").await;
    assert_eq!((skipped(&stage), live_copies(&stage)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn called_off_or_deleted_meanwhile_it_stops_and_its_copy_goes() {
    for delete in [false, true] {
        let (stage, vm) = large().await;
        stage.fake.world().slow.insert("blobs".into(), Duration::from_secs(600));
        stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
        stage.until("ahead", |stage| stage.fake.calls("blobs") == 1).await;
        let begun = tokio::time::Instant::now();
        if delete {
            stage.delete("u1");
            gone(&stage, "u1").await;
        } else {
            stage.annotate("u1", &[(HIBERNATE, None)]);
            stage.until_lifecycle("u1", "ready").await;
            stage.until("dropped", |stage| live_copies(stage) == 0).await;
            assert_eq!(stage.fake.world().records[&vm].phase, Phase::Up);
            assert_eq!(state_of(&stage, &vm), 1, "it was never away");
        }
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert_eq!(live_copies(&stage), 0);
        assert!(stage.fake.world().ahead.is_empty());
        assert!(!stage.fake.world().tags.contains_key(&format!("{vm}:hibernate")));
        stage.assert_sound();
    }
}

/// Hibernate with a push ahead, killed at the n-th effect; then wake and delete. Returns how many effects
/// there were.
async fn story(kill: u32, withdrawn: bool) -> u32 {
    let (mut stage, vm) = large().await;
    {
        let mut world = stage.fake.world();
        (world.judged, world.kill_after) = (true, Some(kill));
    }
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    if withdrawn {
        stage =
            reach(stage, |stage| stage.fake.calls("save") > 0 || stage.lifecycle("u1") == "hibernated").await;
    } else {
        stage = reach(stage, |stage| stage.lifecycle("u1") == "hibernated").await;
        assert!(stage.fake.world().tags[&format!("{vm}:hibernate")].state >= 1, "kill {kill}");
        assert_eq!(live_copies(&stage), 0, "kill {kill}");
    }
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage = reach(stage, |stage| stage.lifecycle("u1") == "ready" && live_copies(stage) == 0).await;
    assert!(state_of(&stage, &vm) >= 1, "kill {kill}");
    stage.delete("u1");
    stage = reach(stage, |stage| stage.pod("u1").is_none() && stage.fake.world().records.is_empty()).await;
    stage.assert_sound();
    assert!(stage.fake.world().snapshots.is_empty(), "kill {kill}");
    let left = stage.fake.world().kill_after.unwrap_or_default();
    kill - left
}

#[tokio::test(start_paused = true)]
async fn killed_at_any_step_it_loses_nothing_and_leaves_no_copy() {
    for withdrawn in [false, true] {
        for n in 1.. {
            if story(n, withdrawn).await < n {
                assert!(n > 10, "only {n} effects were cut off");
                break;
            }
        }
    }
}
