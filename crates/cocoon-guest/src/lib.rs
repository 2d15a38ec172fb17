//! The wire protocol to the guest (library) and the agent in the guest (binary `cocoon-guest-agent`).
//!
//! - [`protocol`]: frames of `engine-cli` §8 plus our `identity` extension; pure;
//! - [`preamble`]: the 32 bytes that start a connection on a byte pipe that has no beginning; pure;
//! - [`host`]: the host's side of one guest port: preamble with epoch, `yamux`, sessions;
//! - [`agent`]: the guest's side: sessions, ports, and the work of PID 1.
//!
//! Everything that comes from a guest is hostile: frames are at most 8 MiB, sessions at most 256. On the host
//! a session holds at most 1 MiB (its `yamux` window, a frame of up to 64 KiB, and 512 KiB of output that
//! waits for its reader) and then pushes back; of larger frames two at a time are read on one channel. In the
//! guest, where the host is trusted, each session may hold a frame of 8 MiB, and 256 KiB that wait for the port.

pub mod agent;
pub mod host;
pub mod preamble;
pub mod protocol;
mod sys;

/// Most sessions on one channel at a time.
pub const MAX_SESSIONS: usize = 256;
/// Most frames above 64 KiB that a host reads on one channel at a time.
pub(crate) const MAX_LARGE_FRAMES: usize = 2;

/// `yamux` limits of both ends. Windows stay at their 256 KiB: the connection's limit is exactly what the
/// streams need at the least, so nothing is left to grow into.
pub(crate) fn yamux_config() -> yamux::Config {
    // Twice the sessions: a finished stream counts until the peer's close has arrived.
    const STREAMS: usize = 2 * MAX_SESSIONS;
    let mut config = yamux::Config::default();
    config.set_max_connection_receive_window(Some(STREAMS * (256 << 10)));
    config.set_max_num_streams(STREAMS);
    config
}
