//! The lifecycle planner: a pure function from what was observed to the one next step.
//!
//! Entry points: [`plan`], and [`thaw`] when the agent ends. It grows by rows. How to read it: a row asks for what it needs
//! ([`Step::Look`]) before it decides, writes the durable record ([`Step::Note`]) before an effect that
//! must survive a kill, and names one effect. Nothing is "done" because it was attempted; the next
//! observation shows it.
//!
//! Invariants kept here: I1 (a VM is made only when the engine says that there is none), I2 and I3
//! (evidence before every fresh boot; saved state is dropped only by design §5, "one life of a hibernate
//! tag"), I4 (`Hibernated` only with this round's snapshot in place), I5 (doubt leads to `Fail`, never
//! to an effect), I6 (`delete` has no row that waits for anything but a demanded snapshot).

mod create;
mod delete;
mod hibernate;
pub mod observation;
mod prepush;
#[cfg(test)]
mod tests;
mod up;

use std::time::Duration;

use crate::{
    planner::observation::{Cooling, Observation, Seen},
    ports::{CloneRequest, PushRequest, RunRequest, VmPhase},
    reason::{Reason, Trouble},
    record::{OwnerRecord, Phase},
};

/// How long an effect waits for the API to accept what the pod should show first.
pub const PUBLISH_WAIT: Duration = Duration::from_secs(10);
/// Two restarts in place are at least this far apart.
pub const RESTART_COOLDOWN: Duration = Duration::from_secs(30);
/// A guest that stops within this long of its wake, and was not ready yet, is woken again from the same
/// saved state. Later it has a life of its own, ready or not: its disk counts.
pub const WAKE_TRIAL: Duration = Duration::from_secs(30);
/// The longest pause of a guest by a hibernation, unless the configuration says otherwise.
pub const PAUSE_LIMIT: Duration = Duration::from_secs(120);

/// A push that is estimated to take longer than this is begun while the guest runs.
pub const LONG_PUSH: Duration = Duration::from_secs(20);

/// How long until what gave no answer is asked again, where only a wait is called for.
pub const ASK_AGAIN: Duration = Duration::from_secs(10);

/// Something to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The VM.
    Vm,
    /// Local snapshot `<vm>`.
    Saved,
    /// Local snapshot `<vm>-hibernate-import`.
    Import,
    /// Local snapshot `fork-<vm>`.
    Baseline,
    /// The clone source's local copy.
    Source,
    /// `<vm>:hibernate`.
    Tag,
    /// The fork source's baseline, by asking its owner.
    Fork,
    /// How long the push of a capture would take, by the last push.
    PushTime,
}

/// The one next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing until something changes.
    Rest,
    /// Nothing until something changes, or this long at most.
    Wait(Duration),
    /// Look at something.
    Look(Look),
    /// Write the record.
    Note(Box<OwnerRecord>),
    /// Forget the record.
    Forget,
    /// Make the image local.
    EnsureImage,
    /// Pull the clone source.
    PullSource,
    /// Pull `<vm>:hibernate` (or that digest) as `<vm>-hibernate-import`.
    PullImport {
        /// Manifest digest.
        digest: String,
    },
    /// Boot.
    Run(RunRequest),
    /// Clone.
    Clone(CloneRequest),
    /// Start from its own disk.
    Start,
    /// Let the paused guest go on.
    Resume,
    /// Remove the VM.
    RemoveVm {
        /// The word for a failure.
        blame: Reason,
    },
    /// Save `<vm>`, leaving the guest paused.
    Capture {
        /// The word for a failure.
        blame: Reason,
    },
    /// Save the running guest and push that capture's blobs ahead. Never fails a hibernation.
    Prepush(Box<PushRequest>),
    /// Push to `:hibernate`; the owner cuts it off at the pause limit.
    PushHibernate(Box<PushRequest>),
    /// Push to `:latest`.
    PushLatest(Box<PushRequest>),
    /// Save the running guest, push it where the pod asks for it, drop the local copy.
    LiveSnapshot {
        /// The request, as it stands on the pod: what is answered.
        reference: String,
        /// Where to.
        push: Box<PushRequest>,
    },
    /// Empty `:hibernate` if it holds this.
    DropTag {
        /// Manifest digest.
        digest: String,
        /// Snapshot id.
        snapshot: String,
    },
    /// Drop local snapshots.
    DropSnapshots(Vec<String>),
    /// Save `fork-<vm>`; the guest goes on.
    SaveBaseline,
    /// Answer those who wait for the baseline.
    AnswerBaseline(Result<crate::ports::SnapshotView, Trouble>),
    /// Give leases back.
    ReleaseLeases,
    /// End the pod in the API.
    Finalise,
    /// It cannot go on: say so, and try again later if that can help.
    Fail(Trouble),
}

impl Step {
    /// Compensations run even while a retry is not due: they bring back safety, not progress.
    #[must_use]
    pub const fn is_compensation(&self) -> bool {
        matches!(
            self,
            Self::Rest
                | Self::Wait(_)
                | Self::Look(_)
                | Self::Note(_)
                | Self::Forget
                | Self::Resume
                | Self::DropTag { .. }
                | Self::AnswerBaseline(_)
                | Self::Finalise
        )
    }
}

/// The next step. Every row of the lifecycle is behind this function.
#[must_use]
pub fn plan(o: &Observation) -> Step {
    let step = decide(o);
    match o.cooling {
        Cooling::None => step,
        Cooling::Soft if step.is_compensation() => step,
        Cooling::Hard if matches!(step, Step::Rest | Step::Wait(_) | Step::AnswerBaseline(_)) => step,
        Cooling::Soft | Cooling::Hard => Step::Rest,
    }
}

/// The agent ends: the next step towards a guest that does not stand paused because nobody goes on with what
/// it was paused for. [`Step::Rest`]: there is none. The capture is forgotten first, as before every resume;
/// the next agent begins anew.
#[must_use]
pub fn thaw(o: &Observation) -> Step {
    let Some(record) = &o.record else { return Step::Rest };
    match &o.vm {
        Seen::Known(Some(vm)) if vm.phase == VmPhase::Paused => {}
        Seen::Known(_) => return Step::Rest,
        Seen::Unknown | Seen::Failed(_) => return Step::Look(Look::Vm),
    }
    match (&record.phase, record.phase.captured()) {
        (Phase::Deleting { .. }, Some(_)) => delete::let_go(record),
        (_, Some(captured)) => hibernate::let_go(o, record, captured),
        (_, None) => Step::Resume,
    }
}

fn decide(o: &Observation) -> Step {
    let Some(wish) = &o.wish else { return idle(o) };
    if wish.deleting || wish.gone {
        return delete::plan(o, wish);
    }
    if wish.terminal {
        return Step::Rest;
    }
    if !wish.managed {
        return wish.problem.clone().map_or(Step::Rest, Step::Fail);
    }
    let Some(record) = &o.record else { return create::without_record(o, wish) };
    match &record.phase {
        Phase::Creating { restore } => create::creating(o, wish, record, restore.as_ref()),
        Phase::Up => up::plan(o, wish, record),
        Phase::Prepushing => prepush::plan(o, wish, record),
        Phase::Hibernating { .. } => hibernate::hibernating(o, wish, record),
        Phase::RollingBack { pushed, paused_at } => hibernate::rolling_back(o, record, pushed, *paused_at),
        Phase::Hibernated { saved } => hibernate::hibernated(o, wish, record, saved),
        Phase::Lost { .. } => refuse_baseline(o).unwrap_or(Step::Rest),
        // The API took its delete back, which it never does: finish the delete.
        Phase::Deleting { .. } => delete::plan(o, wish),
    }
}

/// No pod. A VM without a record is an orphan: reported elsewhere, never touched.
fn idle(o: &Observation) -> Step {
    refuse_baseline(o).unwrap_or(Step::Rest)
}

/// Tells those who wait for a baseline that there is nothing to take one of.
fn refuse_baseline(o: &Observation) -> Option<Step> {
    o.baseline_wanted.then(|| {
        let message = "the fork's source has no running VM; start or wake it, or remove fork-from".to_owned();
        Step::AnswerBaseline(Err(Trouble::new(Reason::ForkSourceUnavailable, message)))
    })
}

/// The value, or the step that gets it.
fn need<T>(seen: &Seen<T>, look: Look) -> Result<&T, Step> {
    match seen {
        Seen::Known(value) => Ok(value),
        Seen::Unknown => Err(Step::Look(look)),
        Seen::Failed(trouble) => Err(Step::Fail(trouble.clone())),
    }
}

/// Either branch of a row that asks for things with `?`.
fn either(result: Result<Step, Step>) -> Step {
    result.unwrap_or_else(|step| step)
}

fn note(record: &OwnerRecord, phase: Phase) -> Step {
    Step::Note(Box::new(record.in_phase(phase)))
}

/// Waits, at most [`PUBLISH_WAIT`], until the API accepted what the pod shows; then `step`.
fn published_first(o: &Observation, step: Step) -> Step {
    if o.published || o.unpublished_for >= PUBLISH_WAIT {
        return step;
    }
    Step::Wait(PUBLISH_WAIT.saturating_sub(o.unpublished_for))
}

/// Local name of a live snapshot while it is being pushed.
#[must_use]
pub fn live_name(vm_name: &str) -> String {
    format!("live-{vm_name}")
}
