//! Rows of the end.

use super::*;
use VmPhase::{Paused, Running, Stopped};

fn going(o: Observation) -> Observation {
    wishing(o, |wish| wish.deleting = true)
}

fn at_vm(record: Option<OwnerRecord>, phase: VmPhase) -> Observation {
    going(Observation { record, vm: vm(phase), ..living() })
}

fn was(phase: Phase, vm_phase: VmPhase) -> Observation {
    at_vm(at(phase), vm_phase)
}

/// The VM is gone.
fn after(record: Option<OwnerRecord>) -> Observation {
    going(Observation { record, vm: Seen::Known(None), ..living() })
}

/// Leases and local snapshots, too.
fn cleaned(record: Option<OwnerRecord>) -> Observation {
    Observation { released: true, dropped: true, ..after(record) }
}

fn never(o: Observation) -> Observation {
    wishing(o, |wish| wish.snapshot_on_delete = false)
}

/// It was hibernated as `S`.
fn kept() -> Option<OwnerRecord> {
    at(Phase::Deleting { live: false, keep: Some(saved("S")), captured: None, pushed: false, outrun: vec![] })
}

/// It was woken from `S`.
fn outrun() -> Option<OwnerRecord> {
    at(Phase::Deleting { live: true, keep: None, captured: None, pushed: true, outrun: vec!["S".into()] })
}

#[test]
fn a_delete_ends_the_pod_and_forgets_it_last() {
    check(vec![
        ("a delete of a pod that never had a VM ends at once", going(blank()), "finalise"),
        ("a delete ends the pod", cleaned(deleting(true, None, true)), "finalise"),
        (
            "a delete forgets it last",
            Observation { finalised: true, ..cleaned(deleting(true, None, true)) },
            "forget",
        ),
        (
            "a delete of a pod that is gone from the API needs no end",
            wishing(cleaned(deleting(true, None, true)), |wish| wish.gone = true),
            "forget",
        ),
    ]);
}

#[test]
fn a_delete_notes_first_whether_the_vm_lives_and_keeps_what_a_finished_push_saved() {
    check(vec![
        (
            "a delete notes what is alive first",
            going(living()),
            "note deleting live=true keep=- captured=- pushed=false outrun=",
        ),
        (
            "a delete of a hibernated pod keeps the saved state",
            after(at(Phase::Hibernated { saved: saved("S") })),
            "note deleting live=false keep=S captured=- pushed=false outrun=",
        ),
        (
            "a delete of a hibernation that reached its push finishes it",
            was(
                Phase::Hibernating { captured: Some("S".into()), pushed: Some(saved("S")), paused_at: None },
                Paused,
            ),
            "note deleting live=false keep=S captured=- pushed=false outrun=",
        ),
    ]);
}

#[test]
fn a_delete_outruns_whatever_an_unfinished_hibernation_or_wake_may_bring_back() {
    check(vec![
        (
            "a delete of an unfinished hibernation outruns what that may have pushed",
            was(Phase::Hibernating { captured: Some("S".into()), pushed: None, paused_at: None }, Paused),
            "note deleting live=true keep=- captured=S pushed=false outrun=S",
        ),
        (
            "a delete of a hibernation whose VM died after the capture keeps the capture",
            was(Phase::Hibernating { captured: Some("S".into()), pushed: None, paused_at: None }, Stopped),
            "note deleting live=true keep=- captured=S pushed=false outrun=S",
        ),
        (
            "a delete of a hibernation whose guest went on forgets the capture",
            was(Phase::Hibernating { captured: Some("S".into()), pushed: None, paused_at: None }, Running),
            "note deleting live=true keep=- captured=- pushed=false outrun=S",
        ),
        (
            "a delete of a VM that is being woken outruns what it is woken from",
            was(Phase::Creating { restore: Some(saved("S")) }, Running),
            "note deleting live=true keep=- captured=- pushed=false outrun=S",
        ),
        (
            "a delete of a rollback outruns the push that is being taken back",
            was(Phase::RollingBack { pushed: saved("S"), paused_at: None }, Paused),
            "note deleting live=true keep=- captured=S pushed=false outrun=S",
        ),
    ]);
}

#[test]
fn a_delete_saves_a_live_vm_as_latest_and_then_removes_it() {
    check(vec![
        ("a delete captures a live VM", at_vm(deleting(true, None, false), Running), "capture"),
        (
            "a delete notes its own capture",
            Observation { captured_now: Some("L".into()), ..at_vm(deleting(true, None, false), Paused) },
            "note deleting live=true keep=- captured=L pushed=false outrun=",
        ),
        (
            "a delete takes the capture again when nobody knows it",
            at_vm(deleting(true, None, false), Paused),
            "resume",
        ),
        (
            "a delete notes the push",
            Observation {
                latest_now: Some("sha256:L".into()),
                saved: snapshot(VM, "L"),
                ..at_vm(deleting(true, Some("L"), false), Paused)
            },
            "note deleting live=true keep=- captured=L pushed=true outrun=",
        ),
        (
            "a delete removes the VM once it is pushed",
            at_vm(deleting(true, Some("L"), true), Paused),
            "remove",
        ),
    ]);
}

#[test]
fn the_capture_of_a_delete_is_pushed_though_its_vm_died_and_taken_again_when_it_is_lost() {
    check(vec![
        (
            "a delete pushes it as latest",
            Observation { saved: snapshot(VM, "L"), ..at_vm(deleting(true, Some("L"), false), Paused) },
            "push L as latest",
        ),
        (
            "a delete pushes it although the process died meanwhile",
            Observation { saved: snapshot(VM, "L"), ..at_vm(deleting(true, Some("L"), false), Stopped) },
            "push L as latest",
        ),
        (
            "a delete pushes it although the VM is gone",
            Observation { saved: snapshot(VM, "L"), ..after(deleting(true, Some("L"), false)) },
            "push L as latest",
        ),
        (
            "a delete takes it again when it is not here any more",
            at_vm(deleting(true, Some("L"), false), Paused),
            "note deleting live=true keep=- captured=- pushed=false outrun=",
        ),
    ]);
}

#[test]
fn a_delete_saves_nothing_that_nobody_demands_or_that_cannot_be_saved() {
    check(vec![
        (
            "a delete under policy never removes at once",
            never(at_vm(deleting(true, None, false), Running)),
            "remove",
        ),
        (
            "a delete without a registry removes at once",
            Observation { registry: false, ..at_vm(deleting(true, None, false), Running) },
            "remove",
        ),
        (
            "a delete of a VM that does not run saves nothing",
            at_vm(deleting(false, None, false), Stopped),
            "remove",
        ),
        (
            "a delete of a VM whose process died meanwhile saves nothing",
            at_vm(deleting(true, None, false), Stopped),
            "remove",
        ),
    ]);
}

#[test]
fn a_delete_gives_leases_and_snapshots_back_but_does_not_wait_for_that_for_ever() {
    check(vec![
        ("a delete gives leases back", after(deleting(true, None, true)), "releaseleases"),
        (
            "a delete drops local snapshots",
            Observation { released: true, ..after(deleting(true, None, true)) },
            &format!("drop {FORK} {IMPORT} {LIVE} {VM}"),
        ),
        (
            "a delete keeps them when asked to",
            wishing(Observation { released: true, ..after(deleting(true, None, true)) }, |wish| {
                wish.keep_snapshot = true
            }),
            "finalise",
        ),
        (
            "a delete does not wait for a clean-up that cannot be done",
            Observation { failures: 3, ..after(deleting(true, None, true)) },
            "finalise",
        ),
    ]);
}

#[test]
fn a_hibernated_pods_copy_goes_only_when_the_tag_surely_holds_the_state() {
    check(vec![
        (
            "a delete drops a hibernated pod's copy only when the tag surely holds the state",
            Observation { released: true, tag: tag("S"), ..after(kept()) },
            &format!("drop {FORK} {IMPORT} {LIVE} {VM}"),
        ),
        (
            "a delete keeps the copy when the registry gives no answer",
            Observation {
                released: true,
                tag: Seen::Failed(trouble(Reason::RegistryUnavailable)),
                ..after(kept())
            },
            &format!("drop {FORK} {IMPORT} {LIVE}"),
        ),
        (
            "a delete keeps the copy when there is no registry",
            Observation { released: true, registry: false, ..after(kept()) },
            &format!("drop {FORK} {IMPORT} {LIVE}"),
        ),
    ]);
}

#[test]
fn the_tag_that_a_live_vm_was_woken_from_goes_with_its_pod_which_does_not_wait_for_it() {
    check(vec![
        (
            "a delete drops the tag that the live VM was woken from",
            Observation { tag: tag("S"), ..cleaned(outrun()) },
            "drop tag S",
        ),
        (
            "a delete leaves a tag alone that holds something else",
            Observation { tag: tag("T"), ..cleaned(outrun()) },
            "note deleting live=true keep=- captured=- pushed=true outrun=",
        ),
        (
            "a delete does not make the pod wait for a registry",
            Observation { tag: Seen::Failed(trouble(Reason::RegistryUnavailable)), ..cleaned(outrun()) },
            "finalise",
        ),
        (
            "a delete owes the pod the registry, so that nothing old comes back",
            Observation {
                finalised: true,
                tag: Seen::Failed(trouble(Reason::RegistryUnavailable)),
                ..cleaned(outrun())
            },
            "fail RegistryUnavailable",
        ),
    ]);
}

#[test]
fn a_delete_of_an_unmanaged_pod_touches_nothing() {
    check(vec![(
        "a delete of an unmanaged pod touches nothing",
        wishing(going(living()), |wish| wish.managed = false),
        "finalise",
    )]);
}

#[test]
fn a_pod_that_is_being_deleted_gives_no_baseline() {
    check(vec![(
        "a delete refuses forks",
        Observation { baseline_wanted: true, ..going(living()) },
        "answer no",
    )]);
}
