//! Work that blocks and may last only so long, because a guest stands still meanwhile.
//!
//! Entry points: [`limited`], [`Stop`]. Invariants: past its limit, or when nobody waits for it any more,
//! the work ends at its next piece; what it owns, partial files too, goes with it and not before.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use thiserror::Error;

use crate::error::Fault;

/// What a step may take, however little there is to do. Memory, disk and writing out follow each other, so
/// three of them stay below the 120 s that a guest may stand still for a hibernation.
const FLOOR: Duration = Duration::from_secs(30);
/// Bytes that a step must get done each second.
const PACE: u64 = 32 << 20;
/// How many times longer a step may take that no guest waits for: it only holds the VM's lock.
const UNFROZEN: u32 = 10;

/// How long a step over `bytes` may take.
pub(crate) const fn limit(bytes: u64, frozen: bool) -> Duration {
    let limit = FLOOR.saturating_add(Duration::from_secs(bytes / PACE));
    if frozen { limit } else { limit.saturating_mul(UNFROZEN) }
}

/// Tells work that blocks to end: because it was asked to, or because its time is over.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop {
    asked: Arc<AtomicBool>,
    deadline: Option<Instant>,
}

impl Stop {
    /// Ends the work after `limit`.
    pub(crate) fn after(limit: Duration) -> Self {
        Self { deadline: Instant::now().checked_add(limit), ..Self::default() }
    }

    /// To be called between two pieces of the work: an error once it has to end.
    pub(crate) fn check(&self) -> io::Result<()> {
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if late || self.asked.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it was told to end"));
        }
        Ok(())
    }
}

/// Asks when it is dropped, so also when the operation that waits is.
struct AsksAtTheEnd(Stop);

impl Drop for AsksAtTheEnd {
    fn drop(&mut self) {
        self.0.asked.store(true, Ordering::Relaxed);
    }
}

/// The step took too long.
#[derive(Debug, Error)]
#[error(
    "it was not done within {seconds} s, which is as long as a capture waits for it; the guest is not held \
     for it any longer and nothing of the snapshot is kept; take other work off the disk, or move --root-dir \
     to a faster one, then take the snapshot again"
)]
struct Late {
    seconds: u64,
}

/// Runs blocking `work` away from the runtime's threads, for at most `limit`; `step` names it in the error.
/// Past the limit the error comes at once: the work itself ends, with all it owns, at its next piece.
pub(crate) async fn limited<T, F>(step: &str, limit: Duration, work: F) -> Result<T, Fault>
where
    T: Send + 'static,
    F: FnOnce(&Stop) -> io::Result<T> + Send + 'static,
{
    let stop = Stop::after(limit);
    let _asks = AsksAtTheEnd(stop.clone());
    let late = || Fault::new(step, Late { seconds: limit.as_secs() });
    let deadline = stop.deadline;
    let working = tokio::task::spawn_blocking(move || work(&stop));
    match tokio::time::timeout(limit, working).await {
        Ok(Ok(Ok(done))) => Ok(done),
        // The work may see the end of its time a moment before this task does.
        Ok(Ok(Err(_))) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => Err(late()),
        Ok(Ok(Err(error))) => Err(Fault::new(step, error)),
        Ok(Err(panicked)) => Err(Fault::new(step, panicked)),
        Err(_) => Err(late()),
    }
}

#[cfg(test)]
mod tests {
    use std::{error::Error as _, sync::atomic::AtomicU64};

    use super::*;

    /// Work in pieces that never ends by itself, on a folder that goes with it.
    fn endless(folder: tempfile::TempDir, pieces: Arc<AtomicU64>) -> impl FnOnce(&Stop) -> io::Result<()> {
        move |stop| {
            loop {
                let piece = pieces.fetch_add(1, Ordering::Relaxed);
                std::fs::write(folder.path().join(piece.to_string()), "x")?;
                std::thread::sleep(Duration::from_millis(5));
                stop.check()?;
            }
        }
    }

    /// Ends a test that hangs; nothing waits for it otherwise.
    const HANGS: Duration = Duration::from_secs(120);

    async fn ended(path: &std::path::Path, pieces: &AtomicU64) {
        let gone = async {
            while path.exists() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(HANGS, gone).await.expect("partial files are left");
        let done = pieces.load(Ordering::Relaxed);
        assert!(done > 0);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(pieces.load(Ordering::Relaxed), done, "it goes on");
    }

    #[tokio::test]
    async fn work_past_its_limit_fails_with_step_seconds_and_way_out_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (path, pieces) = (folder.path().to_owned(), Arc::new(AtomicU64::new(0)));
        let work = endless(folder, Arc::clone(&pieces));
        let limited = limited("copying memory of VM a", Duration::from_millis(1100), work);
        let error = tokio::time::timeout(HANGS, limited).await.expect("it has a limit").unwrap_err();
        let said = format!("{error}: {}", error.source().unwrap());
        for part in ["copying memory of VM a", "within 1 s", "--root-dir"] {
            assert!(said.contains(part), "{said}");
        }
        ended(&path, &pieces).await;
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_any_more_ends() {
        let folder = tempfile::tempdir().unwrap();
        let (path, pieces) = (folder.path().to_owned(), Arc::new(AtomicU64::new(0)));
        let waiting = limited("copying", Duration::from_secs(3600), endless(folder, Arc::clone(&pieces)));
        let begun = async {
            while pieces.load(Ordering::Relaxed) < 3 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            done = waiting => panic!("{done:?}"),
            () = begun => {}
        }
        ended(&path, &pieces).await;
    }

    #[tokio::test]
    async fn work_within_its_limit_answers_and_its_own_failure_is_not_called_late() {
        assert_eq!(limited("a", FLOOR, |stop| stop.check().map(|()| 7)).await.unwrap(), 7);
        let error = limited::<(), _>("a", FLOOR, |_| Err(io::ErrorKind::NotFound.into())).await.unwrap_err();
        let source = error.source().unwrap().downcast_ref::<io::Error>().unwrap();
        assert_eq!(source.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_limit_grows_with_the_bytes_and_a_running_guest_has_time() {
        for (bytes, frozen, seconds) in [
            (0, true, 30),
            (PACE - 1, true, 30),
            (2 << 30, true, 94),
            (64 << 30, true, 2078),
            (0, false, 300),
        ] {
            assert_eq!(limit(bytes, frozen).as_secs(), seconds, "{bytes} {frozen}");
        }
        limit(u64::MAX, false);
    }
}
