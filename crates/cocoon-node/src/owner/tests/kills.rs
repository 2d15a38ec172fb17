//! The story, with a kill at every effect (I7).

use super::{HIBERNATE, reach, state_of, vm_of};
use crate::owner::stage::{Stage, pod};

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
