//! The 32 bytes that start a connection on a virtio-serial port, pure.
//!
//! A port is a byte pipe that never begins or ends: what an older connection left in it, half frames
//! included, comes out first. So the host sends a preamble with a random *epoch*; the agent drops
//! everything before it, ends what belonged to an older epoch, and echoes it; the host drops everything
//! before the echo of its own epoch. After that both sides speak `yamux`. Whatever preamble arrives later
//! ends the connection: a new host's at the agent, and at the host that of an agent that has started anew
//! (with an epoch of zeros, sent once).
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
    /// What an agent says when it opens a port: older connections are over.
    pub const AGENT_STARTS: Self = Self { role: Role::Agent, epoch: [0; 16] };

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

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*, sample};

    use super::*;

    fn preamble(role: Role, epoch: Epoch) -> Preamble {
        Preamble { role, epoch }
    }

    /// All preambles in pieces of the given sizes, each with the offset behind it.
    fn all(stream: &[u8], sizes: &[usize]) -> Vec<(usize, Preamble)> {
        let (mut matcher, mut found) = (Matcher::default(), Vec::new());
        let (mut from, mut sizes) = (0, sizes.iter().cycle());
        while from < stream.len() {
            let end = stream.len().min(from + sizes.next().unwrap());
            while from < end {
                let (used, hit) = matcher.find(&stream[from..end]);
                from += used;
                found.extend(hit.map(|preamble| (from, preamble)));
            }
        }
        found
    }

    /// The same by looking at every place.
    fn naive(stream: &[u8]) -> Vec<(usize, Preamble)> {
        let (mut at, mut found) = (0, Vec::new());
        while at + PREAMBLE_LEN <= stream.len() {
            let window: &[u8; PREAMBLE_LEN] = stream[at..at + PREAMBLE_LEN].try_into().unwrap();
            match Preamble::decode(window) {
                Some(preamble) => {
                    at += PREAMBLE_LEN;
                    found.push((at, preamble));
                }
                None => at += 1,
            }
        }
        found
    }

    #[test]
    fn one_flipped_bit_makes_it_no_preamble() {
        let sound = preamble(Role::Host, [7; 16]).encode();
        for bit in 0..PREAMBLE_LEN * 8 {
            let mut spoiled = sound;
            spoiled[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Preamble::decode(&spoiled), None, "bit {bit}");
        }
    }

    #[test]
    fn the_magic_can_occur_in_no_frame() {
        assert!(String::from_utf8(MAGIC.to_vec()).is_err());
        let json = crate::protocol::encode(&crate::protocol::Frame::data(
            crate::protocol::Kind::Stdin,
            preamble(Role::Host, [1; 16]).encode().to_vec(),
        ));
        assert!(json.is_ok_and(|line| !line.contains(&MAGIC[0])));
    }

    /// Noise made of what confuses a search: pieces of preambles, whole ones, bytes that begin one.
    fn noise() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            collection::vec(any::<u8>(), 0..40),
            collection::vec(Just(MAGIC[0]), 0..9),
            (any::<Epoch>(), any::<bool>(), 0..=PREAMBLE_LEN).prop_map(|(epoch, host, cut)| {
                preamble(if host { Role::Host } else { Role::Agent }, epoch).encode()[..cut].to_vec()
            }),
            // Magic inside an epoch.
            sample::select(vec![0_usize, 1, 4, 8]).prop_map(|at| {
                let mut epoch = [0xfe; 16];
                epoch[at..at + 8].copy_from_slice(&MAGIC);
                preamble(Role::Host, epoch).encode().to_vec()
            }),
        ];
        collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn a_preamble_reads_back(epoch in any::<Epoch>(), host in any::<bool>()) {
            let preamble = preamble(if host { Role::Host } else { Role::Agent }, epoch);
            prop_assert_eq!(Preamble::decode(&preamble.encode()), Some(preamble));
        }

        #[test]
        fn the_search_finds_what_looking_everywhere_finds(
            stream in noise(),
            sizes in collection::vec(1_usize..70, 1..10),
        ) {
            prop_assert_eq!(all(&stream, &sizes), naive(&stream));
        }
    }
}
