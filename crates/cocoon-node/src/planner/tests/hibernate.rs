//! Rows of a hibernation, of its rollback and of a pod that is hibernated.

use super::*;
use VmPhase::{Paused, Running, Stopped};

fn o(record: Option<OwnerRecord>, phase: VmPhase) -> Observation {
    wishing(Observation { record, vm: vm(phase), ..living() }, |wish| wish.hibernate = true)
}

/// `S` is captured and not pushed yet.
fn captured(phase: VmPhase) -> Observation {
    o(hibernating(Some("S"), None), phase)
}

/// `S` is pushed, too.
fn pushed() -> Observation {
    o(hibernating(Some("S"), Some("S")), Paused)
}

fn unwished(o: Observation) -> Observation {
    wishing(o, |wish| wish.hibernate = false)
}

fn removed(record: Option<OwnerRecord>) -> Observation {
    Observation { vm: Seen::Known(None), ..o(record, Paused) }
}

fn back(phase: VmPhase) -> Observation {
    let record = at(Phase::RollingBack { pushed: saved("S"), paused_at: Some(now()) });
    Observation { record, vm: vm(phase), ..living() }
}

fn slept() -> Observation {
    let record = at(Phase::Hibernated { saved: saved("S") });
    let o = Observation { record, released: true, vm: Seen::Known(None), tag: tag("S"), ..blank() };
    wishing(o, |wish| wish.hibernate = true)
}

#[test]
fn a_hibernation_begins_with_a_capture_and_can_be_called_off_before_it() {
    check(vec![
        ("a hibernation captures", o(hibernating(None, None), Running), "capture"),
        (
            "a hibernation is called off before the capture",
            unwished(o(hibernating(None, None), Running)),
            "note up",
        ),
    ]);
}

#[test]
fn only_a_capture_that_is_known_counts_and_its_pause_from_its_beginning() {
    check(vec![
        (
            "a hibernation notes a capture that it made itself",
            Observation { captured_now: Some("S".into()), ..o(hibernating(None, None), Paused) },
            "note hibernating S -",
        ),
        (
            "a hibernation lets a guest go on whose capture nobody knows",
            o(hibernating(None, None), Paused),
            "resume",
        ),
        (
            "a hibernation counts the pause from the beginning of the capture",
            Observation {
                captured_now: Some("S".into()),
                capture_began: Some(Timestamp::from_second(9_000).unwrap()),
                ..o(hibernating(None, None), Paused)
            },
            "note hibernating S -",
        ),
    ]);
}

#[test]
fn a_capture_is_pushed_and_the_push_noted_only_when_the_tag_is_seen_to_hold_it() {
    check(vec![
        ("a hibernation pushes the capture", captured(Paused), "push S as hibernate"),
        (
            "a hibernation notes the push only when the tag is seen to hold the capture",
            Observation { tag: tag("S"), ..captured(Paused) },
            "note hibernating S S",
        ),
        (
            "a hibernation is not deceived by an older tag",
            Observation { tag: tag("old"), ..captured(Paused) },
            "push S as hibernate",
        ),
        (
            "a hibernation that was cut off after the push goes on from there, however late",
            Observation { tag: tag("S"), now: Timestamp::from_second(10_500).unwrap(), ..captured(Paused) },
            "note hibernating S S",
        ),
    ]);
}

#[test]
fn a_failed_push_lets_the_guest_go_on_after_what_reached_the_tag_is_taken_back() {
    check(vec![
        (
            "a hibernation forgets the capture before the guest goes on when the push failed",
            Observation { trouble: Some(trouble(Reason::HibernatePushFailed)), ..captured(Paused) },
            "note hibernating - - strays S",
        ),
        (
            "a hibernation looks whether a push of unknown end reached the tag before the guest goes on",
            Observation {
                tag: Seen::Unknown,
                trouble: Some(trouble(Reason::HibernatePushFailed)),
                ..captured(Paused)
            },
            "look Tag",
        ),
        (
            "a hibernation takes it back when it did",
            Observation {
                tag: tag("S"),
                trouble: Some(trouble(Reason::HibernatePushFailed)),
                ..captured(Paused)
            },
            "note rolling back",
        ),
        (
            "a hibernation remembers it when nobody can tell",
            Observation {
                tag: Seen::Failed(trouble(Reason::HibernateEvidenceUnavailable)),
                trouble: Some(trouble(Reason::HibernatePushFailed)),
                ..captured(Paused)
            },
            "note hibernating - - strays S",
        ),
    ]);
}

#[test]
fn a_capture_is_forgotten_when_its_pause_was_too_long_or_nobody_wants_it_or_the_guest_ran() {
    check(vec![
        (
            "a hibernation lets the guest go on when the pause was too long",
            Observation { now: Timestamp::from_second(10_121).unwrap(), ..captured(Paused) },
            "fail HibernatePauseLimit",
        ),
        (
            "a hibernation lets the guest go on when it is called off",
            unwished(captured(Paused)),
            "note hibernating - - strays S",
        ),
        (
            "a hibernation forgets a capture after which the guest ran",
            captured(Running),
            "note hibernating - - strays S",
        ),
    ]);
}

#[test]
fn a_vm_is_removed_after_its_pod_shows_no_id_but_not_for_ever_later() {
    check(vec![
        (
            "a hibernation shows the pod without id before it removes",
            Observation { published: false, ..pushed() },
            "wait",
        ),
        (
            "a hibernation does not wait for the API for ever",
            Observation { published: false, unpublished_for: PUBLISH_WAIT, ..pushed() },
            "remove",
        ),
        ("a hibernation removes the VM", pushed(), "remove"),
    ]);
}

#[test]
fn a_push_is_taken_back_when_the_vm_stays_after_all() {
    check(vec![
        (
            "a hibernation takes the push back when remove failed and the VM is there",
            Observation { trouble: Some(trouble(Reason::HibernateRemoveFailed)), ..pushed() },
            "note rolling back",
        ),
        ("a hibernation takes the push back when it is called off", unwished(pushed()), "note rolling back"),
    ]);
}

#[test]
fn a_hibernation_whose_guest_ran_since_its_capture_begins_anew() {
    let outrun = |o: Observation| Observation { trouble: Some(trouble(Reason::HibernateOutrun)), ..o };
    let stopped = || o(hibernating(Some("S"), Some("S")), Stopped);
    let anew = || o(hibernating(None, None), Stopped);
    check(vec![
        (
            "the capture of a VM that was stopped since is forgotten",
            outrun(stopped()),
            "note hibernating - - strays S",
        ),
        (
            "so it is when nobody wants it any more",
            outrun(unwished(stopped())),
            "note hibernating - - strays S",
        ),
        ("and of one that stands paused", outrun(pushed()), "note hibernating - - strays S"),
        ("then the VM is started", outrun(anew()), "note up"),
        ("a paused one goes on", outrun(o(hibernating(None, None), Paused)), "resume"),
        ("a VM that died since its capture and did not run is removed", stopped(), "remove"),
    ]);
}

#[test]
fn a_vm_that_died_on_its_way_ends_with_what_was_captured() {
    check(vec![
        (
            "a hibernation of a VM whose process died ends with what was captured",
            captured(Stopped),
            "push S as hibernate",
        ),
        (
            "a hibernation of a VM whose process died before the capture starts it first",
            o(hibernating(None, None), Stopped),
            "note up",
        ),
    ]);
}

#[test]
fn a_hibernation_is_done_only_when_the_vm_is_gone_and_this_rounds_capture_is_in_place() {
    check(vec![
        (
            "a hibernation is done when the VM is gone and the tag holds this round's capture",
            Observation { tag: tag("S"), ..removed(hibernating(Some("S"), Some("S"))) },
            "note hibernated S",
        ),
        (
            "a hibernation pushes the local copy when the VM is gone and the tag is not there",
            Observation { saved: snapshot(VM, "S"), ..removed(hibernating(Some("S"), None)) },
            "push S as hibernate",
        ),
        (
            "a hibernation says so loudly when neither is there",
            removed(hibernating(Some("S"), Some("S"))),
            "note lost HibernateEvidenceMissing",
        ),
        (
            "a hibernation is a loss when the VM was gone before the capture",
            removed(hibernating(None, None)),
            "note lost VMGone",
        ),
        (
            "a hibernation does not believe a registry that gives no answer",
            Observation {
                tag: Seen::Failed(trouble(Reason::HibernateEvidenceUnavailable)),
                ..removed(hibernating(Some("S"), Some("S")))
            },
            "fail HibernateEvidenceUnavailable",
        ),
    ]);
}

#[test]
fn a_tag_is_overwritten_only_while_it_holds_what_this_owner_wrote_or_a_stray_of_its_own() {
    let guard = |o: &Observation| match plan(o) {
        Step::PushHibernate(request) => request.guard,
        other => panic!("a push, not {other:?}"),
    };
    assert_eq!(guard(&captured(Paused)), Guard::AbsentOr(Vec::new()));
    let mut strayed = captured(Paused);
    strayed.tag = tag("T");
    strayed.record.as_mut().unwrap().strays = vec!["T".into()];
    assert_eq!(guard(&strayed), Guard::AbsentOr(vec!["sha256:T".into()]));
}

#[test]
fn a_rollback_takes_back_the_tag_of_its_attempt_and_no_other_but_freezes_no_guest_for_it() {
    check(vec![
        ("the tag of this attempt goes first", Observation { tag: tag("S"), ..back(Paused) }, "drop tag S"),
        (
            "a tag that somebody else moved is left alone",
            Observation { tag: tag("other"), ..back(Paused) },
            "note hibernating - - strays S",
        ),
        (
            "a registry that gives no answer is asked again",
            Observation { tag: Seen::Failed(trouble(Reason::RegistryUnavailable)), ..back(Paused) },
            "wait",
        ),
        (
            "the guest is not frozen longer than the limit for it: the tag is owed",
            Observation { now: Timestamp::from_second(10_121).unwrap(), tag: tag("S"), ..back(Paused) },
            "note hibernating - - strays S",
        ),
    ]);
}

#[test]
fn a_rollback_shows_id_and_address_before_the_guest_goes_on() {
    check(vec![
        (
            "id and address are shown before the guest goes on",
            Observation { published: false, ..back(Paused) },
            "wait",
        ),
        ("the capture is forgotten once they are", back(Paused), "note hibernating - - strays S"),
        ("the capture is forgotten when the guest runs", back(Running), "note hibernating - - strays S"),
    ]);
}

#[test]
fn a_rollback_of_a_vm_that_died_or_went_ends_the_hibernation_instead() {
    check(vec![
        (
            "a VM whose process died ends with what was captured",
            back(VmPhase::Stopped),
            "note hibernating S -",
        ),
        (
            "a VM that was removed after all is success",
            Observation { vm: Seen::Known(None), ..back(Paused) },
            "note hibernating S S",
        ),
    ]);
}

#[test]
fn a_hibernated_pod_rests_on_saved_state_that_is_there() {
    check(vec![
        ("a hibernated pod rests", slept(), "rest"),
        (
            "the leases of a hibernated pod are given back",
            Observation { released: false, ..slept() },
            "releaseleases",
        ),
        (
            "the evidence of a hibernated pod is looked at after a restart",
            Observation { tag: Seen::Unknown, ..slept() },
            "look Tag",
        ),
        (
            "a tag that vanished is put back from the local copy",
            Observation { tag: Seen::Known(None), saved: snapshot(VM, "S"), ..slept() },
            "push S as hibernate",
        ),
        (
            "a loss is said loudly and nothing boots",
            Observation { tag: Seen::Known(None), ..slept() },
            "fail HibernateEvidenceMissing",
        ),
    ]);
}

#[test]
fn a_hibernated_pod_that_is_wanted_again_wakes_and_one_started_by_hand_is_taken() {
    check(vec![
        (
            "a pod that is no longer wished hibernated wakes",
            wishing(slept(), |wish| wish.hibernate = false),
            "note creating S",
        ),
        (
            "a VM that somebody started by hand is taken",
            Observation { vm: vm(Running), ..slept() },
            "note up",
        ),
    ]);
}

#[test]
fn a_hibernated_pod_gives_no_baseline() {
    check(vec![(
        "forks of a hibernated pod are refused",
        Observation { baseline_wanted: true, ..slept() },
        "answer no",
    )]);
}
