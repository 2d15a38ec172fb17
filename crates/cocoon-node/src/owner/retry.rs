//! When a failed attempt may be tried again: a growing delay, and a budget of engine calls.
//!
//! Entry points: [`Retry::failed`] (the delay) and [`Retry::affordable`] (the budget). Invariant: a failing pod
//! costs at most [`CALLS`] engine calls a minute. What brings a paused guest back is not held up, unless the
//! engine refused just that; who pauses one reserves the calls for it first (`known::engine_needs`).

use std::{collections::VecDeque, time::Duration};

use cocoon_kit::{backoff::Backoff, world::World};
use tokio::time::Instant;

/// Engine calls a minute of a failing pod.
pub(super) const CALLS: usize = 5;
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
    failing: bool,
    /// When something that was missing came last.
    came: Option<Instant>,
}

impl Retry {
    pub(super) const fn new() -> Self {
        let backoff = Backoff::new(ORDINARY.0, ORDINARY.1);
        Self { backoff, due: None, calls: VecDeque::new(), failing: false, came: None }
    }

    /// An engine call was made.
    pub(super) fn called(&mut self, calls: usize, now: Instant) {
        self.calls.extend(std::iter::repeat_n(now, calls));
        while self.calls.len() > CALLS * 4 {
            self.calls.pop_front();
        }
    }

    /// The wish changed, or the goal was reached: start over. Calls that were made still count for who fails
    /// again within the minute.
    pub(super) fn reset(&mut self, deleting: bool) {
        let (first, ceiling) = if deleting { DELETE } else { ORDINARY };
        self.backoff = Backoff::new(first, ceiling);
        (self.due, self.failing) = (None, false);
    }

    /// What was missing came: start over. Once a minute, that is; what comes and goes makes the next attempt due, but
    /// its calls stay within the budget.
    pub(super) fn came(&mut self, now: Instant) {
        let again = self.came.is_some_and(|before| now.duration_since(before) < WINDOW);
        if !again {
            self.came = Some(now);
        }
        self.reset(false);
        self.failing = again;
    }

    /// An attempt failed: the next is due later.
    pub(super) fn failed(&mut self, world: &dyn World) -> Instant {
        let due = world.instant() + self.backoff.next(world);
        (self.due, self.failing) = (Some(due), true);
        due
    }

    /// When the budget allows so many calls; `None`: now. Who does not fail has no budget.
    pub(super) fn affordable(&self, calls: usize, now: Instant) -> Option<Instant> {
        if !self.failing || calls == 0 {
            return None;
        }
        let spare = CALLS.saturating_sub(calls);
        let recent: Vec<Instant> =
            self.calls.iter().copied().filter(|call| now.duration_since(*call) < WINDOW).collect();
        recent.len().checked_sub(spare + 1).map(|in_the_way| recent[in_the_way] + WINDOW)
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
        for calls in (1..=5).cycle().take(60) {
            if let Some(at) = retry.affordable(calls, RealWorld.instant()) {
                tokio::time::sleep_until(at).await;
            }
            let now = RealWorld.instant();
            retry.called(calls, now);
            made.extend(std::iter::repeat_n(now, calls));
            retry.failed(&RealWorld);
        }
        for start in &made {
            let within = made.iter().filter(|call| **call >= *start && **call - *start < WINDOW).count();
            assert!(within <= CALLS, "{within} calls in a minute");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_makes_the_next_attempt_due_at_once_and_its_delays_short_again() {
        let mut retry = Retry::new();
        retry.called(50, RealWorld.instant());
        for _ in 0..5 {
            retry.failed(&RealWorld);
        }
        assert!(retry.pending(RealWorld.instant()).is_some());
        assert!(retry.affordable(1, RealWorld.instant()).is_some());
        retry.reset(false);
        assert!(retry.pending(RealWorld.instant()).is_none());
        assert!(retry.affordable(1, RealWorld.instant()).is_none());
        let due = retry.failed(&RealWorld);
        assert!(due <= RealWorld.instant() + ORDINARY.0);
    }
}
