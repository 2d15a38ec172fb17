//! Laws that were broken once: answers to what was asked before, doubt that made a VM, odd annotations, stops.

use std::time::Duration;

use super::{
    stage::{Stage, pod},
    tests::booted,
};
use crate::{
    ports::{VmPhase, fake::Held},
    reason::Reason,
};

const IMAGE: &str = "cocoonset.cocoonstack.io/image";

fn held(id: &str, state: u64) -> Held {
    Held { id: id.to_owned(), state, ..Default::default() }
}

fn events(stage: &Stage, reason: Reason) -> Vec<String> {
    let events = stage.api.said.lock().unwrap();
    events.iter().filter(|event| event.reason == reason).map(|event| event.message.clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_live_snapshot_is_answered_for_the_ref_that_was_pushed_though_another_is_asked_for_meanwhile() {
    let stage = Stage::new(true).await;
    booted(&stage).await;
    stage.fake.world().slow.insert("push".into(), Duration::from_secs(5));
    let ask = |reference: &str| stage.annotate("u1", &[("vm.cocoonstack.io/snapshot", Some(reference))]);
    ask("golden:v1");
    stage.until("pushing", |stage| stage.fake.calls("push") == 1).await;
    ask("golden:v2");
    stage
        .until("answered", |stage| {
            let answer = stage.annotation("u1", "vm.cocoonstack.io/snapshot-status");
            answer.contains("\"golden:v2\"") && answer.contains("\"pushed\"")
        })
        .await;
    for reference in ["golden:v1", "golden:v2"] {
        assert!(stage.fake.world().tags.contains_key(reference), "{reference} was answered and is not there");
    }
}

/// A clone-mode pod with a local copy of what its image names.
async fn cloning(tag: Option<Held>) -> Stage {
    let stage = Stage::new(true).await;
    stage.fake.world().snapshots.insert("golden:v1".into(), held("OLD", 1));
    if let Some(tag) = tag {
        stage.fake.world().tags.insert("golden:v1".into(), tag);
    }
    stage
}

fn clone_pod() -> k8s_openapi::api::core::v1::Pod {
    pod("demo-0", "u1", &[(IMAGE, "golden:v1"), ("cocoonset.cocoonstack.io/mode", "clone")])
}

#[tokio::test(start_paused = true)]
async fn a_registry_that_gives_no_answer_about_a_clone_source_makes_no_vm_of_the_local_copy() {
    let stage = cloning(Some(held("NEW", 2))).await;
    stage.fake.fail("facts golden:v1", 3, Reason::RegistryUnavailable);
    stage.apply(clone_pod());
    stage.until_lifecycle("u1", "failed").await;
    assert!(stage.told(Reason::RegistryUnavailable));
    assert_eq!(stage.fake.calls("clone"), 0);
    stage.until_lifecycle("u1", "ready").await;
    let vm = cocoon_meta::vm_name_for_pod("default", "demo-0");
    assert_eq!(stage.fake.world().vms[&vm].state, 2, "of what the tag holds, not of the older copy");
}

#[tokio::test(start_paused = true)]
async fn a_clone_source_that_the_registry_does_not_have_is_not_made_from_a_local_copy() {
    let stage = cloning(None).await;
    stage.apply(clone_pod());
    stage.until_lifecycle("u1", "failed").await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(stage.told(Reason::SnapshotNotFound));
    assert_eq!(stage.fake.calls("clone"), 0);
}

#[tokio::test(start_paused = true)]
async fn an_image_that_was_fetched_for_a_former_wish_is_not_booted_for_the_new_one() {
    let stage = Stage::new(true).await;
    stage.fake.world().images.extend(["a:1".to_owned(), "b:1".to_owned()]);
    stage.fake.world().slow.insert("image".into(), Duration::from_secs(5));
    stage.apply(pod("demo-0", "u1", &[(IMAGE, "a:1")]));
    stage.until("fetching", |stage| stage.fake.calls("image") == 1).await;
    stage.annotate("u1", &[(IMAGE, Some("b:1"))]);
    stage.until_lifecycle("u1", "ready").await;
    let calls = stage.fake.world().calls.clone();
    let run: Vec<&String> = calls.iter().filter(|call| call.starts_with("run ")).collect();
    assert!(run.len() == 1 && run[0].ends_with(" b:1"), "{run:?}");
}

#[tokio::test(start_paused = true)]
async fn odd_annotations_are_said_once_each_and_nothing_follows_from_them() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    for value in ["yes", "1", "yes"] {
        stage.annotate("u1", &[("vm.cocoonstack.io/hibernate", Some(value))]);
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    stage.annotate("u1", &[("vm.cocoonstack.io/hibernat", Some("true"))]);
    tokio::time::sleep(Duration::from_secs(5)).await;
    stage.annotate("u1", &[("vm.cocoonstack.io/name", Some("vk-a-b-0-aaaaaa"))]);
    tokio::time::sleep(Duration::from_secs(700)).await;
    let said = events(&stage, Reason::InvalidAnnotation);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said[0].contains("vm.cocoonstack.io/hibernate") && said[0].contains("yes"), "{said:?}");
    assert_eq!(events(&stage, Reason::UnknownAnnotation).len(), 1);
    let renamed = events(&stage, Reason::VMNameMismatch);
    assert!(renamed.len() == 1 && renamed[0].contains("vk-a-b-0-aaaaaa") && renamed[0].contains(&vm));
    assert_eq!(stage.fake.calls("capture") + stage.fake.calls("remove"), 0);
    assert_eq!((stage.lifecycle("u1"), stage.fake.world().vms.len()), ("ready".into(), 1));
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_was_ordered_is_not_called_a_death() {
    for ordered in [true, false] {
        let stage = Stage::new(true).await;
        let vm = booted(&stage).await;
        {
            let mut world = stage.fake.world();
            let view = &mut world.vms.get_mut(&vm).unwrap().view;
            (view.phase, view.stopped_in_order) = (VmPhase::Stopped, ordered);
        }
        stage.until("said", |stage| stage.told(Reason::VMRestarted)).await;
        let said = events(&stage, Reason::VMRestarted);
        assert_eq!(said[0].contains("stopped by an order"), ordered, "{said:?}");
        assert_eq!(said[0].contains("ended by itself"), !ordered, "{said:?}");
        stage.until_lifecycle("u1", "ready").await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_passed_is_forgotten_and_has_no_say_in_a_later_restart() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.fail("inspect", 1, Reason::EngineUnavailable);
    let stage = stage.restart().await;
    stage.until_lifecycle("u1", "failed").await;
    stage.until_lifecycle("u1", "ready").await;
    stage.fake.world().vms.get_mut(&vm).unwrap().view.phase = VmPhase::Stopped;
    stage.until("started again", |stage| stage.fake.world().records[&vm].restarts == 1).await;
    stage.until_lifecycle("u1", "ready").await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_stops_after_a_failed_hibernation_is_started_again() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.fail("push", 1, Reason::RegistryUnavailable);
    stage.annotate("u1", &[("vm.cocoonstack.io/hibernate", Some("true"))]);
    stage.until_lifecycle("u1", "failed").await;
    stage.fake.world().vms.get_mut(&vm).unwrap().view.phase = VmPhase::Stopped;
    stage.until("started again", |stage| stage.fake.world().records[&vm].restarts == 1).await;
    assert!(!stage.told(Reason::RestartFailed));
}

#[tokio::test(start_paused = true)]
async fn a_delete_that_saves_says_where_and_under_which_digest() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.delete("u1");
    stage.until("gone", |stage| stage.pod("u1").is_none()).await;
    let said = events(&stage, Reason::DeleteSnapshotPushed);
    assert!(said.len() == 1 && said[0].contains(&format!("{vm}:latest")), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn a_delete_that_cannot_save_a_dead_vm_says_so() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    for _ in 0..2 {
        stage.fake.world().vms.get_mut(&vm).unwrap().view.phase = VmPhase::Stopped;
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    assert!(stage.told(Reason::RestartCooldown));
    stage.force_delete("u1");
    stage.until("gone", |stage| stage.fake.world().vms.is_empty()).await;
    let said = events(&stage, Reason::DeleteSnapshotSkipped);
    assert!(said.len() == 1 && said[0].contains(&format!("{vm}:latest")), "{said:?}");
}

#[tokio::test(start_paused = true)]
async fn a_capture_longer_than_a_guest_may_be_paused_is_a_failure_with_a_back_off_and_the_guest_goes_on() {
    // The wall clock stands still in these tests: every capture is longer than no time at all.
    let stage = Stage::new(true).await.with_pause_limit(Duration::ZERO);
    let vm = booted(&stage).await;
    stage.annotate("u1", &[("vm.cocoonstack.io/hibernate", Some("true"))]);
    stage.until_lifecycle("u1", "failed").await;
    stage.until("goes on", |stage| stage.fake.world().vms[&vm].view.phase == VmPhase::Running).await;
    assert_eq!(events(&stage, Reason::HibernatePauseLimit).len(), 1);
    tokio::time::sleep(Duration::from_secs(1800)).await;
    let captures = stage.fake.calls("capture");
    assert!((2..=12).contains(&captures), "{captures} captures in half an hour");
}
