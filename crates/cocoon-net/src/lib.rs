//! Bridge, taps, filters, DHCP server, leases (`spec/cocoon-net.md`; ARCHITECTURE.md, "The bridge").
//!
//! - [`config`]: what a host network looks like;
//! - `bridge`: makes and removes bridge, NAT, filters and sysctls; remembers what it changed;
//! - [`links`]: a tap for each NIC of a VM, with its filter rows;
//! - `dhcp`: the server (pure allocation + a socket loop);
//! - [`leases`]: the lease file, its reader and the control socket that releases a lease;
//! - `daemon`: `cocoon net daemon`, the process that outlives the agent.
//!
//! Invariants: only interfaces with an alias `cocoon:<vm id>` are ever removed; a lease row is durable
//! before its ACK; a corrupt lease file stops the server.

pub mod config;
pub mod leases;
pub mod links;
