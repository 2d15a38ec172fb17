//! Rows of a live capture that goes ahead of a long hibernation, so that the guest's pause is short (design §5).
//!
//! save (guest runs) → push its blobs, no tag → drop the local copy → the ordinary hibernation, whose push finds
//! most blobs there. Whatever fails or is cut off here only skips it; the copy is dropped in every case.

use std::time::Duration;

use crate::{
    planner::{
        LONG_PUSH, Look, PAUSE_LIMIT, Step, either, hibernate, live_name, need, note,
        observation::{Observation, Seen, Wish},
        up,
    },
    ports::{Guard, PushRequest, VmPhase},
    record::{OwnerRecord, Phase},
};

/// Before the guest is paused: whether its bulk goes ahead. Without a measured push nobody knows how long one
/// takes, which means no; a capture whose size cannot be read may have any, and counts as large: the guest
/// must not be paused for it.
pub(super) fn first(o: &Observation, record: &OwnerRecord) -> Option<Step> {
    if o.prepushed || !o.registry {
        return None;
    }
    match &o.push_time {
        Seen::Unknown => Some(Step::Look(Look::PushTime)),
        _ if is_long(o) => Some(note(record, Phase::Prepushing)),
        _ => None,
    }
}

fn is_long(o: &Observation) -> bool {
    match &o.push_time {
        Seen::Known(Some(time)) => *time > long(o),
        Seen::Failed(_) => true,
        Seen::Known(None) | Seen::Unknown => false,
    }
}

/// From when on a push is long: a guest that may be paused for a short time only cannot wait for the usual one.
fn long(o: &Observation) -> Duration {
    LONG_PUSH.min(o.pause_limit.unwrap_or(PAUSE_LIMIT) / 2)
}

pub(super) fn plan(o: &Observation, wish: &Wish, record: &OwnerRecord) -> Step {
    either(try_plan(o, wish, record))
}

fn try_plan(o: &Observation, wish: &Wish, record: &OwnerRecord) -> Result<Step, Step> {
    let phase = need(&o.vm, Look::Vm)?.as_ref().map(|vm| vm.phase);
    // A save was cut off; the guest must not stay frozen.
    if phase == Some(VmPhase::Paused) {
        return Ok(Step::Resume);
    }
    let running = phase == Some(VmPhase::Running);
    if running && wish.hibernate && !o.prepushed {
        return Ok(match &o.push_time {
            Seen::Unknown => Step::Look(Look::PushTime),
            _ if is_long(o) => Step::Prepush(Box::new(request(wish, record))),
            // Another process began this and nobody knows any more whether it is worth while.
            _ => finish(o, wish, note(record, hibernate::fresh_round())),
        });
    }
    let next = match phase {
        None => up::vanished(o, record)?,
        Some(_) if running && wish.hibernate => note(record, hibernate::fresh_round()),
        Some(_) => note(record, Phase::Up),
    };
    Ok(finish(o, wish, next))
}

/// The local copy goes before anything else comes.
fn finish(o: &Observation, wish: &Wish, next: Step) -> Step {
    if o.dropped { next } else { Step::DropSnapshots(vec![live_name(&wish.vm_name)]) }
}

fn request(wish: &Wish, record: &OwnerRecord) -> PushRequest {
    PushRequest {
        snapshot: live_name(&wish.vm_name),
        repository: wish.vm_name.clone(),
        tag: cocoon_meta::keys::HIBERNATE_SNAPSHOT_TAG.to_owned(),
        base_image: record.image.clone(),
        vm_name: record.vm_name.clone(),
        annotations: wish.annotations.clone(),
        guard: Guard::Any,
    }
}
