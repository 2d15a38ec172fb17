//! Every row of the planner as a sentence.

mod ahead;
mod create;
mod delete;
mod hibernate;
mod up;

use jiff::Timestamp;

use super::{
    observation::{How, PodKey, Process, Reach, Sizes, SourceRef, Wish},
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

fn vm(phase: VmPhase) -> Seen<Option<VmView>> {
    Seen::Known(Some(VmView {
        id: "ID1".into(),
        name: VM.into(),
        phase,
        pid: 1,
        macs: vec!["02:00:00:00:00:01".into()],
        hypervisor: "qemu".into(),
        came_up: true,
        links_down: false,
        stopped_in_order: false,
        started_at: None,
        starved: None,
        lost_tap: None,
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
        vm_name: VM.into(),
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
        push_time: Seen::Known(None),
        published: true,
        now: now(),
        ..Observation::default()
    }
}

/// A pod whose VM runs.
fn living() -> Observation {
    let vm = vm(VmPhase::Running);
    let of = vm.known().and_then(Option::as_ref).map(Process::from).unwrap();
    let reach = Reach { of, ready: true, ..Reach::default() };
    Observation { record: Some(up()), vm, reach, ..blank() }
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
                "note hibernating {} {}{}{}",
                captured.as_deref().unwrap_or("-"),
                pushed.as_ref().map_or("-", |saved| &saved.snapshot),
                if record.strays.is_empty() { "" } else { " strays " },
                record.strays.join(",")
            ),
            Phase::Prepushing => "note prepushing".into(),
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

/// The rows of a table that are wrong, each in a line.
fn wrong(rows: Vec<(&str, Observation, &str)>) -> Vec<String> {
    let judged = rows.into_iter().map(|(sentence, o, expected)| (sentence, word(&plan(&o)), expected));
    let wrong = judged.filter(|(_, step, expected)| step != expected);
    wrong.map(|(sentence, step, expected)| format!("{sentence}: {expected:?}, not {step:?}")).collect()
}

/// Each row of a law: a sentence, what is seen, and the step that follows. All wrong rows are told at once.
fn check(rows: Vec<(&str, Observation, &str)>) {
    let wrong = wrong(rows);
    assert!(wrong.is_empty(), "expected:\n{}", wrong.join("\n"));
}

#[test]
fn a_table_tells_all_of_its_wrong_rows() {
    let told = wrong(vec![("a", living(), "sleep"), ("b", living(), "rest"), ("c", blank(), "sleep")]);
    assert_eq!(told, [r#"a: "sleep", not "rest""#, r#"c: "sleep", not "note creating fresh""#]);
}

fn trouble(reason: Reason) -> Trouble {
    Trouble::new(reason, "because")
}
