//! Ready is what a probe of the present process says, and of no former one (I4).

use std::time::Duration;

use super::{
    stage::{Stage, pod},
    tests::booted,
};
use crate::ports::VmPhase;

/// What may happen to a VM's process between two looks at it.
type Death = fn(&Stage, &str);

const DEATHS: [(&str, Death); 2] = [
    ("it is found dead and started again", |stage, vm| {
        stage.fake.world().vms.get_mut(vm).unwrap().view.phase = VmPhase::Stopped;
    }),
    ("somebody else started it again before it was missed", |stage, vm| {
        stage.fake.world().vms.get_mut(vm).unwrap().view.pid += 1000;
    }),
];

fn ready(stage: &Stage) -> bool {
    cocoon_meta::is_pod_ready(&stage.pod("u1").unwrap()) || stage.lifecycle("u1") == "ready"
}

/// A ready pod whose process has changed to one that answers nobody, and is known to have.
async fn replaced(death: Death) -> Stage {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().slow.insert("probe".into(), Duration::from_millis(2500));
    tokio::time::sleep(Duration::from_secs(10)).await;
    let before = stage.fake.world().vms[&vm].view.pid;
    stage.fake.world().unreachable = true;
    death(&stage, &vm);
    let begun = tokio::time::Instant::now();
    stage.until("another process", |stage| stage.fake.world().vms[&vm].view.pid != before).await;
    stage.until("known", |stage| !ready(stage)).await;
    // The engine's list, which says so, is asked for once a second; three probes in vain would take longer.
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    stage
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_process_was_replaced_is_not_ready_before_the_new_one_answered_a_probe() {
    for (what, death) in DEATHS {
        let stage = replaced(death).await;
        let seen = stage.api.said_ready();
        for _ in 0..400 {
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert!(!ready(&stage), "{what}");
        }
        assert_eq!(stage.api.said_ready(), seen, "{what}: not for an instant either");
        stage.fake.world().unreachable = false;
        stage.until_lifecycle("u1", "ready").await;
        assert!(ready(&stage), "{what}");
        stage.assert_sound();
    }
}

#[tokio::test(start_paused = true)]
async fn no_live_snapshot_is_taken_of_a_guest_whose_new_process_has_not_answered_yet() {
    for (what, death) in DEATHS {
        let stage = replaced(death).await;
        stage.annotate("u1", &[("vm.cocoonstack.io/snapshot", Some("golden:v1"))]);
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(stage.fake.calls("save"), 0, "{what}");
        stage.fake.world().unreachable = false;
        stage.until("served", |stage| stage.fake.calls("push") == 1).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_address_stays_while_the_same_vm_starts_again() {
    let stage = replaced(DEATHS[0].1).await;
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(stage.annotation("u1", "vm.cocoonstack.io/ip").starts_with("172.31.240."));
    }
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_falls_silent_while_the_engine_gives_no_answer_is_not_ready_any_more() {
    let stage = Stage::new(true).await;
    booted(&stage).await;
    // A live snapshot makes the owner look at its VM again, in vain.
    stage.fake.fail("inspect", u32::MAX, crate::reason::Reason::EngineUnavailable);
    stage.fake.fail("list", u32::MAX, crate::reason::Reason::EngineUnavailable);
    stage.annotate("u1", &[("vm.cocoonstack.io/snapshot", Some("golden:v1"))]);
    stage.until("served", |stage| stage.fake.calls("push") == 1).await;
    stage.fake.world().unreachable = true;
    stage.until("not ready", |stage| !ready(stage)).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_to_be_probed_at_another_port_is_not_ready_by_the_old_one() {
    let stage = Stage::new(true).await;
    stage.apply(pod("demo-0", "u1", &[("vm.cocoonstack.io/probe-port", "22")]));
    stage.until_lifecycle("u1", "ready").await;
    stage.fake.world().slow.insert("probe".into(), Duration::from_millis(2500));
    stage.fake.world().unreachable = true;
    stage.annotate("u1", &[("vm.cocoonstack.io/probe-port", Some("80"))]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!ready(&stage));
}
