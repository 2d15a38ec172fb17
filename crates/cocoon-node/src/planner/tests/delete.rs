//! Rows of the end.

use super::*;

#[test]
fn a_delete() {
    let going = |o: Observation| wishing(o, |wish| wish.deleting = true);
    let at_vm = |record, phase| going(Observation { record, vm: vm(phase), ..living() });
    let after = |record| going(Observation { record, vm: Seen::Known(None), ..living() });
    let cleaned = |record| Observation { released: true, dropped: true, ..after(record) };
    let never = |o: Observation| wishing(o, |wish| wish.snapshot_on_delete = false);
    let kept = || {
        at(Phase::Deleting {
            live: false,
            keep: Some(saved("S")),
            captured: None,
            pushed: false,
            outrun: vec![],
        })
    };
    let outrun = || {
        at(Phase::Deleting { live: true, keep: None, captured: None, pushed: true, outrun: vec!["S".into()] })
    };
    let was = |phase: Phase, vm_phase| going(Observation { record: at(phase), vm: vm(vm_phase), ..living() });
    use VmPhase::{Paused, Running, Stopped};
    check(vec![
        ("of a pod that never had a VM ends at once", going(blank()), "finalise"),
        (
            "notes what is alive first",
            going(living()),
            "note deleting live=true keep=- captured=- pushed=false outrun=",
        ),
        (
            "of a hibernated pod keeps the saved state",
            after(at(Phase::Hibernated { saved: saved("S") })),
            "note deleting live=false keep=S captured=- pushed=false outrun=",
        ),
        (
            "of a hibernation that reached its push finishes it",
            was(
                Phase::Hibernating { captured: Some("S".into()), pushed: Some(saved("S")), paused_at: None },
                Paused,
            ),
            "note deleting live=false keep=S captured=- pushed=false outrun=",
        ),
        (
            "of an unfinished hibernation outruns what that may have pushed",
            was(Phase::Hibernating { captured: Some("S".into()), pushed: None, paused_at: None }, Paused),
            "note deleting live=true keep=- captured=S pushed=false outrun=S",
        ),
        (
            "of a hibernation whose VM died after the capture keeps the capture",
            was(Phase::Hibernating { captured: Some("S".into()), pushed: None, paused_at: None }, Stopped),
            "note deleting live=true keep=- captured=S pushed=false outrun=S",
        ),
        (
            "of a hibernation whose guest went on forgets the capture",
            was(Phase::Hibernating { captured: Some("S".into()), pushed: None, paused_at: None }, Running),
            "note deleting live=true keep=- captured=- pushed=false outrun=S",
        ),
        (
            "of a VM that is being woken outruns what it is woken from",
            was(Phase::Creating { restore: Some(saved("S")) }, Running),
            "note deleting live=true keep=- captured=- pushed=false outrun=S",
        ),
        (
            "of a rollback outruns the push that is being taken back",
            was(Phase::RollingBack { pushed: saved("S"), paused_at: None }, Paused),
            "note deleting live=true keep=- captured=S pushed=false outrun=S",
        ),
        ("captures a live VM", at_vm(deleting(true, None, false), Running), "capture"),
        (
            "notes its own capture",
            Observation { captured_now: Some("L".into()), ..at_vm(deleting(true, None, false), Paused) },
            "note deleting live=true keep=- captured=L pushed=false outrun=",
        ),
        (
            "takes the capture again when nobody knows it",
            at_vm(deleting(true, None, false), Paused),
            "resume",
        ),
        (
            "pushes it as latest",
            Observation { saved: snapshot(VM, "L"), ..at_vm(deleting(true, Some("L"), false), Paused) },
            "push L as latest",
        ),
        (
            "pushes it although the process died meanwhile",
            Observation { saved: snapshot(VM, "L"), ..at_vm(deleting(true, Some("L"), false), Stopped) },
            "push L as latest",
        ),
        (
            "pushes it although the VM is gone",
            Observation { saved: snapshot(VM, "L"), ..after(deleting(true, Some("L"), false)) },
            "push L as latest",
        ),
        (
            "takes it again when it is not here any more",
            at_vm(deleting(true, Some("L"), false), Paused),
            "note deleting live=true keep=- captured=- pushed=false outrun=",
        ),
        (
            "notes the push",
            Observation {
                latest_now: Some("sha256:L".into()),
                saved: snapshot(VM, "L"),
                ..at_vm(deleting(true, Some("L"), false), Paused)
            },
            "note deleting live=true keep=- captured=L pushed=true outrun=",
        ),
        ("then removes the VM", at_vm(deleting(true, Some("L"), true), Paused), "remove"),
        ("under policy never removes at once", never(at_vm(deleting(true, None, false), Running)), "remove"),
        (
            "without a registry removes at once",
            Observation { registry: false, ..at_vm(deleting(true, None, false), Running) },
            "remove",
        ),
        ("of a VM that does not run saves nothing", at_vm(deleting(false, None, false), Stopped), "remove"),
        (
            "of a VM whose process died meanwhile saves nothing",
            at_vm(deleting(true, None, false), Stopped),
            "remove",
        ),
        ("gives leases back", after(deleting(true, None, true)), "releaseleases"),
        (
            "drops local snapshots",
            Observation { released: true, ..after(deleting(true, None, true)) },
            &format!("drop {FORK} {IMPORT} {LIVE} {VM}"),
        ),
        (
            "keeps them when asked to",
            wishing(Observation { released: true, ..after(deleting(true, None, true)) }, |wish| {
                wish.keep_snapshot = true
            }),
            "finalise",
        ),
        (
            "drops a hibernated pod's copy only when the tag surely holds the state",
            Observation { released: true, tag: tag("S"), ..after(kept()) },
            &format!("drop {FORK} {IMPORT} {LIVE} {VM}"),
        ),
        (
            "keeps the copy when the registry gives no answer",
            Observation {
                released: true,
                tag: Seen::Failed(trouble(Reason::RegistryUnavailable)),
                ..after(kept())
            },
            &format!("drop {FORK} {IMPORT} {LIVE}"),
        ),
        (
            "keeps the copy when there is no registry",
            Observation { released: true, registry: false, ..after(kept()) },
            &format!("drop {FORK} {IMPORT} {LIVE}"),
        ),
        (
            "does not wait for a clean-up that cannot be done",
            Observation { failures: 3, ..after(deleting(true, None, true)) },
            "finalise",
        ),
        (
            "drops the tag that the live VM was woken from",
            Observation { tag: tag("S"), ..cleaned(outrun()) },
            "drop tag S",
        ),
        (
            "leaves a tag alone that holds something else",
            Observation { tag: tag("T"), ..cleaned(outrun()) },
            "note deleting live=true keep=- captured=- pushed=true outrun=",
        ),
        (
            "does not make the pod wait for a registry",
            Observation { tag: Seen::Failed(trouble(Reason::RegistryUnavailable)), ..cleaned(outrun()) },
            "finalise",
        ),
        (
            "but owes it the registry, so that nothing old comes back",
            Observation {
                finalised: true,
                tag: Seen::Failed(trouble(Reason::RegistryUnavailable)),
                ..cleaned(outrun())
            },
            "fail RegistryUnavailable",
        ),
        ("ends the pod", cleaned(deleting(true, None, true)), "finalise"),
        ("forgets it last", Observation { finalised: true, ..cleaned(deleting(true, None, true)) }, "forget"),
        (
            "of a pod that is gone from the API needs no end",
            wishing(cleaned(deleting(true, None, true)), |wish| wish.gone = true),
            "forget",
        ),
        (
            "of an unmanaged pod touches nothing",
            wishing(going(living()), |wish| wish.managed = false),
            "finalise",
        ),
        ("refuses forks", Observation { baseline_wanted: true, ..going(living()) }, "answer no"),
    ]);
}
