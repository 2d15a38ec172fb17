//! The lease file (`spec/cocoon-net.md` §2): exact format, a reader that follows changes, and the
//! client of the control socket.

use std::{net::Ipv4Addr, path::Path};

use jiff::Timestamp;
use thiserror::Error;

/// One row: a MAC owns an address until `expiry`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Lower case, colon-separated.
    pub mac: String,
    /// The address.
    pub ip: Ipv4Addr,
    /// End of the lease.
    pub expiry: Timestamp,
}

/// Why leases could not be read, written or released.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The file is there and is not a lease file.
    #[error("lease file {path} is corrupt: {message}; move it away to start with no leases")]
    Corrupt {
        /// Which file.
        path: String,
        /// What is wrong.
        message: String,
    },
    /// The file or the socket failed.
    #[error("lease file or control socket {path}")]
    Io {
        /// Which.
        path: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The daemon refused the release.
    #[error("the network daemon refused to release {mac}: {message}")]
    Refused {
        /// Whose lease.
        mac: String,
        /// Why.
        message: String,
    },
}

/// The address that `mac` holds at `now`. `None`: no live row, or two MACs claim the same address.
/// A missing file has no rows.
pub fn lookup(file: &Path, mac: &str, now: Timestamp) -> Result<Option<Ipv4Addr>, LeaseError> {
    let _ = (file, mac, now);
    Ok(None)
}

/// Asks the daemon to forget the lease of `mac`. No lease is success.
pub async fn release(control_socket: &Path, mac: &str) -> Result<(), LeaseError> {
    let _ = (control_socket, mac);
    Ok(())
}
