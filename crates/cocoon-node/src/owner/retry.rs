//! When a failed attempt may be tried again: a growing delay, and a budget of engine calls.
//!
//! Entry point: [`Retry`]. Invariant: a failing pod costs at most [`CALLS`] engine calls a minute.

use std::{collections::VecDeque, time::Duration};

use cocoon_kit::{backoff::Backoff, world::World};
use tokio::time::Instant;

/// Engine calls a minute of a failing pod.
pub(super) const CALLS: usize = 5;
/// What the next attempt costs at least.
const ATTEMPT: usize = 2;
const WINDOW: Duration = Duration::from_secs(60);

/// First and longest delay of an ordinary attempt.
const ORDINARY: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));
/// The same for a delete, which people wait for.
const DELETE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));

/// The delay and the budget of one owner.
#[derive(Debug)]
pub(super) struct Retry {
    backoff: Backoff,
    due: Option<Instant>,
    calls: VecDeque<Instant>,
}

impl Retry {
    pub(super) const fn new() -> Self {
        Self { backoff: Backoff::new(ORDINARY.0, ORDINARY.1), due: None, calls: VecDeque::new() }
    }

    /// An engine call was made.
    pub(super) fn called(&mut self, calls: usize, now: Instant) {
        self.calls.extend(std::iter::repeat_n(now, calls));
        while self.calls.len() > CALLS * 4 {
            self.calls.pop_front();
        }
    }

    /// The wish changed, or the goal was reached: start over.
    pub(super) fn reset(&mut self, deleting: bool) {
        let (first, ceiling) = if deleting { DELETE } else { ORDINARY };
        self.backoff = Backoff::new(first, ceiling);
        self.due = None;
        self.calls.clear();
    }

    /// An attempt failed: the next is due later.
    pub(super) fn failed(&mut self, world: &dyn World) -> Instant {
        let now = world.instant();
        let due = (now + self.backoff.next(world)).max(self.affordable(now));
        self.due = Some(due);
        due
    }

    /// When the budget allows the next attempt.
    fn affordable(&self, now: Instant) -> Instant {
        let recent: Vec<Instant> =
            self.calls.iter().copied().filter(|call| now.duration_since(*call) < WINDOW).collect();
        let spare = CALLS - ATTEMPT;
        match recent.len().checked_sub(spare + 1) {
            None => now,
            Some(oldest_in_the_way) => recent[oldest_in_the_way] + WINDOW,
        }
    }

    /// When the next attempt is due; `None` when nothing failed or it is due already.
    pub(super) fn pending(&mut self, now: Instant) -> Option<Instant> {
        self.due = self.due.filter(|due| *due > now);
        self.due
    }
}

#[cfg(test)]
mod tests {
    use cocoon_kit::world::RealWorld;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failing_pod_never_costs_more_engine_calls_a_minute_than_the_budget() {
        let mut retry = Retry::new();
        let mut made: Vec<Instant> = Vec::new();
        for _ in 0..30 {
            let now = RealWorld.instant();
            retry.called(ATTEMPT, now);
            made.extend([now; ATTEMPT]);
            let due = retry.failed(&RealWorld);
            tokio::time::sleep_until(due).await;
        }
        for start in &made {
            let within = made.iter().filter(|call| **call >= *start && **call - *start < WINDOW).count();
            assert!(within <= CALLS, "{within} calls in a minute");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_makes_the_next_attempt_due_at_once() {
        let mut retry = Retry::new();
        retry.called(50, RealWorld.instant());
        retry.failed(&RealWorld);
        assert!(retry.pending(RealWorld.instant()).is_some());
        retry.reset(true);
        assert!(retry.pending(RealWorld.instant()).is_none());
    }
}
