//! The way into an owner: a latest-wins inbox instead of a queue, so it is bounded by nature (I9).
//!
//! Entry point: [`Inbox`]. Everything that may concern a VM reaches its owner here: pods, the engine's
//! list, acceptance of views, requests for the baseline. Posting never waits, so two
//! owners that post to one another cannot block each other. What the probe says is with its task, which only
//! rings here: so it ends with the probe.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use crate::{
    ports::{Awaited, SnapshotView, VmView},
    reason::{Reason, Trouble},
    record::OwnerRecord,
};

/// Who waits for a baseline at once; more are refused.
const MAX_ASKERS: usize = 64;

/// One pod incarnation, in the order in which the API made them known.
#[derive(Debug, Clone)]
pub struct Incarnation {
    /// As last seen.
    pub pod: Arc<Pod>,
    /// The API does not have it any more.
    pub gone: bool,
}

impl Incarnation {
    /// Its UID.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.pod.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// What the engine's list said about this VM name.
#[derive(Debug, Clone)]
pub struct Listed {
    /// The VM, if there is one.
    pub vm: Option<VmView>,
    /// When the list was asked for: what happened later is not in it.
    pub asked: Instant,
}

/// An answer to "give me the baseline".
pub(crate) type BaselineAnswer = Result<SnapshotView, Trouble>;

#[derive(Debug, Default)]
struct State {
    pods: Vec<Incarnation>,
    listed: Option<Listed>,
    accepted: u64,
    askers: Vec<oneshot::Sender<BaselineAnswer>>,
    /// Namespace and UID of the owner record; empty without one.
    recorded: (String, String),
    /// What the pod's VM cannot be made without and was not found.
    awaits: Option<Awaited>,
    arrived: bool,
}

/// The inbox of one owner.
#[derive(Debug, Default)]
pub struct Inbox {
    state: Mutex<State>,
    bell: Notify,
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pod was seen, new or changed.
    pub fn pod(&self, pod: Arc<Pod>) {
        let mut state = self.state();
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        match state.pods.iter_mut().find(|known| known.uid() == uid) {
            Some(known) => known.pod = pod,
            None => state.pods.push(Incarnation { pod, gone: false }),
        }
        drop(state);
        self.bell.notify_one();
    }

    /// A pod is not in the API any more.
    pub fn pod_gone(&self, uid: &str) {
        for known in self.state().pods.iter_mut().filter(|known| known.uid() == uid) {
            known.gone = true;
        }
        self.bell.notify_one();
    }

    /// The engine's list is new. Rings only when the VM differs from what was said before.
    pub fn listed(&self, listed: Listed) {
        let mut state = self.state();
        let changed = state.listed.as_ref().is_none_or(|before| before.vm != listed.vm);
        state.listed = Some(listed);
        drop(state);
        if changed {
            self.bell.notify_one();
        }
    }

    /// What the owner itself found out: a list that says otherwise is news, even if it is the first one.
    pub(super) fn expect(&self, vm: Option<&VmView>, asked: Instant) {
        self.state().listed = Some(Listed { vm: vm.cloned(), asked });
    }

    /// The API has the view with this number.
    pub fn accepted(&self, version: u64) {
        let mut state = self.state();
        state.accepted = state.accepted.max(version);
        drop(state);
        self.bell.notify_one();
    }

    /// What the owner waits for, because it was missing.
    #[must_use]
    pub fn awaits(&self) -> Option<Awaited> {
        self.state().awaits.clone()
    }

    /// What the owner waits for is here.
    pub fn arrived(&self) {
        self.state().arrived = true;
        self.bell.notify_one();
    }

    /// What the owner waits for from now on.
    pub(super) fn await_arrival(&self, what: Option<Awaited>) {
        self.state().awaits = what;
    }

    /// Whether something arrived since this was asked last.
    pub(super) fn take_arrived(&self) -> bool {
        std::mem::take(&mut self.state().arrived)
    }

    /// Asks for the baseline, on behalf of a pod of `namespace`.
    pub fn ask_baseline(&self, namespace: &str) -> Result<oneshot::Receiver<BaselineAnswer>, Trouble> {
        let refuse = |why: &str| Err(Trouble::new(Reason::ForkSourceUnavailable, why));
        let mut state = self.state();
        state.askers.retain(|asker| !asker.is_closed());
        if state.recorded.0 != namespace {
            return refuse("the fork's source is not a VM of a pod in this namespace; set fork-from to one");
        }
        if state.askers.len() >= MAX_ASKERS {
            return refuse("too many forks of this source wait already; this one is tried again");
        }
        let (answer, wait) = oneshot::channel();
        state.askers.push(answer);
        drop(state);
        self.bell.notify_one();
        Ok(wait)
    }

    /// Whose VM it is: forks of other namespaces are refused, and a pod finds the owner it had.
    pub(super) fn set_record(&self, record: Option<&OwnerRecord>) {
        self.state().recorded =
            record.map(|record| (record.namespace.clone(), record.uid.clone())).unwrap_or_default();
    }

    /// Namespace and UID of the owner record; empty without one.
    pub(super) fn recorded(&self) -> (String, String) {
        self.state().recorded.clone()
    }

    /// Answers all who wait for the baseline.
    pub(super) fn answer_baseline(&self, answer: &BaselineAnswer) {
        let askers = std::mem::take(&mut self.state().askers);
        for asker in askers {
            let _ = asker.send(answer.clone());
        }
    }

    /// All pods, in order.
    #[must_use]
    pub fn pods(&self) -> Vec<Incarnation> {
        self.state().pods.clone()
    }

    /// Forgets a pod that is over.
    pub(super) fn forget(&self, uid: &str) {
        self.state().pods.retain(|known| known.uid() != uid);
    }

    /// What the list said last.
    pub(super) fn last_listed(&self) -> Option<Listed> {
        self.state().listed.clone()
    }

    /// The number of the last accepted view.
    pub(crate) fn last_accepted(&self) -> u64 {
        self.state().accepted
    }

    /// Whether somebody waits for the baseline.
    pub(super) fn baseline_wanted(&self) -> bool {
        self.state().askers.iter().any(|asker| !asker.is_closed())
    }

    /// Whether nothing is in it that needs an owner.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let state = self.state();
        state.pods.is_empty() && state.askers.iter().all(oneshot::Sender::is_closed)
    }

    /// Waits until something was posted.
    pub(super) async fn rung(&self) {
        self.bell.notified().await;
    }

    /// Rings, so that the owner looks again.
    pub fn ring(&self) {
        self.bell.notify_one();
    }
}
