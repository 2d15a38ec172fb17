//! Pods that are not ours, or not as they are.

use std::time::Duration;

use super::{HIBERNATE, ID, IP, gone, ready};
use crate::{
    owner::stage::{Stage, pod},
    reason::Reason,
};

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
