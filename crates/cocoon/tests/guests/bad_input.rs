//! Bad input gives one clear error that names object, reason and way out, and loses nothing.

use std::time::{Duration, Instant};

use crate::common::{HANGS, create, has_event, lab, pod, wait_failed};
use serde_json::json;
use xtask::{lab::Lab, story};

/// Names are VMNameForPod of `default` and the pod's name.
const A: (&str, &str) = ("a", "vk-default-a-9efb36");

fn refused(name: &str, vm: &str, annotations: serde_json::Value, reason: &str, says: &str) {
    let lab = lab();
    create(&lab, &pod(name, vm, annotations));
    let message = wait_failed(&lab, name);
    assert!(message.contains(says), "{message}");
    // The pod and its events are written one after the other.
    lab.wait(&format!("event {reason}"), HANGS, || Ok(has_event(&lab, name, reason).then_some(())))
        .unwrap_or_else(|error| panic!("{error:#}; message: {message}"));
    assert!(lab.vms().expect("vm list").is_empty(), "something was half made");
    lab.kubectl(&["delete", "pod", name, "--timeout=120s"]).expect("delete ends");
}

#[test]
fn an_unknown_image_is_named_with_the_command_that_imports_it() {
    refused(
        A.0,
        A.1,
        json!({"cocoonset.cocoonstack.io/image": "nobody/has:this"}),
        "ImageNotFound",
        "nobody/has:this",
    );
}

#[test]
fn a_vm_name_that_is_not_the_pods_own_is_refused() {
    refused(A.0, "vk-default-other-123456", json!({}), "VMNameMismatch", A.1);
}

#[test]
fn a_vm_name_over_46_characters_is_refused() {
    let (name, vm) = (
        "a-pod-with-a-rather-long-name-indeed-0",
        "vk-default-a-pod-with-a-rather-long-name-indeed-0-2ac6f1",
    );
    refused(name, vm, json!({}), "VMNameTooLong", "46");
}

#[test]
fn malformed_annotations_are_refused_before_anything_is_made() {
    refused(A.0, A.1, json!({"cocoonset.cocoonstack.io/storage": "many"}), "InvalidResources", "storage");
}

#[test]
fn an_unmanaged_pod_cannot_be_hibernated() {
    let lab = lab();
    let mut unmanaged = pod(
        A.0,
        A.1,
        json!({
            "cocoonset.cocoonstack.io/managed": null,
            "vm.cocoonstack.io/id": "external-1",
            "vm.cocoonstack.io/ip": "10.11.12.13",
        }),
    );
    unmanaged["metadata"]["annotations"]["vm.cocoonstack.io/hibernate"] = "true".into();
    create(&lab, &unmanaged);
    lab.wait("event HibernateUnsupported", HANGS, || {
        Ok(has_event(&lab, A.0, "HibernateUnsupported").then_some(()))
    })
    .unwrap();
    lab.kubectl(&["delete", "pod", A.0, "--timeout=120s"]).expect("delete ends");
}

#[test]
fn a_failing_pod_costs_at_most_ten_writes_a_minute() {
    let lab = lab();
    create(&lab, &pod(A.0, A.1, json!({"cocoonset.cocoonstack.io/image": "nobody/has:this"})));
    wait_failed(&lab, A.0);
    let version = || {
        let text = lab.kubectl(&["get", "pods,events", "-o", "json"]).expect("objects");
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON")["items"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|item| {
                item["metadata"]["resourceVersion"].as_str().unwrap_or("0").parse::<u64>().unwrap_or(0)
            })
            .max()
            .unwrap_or(0)
    };
    let (before, begun) = (version(), Instant::now());
    std::thread::sleep(Duration::from_secs(30));
    let writes = version() - before;
    // It may have been longer, on a machine that stood still meanwhile.
    let seconds = begun.elapsed().as_secs();
    // The node's own lease and heartbeat are writes too: one in ten seconds and one a minute.
    assert!(writes <= seconds.div_ceil(6) + seconds.div_ceil(10) + 1, "{writes} writes in {seconds} s");
}

#[test]
fn a_taken_port_is_named_with_the_flag_that_chooses_another() {
    let first = lab();
    let output = first
        .command(&first.built().cocoon)
        .args(["up", "--data-dir"])
        .arg(first.scratch().join("second"))
        .arg("--boot-bundle")
        .arg(&first.built().bundle)
        .output()
        .expect("cocoon starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("127.0.0.1:6443") && error.contains("--listen"), "{error}");
}

#[test]
fn a_data_folder_of_another_version_is_refused_and_untouched() {
    let mut lab = Lab::prepare(crate::common::built(), &[]).expect("a namespace");
    std::fs::create_dir_all(lab.data()).unwrap();
    std::fs::write(lab.data().join("version"), "99\n").unwrap();
    let error = format!("{:#}", lab.up().unwrap_err());
    assert!(error.contains("version 99") && error.contains("--data-dir"), "{error}");
    let said = lab.cocoon_said(&["image", "list"]).unwrap();
    assert!(said.code == 1 && said.stderr.contains("version 99"), "{}", said.stderr);
    assert_eq!(std::fs::read_dir(lab.data()).unwrap().count(), 1, "the version and nothing more");
}

#[test]
fn without_a_certificate_every_route_of_every_port_is_refused() {
    let lab = lab();
    for url in [
        "https://127.0.0.1:6443/api/v1/pods",
        "https://127.0.0.1:6443/nowhere",
        "https://127.0.0.1:10250/pods",
        "https://127.0.0.1:10250/exec/default/a/agent",
        "https://127.0.0.1:10250/nowhere",
    ] {
        let arguments =
            ["--insecure", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", url];
        let output = lab.command("curl".as_ref()).args(arguments).output().expect("curl");
        let code = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(code == "401" || code == "403", "{url}: {code}");
    }
}

#[test]
fn from_inside_a_guest_every_host_port_but_dhcp_is_closed() {
    let lab = lab();
    story::import_images(&lab).unwrap();
    create(&lab, &pod(A.0, A.1, json!({})));
    crate::common::wait_pod(&lab, A.0, "ready", story::is_ready);
    let gateway = lab.kubectl(&[
        "exec",
        A.0,
        "--",
        "sh",
        "-c",
        "ip route | sed -n 's/default via \\([0-9.]*\\).*/\\1/p'",
    ]);
    let gateway = gateway.unwrap().trim().to_owned();
    assert!(!gateway.is_empty());
    let listener = Listener::start(&lab, "7070");
    let connect = |port: &str| format!("timeout 3 nc -w 2 {gateway} {port} </dev/null; echo code $?");
    lab.wait("the host's own port", HANGS, || {
        let said = lab.command("/bin/busybox".as_ref()).args(["sh", "-c", &connect("7070")]).output()?;
        Ok(String::from_utf8_lossy(&said.stdout).contains("code 0").then_some(()))
    })
    .expect("from the host itself the port is open, so that the check below means something");
    for port in ["7070", "22", "6443", "10250", "53", "80"] {
        let said = lab.kubectl(&["exec", A.0, "--", "sh", "-c", &connect(port)]).unwrap();
        // 1: no connection, 143: given up by `timeout`; another code says that nothing was tried.
        assert!(
            said.contains("code 1\n") || said.contains("code 143"),
            "port {port} of the host, from the guest: {said}"
        );
    }
    drop(listener);
    let pinged = lab
        .kubectl(&["exec", A.0, "--", "sh", "-c", &format!("ping -c1 -W2 {gateway}; echo code $?")])
        .unwrap();
    assert!(!pinged.contains("code 0"), "the host answers a guest's ping: {pinged}");
    lab.kubectl(&["delete", "pod", A.0, "--timeout=120s"]).expect("delete ends");
}

/// Something on the host that answers on all its addresses.
struct Listener(std::process::Child);

impl Listener {
    fn start(lab: &Lab, port: &str) -> Self {
        let mut command = lab.command("/bin/busybox".as_ref());
        Self(command.args(["nc", "-ll", "-p", port, "-e", "/bin/true"]).spawn().expect("busybox starts"))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
