//! The owner's loop.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    cluster::{Show, Tone},
    owner::{
        Context,
        directory::Seat,
        inbox::{Inbox, Incarnation},
        known::{self, Found},
        perform::{Scene, perform},
        probe::{ProbeTask, Target},
        retry::Retry,
    },
    planner::{
        Look, Step,
        observation::{Cooling, Observation, PodKey, Seen, Wish},
        plan,
    },
    ports::VmPhase,
    reason::{Reason, Trouble},
    record::{LiveAnswer, OwnerRecord, Phase},
    view::{self, View},
    wish,
};

/// The owner of one VM name.
#[derive(Debug)]
pub(super) struct Owner {
    context: Arc<Context>,
    vm_name: String,
    inbox: Arc<Inbox>,
    pods: Vec<Incarnation>,
    o: Observation,
    retry: Retry,
    /// A compensation failed: not even those are tried before the retry is due.
    hard: bool,
    shown: Option<View>,
    version: u64,
    shown_at: Instant,
    /// When the last step ended: a list that was asked for before says nothing about it.
    touched: Instant,
    probe: Option<ProbeTask>,
    seat: Option<(PodKey, String)>,
    bystanders: BTreeMap<String, View>,
    /// A bystander is being deleted and the API did not take its end yet.
    end_again: bool,
    /// Steps since the last rest: a fuse against a planner that turns in circles (I9).
    steps: u32,
}

/// The longest lifecycle has some thirty steps.
const STEPS_WITHOUT_REST: u32 = 200;
const SLOWED_DOWN: Duration = Duration::from_secs(1);

impl Owner {
    pub(super) fn new(
        context: Arc<Context>,
        vm_name: String,
        inbox: Arc<Inbox>,
        record: Option<OwnerRecord>,
    ) -> Self {
        let now = context.world.instant();
        let o = Observation {
            registry: context.ports.registry.is_some(),
            pause_limit: Some(context.config.pause_limit),
            record,
            ..Observation::default()
        };
        Self {
            context,
            vm_name,
            inbox,
            pods: Vec::new(),
            o,
            retry: Retry::new(),
            hard: false,
            shown: None,
            version: 0,
            shown_at: now,
            touched: now,
            probe: None,
            seat: None,
            bystanders: BTreeMap::new(),
            end_again: false,
            steps: 0,
        }
    }

    pub(super) async fn run(mut self) {
        let shutdown = self.context.shutdown.clone();
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            () = self.context.open.cancelled() => {}
        }
        while !shutdown.is_cancelled() {
            self.look_around().await;
            self.steps += 1;
            if self.steps > STEPS_WITHOUT_REST {
                tracing::error!(vm = self.vm_name, "the planner does not come to rest; it is slowed down");
                tokio::time::sleep(SLOWED_DOWN).await;
            }
            let step = plan(&self.o);
            tracing::trace!(vm = self.vm_name, ?step, "next step");
            match step {
                Step::Rest if self.may_retire() && self.context.directory.retire(&self.vm_name) => return,
                Step::Rest => self.sleep(None).await,
                Step::Wait(limit) => {
                    self.sleep(Some(limit)).await;
                    known::ask_again(&mut self.o);
                }
                // Trying again cannot help before the wish changes.
                Step::Fail(trouble)
                    if trouble.reason.is_final() && self.o.failure.as_ref() == Some(&trouble) =>
                {
                    self.sleep(None).await;
                }
                Step::Fail(trouble) => self.failed(trouble, false),
                step => self.carry_out(step).await,
            }
        }
    }

    /// Takes what was posted, works out the wish, shows what follows.
    async fn look_around(&mut self) {
        self.take_inbox();
        self.show();
        self.tend_probe();
        self.tend_bystanders().await;
    }

    fn take_inbox(&mut self) {
        self.pods = self.inbox.pods();
        self.o.now = self.context.world.now();
        self.o.baseline_wanted = self.inbox.baseline_wanted();
        if let Some(reach) = self.inbox.last_reach() {
            self.o.reach = reach;
        }
        self.take_listed();
        self.take_wish();
        self.take_cooling();
    }

    fn take_listed(&mut self) {
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

    fn take_wish(&mut self) {
        let wish = self.head();
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
            self.shown = None;
        }
        self.o.next_waits = self.pods.len() > 1;
        self.o.wish = wish;
    }

    fn start_over(&mut self, deleting: bool) {
        self.retry.reset(deleting);
        self.hard = false;
        (self.o.trouble, self.o.failure, self.o.failures) = (None, None, 0);
    }

    /// The incarnation that is served now: the record's, else the first that is still there.
    fn head(&mut self) -> Option<Wish> {
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

    fn take_cooling(&mut self) {
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

    fn show(&mut self) {
        let view = view::view(&self.o);
        if let (Some(view), Some(pod)) = (&view, self.head_pod().map(|pod| Arc::clone(&pod.pod)))
            && self.shown.as_ref() != Some(view)
        {
            self.version += 1;
            self.shown_at = self.context.world.instant();
            let show = Show { pod, view: view.clone(), version: self.version };
            self.context.cluster.show(show, Arc::clone(&self.inbox));
            self.shown = Some(view.clone());
        }
        self.o.published = view.is_none() || self.inbox.last_accepted() >= self.version;
        self.o.unpublished_for = if self.o.published {
            Duration::ZERO
        } else {
            self.context.world.instant().duration_since(self.shown_at)
        };
        self.sit();
    }

    fn head_pod(&self) -> Option<&Incarnation> {
        let uid = &self.o.wish.as_ref()?.uid;
        self.pods.iter().find(|pod| pod.uid() == uid)
    }

    fn sit(&mut self) {
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

    /// Probes exactly while there is a running VM that may become ready.
    fn tend_probe(&mut self) {
        let target = self.probe_target();
        if self.probe.as_ref().map(|probe| &probe.target) != target.as_ref() {
            self.probe = None;
            self.probe = target.map(|target| ProbeTask::start(&self.context, &self.inbox, target));
        }
    }

    fn probe_target(&self) -> Option<Target> {
        let wish = self.o.wish.as_ref().filter(|wish| !wish.deleting && !wish.gone)?;
        if !wish.managed {
            let fixed = Some(wish.ip.parse().ok()?);
            return Some(Target { vm_id: wish.id.clone(), macs: Vec::new(), fixed, port: wish.probe_port });
        }
        let up = matches!(self.o.record.as_ref()?.phase, Phase::Up);
        let vm = self.o.vm_there().filter(|vm| up && vm.phase == VmPhase::Running)?;
        let macs = vm.macs.clone();
        Some(Target { vm_id: vm.id.clone(), macs, fixed: None, port: wish.probe_port })
    }

    /// Pods that wait behind the head, or that may not have this name at all.
    async fn tend_bystanders(&mut self) {
        self.end_again = false;
        let head = self.o.wish.as_ref().map(|wish| (wish.key.clone(), wish.uid.clone()));
        for pod in self.pods.clone() {
            if head.as_ref().is_some_and(|(_, uid)| pod.uid() == uid) {
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
    fn why_not(&self, head: Option<&PodKey>, pod: &Incarnation, theirs: &PodKey) -> Option<Trouble> {
        let unreadable = wish::read(&pod.pod, &self.context.config, false).err();
        match (&self.o.record, unreadable, head) {
            (None, Some(why), _) => Some(why),
            (_, _, Some(head)) => Some(bystander(head, theirs, &self.vm_name)),
            _ => None,
        }
    }

    async fn end_bystander(&mut self, key: &PodKey, uid: &str) {
        if let Err(error) = self.context.cluster.finalise(key, uid).await {
            tracing::warn!(pod = %key, error = %error.trouble(), "a waiting pod could not be ended yet");
            self.end_again = true;
        }
    }

    fn show_bystander(&mut self, pod: &Incarnation, why: &Trouble) {
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

    async fn carry_out(&mut self, step: Step) {
        if let Step::AnswerBaseline(answer) = &step {
            self.inbox.answer_baseline(answer);
            return;
        }
        let scene = Scene::of(&self.vm_name, &self.o, self.pause_left());
        if matches!(step, Step::Capture { .. }) {
            self.o.capture_began = Some(self.context.world.now());
        }
        self.retry.called(known::engine_calls(&step), self.context.world.instant());
        let result = self.unless_superseded(&scene, &step).await;
        self.touched = self.context.world.instant();
        match result {
            None => known::doubt(&mut self.o, &step),
            // What was asked for is not what is asked for now: the answer is about something else.
            Some(_) if is_about_wish(&step) && self.wish_changed_since(&scene) => {
                known::doubt(&mut self.o, &step);
            }
            Some(Ok(found)) => self.succeeded(&step, found),
            Some(Err(trouble)) => self.step_failed(&step, trouble),
        }
        if let Seen::Known(vm) = &self.o.vm {
            self.inbox.expect(vm.as_ref(), self.touched);
        }
    }

    fn wish_changed_since(&self, scene: &Scene) -> bool {
        match (&scene.wish, &self.o.wish) {
            (Some(before), Some(now)) => asks_otherwise(before, now),
            (None, None) => false,
            _ => true,
        }
    }

    fn pause_left(&self) -> Duration {
        match self.o.record.as_ref().map(|record| &record.phase) {
            Some(Phase::Hibernating { paused_at, .. } | Phase::RollingBack { paused_at, .. }) => {
                self.o.pause_left(*paused_at)
            }
            _ => self.context.config.pause_limit,
        }
    }

    /// Carries the step out; `None`: a newer wish made it pointless and it was safe to drop.
    async fn unless_superseded(&mut self, scene: &Scene, step: &Step) -> Option<Result<Found, Trouble>> {
        let (context, inbox) = (Arc::clone(&self.context), Arc::clone(&self.inbox));
        let work = perform(&context, scene, step);
        tokio::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                () = inbox.rung() => {
                    self.take_inbox();
                    self.show();
                    if superseded(step, self.o.wish.as_ref()) {
                        return None;
                    }
                }
                () = context.shutdown.cancelled(), if may_drop(step) => return None,
            }
        }
    }

    fn succeeded(&mut self, step: &Step, found: Found) {
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
            _ => known::learn(&mut self.o, step, found),
        }
    }

    /// A live snapshot request was served, well or badly: that is its one answer.
    fn live_answered(&mut self, step: &Step, reference: &str, failure: Option<String>) {
        known::doubt(&mut self.o, step);
        self.o.live_now = Some(LiveAnswer { reference: reference.to_owned(), failure });
    }

    fn noted(&mut self, record: &OwnerRecord) {
        let before = self.o.record.as_ref().map(|record| std::mem::discriminant(&record.phase));
        let entered = before != Some(std::mem::discriminant(&record.phase));
        let rolled_back = matches!(
            (&self.o.record.as_ref().map(|r| &r.phase), &record.phase),
            (
                Some(Phase::RollingBack { .. } | Phase::Hibernating { .. }),
                Phase::Up | Phase::RollingBack { .. }
            )
        );
        if self.o.record.as_ref().is_some_and(|before| record.restarts > before.restarts) {
            let message =
                format!("the process of VM {} died; it was started again from its disk", self.vm_name);
            self.tell(Tone::Warning, &Trouble::new(Reason::VMRestarted, message));
        }
        let counted = self.o.record.as_ref().and_then(|before| before.phase.captured());
        if counted.is_some() && record.phase.captured().is_none() {
            // The guest is about to go on, or did: this process's own memory of the capture is stale, too.
            self.o.captured_now = None;
        }
        self.say_if_derived(record);
        self.inbox.set_record(Some(record));
        self.o.record = Some(record.clone());
        if entered
            && !rolled_back
            && !matches!(record.phase, Phase::Creating { .. } | Phase::Hibernating { .. })
        {
            self.start_over(matches!(record.phase, Phase::Deleting { .. }));
            self.announce(record);
        }
        if entered {
            (self.o.dropped, self.o.released) = (false, false);
            known::forget_looks(&mut self.o);
        }
    }

    /// A pod that nobody marked as a wake is restored all the same, because there is saved state.
    fn say_if_derived(&self, record: &OwnerRecord) {
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

    fn announce(&self, record: &OwnerRecord) {
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
            _ => return,
        };
        self.tell(tone, &what);
    }

    fn tell(&self, tone: Tone, what: &Trouble) {
        if let Some(wish) = &self.o.wish {
            self.context.cluster.event(&wish.key, &wish.uid, tone, what);
        }
    }

    fn forgotten(&mut self) {
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
    fn lacks_links(&self) -> bool {
        self.o.vm_there().is_some_and(|vm| vm.phase == VmPhase::Running && vm.links_down)
    }

    fn step_failed(&mut self, step: &Step, trouble: Trouble) {
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
            // A guest that is slow to take its identity is no failure of the pod; it is told again, later.
            Step::Start if lacks_links => {
                tracing::warn!(vm = self.vm_name, %trouble, "the links stay down for now");
                self.retry.failed(self.context.world.as_ref());
                return;
            }
            // Owed work: the planner decides how long it is waited for, and a guest never is.
            Step::DropTag { .. } => {
                tracing::warn!(vm = self.vm_name, %trouble, "a hibernate tag stays for now");
                known::unanswered(&mut self.o, Look::Tag, trouble);
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

    fn failed(&mut self, trouble: Trouble, compensation: bool) {
        tracing::warn!(vm = self.vm_name, %trouble, "step failed");
        self.hard |= compensation;
        self.o.failures = self.o.failures.saturating_add(1);
        self.retry.failed(self.context.world.as_ref());
        self.tell(Tone::Warning, &trouble);
        self.o.trouble = Some(trouble.clone());
        self.o.failure = Some(trouble);
    }

    fn may_retire(&self) -> bool {
        self.o.wish.is_none() && self.o.record.is_none()
    }

    async fn sleep(&mut self, limit: Option<Duration>) {
        self.steps = 0;
        let now = self.context.world.instant();
        let limit = limit.into_iter().chain(self.end_again.then_some(SLOWED_DOWN)).min();
        let limit = limit.map(|limit| now + limit);
        let until = [self.retry.pending(now), limit].into_iter().flatten().min();
        let far = now + Duration::from_secs(3600);
        tokio::select! {
            biased;
            () = self.context.shutdown.cancelled() => {}
            () = self.inbox.rung() => {}
            () = tokio::time::sleep_until(until.unwrap_or(far)) => {}
        }
    }
}

/// Whether the pod asks for something else than before (not: whether our own writes changed it).
fn asks_otherwise(before: &Wish, now: &Wish) -> bool {
    let essence = |wish: &Wish| Wish {
        id: String::new(),
        ip: String::new(),
        woken_from: String::new(),
        said_ready: false,
        live_request: None,
        ..wish.clone()
    };
    essence(before) != essence(now)
}

/// Steps whose result is the answer to something in the wish.
const fn is_about_wish(step: &Step) -> bool {
    matches!(step, Step::EnsureImage | Step::PullSource | Step::Look(Look::Source | Look::Fork))
}

/// Steps that leave nothing behind when they are dropped half way.
const fn may_drop(step: &Step) -> bool {
    matches!(
        step,
        Step::EnsureImage
            | Step::PullSource
            | Step::PullImport { .. }
            // The engine takes a half-made VM down when nobody waits for it any more.
            | Step::Run(_)
            | Step::Clone(_)
            | Step::PushHibernate(_)
            | Step::PushLatest(_)
            | Step::LiveSnapshot { .. }
            | Step::Look(_)
    )
}

/// A newer wish makes the step pointless.
fn superseded(step: &Step, wish: Option<&Wish>) -> bool {
    let ending = wish.is_none_or(|wish| wish.deleting || wish.gone);
    match step {
        Step::EnsureImage | Step::PullSource | Step::PullImport { .. } | Step::Run(_) | Step::Clone(_) => {
            ending
        }
        Step::Look(Look::Fork) => ending,
        Step::PushHibernate(_) => ending || wish.is_some_and(|wish| !wish.hibernate),
        Step::LiveSnapshot { .. } => ending || wish.is_some_and(|wish| wish.hibernate),
        // Not demanded any more, or the tag is not ours to write any more.
        Step::PushLatest(request) => wish.is_some_and(|wish| {
            !wish.snapshot_on_delete || (wish.gone && request.tag == cocoon_meta::keys::DEFAULT_SNAPSHOT_TAG)
        }),
        _ => false,
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
