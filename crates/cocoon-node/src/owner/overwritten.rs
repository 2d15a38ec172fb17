//! What the agent says on a pod is true again soon after somebody wrote over it, and not at any price (I4, I9).

use std::time::Duration;

use super::{
    stage::Stage,
    tests::{HIBERNATE, booted},
};

const ID: &str = "vm.cocoonstack.io/id";
const IP: &str = "vm.cocoonstack.io/ip";
const LIFECYCLE: &str = "vm.cocoonstack.io/lifecycle-state";

fn writes(stage: &Stage) -> u32 {
    *stage.api.writes.lock().unwrap()
}

#[tokio::test(start_paused = true)]
async fn annotations_of_ours_that_somebody_changed_or_removed_are_put_right_on_a_live_pod() {
    let stage = Stage::new(true).await;
    booted(&stage).await;
    let right = [ID, IP, LIFECYCLE].map(|key| stage.annotation("u1", key));
    stage.annotate("u1", &[(ID, Some("forged")), (IP, Some("8.8.8.8")), (LIFECYCLE, None)]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!([ID, IP, LIFECYCLE].map(|key| stage.annotation("u1", key)), right);
}

#[tokio::test(start_paused = true)]
async fn so_they_are_on_a_hibernated_pod_which_has_no_id() {
    let stage = Stage::new(true).await;
    booted(&stage).await;
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "hibernated").await;
    stage.annotate("u1", &[(ID, Some("forged")), (LIFECYCLE, Some("ready"))]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!((stage.annotation("u1", ID), stage.lifecycle("u1")), (String::new(), "hibernated".into()));
    assert_eq!(stage.fake.calls("clone"), 0);
}

#[tokio::test(start_paused = true)]
async fn who_changes_them_all_the_time_is_corrected_a_few_times_a_minute_only() {
    let stage = Stage::new(true).await;
    booted(&stage).await;
    let before = writes(&stage);
    for turn in 0..120 {
        stage.annotate("u1", &[(LIFECYCLE, Some(&format!("forged-{turn}")))]);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let corrections = writes(&stage) - before;
    assert!((2..=5).contains(&corrections), "{corrections} in a minute");
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(stage.lifecycle("u1"), "ready", "the last word is true");
    let quiet = writes(&stage);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(writes(&stage), quiet, "and then it is quiet");
}
