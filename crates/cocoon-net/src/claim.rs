//! Whose a network is: one daemon serves a bridge, and other state folders keep their hands off it.
//!
//! Entry points: [`Claim::take`] (a daemon, or who takes the network down), [`is_strangers`] (who makes or removes
//! taps). A data folder that was copied knows the same VM ids and the same bridge as the original, so by names alone
//! it would take the original's taps for its own. Invariants: a claim goes with its process; the mark in the host table
//! says whose state folder made it, and only root writes there.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::MetadataExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

use crate::{
    config::NetworkConfig,
    nft::{self, NftError},
    rules,
};

/// Stands before the mark in the comment of the host table.
const OF: &str = ", of ";

/// A bridge that nobody else serves meanwhile.
#[derive(Debug)]
pub(crate) struct Claim {
    _socket: UnixDatagram,
}

impl Claim {
    /// `None`: another daemon has it. Names of abstract sockets belong to a network namespace, as bridges do.
    pub(crate) fn take(network: &NetworkConfig) -> io::Result<Option<Self>> {
        let address = SocketAddr::from_abstract_name(name(&network.bridge))?;
        match UnixDatagram::bind_addr(&address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            socket => Ok(Some(Self { _socket: socket? })),
        }
    }
}

/// What the host table says of the network's state folder. A folder that is moved keeps it, a copy has another.
pub(crate) fn mark(network: &NetworkConfig) -> String {
    match std::fs::metadata(&network.state_dir) {
        Ok(folder) => format!("{OF}{}:{}", folder.dev(), folder.ino()),
        Err(_) => format!("{OF}nobody"),
    }
}

/// Whether a living daemon serves this bridge from another state folder. One of a release without marks is ours.
pub(crate) async fn is_strangers(network: &NetworkConfig) -> Result<bool, NftError> {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/unix");
    let sockets =
        sockets.map_err(|error| NftError::Refused(format!("looking for the bridge's daemon: {error}")))?;
    if !is_claimed(&sockets, &network.bridge) {
        return Ok(false);
    }
    let [host, _] = rules::list_tables(&network.bridge);
    match nft::list(&host).await {
        Err(NftError::NotThere(_)) => Ok(false),
        listing => Ok(is_marked_by_another(&listing?, &mark(network))),
    }
}

fn is_claimed(sockets: &str, bridge: &str) -> bool {
    let name = format!(" @{}", name(bridge));
    sockets.lines().any(|line| line.ends_with(&name))
}

fn is_marked_by_another(listing: &str, mark: &str) -> bool {
    let comment = listing.lines().find_map(|line| line.trim().strip_prefix("comment \"")?.strip_suffix('"'));
    comment.and_then(|comment| comment.find(OF).and_then(|at| comment.get(at..))).is_some_and(|of| of != mark)
}

fn name(bridge: &str) -> String {
    format!("cocoon-net/{bridge}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_is_claimed_by_its_own_name_alone() {
        let sockets = "Num  RefCount Protocol Flags Type St Inode Path\n\
                       0000: 00000002 00000000 00000000 0002 01 77 @cocoon-net/cocoon0\n\
                       0000: 00000002 00000000 00010000 0001 01 78 /run/a socket\n";
        assert!(is_claimed(sockets, "cocoon0"));
        assert!(
            !is_claimed(sockets, "cocoon") && !is_claimed(sockets, "ocoon0") && !is_claimed("", "cocoon0")
        );
    }

    #[test]
    fn only_another_folders_mark_makes_a_network_a_strangers() {
        let listing =
            |note: &str| format!("table inet cocoon_c0 {{\n\tcomment \"{note}\"\n\n\tchain guard {{\n");
        for (note, another) in [
            ("cocoon, ip_forward was 0, of 1:2", false),
            ("cocoon, ip_forward was 0, of 1:23", true),
            ("cocoon, ip_forward was 0, of nobody", true),
            ("cocoon, ip_forward was 0", false),
            ("", false),
        ] {
            assert_eq!(is_marked_by_another(&listing(note), ", of 1:2"), another, "{note}");
        }
        assert!(!is_marked_by_another("", ", of 1:2"));
    }
}
