//! What became of a step: bookkeeping, events, and when it is tried again.
//!
//! Entry points: `Owner::succeeded` and `Owner::step_failed`.

use cocoon_meta::keys;

use crate::{
    cluster::Tone,
    owner::{
        known::{self, Found},
        task::Owner,
    },
    planner::{
        Look, Step, WAKE_TRIAL,
        observation::{Observation, Seen},
    },
    ports::VmPhase,
    reason::{Reason, Trouble},
    record::{LiveAnswer, OwnerRecord, Phase, Saved},
};

impl Owner {
    pub(super) fn succeeded(&mut self, step: &Step, found: Found) {
        match step {
            Step::Note(record) => self.noted(record),
            Step::Forget => self.forgotten(),
            Step::Look(Look::Fork) => {
                if let Found::Snapshot(Some(snapshot)) = found {
                    self.o.fork = Seen::Known(snapshot);
                }
            }
            // The id in the artifact is what was asked for, whatever id the store gave the copy.
            Step::PullImport { .. } => {
                let expected =
                    self.o.tag.known().and_then(|tag| tag.as_ref()).map(|tag| tag.snapshot_id.clone());
                let found = match (found, expected) {
                    (Found::Snapshot(Some(mut snapshot)), Some(id)) => {
                        snapshot.id = id;
                        Found::Snapshot(Some(snapshot))
                    }
                    (found, _) => found,
                };
                known::learn(&mut self.o, step, found);
            }
            Step::LiveSnapshot { reference, .. } => self.live_answered(step, reference, None),
            Step::PushLatest(push) => {
                if let Found::Text(digest) = &found {
                    let (vm, repository, tag) = (&self.vm_name, &push.repository, &push.tag);
                    let message =
                        format!("VM {vm} is saved as {repository}:{tag} ({digest}) before it is removed");
                    self.tell(Tone::Normal, &Trouble::new(Reason::DeleteSnapshotPushed, message));
                }
                known::learn(&mut self.o, step, found);
            }
            // An engine that takes a start for done although the guest said nothing.
            Step::Start if matches!(&found, Found::Vm(Some(vm)) if vm.links_down) => {
                known::learn(&mut self.o, step, found);
                let message = format!("the guest of VM {} did not answer", self.vm_name);
                self.still_silent(Trouble::new(Reason::GuestSilent, message));
            }
            _ => known::learn(&mut self.o, step, found),
        }
    }

    /// A live snapshot request was served, well or badly: that is its one answer.
    pub(super) fn live_answered(&mut self, step: &Step, reference: &str, failure: Option<String>) {
        known::doubt(&mut self.o, step);
        self.o.live_now = Some(LiveAnswer { reference: reference.to_owned(), failure });
    }

    pub(super) fn noted(&mut self, record: &OwnerRecord) {
        let before = self.o.record.as_ref().map(|record| record.phase.clone());
        let entered =
            before.as_ref().map(std::mem::discriminant) != Some(std::mem::discriminant(&record.phase));
        let reached = entered && is_goal(before.as_ref(), &record.phase);
        if let Some(old) = self.o.record.as_ref().filter(|old| record.restarts > old.restarts) {
            self.tell(Tone::Warning, &restarted(old));
        }
        let stopped =
            record.restart_pending && self.o.record.as_ref().is_some_and(|old| !old.restart_pending);
        let counted = self.o.record.as_ref().and_then(|before| before.phase.captured());
        if counted.is_some() && record.phase.captured().is_none() {
            // The guest is about to go on, or did: this process's own memory of the capture is stale, too.
            self.o.captured_now = None;
            // What it does from here on is in no push that went ahead.
            self.o.prepushed = false;
        }
        self.say_if_derived(record);
        self.say_if_hibernating(before.as_ref(), record);
        self.say_if_moved(record);
        self.inbox.set_record(Some(record));
        self.o.record = Some(record.clone());
        if reached {
            self.start_over(matches!(record.phase, Phase::Deleting { .. }));
            self.announce(record);
        }
        if stopped {
            // What failed before has no say in whether it can be started again.
            self.start_over(false);
        }
        if matches!(record.phase, Phase::Up | Phase::Hibernated { .. }) {
            self.o.prepushed = false;
        }
        if entered {
            (self.o.dropped, self.o.released) = (false, false);
        }
        // What was looked at for a pod's first record was looked at just now.
        if entered && before.is_some() {
            known::forget_looks(&mut self.o);
        }
    }

    /// A hibernation takes as long as its guest's memory is large; what is going on is said when it begins.
    fn say_if_hibernating(&self, before: Option<&Phase>, record: &OwnerRecord) {
        let on_its_way = |phase: &Phase| matches!(phase, Phase::Prepushing | Phase::Hibernating { .. });
        if !on_its_way(&record.phase) || before.is_some_and(on_its_way) {
            return;
        }
        let message = format!(
            "VM {} is being hibernated: its state is saved and then the VM is removed, which takes the longer the more \
             memory it has; remove annotation {} to call it off",
            record.vm_name,
            keys::ANNOTATION_HIBERNATE
        );
        self.tell(Tone::Normal, &Trouble::new(Reason::Hibernating, message));
    }

    /// A pod that nobody marked as a wake is restored all the same, because there is saved state.
    pub(super) fn say_if_derived(&self, record: &OwnerRecord) {
        let marked = self.o.wish.as_ref().is_none_or(|wish| wish.restore_marked);
        let Phase::Creating { restore: Some(saved) } = &record.phase else { return };
        if self.o.record.is_none() && !marked {
            let message = format!(
                "VM {} has saved state (snapshot {}), so it is restored from that instead of being made anew",
                record.vm_name, saved.snapshot
            );
            self.tell(Tone::Normal, &Trouble::new(Reason::HibernateSnapshotExists, message));
        }
    }

    /// The tag points to another artifact of this VM than when it was saved: a wake uses that (another node may
    /// have woken and saved it), and people hear of it.
    fn say_if_moved(&self, record: &OwnerRecord) {
        let known = self.o.record.as_ref().and_then(|before| wakes_from(&before.phase));
        let (Some(before), Some(now)) = (known, wakes_from(&record.phase)) else { return };
        let (Some(from), Some(to)) = (&before.digest, &now.digest) else { return };
        if from != to {
            // The same state again is our own copy, which was put in place of a lost one.
            let tone = if before.snapshot == now.snapshot { Tone::Normal } else { Tone::Warning };
            let message = format!(
                "{}:hibernate was moved since VM {0} was saved: from {from} (snapshot {}) to {to} (snapshot {}); the VM \
                 wakes from what it points to now",
                record.vm_name, before.snapshot, now.snapshot
            );
            self.tell(tone, &Trouble::new(Reason::TagMoved, message));
        }
    }

    pub(super) fn announce(&self, record: &OwnerRecord) {
        let vm = &record.vm_name;
        let (tone, what) = match &record.phase {
            Phase::Up if record.woken_from.is_some() && !record.woken_ready => {
                (Tone::Normal, Trouble::new(Reason::Woken, format!("VM {vm} is awake, id {}", record.vm_id)))
            }
            Phase::Up => {
                (Tone::Normal, Trouble::new(Reason::Created, format!("VM {vm} is up, id {}", record.vm_id)))
            }
            Phase::Hibernated { saved } => {
                let message = format!("VM {vm} is saved as snapshot {} and removed", saved.snapshot);
                (Tone::Normal, Trouble::new(Reason::Hibernated, message))
            }
            Phase::Lost { trouble } => (Tone::Warning, trouble.clone()),
            Phase::Deleting { live: true, .. } if record.snapshot_on_delete && !self.o.registry => {
                let message = format!("VM {vm} is deleted without a snapshot: this node has no registry");
                (Tone::Warning, Trouble::new(Reason::DeleteSnapshotSkipped, message))
            }
            Phase::Deleting { live: false, keep: None, .. }
                if record.snapshot_on_delete && self.o.vm_there().is_some() =>
            {
                let message = format!(
                    "VM {vm} is not running, so its policy's snapshot cannot be made: its disk goes with it, an older \
                     {vm}:latest stays"
                );
                (Tone::Warning, Trouble::new(Reason::DeleteSnapshotSkipped, message))
            }
            _ => return,
        };
        self.tell(tone, &what);
    }

    pub(super) fn tell(&self, tone: Tone, what: &Trouble) {
        if let Some(wish) = &self.o.wish {
            self.context.cluster.event(&wish.key, &wish.uid, tone, what);
        }
    }

    pub(super) fn forgotten(&mut self) {
        if let Some(record) = self.o.record.take() {
            self.inbox.forget(&record.uid);
        }
        self.inbox.set_record(None);
        self.o = Observation {
            registry: self.o.registry,
            pause_limit: self.o.pause_limit,
            now: self.o.now,
            ..Observation::default()
        };
        self.shown = None;
        self.start_over(false);
    }

    /// It runs, and waits for its guest alone.
    pub(super) fn lacks_links(&self) -> bool {
        self.o.vm_there().is_some_and(|vm| vm.phase == VmPhase::Running && vm.links_down)
    }

    pub(super) fn step_failed(&mut self, step: &Step, trouble: Trouble) {
        let lacks_links = self.lacks_links();
        known::doubt(&mut self.o, step);
        match step {
            Step::Look(look) => {
                // The planner decides whether that matters.
                known::unanswered(&mut self.o, *look, trouble);
                return;
            }
            Step::LiveSnapshot { reference, .. } => {
                return self.live_answered(step, reference, Some(trouble.to_string()));
            }
            Step::Start if lacks_links => return self.still_silent(trouble),
            // Owed work: the planner decides how long it is waited for, and a guest never is.
            Step::DropTag { .. } => {
                tracing::warn!(vm = self.vm_name, %trouble, "a hibernate tag stays for now");
                known::unanswered(&mut self.o, Look::Tag, trouble);
                return;
            }
            Step::Prepush(_) => return self.prepush_skipped(&trouble),
            // The copy stays until the next live capture; a hibernation does not wait for that.
            Step::DropSnapshots(_) if self.prepushing() => {
                tracing::warn!(vm = self.vm_name, %trouble, "the local copy of a live capture stays for now");
                self.o.dropped = true;
                return;
            }
            Step::SaveBaseline => {
                self.inbox.answer_baseline(&Err(trouble));
                return;
            }
            _ => {}
        }
        self.failed(trouble, step.is_compensation());
    }

    fn prepushing(&self) -> bool {
        self.o.record.as_ref().is_some_and(|record| record.phase == Phase::Prepushing)
    }

    /// The hibernation goes on as if its push were short.
    fn prepush_skipped(&mut self, why: &Trouble) {
        let message = format!(
            "the bulk of VM {} could not be pushed while its guest runs ({}); the guest is paused for all of its \
             push instead",
            self.vm_name, why.message
        );
        self.tell(Tone::Warning, &Trouble::new(Reason::HibernatePrepushFailed, message));
        self.o.prepushed = true;
    }

    /// A guest that is slow to take its identity is told again, later.
    fn still_silent(&mut self, trouble: Trouble) {
        tracing::warn!(vm = self.vm_name, %trouble, "the links stay down for now");
        if let Some(silence) = &mut self.o.silence {
            silence.tries = silence.tries.saturating_add(1);
            silence.obstacle = Some(trouble).filter(|trouble| trouble.reason != Reason::GuestSilent);
        }
        self.retry.failed(self.context.world.as_ref());
    }

    pub(super) fn failed(&mut self, trouble: Trouble, compensation: bool) {
        tracing::warn!(vm = self.vm_name, %trouble, "step failed");
        self.hard |= compensation;
        self.o.failures = self.o.failures.saturating_add(1);
        self.retry.failed(self.context.world.as_ref());
        self.tell(Tone::Warning, &trouble);
        self.o.trouble = Some(trouble.clone());
        self.o.failure = Some(trouble);
    }
}

/// What a pod without VM is to wake from.
const fn wakes_from(phase: &Phase) -> Option<&Saved> {
    match phase {
        Phase::Hibernated { saved } | Phase::Creating { restore: Some(saved) } => Some(saved),
        _ => None,
    }
}

/// Why a VM was started again; `record` is the one before it was seen to run.
fn restarted(record: &OwnerRecord) -> Trouble {
    let vm = &record.vm_name;
    let message = if record.rewake.is_some() {
        format!(
            "VM {vm} stopped within {} s of its wake and before it was ready, so it was woken again from the same \
             saved state; what its guest did in between is gone",
            WAKE_TRIAL.as_secs()
        )
    } else if record.stop_ordered {
        format!(
            "VM {vm} was stopped by an order to the engine; its pod asks for it, so it was started again from its \
             disk. Hibernate or delete the pod to keep it down"
        )
    } else {
        format!(
            "the process of VM {vm} ended by itself (a crash, or a power-off in the guest); it was started again \
             from its disk"
        )
    };
    Trouble::new(Reason::VMRestarted, message)
}

/// Whether a phase is somewhere, and not only on the way. To be up again because a hibernation was called off or
/// taken back is no news.
const fn is_goal(before: Option<&Phase>, now: &Phase) -> bool {
    let hibernated =
        matches!(before, Some(Phase::Prepushing | Phase::Hibernating { .. } | Phase::RollingBack { .. }));
    match now {
        Phase::Creating { .. } | Phase::Prepushing | Phase::Hibernating { .. } => false,
        Phase::Up | Phase::RollingBack { .. } => !hibernated,
        _ => true,
    }
}
