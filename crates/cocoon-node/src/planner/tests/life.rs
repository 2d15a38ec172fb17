//! Rows of a VM that is up, of hibernation and its rollback.

use jiff::SignedDuration;

use super::*;

#[test]
fn a_vm_that_is_up() {
    let with = |change: fn(&mut OwnerRecord)| {
        let mut record = up();
        change(&mut record);
        Observation { record: Some(record), ..living() }
    };
    let woken = |o: Observation| {
        let mut record = o.record.clone().unwrap();
        (record.woken_from, record.woken_ready) = (Some(saved("S")), false);
        Observation { record: Some(record), reach: Reach::default(), ..o }
    };
    let asked = || Observation { baseline_wanted: true, ..living() };
    check(vec![
        ("is left alone", living(), "rest"),
        (
            "and paused by a capture that was cut off goes on",
            Observation { vm: vm(VmPhase::Paused), ..living() },
            "resume",
        ),
        (
            "and whose process died is started, once noted",
            Observation { vm: vm(VmPhase::Stopped), ..living() },
            "note restart",
        ),
        (
            "and whose restart was noted is started",
            Observation { vm: vm(VmPhase::Stopped), ..with(|r| r.restart_pending = true) },
            "start",
        ),
        (
            "and that cannot be started is lost",
            Observation { vm: vm(VmPhase::Stopped), failures: 1, ..with(|r| r.restart_pending = true) },
            "note lost RestartFailed",
        ),
        (
            "and that dies again within 30 s is lost, its disk kept",
            Observation {
                vm: vm(VmPhase::Stopped),
                ..with(|r| r.last_restart = Some(Timestamp::from_second(9_980).unwrap()))
            },
            "note lost RestartCooldown",
        ),
        ("and vanished is lost", Observation { vm: Seen::Known(None), ..living() }, "note lost VMGone"),
        (
            "and vanished before its wake reached ready is woken again",
            woken(Observation { vm: Seen::Known(None), tag: tag("S"), ..living() }),
            "note creating S",
        ),
        (
            "and died before its wake reached ready is not started cold but woken again",
            {
                let mut o = woken(Observation { vm: vm(VmPhase::Stopped), tag: tag("S"), ..living() });
                let record = o.record.as_mut().unwrap();
                (record.restart_pending, record.rewake) = (true, Some(o.now));
                o
            },
            "remove",
        ),
        (
            "and died soon after its wake waits for its turn when it just did so before",
            {
                let mut o = woken(Observation { vm: vm(VmPhase::Stopped), tag: tag("S"), ..living() });
                let record = o.record.as_mut().unwrap();
                let later = o.now.checked_add(SignedDuration::from_secs(20)).unwrap();
                (record.restart_pending, record.rewake) = (true, Some(later));
                o
            },
            "wait",
        ),
        (
            "and died long after its wake, ready or not, is started from its disk",
            {
                let mut o = woken(Observation { vm: vm(VmPhase::Stopped), tag: tag("S"), ..living() });
                o.record.as_mut().unwrap().restart_pending = true;
                o
            },
            "start",
        ),
        (
            "and died after its saved state went is started",
            {
                let mut o = woken(Observation { vm: vm(VmPhase::Stopped), ..living() });
                o.record.as_mut().unwrap().restart_pending = true;
                o
            },
            "start",
        ),
        (
            "looks whether a stray push reached the tag",
            Observation { tag: Seen::Unknown, ..with(|r| r.strays = vec!["T".into()]) },
            "look Tag",
        ),
        (
            "drops it when it did",
            Observation { tag: tag("T"), ..with(|r| r.strays = vec!["T".into()]) },
            "drop tag T",
        ),
        (
            "leaves a tag alone that is no stray of its own",
            Observation { tag: tag("S"), ..with(|r| r.strays = vec!["T".into()]) },
            "rest",
        ),
        (
            "is not lost while the engine gives no answer",
            Observation { vm: Seen::Failed(trouble(Reason::EngineUnavailable)), ..living() },
            "fail EngineUnavailable",
        ),
        (
            "and is asked to hibernate begins to",
            wishing(living(), |wish| wish.hibernate = true),
            "note hibernating - -",
        ),
        (
            "and is a macOS guest is not hibernated",
            wishing(living(), |wish| (wish.hibernate, wish.macos) = (true, true)),
            "fail HibernateUnsupported",
        ),
        (
            "and runs without its links is started again, which tells its guest who it is",
            {
                let mut o = living();
                if let Seen::Known(Some(vm)) = &mut o.vm {
                    vm.links_down = true;
                }
                o
            },
            "start",
        ),
        ("gives the baseline it has", Observation { baseline: snapshot(FORK, "B"), ..asked() }, "answer yes"),
        ("takes one when it has none", asked(), "savebaseline"),
        (
            "drops the import it was woken from",
            Observation { import: snapshot(IMPORT, "S"), ..with(|r| r.import_left = true) },
            &format!("drop {IMPORT}"),
        ),
    ]);
}

#[test]
fn a_hibernation() {
    let o = |record: Option<OwnerRecord>, phase: VmPhase| {
        wishing(Observation { record, vm: vm(phase), ..living() }, |wish| wish.hibernate = true)
    };
    let unwished = |o: Observation| wishing(o, |wish| wish.hibernate = false);
    let removed =
        |record: Option<OwnerRecord>| Observation { vm: Seen::Known(None), ..o(record, VmPhase::Paused) };
    use VmPhase::{Paused, Running, Stopped};
    check(vec![
        ("captures", o(hibernating(None, None), Running), "capture"),
        ("is called off before the capture", unwished(o(hibernating(None, None), Running)), "note up"),
        (
            "notes a capture that it made itself",
            Observation { captured_now: Some("S".into()), ..o(hibernating(None, None), Paused) },
            "note hibernating S -",
        ),
        ("lets a guest go on whose capture nobody knows", o(hibernating(None, None), Paused), "resume"),
        ("pushes the capture", o(hibernating(Some("S"), None), Paused), "push S as hibernate"),
        (
            "notes the push only when the tag is seen to hold the capture",
            Observation { tag: tag("S"), ..o(hibernating(Some("S"), None), Paused) },
            "note hibernating S S",
        ),
        (
            "is not deceived by an older tag",
            Observation { tag: tag("old"), ..o(hibernating(Some("S"), None), Paused) },
            "push S as hibernate",
        ),
        (
            "forgets the capture before the guest goes on when the push failed",
            Observation {
                trouble: Some(trouble(Reason::HibernatePushFailed)),
                ..o(hibernating(Some("S"), None), Paused)
            },
            "note hibernating - - strays S",
        ),
        (
            "looks whether a push of unknown end reached the tag before the guest goes on",
            Observation {
                tag: Seen::Unknown,
                trouble: Some(trouble(Reason::HibernatePushFailed)),
                ..o(hibernating(Some("S"), None), Paused)
            },
            "look Tag",
        ),
        (
            "takes it back when it did",
            Observation {
                tag: tag("S"),
                trouble: Some(trouble(Reason::HibernatePushFailed)),
                ..o(hibernating(Some("S"), None), Paused)
            },
            "note rolling back",
        ),
        (
            "remembers it when nobody can tell",
            Observation {
                tag: Seen::Failed(trouble(Reason::HibernateEvidenceUnavailable)),
                trouble: Some(trouble(Reason::HibernatePushFailed)),
                ..o(hibernating(Some("S"), None), Paused)
            },
            "note hibernating - - strays S",
        ),
        (
            "that was cut off after the push goes on from there, however late",
            Observation {
                tag: tag("S"),
                now: Timestamp::from_second(10_500).unwrap(),
                ..o(hibernating(Some("S"), None), Paused)
            },
            "note hibernating S S",
        ),
        (
            "lets the guest go on when the pause was too long",
            Observation {
                now: Timestamp::from_second(10_121).unwrap(),
                ..o(hibernating(Some("S"), None), Paused)
            },
            "fail HibernatePauseLimit",
        ),
        (
            "counts the pause from the beginning of the capture",
            Observation {
                captured_now: Some("S".into()),
                capture_began: Some(Timestamp::from_second(9_000).unwrap()),
                ..o(hibernating(None, None), Paused)
            },
            "note hibernating S -",
        ),
        (
            "lets the guest go on when it is called off",
            unwished(o(hibernating(Some("S"), None), Paused)),
            "note hibernating - - strays S",
        ),
        (
            "forgets a capture after which the guest ran",
            o(hibernating(Some("S"), None), Running),
            "note hibernating - - strays S",
        ),
        (
            "shows the pod without id before it removes",
            Observation { published: false, ..o(hibernating(Some("S"), Some("S")), Paused) },
            "wait",
        ),
        (
            "does not wait for the API for ever",
            Observation {
                published: false,
                unpublished_for: PUBLISH_WAIT,
                ..o(hibernating(Some("S"), Some("S")), Paused)
            },
            "remove",
        ),
        ("removes the VM", o(hibernating(Some("S"), Some("S")), Paused), "remove"),
        (
            "takes the push back when remove failed and the VM is there",
            Observation {
                trouble: Some(trouble(Reason::HibernateRemoveFailed)),
                ..o(hibernating(Some("S"), Some("S")), Paused)
            },
            "note rolling back",
        ),
        (
            "takes the push back when it is called off",
            unwished(o(hibernating(Some("S"), Some("S")), Paused)),
            "note rolling back",
        ),
        (
            "of a VM whose process died ends with what was captured",
            o(hibernating(Some("S"), None), Stopped),
            "push S as hibernate",
        ),
        (
            "of a VM whose process died before the capture starts it first",
            o(hibernating(None, None), Stopped),
            "note up",
        ),
        (
            "is done when the VM is gone and the tag holds this round's capture",
            Observation { tag: tag("S"), ..removed(hibernating(Some("S"), Some("S"))) },
            "note hibernated S",
        ),
        (
            "pushes the local copy when the VM is gone and the tag is not there",
            Observation { saved: snapshot(VM, "S"), ..removed(hibernating(Some("S"), None)) },
            "push S as hibernate",
        ),
        (
            "says so loudly when neither is there",
            removed(hibernating(Some("S"), Some("S"))),
            "note lost HibernateEvidenceMissing",
        ),
        (
            "is a loss when the VM was gone before the capture",
            removed(hibernating(None, None)),
            "note lost VMGone",
        ),
        (
            "does not believe a registry that gives no answer",
            Observation {
                tag: Seen::Failed(trouble(Reason::HibernateEvidenceUnavailable)),
                ..removed(hibernating(Some("S"), Some("S")))
            },
            "fail HibernateEvidenceUnavailable",
        ),
        (
            "guards the tag with what this owner last wrote",
            o(hibernating(Some("S"), None), Paused),
            "push S as hibernate",
        ),
    ]);
    let mut strayed = o(hibernating(Some("S"), None), Paused);
    strayed.tag = tag("T");
    strayed.record.as_mut().unwrap().strays = vec!["T".into()];
    let Step::PushHibernate(request) = plan(&strayed) else { panic!("a push") };
    assert_eq!(request.guard, Guard::AbsentOr(vec!["sha256:T".into()]), "a stray of its own may go");
    let Step::PushHibernate(request) = plan(&o(hibernating(Some("S"), None), Paused)) else {
        panic!("a push")
    };
    assert_eq!(request.guard, Guard::AbsentOr(Vec::new()));
}

#[test]
fn a_live_capture_goes_ahead_of_a_long_push() {
    let o = |record: Option<OwnerRecord>, phase: VmPhase, seconds: Option<u64>| {
        let push_time = Seen::Known(seconds.map(Duration::from_secs));
        let o = Observation { record, vm: vm(phase), push_time, ..living() };
        wishing(o, |wish| wish.hibernate = true)
    };
    let before = |seconds| o(hibernating(None, None), VmPhase::Running, seconds);
    let ahead = |phase| o(at(Phase::Prepushing), phase, Some(21));
    let unwished = |o: Observation| wishing(o, |wish| wish.hibernate = false);
    let dropped = |o: Observation| Observation { dropped: true, ..o };
    let done = |o: Observation| Observation { prepushed: true, ..o };
    let drop_live = format!("drop {LIVE}");
    use VmPhase::{Paused, Running, Stopped};
    check(vec![
        ("it is asked how long", Observation { push_time: Seen::Unknown, ..before(None) }, "look PushTime"),
        ("not known is not long", before(None), "capture"),
        ("20 s are not long", before(Some(20)), "capture"),
        ("more is", before(Some(21)), "note prepushing"),
        ("not without a registry", Observation { registry: false, ..before(Some(21)) }, "capture"),
        (
            "a size that cannot be read counts as large",
            Observation { push_time: Seen::Failed(trouble(Reason::EngineUnavailable)), ..before(None) },
            "note prepushing",
        ),
        ("once in a hibernation", done(before(Some(21))), "capture"),
        ("it goes", ahead(Running), "prepush"),
        (
            "it goes too when its size cannot be read",
            Observation { push_time: Seen::Failed(trouble(Reason::EngineUnavailable)), ..ahead(Running) },
            "prepush",
        ),
        ("its copy goes", done(ahead(Running)), &drop_live),
        ("then the guest is captured", dropped(done(ahead(Running))), "note hibernating - -"),
        ("called off, its copy goes", unwished(ahead(Running)), &drop_live),
        ("and the guest goes on", dropped(unwished(ahead(Running))), "note up"),
        ("a save that was cut off leaves no guest frozen", ahead(Paused), "resume"),
        (
            "after a restart nobody knows, so only its copy goes",
            o(at(Phase::Prepushing), Running, None),
            &drop_live,
        ),
        (
            "and the guest is captured as usual",
            dropped(o(at(Phase::Prepushing), Running, None)),
            "note hibernating - -",
        ),
        ("a process that died is started as ever", dropped(ahead(Stopped)), "note up"),
        (
            "a VM that vanished is a loss",
            Observation { vm: Seen::Known(None), ..dropped(ahead(Running)) },
            "note lost VMGone",
        ),
        (
            "a delete begins as of a VM that is up",
            wishing(ahead(Running), |wish| wish.deleting = true),
            "note deleting live=true keep=- captured=- pushed=false outrun=",
        ),
    ]);
}

#[test]
fn a_rollback_and_a_hibernated_pod() {
    let back = |phase| Observation {
        record: at(Phase::RollingBack { pushed: saved("S"), paused_at: Some(now()) }),
        vm: vm(phase),
        ..living()
    };
    let slept = || {
        let record = at(Phase::Hibernated { saved: saved("S") });
        let o = Observation { record, released: true, vm: Seen::Known(None), tag: tag("S"), ..blank() };
        wishing(o, |wish| wish.hibernate = true)
    };
    use VmPhase::{Paused, Running};
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
            "but the guest is not frozen longer than the limit for it: the tag is owed",
            Observation { now: Timestamp::from_second(10_121).unwrap(), tag: tag("S"), ..back(Paused) },
            "note hibernating - - strays S",
        ),
        (
            "id and address are shown before the guest goes on",
            Observation { published: false, ..back(Paused) },
            "wait",
        ),
        ("then the capture is forgotten", back(Paused), "note hibernating - - strays S"),
        ("as it is when the guest runs", back(Running), "note hibernating - - strays S"),
        (
            "of a VM whose process died ends with what was captured",
            back(VmPhase::Stopped),
            "note hibernating S -",
        ),
        (
            "a VM that was removed after all is success",
            Observation { vm: Seen::Known(None), ..back(Paused) },
            "note hibernating S S",
        ),
        ("a hibernated pod rests", slept(), "rest"),
        ("its leases are given back", Observation { released: false, ..slept() }, "releaseleases"),
        (
            "its evidence is looked at after a restart",
            Observation { tag: Seen::Unknown, ..slept() },
            "look Tag",
        ),
        (
            "a tag that vanished is put back from the local copy",
            Observation { tag: Seen::Known(None), saved: snapshot(VM, "S"), ..slept() },
            "push S as hibernate",
        ),
        (
            "or the loss is said loudly and nothing boots",
            Observation { tag: Seen::Known(None), ..slept() },
            "fail HibernateEvidenceMissing",
        ),
        ("no longer wished, it wakes", wishing(slept(), |wish| wish.hibernate = false), "note creating S"),
        ("forks of it are refused", Observation { baseline_wanted: true, ..slept() }, "answer no"),
        (
            "a VM that somebody started by hand is taken",
            Observation { vm: vm(Running), ..slept() },
            "note up",
        ),
    ]);
}

#[test]
fn while_a_retry_is_not_due_only_safety_is_brought_back() {
    let soft = |o: Observation| Observation { cooling: Cooling::Soft, ..o };
    let hard = |o: Observation| Observation { cooling: Cooling::Hard, ..o };
    let paused = || Observation { vm: vm(VmPhase::Paused), ..living() };
    check(vec![
        ("no boot", soft(Observation { record: at(Phase::Creating { restore: None }), ..blank() }), "rest"),
        ("no second failure", soft(wishing(blank(), |wish| wish.restore_marked = true)), "rest"),
        ("a paused guest goes on", soft(paused()), "resume"),
        ("not even that after it failed itself", hard(paused()), "rest"),
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
