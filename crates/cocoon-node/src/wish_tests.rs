//! From pods to wishes, and from observations to what pods show.

use cocoon_meta::LifecycleState;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::{
    config::NodeConfig,
    owner::stage::pod,
    planner::observation::{How, Observation, Process, Reach, Seen},
    ports::{VmPhase, VmView, fake},
    reason::{Reason, Trouble},
    record::{Phase, Saved},
    status::{HostFacts, annotation_patch, status_patch},
    view::{Container, PodPhase, view},
    wish,
};

const NAME: &str = "vm.cocoonstack.io/name";
const MODE: &str = "cocoonset.cocoonstack.io/mode";
const IMAGE: &str = "cocoonset.cocoonstack.io/image";

fn read(extra: &[(&str, &str)]) -> Result<crate::planner::observation::Wish, Trouble> {
    wish::read(&pod("demo-0", "u1", extra), &NodeConfig::new("n"), false)
}

#[test]
fn a_name_that_is_not_the_pods_own_is_refused_with_the_right_one() {
    let long = format!("vk-{}", "x".repeat(60));
    for (extra, reason) in [
        (&[(NAME, "")][..], Reason::MissingVMName),
        (&[(NAME, "vk-default-demo-1-a7432a")], Reason::VMNameMismatch),
        (&[(NAME, "vk-default-demo-0")], Reason::VMNameMismatch),
        (&[(NAME, long.as_str())], Reason::VMNameMismatch),
    ] {
        let trouble = read(extra).unwrap_err();
        assert_eq!(trouble.reason, reason, "{extra:?}");
        assert!(trouble.message.contains("vk-default-demo-0-8aaf2c"), "{}", trouble.message);
    }
    let unhashed = pod("demo-0", "u1", &[(NAME, "vk-default-demo-0")]);
    assert!(wish::read(&unhashed, &NodeConfig::new("n"), true).is_ok(), "the older form of an adopted VM");
    let name = "a-pod-with-a-name-that-is-far-too-long-to-hibernate";
    let trouble = wish::read(&pod(name, "u1", &[]), &NodeConfig::new("n"), false).unwrap_err();
    assert_eq!(trouble.reason, Reason::VMNameTooLong);
}

#[test]
fn a_pod_is_told_at_once_all_that_it_lacks_and_what_to_write() {
    let keys = [NAME, "cocoonset.cocoonstack.io/managed", IMAGE, MODE];
    let values = [
        r#"vm.cocoonstack.io/name: "vk-default-demo-0-8aaf2c""#,
        r#"cocoonset.cocoonstack.io/managed: "true""#,
        r#"cocoonset.cocoonstack.io/image: "demo:latest""#,
        r#"cocoonset.cocoonstack.io/mode: "run""#,
    ];
    // Each bit is an annotation that the pod has not.
    for without in 1_usize..16 {
        let mut pod = pod("demo-0", "u1", &[]);
        let annotations = pod.metadata.annotations.as_mut().unwrap();
        let lacks = |index: usize| without & (1 << index) != 0;
        keys.iter()
            .enumerate()
            .filter(|(i, _)| lacks(*i))
            .for_each(|(_, key)| drop(annotations.remove(*key)));
        let said = match wish::read(&pod, &NodeConfig::new("n"), false) {
            Err(trouble) => trouble.message,
            Ok(wish) => match (wish.problem, wish.how) {
                (Some(trouble), _) | (None, How::Refused(trouble)) => trouble.message,
                // A mode that is missing means a clone: no error.
                (None, _) => {
                    assert_eq!(without, 8);
                    continue;
                }
            },
        };
        for (index, value) in values.iter().enumerate().take(3) {
            assert_eq!(said.contains(value), lacks(index), "{without:04b} {value}: {said}");
        }
        assert_eq!(said.contains(values[3]), lacks(2) && lacks(3), "{without:04b}: {said}");
        assert_eq!(said.contains("vm.cocoonstack.io/ip"), lacks(1), "{without:04b}: {said}");
        assert!(said.len() < 900, "{}", said.len());
    }
}

#[test]
fn where_a_vm_comes_from_follows_the_contracts_precedence() {
    let how = |extra: &[(&str, &str)]| match read(extra).unwrap().how {
        How::Run => "run".to_owned(),
        How::Clone(source) => format!("clone {} {} {}", source.repository, source.reference, source.local),
        How::Fork(source) => format!("fork {source}"),
        How::Refused(trouble) => trouble.reason.to_string(),
    };
    let (fork, dir) = ("vm.cocoonstack.io/fork-from", "vm.cocoonstack.io/clone-from-dir");
    for (extra, expected) in [
        (&[][..], "run"),
        (&[(MODE, "RUN")], "run"),
        (&[(MODE, "clone"), (IMAGE, "team/golden")], "clone team/golden latest team/golden"),
        (&[(MODE, "anything"), (IMAGE, "golden:v2")], "clone golden v2 golden:v2"),
        (
            &[(MODE, "clone"), (IMAGE, "vk-default-src-0-aaaaaa")],
            "clone vk-default-src-0-aaaaaa latest vk-default-src-0-aaaaaa:latest",
        ),
        (&[(MODE, "clone"), (IMAGE, "golden:hibernate")], "SourceConflict"),
        (&[(MODE, "clone"), (IMAGE, "https://x/y.img")], "InvalidAnnotation"),
        (&[(fork, "vk-default-src-0-aaaaaa")], "fork vk-default-src-0-aaaaaa"),
        (&[(fork, "vk-default-demo-0-8aaf2c")], "SourceConflict"),
        (&[(dir, "/x"), (MODE, "clone")], "NotSupported"),
        (&[(dir, "/x")], "SourceConflict"),
        (&[(IMAGE, "")], "ImageNotFound"),
    ] {
        assert_eq!(how(extra), expected, "{extra:?}");
    }
}

#[test]
fn a_local_name_fits_and_two_long_ones_stay_apart() {
    let local = |image: String| match read(&[(MODE, "clone"), (IMAGE, &image)]).unwrap().how {
        How::Clone(source) => source.local,
        other => panic!("{other:?}"),
    };
    let (one, two) = (local(format!("{}:v1", "a".repeat(80))), local(format!("{}:v2", "a".repeat(80))));
    assert!(one.len() <= 63 && two.len() <= 63 && one != two);
}

#[test]
fn the_policy_and_the_pods_role_decide_about_the_snapshot_on_delete() {
    let policy = "cocoonset.cocoonstack.io/snapshot-policy";
    for (value, expected) in [("always", true), ("never", false), ("main-only", false), ("", true)] {
        assert_eq!(read(&[(policy, value)]).unwrap().snapshot_on_delete, expected, "{value}");
    }
    let mut main = pod("demo-0", "u1", &[(policy, "main-only")]);
    main.metadata.owner_references = serde_json::from_value(
        json!([{"apiVersion": "v1", "kind": "CocoonSet", "name": "demo", "uid": "s"}]),
    )
    .unwrap();
    assert!(wish::read(&main, &NodeConfig::new("n"), false).unwrap().snapshot_on_delete);
}

#[test]
fn an_unmanaged_pod_stands_for_a_vm_anywhere_but_never_for_this_host_a_link_or_a_group() {
    let unmanaged = |ip: &str, id: &str| {
        let managed = ("cocoonset.cocoonstack.io/managed", "false");
        read(&[managed, ("vm.cocoonstack.io/id", id), ("vm.cocoonstack.io/ip", ip)]).unwrap()
    };
    for ip in ["10.11.12.13", "172.31.240.7", "192.0.2.1", "8.8.8.8"] {
        let wish = unmanaged(ip, "ext-1");
        assert_eq!((wish::external(&wish), wish.problem), (ip.parse().ok(), None), "{ip}");
    }
    for ip in
        ["127.0.0.1", "127.9.9.9", "0.0.0.0", "0.1.2.3", "169.254.169.254", "224.0.0.1", "255.255.255.255"]
    {
        let wish = unmanaged(ip, "ext-1");
        let problem = wish.problem.clone().unwrap();
        assert_eq!((wish::external(&wish), problem.reason), (None, Reason::InvalidAnnotation), "{ip}");
        assert!(problem.message.contains(ip) && problem.message.contains("vm.cocoonstack.io/ip"));
        let o = Observation { wish: Some(wish), ..Observation::default() };
        let shown = view(&o).unwrap();
        assert_eq!((shown.phase.word(), shown.ip), ("Pending", None), "{ip}");
        assert_eq!(shown.not_ready, Some(problem), "{ip}");
    }
    let nameless = unmanaged("10.11.12.13", "");
    assert_eq!(nameless.problem.as_ref().unwrap().reason, Reason::UnmanagedIncomplete);
    assert_eq!(wish::external(&nameless), None, "and it is not probed");
}

/// A running, reachable VM.
fn living() -> Observation {
    let vm = VmView {
        id: "ID1".into(),
        name: "vk-default-demo-0-8aaf2c".into(),
        phase: VmPhase::Running,
        pid: 1,
        macs: Vec::new(),
        hypervisor: "qemu".into(),
        came_up: true,
        links_down: false,
        stopped_in_order: false,
        started_at: None,
        starved: None,
        lost_tap: None,
    };
    Observation {
        wish: Some(read(&[]).unwrap()),
        record: Some(fake::record("vk-default-demo-0-8aaf2c")),
        reach: Reach { of: (&vm).into(), ip: Some([10, 0, 0, 2].into()), ready: true, ..Reach::default() },
        vm: Seen::Known(Some(vm)),
        ..Observation::default()
    }
}

fn at(phase: Phase) -> Observation {
    let record = fake::record("vk-default-demo-0-8aaf2c").in_phase(phase);
    Observation { record: Some(record), ..living() }
}

#[test]
fn what_a_pod_shows_follows_from_where_its_vm_is() {
    let saved = Saved { snapshot: "S".into(), digest: None };
    let lost = Trouble::new(Reason::VMGone, "gone");
    let failed =
        |o: Observation| Observation { failure: Some(Trouble::new(Reason::HibernatePushFailed, "no")), ..o };
    let ready = living().reach;
    let silent = Observation { reach: Reach { ready: false, ..ready.clone() }, ..living() };
    let another_vm = Process { vm_id: "ID0".into(), ..ready.of.clone() };
    let another_process = Process { pid: 2, ..ready.of.clone() };
    let another_start = Process { started: Some(jiff::Timestamp::UNIX_EPOCH), ..ready.of.clone() };
    let of = |of: Process| Observation { reach: Reach { of, ..ready.clone() }, ..living() };
    let pushed =
        Phase::Hibernating { captured: Some("S".into()), pushed: Some(saved.clone()), paused_at: None };
    for (what, o, phase, ready, lifecycle, id) in [
        ("no record", Observation { record: None, ..living() }, "Pending", false, "creating", false),
        ("creating", at(Phase::Creating { restore: None }), "Pending", false, "creating", false),
        ("failing", failed(at(Phase::Creating { restore: None })), "Pending", false, "failed", false),
        ("up", living(), "Running", true, "ready", true),
        ("up and silent", silent, "Running", false, "creating", true),
        ("up, and another VM was probed", of(another_vm), "Running", false, "creating", true),
        ("up, and its former process was probed", of(another_process), "Running", false, "creating", true),
        (
            "up, and its pid's former process was probed",
            of(another_start),
            "Running",
            false,
            "creating",
            true,
        ),
        ("up after a failed hibernation", failed(living()), "Running", true, "failed", true),
        (
            "hibernating",
            at(Phase::Hibernating { captured: None, pushed: None, paused_at: None }),
            "Running",
            false,
            "hibernating",
            true,
        ),
        ("pushed", at(pushed), "Running", false, "hibernating", false),
        (
            "rolling back",
            at(Phase::RollingBack { pushed: saved.clone(), paused_at: None }),
            "Running",
            true,
            "ready",
            true,
        ),
        ("hibernated", at(Phase::Hibernated { saved }), "Running", false, "hibernated", false),
        ("lost", at(Phase::Lost { trouble: lost }), "Failed", false, "failed", false),
    ] {
        let shown = view(&o).unwrap();
        assert_eq!(shown.phase.word(), phase, "{what}");
        assert_eq!(shown.not_ready.is_none(), ready, "{what}");
        assert_eq!(shown.lifecycle, LifecycleState::from(lifecycle), "{what}");
        assert_eq!(!shown.vm_id.is_empty(), id, "{what}");
        let running = matches!(shown.container, Container::Running(_));
        assert_eq!(running, shown.phase == PodPhase::Running && lifecycle != "hibernated", "{what}");
    }
}

#[test]
fn a_status_that_is_shown_already_is_not_written_and_times_change_only_with_their_status() {
    let host = HostFacts { address: "10.1.1.1".into() };
    let time = |second| jiff::Timestamp::from_second(second).unwrap();
    let apply = |pod: &Pod, patch: &serde_json::Value| -> Pod {
        let mut value = serde_json::to_value(pod).unwrap();
        json_patch::merge(&mut value, patch);
        serde_json::from_value(value).unwrap()
    };
    let first = pod("demo-0", "u1", &[]);
    let up = view(&living()).unwrap();
    let shown = apply(&first, &status_patch(&first, &up, &host, time(100)).unwrap());
    let shown = apply(&shown, &annotation_patch(&shown, &up).unwrap());
    assert_eq!(status_patch(&shown, &up, &host, time(200)), None);
    assert_eq!(annotation_patch(&shown, &up), None);
    let slept = view(&at(Phase::Hibernated { saved: Saved { snapshot: "S".into(), digest: None } })).unwrap();
    let asleep = apply(&shown, &status_patch(&shown, &slept, &host, time(300)).unwrap());
    let status = asleep.status.unwrap();
    assert_eq!((status.pod_ip, status.pod_ips), (None, None));
    let since = |kind: &str| {
        let condition = status.conditions.as_ref().unwrap().iter().find(|c| c.type_ == kind).unwrap();
        condition.last_transition_time.as_ref().unwrap().0.as_second()
    };
    assert_eq!((since("Ready"), since("Initialized")), (300, 100));
    assert_eq!(status.host_ip.as_deref(), Some("10.1.1.1"));
    let removed = annotation_patch(&shown, &slept).unwrap();
    assert!(removed["metadata"]["annotations"]["vm.cocoonstack.io/id"].is_null());
    assert_eq!(removed["metadata"]["uid"], "u1");
}
