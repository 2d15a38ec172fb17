//! All owners of a node, by VM name.
//!
//! Entry point: [`Directory`]. An owner is made on first sight of its name and ends when nothing needs
//! it; both happen under one lock, so nothing is ever posted to an owner that has just ended.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    owner::inbox::{BaselineAnswer, Inbox},
    planner::observation::PodKey,
    reason::{Reason, Trouble},
};

/// Where a pod's VM is, for logs and exec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    /// Pod incarnation.
    pub uid: String,
    /// VM name.
    pub vm_name: String,
    /// Engine id; empty without a VM.
    pub vm_id: String,
    /// The guest runs.
    pub running: bool,
}

#[derive(Debug, Default)]
struct Tables {
    owners: BTreeMap<String, Arc<Inbox>>,
    seats: BTreeMap<PodKey, Seat>,
}

/// All owners and the seats of their pods.
#[derive(Debug, Default)]
pub struct Directory {
    tables: Mutex<Tables>,
}

impl Directory {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts to the owner of `vm_name`; true when it has to be started first (its inbox is returned).
    pub fn post(&self, vm_name: &str, post: impl FnOnce(&Inbox)) -> Option<Arc<Inbox>> {
        let mut tables = self.tables();
        if let Some(inbox) = tables.owners.get(vm_name) {
            post(inbox);
            return None;
        }
        let inbox = Arc::new(Inbox::default());
        post(&inbox);
        tables.owners.insert(vm_name.to_owned(), Arc::clone(&inbox));
        Some(inbox)
    }

    /// Ends the owner's entry unless something was posted meanwhile.
    pub(super) fn retire(&self, vm_name: &str) -> bool {
        let mut tables = self.tables();
        if tables.owners.get(vm_name).is_some_and(|inbox| !inbox.is_idle()) {
            return false;
        }
        tables.owners.remove(vm_name);
        true
    }

    /// All owners' inboxes by VM name.
    #[must_use]
    pub fn owners(&self) -> Vec<(String, Arc<Inbox>)> {
        self.tables().owners.iter().map(|(name, inbox)| (name.clone(), Arc::clone(inbox))).collect()
    }

    /// The owner whose record is about this pod incarnation.
    #[must_use]
    pub fn recorded(&self, uid: &str) -> Option<String> {
        let tables = self.tables();
        let mut owners = tables.owners.iter();
        owners.find(|(_, inbox)| !uid.is_empty() && inbox.recorded().1 == uid).map(|(name, _)| name.clone())
    }

    /// Whether the owner record of `vm_name` names this namespace.
    #[must_use]
    pub fn is_of_namespace(&self, vm_name: &str, namespace: &str) -> bool {
        self.tables().owners.get(vm_name).is_some_and(|inbox| inbox.recorded().0 == namespace)
    }

    /// Asks the owner of `source` for its baseline.
    pub(super) fn ask_baseline(
        &self,
        source: &str,
        namespace: &str,
    ) -> Result<tokio::sync::oneshot::Receiver<BaselineAnswer>, Trouble> {
        let inbox = self.tables().owners.get(source).cloned();
        let missing = || {
            let message =
                format!("fork-from names VM {source}, which is not on this node; use its node or another VM");
            Trouble::new(Reason::ForkSourceUnavailable, message)
        };
        inbox.ok_or_else(missing)?.ask_baseline(namespace)
    }

    /// Where a pod's VM is.
    #[must_use]
    pub fn seat(&self, key: &PodKey) -> Option<Seat> {
        self.tables().seats.get(key).cloned()
    }

    /// Whether some pod's VM has this engine id.
    #[must_use]
    pub fn has_vm(&self, vm_id: &str) -> bool {
        self.tables().seats.values().any(|seat| seat.vm_id == vm_id)
    }

    /// Whether some pod's VM of this name runs.
    #[must_use]
    pub fn runs(&self, vm_name: &str) -> bool {
        self.tables().seats.values().any(|seat| seat.running && seat.vm_name == vm_name)
    }

    /// Notes where a pod's VM is.
    pub(crate) fn sit(&self, key: &PodKey, seat: Seat) {
        self.tables().seats.insert(key.clone(), seat);
    }

    /// Forgets a pod's seat, if it is still this incarnation's.
    pub(super) fn leave(&self, key: &PodKey, uid: &str) {
        let mut tables = self.tables();
        if tables.seats.get(key).is_some_and(|seat| seat.uid == uid) {
            tables.seats.remove(key);
        }
    }
}
