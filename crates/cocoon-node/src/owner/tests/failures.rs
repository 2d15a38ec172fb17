//! What fails on the way, and what the guest and its saved state come to.

use std::time::Duration;

use super::{HIBERNATE, ID, booted, gone};
use crate::{
    owner::stage::{Stage, not_ready, pod},
    ports::VmPhase,
    reason::{Reason, Trouble},
};

#[tokio::test(start_paused = true)]
async fn a_failed_push_lets_the_guest_go_on_and_the_retry_saves_the_newer_state() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let id = stage.annotation("u1", ID);
    stage.fake.fail("push", 1, Reason::RegistryUnavailable);
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "failed").await;
    stage.until("resumed", |stage| stage.fake.world().vms[&vm].view.phase == VmPhase::Running).await;
    assert_eq!(stage.annotation("u1", ID), id, "the VM is the same one");
    assert!(stage.told(Reason::HibernatePushFailed));
    stage.until_lifecycle("u1", "hibernated").await;
    let state = stage.fake.world().tags[&format!("{vm}:hibernate")].state;
    assert_eq!(state, 1, "what the guest did after the failure is in it");
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn when_remove_fails_and_the_vm_is_there_the_push_is_taken_back_before_the_guest_goes_on() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.fail("remove", 1, Reason::EngineUnavailable);
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "failed").await;
    stage.until("resumed", |stage| stage.fake.world().vms[&vm].view.phase == VmPhase::Running).await;
    assert!(!stage.fake.world().tags.contains_key(&format!("{vm}:hibernate")));
    assert!(!stage.annotation("u1", ID).is_empty());
    let calls = stage.fake.world().calls.clone();
    let at = |call: &str| calls.iter().position(|c| c.starts_with(call)).unwrap();
    assert!(at("droptag") < at("resume"));
    stage.until_lifecycle("u1", "hibernated").await;
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_somebody_let_go_on_after_its_capture_is_not_removed_but_captured_again() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().slow.insert("push".into(), Duration::from_secs(5));
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until("pushing", |stage| stage.fake.calls("push") == 1).await;
    {
        // By the engine's command line; the engine's list does not say so yet.
        let mut world = stage.fake.world();
        let machine = world.vms.get_mut(&vm).unwrap();
        (machine.frozen, machine.state) = (false, machine.state + 7);
    }
    stage.until("refused", |stage| stage.told(Reason::HibernateOutrun)).await;
    assert!(stage.fake.world().vms.contains_key(&vm));
    stage.until_lifecycle("u1", "hibernated").await;
    assert!(
        stage.fake.world().tags[&format!("{vm}:hibernate")].state >= 7,
        "what it did since is in it (I3)"
    );
    stage.assert_sound();
}

/// The agent ends while it pushes; somebody starts the VM, works in it and stops it again; the agent is back.
async fn outrun_and_stopped(wanted: bool) -> (Stage, String) {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().slow.insert("push".into(), Duration::from_secs(5));
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until("pushing", |stage| stage.fake.calls("push") == 1).await;
    stage.context.kill().await;
    {
        let mut world = stage.fake.world();
        let machine = world.vms.get_mut(&vm).unwrap();
        (machine.frozen, machine.state) = (true, machine.state + 7);
        (machine.view.phase, machine.view.stopped_in_order) = (VmPhase::Stopped, true);
    }
    if !wanted {
        stage.annotate("u1", &[(HIBERNATE, None)]);
    }
    (stage.restart().await, vm)
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_ran_since_its_capture_and_was_stopped_is_started_and_captured_again() {
    let (stage, vm) = outrun_and_stopped(true).await;
    stage.until_lifecycle("u1", "hibernated").await;
    assert!(
        stage.fake.world().tags[&format!("{vm}:hibernate")].state >= 7,
        "what it did since is in it (I3)"
    );
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "ready").await;
    assert!(super::state_of(&stage, &vm) >= 7);
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_ran_since_its_capture_goes_on_when_nobody_wants_it_hibernated_any_more() {
    let (stage, vm) = outrun_and_stopped(false).await;
    stage.until_lifecycle("u1", "ready").await;
    assert!(super::state_of(&stage, &vm) >= 7);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(stage.lifecycle("u1"), "ready");
    assert!(super::ready(&stage, "u1"));
    assert!(!stage.fake.world().tags.contains_key(&format!("{vm}:hibernate")), "what it outran is dropped");
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_tag_that_somebody_else_moved_is_not_overwritten() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let foreign = crate::ports::fake::Held { id: "X".into(), state: 99, ..Default::default() };
    stage.fake.world().tags.insert(format!("{vm}:hibernate"), foreign.clone());
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "failed").await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(stage.told(Reason::TagMoved));
    assert_eq!(stage.fake.world().tags[&format!("{vm}:hibernate")], foreign);
    assert_eq!(stage.fake.world().vms[&vm].view.phase, VmPhase::Running);
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_question_about_evidence_boots_nothing() {
    let stage = Stage::new(true).await;
    stage.fake.fail("facts", 4, Reason::RegistryUnavailable);
    stage.apply(pod("demo-0", "u1", &[]));
    stage.until_lifecycle("u1", "failed").await;
    assert!(stage.told(Reason::HibernateEvidenceUnavailable));
    assert_eq!(stage.fake.calls("run"), 0);
    stage.until_lifecycle("u1", "ready").await;
}

#[tokio::test(start_paused = true)]
async fn a_failing_pod_is_quiet_and_its_delete_does_not_wait_for_the_back_off() {
    let stage = Stage::new(true).await;
    stage.apply(pod("demo-0", "u1", &[("cocoonset.cocoonstack.io/image", "nowhere:1")]));
    stage.until_lifecycle("u1", "failed").await;
    let message = stage.annotation("u1", "vm.cocoonstack.io/lifecycle-state-message");
    assert!(message.starts_with("ImageNotFound: ") && message.contains("import it"), "{message}");
    let before = (*stage.api.writes.lock().unwrap(), stage.fake.world().calls.len());
    tokio::time::sleep(Duration::from_secs(300)).await;
    let others = ["list", "here", "facts"];
    let engine = |call: &&String| !others.iter().any(|other| call.starts_with(other));
    let calls = stage.fake.world().calls[before.1..].iter().filter(engine).count();
    assert!(calls <= 25, "{calls} engine calls in five minutes");
    assert!(*stage.api.writes.lock().unwrap() <= before.0 + 2);
    let begun = tokio::time::Instant::now();
    stage.delete("u1");
    gone(&stage, "u1").await;
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_can_be_given_no_address_has_the_reason_in_its_pod_after_some_seconds() {
    for reason in [Reason::NoFreeAddress, Reason::NetworkDaemonDown] {
        let stage = Stage::new(true).await;
        stage.fake.world().leaseless = Some(Trouble::new(reason, "all addresses of 10.0.0.0/30 are taken"));
        stage.apply(pod("demo-0", "u1", &[]));
        let seen = |stage: &Stage| not_ready(stage, "u1").unwrap_or_default();
        stage.until("it waits for a lease", |stage| seen(stage).1.contains("lease")).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(seen(&stage).0, "ProbeFailed", "its guest may not have asked yet");
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(seen(&stage), (reason.to_string(), "all addresses of 10.0.0.0/30 are taken".to_owned()));
        tokio::time::sleep(Duration::from_secs(60)).await;
        let said = stage.api.said.lock().unwrap().clone();
        assert_eq!(said.iter().filter(|event| event.reason == reason).count(), 1, "{said:?}");
        stage.fake.world().leaseless = None;
        stage.until_lifecycle("u1", "ready").await;
        stage.assert_sound();
    }
}
