//! Work that is done again and again until the agent ends.
//!
//! Entry point: [`next_round`], the condition or the end of such a loop.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// Waits for the next round; false: there is none, the agent ends. Who is ending hears it at once.
pub(crate) async fn next_round(after: Duration, shutdown: &CancellationToken) -> bool {
    tokio::select! {
        biased;
        () = shutdown.cancelled() => false,
        () = tokio::time::sleep(after) => true,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_round_follows_after_the_pause_and_none_once_the_agent_ends() {
        let (shutdown, begun) = (CancellationToken::new(), Instant::now());
        assert!(next_round(Duration::from_secs(5), &shutdown).await);
        assert_eq!(begun.elapsed(), Duration::from_secs(5));
        let (waiting, ended) =
            (next_round(Duration::from_secs(3600), &shutdown), async { shutdown.cancel() });
        assert!(!tokio::join!(waiting, ended).0);
        assert!(!next_round(Duration::ZERO, &shutdown).await, "however short the pause");
        assert_eq!(begun.elapsed(), Duration::from_secs(5), "nobody waits out the pause");
    }
}
