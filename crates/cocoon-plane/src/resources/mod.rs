//! A table row for each kind.
//!
//! Entry points: [`KINDS`], [`by_path`], [`by_table`]. A new kind is a new row: the store, the verbs, the
//! watch, discovery and the documents read nothing else. Custom resources will bring rows at run time.

mod columns;
mod events;
mod pods;
pub(crate) mod quantity;
mod rows;
mod table;

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

pub(crate) use columns::Column;
pub(crate) use pods::Requests;
pub(crate) use table::KINDS;

use crate::{error::Causes, patch::strategic::Merge};

/// One kind, as one API group and version shows it.
pub(crate) struct Kind {
    /// Empty for the core group.
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) singular: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespaced: bool,
    pub(crate) short_names: &'static [&'static str],
    pub(crate) categories: &'static [&'static str],
    /// Has a `status` subresource.
    pub(crate) status: bool,
    /// Name of the storage table; two rows may share one.
    pub(crate) table: &'static str,
    /// Field names here and in the stored form, where they differ.
    pub(crate) renames: &'static [(&'static str, &'static str)],
    /// Fields that a field selector may name, besides name and namespace; of the stored form.
    pub(crate) selectable: &'static [&'static str],
    /// How strategic merge treats lists.
    pub(crate) merge: &'static [(&'static str, Merge)],
    /// `PUT` on a missing object creates it.
    pub(crate) create_on_update: bool,
    /// A create may bring its status.
    pub(crate) keeps_status: bool,
    /// Carries `metadata.generation`.
    pub(crate) generation: bool,
    /// A delete answers with the object, not with a `Status`.
    pub(crate) returns_deleted: bool,
    pub(crate) hooks: Hooks,
    pub(crate) columns: &'static [Column],
}

/// What a kind does of its own.
pub(crate) struct Hooks {
    /// Whether a text may be a name.
    pub(crate) name: fn(&str) -> Result<(), String>,
    /// Reads the object as its type and writes it again: what is lost is unknown.
    pub(crate) shape: fn(&Value) -> Result<Value, serde_json::Error>,
    /// Brings loose spellings into the one form, before the type is checked.
    pub(crate) normalize: fn(&mut Value),
    /// Fills in what clients rely on.
    pub(crate) default: fn(&mut Value),
    /// Only at creation.
    pub(crate) create: fn(&mut Value),
    pub(crate) validate: fn(&Value, &mut Causes),
    /// Old, new: what may not change.
    pub(crate) update: fn(&Value, &Value, &mut Causes),
    pub(crate) row: fn(&Value, jiff::Timestamp) -> Vec<Value>,
}

impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kind({} {})", self.api_version(), self.kind)
    }
}

impl Kind {
    /// `v1` or `group/version`.
    pub(crate) fn api_version(&self) -> String {
        group_version(self.group, self.version)
    }

    /// `pods` or `leases.coordination.k8s.io`.
    pub(crate) fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.into() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// `Pod` or `Lease.coordination.k8s.io`.
    pub(crate) fn kind_group(&self) -> String {
        if self.group.is_empty() { self.kind.into() } else { format!("{}.{}", self.kind, self.group) }
    }

    /// Text of a selectable field of a stored object.
    pub(crate) fn field(&self, value: &Value, field: &str) -> Box<str> {
        let found = match field {
            // Events of either origin answer to the same name.
            "source" => value.pointer("/source/component").or_else(|| value.pointer("/reportingComponent")),
            _ => value.pointer(&format!("/{}", field.replace('.', "/"))),
        };
        match found {
            Some(Value::String(text)) => text.as_str().into(),
            Some(Value::Null) => "".into(),
            Some(other) => other.to_string().into(),
            None if field == "spec.hostNetwork" || field == "spec.unschedulable" => "false".into(),
            None => "".into(),
        }
    }

    /// Stored form to this row's form.
    pub(crate) fn shown(&self, mut stored: Value) -> Value {
        if self.is_stored_form() {
            return stored;
        }
        self.rename(&mut stored, |(here, there)| (there, here));
        self.stamp(&mut stored);
        stored
    }

    /// This row's form to the stored form.
    pub(crate) fn stored(&self, mut shown: Value) -> Value {
        if self.is_stored_form() {
            return shown;
        }
        self.rename(&mut shown, |(here, there)| (here, there));
        if let Some(stored) = by_table(self.table) {
            stored.stamp(&mut shown);
        }
        shown
    }

    /// Whether objects are kept just as this row shows them.
    pub(crate) fn is_stored_form(&self) -> bool {
        self.renames.is_empty()
    }

    fn rename(
        &self,
        value: &mut Value,
        pair: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str),
    ) {
        let map = crate::json::map(value);
        let moved: Vec<_> = self
            .renames
            .iter()
            .map(|names| pair(*names))
            .filter_map(|(from, to)| Some((to, map.remove(from)?)))
            .collect();
        map.extend(moved.into_iter().map(|(to, value)| (to.to_owned(), value)));
    }

    /// Writes apiVersion and kind.
    pub(crate) fn stamp(&self, value: &mut Value) {
        let map = crate::json::map(value);
        map.insert("apiVersion".into(), self.api_version().into());
        map.insert("kind".into(), self.kind.into());
    }
}

/// `v1` or `group/version`.
pub(crate) fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.into() } else { format!("{group}/{version}") }
}

/// The row of a path.
pub(crate) fn by_path(group: &str, version: &str, plural: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.group == group && kind.version == version && kind.plural == plural)
}

/// The row whose form is stored in `table`.
pub(crate) fn by_table(table: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.table == table && kind.is_stored_form())
}

/// The row of an owner reference.
pub(crate) fn by_kind(api_version: &str, kind: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|row| row.kind == kind && row.api_version() == api_version)
}

/// Reads `value` as a `T` and writes it again.
fn shape<T: DeserializeOwned + Serialize>(value: &Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(T::deserialize(value)?)
}
