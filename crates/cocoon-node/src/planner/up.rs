//! Rows for a VM that was seen running.

use std::time::Duration;

use jiff::SignedDuration;

use cocoon_meta::{SnapshotRequest, hibernate_import_name};

use crate::{
    planner::{
        ASK_AGAIN, Look, RESTART_COOLDOWN, Step, WAKE_TRIAL, create, either, live_name, need, note,
        observation::{Observation, Seen, Wish},
    },
    ports::{Guard, PushRequest, VmPhase, VmView},
    reason::{Reason, Trouble},
    record::{LiveAnswer, OwnerRecord, Phase, Saved},
};

pub(super) fn plan(o: &Observation, wish: &Wish, record: &OwnerRecord) -> Step {
    either(try_plan(o, wish, record))
}

fn try_plan(o: &Observation, wish: &Wish, record: &OwnerRecord) -> Result<Step, Step> {
    let Some(vm) = need(&o.vm, Look::Vm)? else { return vanished(o, record) };
    match vm.phase {
        VmPhase::Running => running(o, wish, record, vm),
        // A capture was cut off; the guest must not stay frozen.
        VmPhase::Paused => Ok(Step::Resume),
        VmPhase::Stopped => stopped(o, record),
        VmPhase::Creating => Ok(Step::RemoveVm { blame: Reason::VMGone }),
    }
}

/// Not there any more. A wake that never reached `ready` is done again; everything else is a loss.
pub(super) fn vanished(o: &Observation, record: &OwnerRecord) -> Result<Step, Step> {
    if let Some(woken) = unfinished_wake(o, record)? {
        return Ok(note(record, Phase::Creating { restore: Some(woken.clone()) }));
    }
    Ok(note(record, create::lost(&record.vm_id, &record.vm_name)))
}

/// The saved state of a wake that never reached `ready`, while it is still there: that is what the pod is
/// to have, whatever became of the VM (I2).
fn unfinished_wake<'a>(o: &Observation, record: &'a OwnerRecord) -> Result<Option<&'a Saved>, Step> {
    let Some(woken) = record.woken_from.as_ref().filter(|_| !record.woken_ready) else { return Ok(None) };
    let there = create::evidence(o)?.is_some_and(|saved| saved.snapshot == woken.snapshot);
    Ok(there.then_some(woken))
}

/// The process died: start it in place, but not again and again. A wake that was not ready yet and just
/// begun is done again instead: a cold start would lose the memory that was saved.
fn stopped(o: &Observation, record: &OwnerRecord) -> Result<Step, Step> {
    if !record.restart_pending {
        let rewake = on_trial(o, record) && unfinished_wake(o, record)?.is_some();
        return Ok(note_restart(o, record, rewake));
    }
    let Some(due) = record.rewake else { return Ok(restart(o, record)) };
    if unfinished_wake(o, record)?.is_none() {
        return Ok(restart(o, record));
    }
    let early = Duration::try_from(due.duration_since(o.now)).unwrap_or_default();
    Ok(if early.is_zero() { Step::RemoveVm { blame: Reason::RestartFailed } } else { Step::Wait(early) })
}

/// Whether the wake is so young that what was saved counts for more than what the guest did since. By the
/// engine's clock, not by when we heard of it; where it does not say, the disk counts.
fn on_trial(o: &Observation, record: &OwnerRecord) -> bool {
    record.woken_at.is_some_and(|woken| o.now.duration_since(woken) < signed(WAKE_TRIAL))
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

fn note_restart(o: &Observation, record: &OwnerRecord, rewake: bool) -> Step {
    // Wakes that are done again come at growing distances: each costs the engine a whole clone.
    let growth = if rewake { 1 << record.restarts.min(4) } else { 1 };
    let rest = signed(RESTART_COOLDOWN.saturating_mul(growth));
    let rested = record.last_restart.and_then(|last| last.checked_add(rest).ok());
    let due = rested.map_or(o.now, |rested| rested.max(o.now));
    if due > o.now && !rewake {
        let message = format!(
            "VM {} stopped twice within {} s; its disk is kept until the pod is deleted, see `cocoon vm logs {0}`",
            record.vm_name,
            RESTART_COOLDOWN.as_secs()
        );
        return note(record, Phase::Lost { trouble: Trouble::new(Reason::RestartCooldown, message) });
    }
    let mut next = record.clone();
    next.restart_pending = true;
    next.rewake = rewake.then_some(due);
    next.stop_ordered = o.vm_there().is_some_and(|vm| vm.stopped_in_order);
    next.last_restart = Some(due);
    Step::Note(Box::new(next))
}

fn restart(o: &Observation, record: &OwnerRecord) -> Step {
    if o.failures == 0 {
        return Step::Start;
    }
    let why = o.trouble.as_ref().map_or_else(String::new, |trouble| trouble.message.clone());
    let message = format!("VM {} stopped and could not be started again: {why}", record.vm_name);
    note(record, Phase::Lost { trouble: Trouble::new(Reason::RestartFailed, message) })
}

fn running(o: &Observation, wish: &Wish, record: &OwnerRecord, vm: &VmView) -> Result<Step, Step> {
    if let Some(next) = refreshed(o, wish, record, vm) {
        return Ok(Step::Note(Box::new(next)));
    }
    if wish.hibernate {
        return Ok(hibernate(wish, record));
    }
    if vm.links_down {
        return Ok(Step::Start);
    }
    if record.import_left {
        return drop_import(o, wish, record);
    }
    if o.baseline_wanted {
        return Ok(match need(&o.baseline, Look::Baseline)? {
            Some(baseline) => Step::AnswerBaseline(Ok(baseline.clone())),
            None => Step::SaveBaseline,
        });
    }
    if let Some(step) = stray(o, record) {
        return Ok(step);
    }
    Ok(live(o, wish, record).unwrap_or(Step::Rest))
}

/// A tag that holds a capture which this guest has outrun would bring an old state back: it goes. A push
/// that was cut off may still land after that was looked at, so the record keeps the ids.
fn stray(o: &Observation, record: &OwnerRecord) -> Option<Step> {
    if record.strays.is_empty() || !o.registry {
        return None;
    }
    match &o.tag {
        Seen::Unknown => Some(Step::Look(Look::Tag)),
        Seen::Failed(_) => Some(Step::Wait(ASK_AGAIN)),
        Seen::Known(Some(tag)) if record.strays.contains(&tag.snapshot_id) => {
            Some(Step::DropTag { digest: tag.digest.clone(), snapshot: tag.snapshot_id.clone() })
        }
        Seen::Known(_) => None,
    }
}

/// A live snapshot request that is not answered yet; served once the guest is ready.
fn live(o: &Observation, wish: &Wish, record: &OwnerRecord) -> Option<Step> {
    let asked = wish.live_request.as_ref()?;
    if !o.answers() || record.live.as_ref().is_some_and(|answer| answer.reference == *asked) {
        return None;
    }
    let answered = |answer: LiveAnswer| {
        let mut next = record.clone();
        next.live = Some(answer);
        Step::Note(Box::new(next))
    };
    if let Some(answer) = o.live_now.as_ref().filter(|answer| answer.reference == *asked) {
        return Some(answered(answer.clone()));
    }
    Some(match live_push(o, wish, record, asked) {
        Ok(request) => Step::LiveSnapshot { reference: asked.clone(), push: Box::new(request) },
        Err(why) => answered(LiveAnswer { reference: asked.clone(), failure: Some(why) }),
    })
}

fn live_push(o: &Observation, wish: &Wish, record: &OwnerRecord, asked: &str) -> Result<PushRequest, String> {
    let request = SnapshotRequest::parse(asked).map_err(|error| error.to_string())?;
    request.check_target(&wish.vm_name).map_err(|error| error.to_string())?;
    if let Some(problem) = &wish.problem {
        return Err(problem.message.clone());
    }
    if !o.registry {
        return Err("this node has no registry; set OCI_REGISTRY to push snapshots".to_owned());
    }
    Ok(PushRequest {
        snapshot: live_name(&wish.vm_name),
        repository: request.repository,
        tag: request.tag,
        base_image: record.image.clone(),
        vm_name: record.vm_name.clone(),
        annotations: wish.annotations.clone(),
        guard: Guard::Any,
    })
}

/// The record with what changed since it was written; `None` when it is right.
fn refreshed(o: &Observation, wish: &Wish, record: &OwnerRecord, vm: &VmView) -> Option<OwnerRecord> {
    let mut next = record.clone();
    next.snapshot_on_delete = wish.snapshot_on_delete;
    next.keep_snapshot = wish.keep_snapshot;
    next.annotations.clone_from(&wish.annotations);
    next.vm_id.clone_from(&vm.id);
    next.macs.clone_from(&vm.macs);
    if next.restart_pending {
        (next.restart_pending, next.rewake) = (false, None);
        next.restarts = next.restarts.saturating_add(1);
        next.started = Some(o.now);
    }
    if o.answers() && o.published && !vm.links_down {
        next.woken_ready = next.woken_from.is_some();
    }
    (next != *record).then_some(next)
}

fn hibernate(wish: &Wish, record: &OwnerRecord) -> Step {
    if wish.macos {
        let message = format!("VM {} is a macOS guest, which cannot be hibernated", wish.vm_name);
        return Step::Fail(Trouble::new(Reason::HibernateUnsupported, message));
    }
    if let Some(problem) = &wish.problem {
        return Step::Fail(problem.clone());
    }
    note(record, Phase::Hibernating { captured: None, pushed: None, paused_at: None })
}

/// A wake's import is of no use once the VM is up.
fn drop_import(o: &Observation, wish: &Wish, record: &OwnerRecord) -> Result<Step, Step> {
    if need(&o.import, Look::Import)?.is_some() {
        return Ok(Step::DropSnapshots(vec![hibernate_import_name(&wish.vm_name)]));
    }
    let mut next = record.clone();
    next.import_left = false;
    Ok(Step::Note(Box::new(next)))
}
