//! Objects, indexes and the watch window; one synchronous owner.
//!
//! Entry point: [`Store`], kept behind a mutex and never awaited inside. A write returns the object
//! and its revision at once; whether it is durable is the journal's affair ([`crate::journal`]).
//! Invariants: revisions grow by one a write and never come back; a list and the revision it claims
//! agree, because both are taken under the same lock; a watcher that starts after a list's revision
//! gets each later write exactly once, or is ended.

mod object;
mod queue;
mod window;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

pub(crate) use object::{Key, Object};
pub(crate) use queue::Queue;
use serde_json::Value;
pub(crate) use window::{Change, Event, Window};

use crate::{
    resources::{Kind, by_table},
    selector::Selection,
};

/// What a write expects to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    Absent,
    Revision(u64),
}

/// The object is not what the writer read before.
#[derive(Debug)]
pub(crate) struct Raced;

/// What a watcher gets.
#[derive(Debug, Clone)]
pub(crate) enum Notice {
    Change(Change, Arc<Object>),
    Bookmark(u64),
}

impl Notice {
    pub(crate) fn revision(&self) -> u64 {
        match self {
            Self::Change(_, object) => object.revision,
            Self::Bookmark(revision) => *revision,
        }
    }
}

/// What a watcher wants to see; no table means all of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Filter {
    pub(crate) table: Option<&'static str>,
    pub(crate) namespace: Option<Arc<str>>,
    pub(crate) selection: Selection,
}

impl Filter {
    pub(crate) fn matches(&self, object: &Object) -> bool {
        self.table.is_none_or(|table| table == object.key.table)
            && self.namespace.as_ref().is_none_or(|namespace| *namespace == object.key.namespace)
            && self.selection.matches(object)
    }

    /// How `event` looks to someone who sees matching objects only.
    fn project(&self, event: &Event) -> Option<Notice> {
        if self.table.is_some_and(|table| table != event.object.key.table) {
            return None;
        }
        let before = event.previous.as_deref().is_some_and(|object| self.matches(object));
        let after = event.change != Change::Deleted && self.matches(&event.object);
        let change = match (before, after) {
            (false, false) => return None,
            (false, true) => Change::Added,
            (true, true) => Change::Modified,
            (true, false) => Change::Deleted,
        };
        let object = match &event.previous {
            // Who sees an object leave sees it as he knew it, under the revision at which it left.
            Some(previous) if change == Change::Deleted && event.change != Change::Deleted => {
                by_table(previous.key.table)
                    .map(|kind| Arc::new(Object::new(kind, previous.value(), event.object.revision)))?
            }
            _ => Arc::clone(&event.object),
        };
        Some(Notice::Change(change, object))
    }
}

#[derive(Debug)]
struct Subscriber {
    filter: Filter,
    queue: queue::Sender,
}

/// A watcher's end of its queue. The queue closes when the watcher fell behind.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) id: u64,
    pub(crate) queue: Queue,
}

type Names = BTreeMap<Arc<str>, Arc<Object>>;

/// The store. See the module's text.
#[derive(Debug)]
pub(crate) struct Store {
    tables: BTreeMap<&'static str, BTreeMap<Arc<str>, Names>>,
    revision: u64,
    window: Window,
    subscribers: BTreeMap<u64, Subscriber>,
    next_subscriber: u64,
    /// Pods by node; pods without a node stand under `""`.
    by_node: BTreeMap<Box<str>, BTreeSet<Key>>,
    by_owner: BTreeMap<Box<str>, BTreeSet<Key>>,
    by_uid: BTreeMap<Box<str>, Key>,
    ended_watchers: u64,
}

impl Store {
    /// A store with `objects`, at `revision`. The watch window starts there.
    pub(crate) fn new(revision: u64, objects: impl IntoIterator<Item = Object>) -> Self {
        let mut store = Self {
            tables: BTreeMap::new(),
            revision,
            window: Window::starting_after(revision),
            subscribers: BTreeMap::new(),
            next_subscriber: 0,
            by_node: BTreeMap::new(),
            by_owner: BTreeMap::new(),
            by_uid: BTreeMap::new(),
            ended_watchers: 0,
        };
        for object in objects {
            store.index(&Arc::new(object));
        }
        store
    }

    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// How many watchers were ended because they could not keep up.
    pub(crate) fn ended_watchers(&self) -> u64 {
        self.ended_watchers
    }

    /// The oldest revision a watch may start after.
    pub(crate) fn oldest(&self) -> u64 {
        self.window.oldest()
    }

    pub(crate) fn get(&self, table: &str, namespace: &str, name: &str) -> Option<&Arc<Object>> {
        self.tables.get(table)?.get(namespace)?.get(name)
    }

    pub(crate) fn by_key(&self, key: &Key) -> Option<&Arc<Object>> {
        self.get(key.table, &key.namespace, &key.name)
    }

    pub(crate) fn by_uid(&self, uid: &str) -> Option<&Arc<Object>> {
        self.by_key(self.by_uid.get(uid)?)
    }

    /// Objects that name `uid` as an owner.
    pub(crate) fn dependents(&self, uid: &str) -> Vec<Arc<Object>> {
        self.resolve(self.by_owner.get(uid))
    }

    fn resolve(&self, keys: Option<&BTreeSet<Key>>) -> Vec<Arc<Object>> {
        keys.into_iter().flatten().filter_map(|key| self.by_key(key)).cloned().collect()
    }

    /// Matching objects of a table in name order, and the revision they agree with.
    pub(crate) fn list(&self, filter: &Filter) -> (Vec<Arc<Object>>, u64) {
        let objects = match (filter.table, filter.selection.node()) {
            (Some("pods"), Some(node)) => self.resolve(self.by_node.get(node)),
            (Some(table), _) => self.in_table(table, filter.namespace.as_deref()),
            (None, _) => self.tables.keys().flat_map(|table| self.in_table(table, None)).collect(),
        };
        (objects.into_iter().filter(|object| filter.matches(object)).collect(), self.revision)
    }

    fn in_table(&self, table: &str, namespace: Option<&str>) -> Vec<Arc<Object>> {
        let Some(namespaces) = self.tables.get(table) else { return Vec::new() };
        match namespace {
            Some(namespace) => {
                namespaces.get(namespace).into_iter().flat_map(Names::values).cloned().collect()
            }
            None => namespaces.values().flat_map(Names::values).cloned().collect(),
        }
    }

    /// Stores `value` as the next revision of `key` if `expect` holds.
    pub(crate) fn put(
        &mut self,
        kind: &Kind,
        key: &Key,
        expect: Expect,
        value: Value,
    ) -> Result<Arc<Object>, Raced> {
        let previous = self.check(key, expect)?;
        let object = Arc::new(Object::new(kind, value, self.revision + 1));
        self.revision += 1;
        if let Some(previous) = &previous {
            self.unindex(previous);
        }
        self.index(&object);
        let change = if previous.is_some() { Change::Modified } else { Change::Added };
        self.publish(Event { change, object: Arc::clone(&object), previous });
        Ok(object)
    }

    /// Removes `key` if it is still at `revision`; `last` is what watchers see.
    pub(crate) fn remove(
        &mut self,
        kind: &Kind,
        key: &Key,
        revision: u64,
        last: Value,
    ) -> Result<Arc<Object>, Raced> {
        let previous = self.check(key, Expect::Revision(revision))?;
        let object = Arc::new(Object::new(kind, last, self.revision + 1));
        self.revision += 1;
        if let Some(previous) = &previous {
            self.unindex(previous);
        }
        self.publish(Event { change: Change::Deleted, object: Arc::clone(&object), previous });
        Ok(object)
    }

    fn check(&self, key: &Key, expect: Expect) -> Result<Option<Arc<Object>>, Raced> {
        let current = self.by_key(key).cloned();
        let found = current.as_ref().map_or(Expect::Absent, |object| Expect::Revision(object.revision));
        if found == expect { Ok(current) } else { Err(Raced) }
    }

    fn index(&mut self, object: &Arc<Object>) {
        let key = &object.key;
        let names = self.tables.entry(key.table).or_default().entry(Arc::clone(&key.namespace)).or_default();
        names.insert(Arc::clone(&key.name), Arc::clone(object));
        if key.table == "pods" {
            self.by_node.entry(node_of(object)).or_default().insert(key.clone());
        }
        for owner in &object.owners {
            self.by_owner.entry(owner.clone()).or_default().insert(key.clone());
        }
        self.by_uid.insert(object.uid.clone(), key.clone());
    }

    fn unindex(&mut self, object: &Object) {
        let key = &object.key;
        if let Some(namespaces) = self.tables.get_mut(key.table)
            && let Some(names) = namespaces.get_mut(&key.namespace)
        {
            names.remove(&key.name);
            if names.is_empty() {
                namespaces.remove(&key.namespace);
            }
        }
        if key.table == "pods" {
            forget(&mut self.by_node, &node_of(object), key);
        }
        for owner in &object.owners {
            forget(&mut self.by_owner, owner, key);
        }
        self.by_uid.remove(&object.uid);
    }

    fn publish(&mut self, event: Event) {
        let mut ended = 0;
        self.subscribers.retain(|_, subscriber| {
            let Some(notice) = subscriber.filter.project(&event) else { return true };
            match subscriber.queue.send(notice) {
                Ok(()) => true,
                Err(queue::SendError::Closed) => false,
                Err(queue::SendError::Full) => {
                    ended += 1;
                    false
                }
            }
        });
        self.ended_watchers += ended;
        self.window.push(event);
    }

    /// Subscribes to what happens after `revision`; `None` if the window does not reach back to it
    /// (or it lies in the future, which only a client of another store can claim).
    pub(crate) fn subscribe_after(
        &mut self,
        filter: &Filter,
        revision: u64,
    ) -> Option<(Vec<Notice>, Subscription)> {
        if revision > self.revision {
            return None;
        }
        let backlog = self.window.after(revision)?.filter_map(|event| filter.project(event)).collect();
        Some((backlog, self.subscribe(filter)))
    }

    /// Subscribes to what happens from now on.
    pub(crate) fn subscribe(&mut self, filter: &Filter) -> Subscription {
        self.subscribers.retain(|_, subscriber| !subscriber.queue.is_closed());
        let (sender, queue) = queue::queue();
        let id = self.next_subscriber;
        self.next_subscriber += 1;
        self.subscribers.insert(id, Subscriber { filter: filter.clone(), queue: sender });
        Subscription { id, queue }
    }

    /// Puts a bookmark at the present revision into a watcher's queue, behind what it has yet to see.
    pub(crate) fn bookmark(&mut self, id: u64) {
        if let Some(subscriber) = self.subscribers.get(&id) {
            // A full queue needs no bookmark: events are on their way.
            let _ = subscriber.queue.send(Notice::Bookmark(self.revision));
        }
    }
}

fn node_of(pod: &Object) -> Box<str> {
    by_table("pods").map_or("", |kind| pod.field(kind, "spec.nodeName")).into()
}

fn forget(index: &mut BTreeMap<Box<str>, BTreeSet<Key>>, at: &str, key: &Key) {
    if let Some(keys) = index.get_mut(at) {
        keys.remove(key);
        if keys.is_empty() {
            index.remove(at);
        }
    }
}
