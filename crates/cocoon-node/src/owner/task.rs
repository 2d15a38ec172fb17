//! The owner's loop.
//!
//! Entry point: `Owner::run`. What comes in is in `intake`, what others see in `front`, what became of a
//! step in `outcome`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use tokio::time::{Instant, sleep_until};

use crate::{
    owner::{
        Context,
        inbox::{Inbox, Incarnation},
        known::{self, Found},
        newer::{asks_otherwise, is_about_wish, may_drop, superseded},
        perform::{Scene, perform},
        probe::{ProbeTask, Target},
        retry::Retry,
    },
    planner::{
        Look, Step,
        observation::{Cooling, Observation, PodKey, Seen},
        plan, thaw,
    },
    reason::{Reason, Trouble},
    record::{OwnerRecord, Phase},
    view::View,
};

/// The owner of one VM name.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) context: Arc<Context>,
    pub(super) vm_name: String,
    pub(super) inbox: Arc<Inbox>,
    pub(super) pods: Vec<Incarnation>,
    pub(super) o: Observation,
    pub(super) retry: Retry,
    /// A compensation failed: not even those are tried before the retry is due.
    pub(super) hard: bool,
    /// What was said last about a guest that does not take its identity.
    pub(super) said_silent: Option<Trouble>,
    /// The pod whose annotations were judged last.
    pub(super) judged: Option<Arc<Pod>>,
    /// What was said about this incarnation's annotations, by its UID.
    pub(super) odd: (String, BTreeSet<String>),
    pub(super) shown: Option<View>,
    pub(super) version: u64,
    pub(super) shown_at: Instant,
    /// Since when the pod is known to show other annotations than the API accepted of us.
    pub(super) overwritten: Option<Instant>,
    /// When that was put right last.
    pub(super) corrected: Option<Instant>,
    /// When the last step ended: a list that was asked for before says nothing about it.
    pub(super) touched: Instant,
    pub(super) probe: Option<ProbeTask>,
    /// What was probed last: what the observation says of its guest is about that.
    pub(super) probed: Option<Target>,
    pub(super) seat: Option<(PodKey, String)>,
    pub(super) bystanders: BTreeMap<String, View>,
    /// Since when the pod at the head is known to be deleted.
    pub(super) ending_since: Option<Instant>,
    /// A bystander is being deleted and the API did not take its end yet.
    pub(super) end_again: bool,
    /// When the tag was last looked at for pushes that were cut off.
    pub(super) strays_seen: Instant,
    /// Steps since the last rest: a fuse against a planner that turns in circles (I9).
    pub(super) steps: u32,
}

/// The longest lifecycle has some thirty steps.
const STEPS_WITHOUT_REST: u32 = 200;
/// Look, note, resume, look; and a few failures.
const THAW_STEPS: u32 = 16;
pub(super) const SLOWED_DOWN: Duration = Duration::from_secs(1);
/// How often the tag of a guest that went on is looked at, while a push that was cut off may still land there.
const STRAYS: Duration = Duration::from_secs(30);

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
            said_silent: None,
            judged: None,
            odd: Default::default(),
            shown: None,
            version: 0,
            shown_at: now,
            overwritten: None,
            corrected: None,
            touched: now,
            probe: None,
            probed: None,
            seat: None,
            bystanders: BTreeMap::new(),
            ending_since: None,
            end_again: false,
            strays_seen: now,
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
                Step::Rest if self.recovered() => self.start_over(false),
                Step::Rest if self.may_retire() && self.context.directory.retire(&self.vm_name) => return,
                Step::Rest => {
                    self.sleep(self.strays_due()).await;
                    self.doubt_the_tag();
                }
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
                step => match self.too_early(&step) {
                    Some(wait) => self.sleep(Some(wait)).await,
                    None => self.carry_out(step).await,
                },
            }
        }
        self.thaw().await;
    }

    /// The agent ends: no guest stands paused meanwhile. [`Context::drain`] bounds the time that this takes.
    async fn thaw(&mut self) {
        for _ in 0..THAW_STEPS {
            let step = thaw(&self.o);
            if step == Step::Rest {
                return;
            }
            let scene = Scene::of(&self.vm_name, &self.o, self.pause_left());
            match perform(&self.context, &scene, &step).await {
                Ok(found) => {
                    self.succeeded(&step, found);
                    self.show();
                }
                Err(trouble) => {
                    tracing::warn!(vm = self.vm_name, %trouble, "the guest does not go on yet");
                    known::doubt(&mut self.o, &step);
                    tokio::time::sleep(SLOWED_DOWN).await;
                }
            }
        }
        tracing::error!(
            vm = self.vm_name,
            "the guest may stand paused until `cocoon vm start {}`",
            self.vm_name
        );
    }

    /// In how long the tag is due to be looked at again; `None`: nothing of ours can still land there.
    fn strays_due(&self) -> Option<Duration> {
        let record = self.o.record.as_ref().filter(|record| record.phase == Phase::Up)?;
        let may_land = self.o.registry && !record.strays.is_empty();
        let since = self.context.world.instant().duration_since(self.strays_seen);
        may_land.then(|| STRAYS.saturating_sub(since))
    }

    /// What is known of the tag does not stand for ever while a push may still land.
    fn doubt_the_tag(&mut self) {
        if self.strays_due().is_some_and(|due| due.is_zero()) {
            self.strays_seen = self.context.world.instant();
            self.o.tag = Seen::Unknown;
        }
    }

    /// Something failed once, was tried again, and there is nothing left to do: the goal is reached.
    fn recovered(&self) -> bool {
        let at_goal = self
            .o
            .record
            .as_ref()
            .is_some_and(|record| matches!(record.phase, Phase::Up | Phase::Hibernated { .. }));
        at_goal && self.o.failure.is_some() && self.o.cooling == Cooling::None
    }

    /// How long a failing pod has to wait until its budget of engine calls allows the step.
    fn too_early(&self, step: &Step) -> Option<Duration> {
        let hibernates = self.o.record.as_ref().is_some_and(|record| {
            matches!(record.phase, Phase::Hibernating { .. } | Phase::RollingBack { .. })
        });
        // A guest may be waiting for that look in order to go on.
        if hibernates && *step == Step::Look(Look::Vm) {
            return None;
        }
        let refused = self.o.trouble.as_ref().is_some_and(|trouble| trouble.reason == Reason::ResumeFailed);
        let calls = if *step == Step::Resume && refused { 1 } else { known::engine_needs(step) };
        let now = self.context.world.instant();
        let at = self.retry.affordable(calls, now)?;
        Some(at.duration_since(now))
    }

    /// Takes what was posted, works out the wish, shows what follows.
    async fn look_around(&mut self) {
        self.take_inbox();
        self.inbox.await_arrival(self.awaited());
        self.tend_vm();
        self.say_oddities();
        self.tend_probe();
        self.show();
        self.tend_bystanders().await;
    }

    async fn carry_out(&mut self, step: Step) {
        if let Step::AnswerBaseline(answer) = &step {
            self.inbox.answer_baseline(answer);
            // Looked at afresh for the next fork: people may have dropped it, to have a newer one.
            self.o.baseline = Seen::Unknown;
            return;
        }
        let scene = Scene::of(&self.vm_name, &self.o, self.pause_left());
        if matches!(step, Step::Capture { .. }) {
            self.o.capture_began = Some(self.context.world.now());
        }
        self.retry.called(known::engine_calls(&step), self.context.world.instant());
        let result = self.unless_superseded(&scene, &step).await;
        self.touched = self.context.world.instant();
        self.o.waits = None;
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
        let begun = context.world.instant();
        loop {
            let word = self.word_due(begun);
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                () = sleep_until(word.unwrap_or(begun)), if word.is_some() => self.say_wait(step),
                () = inbox.rung() => {
                    self.take_inbox();
                    self.tend_probe();
                    self.show();
                    if superseded(step, self.o.wish.as_ref()) {
                        return None;
                    }
                }
                () = context.shutdown.cancelled(), if may_drop(step) => return None,
            }
        }
    }

    fn may_retire(&self) -> bool {
        self.o.wish.is_none() && self.o.record.is_none()
    }

    async fn sleep(&mut self, limit: Option<Duration>) {
        self.steps = 0;
        let now = self.context.world.instant();
        let limit = limit.into_iter().chain(self.end_again.then_some(SLOWED_DOWN)).min();
        let limit = limit.map(|limit| now + limit);
        let until = [self.retry.pending(now), limit, self.correction_due()].into_iter().flatten().min();
        let far = now + Duration::from_secs(3600);
        tokio::select! {
            biased;
            () = self.context.shutdown.cancelled() => {}
            () = self.inbox.rung() => {}
            () = tokio::time::sleep_until(until.unwrap_or(far)) => {}
        }
    }
}
