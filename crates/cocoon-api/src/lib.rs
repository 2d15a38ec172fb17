//! CRD types of cocoonstack: CocoonSet and CocoonHibernation.
//!
//! Types only: parsing, schema, defaults, canonical quantities. No I/O, no client. The generated CRDs
//! ([`cocoon_set_crd`], [`cocoon_hibernation_crd`]) are committed under `crds/` and compared by a test;
//! `UPDATE_CRDS=1 cargo test -p cocoon-api` writes them anew.

mod cocoonset;
mod conditions;
mod enums;
mod hibernation;
mod quantity;
mod schema;

pub use cocoonset::{
    AgentSpec, AgentStatus, CocoonSet, CocoonSetSpec, CocoonSetStatus, ToolboxSpec, ToolboxStatus, VmOptions,
    VmStatus,
};
pub use conditions::{CONDITION_PROGRESSING, CONDITION_READY, ready_condition};
pub use enums::{
    AgentMode, Backend, CocoonHibernationPhase, CocoonSetPhase, ConnType, HibernatePolicy, HibernationDesire,
    OSType, SnapshotPolicy, ToolboxMode,
};
pub use hibernation::{CocoonHibernation, CocoonHibernationSpec, CocoonHibernationStatus, PodReference};
pub use quantity::{Format, Quantity, QuantityError};
pub use schema::{cocoon_hibernation_crd, cocoon_set_crd};

/// API group of both kinds.
pub const GROUP: &str = "cocoonset.cocoonstack.io";
/// Version of both kinds.
pub const VERSION: &str = "v1";
