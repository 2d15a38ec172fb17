//! Rows of a VM that is up.

use jiff::SignedDuration;

use super::*;

fn with(change: fn(&mut OwnerRecord)) -> Observation {
    let mut record = up();
    change(&mut record);
    Observation { record: Some(record), ..living() }
}

/// Woken from `S`, and never seen ready.
fn woken(o: Observation) -> Observation {
    let mut record = o.record.clone().unwrap();
    (record.woken_from, record.woken_ready) = (Some(saved("S")), false);
    Observation { record: Some(record), reach: Reach::default(), ..o }
}

/// The process of such a VM died, which is noted; `rewake` in so many seconds, if at all.
fn died_early(o: Observation, rewake: Option<i64>) -> Observation {
    let mut o = woken(Observation { vm: vm(VmPhase::Stopped), ..o });
    let due = rewake.map(|seconds| o.now.checked_add(SignedDuration::from_secs(seconds)).unwrap());
    let record = o.record.as_mut().unwrap();
    (record.restart_pending, record.rewake) = (true, due);
    o
}

fn asked() -> Observation {
    Observation { baseline_wanted: true, ..living() }
}

/// After a failure, before its retry is due.
fn cooling(cooling: Cooling, o: Observation) -> Observation {
    Observation { cooling, ..o }
}

#[test]
fn a_vm_that_is_up_is_left_alone_whether_the_engine_answers_or_not() {
    check(vec![
        ("a VM that is up is left alone", living(), "rest"),
        (
            "a VM that is up is not lost while the engine gives no answer",
            Observation { vm: Seen::Failed(trouble(Reason::EngineUnavailable)), ..living() },
            "fail EngineUnavailable",
        ),
    ]);
}

#[test]
fn a_guest_that_a_capture_left_paused_goes_on() {
    check(vec![(
        "a VM that is up and paused by a capture that was cut off goes on",
        Observation { vm: vm(VmPhase::Paused), ..living() },
        "resume",
    )]);
}

#[test]
fn a_vm_whose_process_died_is_started_and_lost_only_when_it_cannot_be_or_dies_again_at_once() {
    check(vec![
        (
            "a VM that is up and whose process died is started, once noted",
            Observation { vm: vm(VmPhase::Stopped), ..living() },
            "note restart",
        ),
        (
            "a VM that is up and whose restart was noted is started",
            Observation { vm: vm(VmPhase::Stopped), ..with(|r| r.restart_pending = true) },
            "start",
        ),
        (
            "a VM that is up and that cannot be started is lost",
            Observation { vm: vm(VmPhase::Stopped), failures: 1, ..with(|r| r.restart_pending = true) },
            "note lost RestartFailed",
        ),
        (
            "a VM that is up and that dies again within 30 s is lost, its disk kept",
            Observation {
                vm: vm(VmPhase::Stopped),
                ..with(|r| r.last_restart = Some(Timestamp::from_second(9_980).unwrap()))
            },
            "note lost RestartCooldown",
        ),
    ]);
}

#[test]
fn a_vm_that_vanished_is_lost_unless_its_wake_never_reached_ready() {
    check(vec![
        (
            "a VM that is up and vanished is lost",
            Observation { vm: Seen::Known(None), ..living() },
            "note lost VMGone",
        ),
        (
            "a VM that is up and vanished before its wake reached ready is woken again",
            woken(Observation { vm: Seen::Known(None), tag: tag("S"), ..living() }),
            "note creating S",
        ),
    ]);
}

#[test]
fn a_vm_that_died_before_its_wake_was_ready_is_woken_again_while_its_saved_state_counts() {
    check(vec![
        (
            "a VM that is up and died before its wake reached ready is not started cold but woken again",
            died_early(Observation { tag: tag("S"), ..living() }, Some(0)),
            "remove",
        ),
        (
            "a VM that is up and died soon after its wake waits for its turn when it just did so before",
            died_early(Observation { tag: tag("S"), ..living() }, Some(20)),
            "wait",
        ),
        (
            "a VM that is up and died long after its wake, ready or not, is started from its disk",
            died_early(Observation { tag: tag("S"), ..living() }, None),
            "start",
        ),
        (
            "a VM that is up and died after its saved state went is started",
            died_early(living(), None),
            "start",
        ),
    ]);
}

#[test]
fn a_stray_push_is_taken_back_and_no_other_tag() {
    check(vec![
        (
            "a VM that is up looks whether a stray push reached the tag",
            Observation { tag: Seen::Unknown, ..with(|r| r.strays = vec!["T".into()]) },
            "look Tag",
        ),
        (
            "a VM that is up drops it when it did",
            Observation { tag: tag("T"), ..with(|r| r.strays = vec!["T".into()]) },
            "drop tag T",
        ),
        (
            "a VM that is up leaves a tag alone that is no stray of its own",
            Observation { tag: tag("S"), ..with(|r| r.strays = vec!["T".into()]) },
            "rest",
        ),
    ]);
}

#[test]
fn a_vm_that_is_asked_to_hibernate_begins_to_unless_its_guest_cannot() {
    check(vec![
        (
            "a VM that is up and is asked to hibernate begins to",
            wishing(living(), |wish| wish.hibernate = true),
            "note hibernating - -",
        ),
        (
            "a VM that is up and is a macOS guest is not hibernated",
            wishing(living(), |wish| (wish.hibernate, wish.macos) = (true, true)),
            "fail HibernateUnsupported",
        ),
    ]);
}

#[test]
fn a_guest_without_links_is_told_again_who_it_is() {
    check(vec![(
        "a VM that is up and runs without its links is started again, which tells its guest who it is",
        {
            let mut o = living();
            if let Seen::Known(Some(vm)) = &mut o.vm {
                vm.links_down = true;
            }
            o
        },
        "start",
    )]);
}

#[test]
fn the_source_of_a_fork_gives_the_baseline_it_has_or_takes_one() {
    check(vec![
        (
            "a VM that is up gives the baseline it has",
            Observation { baseline: snapshot(FORK, "B"), ..asked() },
            "answer yes",
        ),
        ("a VM that is up takes one when it has none", asked(), "savebaseline"),
    ]);
}

#[test]
fn the_import_of_a_wake_goes_once_the_vm_is_up() {
    check(vec![(
        "a VM that is up drops the import it was woken from",
        Observation { import: snapshot(IMPORT, "S"), ..with(|r| r.import_left = true) },
        &format!("drop {IMPORT}"),
    )]);
}

#[test]
fn while_a_retry_is_not_due_only_safety_is_brought_back() {
    check(vec![
        (
            "nothing boots",
            cooling(Cooling::Soft, Observation { record: at(Phase::Creating { restore: None }), ..blank() }),
            "rest",
        ),
        (
            "nothing fails a second time",
            cooling(Cooling::Soft, wishing(blank(), |wish| wish.restore_marked = true)),
            "rest",
        ),
        (
            "a paused guest goes on",
            cooling(Cooling::Soft, Observation { vm: vm(VmPhase::Paused), ..living() }),
            "resume",
        ),
        (
            "a paused guest does not once that failed itself",
            cooling(Cooling::Hard, Observation { vm: vm(VmPhase::Paused), ..living() }),
            "rest",
        ),
    ]);
}

#[test]
fn a_vm_that_stops_soon_after_its_wake_is_woken_again_and_never_lost_for_that() {
    let stopped = |since_wake: i64, since_restart: Option<i64>, woken: bool| {
        let mut o = Observation { vm: vm(VmPhase::Stopped), tag: tag("S"), ..living() };
        let before = |seconds: i64| o.now.checked_sub(SignedDuration::from_secs(seconds)).unwrap();
        let (started, last) = (before(since_wake), since_restart.map(before));
        let record = o.record.as_mut().unwrap();
        (record.woken_at, record.last_restart) = (Some(started), last);
        record.woken_from = woken.then(|| saved("S"));
        match plan(&Observation { reach: Reach::default(), ..o.clone() }) {
            Step::Note(record) => match record.phase {
                Phase::Lost { trouble } => trouble.reason.to_string(),
                _ => match record.rewake {
                    Some(due) => format!("wake in {} s", due.duration_since(o.now).as_secs()),
                    None => "start".to_owned(),
                },
            },
            other => format!("{other:?}"),
        }
    };
    for (since_wake, since_restart, woken, expected) in [
        (1, None, true, "wake in 0 s"),
        (1, Some(10), true, "wake in 20 s"),
        (31, None, true, "start"),
        (31, Some(10), true, "RestartCooldown"),
        (1, None, false, "start"),
        (1, Some(10), false, "RestartCooldown"),
    ] {
        assert_eq!(
            stopped(since_wake, since_restart, woken),
            expected,
            "{since_wake} s after its wake, {since_restart:?} s after a restart, woken {woken}"
        );
    }
}
