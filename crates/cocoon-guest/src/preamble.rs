//! The 32 bytes that start a connection on a virtio-serial port, pure.
//!
//! A port is a byte pipe that never begins or ends: what an older connection left in it, half frames
//! included, comes out first. So the host sends a preamble with a random *epoch*; the agent drops
//! everything before it, ends what belonged to an older epoch, and echoes it; the host drops everything
//! before the echo of its own epoch. After that both sides speak `yamux`.
//!
//! ```text
//!  0  magic    fe 43 4f 43 4f 4f 4e c1   (fe and c1 never occur in UTF-8, so never inside a frame)
//!  8  version  1
//!  9  role     1 = host, 2 = agent's echo
//! 10  reserved 0 0
//! 12  epoch    16 random bytes
//! 28  check    FNV-1a (32 bit, big endian) of bytes 0..28
//! ```
//!
//! A change that an old peer cannot live with gets a new version; a peer skips versions it does not know.

/// Length of a preamble.
pub const PREAMBLE_LEN: usize = 32;
/// First bytes of a preamble.
pub const MAGIC: [u8; 8] = [0xfe, b'C', b'O', b'C', b'O', b'O', b'N', 0xc1];
const VERSION: u8 = 1;

/// Who sent a preamble.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The host opens a connection.
    Host,
    /// The agent agrees.
    Agent,
}

/// A connection's random name.
pub type Epoch = [u8; 16];

/// One preamble.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preamble {
    /// Sender.
    pub role: Role,
    /// The connection's name.
    pub epoch: Epoch,
}

impl Preamble {
    /// The bytes on the wire.
    #[must_use]
    pub fn encode(&self) -> [u8; PREAMBLE_LEN] {
        let mut out = [0; PREAMBLE_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8] = VERSION;
        out[9] = match self.role {
            Role::Host => 1,
            Role::Agent => 2,
        };
        out[12..28].copy_from_slice(&self.epoch);
        let check = fnv1a(&out[..28]);
        out[28..].copy_from_slice(&check.to_be_bytes());
        out
    }

    /// Reads exactly one preamble.
    #[must_use]
    pub fn decode(bytes: &[u8; PREAMBLE_LEN]) -> Option<Self> {
        let role = match bytes[9] {
            1 => Role::Host,
            2 => Role::Agent,
            _ => return None,
        };
        let sound = bytes[..8] == MAGIC
            && bytes[8] == VERSION
            && bytes[10..12] == [0, 0]
            && bytes[28..] == fnv1a(&bytes[..28]).to_be_bytes();
        let mut epoch = [0; 16];
        epoch.copy_from_slice(&bytes[12..28]);
        sound.then_some(Self { role, epoch })
    }
}

fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &b| (hash ^ u32::from(b)).wrapping_mul(0x0100_0193))
}

/// Finds preambles in a stream that arrives in pieces of any size.
#[derive(Debug, Clone, Default)]
pub struct Matcher {
    held: [u8; PREAMBLE_LEN],
    len: usize,
}

impl Matcher {
    /// Looks at `input` up to the end of the first preamble; returns it and the bytes used up.
    pub fn find(&mut self, input: &[u8]) -> (usize, Option<Preamble>) {
        let mut at = 0;
        while at < input.len() {
            if self.len == 0 {
                // Nothing begun: jump to where something may begin.
                match input[at..].iter().position(|&b| b == MAGIC[0]) {
                    Some(skip) => at += skip,
                    None => return (input.len(), None),
                }
            }
            let found = self.push(input[at]);
            at += 1;
            if found.is_some() {
                return (at, found);
            }
        }
        (at, None)
    }

    /// Whether a preamble may have begun.
    #[must_use]
    pub fn pending(&self) -> bool {
        self.len > 0
    }

    fn push(&mut self, byte: u8) -> Option<Preamble> {
        self.held[self.len] = byte;
        self.len += 1;
        if self.len == PREAMBLE_LEN {
            if let Some(found) = Preamble::decode(&self.held) {
                self.len = 0;
                return Some(found);
            }
            self.restart();
        }
        while !self.viable() {
            self.restart();
        }
        None
    }

    /// Whether the held bytes may still become a preamble.
    fn viable(&self) -> bool {
        let n = self.len.min(MAGIC.len());
        self.held[..n] == MAGIC[..n]
    }

    /// Drops the first held byte and all up to the next possible beginning.
    fn restart(&mut self) {
        let next = self.held[1..self.len].iter().position(|&b| b == MAGIC[0]).map_or(self.len, |at| at + 1);
        self.held.copy_within(next..self.len, 0);
        self.len -= next;
    }
}
