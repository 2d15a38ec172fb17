//! Rows of a live capture that goes ahead of a long push.

use std::time::Duration;

use super::*;
use VmPhase::{Paused, Running, Stopped};

fn o(record: Option<OwnerRecord>, phase: VmPhase, seconds: Option<u64>) -> Observation {
    let push_time = Seen::Known(seconds.map(Duration::from_secs));
    let o = Observation { record, vm: vm(phase), push_time, ..living() };
    wishing(o, |wish| wish.hibernate = true)
}

fn before(seconds: Option<u64>) -> Observation {
    o(hibernating(None, None), Running, seconds)
}

fn ahead(phase: VmPhase) -> Observation {
    o(at(Phase::Prepushing), phase, Some(21))
}

/// Under way in a former process, whose measure is lost.
fn restarted() -> Observation {
    o(at(Phase::Prepushing), Running, None)
}

fn unreadable(o: Observation) -> Observation {
    Observation { push_time: Seen::Failed(trouble(Reason::EngineUnavailable)), ..o }
}

fn unwished(o: Observation) -> Observation {
    wishing(o, |wish| wish.hibernate = false)
}

fn dropped(o: Observation) -> Observation {
    Observation { dropped: true, ..o }
}

fn done(o: Observation) -> Observation {
    Observation { prepushed: true, ..o }
}

fn drop_live() -> String {
    format!("drop {LIVE}")
}

#[test]
fn only_a_push_that_is_long_or_of_unreadable_size_is_worth_a_live_capture_ahead() {
    check(vec![
        ("it is asked how long", Observation { push_time: Seen::Unknown, ..before(None) }, "look PushTime"),
        ("a push of unknown length is not long", before(None), "capture"),
        ("20 s are not long", before(Some(20)), "capture"),
        ("more than 20 s are", before(Some(21)), "note prepushing"),
        ("none is without a registry", Observation { registry: false, ..before(Some(21)) }, "capture"),
        ("a size that cannot be read counts as large", unreadable(before(None)), "note prepushing"),
        ("it is asked once in a hibernation", done(before(Some(21))), "capture"),
    ]);
}

#[test]
fn the_bulk_goes_then_its_copy_and_then_the_guest_is_captured() {
    check(vec![
        ("the bulk goes", ahead(Running), "prepush"),
        ("it goes too when its size cannot be read", unreadable(ahead(Running)), "prepush"),
        ("its copy goes", done(ahead(Running)), &drop_live()),
        (
            "the guest is captured when the copy is gone",
            dropped(done(ahead(Running))),
            "note hibernating - -",
        ),
    ]);
}

#[test]
fn called_off_the_copy_of_a_live_capture_goes_and_the_guest_goes_on() {
    check(vec![
        ("called off, its copy goes", unwished(ahead(Running)), &drop_live()),
        ("the guest goes on when the copy is gone", dropped(unwished(ahead(Running))), "note up"),
    ]);
}

#[test]
fn a_live_capture_that_was_cut_off_freezes_no_guest_and_leaves_no_copy() {
    check(vec![
        ("a save that was cut off leaves no guest frozen", ahead(Paused), "resume"),
        ("after a restart nobody knows the length, so only its copy goes", restarted(), &drop_live()),
        ("and the guest is captured as usual", dropped(restarted()), "note hibernating - -"),
    ]);
}

#[test]
fn a_vm_that_died_or_vanished_during_its_live_capture_is_treated_as_one_that_is_up() {
    check(vec![
        ("a process that died is started as ever", dropped(ahead(Stopped)), "note up"),
        (
            "a VM that vanished is a loss",
            Observation { vm: Seen::Known(None), ..dropped(ahead(Running)) },
            "note lost VMGone",
        ),
    ]);
}

#[test]
fn a_delete_during_a_live_capture_begins_as_of_a_vm_that_is_up() {
    check(vec![(
        "a delete begins as of a VM that is up",
        wishing(ahead(Running), |wish| wish.deleting = true),
        "note deleting live=true keep=- captured=- pushed=false outrun=",
    )]);
}
