//! Pods that go, and what comes back after them.

use std::time::Duration;

use super::{HIBERNATE, ID, booted, gone, hibernated, state_of};
use crate::{
    owner::stage::{Stage, pod},
    reason::Reason,
};

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
