//! Node agent: a virtual kubelet that turns pods into VMs (ARCHITECTURE.md, "The way of a pod").
//!
//! - [`config`]: what an agent is told at its start;
//! - [`ports`]: what it needs from the world, as narrow traits, with adapters;
//! - [`reason`]: the stable words for everything that goes wrong;
//! - [`record`]: the durable owner record, one a VM name;
//! - [`planner`]: the lifecycle as a pure function, observation → one step;
//! - `wish`, `sizes`: from a pod to what it asks for (pure);
//! - `oddities`: annotations that mean nothing (pure);
//! - `view`, `status`: from an observation to what the pod shows (pure);
//! - `owner`: one task a VM name, the only place that acts on that VM;
//! - `pods`: list, watch, table, and the way to the owners;
//! - `cluster`, `outbox`, `events`: what goes back to Kubernetes;
//! - `node`: the node object and its lease;
//! - [`kubelet`]: the port for logs and exec;
//! - [`agent`]: [`Node`], all of it together.
//!
//! Invariants are those of design §4; where one is kept, its name (I1 … I9) is in a comment.

pub mod agent;
mod arrivals;
pub(crate) mod cluster;
pub mod config;
pub(crate) mod events;
pub mod kubelet;
mod leases;
pub(crate) mod node;
pub(crate) mod oddities;
pub(crate) mod outbox;
#[cfg(test)]
mod outbox_tests;
pub(crate) mod owner;
pub mod planner;
pub(crate) mod pods;
pub mod ports;
pub mod reason;
pub mod record;
mod rounds;
pub(crate) mod sizes;
pub(crate) mod status;
pub(crate) mod view;
pub(crate) mod wish;
#[cfg(test)]
mod wish_tests;

pub use agent::{Node, NodeError};
pub use config::NodeConfig;
