//! Rows for a pod whose VM does not exist yet (or is half made).
//!
//! Order: adopt; evidence of saved state (I2); what the pod asks for. A VM is made only after the
//! record says so.

use cocoon_meta::{fork_baseline_name, hibernate_import_name};

use crate::{
    planner::{
        Look, Step, either, need, note,
        observation::{How, Observation, Wish},
    },
    ports::{CloneRequest, RunRequest, SnapshotView, TagView, VmPhase, VmView},
    reason::{Reason, Trouble},
    record::{OwnerRecord, Phase, Saved},
};

/// A pod that this agent has no record of: adopt, remember a hibernation, or create.
pub(super) fn without_record(o: &Observation, wish: &Wish) -> Step {
    either(try_without_record(o, wish))
}

fn try_without_record(o: &Observation, wish: &Wish) -> Result<Step, Step> {
    if let Some(vm) = need(&o.vm, Look::Vm)? {
        return Ok(match vm.phase {
            VmPhase::Creating => Step::RemoveVm { blame: Reason::CreateFailed },
            VmPhase::Running | VmPhase::Paused | VmPhase::Stopped => adopt(o, wish, vm),
        });
    }
    if let Some(problem) = &wish.problem {
        return Ok(Step::Fail(problem.clone()));
    }
    let evidence = evidence(o)?;
    if wish.hibernate {
        return Ok(match evidence {
            Some(saved) => Step::Note(Box::new(OwnerRecord::new(wish, o.now, Phase::Hibernated { saved }))),
            None => Step::Fail(nothing_saved(wish, "remove vm.cocoonstack.io/hibernate to boot it")),
        });
    }
    // A VM was here (the pod has its id) and is not: a blank one in its place would hide the loss.
    if !wish.id.is_empty() && !unconsumed(evidence.as_ref(), wish) {
        return Ok(Step::Note(Box::new(OwnerRecord::new(wish, o.now, lost(&wish.id, &wish.vm_name)))));
    }
    create(o, wish, None, evidence.filter(|saved| unconsumed(Some(saved), wish)))
}

/// Saved state counts as consumed once the pod said `ready` after waking from just that.
fn unconsumed(saved: Option<&Saved>, wish: &Wish) -> bool {
    saved.is_some_and(|saved| !(wish.said_ready && wish.woken_from == saved.snapshot))
}

fn adopt(o: &Observation, wish: &Wish, vm: &VmView) -> Step {
    let mut record = OwnerRecord::new(wish, o.now, Phase::Up);
    record.vm_id.clone_from(&vm.id);
    record.macs.clone_from(&vm.macs);
    record.started = vm.started_at.or(Some(o.now));
    if !wish.woken_from.is_empty() {
        record.woken_from = Some(Saved { snapshot: wish.woken_from.clone(), digest: None });
        record.woken_ready = wish.said_ready;
    }
    Step::Note(Box::new(record))
}

/// A VM that vanished without anybody asking for it.
pub(super) fn lost(vm_id: &str, vm_name: &str) -> Phase {
    let message = format!(
        "VM {vm_name} (id {vm_id}) is gone from this node and nobody asked for it; nothing newer than the \
         last saved snapshot is left. Delete the pod to start anew"
    );
    Phase::Lost { trouble: Trouble::new(Reason::VMGone, message) }
}

pub(super) fn nothing_saved(wish: &Wish, way_out: &str) -> Trouble {
    let message = format!("there is no saved state of VM {}; {way_out}", wish.vm_name);
    Trouble::new(Reason::HibernateEvidenceMissing, message)
}

/// What is saved of this VM: the tag, or without a registry the local snapshot. Doubt stops here (I5).
pub(super) fn evidence(o: &Observation) -> Result<Option<Saved>, Step> {
    if !o.registry {
        let saved = need(&o.saved, Look::Saved)?;
        return Ok(saved.as_ref().map(|found| Saved { snapshot: found.id.clone(), digest: None }));
    }
    let Some(tag) = need(&o.tag, Look::Tag)? else { return Ok(None) };
    check_vm(o, tag)?;
    Ok(Some(of_tag(tag)))
}

/// A tag may be moved by whoever may write the registry, but never makes a VM wake with another VM's state.
/// Artifacts of other writers name no VM, which says nothing.
fn check_vm(o: &Observation, tag: &TagView) -> Result<(), Step> {
    let (Some(wish), theirs) = (&o.wish, &tag.vm_name) else { return Ok(()) };
    if theirs.is_empty() || *theirs == wish.vm_name {
        return Ok(());
    }
    let message = format!(
        "{0}:hibernate is the state of VM {theirs} (snapshot {1}, {2}), not of VM {0}, so nothing is woken from it and \
         nothing is dropped; move {0}:hibernate back to what was saved of {0}, or delete the tag to discard that \
         state. A copy of {theirs} is had by a pod in clone mode",
        wish.vm_name, tag.snapshot_id, tag.digest
    );
    Err(Step::Fail(Trouble::new(Reason::HibernateVMConflict, message)))
}

pub(super) fn of_tag(tag: &TagView) -> Saved {
    Saved { snapshot: tag.snapshot_id.clone(), digest: Some(tag.digest.clone()) }
}

/// `Creating`: the engine was perhaps asked already.
pub(super) fn creating(o: &Observation, wish: &Wish, record: &OwnerRecord, restore: Option<&Saved>) -> Step {
    either(try_creating(o, wish, record, restore))
}

fn try_creating(
    o: &Observation,
    wish: &Wish,
    record: &OwnerRecord,
    restore: Option<&Saved>,
) -> Result<Step, Step> {
    if let Some(vm) = need(&o.vm, Look::Vm)? {
        return Ok(match vm.phase {
            VmPhase::Running => Step::Note(Box::new(came_up(o, record, vm, restore))),
            VmPhase::Paused => Step::Resume,
            // It had come up and its process died before that was noted: its disk is somebody's state. A
            // wake that got so far is done again (`up`), a fresh VM is started in place.
            VmPhase::Stopped if vm.came_up => Step::Note(Box::new(came_up(o, record, vm, restore))),
            // Half made by somebody who died, or its bring-up failed: nothing in it is anybody's state.
            VmPhase::Creating | VmPhase::Stopped => Step::RemoveVm { blame: Reason::CreateFailed },
        });
    }
    if let Some(problem) = &wish.problem {
        return Ok(Step::Fail(problem.clone()));
    }
    let found = match (evidence(o)?, restore) {
        (Some(found), _) => Some(found),
        (None, None) => None,
        // The tag is gone; the local copy is what this wake was promised.
        (None, Some(saved)) => match need(&o.saved, Look::Saved)? {
            Some(local) if local.id == saved.snapshot => Some(saved.clone()),
            _ => return Ok(Step::Fail(nothing_saved(wish, "delete the pod to start anew"))),
        },
    };
    if wish.hibernate {
        return Ok(match found {
            Some(saved) => note(record, Phase::Hibernated { saved }),
            None => Step::Fail(nothing_saved(wish, "remove vm.cocoonstack.io/hibernate to boot it")),
        });
    }
    create(o, wish, Some(record), found)
}

fn came_up(o: &Observation, record: &OwnerRecord, vm: &VmView, restore: Option<&Saved>) -> OwnerRecord {
    let mut up = record.in_phase(Phase::Up);
    up.vm_id.clone_from(&vm.id);
    up.macs.clone_from(&vm.macs);
    up.started = vm.started_at.or(Some(o.now));
    if up.restart_pending {
        up.restarts = up.restarts.saturating_add(1);
        (up.restart_pending, up.rewake) = (false, None);
    }
    up.woken_from = restore.cloned();
    up.woken_at = vm.started_at.filter(|_| restore.is_some());
    up.woken_ready = false;
    up.import_left = restore.is_some();
    if let Some(digest) = restore.and_then(|saved| saved.digest.clone()) {
        up.written = Some(digest);
    }
    up
}

/// No VM: make one, from saved state if there is any.
fn create(
    o: &Observation,
    wish: &Wish,
    record: Option<&OwnerRecord>,
    saved: Option<Saved>,
) -> Result<Step, Step> {
    match saved {
        Some(saved) => restore(o, wish, record, saved),
        None if wish.restore_marked => {
            Err(Step::Fail(nothing_saved(wish, "remove vm.cocoonstack.io/restore-from-hibernate to boot it")))
        }
        None => fresh(o, wish, record),
    }
}

fn restore(o: &Observation, wish: &Wish, record: Option<&OwnerRecord>, saved: Saved) -> Result<Step, Step> {
    let resumed = record.is_some_and(|record| !matches!(record.phase, Phase::Creating { restore: None }));
    if !wish.restore_marked && !resumed {
        check_source(wish)?;
    }
    check_image(o, wish)?;
    let source = restore_source(o, wish, &saved)?;
    let same = record.is_some_and(|record| record.phase == Phase::Creating { restore: Some(saved.clone()) });
    if !same {
        return Ok(creating_note(o, wish, record, Some(saved)));
    }
    Ok(Step::Clone(CloneRequest {
        name: wish.vm_name.clone(),
        snapshot: source.name.clone(),
        same_machine: true,
    }))
}

fn creating_note(o: &Observation, wish: &Wish, record: Option<&OwnerRecord>, restore: Option<Saved>) -> Step {
    let phase = Phase::Creating { restore };
    Step::Note(Box::new(match record {
        Some(record) => record.in_phase(phase),
        None => OwnerRecord::new(wish, o.now, phase),
    }))
}

/// A derived restore and an explicit other source exclude one another.
fn check_source(wish: &Wish) -> Result<(), Step> {
    let How::Fork(source) = &wish.how else { return Ok(()) };
    let message = format!(
        "VM {0} has saved state ({0}:hibernate) and the pod asks to fork {source}; delete the tag to discard \
         the state, or remove fork-from to wake it",
        wish.vm_name
    );
    Err(Step::Fail(Trouble::new(Reason::HibernateSourceConflict, message)))
}

/// The saved state must be of the pod's own image ref.
fn check_image(o: &Observation, wish: &Wish) -> Result<(), Step> {
    let Some(Some(tag)) = o.tag.known() else { return Ok(()) };
    if tag.base_image.is_empty() || tag.base_image == wish.image {
        return Ok(());
    }
    let message = format!(
        "the saved state {}:hibernate is of image {:?}, the pod asks for {:?}; set the pod's image back, or \
         delete the tag to discard the state",
        wish.vm_name, tag.base_image, wish.image
    );
    Err(Step::Fail(Trouble::new(Reason::HibernateImageConflict, message)))
}

/// The local snapshot when it is exactly the saved one, else a pulled import of it.
fn restore_source<'a>(o: &'a Observation, wish: &Wish, saved: &Saved) -> Result<&'a SnapshotView, Step> {
    if let Some(local) = need(&o.saved, Look::Saved)?
        && local.id == saved.snapshot
    {
        check_hypervisor(wish, local)?;
        return Ok(local);
    }
    let Some(digest) = &saved.digest else {
        return Err(Step::Fail(nothing_saved(wish, "delete the pod to start anew")));
    };
    match need(&o.import, Look::Import)? {
        Some(import) if import.id == saved.snapshot => {
            check_hypervisor(wish, import)?;
            Ok(import)
        }
        Some(_) => Err(Step::DropSnapshots(vec![hibernate_import_name(&wish.vm_name)])),
        None => Err(Step::PullImport { digest: digest.clone() }),
    }
}

fn check_hypervisor(wish: &Wish, snapshot: &SnapshotView) -> Result<(), Step> {
    let (theirs, ours) = (&snapshot.hypervisor, &wish.hypervisor);
    if theirs.is_empty() || ours.is_empty() || theirs == ours {
        return Ok(());
    }
    let message = format!(
        "snapshot {} was made by {theirs}, the pod's backend is {ours} on this node; set \
         vm.cocoonstack.io/backend to match, or use another snapshot",
        snapshot.name
    );
    Err(Step::Fail(Trouble::new(Reason::SnapshotIncompatible, message)))
}

/// Nothing is saved: boot, clone or fork. The baseline of a former life goes first.
fn fresh(o: &Observation, wish: &Wish, record: Option<&OwnerRecord>) -> Result<Step, Step> {
    if let How::Refused(trouble) = &wish.how {
        return Err(Step::Fail(trouble.clone()));
    }
    if need(&o.baseline, Look::Baseline)?.is_some() {
        return Ok(Step::DropSnapshots(vec![fork_baseline_name(&wish.vm_name)]));
    }
    let effect = match &wish.how {
        How::Run => run(o, wish)?,
        How::Clone(_) => clone_of(wish, cloned(o, wish)?),
        How::Fork(_) => clone_of(wish, need(&o.fork, Look::Fork)?),
        How::Refused(trouble) => return Err(Step::Fail(trouble.clone())),
    };
    let noted = record.is_some_and(|record| record.phase == Phase::Creating { restore: None });
    Ok(if noted { effect } else { creating_note(o, wish, record, None) })
}

fn run(o: &Observation, wish: &Wish) -> Result<Step, Step> {
    use crate::planner::observation::Seen;
    let image = match &o.image {
        Seen::Known(image) => image.clone(),
        Seen::Unknown => return Err(Step::EnsureImage),
        Seen::Failed(trouble) => return Err(Step::Fail(trouble.clone())),
    };
    let sizes = wish.sizes;
    Ok(Step::Run(RunRequest {
        name: wish.vm_name.clone(),
        image,
        cpu: sizes.cpu,
        memory: sizes.memory,
        storage: sizes.storage,
    }))
}

fn cloned<'a>(o: &'a Observation, wish: &Wish) -> Result<&'a SnapshotView, Step> {
    let found = need(&o.source, Look::Source)?.as_ref().ok_or(Step::PullSource)?;
    check_hypervisor(wish, found)?;
    Ok(found)
}

fn clone_of(wish: &Wish, source: &SnapshotView) -> Step {
    Step::Clone(CloneRequest {
        name: wish.vm_name.clone(),
        snapshot: source.name.clone(),
        same_machine: false,
    })
}
