//! From a changed pod to its owner, or to a plain refusal.
//!
//! Entry point: [`Router::route`]. An incarnation stays with the owner it first went to, whatever its
//! annotations say later. A pod that is not ours to serve gets one verdict and is let go when deleted.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;

use crate::{
    cluster::{Show, Tone},
    owner::{Context, inbox::Inbox},
    pods::table::Change,
    reason::{Reason, Trouble},
    view, wish,
};

/// How long between tries to end a refused pod.
const END_AGAIN: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Owner(String),
    Refused(Trouble),
}

/// Knows which incarnation is where.
#[derive(Debug)]
pub(crate) struct Router {
    context: Arc<Context>,
    places: Mutex<BTreeMap<String, Place>>,
}

impl Router {
    /// A router that knows nothing yet.
    #[must_use]
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context, places: Mutex::default() }
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<String, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the owner; or refuses.
    pub(crate) fn route(&self, change: Change) {
        match change {
            Change::Seen(pod) => self.seen(pod),
            Change::Gone(pod) => self.gone(&pod),
        }
    }

    fn gone(&self, pod: &Pod) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        if let Some(Place::Owner(vm_name)) = self.places().remove(&uid) {
            self.context.post(&vm_name, |inbox| inbox.pod_gone(&uid));
        }
    }

    fn seen(&self, pod: Arc<Pod>) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let known = self.places().get(&uid).cloned();
        let place = match known {
            Some(place @ Place::Owner(_)) => place,
            _ => self.judge(&pod, &uid),
        };
        self.places().insert(uid, place.clone());
        match place {
            Place::Owner(vm_name) => self.context.post(&vm_name, |inbox| inbox.pod(pod)),
            Place::Refused(trouble) => self.refuse(&pod, &trouble),
        }
    }

    /// Where a pod belongs: with the owner whose record is about it, else by its name.
    fn judge(&self, pod: &Pod, uid: &str) -> Place {
        if let Some(vm_name) = self.context.directory.recorded(uid) {
            return Place::Owner(vm_name);
        }
        let named = cocoon_meta::VmSpec::parse(pod).vm_name;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let adopted = self.context.directory.is_of_namespace(&named, namespace);
        match wish::read(pod, &self.context.config, adopted) {
            Ok(wish) => Place::Owner(wish.vm_name),
            Err(trouble) => Place::Refused(trouble),
        }
    }

    fn refuse(&self, pod: &Arc<Pod>, trouble: &Trouble) {
        let (key, uid) = (wish::key(pod), pod.metadata.uid.clone().unwrap_or_default());
        if pod.metadata.deletion_timestamp.is_some() {
            let context = Arc::clone(&self.context);
            self.context.spawn(async move {
                while let Err(error) = context.cluster.finalise(&key, &uid).await {
                    tracing::warn!(pod = %key, error = %error.trouble(), "a refused pod could not be ended yet");
                    tokio::time::sleep(END_AGAIN).await;
                }
            });
            return;
        }
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            return;
        }
        let mut view = view::refused(trouble, cocoon_meta::read_cocoon_set_generation(pod.as_ref()));
        if trouble.reason == Reason::MissingVMName {
            // Not one of ours: its annotations are none of our business.
            view.annotations.clear();
        }
        self.context.cluster.event(&key, &uid, Tone::Warning, trouble);
        let show = Show { pod: Arc::clone(pod), view, version: 0 };
        self.context.cluster.show(show, Arc::new(Inbox::default()));
    }
}
