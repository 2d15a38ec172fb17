//! The three switches on a pod: hibernate, restore from hibernate, keep the snapshot on delete.
//!
//! A switch is on only for the literal `true`.

use crate::annotated::Annotated;
use crate::keys;

/// Whether the VM is asked to be hibernated. Setting it to false removes the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HibernateState(pub bool);

impl HibernateState {
    /// Reads the switch.
    pub fn read(object: &impl Annotated) -> Self {
        Self(object.annotation_flag(keys::ANNOTATION_HIBERNATE))
    }

    /// Writes `true`, or removes the key.
    pub fn apply(self, object: &mut impl Annotated) {
        if self.0 {
            object.set_annotation(keys::ANNOTATION_HIBERNATE, keys::TRUE);
        } else {
            object.remove_annotation(keys::ANNOTATION_HIBERNATE);
        }
    }
}

/// Whether the pod must be restored from its `:hibernate` tag. Only ever set, never cleared by `apply`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RestoreFromHibernate(pub bool);

impl RestoreFromHibernate {
    /// Reads the switch.
    pub fn read(object: &impl Annotated) -> Self {
        Self(object.annotation_flag(keys::ANNOTATION_RESTORE_FROM_HIBERNATE))
    }

    /// Writes `true` when set; false leaves the object alone.
    pub fn apply(self, object: &mut impl Annotated) {
        crate::annotated::set_if(object, keys::ANNOTATION_RESTORE_FROM_HIBERNATE, self.0);
    }
}

/// Whether the coming delete only gives the pod's seat free, so that the node keeps its local snapshot.
/// Best effort: a lost flag costs the wake a pull, never correctness.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeepSnapshotOnDelete(pub bool);

impl KeepSnapshotOnDelete {
    /// Reads the switch.
    pub fn read(object: &impl Annotated) -> Self {
        Self(object.annotation_flag(keys::ANNOTATION_KEEP_SNAPSHOT_ON_DELETE))
    }

    /// Writes `true` when set; false leaves the object alone.
    pub fn apply(self, object: &mut impl Annotated) {
        crate::annotated::set_if(object, keys::ANNOTATION_KEEP_SNAPSHOT_ON_DELETE, self.0);
    }
}
