//! Bridge, taps, filters, DHCP server, leases (`spec/cocoon-net.md`; ARCHITECTURE.md, "The bridge").
//!
//! - [`config`]: what a host network looks like;
//! - [`bridge`]: makes, repairs and removes bridge, NAT, filters and sysctls; remembers what it changed;
//! - [`links`]: a tap for each NIC of a VM, with its filter rows;
//! - [`dhcp`]: the server as a pure state machine;
//! - [`leases`]: the lease file, its reader and the call that releases a lease;
//! - [`control`]: the control socket;
//! - [`daemon`]: `cocoon net daemon`, the process that outlives the agent.
//!
//! Invariants: only interfaces with an alias `cocoon:<vm id>` are ever removed; a lease row is durable
//! before its ACK; a corrupt lease file stops the server; nothing touches another network namespace than
//! that of the calling thread.

mod alarm;
pub mod bridge;
mod claim;
mod coexist;
pub mod config;
pub mod control;
pub mod daemon;
pub mod dhcp;
pub mod leases;
pub mod links;
pub mod names;
mod netlink;
mod nft;
mod rules;
mod sys;
mod sysctl;

#[cfg(test)]
#[path = "../tests/support/fixture.rs"]
mod testing;
