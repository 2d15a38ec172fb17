//! Durability as a port.
//!
//! Entry points: [`Journal`] (load, append a batch) and [`Durability`] (group commit on top of it).
//! Invariant: a write is acknowledged, and shown to a watcher, only after the batch that holds it was
//! appended. While appending fails, nothing already accepted is lost as long as the process lives: the
//! writer tries again, and new writes are refused with the reason.

mod sqlite;

use std::{
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use bytes::Bytes;
pub(crate) use sqlite::SqliteJournal;
use tokio::sync::watch;

use crate::{error::ApiError, store::Key};

/// How long a caller waits for its write to become durable.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between tries of a batch that could not be appended.
const RETRY: Duration = Duration::from_millis(500);
/// Most records of one batch.
const BATCH: usize = 1024;

/// One write.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) revision: u64,
    pub(crate) key: Key,
    /// `None` removes the object.
    pub(crate) bytes: Option<Bytes>,
}

/// What a journal held.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub(crate) revision: u64,
    /// Table, revision, text.
    pub(crate) objects: Vec<(String, u64, Vec<u8>)>,
}

/// Why a journal failed.
pub(crate) type JournalError = Box<dyn std::error::Error + Send + Sync>;

/// Where writes are kept.
pub(crate) trait Journal: Send {
    /// Everything that was appended.
    fn load(&mut self) -> Result<Loaded, JournalError>;
    /// Makes `batch` durable, all of it or nothing.
    fn append(&mut self, batch: &[Record]) -> Result<(), JournalError>;
}

#[derive(Debug, Clone, Default)]
struct State {
    durable: u64,
    failing: Option<Arc<str>>,
}

/// Group commit: one writer thread that appends whatever has gathered.
#[derive(Debug)]
pub(crate) struct Durability {
    // Unbounded by type, bounded by the callers: each waits for its own record before the next.
    queue: Option<mpsc::Sender<Record>>,
    state: watch::Receiver<State>,
    writer: Option<JoinHandle<()>>,
}

impl Durability {
    /// Keeps nothing; everything counts as durable at once.
    pub(crate) fn none() -> Self {
        let (_, state) = watch::channel(State::default());
        Self { queue: None, state, writer: None }
    }

    /// Starts the writer of `journal`, whose last revision is `durable`.
    pub(crate) fn start(journal: Box<dyn Journal>, durable: u64) -> std::io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let (publish, state) = watch::channel(State { durable, failing: None });
        let writer = std::thread::Builder::new()
            .name("plane-journal".into())
            .spawn(move || write_batches(journal, &receiver, &publish))?;
        Ok(Self { queue: Some(sender), state, writer: Some(writer) })
    }

    /// Hands a write over. Called under the store's lock, so that records keep their order.
    pub(crate) fn submit(&self, record: Record) {
        if let Some(queue) = &self.queue {
            // The writer ends only after this sender is dropped.
            let _ = queue.send(record);
        }
    }

    /// Refuses when the journal cannot take writes now.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        match &self.state.borrow().failing {
            Some(why) => Err(ApiError::internal(format!("the journal takes no writes: {why}"))),
            None => Ok(()),
        }
    }

    /// Waits until `revision` is durable.
    pub(crate) async fn wait(&self, revision: u64) -> Result<(), ApiError> {
        if self.queue.is_none() || self.state.borrow().durable >= revision {
            return Ok(());
        }
        let mut state = self.state.clone();
        let wait = state.wait_for(|state| state.durable >= revision);
        if let Ok(Ok(_)) = tokio::time::timeout(PATIENCE, wait).await {
            return Ok(());
        }
        let why = self.state.borrow().failing.clone().unwrap_or_else(|| "no answer".into());
        Err(ApiError::internal(format!("the write is not durable yet, read before trying again: {why}")))
    }
}

impl Drop for Durability {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

fn write_batches(
    mut journal: Box<dyn Journal>,
    queue: &mpsc::Receiver<Record>,
    state: &watch::Sender<State>,
) {
    let mut closing = false;
    while let Ok(first) = queue.recv() {
        let mut batch = vec![first];
        while batch.len() < BATCH
            && let Ok(record) = queue.try_recv()
        {
            batch.push(record);
        }
        while let Err(error) = journal.append(&batch) {
            tracing::error!(%error, records = batch.len(), "journal append failed");
            state.send_modify(|state| state.failing = Some(error.to_string().into()));
            if closing {
                return;
            }
            std::thread::sleep(RETRY);
            // While failing, more may gather; a closed queue gets one last try.
            closing = gather(queue, &mut batch);
        }
        let durable = batch.last().map_or(0, |record| record.revision);
        state.send_replace(State { durable, failing: None });
    }
}

/// Adds what is queued to `batch`; true when the queue was closed.
fn gather(queue: &mpsc::Receiver<Record>, batch: &mut Vec<Record>) -> bool {
    loop {
        match queue.try_recv() {
            Ok(record) => batch.push(record),
            Err(mpsc::TryRecvError::Empty) => return false,
            Err(mpsc::TryRecvError::Disconnected) => return true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A journal that fails while `broken` and blocks while the gate is held.
    #[derive(Debug, Clone, Default)]
    struct Fake {
        broken: Arc<Mutex<bool>>,
        gate: Arc<Mutex<()>>,
        batches: Arc<Mutex<Vec<Vec<u64>>>>,
    }

    impl Journal for Fake {
        fn load(&mut self) -> Result<Loaded, JournalError> {
            Ok(Loaded::default())
        }

        fn append(&mut self, batch: &[Record]) -> Result<(), JournalError> {
            let _open = self.gate.lock().map_err(|_| "poisoned")?;
            if *self.broken.lock().map_err(|_| "poisoned")? {
                return Err("no space left".into());
            }
            self.batches
                .lock()
                .map_err(|_| "poisoned")?
                .push(batch.iter().map(|record| record.revision).collect());
            Ok(())
        }
    }

    fn record(revision: u64) -> Record {
        Record { revision, key: Key::new("pods", "a", "b"), bytes: None }
    }

    #[tokio::test]
    async fn writes_that_gather_while_one_is_written_share_a_batch() {
        let fake = Fake::default();
        let durability = Durability::start(Box::new(fake.clone()), 0).unwrap();
        {
            let _closed = fake.gate.lock().unwrap();
            (1..=9).for_each(|revision| durability.submit(record(revision)));
        }
        durability.wait(9).await.unwrap();
        let batches = fake.batches.lock().unwrap().clone();
        assert!(batches.len() <= 2, "{batches:?}");
        assert_eq!(batches.concat(), (1..=9).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_failing_journal_refuses_new_writes_and_loses_none_that_it_took() {
        let fake = Fake::default();
        *fake.broken.lock().unwrap() = true;
        let durability = Durability::start(Box::new(fake.clone()), 0).unwrap();
        durability.submit(record(1));
        while durability.check().is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let error = durability.check().unwrap_err();
        assert!(error.message.contains("no space left"), "{error}");
        durability.submit(record(2));
        *fake.broken.lock().unwrap() = false;
        durability.wait(2).await.unwrap();
        assert!(durability.check().is_ok());
        assert_eq!(fake.batches.lock().unwrap().concat(), [1, 2]);
    }
}
