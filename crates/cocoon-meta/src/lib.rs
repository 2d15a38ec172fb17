//! The metadata contract of cocoonstack: keys, typed annotations, names, roles, policy, lifecycle.
//!
//! Everything a component reads from or writes onto a Kubernetes object for another component goes
//! through this crate; it is the only place where keys and encodings live. Pure: no I/O, no clock.
//!
//! Start at [`VmSpec::parse`] (what a pod asks for), [`LifecycleStatus`] (what the node agent answers)
//! and [`vm_name_for_pod`].

mod annotated;
mod flags;
pub mod keys;
mod lifecycle;
mod names;
mod patch;
mod pods;
mod policy;
mod snapshot;
mod vm;

pub use annotated::{Annotated, Annotations};
pub use flags::{HibernateState, KeepSnapshotOnDelete, RestoreFromHibernate};
pub use lifecycle::{
    LifecycleState, LifecycleStatus, read_cocoon_set_generation, stamp_cocoon_set_generation,
};
pub use names::{
    MAX_HIBERNATABLE_VM_NAME, MAX_VM_NAME, Role, VmNameError, agent_pod_name, agent_vm_name_prefix,
    check_vm_name, extract_agent_slot, fork_baseline_name, has_vm_name_form, hibernate_import_name,
    max_vm_name, role_for_pod, toolbox_pod_name, unhashed_vm_name_for_pod, vm_name_for_deployment,
    vm_name_for_pod,
};
pub use patch::{AnnotationChanges, annotations_merge_patch, annotations_merge_patch_for};
pub use pods::{
    cocoon_set_owner_name, has_cocoon_toleration_key, is_container_running, is_owned_by_cocoon_set,
    is_pod_ready, is_pod_terminal, pod_key, pod_node_pool, vm_live,
};
pub use policy::{connection_type, should_snapshot, should_snapshot_vm};
pub use snapshot::{
    SnapshotMetaError, SnapshotRequest, SnapshotState, SnapshotStatus, read_snapshot_annotations,
};
pub use vm::{InvalidProbePort, VmRuntime, VmSpec, clone_from_dir, woken_from};
