//! What others see of an owner: the pod's view, its seat, its probe, and pods that wait behind it.
//!
//! Entry points: `Owner::show`, `Owner::tend_probe`, `Owner::tend_bystanders`.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use crate::{
    cluster::{Show, Tone},
    oddities::{Served, oddities},
    owner::{
        directory::Seat,
        inbox::Incarnation,
        probe::{ProbeTask, Target},
        task::Owner,
    },
    planner::observation::{PodKey, Process, Reach},
    ports::VmPhase,
    reason::{Reason, Trouble},
    record::Phase,
    status::annotation_patch,
    view::{self, View},
    wish,
};

/// Oddities of one incarnation that are said; a pod whose annotations change all the time is not followed
/// for ever (I9).
const MAX_ODDITIES: usize = 64;

/// How long annotations are other than ours before they are written again: the watch is a little late.
const SETTLED: Duration = Duration::from_secs(1);
/// Two corrections are at least so far apart: with who changes them all the time nobody plays ping-pong (I9).
const CORRECTIONS: Duration = Duration::from_secs(15);

impl Owner {
    pub(super) fn show(&mut self) {
        let view = view::view(&self.o);
        match (&view, self.head_pod().map(|pod| Arc::clone(&pod.pod))) {
            (Some(view), Some(pod)) => {
                if self.shown.as_ref() != Some(view) || self.was_overwritten(&pod, view) {
                    self.put(pod, view);
                }
            }
            _ => self.overwritten = None,
        }
        self.o.published = view.is_none() || self.inbox.last_accepted() >= self.version;
        self.o.unpublished_for = if self.o.published {
            Duration::ZERO
        } else {
            self.context.world.instant().duration_since(self.shown_at)
        };
        self.sit();
    }

    fn put(&mut self, pod: Arc<Pod>, view: &View) {
        self.version += 1;
        self.shown_at = self.context.world.instant();
        let show = Show { pod, view: view.clone(), version: self.version };
        self.context.cluster.show(show, Arc::clone(&self.inbox));
        self.shown = Some(view.clone());
    }

    /// Whether it is time to write again what somebody wrote over: the pod's annotations of ours are no longer what
    /// the API accepted of us (I4).
    fn was_overwritten(&mut self, pod: &Pod, view: &View) -> bool {
        let accepted = self.inbox.last_accepted() >= self.version;
        if !accepted || annotation_patch(pod, view).is_none() {
            self.overwritten = None;
            return false;
        }
        let now = self.context.world.instant();
        self.overwritten.get_or_insert(now);
        if self.correction_due().is_none_or(|due| due > now) {
            return false;
        }
        tracing::warn!(
            vm = self.vm_name,
            "annotations of ours were changed by somebody; they are written again"
        );
        (self.overwritten, self.corrected) = (None, Some(now));
        true
    }

    /// When what somebody wrote over is written again.
    pub(super) fn correction_due(&self) -> Option<Instant> {
        let settled = self.overwritten? + SETTLED;
        Some(self.corrected.map_or(settled, |last| settled.max(last + CORRECTIONS)))
    }

    /// Says once what is odd about the pod's annotations, whatever else becomes of the pod.
    pub(super) fn say_oddities(&mut self) {
        let live = self.o.wish.as_ref().is_some_and(|wish| !wish.deleting && !wish.gone);
        let pod = self.head_pod().filter(|_| live).map(|pod| Arc::clone(&pod.pod));
        let Some(pod) = pod.filter(|pod| !self.judged.as_ref().is_some_and(|last| Arc::ptr_eq(last, pod)))
        else {
            return;
        };
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        if self.odd.0 != uid {
            self.odd = (uid, BTreeSet::new());
        }
        let managed = self.o.wish.as_ref().is_some_and(|wish| wish.managed);
        let record = self.o.record.as_ref().filter(|record| managed && record.uid == self.odd.0);
        let served = record.map(|record| Served {
            vm_name: &record.vm_name,
            image: if matches!(record.phase, Phase::Creating { .. }) { "" } else { &record.image },
            before: self.judged.as_deref().filter(|before| before.metadata.uid == pod.metadata.uid),
        });
        for trouble in oddities(&pod, served) {
            if self.odd.1.len() < MAX_ODDITIES && self.odd.1.insert(trouble.to_string()) {
                self.tell(Tone::Warning, &trouble);
            }
        }
        // A record that comes later may make the name odd.
        self.judged = self.o.record.is_some().then_some(pod);
    }

    pub(super) fn head_pod(&self) -> Option<&Incarnation> {
        let uid = &self.o.wish.as_ref()?.uid;
        self.pods.iter().find(|pod| pod.uid() == uid)
    }

    pub(super) fn sit(&mut self) {
        let wish = self.o.wish.as_ref().filter(|wish| !wish.gone);
        let seated = wish.map(|wish| (wish.key.clone(), wish.uid.clone()));
        if let Some((key, uid)) = self.seat.take_if(|seat| Some(&*seat) != seated.as_ref()) {
            self.context.directory.leave(&key, &uid);
        }
        let Some(wish) = wish else { return };
        let vm = self.o.vm_there();
        let seat = Seat {
            uid: wish.uid.clone(),
            vm_name: self.vm_name.clone(),
            vm_id: vm.map(|vm| vm.id.clone()).unwrap_or_default(),
            running: vm.is_some_and(|vm| vm.phase == VmPhase::Running),
        };
        self.context.directory.sit(&wish.key, seat);
        self.seat = seated;
    }

    /// Probes exactly while there is a running VM that may become ready. A new target is not ready before a probe
    /// of it succeeded, whatever was true of the last one (I4).
    pub(super) fn tend_probe(&mut self) {
        let target = self.probe_target();
        if self.probe.as_ref().map(|probe| &probe.target) == target.as_ref() {
            return;
        }
        self.probe = None;
        let Some(target) = target else { return };
        if let Some(last) = self.probed.replace(target.clone()).filter(|last| *last != target) {
            let ip = self.o.reach.ip.filter(|_| last.same_address(&target));
            self.o.reach = Reach { of: target.process.clone(), ip, ..Reach::default() };
        }
        self.probe = Some(ProbeTask::start(&self.context, &self.inbox, target));
    }

    pub(super) fn probe_target(&self) -> Option<Target> {
        let wish = self.o.wish.as_ref().filter(|wish| !wish.deleting && !wish.gone)?;
        if !wish.managed {
            let fixed = Some(wish::external(wish)?);
            let process = Process { vm_id: wish.id.clone(), ..Process::default() };
            return Some(Target { process, macs: Vec::new(), fixed, port: wish.probe_port });
        }
        if !matches!(self.o.record.as_ref()?.phase, Phase::Up | Phase::Prepushing) {
            return None;
        }
        // While it is asked for again, nobody says that it is another one.
        let Some(vm) = self.o.vm.known() else {
            let target = self.probe.as_ref()?.target.clone();
            return Some(Target { port: wish.probe_port, ..target });
        };
        let vm = vm.as_ref().filter(|vm| vm.phase == VmPhase::Running)?;
        Some(Target { process: vm.into(), macs: vm.macs.clone(), fixed: None, port: wish.probe_port })
    }

    /// Pods that wait behind the head, or that may not have this name at all.
    pub(super) async fn tend_bystanders(&mut self) {
        self.end_again = false;
        let head = self.o.wish.as_ref().map(|wish| (wish.key.clone(), wish.uid.clone()));
        for pod in self.pods.clone() {
            if head.as_ref().is_some_and(|(_, uid)| pod.uid() == uid) {
                self.bystanders.remove(pod.uid());
                continue;
            }
            let theirs = wish::key(&pod.pod);
            if pod.gone {
                self.bystanders.remove(pod.uid());
                self.inbox.forget(pod.uid());
            } else if pod.pod.metadata.deletion_timestamp.is_some() {
                self.end_bystander(&theirs, pod.uid()).await;
            } else if let Some(why) = self.why_not(head.as_ref().map(|(key, _)| key), &pod, &theirs) {
                self.show_bystander(&pod, &why);
            }
        }
    }

    /// Why a pod that is not at the head is not served now.
    pub(super) fn why_not(
        &self,
        head: Option<&PodKey>,
        pod: &Incarnation,
        theirs: &PodKey,
    ) -> Option<Trouble> {
        let unreadable = wish::read(&pod.pod, &self.context.config, false).err();
        match (&self.o.record, unreadable, head) {
            (None, Some(why), _) => Some(why),
            (_, _, Some(head)) => Some(bystander(head, theirs, &self.vm_name)),
            _ => None,
        }
    }

    pub(super) async fn end_bystander(&mut self, key: &PodKey, uid: &str) {
        if let Err(error) = self.context.cluster.finalise(key, uid).await {
            tracing::warn!(pod = %key, error = %error.trouble(), "a waiting pod could not be ended yet");
            self.end_again = true;
        }
    }

    pub(super) fn show_bystander(&mut self, pod: &Incarnation, why: &Trouble) {
        let view = match why.reason {
            Reason::Replacing => view::waiting_behind(why),
            _ => view::refused(why, cocoon_meta::read_cocoon_set_generation(&*pod.pod)),
        };
        if self.bystanders.get(pod.uid()) == Some(&view) {
            return;
        }
        if why.reason != Reason::Replacing {
            self.context.cluster.event(&wish::key(&pod.pod), pod.uid(), Tone::Warning, why);
        }
        let show = Show { pod: Arc::clone(&pod.pod), view: view.clone(), version: 0 };
        self.context.cluster.show(show, Arc::clone(&self.inbox));
        self.bystanders.insert(pod.uid().to_owned(), view);
    }
}

/// Why a pod that is not at the head waits.
fn bystander(head: &PodKey, theirs: &PodKey, vm_name: &str) -> Trouble {
    if head == theirs {
        let message =
            format!("VM {vm_name} still belongs to the former pod of this name, which is being ended");
        return Trouble::new(Reason::Replacing, message);
    }
    let message = format!("VM name {vm_name} is in use by pod {head}; give this pod another name");
    Trouble::new(Reason::VMNameInUse, message)
}
