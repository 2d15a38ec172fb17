//! What the pod should show, derived from the observation alone. Pure.
//!
//! Entry point: [`view`]. Times here are facts (when the VM came up), never "now"; transition times are
//! kept by `status`, which merges a view into the pod that the API has.

use std::{collections::BTreeMap, net::Ipv4Addr};

use cocoon_meta::{AnnotationChanges, LifecycleState, LifecycleStatus, SnapshotStatus, VmRuntime, keys};
use jiff::Timestamp;

use crate::{
    planner::observation::{Observation, Silence, Wish},
    reason::{Reason, Trouble},
    record::{OwnerRecord, Phase},
};

/// Pod phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodPhase {
    /// Not up yet.
    Pending,
    /// Up, or hibernated.
    Running,
    /// Ended by a delete.
    Succeeded,
    /// Lost.
    Failed,
}

impl PodPhase {
    /// Its word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }
}

/// The one container's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Container {
    /// Not running, and why.
    Waiting(Trouble),
    /// Running since.
    Running(Option<Timestamp>),
    /// Ended.
    Terminated {
        /// Exit code.
        code: i32,
        /// Why.
        why: Trouble,
    },
}

/// What the pod should show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// Phase.
    pub phase: PodPhase,
    /// The one container.
    pub container: Container,
    /// `None`: ready. Else why not.
    pub not_ready: Option<Trouble>,
    /// The pod's address.
    pub ip: Option<Ipv4Addr>,
    /// Engine id, for the container id.
    pub vm_id: String,
    /// When the pod was taken up.
    pub accepted: Option<Timestamp>,
    /// Restarts in place.
    pub restarts: u32,
    /// Annotations to set or remove.
    pub annotations: AnnotationChanges,
    /// What the lifecycle annotation says.
    pub lifecycle: LifecycleState,
    /// Its message, until it is among the annotations.
    message: String,
}

/// What the pod at the head of the queue should show; `None`: nothing of ours (it is gone).
#[must_use]
pub(crate) fn view(o: &Observation) -> Option<View> {
    let wish = o.wish.as_ref().filter(|wish| !wish.gone)?;
    let mut view = if wish.managed { managed(o, wish) } else { unmanaged(o, wish) };
    if wish.deleting {
        deleting(o, &mut view);
    }
    finish(&mut view, wish.generation, !wish.deleting || o.failure.is_some());
    Some(view)
}

/// A pod that is refused before it has an owner.
#[must_use]
pub(crate) fn refused(trouble: &Trouble, generation: i64) -> View {
    let mut view = waiting(trouble.clone(), None);
    fail(&mut view, trouble);
    finish(&mut view, generation, true);
    view
}

/// A pod whose VM name still belongs to its former incarnation.
#[must_use]
pub(crate) fn waiting_behind(why: &Trouble) -> View {
    waiting(why.clone(), None)
}

/// Adds the lifecycle triple, or drops all annotations where they are of no use to anybody any more.
fn finish(view: &mut View, generation: i64, wanted: bool) {
    if !wanted {
        view.annotations.clear();
        return;
    }
    let status = LifecycleStatus {
        state: view.lifecycle.clone(),
        observed_generation: generation,
        message: std::mem::take(&mut view.message),
    };
    view.annotations.extend(status.changes());
}

fn fail(view: &mut View, why: &Trouble) {
    view.lifecycle = LifecycleState::Failed;
    view.message = why.to_string();
}

fn waiting(why: Trouble, record: Option<&OwnerRecord>) -> View {
    View {
        phase: PodPhase::Pending,
        not_ready: Some(why.clone()),
        container: Container::Waiting(why),
        ip: None,
        vm_id: String::new(),
        accepted: record.map(|record| record.accepted),
        restarts: record.map_or(0, |record| record.restarts),
        annotations: BTreeMap::new(),
        lifecycle: LifecycleState::Creating,
        message: String::new(),
    }
}

fn managed(o: &Observation, wish: &Wish) -> View {
    let Some(record) = &o.record else { return not_up(o, wish, None) };
    match &record.phase {
        Phase::Creating { .. } => not_up(o, wish, Some(record)),
        Phase::Up | Phase::RollingBack { .. } | Phase::Deleting { .. } => up(o, wish, record),
        Phase::Prepushing => hibernating(o, wish, record, false),
        Phase::Hibernating { pushed, .. } => hibernating(o, wish, record, pushed.is_some()),
        Phase::Hibernated { .. } => hibernated(o, wish, record),
        Phase::Lost { trouble } => lost(record, trouble),
    }
}

fn clear(view: &mut View) {
    view.ip = None;
    view.vm_id.clear();
    view.annotations.extend(VmRuntime::cleared());
    view.annotations.insert(keys::ANNOTATION_WOKEN_FROM.to_owned(), None);
}

fn not_up(o: &Observation, wish: &Wish, record: Option<&OwnerRecord>) -> View {
    let restoring = record.is_some_and(|record| matches!(record.phase, Phase::Creating { restore: Some(_) }));
    let what = if restoring { "woken from its saved state" } else { "made" };
    let message = format!("VM {} is being {what}", wish.vm_name);
    let mut view = match &o.failure {
        Some(failure) => {
            let mut view = waiting(failure.clone(), record);
            fail(&mut view, failure);
            view
        }
        None => waiting(Trouble::new(Reason::ContainerCreating, message), record),
    };
    // The id of a VM that is not there is a lie, except where it is the proof of a loss.
    if record.is_some() && !wish.id.is_empty() {
        clear(&mut view);
    }
    view
}

fn up(o: &Observation, wish: &Wish, record: &OwnerRecord) -> View {
    let running = o.runs();
    let probed = !record.vm_id.is_empty() && o.reach.of.vm_id == record.vm_id;
    // A VM that starts again has its address still.
    let ip = o.reach.ip.filter(|_| probed);
    // Nobody reaches a guest whose network is off, whatever was probed before.
    let ready = running
        && probed
        && o.answers()
        && o.silence.is_none()
        && o.starved.is_none()
        && o.tap_lost.is_none();
    let vm_id = record.vm_id.clone();
    let ip_text = ip.map_or_else(String::new, |ip| ip.to_string());
    let mut annotations = VmRuntime { vm_id: vm_id.clone(), ip: ip_text, vnc_port: 0 }.changes();
    let woken = record.woken_from.as_ref().map(|saved| saved.snapshot.clone());
    annotations.insert(keys::ANNOTATION_WOKEN_FROM.to_owned(), woken);
    if let Some(answer) = &record.live {
        let status = match &answer.failure {
            None => SnapshotStatus::pushed(&answer.reference),
            Some(why) => SnapshotStatus::failed(&answer.reference, why),
        };
        annotations.insert(keys::ANNOTATION_SNAPSHOT_STATUS.to_owned(), Some(status.to_json()));
    }
    let mut view = View {
        phase: PodPhase::Running,
        container: Container::Running(record.started),
        // A failed hibernation leaves a VM that serves: Ready is what the probe says.
        not_ready: (!ready).then(|| o.failure.clone().unwrap_or_else(|| not_probed(o, wish, running))),
        ip,
        vm_id,
        accepted: Some(record.accepted),
        restarts: record.restarts,
        annotations,
        lifecycle: if ready { LifecycleState::Ready } else { LifecycleState::Creating },
        message: String::new(),
    };
    if let Some(silence) = &o.silence {
        view.message = silence.trouble(&wish.vm_name).to_string();
        if silence.tries >= Silence::FAILED {
            view.lifecycle = LifecycleState::Failed;
        }
    }
    // Nothing but a person can help; who waits for a final word gets one.
    if let Some(lost) = &o.tap_lost {
        fail(&mut view, lost);
    }
    if let Some(failure) = &o.failure {
        fail(&mut view, failure);
    }
    view
}

fn not_probed(o: &Observation, wish: &Wish, running: bool) -> Trouble {
    if let Some(obstacle) = o.starved.as_ref().or(o.tap_lost.as_ref()) {
        return obstacle.clone();
    }
    if let Some(silence) = &o.silence {
        return silence.trouble(&wish.vm_name);
    }
    if let Some(obstacle) = o.reach.obstacle.as_ref().filter(|_| running) {
        return obstacle.clone();
    }
    let message = match (running, o.reach.message.as_str()) {
        (false, _) => format!("VM {} is not running", wish.vm_name),
        (true, "") => format!("VM {} was not probed yet", wish.vm_name),
        (true, why) => why.to_owned(),
    };
    Trouble::new(Reason::ProbeFailed, message)
}

fn hibernating(o: &Observation, wish: &Wish, record: &OwnerRecord, pushed: bool) -> View {
    let mut view = up(o, wish, record);
    if o.failure.is_none() {
        view.lifecycle = LifecycleState::Hibernating;
        view.message.clear();
        let message = format!("VM {} is being hibernated", wish.vm_name);
        view.not_ready = Some(Trouble::new(Reason::Hibernating, message));
    }
    // A VM whose removal failed is there: its id is no lie, and it is about to be taken back.
    let stays = |reason| matches!(reason, Reason::HibernateRemoveFailed | Reason::HibernateOutrun);
    let kept = o.failure.as_ref().is_some_and(|failure| stays(failure.reason));
    if pushed && !kept {
        clear(&mut view);
    }
    view
}

fn hibernated(o: &Observation, wish: &Wish, record: &OwnerRecord) -> View {
    let message =
        format!("VM {} is hibernated; remove {} to wake it", wish.vm_name, keys::ANNOTATION_HIBERNATE);
    let why = o.failure.clone().unwrap_or_else(|| Trouble::new(Reason::Hibernated, message));
    let mut view = waiting(why, Some(record));
    view.phase = PodPhase::Running;
    view.lifecycle = LifecycleState::Hibernated;
    if let Some(failure) = &o.failure {
        fail(&mut view, failure);
    }
    clear(&mut view);
    view
}

fn lost(record: &OwnerRecord, trouble: &Trouble) -> View {
    let mut view = waiting(trouble.clone(), Some(record));
    view.phase = PodPhase::Failed;
    view.container = Container::Terminated { code: 1, why: trouble.clone() };
    fail(&mut view, trouble);
    view
}

fn unmanaged(o: &Observation, wish: &Wish) -> View {
    let nameless = |problem: &&Trouble| problem.reason != Reason::HibernateUnsupported;
    if let Some(problem) = wish.problem.as_ref().filter(nameless) {
        let mut view = waiting(problem.clone(), None);
        fail(&mut view, problem);
        return view;
    }
    let ready = o.reach.ready;
    let mut view = View {
        phase: PodPhase::Running,
        container: Container::Running(None),
        not_ready: (!ready).then(|| not_probed(o, wish, true)),
        ip: wish.ip.parse().ok(),
        vm_id: wish.id.clone(),
        accepted: None,
        restarts: 0,
        annotations: BTreeMap::new(),
        lifecycle: if ready { LifecycleState::Ready } else { LifecycleState::Creating },
        message: String::new(),
    };
    if let Some(problem) = &wish.problem {
        fail(&mut view, problem);
    }
    view
}

/// A pod on its way out: not ready, and what it waits for is said.
fn deleting(o: &Observation, view: &mut View) {
    let message = "the pod is being deleted and its VM with it";
    let why = o.failure.clone().or_else(|| o.waits.clone());
    view.not_ready = Some(why.unwrap_or_else(|| Trouble::new(Reason::Terminating, message)));
    let vm_gone = matches!(o.vm.known(), Some(None));
    let ending = matches!(o.record.as_ref().map(|r| &r.phase), Some(Phase::Deleting { .. }));
    if vm_gone && ending && o.failure.is_none() {
        let why = Trouble::new(Reason::Terminating, "the VM was removed with its pod");
        view.phase = PodPhase::Succeeded;
        view.container = Container::Terminated { code: 0, why };
        view.ip = None;
    }
}
