//! One stored object: its bytes, and the few facts that indexes and selectors need.
//!
//! Invariant: an [`Object`] never changes; a write makes a new one. Its JSON text carries the
//! revision that stored it.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

use crate::{json, resources::Kind};

/// Where an object lives.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// The storage table's name, such as `pods` or `leases.coordination.k8s.io`.
    pub(crate) table: &'static str,
    /// Empty for objects of the cluster.
    pub(crate) namespace: Arc<str>,
    pub(crate) name: Arc<str>,
}

impl Key {
    pub(crate) fn new(table: &'static str, namespace: &str, name: &str) -> Self {
        Self { table, namespace: namespace.into(), name: name.into() }
    }
}

/// A stored object.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) key: Key,
    pub(crate) uid: Box<str>,
    pub(crate) revision: u64,
    pub(crate) labels: Box<[(Box<str>, Box<str>)]>,
    /// Values of the kind's selectable fields, in the kind's order.
    pub(crate) fields: Box<[Box<str>]>,
    /// UIDs of the owners.
    pub(crate) owners: Box<[Box<str>]>,
    pub(crate) deleting: bool,
    pub(crate) bytes: Bytes,
}

impl Object {
    /// Stamps `revision` into `value` and keeps its text. A revision of 0 stands for "not stored".
    pub(crate) fn new(kind: &Kind, mut value: Value, revision: u64) -> Self {
        let metadata = json::object(&mut value, "metadata");
        let stamp = (revision > 0).then(|| revision.to_string().into());
        json::put(metadata, "resourceVersion", stamp);
        let bytes = Bytes::from(value.to_string());
        Self::with_bytes(kind, &value, revision, bytes)
    }

    /// For an object read back from the journal.
    pub(crate) fn with_bytes(kind: &Kind, value: &Value, revision: u64, bytes: Bytes) -> Self {
        let namespace = if kind.namespaced { json::text(value, "/metadata/namespace") } else { "" };
        let labels = json::pairs(value, "/metadata/labels").map(|(k, v)| (k.into(), v.into()));
        let owners = json::list(value, "/metadata/ownerReferences").iter();
        Self {
            key: Key::new(kind.table, namespace, json::text(value, "/metadata/name")),
            uid: json::text(value, "/metadata/uid").into(),
            revision,
            labels: labels.collect(),
            fields: kind.selectable.iter().map(|field| kind.field(value, field)).collect(),
            owners: owners.map(|owner| json::text(owner, "/uid").into()).collect(),
            deleting: value.pointer("/metadata/deletionTimestamp").is_some_and(|v| !v.is_null()),
            bytes,
        }
    }

    /// The object as a value of its own.
    pub(crate) fn value(&self) -> Value {
        // The text was written by `to_string` above or was checked when the journal was loaded.
        serde_json::from_slice(&self.bytes).unwrap_or(Value::Null)
    }

    pub(crate) fn label(&self, key: &str) -> Option<&str> {
        self.labels.iter().find(|(k, _)| &**k == key).map(|(_, v)| &**v)
    }

    /// The text of a selectable field.
    pub(crate) fn field(&self, kind: &Kind, field: &str) -> &str {
        let place = kind.selectable.iter().position(|known| *known == field);
        place.and_then(|at| self.fields.get(at)).map_or("", |text| text)
    }
}
