//! Rows of making a VM.

use super::*;

#[test]
fn a_pod_without_a_vm() {
    let fork = |o: Observation| wishing(o, |wish| wish.how = How::Fork("vk-src".into()));
    let source = SourceRef { repository: "r".into(), reference: "v1".into(), local: "r:v1".into() };
    let cloning = |o: Observation| wishing(o, |wish| wish.how = How::Clone(source.clone()));
    let fresh = || Observation { record: at(Phase::Creating { restore: None }), ..blank() };
    let forked = SnapshotView { id: "B".into(), name: "fork-vk-src".into(), hypervisor: "qemu".into() };
    check(vec![
        (
            "the engine is asked before anything is made",
            Observation { vm: Seen::Unknown, ..blank() },
            "look Vm",
        ),
        (
            "an engine that gives no answer makes nothing",
            Observation { vm: Seen::Failed(trouble(Reason::EngineUnavailable)), ..blank() },
            "fail EngineUnavailable",
        ),
        ("evidence is asked for before a boot", Observation { tag: Seen::Unknown, ..blank() }, "look Tag"),
        (
            "evidence that cannot be read boots nothing",
            Observation { tag: Seen::Failed(trouble(Reason::HibernateEvidenceUnavailable)), ..blank() },
            "fail HibernateEvidenceUnavailable",
        ),
        (
            "without a registry the local snapshot is the evidence",
            Observation { registry: false, saved: Seen::Unknown, ..blank() },
            "look Saved",
        ),
        (
            "the baseline of a former life goes before a fresh boot",
            Observation { baseline: snapshot(FORK, "B"), ..blank() },
            &format!("drop {FORK}"),
        ),
        ("the image is made local", Observation { image: Seen::Unknown, ..blank() }, "ensureimage"),
        ("the record is written before the engine is asked", blank(), "note creating fresh"),
        ("then the VM boots", fresh(), "run"),
        ("a missing clone source is pulled", cloning(fresh()), "pullsource"),
        (
            "a present one is cloned as a new machine",
            Observation { source: snapshot("r:v1", "S"), ..cloning(fresh()) },
            "clone r:v1 same=false",
        ),
        ("a fork asks its source's owner", fork(fresh()), "look Fork"),
        (
            "and clones the baseline as a new machine",
            Observation { fork: Seen::Known(forked), ..fork(fresh()) },
            "clone fork-vk-src same=false",
        ),
        (
            "a pod that cannot be served as it is makes nothing",
            wishing(blank(), |wish| wish.problem = Some(trouble(Reason::InvalidAnnotation))),
            "fail InvalidAnnotation",
        ),
        (
            "a source that this release does not serve is refused",
            wishing(blank(), |wish| wish.how = How::Refused(trouble(Reason::NotSupported))),
            "fail NotSupported",
        ),
        ("a pod that ended is left alone", wishing(blank(), |wish| wish.terminal = true), "rest"),
        (
            "a VM of its name that runs is adopted",
            Observation { vm: vm(VmPhase::Running), ..blank() },
            "note up",
        ),
        (
            "a half-made VM of its name is removed first",
            Observation { vm: vm(VmPhase::Creating), ..blank() },
            "remove",
        ),
        (
            "a half-made VM of this record is removed, too",
            Observation { vm: vm(VmPhase::Creating), ..fresh() },
            "remove",
        ),
        (
            "a VM that runs although the answer was never heard is taken",
            Observation { vm: vm(VmPhase::Running), ..fresh() },
            "note up",
        ),
        (
            "a VM that came up and died before that was heard keeps its disk",
            Observation { vm: vm(VmPhase::Stopped), ..fresh() },
            "note up",
        ),
        (
            "one that never came up is removed",
            {
                let mut o = Observation { vm: vm(VmPhase::Stopped), ..fresh() };
                if let Seen::Known(Some(vm)) = &mut o.vm {
                    vm.came_up = false;
                }
                o
            },
            "remove",
        ),
        (
            "an id on the pod without a VM is a loss, not a reason to boot blank",
            wishing(blank(), |wish| wish.id = "ID0".into()),
            "note lost VMGone",
        ),
    ]);
}

#[test]
fn saved_state_wins() {
    let kept = || Observation { tag: tag("S"), ..blank() };
    let noted =
        |o: Observation| Observation { record: at(Phase::Creating { restore: Some(saved("S")) }), ..o };
    check(vec![
        ("a tag makes the boot a restore, pulled when it is not here", kept(), "pull sha256:S"),
        (
            "the local copy is used when it is what the tag holds",
            Observation { saved: snapshot(VM, "S"), ..noted(kept()) },
            &format!("clone {VM} same=true"),
        ),
        (
            "an older local copy is not",
            Observation { saved: snapshot(VM, "old"), ..noted(kept()) },
            "pull sha256:S",
        ),
        (
            "the import is cloned as the same machine",
            Observation { import: snapshot(IMPORT, "S"), ..noted(kept()) },
            &format!("clone {IMPORT} same=true"),
        ),
        (
            "an import of something else is dropped",
            Observation { import: snapshot(IMPORT, "other"), ..noted(kept()) },
            &format!("drop {IMPORT}"),
        ),
        (
            "the baseline stays: a wake goes on with the same lineage",
            Observation { baseline: snapshot(FORK, "B"), saved: snapshot(VM, "S"), ..kept() },
            "note creating S",
        ),
        (
            "another image is a conflict",
            wishing(kept(), |wish| wish.image = "other:1".into()),
            "fail HibernateImageConflict",
        ),
        (
            "another source is a conflict",
            wishing(kept(), |wish| wish.how = How::Fork("vk-src".into())),
            "fail HibernateSourceConflict",
        ),
        (
            "unless the operator marked it as a wake",
            wishing(kept(), |wish| {
                wish.how = How::Fork("vk-src".into());
                wish.restore_marked = true;
            }),
            "pull sha256:S",
        ),
        (
            "a marked wake without saved state boots nothing",
            wishing(blank(), |wish| wish.restore_marked = true),
            "fail HibernateEvidenceMissing",
        ),
        (
            "a snapshot of another hypervisor is refused with both names",
            wishing(Observation { saved: snapshot(VM, "S"), ..noted(kept()) }, |wish| {
                wish.hypervisor = "firecracker".into();
            }),
            "fail SnapshotIncompatible",
        ),
        (
            "a pod that wants to be hibernated and is saved is hibernated",
            wishing(kept(), |wish| wish.hibernate = true),
            "note hibernated S",
        ),
        (
            "a pod that wants to be hibernated and is nowhere is told so",
            wishing(blank(), |wish| wish.hibernate = true),
            "fail HibernateEvidenceMissing",
        ),
        (
            "saved state that the pod has consumed does not come back by itself",
            wishing(kept(), |wish| {
                (wish.id, wish.woken_from, wish.said_ready) = ("ID1".into(), "S".into(), true);
            }),
            "note lost VMGone",
        ),
        (
            "a wake that never reached ready is done again",
            wishing(Observation { saved: snapshot(VM, "S"), ..kept() }, |wish| {
                (wish.id, wish.woken_from) = ("ID1".into(), "S".into());
            }),
            "note creating S",
        ),
        (
            "a wake whose tag is gone uses the local copy it was promised",
            Observation { saved: snapshot(VM, "S"), ..noted(blank()) },
            &format!("clone {VM} same=true"),
        ),
        ("and boots nothing when that is gone, too", noted(blank()), "fail HibernateEvidenceMissing"),
    ]);
}
