//! Owners on fake ports: the story's paths, what goes wrong, and a kill at every effect.

use std::time::Duration;

use super::stage::{Stage, pod};
use crate::{ports::VmPhase, reason::Reason, record::Phase};

pub(super) const HIBERNATE: &str = "vm.cocoonstack.io/hibernate";
const ID: &str = "vm.cocoonstack.io/id";
const IP: &str = "vm.cocoonstack.io/ip";

fn vm_of(name: &str) -> String {
    cocoon_meta::vm_name_for_pod("default", name)
}

pub(super) fn state_of(stage: &Stage, vm: &str) -> u64 {
    stage.fake.world().vms[vm].state
}

pub(super) async fn booted(stage: &Stage) -> String {
    stage.apply(pod("demo-0", "u1", &[]));
    stage.until_lifecycle("u1", "ready").await;
    vm_of("demo-0")
}

async fn hibernated(stage: &Stage) -> String {
    let vm = booted(stage).await;
    stage.fake.live();
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "hibernated").await;
    vm
}

pub(super) async fn gone(stage: &Stage, uid: &str) {
    stage.until("the pod is gone", |stage| stage.pod(uid).is_none()).await;
    stage.until("nothing is owed", |stage| stage.fake.world().records.is_empty()).await;
}

fn ready(stage: &Stage, uid: &str) -> bool {
    cocoon_meta::is_pod_ready(&stage.pod(uid).unwrap())
}

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
async fn a_deleted_pod_is_pushed_as_latest_and_leaves_nothing() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.live();
    stage.delete("u1");
    gone(&stage, "u1").await;
    {
        let world = stage.fake.world();
        assert!(world.vms.is_empty() && world.snapshots.is_empty());
        assert_eq!(world.tags[&format!("{vm}:latest")].state, 1);
    }
    assert_eq!(stage.fake.calls("release"), 1);
    stage.until("the owner retires", |stage| stage.context.directory.owners().is_empty()).await;
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_hibernated_pod_that_is_deleted_and_made_again_restores() {
    for registry in [true, false] {
        let stage = Stage::new(registry).await;
        let vm = hibernated(&stage).await;
        stage.delete("u1");
        gone(&stage, "u1").await;
        stage.apply(pod("demo-0", "u2", &[]));
        stage.until_lifecycle("u2", "ready").await;
        assert_eq!(state_of(&stage, &vm), 1, "registry: {registry}");
        assert!(stage.told(Reason::HibernateSnapshotExists));
        assert_eq!(stage.fake.calls("run"), 1, "never a second fresh boot");
        stage.assert_sound();
    }
}

#[tokio::test(start_paused = true)]
async fn a_woken_pod_that_is_deleted_and_made_again_does_not_come_back_with_the_old_state() {
    for registry in [true, false] {
        let stage = Stage::new(registry).await;
        let vm = hibernated(&stage).await;
        stage.annotate("u1", &[(HIBERNATE, None)]);
        stage.until_lifecycle("u1", "ready").await;
        stage.delete("u1");
        gone(&stage, "u1").await;
        assert!(!stage.fake.world().tags.contains_key(&format!("{vm}:hibernate")));
        stage.apply(pod("demo-0", "u2", &[]));
        stage.until_lifecycle("u2", "ready").await;
        assert_eq!(state_of(&stage, &vm), 0, "a fresh boot, registry: {registry}");
        stage.assert_sound();
    }
}

#[tokio::test(start_paused = true)]
async fn two_forks_share_one_baseline_and_the_source_goes_on() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.live();
    for (name, uid) in [("demo-1", "u2"), ("demo-2", "u3")] {
        stage.apply(pod(name, uid, &[("vm.cocoonstack.io/fork-from", &vm)]));
    }
    for uid in ["u2", "u3"] {
        stage.until_lifecycle(uid, "ready").await;
    }
    assert_eq!(stage.fake.calls("save"), 1);
    assert_eq!(state_of(&stage, &vm_of("demo-1")), 1);
    assert_eq!(stage.fake.world().vms.len(), 3);
    assert_eq!(stage.fake.world().vms[&vm].view.phase, VmPhase::Running);
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_baseline_that_somebody_dropped_is_taken_anew_for_the_next_fork() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    for (name, uid, saves) in [("demo-1", "u2", 1), ("demo-2", "u3", 2)] {
        stage.apply(pod(name, uid, &[("vm.cocoonstack.io/fork-from", &vm)]));
        stage.until_lifecycle(uid, "ready").await;
        assert_eq!(stage.fake.calls("save"), saves);
        stage.fake.world().snapshots.remove(&cocoon_meta::fork_baseline_name(&vm)).expect("a baseline");
    }
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_fork_of_another_namespace_is_refused() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let mut other = pod("demo-1", "u2", &[("vm.cocoonstack.io/fork-from", &vm)]);
    other.metadata.namespace = Some("other".into());
    let name = cocoon_meta::vm_name_for_pod("other", "demo-1");
    other.metadata.annotations.as_mut().unwrap().insert("vm.cocoonstack.io/name".into(), name.clone());
    stage.apply(other);
    stage.until_lifecycle("u2", "failed").await;
    assert!(stage.told(Reason::ForkSourceUnavailable));
    assert!(!stage.fake.world().vms.contains_key(&name));
    assert_eq!(stage.fake.calls("save"), 0);
}

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
async fn a_tag_that_somebody_else_moved_is_not_overwritten() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let foreign = crate::ports::fake::Held { id: "X".into(), state: 99, base_image: String::new() };
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
async fn a_delete_waits_for_the_demanded_snapshot_says_so_and_stops_waiting_when_the_policy_is_never() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.fail("push", 1000, Reason::RegistryUnavailable);
    stage.delete("u1");
    stage.until("it says why", |stage| stage.told(Reason::DeleteSnapshotFailed)).await;
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(stage.fake.world().vms.contains_key(&vm), "the VM is kept until it is saved");
    let conditions = stage.pod("u1").unwrap().status.unwrap().conditions.unwrap();
    let why = conditions.iter().find(|c| c.type_ == "Ready").unwrap().reason.clone();
    assert_eq!(why.as_deref(), Some("DeleteSnapshotFailed"));
    stage.annotate("u1", &[("cocoonset.cocoonstack.io/snapshot-policy", Some("never"))]);
    let begun = tokio::time::Instant::now();
    gone(&stage, "u1").await;
    assert!(begun.elapsed() < Duration::from_secs(10));
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_force_deleted_pods_vm_is_saved_and_removed_as_owed_work() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.live();
    stage.force_delete("u1");
    stage.until("nothing is owed", |stage| stage.fake.world().records.is_empty()).await;
    let world = stage.fake.world();
    assert!(world.vms.is_empty());
    assert!(!world.tags.contains_key(&format!("{vm}:latest")), "another node may write that by now");
    assert_eq!(world.tags[&format!("{vm}:orphan-u1")].state, 1);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_went_without_a_delete_leaves_the_tag_it_woke_from_alone() {
    let stage = Stage::new(true).await;
    let vm = hibernated(&stage).await;
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "ready").await;
    stage.force_delete("u1");
    stage.until("nothing is owed", |stage| stage.fake.world().records.is_empty()).await;
    assert!(stage.fake.world().tags.contains_key(&format!("{vm}:hibernate")));
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
async fn a_pod_that_is_not_ours_gets_one_quiet_verdict_and_may_go() {
    let stage = Stage::new(true).await;
    let mut foreign = pod("other", "u1", &[]);
    foreign.metadata.annotations = None;
    let mut mismatch = pod("demo-1", "u2", &[]);
    mismatch
        .metadata
        .annotations
        .as_mut()
        .unwrap()
        .insert("vm.cocoonstack.io/name".into(), "vk-a-b-0-aaaaaa".into());
    stage.apply(foreign);
    stage.apply(mismatch);
    tokio::time::sleep(Duration::from_secs(60)).await;
    for (uid, reason) in [("u1", "MissingVMName"), ("u2", "VMNameMismatch")] {
        let status = stage.pod(uid).unwrap().status.unwrap();
        let waiting = status.container_statuses.unwrap()[0].state.clone().unwrap().waiting.unwrap();
        assert_eq!((status.phase.as_deref(), waiting.reason.as_deref()), (Some("Pending"), Some(reason)));
        assert!(waiting.message.unwrap().contains("vk-default-"), "it names the right name");
    }
    assert_eq!(stage.api.events.lock().unwrap().len(), 2);
    assert!(*stage.api.writes.lock().unwrap() <= 4);
    stage.delete("u1");
    stage.delete("u2");
    stage.until("gone", |stage| stage.pod("u1").is_none() && stage.pod("u2").is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn a_second_pod_with_the_same_vm_name_is_refused_and_the_first_is_not_disturbed() {
    let stage = Stage::new(true).await;
    let extra = [
        ("cocoonset.cocoonstack.io/managed", "false"),
        ("vm.cocoonstack.io/name", "box"),
        (ID, "EXT"),
        (IP, "10.0.0.9"),
    ];
    stage.apply(pod("box-a", "u1", &extra));
    stage.until_lifecycle("u1", "ready").await;
    stage.apply(pod("box-b", "u2", &extra));
    stage.until_lifecycle("u2", "failed").await;
    assert!(stage.told(Reason::VMNameInUse) && ready(&stage, "u1"));
    stage.delete("u2");
    stage.until("gone", |stage| stage.pod("u2").is_none()).await;
    assert!(ready(&stage, "u1"));
}

#[tokio::test(start_paused = true)]
async fn malformed_annotations_are_said_and_make_nothing() {
    for (key, value) in [
        ("vm.cocoonstack.io/snapshot-annotations", "{not json"),
        ("vm.cocoonstack.io/probe-port", "ssh"),
        ("cocoonset.cocoonstack.io/storage", "lots"),
        ("vm.cocoonstack.io/backend", "hyper-v"),
        ("cocoonset.cocoonstack.io/os", "windows"),
        ("vm.cocoonstack.io/clone-from-dir", "/x"),
    ] {
        let stage = Stage::new(true).await;
        stage.apply(pod("demo-0", "u1", &[(key, value)]));
        stage.until_lifecycle("u1", "failed").await;
        let message = stage.annotation("u1", "vm.cocoonstack.io/lifecycle-state-message");
        assert!(message.len() > 30, "{key}: {message}");
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(stage.fake.calls("run") + stage.fake.calls("clone"), 0, "{key}");
        stage.annotate("u1", &[(key, None)]);
        stage.until_lifecycle("u1", "ready").await;
    }
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
async fn a_recreated_pod_gets_its_own_vm_only_after_the_former_one_is_gone() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let id = stage.annotation("u1", ID);
    stage.force_delete("u1");
    stage.apply(pod("demo-0", "u2", &[]));
    stage.until_lifecycle("u2", "ready").await;
    assert_ne!(stage.annotation("u2", ID), id);
    assert_eq!(stage.fake.world().records[&vm].uid, "u2");
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
async fn hibernate_of_an_unmanaged_pod_is_refused_in_words() {
    let stage = Stage::new(true).await;
    let extra = [
        ("cocoonset.cocoonstack.io/managed", "false"),
        ("vm.cocoonstack.io/name", "toolbox"),
        (ID, "EXT"),
        (IP, "10.0.0.9"),
    ];
    stage.apply(pod("box", "u1", &extra));
    stage.until_lifecycle("u1", "ready").await;
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "failed").await;
    assert!(stage.told(Reason::HibernateUnsupported));
    assert!(ready(&stage, "u1"), "it goes on serving");
    stage.delete("u1");
    gone(&stage, "u1").await;
    assert_eq!(stage.fake.calls("remove"), 0, "a VM that is not ours is never touched");
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

/// Create, hibernate, wake from the registry, fork, delete; killed at the n-th effect and started again.
async fn story(kill: Option<u32>) -> (u32, Vec<String>) {
    let mut stage = Stage::new(true).await;
    stage.fake.world().kill_after = kill;
    let vm = vm_of("demo-0");
    stage.apply(pod("demo-0", "u1", &[]));
    stage = reach(stage, |stage| stage.lifecycle("u1") == "ready").await;
    stage.fake.live();
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage = reach(stage, |stage| stage.lifecycle("u1") == "hibernated").await;
    let saved = stage.fake.world().tags[&format!("{vm}:hibernate")].state;
    assert!(saved >= 1 && stage.fake.world().vms.is_empty());
    stage.fake.world().snapshots.clear();
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage = reach(stage, |stage| stage.lifecycle("u1") == "ready").await;
    assert!(state_of(&stage, &vm) >= saved);
    stage.apply(pod("demo-1", "u2", &[("vm.cocoonstack.io/fork-from", &vm)]));
    stage = reach(stage, |stage| stage.lifecycle("u2") == "ready").await;
    stage.fake.live();
    let last = state_of(&stage, &vm);
    stage.delete("u1");
    stage.delete("u2");
    stage = reach(stage, |stage| {
        stage.pod("u1").is_none() && stage.pod("u2").is_none() && stage.fake.world().records.is_empty()
    })
    .await;
    stage.assert_sound();
    let world = stage.fake.world();
    assert!(world.tags[&format!("{vm}:latest")].state >= last, "nothing of the guest was lost");
    assert!(world.vms.is_empty() && world.snapshots.is_empty(), "{world:#?}");
    assert!(!world.tags.contains_key(&format!("{vm}:hibernate")));
    let effects = kill.unwrap_or(u32::MAX) - world.kill_after.unwrap_or_default();
    (effects, world.tags.keys().cloned().collect())
}

/// Waits for `check`, restarting the agent when it was killed.
pub(super) async fn reach(mut stage: Stage, check: impl Fn(&Stage) -> bool) -> Stage {
    for turn in 0..20_000 {
        let step = Duration::from_millis(if turn < 20 { 50 } else { 1000 });
        if check(&stage) {
            return stage;
        }
        let killed = std::sync::Arc::clone(&stage.fake.killed);
        if tokio::time::timeout(step, killed.notified()).await.is_ok() {
            stage.fake.meanwhile();
            stage = stage.restart().await;
        }
    }
    stage.until("the story goes on", |_| false).await;
    stage
}

#[tokio::test(start_paused = true)]
async fn a_kill_at_any_effect_leads_to_the_same_end() {
    let (_, tags) = story(None).await;
    let mut killed = 0;
    for n in 1.. {
        let (effects, found) = story(Some(n)).await;
        assert_eq!(found, tags, "killed at effect {n}");
        if effects < n {
            break;
        }
        killed = n;
    }
    assert!(killed > 25, "only {killed} effects were cut off");
}

/// Without a registry: create, hibernate, wake, hibernate again; killed at the n-th effect. Returns how
/// many effects there were.
async fn story_without_registry(kill: u32) -> u32 {
    let mut stage = Stage::new(false).await;
    stage.fake.world().kill_after = Some(kill);
    let vm = vm_of("demo-0");
    stage.apply(pod("demo-0", "u1", &[]));
    stage = reach(stage, |stage| stage.lifecycle("u1") == "ready").await;
    for _ in 0..2 {
        stage.fake.live();
        let before = state_of(&stage, &vm);
        stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
        stage = reach(stage, |stage| stage.lifecycle("u1") == "hibernated").await;
        assert!(stage.fake.world().vms.is_empty());
        assert!(stage.fake.world().snapshots[&vm].state >= before, "killed at effect {kill}");
        stage.annotate("u1", &[(HIBERNATE, None)]);
        stage = reach(stage, |stage| stage.lifecycle("u1") == "ready").await;
        assert!(state_of(&stage, &vm) >= before, "killed at effect {kill}");
    }
    stage.assert_sound();
    let left = stage.fake.world().kill_after.unwrap_or_default();
    kill - left
}

#[tokio::test(start_paused = true)]
async fn without_a_registry_a_kill_at_any_effect_loses_nothing_either() {
    for n in 1.. {
        if story_without_registry(n).await < n {
            assert!(n > 15, "only {n} effects were cut off");
            return;
        }
    }
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
    stage.until("refused", |stage| stage.told(Reason::HibernateRemoveFailed)).await;
    assert!(stage.fake.world().vms.contains_key(&vm));
    stage.until_lifecycle("u1", "hibernated").await;
    assert!(stage.fake.world().tags[&format!("{vm}:hibernate")].state >= 7, "what it did since is in it (I3)");
    stage.assert_sound();
}
