//! A VM's lock, kept by what blocks for as long as that takes, whoever has gone away meanwhile.
//!
//! A future can be dropped at any of its waits, but a thread that works for it goes on: it may be about to
//! start a QEMU or to make a folder. Entry points: [`Hold::during`], [`kept`], [`Hold::alone`]. Invariant:
//! whatever blocks and was begun inside of [`Hold::during`] through [`kept`] has ended when [`Hold::alone`]
//! answers, and before the lock is free for anybody.

use std::{future::Future, sync::Arc, time::Duration};

use cocoon_kit::files::Lock;

/// How often it is looked whether what blocks has ended.
const LOOK: Duration = Duration::from_millis(5);

tokio::task_local! {
    static HELD: Arc<Lock>;
}

/// A lock that is shared with what was begun under it.
#[derive(Debug)]
pub(crate) struct Hold(Arc<Lock>);

impl Hold {
    /// A lock that nothing works under yet.
    pub(crate) fn new(lock: Lock) -> Self {
        Self(Arc::new(lock))
    }

    /// Does `work` under the lock: what it lets block keeps that.
    pub(crate) async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        HELD.scope(Arc::clone(&self.0), work).await
    }

    /// Waits until nothing that was begun under the lock goes on. Takes as long as that does; meanwhile
    /// nobody else gets the lock, and whoever waits for it is told what it is held for.
    pub(crate) async fn alone(self) -> Lock {
        let mut shared = self.0;
        loop {
            match Arc::try_unwrap(shared) {
                Ok(lock) => return lock,
                Err(still) => shared = still,
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// `work` for a thread that blocks, with the lock that the calling task works under, if it does.
pub(crate) fn kept<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let held = HELD.try_with(Arc::clone).ok();
    move || {
        let done = work();
        drop(held);
        done
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_lock_is_free_only_once_what_blocks_has_ended_although_its_future_was_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.lock");
        let free = || Lock::try_acquire(&path).unwrap().is_some();
        for whole in [true, false] {
            let (begun, begins) = tokio::sync::oneshot::channel();
            let (release, released) = mpsc::channel::<()>();
            let hold = Hold::new(Lock::try_acquire(&path).unwrap().unwrap());
            let work = move || {
                let _ = begun.send(());
                released.recv().unwrap();
            };
            let waiting = hold.during(async { tokio::task::spawn_blocking(kept(work)).await });
            tokio::select! {
                done = waiting => panic!("{done:?}"),
                begins = begins => begins.unwrap(),
            }
            // Whoever unwinds waits; if nobody does, because the runtime ends, the work still has the lock.
            let unwinding = whole.then(|| tokio::spawn(hold.alone()));
            tokio::time::sleep(4 * LOOK).await;
            assert!(unwinding.as_ref().is_none_or(|unwinding| !unwinding.is_finished()));
            assert!(!free(), "something still works under it");
            release.send(()).unwrap();
            if let Some(unwinding) = unwinding {
                let lock = unwinding.await.unwrap();
                assert!(!free(), "it is that of who unwinds");
                drop(lock);
            }
            while !free() {
                tokio::time::sleep(LOOK).await;
            }
        }
    }

    #[tokio::test]
    async fn what_was_not_begun_under_a_lock_keeps_none() {
        let folder = tempfile::tempdir().unwrap();
        let hold = Hold::new(Lock::try_acquire(&folder.path().join("a.lock")).unwrap().unwrap());
        let outside = kept(|| 7);
        assert_eq!(hold.during(async { tokio::task::spawn_blocking(kept(|| 8)).await }).await.unwrap(), 8);
        hold.alone().await;
        assert_eq!(outside(), 7);
    }
}
