//! Rows of a hibernation, its rollback, and the hibernated pod.
//!
//! capture (guest paused) → push → show "no id" → remove → verify → `Hibernated`. The guest never runs
//! between a capture that counts and the removal; where it runs again, the capture is forgotten first.

use std::time::Duration;

use crate::{
    planner::{
        Look, PAUSE_LIMIT, Step, create, either, need, note,
        observation::{Observation, Wish},
        published_first, refuse_baseline, up,
    },
    ports::{Guard, PushRequest, VmPhase},
    reason::{Reason, Trouble},
    record::{OwnerRecord, Phase, Saved},
};

/// What a hibernation has reached.
struct Round<'a> {
    captured: Option<&'a String>,
    pushed: Option<&'a Saved>,
    paused_at: Option<jiff::Timestamp>,
}

pub(super) fn hibernating(o: &Observation, wish: &Wish, record: &OwnerRecord) -> Step {
    let Phase::Hibernating { captured, pushed, paused_at } = &record.phase else { return Step::Rest };
    let round = Round { captured: captured.as_ref(), pushed: pushed.as_ref(), paused_at: *paused_at };
    either(try_hibernating(o, wish, record, &round))
}

fn try_hibernating(
    o: &Observation,
    wish: &Wish,
    record: &OwnerRecord,
    round: &Round<'_>,
) -> Result<Step, Step> {
    let Some(vm) = need(&o.vm, Look::Vm)? else { return removed(o, wish, record, round) };
    match vm.phase {
        VmPhase::Running => Ok(running(wish, record, round)),
        VmPhase::Paused => paused(o, wish, record, round),
        // The process died. What was captured is the newest state; without a capture the disk is.
        VmPhase::Stopped if round.captured.is_some() => save_then_remove(o, wish, record, round),
        VmPhase::Stopped | VmPhase::Creating => Ok(note(record, Phase::Up)),
    }
}

const fn fresh_round() -> Phase {
    Phase::Hibernating { captured: None, pushed: None, paused_at: None }
}

/// The guest runs: either nothing was captured yet, or what was captured is stale.
fn running(wish: &Wish, record: &OwnerRecord, round: &Round<'_>) -> Step {
    if let Some(pushed) = round.pushed {
        return note(record, Phase::RollingBack { pushed: pushed.clone() });
    }
    if !wish.hibernate {
        return note(record, Phase::Up);
    }
    if round.captured.is_some() {
        return note(record, fresh_round());
    }
    Step::Capture { blame: Reason::HibernateSnapshotFailed }
}

fn paused(o: &Observation, wish: &Wish, record: &OwnerRecord, round: &Round<'_>) -> Result<Step, Step> {
    let Some(_) = round.captured else {
        return Ok(match &o.captured_now {
            Some(id) if wish.hibernate => note(
                record,
                Phase::Hibernating { captured: Some(id.clone()), pushed: None, paused_at: Some(o.now) },
            ),
            // Nobody knows what was captured, or nobody wants it: the guest goes on.
            _ => Step::Resume,
        });
    };
    if let Some(pushed) = round.pushed {
        let failed = o.trouble.as_ref().is_some_and(|t| t.reason == Reason::HibernateRemoveFailed);
        if failed || !wish.hibernate {
            return Ok(note(record, Phase::RollingBack { pushed: pushed.clone() }));
        }
        return Ok(published_first(o, Step::RemoveVm { blame: Reason::HibernateRemoveFailed }));
    }
    if !wish.hibernate || o.trouble.is_some() || left(o, round).is_zero() {
        return Ok(Step::Resume);
    }
    save_then_remove(o, wish, record, round)
}

/// How much longer the guest may be paused.
fn left(o: &Observation, round: &Round<'_>) -> Duration {
    round.paused_at.map_or(PAUSE_LIMIT, |since| pause_left(o.now, since))
}

/// How much longer a guest that was paused at `since` may be paused at `now`.
#[must_use]
pub fn pause_left(now: jiff::Timestamp, since: jiff::Timestamp) -> Duration {
    let paused = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    PAUSE_LIMIT.saturating_sub(paused)
}

/// Pushes the capture, notes that it is there (seen, not believed), then removes the VM.
fn save_then_remove(
    o: &Observation,
    wish: &Wish,
    record: &OwnerRecord,
    round: &Round<'_>,
) -> Result<Step, Step> {
    if round.pushed.is_some() {
        return Ok(Step::RemoveVm { blame: Reason::HibernateRemoveFailed });
    }
    let Some(captured) = round.captured else { return Ok(note(record, Phase::Up)) };
    match in_place(o, captured)? {
        Some(saved) => Ok(pushed_note(record, round, saved)),
        None => Ok(push(o, wish, record, captured)),
    }
}

fn pushed_note(record: &OwnerRecord, round: &Round<'_>, saved: Saved) -> Step {
    let mut next = record.clone();
    next.written = saved.digest.clone().or(next.written);
    next.phase = Phase::Hibernating {
        captured: round.captured.cloned(),
        pushed: Some(saved),
        paused_at: round.paused_at,
    };
    Step::Note(Box::new(next))
}

/// The evidence, if it is exactly `snapshot`.
fn in_place(o: &Observation, snapshot: &str) -> Result<Option<Saved>, Step> {
    Ok(create::evidence(o)?.filter(|saved| saved.snapshot == snapshot))
}

fn push(o: &Observation, wish: &Wish, record: &OwnerRecord, captured: &str) -> Step {
    if !o.registry {
        let message = format!(
            "the capture {captured} of VM {} is not in the local store any more; it is taken again",
            wish.vm_name
        );
        return Step::Fail(Trouble::new(Reason::HibernateSnapshotFailed, message));
    }
    Step::PushHibernate(Box::new(PushRequest {
        snapshot: captured.to_owned(),
        repository: wish.vm_name.clone(),
        tag: cocoon_meta::keys::HIBERNATE_SNAPSHOT_TAG.to_owned(),
        base_image: record.image.clone(),
        annotations: create::push_annotations(wish),
        guard: Guard::AbsentOr(record.written.iter().cloned().collect()),
    }))
}

/// The VM is gone. Hibernated only if this round's snapshot is in place (I4).
fn removed(o: &Observation, wish: &Wish, record: &OwnerRecord, round: &Round<'_>) -> Result<Step, Step> {
    let Some(captured) = round.captured else { return up::vanished(o, record) };
    if let Some(saved) = in_place(o, captured)? {
        return Ok(note(record, Phase::Hibernated { saved }));
    }
    match need(&o.saved, Look::Saved)? {
        Some(local) if local.id == *captured => Ok(push(o, wish, record, captured)),
        _ => Ok(note(record, state_lost(record, captured))),
    }
}

fn state_lost(record: &OwnerRecord, snapshot: &str) -> Phase {
    let message = format!(
        "VM {} was removed and its snapshot {snapshot} is neither in the registry nor on this node. Delete the \
         pod to start anew",
        record.vm_name
    );
    Phase::Lost { trouble: Trouble::new(Reason::HibernateEvidenceMissing, message) }
}

/// Rule (c) of "one life of a hibernate tag": take the push back, show id and address, *then* go on.
pub(super) fn rolling_back(o: &Observation, _wish: &Wish, record: &OwnerRecord, pushed: &Saved) -> Step {
    either(try_rolling_back(o, record, pushed))
}

fn try_rolling_back(o: &Observation, record: &OwnerRecord, pushed: &Saved) -> Result<Step, Step> {
    let Some(vm) = need(&o.vm, Look::Vm)? else {
        // Removed after all: that is success, never a rollback.
        let round = Phase::Hibernating {
            captured: Some(pushed.snapshot.clone()),
            pushed: Some(pushed.clone()),
            paused_at: None,
        };
        return Ok(note(record, round));
    };
    if vm.phase == VmPhase::Stopped {
        let round =
            Phase::Hibernating { captured: Some(pushed.snapshot.clone()), pushed: None, paused_at: None };
        return Ok(note(record, round));
    }
    if let Some(digest) = &pushed.digest
        && need(&o.tag, Look::Tag)?.as_ref().is_some_and(|tag| tag.digest == *digest)
    {
        return Ok(Step::DropTag { digest: digest.clone(), snapshot: pushed.snapshot.clone() });
    }
    Ok(match vm.phase {
        VmPhase::Paused => published_first(o, Step::Resume),
        _ => note(record, Phase::Up),
    })
}

/// No VM; the state is saved. Rests while that is wished, wakes when it is not.
pub(super) fn hibernated(o: &Observation, wish: &Wish, record: &OwnerRecord, saved: &Saved) -> Step {
    either(try_hibernated(o, wish, record, saved))
}

fn try_hibernated(o: &Observation, wish: &Wish, record: &OwnerRecord, saved: &Saved) -> Result<Step, Step> {
    if need(&o.vm, Look::Vm)?.is_some() {
        return Ok(note(record, Phase::Up));
    }
    if !wish.hibernate {
        return Ok(note(record, Phase::Creating { restore: Some(saved.clone()) }));
    }
    if let Some(refusal) = refuse_baseline(o) {
        return Ok(refusal);
    }
    if !o.released && !record.macs.is_empty() {
        return Ok(Step::ReleaseLeases);
    }
    match create::evidence(o)? {
        Some(found) if found == *saved => Ok(Step::Rest),
        // Moved on by somebody who may (another node's wake and hibernate): that is what a wake will use.
        Some(found) => Ok(note(record, Phase::Hibernated { saved: found })),
        None => missing(o, wish, record, saved),
    }
}

/// The tag is gone while the pod is hibernated: put the local copy in its place, or say so loudly.
fn missing(o: &Observation, wish: &Wish, record: &OwnerRecord, saved: &Saved) -> Result<Step, Step> {
    match need(&o.saved, Look::Saved)? {
        Some(local) if local.id == saved.snapshot && o.registry => Ok(push(o, wish, record, &saved.snapshot)),
        _ => {
            let way_out = "restore the tag or delete the pod; it will not boot blank";
            Ok(Step::Fail(create::nothing_saved(wish, way_out)))
        }
    }
}
