//! The world as a value: wall clock, monotonic clock, ids, randomness.
//!
//! Code that decides takes a [`World`] (or a time) as an argument; only [`RealWorld`] looks at the
//! machine. Invariant: wall and monotonic time are never mixed.

use std::fmt;

use jiff::Timestamp;
use rand::Rng as _;

/// Clock, ids and randomness of the machine, or of a test.
pub trait World: Send + Sync + fmt::Debug {
    /// Wall clock, for stamps that people and other programs read.
    fn now(&self) -> Timestamp;
    /// Monotonic clock, for durations and deadlines. Follows tokio's clock, so tests can pause it.
    fn instant(&self) -> tokio::time::Instant;
    /// Fills `out` with random bytes fit for keys.
    fn random(&self, out: &mut [u8]);

    /// A new random UUID (version 4) in its usual form.
    fn uuid(&self) -> String {
        let mut bytes = [0; 16];
        self.random(&mut bytes);
        uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
    }

    /// A new engine id: 128 random bits as 26 upper-case base32 characters (engine-cli §0).
    fn engine_id(&self) -> String {
        let mut bytes = [0; 16];
        self.random(&mut bytes);
        data_encoding::BASE32_NOPAD.encode(&bytes)
    }

    /// A number in `0..1`, for jitter.
    fn fraction(&self) -> f64 {
        let mut bytes = [0; 4];
        self.random(&mut bytes);
        f64::from(u32::from_le_bytes(bytes)) / (f64::from(u32::MAX) + 1.0)
    }
}

/// The machine's own clocks and random source.
#[derive(Debug, Default, Clone, Copy)]
pub struct RealWorld;

impl World for RealWorld {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    fn instant(&self) -> tokio::time::Instant {
        tokio::time::Instant::now()
    }

    fn random(&self, out: &mut [u8]) {
        rand::rng().fill_bytes(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_ids_are_26_upper_case_base32_characters_and_differ() {
        let (a, b) = (RealWorld.engine_id(), RealWorld.engine_id());
        assert_ne!(a, b);
        for id in [a, b] {
            assert_eq!(id.len(), 26);
            assert!(id.chars().all(|c| c.is_ascii_uppercase() || ('2'..='7').contains(&c)), "{id}");
        }
    }

    #[test]
    fn fractions_stay_below_one() {
        assert!((0..1000).all(|_| (0.0..1.0).contains(&RealWorld.fraction())));
    }
}
