//! A guest that stands still because the host's disk is full, as its pod shows it, and the upkeep that ends it.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{
    stage::{Stage, not_ready},
    tests::{HIBERNATE, booted, gone},
};
use crate::{agent, reason::Reason};

const WHY: &str = "the guest of VM x stands still: the file system at /data is full; free at least 64 MiB";

fn starve(stage: &Stage, vm: &str, why: Option<&str>) {
    stage.fake.world().vms.get_mut(vm).unwrap().view.starved = why.map(str::to_owned);
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_guest_found_no_space_is_not_ready_until_it_goes_on() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    starve(&stage, &vm, Some(WHY));
    stage.until("it is not ready", |stage| not_ready(stage, "u1").is_some()).await;
    assert_eq!(not_ready(&stage, "u1").unwrap(), ("DiskFull".to_owned(), WHY.to_owned()));
    assert!(stage.told(Reason::DiskFull));
    let calls = ["start", "resume", "remove"].map(|call| stage.fake.calls(call));
    assert_eq!(calls, [0; 3], "it is left to the engine's upkeep");
    starve(&stage, &vm, None);
    stage.until("it is ready again", |stage| not_ready(stage, "u1").is_none()).await;
    let told =
        stage.api.events.lock().unwrap().iter().filter(|event| event.reason == Reason::DiskFull).count();
    assert_eq!(told, 2, "one event when it begins, one when it ends");
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_guest_found_no_space_can_be_hibernated_and_deleted() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    starve(&stage, &vm, Some(WHY));
    stage.until("it is not ready", |stage| not_ready(stage, "u1").is_some()).await;
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "hibernated").await;
    stage.delete("u1");
    gone(&stage, "u1").await;
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn the_upkeep_goes_on_whatever_becomes_of_it() {
    let stage = Stage::new(true).await;
    stage.fake.fail("tend", 2, Reason::EngineUnavailable);
    let ended = CancellationToken::new();
    let (context, token) = (stage.context.clone(), ended.clone());
    let upkeep = tokio::spawn(async move { agent::upkeep(&context, token).await });
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!((5..=6).contains(&stage.fake.calls("tend")), "{}", stage.fake.calls("tend"));
    ended.cancel();
    upkeep.await.unwrap();
}
