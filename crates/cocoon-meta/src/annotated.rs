//! One view of "something with annotations", so that each wrapper is written once for pods, object
//! metadata and plain maps.

use std::collections::BTreeMap;

use cocoon_api::{CocoonHibernation, CocoonSet};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::keys;

/// Annotations as Kubernetes holds them.
pub type Annotations = BTreeMap<String, String>;

/// An object whose annotations can be read and changed.
pub trait Annotated {
    /// The annotations, if the object has a map at all.
    fn annotation_map(&self) -> Option<&Annotations>;

    /// The annotations, made when missing.
    fn annotation_map_mut(&mut self) -> &mut Annotations;

    /// The value under `key`; absence reads as the empty text, as in the contract.
    fn annotation(&self, key: &str) -> &str {
        self.annotation_map().and_then(|map| map.get(key)).map_or("", String::as_str)
    }

    /// Whether the value under `key` is exactly `true`.
    fn annotation_flag(&self, key: &str) -> bool {
        self.annotation(key) == keys::TRUE
    }

    /// Writes one value.
    fn set_annotation(&mut self, key: &str, value: impl Into<String>)
    where
        Self: Sized,
    {
        self.annotation_map_mut().insert(key.to_owned(), value.into());
    }

    /// Removes one key; makes no map for it.
    fn remove_annotation(&mut self, key: &str) {
        if self.annotation_map().is_some_and(|map| map.contains_key(key)) {
            self.annotation_map_mut().remove(key);
        }
    }
}

impl Annotated for Annotations {
    fn annotation_map(&self) -> Option<&Annotations> {
        Some(self)
    }

    fn annotation_map_mut(&mut self) -> &mut Annotations {
        self
    }
}

impl Annotated for ObjectMeta {
    fn annotation_map(&self) -> Option<&Annotations> {
        self.annotations.as_ref()
    }

    fn annotation_map_mut(&mut self) -> &mut Annotations {
        self.annotations.get_or_insert_default()
    }
}

macro_rules! annotated_by_metadata {
    ($($kind:ty),+) => {$(
        impl Annotated for $kind {
            fn annotation_map(&self) -> Option<&Annotations> {
                self.metadata.annotation_map()
            }

            fn annotation_map_mut(&mut self) -> &mut Annotations {
                self.metadata.annotation_map_mut()
            }
        }
    )+};
}

annotated_by_metadata!(Pod, CocoonSet, CocoonHibernation);

/// Writes `value` under `key` unless it is empty: empty means "nothing to say", never "clear".
pub(crate) fn set_unless_empty(object: &mut impl Annotated, key: &str, value: &str) {
    if !value.is_empty() {
        object.set_annotation(key, value);
    }
}

/// Writes `true` under `key` when `flag` is set; a false flag does not clear the key.
pub(crate) fn set_if(object: &mut impl Annotated, key: &str, flag: bool) {
    if flag {
        object.set_annotation(key, keys::TRUE);
    }
}
