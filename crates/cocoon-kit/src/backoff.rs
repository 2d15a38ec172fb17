//! Growing delays with jitter and a ceiling.
//!
//! Entry point: [`Backoff::next`]. Invariants: a delay is never longer than the ceiling, and
//! [`Backoff::reset`] brings the first delay back.

use std::time::Duration;

use crate::world::World;

/// Delays that double from `first` up to `ceiling`, each shortened by up to a quarter at random.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    ceiling: Duration,
    tries: u32,
}

impl Backoff {
    /// A series that starts at `first` and never passes `ceiling`.
    #[must_use]
    pub const fn new(first: Duration, ceiling: Duration) -> Self {
        Self { first, ceiling, tries: 0 }
    }

    /// The delay before the next try; each call doubles the one after it.
    pub fn next(&mut self, world: &dyn World) -> Duration {
        let full = self.first.saturating_mul(1 << self.tries.min(30)).min(self.ceiling);
        self.tries = self.tries.saturating_add(1);
        full.mul_f64(1.0 - world.fraction() / 4.0)
    }

    /// How many delays were handed out since the last reset.
    #[must_use]
    pub const fn tries(&self) -> u32 {
        self.tries
    }

    /// Starts over: call it when something succeeded or the wish changed.
    pub const fn reset(&mut self) {
        self.tries = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::RealWorld;

    #[test]
    fn delays_grow_to_the_ceiling_and_start_over_after_a_reset() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));
        let delays: Vec<_> = (0..40).map(|_| backoff.next(&RealWorld)).collect();
        assert!(delays[0] <= Duration::from_millis(100) && delays[0] >= Duration::from_millis(75));
        assert!(delays[39] <= Duration::from_secs(1) && delays[39] >= Duration::from_millis(750));
        backoff.reset();
        assert!(backoff.next(&RealWorld) <= Duration::from_millis(100));
    }
}
