//! Rows of a hibernation, its rollback, and the hibernated pod.
//!
//! capture (guest paused) → push → show "no id" → remove → verify → `Hibernated`. The guest never runs
//! between a capture that counts and the removal; where it runs again, the capture is forgotten first.

use crate::{
    planner::{
        ASK_AGAIN, Look, PAUSE_LIMIT, Step, create, either, need, note,
        observation::{Observation, Seen, Wish},
        prepush, published_first, refuse_baseline, up,
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
    // The engine knows better than the record: nothing that was captured or pushed counts, and a VM that stands
    // still for any reason starts or goes on before it is captured again.
    let outrun = o.trouble.as_ref().is_some_and(|t| t.reason == Reason::HibernateOutrun);
    if let Some(captured) = round.captured.filter(|_| outrun) {
        return Ok(let_go(o, record, captured));
    }
    match vm.phase {
        VmPhase::Running => Ok(running(o, wish, record, round)),
        VmPhase::Paused => paused(o, wish, record, round),
        // The process died. What was captured is the newest state; without a capture the disk is.
        VmPhase::Stopped if round.captured.is_some() => save_then_remove(o, wish, record, round),
        VmPhase::Stopped | VmPhase::Creating => Ok(note(record, Phase::Up)),
    }
}

pub(super) const fn fresh_round() -> Phase {
    Phase::Hibernating { captured: None, pushed: None, paused_at: None }
}

/// Durable before every resume: the capture does not count any more, whatever happens to the guest or to
/// this process from here on. Where its push may have gone is remembered.
pub(super) fn let_go(o: &Observation, record: &OwnerRecord, captured: &str) -> Step {
    Step::Note(Box::new(if o.registry {
        record.outrunning(captured, fresh_round())
    } else {
        record.in_phase(fresh_round())
    }))
}

/// The guest runs: either nothing was captured yet, or what was captured is stale.
fn running(o: &Observation, wish: &Wish, record: &OwnerRecord, round: &Round<'_>) -> Step {
    if let Some(captured) = round.captured {
        return let_go(o, record, captured);
    }
    if !wish.hibernate {
        return note(record, Phase::Up);
    }
    let capture = Step::Capture { blame: Reason::HibernateSnapshotFailed };
    prepush::first(o, record).unwrap_or(capture)
}

fn paused(o: &Observation, wish: &Wish, record: &OwnerRecord, round: &Round<'_>) -> Result<Step, Step> {
    let Some(captured) = round.captured else {
        return Ok(match &o.captured_now {
            Some(id) if wish.hibernate => note(
                record,
                Phase::Hibernating {
                    captured: Some(id.clone()),
                    pushed: None,
                    paused_at: o.capture_began.or(Some(o.now)),
                },
            ),
            // Nobody knows what was captured, or nobody wants it: the guest goes on.
            _ => Step::Resume,
        });
    };
    if let Some(pushed) = round.pushed {
        let failed = o.trouble.as_ref().is_some_and(|t| t.reason == Reason::HibernateRemoveFailed);
        if failed || !wish.hibernate {
            return Ok(roll_back(record, round, pushed.clone()));
        }
        return Ok(published_first(o, Step::RemoveVm { blame: Reason::HibernateRemoveFailed }));
    }
    if wish.hibernate && o.trouble.is_none() {
        let in_time = !o.pause_left(round.paused_at).is_zero();
        return match in_place(o, captured) {
            Ok(Some(saved)) => Ok(pushed_note(record, round, saved)),
            Ok(None) if in_time => Ok(push(o, wish, record, captured)),
            Err(step @ Step::Look(_)) => Err(step),
            Err(step) if in_time => Err(step),
            // A failure, not a plain `let_go`: the next attempt waits, and people hear of it.
            Ok(None) | Err(_) => Ok(Step::Fail(too_long(o, wish))),
        };
    }
    given_up(o, record, round, captured)
}

/// The capture alone took as long as a guest may be paused.
fn too_long(o: &Observation, wish: &Wish) -> Trouble {
    let message = format!(
        "VM {} was paused for the longest time that is allowed ({} s) before its capture could be pushed, so its guest \
         goes on; allow more with VK_HIBERNATE_PAUSE_LIMIT, or give the node a faster disk",
        wish.vm_name,
        o.pause_limit.unwrap_or(PAUSE_LIMIT).as_secs()
    );
    Trouble::new(Reason::HibernatePauseLimit, message)
}

/// The attempt is over and the guest goes on. A push whose end nobody heard of may have reached the tag: if
/// it did, it is taken back like any other; if that cannot be told now, it is remembered.
fn given_up(o: &Observation, record: &OwnerRecord, round: &Round<'_>, captured: &str) -> Result<Step, Step> {
    if !o.registry {
        return Ok(let_go(o, record, captured));
    }
    match in_place(o, captured) {
        Ok(Some(saved)) => Ok(roll_back(record, round, saved)),
        Err(step @ Step::Look(_)) => Err(step),
        Ok(None) | Err(_) => Ok(let_go(o, record, captured)),
    }
}

fn roll_back(record: &OwnerRecord, round: &Round<'_>, pushed: Saved) -> Step {
    note(record, Phase::RollingBack { pushed, paused_at: round.paused_at })
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
    next.strays.clear();
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
        vm_name: record.vm_name.clone(),
        annotations: wish.annotations.clone(),
        guard: Guard::AbsentOr(ours(o, record)),
    }))
}

/// Manifests that this owner may overwrite: the one it last wrote or woke from, and a stray of its own.
fn ours(o: &Observation, record: &OwnerRecord) -> Vec<String> {
    let stray = o.tag.known().and_then(Option::as_ref).filter(|tag| record.strays.contains(&tag.snapshot_id));
    record.written.iter().cloned().chain(stray.map(|tag| tag.digest.clone())).collect()
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

/// Rule (c) of "one life of a hibernate tag": take the push back, show id and address, *then* go on. A
/// registry that does not answer delays that until the pause limit; the tag is owed from then on.
pub(super) fn rolling_back(
    o: &Observation,
    record: &OwnerRecord,
    pushed: &Saved,
    paused_at: Option<jiff::Timestamp>,
) -> Step {
    either(try_rolling_back(o, record, pushed, paused_at))
}

fn try_rolling_back(
    o: &Observation,
    record: &OwnerRecord,
    pushed: &Saved,
    paused_at: Option<jiff::Timestamp>,
) -> Result<Step, Step> {
    let captured = || Some(pushed.snapshot.clone());
    let Some(vm) = need(&o.vm, Look::Vm)? else {
        // Removed after all: that is success, never a rollback.
        let round =
            Phase::Hibernating { captured: captured(), pushed: Some(pushed.clone()), paused_at: None };
        return Ok(note(record, round));
    };
    match vm.phase {
        // The guest has not run since the capture, so that is the newest state.
        VmPhase::Stopped => {
            return Ok(note(
                record,
                Phase::Hibernating { captured: captured(), pushed: None, paused_at: None },
            ));
        }
        VmPhase::Running | VmPhase::Creating => return Ok(let_go(o, record, &pushed.snapshot)),
        VmPhase::Paused => {}
    }
    let left = o.pause_left(paused_at);
    let Some(digest) = pushed.digest.as_ref().filter(|_| !left.is_zero()) else {
        return Ok(published_first(o, let_go(o, record, &pushed.snapshot)));
    };
    Ok(match &o.tag {
        Seen::Unknown => Step::Look(Look::Tag),
        Seen::Failed(_) => Step::Wait(left.min(ASK_AGAIN)),
        Seen::Known(Some(tag)) if tag.digest == *digest => {
            Step::DropTag { digest: digest.clone(), snapshot: pushed.snapshot.clone() }
        }
        Seen::Known(_) => published_first(o, let_go(o, record, &pushed.snapshot)),
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
