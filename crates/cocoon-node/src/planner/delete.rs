//! Rows of the end of an incarnation: deleted in the API, or gone from it.
//!
//! snapshot (only if demanded, only of a live VM) → remove → leases → local snapshots → rule (d) →
//! end the pod → forget. Each row is idempotent; none waits for anything but a demanded snapshot (I6).

use cocoon_meta::{fork_baseline_name, hibernate_import_name};

use crate::{
    planner::{
        Look, Step, either, live_name, need,
        observation::{Observation, Seen, Wish},
    },
    ports::{Guard, PushRequest, VmPhase, VmView},
    reason::Reason,
    record::{OwnerRecord, Phase, Saved},
};

/// How many failures of a clean-up are put up with before the delete goes on without it.
const CLEANUP_TRIES: u32 = 3;

pub(super) fn plan(o: &Observation, wish: &Wish) -> Step {
    if o.baseline_wanted
        && let Some(refusal) = super::refuse_baseline(o)
    {
        return refusal;
    }
    match &o.record {
        _ if !wish.managed => finalise_or(o, wish, Step::Rest),
        None => either(without_record(o, wish)),
        Some(record) => either(with_record(o, wish, record)),
    }
}

fn without_record(o: &Observation, wish: &Wish) -> Result<Step, Step> {
    match need(&o.vm, Look::Vm)? {
        Some(vm) if vm.phase == VmPhase::Creating => Ok(Step::RemoveVm { blame: Reason::DeleteRemoveFailed }),
        // Its name is this pod's own, so it is this pod's VM.
        Some(vm) => Ok(begin(&OwnerRecord::new(wish, o.now, Phase::Up), wish, Some(vm))),
        None => Ok(finalise_or(o, wish, Step::Rest)),
    }
}

/// Ends the pod in the API, if it is still there; then `after`.
fn finalise_or(o: &Observation, wish: &Wish, after: Step) -> Step {
    if wish.gone || o.finalised { after } else { Step::Finalise }
}

/// The first durable word about the delete: what was alive, what must survive.
fn begin(record: &OwnerRecord, wish: &Wish, vm: Option<&VmView>) -> Step {
    let alive = vm.is_some_and(|vm| matches!(vm.phase, VmPhase::Running | VmPhase::Paused));
    let keep = match &record.phase {
        Phase::Hibernated { saved } | Phase::Creating { restore: Some(saved) } => Some(saved.clone()),
        Phase::Hibernating { pushed, .. } => pushed.clone(),
        _ => None,
    };
    // A wake that never became ready and died: what it was woken from is still all there is.
    let keep = keep.or_else(|| record.woken_from.clone().filter(|_| !alive && !record.woken_ready));
    // A hibernation that reached its push is finished, not turned into a live delete.
    let finished = matches!(record.phase, Phase::Hibernating { pushed: Some(_), .. });
    // What was captured and not outrun since is the newest state, whatever became of the VM.
    let running = vm.is_some_and(|vm| vm.phase == VmPhase::Running);
    let captured = record.phase.captured().filter(|_| !running && !finished).cloned();
    let live = (alive || captured.is_some()) && !finished;
    let mut next = record.in_phase(Phase::Deleting {
        live,
        keep: keep.filter(|_| !live),
        captured,
        pushed: false,
        // A pod that went without a delete may live elsewhere now, from just that tag (I1): hands off.
        outrun: if live && !wish.gone { outrun(record) } else { Vec::new() },
    });
    next.snapshot_on_delete = wish.snapshot_on_delete;
    next.keep_snapshot = wish.keep_snapshot;
    next.annotations.clone_from(&wish.annotations);
    if let Some(vm) = vm {
        next.macs.clone_from(&vm.macs);
        next.vm_id.clone_from(&vm.id);
    }
    Step::Note(Box::new(next))
}

/// Snapshot ids that a live VM has outrun: what it woke from, and what an unfinished hibernation of it
/// may have pushed. A tag that holds one of them would bring an old state back.
fn outrun(record: &OwnerRecord) -> Vec<String> {
    let attempt = match &record.phase {
        Phase::Hibernating { captured, .. } => captured.clone(),
        Phase::RollingBack { pushed, .. } => Some(pushed.snapshot.clone()),
        Phase::Creating { restore } => restore.as_ref().map(|saved| saved.snapshot.clone()),
        _ => None,
    };
    let woken = record.woken_from.iter().map(|saved| &saved.snapshot);
    woken.chain(&record.strays).cloned().chain(attempt).collect()
}

fn with_record(o: &Observation, wish: &Wish, record: &OwnerRecord) -> Result<Step, Step> {
    let vm = need(&o.vm, Look::Vm)?.as_ref();
    let Phase::Deleting { live, keep, captured, pushed, outrun } = &record.phase else {
        return Ok(begin(record, wish, vm));
    };
    let demanded = *live && !*pushed && wish.snapshot_on_delete && o.registry;
    if demanded && let Some(step) = save(o, wish, record, vm, captured.as_ref())? {
        return Ok(step);
    }
    if vm.is_some() {
        return Ok(Step::RemoveVm { blame: Reason::DeleteRemoveFailed });
    }
    clean(o, wish, record, keep.as_ref(), outrun)
}

/// The demanded snapshot. `None`: nothing can be saved of it.
fn save(
    o: &Observation,
    wish: &Wish,
    record: &OwnerRecord,
    vm: Option<&VmView>,
    captured: Option<&String>,
) -> Result<Option<Step>, Step> {
    let blame = Reason::DeleteSnapshotFailed;
    let push = |id: &String| match &o.latest_now {
        Some(_) => with_capture(record, Some(id.clone()), true),
        None => Step::PushLatest(Box::new(latest(wish, record, id))),
    };
    Ok(match (vm.map(|vm| vm.phase), captured) {
        (Some(VmPhase::Running), None) => Some(Step::Capture { blame }),
        // The guest ran on after the capture that was noted: it does not count.
        (Some(VmPhase::Running), Some(_)) => Some(with_capture(record, None, false)),
        (Some(VmPhase::Paused), None) => Some(match &o.captured_now {
            Some(id) => with_capture(record, Some(id.clone()), false),
            None => Step::Resume,
        }),
        // The process may be gone by now: what was captured is here all the same.
        (phase, Some(id)) => match need(&o.saved, Look::Saved)? {
            Some(local) if local.id == *id => Some(push(id)),
            _ if phase == Some(VmPhase::Paused) => Some(with_capture(record, None, false)),
            _ => None,
        },
        (Some(VmPhase::Stopped | VmPhase::Creating) | None, None) => None,
    })
}

/// The guest goes on: what was captured of it does not count.
pub(super) fn let_go(record: &OwnerRecord) -> Step {
    with_capture(record, None, false)
}

fn with_capture(record: &OwnerRecord, id: Option<String>, done: bool) -> Step {
    let mut next = record.clone();
    if let Phase::Deleting { captured, pushed, .. } = &mut next.phase {
        *captured = id;
        *pushed = done;
    }
    Step::Note(Box::new(next))
}

/// `:latest`, or `:orphan-<uid>` when the API does not have the pod any more: another node may serve its
/// name by now, so its tags are not ours to write (I1).
fn latest(wish: &Wish, record: &OwnerRecord, snapshot: &str) -> PushRequest {
    let tag = if wish.gone {
        format!("orphan-{}", record.uid)
    } else {
        cocoon_meta::keys::DEFAULT_SNAPSHOT_TAG.to_owned()
    };
    PushRequest {
        snapshot: snapshot.to_owned(),
        repository: record.vm_name.clone(),
        tag,
        base_image: record.image.clone(),
        vm_name: record.vm_name.clone(),
        annotations: wish.annotations.clone(),
        guard: Guard::Any,
    }
}

/// What is left to do once the VM is gone.
fn clean(
    o: &Observation,
    wish: &Wish,
    record: &OwnerRecord,
    keep: Option<&Saved>,
    outrun: &[String],
) -> Result<Step, Step> {
    let patient = o.failures < CLEANUP_TRIES;
    if !o.released && patient && !record.macs.is_empty() {
        return Ok(Step::ReleaseLeases);
    }
    if !o.dropped && patient {
        let names = droppable(o, wish, record, keep)?;
        if !names.is_empty() {
            return Ok(Step::DropSnapshots(names));
        }
    }
    if let Some(step) = consume(o, record, outrun) {
        // The pod does not wait for a registry; the record does, and so does the next incarnation.
        return Ok(match step {
            Step::Fail(_) => finalise_or(o, wish, step),
            other => other,
        });
    }
    Ok(finalise_or(o, wish, Step::Forget))
}

/// Local snapshots that go. A hibernated pod's copy goes only when the tag surely holds the state (I3).
fn droppable(
    o: &Observation,
    wish: &Wish,
    record: &OwnerRecord,
    keep: Option<&Saved>,
) -> Result<Vec<String>, Step> {
    if wish.keep_snapshot {
        return Ok(Vec::new());
    }
    let vm = &record.vm_name;
    let mut names = vec![fork_baseline_name(vm), hibernate_import_name(vm), live_name(vm)];
    let copy_goes = match keep {
        None => true,
        Some(_) if !o.registry => false,
        Some(saved) => match &o.tag {
            Seen::Unknown => return Err(Step::Look(Look::Tag)),
            Seen::Known(tag) => tag.as_ref().is_some_and(|tag| tag.snapshot_id == saved.snapshot),
            Seen::Failed(_) => false,
        },
    };
    if copy_goes {
        names.push(vm.clone());
    }
    Ok(names)
}

/// Rule (d): the VM was live, and the tag holds exactly what it woke from. `None`: done.
fn consume(o: &Observation, record: &OwnerRecord, outrun: &[String]) -> Option<Step> {
    if outrun.is_empty() || !o.registry {
        return None;
    }
    Some(match &o.tag {
        Seen::Unknown => Step::Look(Look::Tag),
        Seen::Failed(trouble) => Step::Fail(trouble.clone()),
        Seen::Known(Some(tag)) if outrun.contains(&tag.snapshot_id) => {
            Step::DropTag { digest: tag.digest.clone(), snapshot: tag.snapshot_id.clone() }
        }
        Seen::Known(_) => {
            let mut next = record.clone();
            if let Phase::Deleting { outrun, .. } = &mut next.phase {
                outrun.clear();
            }
            Step::Note(Box::new(next))
        }
    })
}
