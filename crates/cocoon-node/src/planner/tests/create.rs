//! Rows of making a VM.

use super::*;

fn fork(o: Observation) -> Observation {
    wishing(o, |wish| wish.how = How::Fork("vk-src".into()))
}

fn cloning(o: Observation) -> Observation {
    let source = SourceRef { repository: "r".into(), reference: "v1".into(), local: "r:v1".into() };
    wishing(o, |wish| wish.how = How::Clone(source))
}

/// Its record is written, nothing is saved.
fn fresh() -> Observation {
    Observation { record: at(Phase::Creating { restore: None }), ..blank() }
}

/// The baseline that the source's owner answered with.
fn forked() -> SnapshotView {
    SnapshotView { id: "B".into(), name: "fork-vk-src".into(), hypervisor: "qemu".into() }
}

/// Its registry holds saved state `S`.
fn kept() -> Observation {
    Observation { tag: tag("S"), ..blank() }
}

/// Its record says that it is to be restored from `S`.
fn noted(o: Observation) -> Observation {
    Observation { record: at(Phase::Creating { restore: Some(saved("S")) }), ..o }
}

#[test]
fn nothing_is_made_before_the_engine_and_the_evidence_were_asked_and_answered() {
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
    ]);
}

#[test]
fn a_fresh_boot_has_its_image_and_its_record_first_and_no_baseline_of_a_former_life() {
    check(vec![
        (
            "the baseline of a former life goes before a fresh boot",
            Observation { baseline: snapshot(FORK, "B"), ..blank() },
            &format!("drop {FORK}"),
        ),
        ("the image is made local", Observation { image: Seen::Unknown, ..blank() }, "ensureimage"),
        ("the record is written before the engine is asked", blank(), "note creating fresh"),
        ("the VM boots once that is written", fresh(), "run"),
    ]);
}

#[test]
fn a_clone_and_a_fork_are_new_machines_of_a_source_that_is_here() {
    check(vec![
        ("a missing clone source is pulled", cloning(fresh()), "pullsource"),
        (
            "a clone source that is here is cloned as a new machine",
            Observation { source: snapshot("r:v1", "S"), ..cloning(fresh()) },
            "clone r:v1 same=false",
        ),
        ("a fork asks its source's owner", fork(fresh()), "look Fork"),
        (
            "a fork clones the baseline as a new machine",
            Observation { fork: Seen::Known(forked()), ..fork(fresh()) },
            "clone fork-vk-src same=false",
        ),
    ]);
}

#[test]
fn a_pod_that_cannot_be_served_or_has_ended_makes_nothing() {
    check(vec![
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
    ]);
}

#[test]
fn a_vm_of_the_pods_name_that_came_up_is_taken_and_one_that_never_did_is_removed() {
    check(vec![
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
            "a VM that never came up is removed",
            {
                let mut o = Observation { vm: vm(VmPhase::Stopped), ..fresh() };
                if let Seen::Known(Some(vm)) = &mut o.vm {
                    vm.came_up = false;
                }
                o
            },
            "remove",
        ),
    ]);
}

#[test]
fn an_id_without_a_vm_is_a_loss_and_nothing_boots_blank() {
    check(vec![(
        "an id on the pod without a VM is a loss, not a reason to boot blank",
        wishing(blank(), |wish| wish.id = "ID0".into()),
        "note lost VMGone",
    )]);
}

#[test]
fn saved_state_makes_the_boot_a_restore_of_exactly_that_state() {
    check(vec![
        ("a tag makes the boot a restore, pulled when it is not here", kept(), "pull sha256:S"),
        (
            "the local copy is used when it is what the tag holds",
            Observation { saved: snapshot(VM, "S"), ..noted(kept()) },
            &format!("clone {VM} same=true"),
        ),
        (
            "an older local copy is not used",
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
    ]);
}

#[test]
fn a_wake_keeps_the_baseline_of_its_lineage() {
    check(vec![(
        "the baseline stays: a wake goes on with the same lineage",
        Observation { baseline: snapshot(FORK, "B"), saved: snapshot(VM, "S"), ..kept() },
        "note creating S",
    )]);
}

#[test]
fn saved_state_of_another_image_or_source_is_a_conflict_unless_the_pod_is_marked_as_a_wake() {
    check(vec![
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
            "another source is none when the operator marked the pod as a wake",
            wishing(kept(), |wish| {
                wish.how = How::Fork("vk-src".into());
                wish.restore_marked = true;
            }),
            "pull sha256:S",
        ),
    ]);
}

#[test]
fn no_vm_wakes_with_the_state_of_another() {
    let tagged = |vm: &str, id: &str| {
        let mut tag = tag(id);
        if let Seen::Known(Some(tag)) = &mut tag {
            tag.vm_name = vm.into();
        }
        tag
    };
    let foreign = || tagged("vk-default-b-d2d9d3", "B");
    let local = || snapshot(VM, "S");
    let hibernated = |tag| Observation {
        record: at(Phase::Hibernated { saved: saved("S") }),
        tag,
        released: true,
        ..blank()
    };
    let hibernated = |tag| wishing(hibernated(tag), |wish| wish.hibernate = true);
    check(vec![
        ("a pod without a record", Observation { tag: foreign(), ..blank() }, "fail HibernateVMConflict"),
        (
            "a wake whose tag was moved to another VM's, though its own local copy is there",
            Observation { tag: foreign(), saved: local(), ..noted(blank()) },
            "fail HibernateVMConflict",
        ),
        ("a hibernated pod says it before it is woken", hibernated(foreign()), "fail HibernateVMConflict"),
        (
            "a fresh VM that was about to be made",
            Observation { tag: foreign(), record: at(Phase::Creating { restore: None }), ..blank() },
            "fail HibernateVMConflict",
        ),
        (
            "another artifact of the same VM is what another node saved: it is woken",
            Observation { tag: tagged(VM, "T"), ..noted(blank()) },
            "pull sha256:T",
        ),
        (
            "an artifact that names no VM is another writer's: it is woken",
            Observation { tag: tagged("", "T"), ..noted(blank()) },
            "pull sha256:T",
        ),
    ]);
    let Step::Fail(why) = plan(&Observation { tag: foreign(), ..blank() }) else { panic!("a failure") };
    for part in [VM, "vk-default-b-d2d9d3", "delete the tag"] {
        assert!(why.message.contains(part), "{part} in {}", why.message);
    }
}

#[test]
fn a_wake_whose_saved_state_is_gone_boots_nothing() {
    check(vec![
        (
            "a marked wake without saved state boots nothing",
            wishing(blank(), |wish| wish.restore_marked = true),
            "fail HibernateEvidenceMissing",
        ),
        (
            "a wake whose tag is gone uses the local copy it was promised",
            Observation { saved: snapshot(VM, "S"), ..noted(blank()) },
            &format!("clone {VM} same=true"),
        ),
        (
            "a wake whose tag and local copy are gone boots nothing",
            noted(blank()),
            "fail HibernateEvidenceMissing",
        ),
    ]);
}

#[test]
fn saved_state_of_another_hypervisor_is_refused() {
    check(vec![(
        "a snapshot of another hypervisor is refused with both names",
        wishing(Observation { saved: snapshot(VM, "S"), ..noted(kept()) }, |wish| {
            wish.hypervisor = "firecracker".into();
        }),
        "fail SnapshotIncompatible",
    )]);
}

#[test]
fn a_new_pod_that_wants_to_be_hibernated_is_hibernated_only_by_saved_state() {
    check(vec![
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
    ]);
}

#[test]
fn saved_state_that_the_pod_consumed_does_not_come_back_but_an_unfinished_wake_does() {
    check(vec![
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
    ]);
}
