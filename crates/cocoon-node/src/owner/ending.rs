//! An agent that ends in order leaves no guest paused: each test is one moment at which it may be told to end.

use std::time::Duration;

use super::{
    stage::Stage,
    tests::{HIBERNATE, booted, gone, state_of},
};
use crate::{ports::VmPhase, reason::Reason};

/// Ends the agent as a signal does, and waits until its owners have ended.
async fn ended(stage: &Stage) {
    stage.context.shutdown.cancel();
    let begun = tokio::time::Instant::now();
    stage.context.drain().await;
    assert!(begun.elapsed() < stage.context.config.shutdown_limit, "nobody was dropped");
}

/// A pod that is being hibernated, whose `call` takes a while and was just begun.
async fn during(call: &str) -> (Stage, String) {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().slow.insert(call.into(), Duration::from_secs(10));
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until(call, |stage| stage.fake.calls(call) == 1).await;
    (stage, vm)
}

#[tokio::test(start_paused = true)]
async fn a_guest_whose_capture_is_being_taken_or_pushed_goes_on_and_the_next_agent_hibernates_it() {
    for call in ["capture", "push"] {
        let (stage, vm) = during(call).await;
        ended(&stage).await;
        assert_eq!(stage.fake.world().vms[&vm].view.phase, VmPhase::Running, "{call}");
        stage.fake.live();
        let state = state_of(&stage, &vm);
        let stage = stage.restart().await;
        stage.until_lifecycle("u1", "hibernated").await;
        let saved = stage.fake.world().tags[&format!("{vm}:hibernate")].state;
        assert_eq!(saved, state, "{call}: what it did meanwhile is in it (I3)");
        stage.assert_sound();
    }
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_was_begun_is_finished() {
    let (stage, _) = during("remove").await;
    ended(&stage).await;
    assert!(stage.fake.world().vms.is_empty());
    let stage = stage.restart().await;
    stage.until_lifecycle("u1", "hibernated").await;
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_a_delete_captured_goes_on_and_the_next_agent_saves_what_it_did() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().slow.insert("push".into(), Duration::from_secs(10));
    stage.delete("u1");
    stage.until("pushing", |stage| stage.fake.calls("push") == 1).await;
    ended(&stage).await;
    assert_eq!(stage.fake.world().vms[&vm].view.phase, VmPhase::Running);
    stage.fake.live();
    let state = state_of(&stage, &vm);
    let stage = stage.restart().await;
    gone(&stage, "u1").await;
    assert_eq!(stage.fake.world().tags[&format!("{vm}:latest")].state, state);
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_for_a_moment_is_asked_again() {
    let (stage, vm) = during("push").await;
    stage.fake.fail("resume", 2, Reason::EngineUnavailable);
    stage.fake.fail("inspect", 1, Reason::EngineUnavailable);
    ended(&stage).await;
    assert_eq!(stage.fake.world().vms[&vm].view.phase, VmPhase::Running);
}
