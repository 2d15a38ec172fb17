//! Made, hibernated, woken, adopted: the paths of the story.

use std::time::Duration;

use super::{HIBERNATE, ID, IP, booted, gone, hibernated, ready, state_of};
use crate::{
    owner::stage::{Stage, pod},
    ports::{VmPhase, fake::Held},
    reason::Reason,
    record::Phase,
};

#[tokio::test(start_paused = true)]
async fn a_pod_becomes_a_vm_with_id_address_and_ready() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    assert_eq!(stage.annotation("u1", ID), stage.fake.world().vms[&vm].view.id);
    assert!(stage.annotation("u1", IP).starts_with("172.31.240."));
    assert!(ready(&stage, "u1"));
    let status = stage.pod("u1").unwrap().status.unwrap();
    assert_eq!(status.phase.as_deref(), Some("Running"));
    assert_eq!(status.pod_ip, Some(stage.annotation("u1", IP)));
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_is_not_reachable_never_becomes_ready() {
    let stage = Stage::new(true).await;
    stage.fake.world().unreachable = true;
    stage.apply(pod("demo-0", "u1", &[]));
    stage.until("id", |stage| !stage.annotation("u1", ID).is_empty()).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(stage.lifecycle("u1"), "creating");
    assert!(!ready(&stage, "u1"));
    stage.fake.world().unreachable = false;
    stage.until_lifecycle("u1", "ready").await;
}

#[tokio::test(start_paused = true)]
async fn hibernate_saves_everything_and_wake_brings_it_back() {
    let stage = Stage::new(true).await;
    let vm = hibernated(&stage).await;
    assert!(stage.fake.world().vms.is_empty());
    assert_eq!((stage.annotation("u1", ID), stage.annotation("u1", IP)), (String::new(), String::new()));
    let status = stage.pod("u1").unwrap().status.unwrap();
    let container = &status.container_statuses.unwrap()[0];
    let waiting = container.state.as_ref().unwrap().waiting.as_ref().unwrap();
    assert_eq!((status.phase.as_deref(), waiting.reason.as_deref()), (Some("Running"), Some("Hibernated")));
    assert_eq!(stage.fake.world().tags[&format!("{vm}:hibernate")].base_image, "demo:latest");

    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "ready").await;
    assert_eq!(state_of(&stage, &vm), 1, "the guest goes on where it was");
    let tag = stage.fake.world().tags[&format!("{vm}:hibernate")].id.clone();
    assert_eq!(
        stage.annotation("u1", "vm.cocoonstack.io/woken-from"),
        tag,
        "the tag stays until the operator drops it"
    );
    assert_eq!(stage.fake.calls("pull"), 0, "the local copy is what the tag holds");
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_wake_without_the_local_copy_comes_from_the_registry_and_drops_its_import() {
    let stage = Stage::new(true).await;
    let vm = hibernated(&stage).await;
    stage.fake.world().snapshots.clear();
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "ready").await;
    assert_eq!(state_of(&stage, &vm), 1);
    stage.until("import dropped", |stage| stage.fake.world().snapshots.is_empty()).await;
    assert_eq!(stage.fake.calls("pull"), 1);
}

#[tokio::test(start_paused = true)]
async fn swapped_tags_wake_nobody_with_the_others_state_and_both_wake_once_they_are_put_back() {
    let stage = Stage::new(true).await;
    let vm = hibernated(&stage).await;
    let tag = format!("{vm}:hibernate");
    let own = stage.fake.world().tags[&tag].clone();
    assert_eq!(own.vm_name, vm, "a push says whose state it is");
    let foreign = Held { id: "B".into(), state: 70, vm_name: "vk-default-b-d2d9d3".into(), ..own.clone() };
    stage.fake.world().tags.insert(tag.clone(), foreign.clone());
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "failed").await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(stage.told(Reason::HibernateVMConflict));
    assert!(stage.fake.world().vms.is_empty(), "nothing is woken");
    assert_eq!(stage.fake.world().tags[&tag], foreign, "and nothing dropped");
    stage.fake.world().tags.insert(tag, own);
    stage.until_lifecycle("u1", "ready").await;
    assert_eq!(state_of(&stage, &vm), 1);
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_tag_that_another_node_moved_on_is_woken_and_said() {
    let stage = Stage::new(true).await;
    let vm = hibernated(&stage).await;
    let tag = format!("{vm}:hibernate");
    let own = stage.fake.world().tags[&tag].clone();
    stage.fake.world().tags.insert(tag, Held { id: "T".into(), state: 5, ..own.clone() });
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "ready").await;
    assert_eq!(state_of(&stage, &vm), 5);
    let said = stage.api.said.lock().unwrap().clone();
    let moved = said.iter().find(|event| event.reason == Reason::TagMoved).unwrap();
    assert!(
        moved.message.contains(&format!("from sha256:{}", own.id)) && moved.message.contains("to sha256:T")
    );
}

#[tokio::test(start_paused = true)]
async fn turning_the_wish_round_in_mid_flight_never_leaves_neither_vm_nor_saved_state() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    for wait in [0, 1, 2, 3, 5, 8, 13] {
        stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
        tokio::time::sleep(Duration::from_millis(wait)).await;
        stage.annotate("u1", &[(HIBERNATE, None)]);
        tokio::time::sleep(Duration::from_millis(wait)).await;
        let world = stage.fake.world();
        let kept = world.vms.contains_key(&vm) || world.tags.contains_key(&format!("{vm}:hibernate"));
        assert!(kept, "after {wait} ms");
    }
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "hibernated").await;
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "ready").await;
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_vanished_fails_the_pod_and_nothing_boots_in_its_place() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().vms.remove(&vm);
    stage.until_lifecycle("u1", "failed").await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let status = stage.pod("u1").unwrap().status.unwrap();
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("VMGone")));
    assert!(stage.fake.world().vms.is_empty());
    stage.delete("u1");
    gone(&stage, "u1").await;
}

#[tokio::test(start_paused = true)]
async fn a_vm_whose_process_died_is_started_in_place_once_in_a_while() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let stop = |stage: &Stage| stage.fake.world().vms.get_mut(&vm).unwrap().view.phase = VmPhase::Stopped;
    stop(&stage);
    stage.until("started", |stage| stage.fake.calls("start") == 1).await;
    stage.until("counted", |stage| stage.fake.world().records[&vm].restarts == 1).await;
    stage.until_lifecycle("u1", "ready").await;
    let status = stage.pod("u1").unwrap().status.unwrap();
    assert_eq!(status.container_statuses.unwrap()[0].restart_count, 1);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_adopts_the_same_vms() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let id = stage.annotation("u1", ID);
    let stage = stage.restart().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(stage.annotation("u1", ID), id);
    assert_eq!((stage.fake.calls("run"), stage.lifecycle("u1")), (1, "ready".into()));
    assert_eq!(stage.fake.world().records[&vm].phase, Phase::Up);
}

#[tokio::test(start_paused = true)]
async fn a_live_snapshot_request_is_answered_once_and_the_guest_goes_on() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let ask = |reference: &str| stage.annotate("u1", &[("vm.cocoonstack.io/snapshot", Some(reference))]);
    let answered = |stage: &Stage, reference: &str, state: &str| {
        let answer = stage.annotation("u1", "vm.cocoonstack.io/snapshot-status");
        answer.contains(&format!("\"{reference}\"")) && answer.contains(&format!("\"{state}\""))
    };
    ask("golden:v1");
    stage.until("pushed", |stage| answered(stage, "golden:v1", "pushed")).await;
    assert!(stage.fake.world().tags.contains_key("golden:v1") && stage.fake.world().snapshots.is_empty());
    assert_eq!(stage.fake.world().vms[&vm].view.phase, VmPhase::Running);
    stage.fake.fail("push", 1, Reason::RegistryUnavailable);
    ask("golden:v2");
    stage.until("failed", |stage| answered(stage, "golden:v2", "failed")).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!stage.fake.world().tags.contains_key("golden:v2"), "a ref is answered once");
    for refused in [format!("{vm}:hibernate"), "vk-default-other-0-aaaaaa:latest".to_owned()] {
        ask(&refused);
        stage.until("refused", |stage| answered(stage, &refused, "failed")).await;
    }
    assert_eq!((stage.fake.calls("push"), stage.lifecycle("u1")), (2, "ready".into()));
}

#[tokio::test(start_paused = true)]
async fn a_hibernation_is_said_when_it_begins_and_once() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().slow.insert("capture".into(), Duration::from_secs(38));
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(stage.told(Reason::Hibernating) && stage.lifecycle("u1") == "hibernating");
    stage.until_lifecycle("u1", "hibernated").await;
    let said = stage.api.said.lock().unwrap().clone();
    let said: Vec<_> = said.iter().filter(|event| event.reason == Reason::Hibernating).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].message.contains(&vm) && said[0].message.contains(HIBERNATE), "{said:?}");
}
