//! What a finished step changes in what the owner knows. Pure bookkeeping on the observation.
//!
//! Entry points: [`learn`] for a success, [`doubt`] for a failure. Invariant: whatever a step may have
//! touched is `Unknown` afterwards unless the step itself gave the authoritative answer.

use std::time::Duration;

use crate::{
    planner::{
        Look, Step,
        observation::{Observation, Seen},
    },
    ports::{SnapshotView, TagView, VmPhase, VmView},
    reason::Trouble,
};

/// What a step found or made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing to tell.
    Done,
    /// A VM, or none.
    Vm(Option<VmView>),
    /// A snapshot, or none.
    Snapshot(Option<SnapshotView>),
    /// What the tag holds.
    Tag(Option<TagView>),
    /// How long something would take, if that is known.
    Time(Option<Duration>),
    /// A text: a local image ref, a digest.
    Text(String),
}

/// The step succeeded with this result.
pub(super) fn learn(o: &mut Observation, step: &Step, found: Found) {
    match (step, found) {
        (Step::Look(Look::Vm), Found::Vm(vm)) => o.vm = Seen::Known(vm),
        (Step::Look(Look::Tag), Found::Tag(tag)) => o.tag = Seen::Known(tag),
        (Step::Look(_), Found::Time(time)) => o.push_time = Seen::Known(time),
        (Step::Prepush(_), _) => o.prepushed = true,
        (Step::Look(look), Found::Snapshot(snapshot)) => *place(o, *look) = Seen::Known(snapshot),
        (Step::Run(_) | Step::Clone(_) | Step::Start, Found::Vm(vm)) => {
            o.vm = Seen::Known(vm);
            o.captured_now = None;
            o.released = false;
            o.fork = Seen::Unknown;
        }
        (Step::EnsureImage, Found::Text(image)) => o.image = Seen::Known(image),
        (Step::PullSource, Found::Snapshot(snapshot)) => o.source = Seen::Known(snapshot),
        (Step::PullImport { .. }, Found::Snapshot(snapshot)) => o.import = Seen::Known(snapshot),
        (Step::SaveBaseline, Found::Snapshot(snapshot)) => o.baseline = Seen::Known(snapshot),
        (Step::Capture { .. }, Found::Snapshot(snapshot)) => {
            o.captured_now = snapshot.as_ref().map(|snapshot| snapshot.id.clone());
            o.saved = Seen::Known(snapshot);
            o.latest_now = None;
            now_is(o, VmPhase::Paused);
        }
        (Step::Resume, _) => {
            o.captured_now = None;
            now_is(o, VmPhase::Running);
        }
        (Step::PushLatest(_), Found::Text(digest)) => o.latest_now = Some(digest),
        (Step::DropSnapshots(_), _) => {
            (o.saved, o.import, o.baseline) = (Seen::Unknown, Seen::Unknown, Seen::Unknown);
            o.dropped = true;
        }
        (Step::ReleaseLeases, _) => o.released = true,
        (Step::Finalise, _) => o.finalised = true,
        (step, _) => doubt(o, step),
    }
    o.trouble = o.trouble.take().filter(|_| step.is_compensation());
}

/// What the step promises of the VM that it was carried out on; a list that says otherwise is believed.
fn now_is(o: &mut Observation, phase: VmPhase) {
    if let Seen::Known(Some(vm)) = &mut o.vm {
        vm.phase = phase;
    }
}

/// The step failed, or its result says nothing: what it may have touched is not known any more.
pub(super) fn doubt(o: &mut Observation, step: &Step) {
    match step {
        Step::Run(_) | Step::Clone(_) => {
            (o.vm, o.fork, o.captured_now) = (Seen::Unknown, Seen::Unknown, None);
        }
        Step::Start
        | Step::Resume
        | Step::RemoveVm { .. }
        | Step::Capture { .. }
        | Step::Prepush(_)
        | Step::LiveSnapshot { .. } => {
            (o.vm, o.captured_now) = (Seen::Unknown, None);
        }
        Step::PullSource => o.source = Seen::Unknown,
        Step::PullImport { .. } => o.import = Seen::Unknown,
        Step::SaveBaseline => o.baseline = Seen::Unknown,
        Step::PushHibernate(_) | Step::DropTag { .. } => o.tag = Seen::Unknown,
        Step::DropSnapshots(_) => {
            (o.saved, o.import, o.baseline) = (Seen::Unknown, Seen::Unknown, Seen::Unknown);
        }
        _ => {}
    }
}

/// A look gave no answer.
pub(super) fn unanswered(o: &mut Observation, look: Look, trouble: Trouble) {
    match look {
        Look::Vm => o.vm = Seen::Failed(trouble),
        Look::Tag => o.tag = Seen::Failed(trouble),
        Look::Fork => o.fork = Seen::Failed(trouble),
        Look::PushTime => o.push_time = Seen::Failed(trouble),
        Look::Saved | Look::Import | Look::Baseline | Look::Source => {
            *place(o, look) = Seen::Failed(trouble);
        }
    }
}

/// A retry is due or the wish changed: looks are taken afresh, the VM's and finished work excepted.
pub(super) fn forget_looks(o: &mut Observation) {
    (o.saved, o.import, o.source) = (Seen::Unknown, Seen::Unknown, Seen::Unknown);
    (o.tag, o.fork, o.push_time) = (Seen::Unknown, Seen::Unknown, Seen::Unknown);
    ask_again(o);
}

/// What gave no answer is asked again; answers stand.
pub(super) fn ask_again(o: &mut Observation) {
    if matches!(o.tag, Seen::Failed(_)) {
        o.tag = Seen::Unknown;
    }
    if matches!(o.vm, Seen::Failed(_)) {
        o.vm = Seen::Unknown;
    }
    if matches!(o.baseline, Seen::Failed(_)) {
        o.baseline = Seen::Unknown;
    }
    if matches!(o.image, Seen::Failed(_)) {
        o.image = Seen::Unknown;
    }
}

fn place(o: &mut Observation, look: Look) -> &mut Seen<Option<SnapshotView>> {
    match look {
        Look::Import => &mut o.import,
        Look::Baseline => &mut o.baseline,
        Look::Source => &mut o.source,
        Look::Saved | Look::Vm | Look::Tag | Look::Fork | Look::PushTime => &mut o.saved,
    }
}

/// Engine calls that a step costs.
pub(super) const fn engine_calls(step: &Step) -> usize {
    match step {
        Step::Look(
            Look::Vm | Look::Saved | Look::Import | Look::Baseline | Look::Source | Look::PushTime,
        )
        | Step::EnsureImage
        | Step::Run(_)
        | Step::Clone(_)
        | Step::Start
        | Step::Resume
        | Step::RemoveVm { .. }
        | Step::Capture { .. }
        | Step::SaveBaseline
        | Step::PushHibernate(_)
        | Step::PushLatest(_) => 1,
        Step::PullSource | Step::PullImport { .. } | Step::Prepush(_) => 2,
        Step::LiveSnapshot { .. } => 4,
        Step::DropSnapshots(names) => names.len(),
        _ => 0,
    }
}

/// Engine calls that a failing pod's budget must allow before the step begins: its own, and those that follow
/// from it at once. A guest that is paused is brought back whatever the budget says; the capture that
/// paused it reserved what that takes.
pub(super) const fn engine_needs(step: &Step) -> usize {
    match step {
        Step::Resume | Step::PushHibernate(_) => 0,
        // A push and a resume.
        Step::Capture { .. } => 3,
        // A look whether the VM is there.
        Step::Run(_) | Step::Clone(_) | Step::Start => 2,
        step => engine_calls(step),
    }
}
