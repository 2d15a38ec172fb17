//! Forks and their baseline.

use super::{booted, state_of, vm_of};
use crate::{
    owner::stage::{Stage, pod},
    ports::VmPhase,
    reason::Reason,
};

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
