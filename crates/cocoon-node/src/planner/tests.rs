//! Every row of the planner as a sentence.

use jiff::Timestamp;

use super::{
    observation::{How, PodKey, Reach, Sizes, SourceRef},
    *,
};
use crate::{
    ports::{Guard, SnapshotView, TagView, VmPhase, VmView, fake},
    record::Saved,
};

const VM: &str = "vk-default-demo-0-8aaf2c";
const FORK: &str = "fork-vk-default-demo-0-8aaf2c";
const LIVE: &str = "live-vk-default-demo-0-8aaf2c";
const IMPORT: &str = "vk-default-demo-0-8aaf2c-hibernate-import";

fn now() -> Timestamp {
    Timestamp::from_second(10_000).unwrap()
}

fn wish() -> Wish {
    Wish {
        key: PodKey { namespace: "default".into(), name: "demo-0".into() },
        uid: "uid-1".into(),
        vm_name: VM.into(),
        managed: true,
        macos: false,
        image: "demo:latest".into(),
        how: How::Run,
        restore_marked: false,
        hibernate: false,
        deleting: false,
        gone: false,
        terminal: false,
        snapshot_on_delete: true,
        keep_snapshot: false,
        sizes: Sizes { cpu: 1, memory: 1 << 29, storage: 10 << 30 },
        hypervisor: "qemu".into(),
        force_pull: false,
        probe_port: None,
        generation: 0,
        annotations: Default::default(),
        live_request: None,
        id: String::new(),
        ip: String::new(),
        woken_from: String::new(),
        said_ready: false,
        problem: None,
    }
}

use super::observation::Wish;

fn vm(phase: VmPhase) -> Seen<Option<VmView>> {
    Seen::Known(Some(VmView {
        id: "ID1".into(),
        name: VM.into(),
        phase,
        pid: 1,
        macs: vec!["02:00:00:00:00:01".into()],
        hypervisor: "qemu".into(),
    }))
}

fn snapshot(name: &str, id: &str) -> Seen<Option<SnapshotView>> {
    Seen::Known(Some(SnapshotView { id: id.into(), name: name.into(), hypervisor: "qemu".into() }))
}

fn tag(id: &str) -> Seen<Option<TagView>> {
    Seen::Known(Some(TagView {
        digest: format!("sha256:{id}"),
        snapshot_id: id.into(),
        base_image: "demo:latest".into(),
    }))
}

fn saved(id: &str) -> Saved {
    Saved { snapshot: id.into(), digest: Some(format!("sha256:{id}")) }
}

fn up() -> OwnerRecord {
    OwnerRecord { vm_name: VM.into(), ..fake::record(VM) }
}

fn at(phase: Phase) -> Option<OwnerRecord> {
    Some(up().in_phase(phase))
}

/// A pod whose VM does not exist, everything looked at, nothing saved.
fn blank() -> Observation {
    Observation {
        wish: Some(wish()),
        registry: true,
        vm: Seen::Known(None),
        saved: Seen::Known(None),
        import: Seen::Known(None),
        baseline: Seen::Known(None),
        source: Seen::Known(None),
        tag: Seen::Known(None),
        image: Seen::Known("demo:latest".into()),
        published: true,
        now: now(),
        ..Observation::default()
    }
}

/// A pod whose VM runs.
fn living() -> Observation {
    let reach = Reach { vm_id: "ID1".into(), ip: None, ready: true, message: String::new() };
    Observation { record: Some(up()), vm: vm(VmPhase::Running), reach, ..blank() }
}

fn wishing(o: Observation, change: impl FnOnce(&mut Wish)) -> Observation {
    let mut wish = o.wish.clone().unwrap();
    change(&mut wish);
    Observation { wish: Some(wish), ..o }
}

fn hibernating(captured: Option<&str>, pushed: Option<&str>) -> Option<OwnerRecord> {
    at(Phase::Hibernating {
        captured: captured.map(str::to_owned),
        pushed: pushed.map(saved),
        paused_at: captured.map(|_| now()),
    })
}

fn deleting(live: bool, captured: Option<&str>, pushed: bool) -> Option<OwnerRecord> {
    let captured = captured.map(str::to_owned);
    at(Phase::Deleting { live, keep: None, captured, pushed, outrun: Vec::new() })
}

/// A short word for a step, with what matters of it.
fn word(step: &Step) -> String {
    match step {
        Step::Note(record) => match &record.phase {
            Phase::Creating { restore } => {
                format!("note creating {}", restore.as_ref().map_or("fresh", |saved| &saved.snapshot))
            }
            Phase::Up if record.restart_pending => "note restart".into(),
            Phase::Up => "note up".into(),
            Phase::Hibernating { captured, pushed, .. } => format!(
                "note hibernating {} {}",
                captured.as_deref().unwrap_or("-"),
                pushed.as_ref().map_or("-", |saved| &saved.snapshot)
            ),
            Phase::RollingBack { .. } => "note rolling back".into(),
            Phase::Hibernated { saved } => format!("note hibernated {}", saved.snapshot),
            Phase::Lost { trouble } => format!("note lost {}", trouble.reason),
            Phase::Deleting { live, keep, captured, pushed, outrun } => format!(
                "note deleting live={live} keep={} captured={} pushed={pushed} outrun={}",
                keep.as_ref().map_or("-", |saved| &saved.snapshot),
                captured.as_deref().unwrap_or("-"),
                outrun.join(",")
            ),
        },
        Step::Fail(trouble) => format!("fail {}", trouble.reason),
        Step::Look(look) => format!("look {look:?}"),
        Step::Clone(request) => format!("clone {} same={}", request.snapshot, request.same_machine),
        Step::PushHibernate(request) => format!("push {} as hibernate", request.snapshot),
        Step::PushLatest(request) => format!("push {} as latest", request.snapshot),
        Step::DropSnapshots(names) => format!("drop {}", names.join(" ")),
        Step::DropTag { snapshot, .. } => format!("drop tag {snapshot}"),
        Step::PullImport { digest } => format!("pull {digest}"),
        Step::RemoveVm { .. } => "remove".into(),
        Step::Capture { .. } => "capture".into(),
        Step::Wait(_) => "wait".into(),
        Step::AnswerBaseline(answer) => format!("answer {}", if answer.is_ok() { "yes" } else { "no" }),
        other => format!("{other:?}").split(['(', ' ', '{']).next().unwrap_or_default().to_lowercase(),
    }
}

fn check(rows: Vec<(&str, Observation, &str)>) {
    for (sentence, observation, expected) in rows {
        assert_eq!(word(&plan(&observation)), expected, "{sentence}");
    }
}

fn trouble(reason: Reason) -> Trouble {
    Trouble::new(reason, "because")
}

#[test]
fn a_pod_without_a_vm() {
    let fork = |o: Observation| wishing(o, |wish| wish.how = How::Fork("vk-src".into()));
    let source = SourceRef { repository: "r".into(), reference: "v1".into(), local: "r:v1".into() };
    let cloning = |o: Observation| wishing(o, |wish| wish.how = How::Clone(source.clone()));
    let fresh = || Observation { record: at(Phase::Creating { restore: None }), ..blank() };
    let forked = SnapshotView { id: "B".into(), name: "fork-vk-src".into(), hypervisor: "qemu".into() };
    check(vec![
        (
            "the engine is asked before anything is made",
            Observation { vm: Seen::Unknown, ..blank() },
            "look Vm",
        ),
        (
            "an engine that gives no answer makes nothing",
            Observation { vm: Seen::Failed(trouble(Reason::EngineUnavailable)), ..blank() },
            "fail EngineUnavailable",
        ),
        ("evidence is asked for before a boot", Observation { tag: Seen::Unknown, ..blank() }, "look Tag"),
        (
            "evidence that cannot be read boots nothing",
            Observation { tag: Seen::Failed(trouble(Reason::HibernateEvidenceUnavailable)), ..blank() },
            "fail HibernateEvidenceUnavailable",
        ),
        (
            "without a registry the local snapshot is the evidence",
            Observation { registry: false, saved: Seen::Unknown, ..blank() },
            "look Saved",
        ),
        (
            "the baseline of a former life goes before a fresh boot",
            Observation { baseline: snapshot(FORK, "B"), ..blank() },
            &format!("drop {FORK}"),
        ),
        ("the image is made local", Observation { image: Seen::Unknown, ..blank() }, "ensureimage"),
        ("the record is written before the engine is asked", blank(), "note creating fresh"),
        ("then the VM boots", fresh(), "run"),
        ("a missing clone source is pulled", cloning(fresh()), "pullsource"),
        (
            "a present one is cloned as a new machine",
            Observation { source: snapshot("r:v1", "S"), ..cloning(fresh()) },
            "clone r:v1 same=false",
        ),
        ("a fork asks its source's owner", fork(fresh()), "look Fork"),
        (
            "and clones the baseline as a new machine",
            Observation { fork: Seen::Known(forked), ..fork(fresh()) },
            "clone fork-vk-src same=false",
        ),
        (
            "a pod that cannot be served as it is makes nothing",
            wishing(blank(), |wish| wish.problem = Some(trouble(Reason::InvalidAnnotation))),
            "fail InvalidAnnotation",
        ),
        (
            "a source that this release does not serve is refused",
            wishing(blank(), |wish| wish.how = How::Refused(trouble(Reason::NotSupported))),
            "fail NotSupported",
        ),
        ("a pod that ended is left alone", wishing(blank(), |wish| wish.terminal = true), "rest"),
        (
            "a VM of its name that runs is adopted",
            Observation { vm: vm(VmPhase::Running), ..blank() },
            "note up",
        ),
        (
            "a half-made VM of its name is removed first",
            Observation { vm: vm(VmPhase::Creating), ..blank() },
            "remove",
        ),
        (
            "a half-made VM of this record is removed, too",
            Observation { vm: vm(VmPhase::Creating), ..fresh() },
            "remove",
        ),
        (
            "a VM that runs although the answer was never heard is taken",
            Observation { vm: vm(VmPhase::Running), ..fresh() },
            "note up",
        ),
        (
            "an id on the pod without a VM is a loss, not a reason to boot blank",
            wishing(blank(), |wish| wish.id = "ID0".into()),
            "note lost VMGone",
        ),
    ]);
}

#[test]
fn saved_state_wins() {
    let kept = || Observation { tag: tag("S"), ..blank() };
    let noted =
        |o: Observation| Observation { record: at(Phase::Creating { restore: Some(saved("S")) }), ..o };
    check(vec![
        ("a tag makes the boot a restore, pulled when it is not here", kept(), "pull sha256:S"),
        (
            "the local copy is used when it is what the tag holds",
            Observation { saved: snapshot(VM, "S"), ..noted(kept()) },
            &format!("clone {VM} same=true"),
        ),
        (
            "an older local copy is not",
            Observation { saved: snapshot(VM, "old"), ..noted(kept()) },
            "pull sha256:S",
        ),
        (
            "the import is cloned as the same machine",
            Observation { import: snapshot(IMPORT, "S"), ..noted(kept()) },
            &format!("clone {IMPORT} same=true"),
        ),
        (
            "an import of something else is dropped",
            Observation { import: snapshot(IMPORT, "other"), ..noted(kept()) },
            &format!("drop {IMPORT}"),
        ),
        (
            "the baseline stays: a wake goes on with the same lineage",
            Observation { baseline: snapshot(FORK, "B"), saved: snapshot(VM, "S"), ..kept() },
            "note creating S",
        ),
        (
            "another image is a conflict",
            wishing(kept(), |wish| wish.image = "other:1".into()),
            "fail HibernateImageConflict",
        ),
        (
            "another source is a conflict",
            wishing(kept(), |wish| wish.how = How::Fork("vk-src".into())),
            "fail HibernateSourceConflict",
        ),
        (
            "unless the operator marked it as a wake",
            wishing(kept(), |wish| {
                wish.how = How::Fork("vk-src".into());
                wish.restore_marked = true;
            }),
            "pull sha256:S",
        ),
        (
            "a marked wake without saved state boots nothing",
            wishing(blank(), |wish| wish.restore_marked = true),
            "fail HibernateEvidenceMissing",
        ),
        (
            "a snapshot of another hypervisor is refused with both names",
            wishing(Observation { saved: snapshot(VM, "S"), ..noted(kept()) }, |wish| {
                wish.hypervisor = "firecracker".into();
            }),
            "fail SnapshotIncompatible",
        ),
        (
            "a pod that wants to be hibernated and is saved is hibernated",
            wishing(kept(), |wish| wish.hibernate = true),
            "note hibernated S",
        ),
        (
            "a pod that wants to be hibernated and is nowhere is told so",
            wishing(blank(), |wish| wish.hibernate = true),
            "fail HibernateEvidenceMissing",
        ),
        (
            "saved state that the pod has consumed does not come back by itself",
            wishing(kept(), |wish| {
                (wish.id, wish.woken_from, wish.said_ready) = ("ID1".into(), "S".into(), true);
            }),
            "note lost VMGone",
        ),
        (
            "a wake that never reached ready is done again",
            wishing(Observation { saved: snapshot(VM, "S"), ..kept() }, |wish| {
                (wish.id, wish.woken_from) = ("ID1".into(), "S".into());
            }),
            "note creating S",
        ),
        (
            "a wake whose tag is gone uses the local copy it was promised",
            Observation { saved: snapshot(VM, "S"), ..noted(blank()) },
            &format!("clone {VM} same=true"),
        ),
        ("and boots nothing when that is gone, too", noted(blank()), "fail HibernateEvidenceMissing"),
    ]);
}

#[test]
fn a_vm_that_is_up() {
    let with = |change: fn(&mut OwnerRecord)| {
        let mut record = up();
        change(&mut record);
        Observation { record: Some(record), ..living() }
    };
    let woken = |o: Observation| {
        let mut record = o.record.clone().unwrap();
        (record.woken_from, record.woken_ready) = (Some(saved("S")), false);
        Observation { record: Some(record), reach: Reach::default(), ..o }
    };
    let asked = || Observation { baseline_wanted: true, ..living() };
    check(vec![
        ("is left alone", living(), "rest"),
        (
            "and paused by a capture that was cut off goes on",
            Observation { vm: vm(VmPhase::Paused), ..living() },
            "resume",
        ),
        (
            "and whose process died is started, once noted",
            Observation { vm: vm(VmPhase::Stopped), ..living() },
            "note restart",
        ),
        (
            "and whose restart was noted is started",
            Observation { vm: vm(VmPhase::Stopped), ..with(|r| r.restart_pending = true) },
            "start",
        ),
        (
            "and that cannot be started is lost",
            Observation { vm: vm(VmPhase::Stopped), failures: 1, ..with(|r| r.restart_pending = true) },
            "note lost RestartFailed",
        ),
        (
            "and that dies again within 30 s is lost, its disk kept",
            Observation {
                vm: vm(VmPhase::Stopped),
                ..with(|r| r.last_restart = Some(Timestamp::from_second(9_980).unwrap()))
            },
            "note lost RestartCooldown",
        ),
        ("and vanished is lost", Observation { vm: Seen::Known(None), ..living() }, "note lost VMGone"),
        (
            "and vanished before its wake reached ready is woken again",
            woken(Observation { vm: Seen::Known(None), tag: tag("S"), ..living() }),
            "note creating S",
        ),
        (
            "is not lost while the engine gives no answer",
            Observation { vm: Seen::Failed(trouble(Reason::EngineUnavailable)), ..living() },
            "fail EngineUnavailable",
        ),
        (
            "and is asked to hibernate begins to",
            wishing(living(), |wish| wish.hibernate = true),
            "note hibernating - -",
        ),
        (
            "and is a macOS guest is not hibernated",
            wishing(living(), |wish| (wish.hibernate, wish.macos) = (true, true)),
            "fail HibernateUnsupported",
        ),
        ("gives the baseline it has", Observation { baseline: snapshot(FORK, "B"), ..asked() }, "answer yes"),
        ("takes one when it has none", asked(), "savebaseline"),
        (
            "drops the import it was woken from",
            Observation { import: snapshot(IMPORT, "S"), ..with(|r| r.import_left = true) },
            &format!("drop {IMPORT}"),
        ),
    ]);
}

#[test]
fn a_hibernation() {
    let o = |record: Option<OwnerRecord>, phase: VmPhase| {
        wishing(Observation { record, vm: vm(phase), ..living() }, |wish| wish.hibernate = true)
    };
    let unwished = |o: Observation| wishing(o, |wish| wish.hibernate = false);
    let removed =
        |record: Option<OwnerRecord>| Observation { vm: Seen::Known(None), ..o(record, VmPhase::Paused) };
    use VmPhase::{Paused, Running, Stopped};
    check(vec![
        ("captures", o(hibernating(None, None), Running), "capture"),
        ("is called off before the capture", unwished(o(hibernating(None, None), Running)), "note up"),
        (
            "notes a capture that it made itself",
            Observation { captured_now: Some("S".into()), ..o(hibernating(None, None), Paused) },
            "note hibernating S -",
        ),
        ("lets a guest go on whose capture nobody knows", o(hibernating(None, None), Paused), "resume"),
        ("pushes the capture", o(hibernating(Some("S"), None), Paused), "push S as hibernate"),
        (
            "notes the push only when the tag is seen to hold the capture",
            Observation { tag: tag("S"), ..o(hibernating(Some("S"), None), Paused) },
            "note hibernating S S",
        ),
        (
            "is not deceived by an older tag",
            Observation { tag: tag("old"), ..o(hibernating(Some("S"), None), Paused) },
            "push S as hibernate",
        ),
        (
            "lets the guest go on when the push failed",
            Observation {
                trouble: Some(trouble(Reason::HibernatePushFailed)),
                ..o(hibernating(Some("S"), None), Paused)
            },
            "resume",
        ),
        (
            "lets the guest go on when the pause was too long",
            Observation {
                now: Timestamp::from_second(10_121).unwrap(),
                ..o(hibernating(Some("S"), None), Paused)
            },
            "resume",
        ),
        (
            "lets the guest go on when it is called off",
            unwished(o(hibernating(Some("S"), None), Paused)),
            "resume",
        ),
        (
            "forgets a capture after which the guest ran",
            o(hibernating(Some("S"), None), Running),
            "note hibernating - -",
        ),
        (
            "shows the pod without id before it removes",
            Observation { published: false, ..o(hibernating(Some("S"), Some("S")), Paused) },
            "wait",
        ),
        (
            "does not wait for the API for ever",
            Observation {
                published: false,
                unpublished_for: PUBLISH_WAIT,
                ..o(hibernating(Some("S"), Some("S")), Paused)
            },
            "remove",
        ),
        ("removes the VM", o(hibernating(Some("S"), Some("S")), Paused), "remove"),
        (
            "takes the push back when remove failed and the VM is there",
            Observation {
                trouble: Some(trouble(Reason::HibernateRemoveFailed)),
                ..o(hibernating(Some("S"), Some("S")), Paused)
            },
            "note rolling back",
        ),
        (
            "takes the push back when it is called off",
            unwished(o(hibernating(Some("S"), Some("S")), Paused)),
            "note rolling back",
        ),
        (
            "of a VM whose process died ends with what was captured",
            o(hibernating(Some("S"), None), Stopped),
            "push S as hibernate",
        ),
        (
            "of a VM whose process died before the capture starts it first",
            o(hibernating(None, None), Stopped),
            "note up",
        ),
        (
            "is done when the VM is gone and the tag holds this round's capture",
            Observation { tag: tag("S"), ..removed(hibernating(Some("S"), Some("S"))) },
            "note hibernated S",
        ),
        (
            "pushes the local copy when the VM is gone and the tag is not there",
            Observation { saved: snapshot(VM, "S"), ..removed(hibernating(Some("S"), None)) },
            "push S as hibernate",
        ),
        (
            "says so loudly when neither is there",
            removed(hibernating(Some("S"), Some("S"))),
            "note lost HibernateEvidenceMissing",
        ),
        (
            "is a loss when the VM was gone before the capture",
            removed(hibernating(None, None)),
            "note lost VMGone",
        ),
        (
            "does not believe a registry that gives no answer",
            Observation {
                tag: Seen::Failed(trouble(Reason::HibernateEvidenceUnavailable)),
                ..removed(hibernating(Some("S"), Some("S")))
            },
            "fail HibernateEvidenceUnavailable",
        ),
        (
            "guards the tag with what this owner last wrote",
            o(hibernating(Some("S"), None), Paused),
            "push S as hibernate",
        ),
    ]);
    let Step::PushHibernate(request) = plan(&o(hibernating(Some("S"), None), Paused)) else {
        panic!("a push")
    };
    assert_eq!(request.guard, Guard::AbsentOr(Vec::new()));
}

#[test]
fn a_rollback_and_a_hibernated_pod() {
    let back = |phase| Observation {
        record: at(Phase::RollingBack { pushed: saved("S") }),
        vm: vm(phase),
        ..living()
    };
    let slept = || {
        let record = at(Phase::Hibernated { saved: saved("S") });
        let o = Observation { record, released: true, vm: Seen::Known(None), tag: tag("S"), ..blank() };
        wishing(o, |wish| wish.hibernate = true)
    };
    use VmPhase::{Paused, Running};
    check(vec![
        ("the tag of this attempt goes first", Observation { tag: tag("S"), ..back(Paused) }, "drop tag S"),
        (
            "a tag that somebody else moved is left alone",
            Observation { tag: tag("other"), ..back(Paused) },
            "resume",
        ),
        (
            "id and address are shown before the guest goes on",
            Observation { published: false, ..back(Paused) },
            "wait",
        ),
        ("then the guest goes on", back(Paused), "resume"),
        ("then it is up", back(Running), "note up"),
        (
            "a VM that was removed after all is success",
            Observation { vm: Seen::Known(None), ..back(Paused) },
            "note hibernating S S",
        ),
        ("a hibernated pod rests", slept(), "rest"),
        ("its leases are given back", Observation { released: false, ..slept() }, "releaseleases"),
        (
            "its evidence is looked at after a restart",
            Observation { tag: Seen::Unknown, ..slept() },
            "look Tag",
        ),
        (
            "a tag that vanished is put back from the local copy",
            Observation { tag: Seen::Known(None), saved: snapshot(VM, "S"), ..slept() },
            "push S as hibernate",
        ),
        (
            "or the loss is said loudly and nothing boots",
            Observation { tag: Seen::Known(None), ..slept() },
            "fail HibernateEvidenceMissing",
        ),
        ("no longer wished, it wakes", wishing(slept(), |wish| wish.hibernate = false), "note creating S"),
        ("forks of it are refused", Observation { baseline_wanted: true, ..slept() }, "answer no"),
        (
            "a VM that somebody started by hand is taken",
            Observation { vm: vm(Running), ..slept() },
            "note up",
        ),
    ]);
}

#[test]
fn a_delete() {
    let going = |o: Observation| wishing(o, |wish| wish.deleting = true);
    let at_vm = |record, phase| going(Observation { record, vm: vm(phase), ..living() });
    let after = |record| going(Observation { record, vm: Seen::Known(None), ..living() });
    let cleaned = |record| Observation { released: true, dropped: true, ..after(record) };
    let never = |o: Observation| wishing(o, |wish| wish.snapshot_on_delete = false);
    let kept = || {
        at(Phase::Deleting {
            live: false,
            keep: Some(saved("S")),
            captured: None,
            pushed: false,
            outrun: vec![],
        })
    };
    let outrun = || {
        at(Phase::Deleting { live: true, keep: None, captured: None, pushed: true, outrun: vec!["S".into()] })
    };
    let was = |phase: Phase, vm_phase| going(Observation { record: at(phase), vm: vm(vm_phase), ..living() });
    use VmPhase::{Paused, Running, Stopped};
    check(vec![
        ("of a pod that never had a VM ends at once", going(blank()), "finalise"),
        (
            "notes what is alive first",
            going(living()),
            "note deleting live=true keep=- captured=- pushed=false outrun=",
        ),
        (
            "of a hibernated pod keeps the saved state",
            after(at(Phase::Hibernated { saved: saved("S") })),
            "note deleting live=false keep=S captured=- pushed=false outrun=",
        ),
        (
            "of a hibernation that reached its push finishes it",
            was(
                Phase::Hibernating { captured: Some("S".into()), pushed: Some(saved("S")), paused_at: None },
                Paused,
            ),
            "note deleting live=false keep=S captured=- pushed=false outrun=",
        ),
        (
            "of an unfinished hibernation outruns what that may have pushed",
            was(Phase::Hibernating { captured: Some("S".into()), pushed: None, paused_at: None }, Paused),
            "note deleting live=true keep=- captured=- pushed=false outrun=S",
        ),
        (
            "of a rollback outruns the push that is being taken back",
            was(Phase::RollingBack { pushed: saved("S") }, Paused),
            "note deleting live=true keep=- captured=- pushed=false outrun=S",
        ),
        ("captures a live VM", at_vm(deleting(true, None, false), Running), "capture"),
        (
            "notes its own capture",
            Observation { captured_now: Some("L".into()), ..at_vm(deleting(true, None, false), Paused) },
            "note deleting live=true keep=- captured=L pushed=false outrun=",
        ),
        (
            "takes the capture again when nobody knows it",
            at_vm(deleting(true, None, false), Paused),
            "resume",
        ),
        ("pushes it as latest", at_vm(deleting(true, Some("L"), false), Paused), "push L as latest"),
        (
            "notes the push",
            Observation {
                latest_now: Some("sha256:L".into()),
                ..at_vm(deleting(true, Some("L"), false), Paused)
            },
            "note deleting live=true keep=- captured=L pushed=true outrun=",
        ),
        ("then removes the VM", at_vm(deleting(true, Some("L"), true), Paused), "remove"),
        ("under policy never removes at once", never(at_vm(deleting(true, None, false), Running)), "remove"),
        (
            "without a registry removes at once",
            Observation { registry: false, ..at_vm(deleting(true, None, false), Running) },
            "remove",
        ),
        ("of a VM that does not run saves nothing", at_vm(deleting(false, None, false), Stopped), "remove"),
        (
            "of a VM whose process died meanwhile saves nothing",
            at_vm(deleting(true, None, false), Stopped),
            "remove",
        ),
        ("gives leases back", after(deleting(true, None, true)), "releaseleases"),
        (
            "drops local snapshots",
            Observation { released: true, ..after(deleting(true, None, true)) },
            &format!("drop {FORK} {IMPORT} {LIVE} {VM}"),
        ),
        (
            "keeps them when asked to",
            wishing(Observation { released: true, ..after(deleting(true, None, true)) }, |wish| {
                wish.keep_snapshot = true
            }),
            "finalise",
        ),
        (
            "drops a hibernated pod's copy only when the tag surely holds the state",
            Observation { released: true, tag: tag("S"), ..after(kept()) },
            &format!("drop {FORK} {IMPORT} {LIVE} {VM}"),
        ),
        (
            "keeps the copy when the registry gives no answer",
            Observation {
                released: true,
                tag: Seen::Failed(trouble(Reason::RegistryUnavailable)),
                ..after(kept())
            },
            &format!("drop {FORK} {IMPORT} {LIVE}"),
        ),
        (
            "keeps the copy when there is no registry",
            Observation { released: true, registry: false, ..after(kept()) },
            &format!("drop {FORK} {IMPORT} {LIVE}"),
        ),
        (
            "does not wait for a clean-up that cannot be done",
            Observation { failures: 3, ..after(deleting(true, None, true)) },
            "finalise",
        ),
        (
            "drops the tag that the live VM was woken from",
            Observation { tag: tag("S"), ..cleaned(outrun()) },
            "drop tag S",
        ),
        (
            "leaves a tag alone that holds something else",
            Observation { tag: tag("T"), ..cleaned(outrun()) },
            "note deleting live=true keep=- captured=- pushed=true outrun=",
        ),
        (
            "does not make the pod wait for a registry",
            Observation { tag: Seen::Failed(trouble(Reason::RegistryUnavailable)), ..cleaned(outrun()) },
            "finalise",
        ),
        (
            "but owes it the registry, so that nothing old comes back",
            Observation {
                finalised: true,
                tag: Seen::Failed(trouble(Reason::RegistryUnavailable)),
                ..cleaned(outrun())
            },
            "fail RegistryUnavailable",
        ),
        ("ends the pod", cleaned(deleting(true, None, true)), "finalise"),
        ("forgets it last", Observation { finalised: true, ..cleaned(deleting(true, None, true)) }, "forget"),
        (
            "of a pod that is gone from the API needs no end",
            wishing(cleaned(deleting(true, None, true)), |wish| wish.gone = true),
            "forget",
        ),
        (
            "of an unmanaged pod touches nothing",
            wishing(going(living()), |wish| wish.managed = false),
            "finalise",
        ),
        ("refuses forks", Observation { baseline_wanted: true, ..going(living()) }, "answer no"),
    ]);
}

#[test]
fn while_a_retry_is_not_due_only_safety_is_brought_back() {
    let soft = |o: Observation| Observation { cooling: Cooling::Soft, ..o };
    let hard = |o: Observation| Observation { cooling: Cooling::Hard, ..o };
    let paused = || Observation { vm: vm(VmPhase::Paused), ..living() };
    check(vec![
        ("no boot", soft(Observation { record: at(Phase::Creating { restore: None }), ..blank() }), "rest"),
        ("no second failure", soft(wishing(blank(), |wish| wish.restore_marked = true)), "rest"),
        ("a paused guest goes on", soft(paused()), "resume"),
        ("not even that after it failed itself", hard(paused()), "rest"),
    ]);
}
