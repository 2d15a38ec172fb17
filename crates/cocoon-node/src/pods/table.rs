//! The pods of this node as last seen: synchronous, compared by UID.
//!
//! Entry points: [`PodTable::replace`] after a list, [`PodTable::apply`] and [`PodTable::remove`] after a
//! watch event. A list that lacks a known UID is a deletion that was missed; it is told like a seen one.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use k8s_openapi::api::core::v1::Pod;

/// What changed.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// New or different.
    Seen(Arc<Pod>),
    /// Not there any more.
    Gone(Arc<Pod>),
}

/// All pods by UID.
#[derive(Debug, Default)]
pub struct PodTable {
    pods: Mutex<BTreeMap<String, Arc<Pod>>>,
}

fn uid(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

/// Same content, whatever the resourceVersion and bookkeeping say.
fn same(a: &Pod, b: &Pod) -> bool {
    let bare = |pod: &Pod| {
        let mut meta = pod.metadata.clone();
        (meta.resource_version, meta.managed_fields) = (None, None);
        meta
    };
    a.spec == b.spec && a.status == b.status && bare(a) == bare(b)
}

impl PodTable {
    fn pods(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Pod>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One pod by UID.
    #[must_use]
    pub fn get(&self, uid: &str) -> Option<Arc<Pod>> {
        self.pods().get(uid).cloned()
    }

    /// All pods, oldest UID order.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Pod>> {
        self.pods().values().cloned().collect()
    }

    /// Takes a complete list; returns what changed, deletions first.
    pub fn replace(&self, listed: Vec<Pod>) -> Vec<Change> {
        let mut pods = self.pods();
        let present: Vec<String> = listed.iter().map(uid).collect();
        let missed: Vec<String> = pods.keys().filter(|uid| !present.contains(uid)).cloned().collect();
        let mut changes: Vec<Change> =
            missed.iter().filter_map(|uid| pods.remove(uid)).map(Change::Gone).collect();
        changes.extend(listed.into_iter().filter_map(|pod| keep(&mut pods, pod)));
        changes
    }

    /// Takes one pod; `None`: nothing that matters changed.
    pub fn apply(&self, pod: Pod) -> Option<Change> {
        keep(&mut self.pods(), pod)
    }

    /// Takes a deletion.
    pub fn remove(&self, pod: &Pod) -> Option<Change> {
        self.pods().remove(&uid(pod)).map(Change::Gone)
    }
}

fn keep(pods: &mut BTreeMap<String, Arc<Pod>>, pod: Pod) -> Option<Change> {
    let pod = Arc::new(pod);
    let before = pods.insert(uid(&pod), Arc::clone(&pod));
    (!before.is_some_and(|before| same(&before, &pod))).then_some(Change::Seen(pod))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, uid: &str, version: &str, label: &str) -> Pod {
        serde_json::from_value(serde_json::json!({
            "metadata": {"name": name, "namespace": "default", "uid": uid, "resourceVersion": version,
                "labels": {"l": label}}
        }))
        .unwrap()
    }

    fn words(changes: &[Change]) -> Vec<String> {
        let word = |change: &Change| match change {
            Change::Seen(pod) => format!("+{}", uid(pod)),
            Change::Gone(pod) => format!("-{}", uid(pod)),
        };
        changes.iter().map(word).collect()
    }

    #[test]
    fn a_list_that_lacks_a_pod_tells_its_deletion_before_anything_new() {
        let table = PodTable::default();
        assert_eq!(
            words(&table.replace(vec![pod("a", "1", "1", "x"), pod("b", "2", "1", "x")])),
            ["+1", "+2"]
        );
        let again = table.replace(vec![pod("a", "3", "2", "x"), pod("b", "2", "9", "x")]);
        assert_eq!(words(&again), ["-1", "+3"], "same name with another UID is a delete and an add");
    }

    #[test]
    fn a_new_version_alone_is_not_a_change_and_content_is() {
        let table = PodTable::default();
        assert!(table.apply(pod("a", "1", "1", "x")).is_some());
        assert!(table.apply(pod("a", "1", "2", "x")).is_none());
        assert_eq!(table.get("1").unwrap().metadata.resource_version.as_deref(), Some("2"));
        assert!(table.apply(pod("a", "1", "3", "y")).is_some());
        assert!(table.remove(&pod("a", "1", "3", "y")).is_some());
        assert!(table.remove(&pod("a", "1", "3", "y")).is_none());
    }
}
