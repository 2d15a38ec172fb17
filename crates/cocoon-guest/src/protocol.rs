//! Frames between host and guest agent: newline-delimited JSON (`engine-cli` §8), pure.

use serde::{Deserialize, Serialize};

/// Longest frame in bytes, newline excluded, in both directions.
pub const MAX_FRAME: usize = 8 << 20;
/// Size of the chunks in which a client sends stdin.
pub const STDIN_CHUNK: usize = 32 << 10;

/// What a clone must become before its link goes up (our extension, design §5 "The guest channel").
/// Empty fields are left alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// MAC addresses by NIC index (`aa:bb:cc:dd:ee:ff`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub macs: Vec<String>,
    /// Host name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hostname: String,
    /// 32 lower-case hex digits for `/etc/machine-id`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub machine_id: String,
    /// Wall clock in nanoseconds since 1970; 0 leaves the clock alone.
    #[serde(default)]
    pub unix_time_ns: i64,
    /// Fresh entropy, base64; at most 512 bytes are used.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub entropy: String,
    /// Ask for a new DHCP lease once the link is up.
    #[serde(default)]
    pub renew_dhcp: bool,
}
