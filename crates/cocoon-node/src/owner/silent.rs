//! A wake or clone whose guest does not take its identity.

use std::time::Duration;

use super::{
    stage::{Stage, pod},
    tests::{HIBERNATE, booted},
};
use crate::{planner::observation::Silence, ports::VmPhase, reason::Reason};

const MESSAGE: &str = "vm.cocoonstack.io/lifecycle-state-message";

/// A pod that was woken and whose guest says nothing.
async fn woken_mute() -> (Stage, String) {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "hibernated").await;
    stage.fake.world().mute = true;
    stage.fake.fail("start", 10_000, Reason::GuestSilent);
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until("woken", |stage| stage.fake.world().vms.contains_key(&vm)).await;
    (stage, vm)
}

fn not_ready(stage: &Stage) -> (String, String) {
    let conditions = stage.pod("u1").unwrap().status.unwrap().conditions.unwrap();
    let ready = conditions.into_iter().find(|c| c.type_ == "Ready").unwrap();
    assert_eq!(ready.status, "False");
    (ready.reason.unwrap(), ready.message.unwrap())
}

fn events(stage: &Stage, reason: Reason) -> usize {
    stage.api.said.lock().unwrap().iter().filter(|event| event.reason == reason).count()
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_is_slow_to_take_its_identity_gets_its_links_in_the_end() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.fail("start", 3, Reason::GuestSilent);
    stage.fake.world().vms.get_mut(&vm).unwrap().view.links_down = true;
    stage.until("it is up", |stage| !stage.fake.world().vms[&vm].view.links_down).await;
    stage.until_lifecycle("u1", "ready").await;
    assert_eq!((stage.fake.calls("start"), stage.annotation("u1", MESSAGE)), (4, String::new()));
}

#[tokio::test(start_paused = true)]
async fn a_woken_guest_that_never_answers_is_not_ready_with_one_word_one_event_and_a_way_out() {
    let (stage, vm) = woken_mute().await;
    stage.until("said", |stage| stage.told(Reason::GuestSilent)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (reason, message) = not_ready(&stage);
    assert_eq!(reason, "GuestSilent");
    assert!(message.contains(&vm) && message.contains("cocoon vm start"), "{message}");
    assert_eq!(stage.lifecycle("u1"), "creating", "a slow guest is no failure yet");
    assert!(stage.annotation("u1", MESSAGE).starts_with("GuestSilent: "));
    stage.until_lifecycle("u1", "failed").await;
    assert!(stage.fake.calls("start") >= Silence::FAILED as usize);
    let writes = *stage.api.writes.lock().unwrap();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(events(&stage, Reason::GuestSilent), 1, "no storm");
    assert_eq!(*stage.api.writes.lock().unwrap(), writes, "what has not changed is not written again");
    assert!(stage.fake.calls("start") >= 12, "it is told again, at most 5 minutes later");
    assert_eq!(not_ready(&stage).0, "GuestSilent");
    stage.fake.fail("start", 0, Reason::GuestSilent);
    stage.until_lifecycle("u1", "ready").await;
}

#[tokio::test(start_paused = true)]
async fn another_obstacle_is_said_once_too() {
    let (stage, _) = woken_mute().await;
    stage.until_lifecycle("u1", "failed").await;
    stage.fake.fail("start", 2, Reason::EngineUnavailable);
    stage.until("said", |stage| events(stage, Reason::GuestSilent) == 2).await;
    assert!(not_ready(&stage).1.contains("injected"));
    stage.until_lifecycle("u1", "ready").await;
    assert_eq!(events(&stage, Reason::GuestSilent), 2);
}

#[tokio::test(start_paused = true)]
async fn the_back_off_starts_over_when_the_guest_answered_or_the_vm_is_another_one() {
    let (stage, vm) = woken_mute().await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    // Somebody starts it by hand, with success; later its links go again.
    stage.fake.world().vms.get_mut(&vm).unwrap().view.links_down = false;
    stage.until_lifecycle("u1", "ready").await;
    tokio::time::sleep(Duration::from_secs(90)).await;
    for change in ["again", "another process"] {
        {
            let mut world = stage.fake.world();
            let view = &mut world.vms.get_mut(&vm).unwrap().view;
            (view.links_down, view.pid) = (true, view.pid + 1);
        }
        let before = stage.fake.calls("start");
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert!(stage.fake.calls("start") >= before + 3, "{change}: told at once and after short delays");
        tokio::time::sleep(Duration::from_secs(3600)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_takes_a_start_in_vain_for_done_is_not_asked_without_end() {
    let (stage, vm) = woken_mute().await;
    stage.fake.fail("start", 0, Reason::GuestSilent);
    stage.fake.world().deaf = true;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(stage.fake.calls("start") < 20 && stage.fake.world().vms[&vm].view.links_down);
    assert_eq!(not_ready(&stage).0, "GuestSilent");
}

#[tokio::test(start_paused = true)]
async fn a_mute_guest_may_be_hibernated_and_its_pod_deleted_at_once() {
    let (stage, vm) = woken_mute().await;
    stage.until_lifecycle("u1", "failed").await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    let begun = tokio::time::Instant::now();
    stage.until_lifecycle("u1", "hibernated").await;
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(stage.annotation("u1", MESSAGE), "");
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until("woken", |stage| stage.fake.world().vms.contains_key(&vm)).await;
    stage.until("it runs", |stage| stage.fake.world().vms[&vm].view.phase == VmPhase::Running).await;
    let begun = tokio::time::Instant::now();
    stage.delete("u1");
    stage.until("gone", |stage| stage.pod("u1").is_none()).await;
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[tokio::test(start_paused = true)]
async fn a_mute_fork_says_so_in_the_same_word() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().mute = true;
    stage.fake.fail("start", 10_000, Reason::GuestSilent);
    stage.apply(pod("demo-1", "u2", &[("vm.cocoonstack.io/fork-from", &vm)]));
    stage.until("said", |stage| stage.told(Reason::GuestSilent)).await;
    assert_eq!(stage.lifecycle("u1"), "ready", "the source is not disturbed");
}
