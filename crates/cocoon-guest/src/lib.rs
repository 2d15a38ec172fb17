//! The wire protocol to the guest (library) and the agent in the guest (binary `cocoon-guest-agent`).
//!
//! - [`protocol`]: frames of `engine-cli` §8 plus our `identity` extension; pure;
//! - [`host`]: the host's side of one guest port: preamble with epoch, `yamux`, sessions.
//!
//! Everything that comes from a guest is hostile: frames are at most 8 MiB, sessions at most 256, a
//! session buffers at most 1 MiB and then pushes back.

pub mod host;
pub mod protocol;
