//! The queue between the store and one watcher, bounded in number and bytes.
//!
//! Entry point: [`queue`]. Invariant: what a watcher has yet to take is at most [`EVENTS`] notices that keep
//! [`BYTES`] of objects' text alive, and one event more, so that an object of any size reaches whoever keeps
//! up. Whoever falls behind that is ended by the store; he reads what is queued and then the end.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::mpsc;

use super::Notice;

/// How many undelivered events a watcher may have before it is ended.
const EVENTS: usize = 4096;
/// How much text they may keep alive.
const BYTES: usize = 16 << 20;

impl Notice {
    fn bytes(&self) -> usize {
        match self {
            Self::Change(_, object) => object.bytes.len(),
            Self::Bookmark(_) => 0,
        }
    }
}

/// Why a notice was not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendError {
    /// The watcher is gone.
    Closed,
    /// The watcher does not keep up.
    Full,
}

/// The store's end.
#[derive(Debug)]
pub(super) struct Sender {
    notices: mpsc::Sender<Notice>,
    held: Arc<AtomicUsize>,
}

/// The watcher's end.
#[derive(Debug)]
pub(crate) struct Queue {
    notices: mpsc::Receiver<Notice>,
    held: Arc<AtomicUsize>,
}

/// A new queue.
pub(super) fn queue() -> (Sender, Queue) {
    let ((sender, receiver), held) = (mpsc::channel(EVENTS), Arc::new(AtomicUsize::new(0)));
    (Sender { notices: sender, held: Arc::clone(&held) }, Queue { notices: receiver, held })
}

impl Sender {
    /// Queues a notice. Called by one at a time: the store's lock is held.
    pub(super) fn send(&self, notice: Notice) -> Result<(), SendError> {
        let bytes = notice.bytes();
        let held = self.held.load(Ordering::Relaxed);
        if held > 0 && held.saturating_add(bytes) > BYTES {
            return Err(SendError::Full);
        }
        // Counted first: the watcher may take it before this returns.
        self.held.fetch_add(bytes, Ordering::Relaxed);
        self.notices.try_send(notice).map_err(|error| {
            self.held.fetch_sub(bytes, Ordering::Relaxed);
            match error {
                mpsc::error::TrySendError::Closed(_) => SendError::Closed,
                mpsc::error::TrySendError::Full(_) => SendError::Full,
            }
        })
    }

    /// The watcher is gone.
    pub(super) fn is_closed(&self) -> bool {
        self.notices.is_closed()
    }
}

impl Queue {
    /// Appends up to `limit` notices to `into`; 0 at the end of the queue. May be dropped and called again.
    pub(crate) async fn recv_many(&mut self, into: &mut Vec<Notice>, limit: usize) -> usize {
        let before = into.len();
        let count = self.notices.recv_many(into, limit).await;
        let bytes = into[before..].iter().map(Notice::bytes).sum();
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        count
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        resources::by_table,
        store::{Change, Object},
    };

    fn notice(size: usize) -> Notice {
        let map = json!({ "metadata": { "name": "a" }, "data": { "a": "x".repeat(size) } });
        Notice::Change(Change::Added, Arc::new(Object::new(by_table("configmaps").unwrap(), map, 1)))
    }

    #[tokio::test]
    async fn a_watcher_that_does_not_take_large_events_is_ended_before_they_fill_the_memory() {
        let (sender, mut queue) = queue();
        let mib = notice(1 << 20);
        let sent = (0..EVENTS).take_while(|_| sender.send(mib.clone()).is_ok()).count();
        assert_eq!(sent, 15, "of 1 MiB and a little more each");
        assert_eq!(sender.send(mib.clone()), Err(SendError::Full));
        assert_eq!(sender.send(Notice::Bookmark(1)), Ok(()));
        drop(sender);
        let mut taken = Vec::new();
        while queue.recv_many(&mut taken, 4).await > 0 {}
        assert_eq!(taken.len(), 16, "what was queued is delivered");
        assert_eq!(queue.held.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn whoever_keeps_up_gets_any_number_of_events_of_any_size() {
        let (sender, mut queue) = queue();
        let (small, huge) = (notice(0), notice(BYTES * 2));
        for _ in 0..3 {
            sender.send(huge.clone()).unwrap();
            assert_eq!(sender.send(small.clone()), Err(SendError::Full));
            assert_eq!(queue.recv_many(&mut Vec::new(), 256).await, 1);
            for _ in 0..EVENTS {
                sender.send(small.clone()).unwrap();
            }
            assert_eq!(sender.send(small.clone()), Err(SendError::Full), "the number is bounded, too");
            let mut taken = Vec::new();
            assert_eq!(queue.recv_many(&mut taken, EVENTS).await, EVENTS);
        }
    }
}
