//! What came in: pods, lists, probes and time become the observation.
//!
//! Entry point: `Owner::take_inbox`. Nothing here waits or acts.

use crate::{
    cluster::Tone,
    owner::{known, newer::asks_otherwise, probe::ProbeTask, task::Owner},
    planner::observation::{Cooling, How, Reach, Seen, Silence, Wish},
    ports::{Awaited, VmPhase},
    reason::{Reason, Trouble},
    wish,
};

impl Owner {
    pub(super) fn take_inbox(&mut self) {
        self.pods = self.inbox.pods();
        self.o.now = self.context.world.now();
        self.o.baseline_wanted = self.inbox.baseline_wanted();
        if let Some(reach) = self.probe.as_ref().and_then(ProbeTask::said) {
            if let Some(obstacle) =
                reach.obstacle.as_ref().filter(|now| self.o.reach.obstacle.as_ref() != Some(*now))
            {
                self.tell(Tone::Warning, obstacle);
            }
            self.o.reach = reach;
        }
        self.take_listed();
        self.take_wish();
        self.take_arrival();
        self.take_cooling();
    }

    /// What the pod waited for is here: it is tried at once, whatever the back-off says.
    fn take_arrival(&mut self) {
        if self.inbox.take_arrived() && self.awaited().is_some() {
            self.start_over(false);
            self.retry.came(self.context.world.instant());
        }
    }

    /// What the pod's VM cannot be made without, if just that was missing.
    pub(super) fn awaited(&self) -> Option<Awaited> {
        let wish = self.o.wish.as_ref().filter(|wish| wish.managed && !wish.deleting && !wish.gone)?;
        match (self.o.failure.as_ref()?.reason, &wish.how) {
            (Reason::ImageNotFound, How::Run) => Some(Awaited::Image(wish.image.clone())),
            (Reason::SnapshotNotFound, How::Clone(source)) => {
                Some(Awaited::Snapshot(source.repository.clone(), source.reference.clone()))
            }
            (Reason::ForkSourceUnavailable, How::Fork(source)) => Some(Awaited::Vm(source.clone())),
            _ => None,
        }
    }

    pub(super) fn take_listed(&mut self) {
        let Some(listed) = self.inbox.last_listed().filter(|listed| listed.asked > self.touched) else {
            return;
        };
        match (&self.o.vm, &listed.vm) {
            (Seen::Known(known), vm) if known == vm => {}
            // Gone from the list is not gone (I5): ask for it by name.
            (Seen::Known(Some(_)), None) => self.o.vm = Seen::Unknown,
            (_, Some(vm)) => self.o.vm = Seen::Known(Some(vm.clone())),
            (_, None) => {}
        }
        self.touched = self.touched.max(listed.asked);
    }

    pub(super) fn take_wish(&mut self) {
        let wish = self.head().map(|wish| self.without_own_address(wish));
        let changed = match (&self.o.wish, &wish) {
            (Some(before), Some(now)) => asks_otherwise(before, now),
            (None, None) => false,
            _ => true,
        };
        if changed {
            let deleting = wish.as_ref().is_some_and(|wish| wish.deleting || wish.gone);
            self.start_over(deleting);
            self.o.image = Seen::Unknown;
            known::forget_looks(&mut self.o);
        }
        if self.o.wish.as_ref().map(|wish| &wish.uid) != wish.as_ref().map(|wish| &wish.uid) {
            (self.o.finalised, self.o.dropped, self.o.latest_now) = (false, false, None);
            (self.probe, self.probed, self.o.reach) = (None, None, Reach::default());
            self.shown = None;
        }
        let ending = wish.as_ref().is_some_and(|wish| wish.deleting && !wish.gone);
        self.ending_since = ending.then(|| self.ending_since.unwrap_or_else(|| self.context.world.instant()));
        self.o.next_waits = self.pods.len() > 1;
        self.o.wish = wish;
    }

    /// What a pod's author writes must not make this host ask itself: at the bridge's address it would answer for a
    /// service that is closed to every guest.
    fn without_own_address(&self, mut wish: Wish) -> Wish {
        let foreign = Some(&wish).filter(|wish| !wish.managed && wish.problem.is_none());
        let named = foreign.and_then(wish::external);
        if named.is_some_and(|ip| self.context.ports.prober.is_own(ip)) {
            wish.problem = Some(wish::own_address(&wish));
        }
        wish
    }

    pub(super) fn start_over(&mut self, deleting: bool) {
        self.retry.reset(deleting);
        self.hard = false;
        (self.o.trouble, self.o.failure, self.o.failures) = (None, None, 0);
        // Nothing is held up any more, whoever asked for this and whenever.
        self.take_cooling();
    }

    /// The incarnation that is served now: the record's, else the first that is still there.
    pub(super) fn head(&mut self) -> Option<Wish> {
        let Some(record) = self.o.record.clone() else {
            for over in self.pods.iter().filter(|pod| pod.gone) {
                self.inbox.forget(over.uid());
            }
            self.pods.retain(|pod| !pod.gone);
            // One that cannot be read (any more) is refused (`tend_bystanders`) and blocks nobody.
            return self.pods.iter().find_map(|pod| wish::read(&pod.pod, &self.context.config, false).ok());
        };
        let Some(pod) = self.pods.iter().find(|pod| pod.uid() == record.uid) else {
            return Some(wish::of_record(&record, &self.context.config));
        };
        let mut wish = wish::read(&pod.pod, &self.context.config, true)
            .ok()
            .filter(|wish| wish.vm_name == self.vm_name)
            .unwrap_or_else(|| Wish {
                gone: false,
                deleting: pod.pod.metadata.deletion_timestamp.is_some(),
                ..wish::of_record(&record, &self.context.config)
            });
        wish.gone = pod.gone;
        Some(wish)
    }

    /// Remembers what is known of the VM. Notes a guest that has not taken its identity, and says so once and at
    /// each change; when it has, or the VM is another one, the tries and their delays start over.
    pub(super) fn tend_vm(&mut self) {
        self.note_starved();
        self.note_tap();
        let Seen::Known(vm) = &self.o.vm else { return };
        self.o.last_phase = vm.as_ref().map(|vm| vm.phase);
        let deleting = self.o.wish.as_ref().is_none_or(|wish| wish.deleting || wish.gone);
        let ours = !deleting && self.o.wish.as_ref().is_some_and(|wish| wish.managed);
        let mute = vm.as_ref().filter(|vm| ours && vm.phase == VmPhase::Running && vm.links_down);
        let mute = mute.map(|vm| (vm.id.clone(), vm.pid));
        let before = self.o.silence.as_ref().map(|silence| silence.vm.clone());
        if mute != before {
            self.o.silence = mute.map(|vm| Silence { vm, tries: 0, obstacle: None });
            if before.is_some() && self.o.failure.is_none() {
                self.start_over(deleting);
            }
        }
        let said = self.o.silence.as_ref().map(|silence| silence.trouble(&self.vm_name));
        if said != self.said_silent {
            said.iter().for_each(|trouble| self.tell(Tone::Warning, trouble));
            self.said_silent = said;
        }
    }

    /// Notes whether the guest stands still because the host's disk is full, and says when that begins and ends.
    fn note_starved(&mut self) {
        let Seen::Known(vm) = &self.o.vm else { return };
        let running = vm.as_ref().filter(|vm| vm.phase == VmPhase::Running);
        let (runs, why) = (running.is_some(), running.and_then(|vm| vm.starved.clone()));
        let starved = why.map(|why| Trouble::new(Reason::DiskFull, why));
        let before = std::mem::replace(&mut self.o.starved, starved);
        match (&before, &self.o.starved) {
            (None, Some(why)) => self.tell(Tone::Warning, why),
            (Some(_), None) if runs => {
                let message = format!("there is space again: the guest of VM {} goes on", self.vm_name);
                self.tell(Tone::Normal, &Trouble::new(Reason::DiskFull, message));
            }
            _ => {}
        }
    }

    /// Notes whether the VM's tap was deleted under it, and says so once. Only another process has a new one.
    fn note_tap(&mut self) {
        let Seen::Known(vm) = &self.o.vm else { return };
        let running = vm.as_ref().filter(|vm| vm.phase == VmPhase::Running);
        let lost = running.and_then(|vm| Some(tap_lost(&vm.name, vm.lost_tap.as_deref()?)));
        if let Some(lost) = lost.as_ref().filter(|lost| self.o.tap_lost.as_ref() != Some(*lost)) {
            self.tell(Tone::Warning, lost);
        }
        self.o.tap_lost = lost;
    }

    pub(super) fn take_cooling(&mut self) {
        let now = self.context.world.instant();
        let was = self.o.cooling;
        self.o.cooling = match (self.retry.pending(now).is_some(), self.hard) {
            (false, _) => Cooling::None,
            (true, false) => Cooling::Soft,
            (true, true) => Cooling::Hard,
        };
        if was != Cooling::None && self.o.cooling == Cooling::None {
            self.hard = false;
            known::forget_looks(&mut self.o);
        }
    }
}

fn tap_lost(vm: &str, tap: &str) -> Trouble {
    let message = format!(
        "tap {tap} of VM {vm} was deleted on this host while the VM runs, so its guest reaches nobody; a running \
         hypervisor cannot be given another. Hibernate the pod (annotation {hibernate}=true) and wake it again (remove \
         the annotation): it goes on where it was, with a new tap",
        hibernate = cocoon_meta::keys::ANNOTATION_HIBERNATE
    );
    Trouble::new(Reason::TapLost, message)
}
