//! Owners on fake ports. Here is what their tests share.

mod deletes;
mod failures;
mod forks;
mod kills;
mod life;
mod refusals;

use std::time::Duration;

use super::stage::{Stage, pod};

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
