//! A VM whose tap was deleted under it, and an unmanaged pod that names this very host, as their pods show it.

use super::{
    stage::{Stage, not_ready, pod},
    tests::{HIBERNATE, booted, gone},
};
use crate::reason::Reason;

#[tokio::test(start_paused = true)]
async fn a_pod_whose_tap_was_deleted_says_so_at_once_and_a_hibernation_makes_it_anew() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().vms.get_mut(&vm).unwrap().view.lost_tap = Some("bt0-0".into());
    stage.until_lifecycle("u1", "failed").await;
    let (reason, message) = not_ready(&stage, "u1").unwrap();
    assert_eq!(reason, "TapLost", "though the last probe succeeded");
    assert!(
        message.contains("tap bt0-0 of VM") && message.contains(&vm) && message.contains(HIBERNATE),
        "{message}"
    );
    assert!(stage.annotation("u1", "vm.cocoonstack.io/lifecycle-state-message").starts_with("TapLost: "));
    tokio::time::sleep(std::time::Duration::from_secs(600)).await;
    let said = stage.api.said.lock().unwrap().iter().filter(|event| event.reason == Reason::TapLost).count();
    assert_eq!(said, 1, "once");
    let touched = ["start", "resume", "remove"].map(|call| stage.fake.calls(call));
    assert_eq!(touched, [0; 3], "a guest's memory is not given up for its network");
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "hibernated").await;
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "ready").await;
    assert_eq!(not_ready(&stage, "u1"), None);
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_tap_was_deleted_can_be_deleted() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.world().vms.get_mut(&vm).unwrap().view.lost_tap = Some("bt0-0".into());
    stage.until_lifecycle("u1", "failed").await;
    stage.delete("u1");
    gone(&stage, "u1").await;
    stage.assert_sound();
}

const IP: &str = "vm.cocoonstack.io/ip";

/// An unmanaged pod that names this address.
fn unmanaged(ip: &str) -> k8s_openapi::api::core::v1::Pod {
    let managed = ("cocoonset.cocoonstack.io/managed", "false");
    pod("ext-0", "u1", &[managed, ("vm.cocoonstack.io/id", "ext-1"), (IP, ip)])
}

#[tokio::test(start_paused = true)]
async fn an_unmanaged_pod_never_makes_this_host_ask_itself() {
    let stage = Stage::new(true).await;
    let own: std::net::Ipv4Addr = [172, 31, 240, 1].into();
    stage.fake.world().own.insert(own);
    stage.apply(unmanaged("172.31.240.1"));
    stage.until("it is refused", |stage| stage.told(Reason::InvalidAnnotation)).await;
    let (reason, message) = not_ready(&stage, "u1").unwrap();
    assert_eq!(reason, "InvalidAnnotation");
    assert!(
        message.contains(IP) && message.contains("172.31.240.1, an address of this node itself"),
        "{message}"
    );
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert!(stage.fake.world().probed.is_empty());
    assert_eq!(stage.api.said.lock().unwrap().len(), 1, "it is said once");
    stage.annotate("u1", &[(IP, Some("10.0.0.7"))]);
    stage.until_lifecycle("u1", "ready").await;
    assert_eq!(not_ready(&stage, "u1"), None);
}

#[tokio::test(start_paused = true)]
async fn an_address_that_becomes_this_hosts_own_is_not_asked_any_more_and_one_that_it_gave_up_is() {
    let stage = Stage::new(true).await;
    let ip: std::net::Ipv4Addr = [10, 0, 0, 7].into();
    stage.apply(unmanaged("10.0.0.7"));
    stage.until_lifecycle("u1", "ready").await;
    stage.fake.world().own.insert(ip);
    stage.until("it is refused", |stage| stage.told(Reason::InvalidAnnotation)).await;
    stage.fake.world().probed.clear();
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert!(stage.fake.world().probed.is_empty());
    stage.fake.world().own.clear();
    stage.until_lifecycle("u1", "ready").await;
}
