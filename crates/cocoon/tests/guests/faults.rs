//! Parts of `cocoon up` die, and nobody has to help.

use std::process::Command;

use serde_json::json;
use xtask::{lab::Lab, story};

use crate::common::{HANGS, create, lab, pod, wait_pod};

/// Process ids of the lab's network daemon.
fn daemons(lab: &Lab) -> Vec<u32> {
    let is_daemon = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("net\0daemon")
    };
    lab.pids().into_iter().filter(is_daemon).collect()
}

#[test]
fn a_network_daemon_that_is_killed_is_started_again_and_guests_have_addresses() {
    let lab = lab();
    story::import_images(&lab).unwrap();
    let before = daemons(&lab);
    let [pid] = before.as_slice() else { panic!("one network daemon, not {before:?}") };
    assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
    lab.wait("another network daemon", HANGS, || {
        let now = daemons(&lab);
        Ok((now.len() == 1 && now != before).then_some(()))
    })
    .unwrap();
    create(&lab, &pod("a", "vk-default-a-9efb36", json!({})));
    wait_pod(&lab, "a", "ready", story::is_ready);
    lab.kubectl(&["delete", "pod", "a", "--timeout=120s"]).expect("delete ends");
}
