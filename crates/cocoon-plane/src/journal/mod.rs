//! Durability as a port.
//!
//! Entry points: [`Journal`] (load, append a batch) and [`Durability`] (group commit on top of it).
//! Invariant: a write is acknowledged, and shown to a watcher, only after the batch that holds it was
//! appended. While appending fails, nothing already accepted is lost as long as the process lives: the
//! writer tries again, and new writes are refused with the reason. What waits for a slow or hanging disk is
//! bounded by [`WAITING`]: above it new writes are refused, too.

#[cfg(test)]
pub(crate) mod fake;
mod sqlite;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
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
/// Most bytes that wait to be appended. A caller that left no longer waits for its record, so the number of
/// callers bounds nothing.
const WAITING: u64 = 64 << 20;
/// What a record takes beside its text.
const RECORD: u64 = 256;

/// One write.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) revision: u64,
    pub(crate) key: Key,
    /// `None` removes the object.
    pub(crate) bytes: Option<Bytes>,
}

impl Record {
    fn cost(&self) -> u64 {
        RECORD + self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)
    }
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
    // Unbounded by type, because it is filled under the store's lock; bounded by `check`, which each writer
    // asks without a pause between the answer and its record.
    queue: Option<mpsc::Sender<Record>>,
    state: watch::Receiver<State>,
    /// Bytes handed over and not yet appended.
    waiting: Arc<AtomicU64>,
    refused: AtomicU64,
    writer: Option<JoinHandle<()>>,
}

impl Durability {
    /// Keeps nothing; everything counts as durable at once.
    pub(crate) fn none() -> Self {
        let (_, state) = watch::channel(State::default());
        Self { queue: None, state, waiting: Arc::default(), refused: AtomicU64::new(0), writer: None }
    }

    /// Starts the writer of `journal`, whose last revision is `durable`.
    pub(crate) fn start(journal: Box<dyn Journal>, durable: u64) -> std::io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let (publish, state) = watch::channel(State { durable, failing: None });
        let waiting = Arc::new(AtomicU64::new(0));
        let left = Arc::clone(&waiting);
        let writer = std::thread::Builder::new()
            .name("plane-journal".into())
            .spawn(move || write_batches(journal, &receiver, &publish, &left))?;
        let refused = AtomicU64::new(0);
        Ok(Self { queue: Some(sender), state, waiting, refused, writer: Some(writer) })
    }

    /// Hands a write over. Called under the store's lock, so that records keep their order.
    pub(crate) fn submit(&self, record: Record) {
        if let Some(queue) = &self.queue {
            self.waiting.fetch_add(record.cost(), Ordering::Relaxed);
            // The writer ends only after this sender is dropped.
            let _ = queue.send(record);
        }
    }

    /// Refuses when the journal cannot take writes now.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        let ready = self.ready();
        if ready.is_err() {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        ready
    }

    /// Whether the journal takes writes now.
    pub(crate) fn ready(&self) -> Result<(), ApiError> {
        if let Some(why) = &self.state.borrow().failing {
            return Err(ApiError::internal(format!("the journal takes no writes: {why}")));
        }
        let waiting = self.waiting();
        if waiting > WAITING {
            let message = format!(
                "{waiting} bytes wait for the journal's disk, which is slow or hangs: try again later, look at \
                 the disk if this stays"
            );
            return Err(ApiError::new(503, "ServiceUnavailable", message));
        }
        Ok(())
    }

    /// Bytes that wait to be appended.
    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// How many writes were refused because the journal could not take them.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
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
    waiting: &AtomicU64,
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
        waiting.fetch_sub(batch.iter().map(Record::cost).sum(), Ordering::Relaxed);
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
    use super::{fake::Fake, *};

    fn record(revision: u64) -> Record {
        Record { revision, key: Key::new("pods", "a", "b"), bytes: None }
    }

    #[tokio::test]
    async fn writes_that_gather_while_one_is_written_share_a_batch() {
        let fake = Fake::default();
        let durability = Durability::start(Box::new(fake.clone()), 0).unwrap();
        fake.hold(true);
        (1..=9).for_each(|revision| durability.submit(record(revision)));
        fake.hold(false);
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

    #[tokio::test]
    async fn a_disk_that_hangs_is_found_by_what_waits_for_it() {
        let fake = Fake::default();
        let durability = Durability::start(Box::new(fake.clone()), 0).unwrap();
        fake.hold(true);
        let megabyte = Bytes::from(vec![0; 1 << 20]);
        let mut revision = 0;
        while durability.check().is_ok() {
            revision += 1;
            assert!(revision <= 64, "nothing bounds what waits");
            durability.submit(Record { bytes: Some(megabyte.clone()), ..record(revision) });
        }
        assert_eq!((durability.check().unwrap_err().code, durability.refused()), (503, 2));
        fake.hold(false);
        durability.wait(revision).await.unwrap();
        assert!(durability.check().is_ok() && durability.waiting() == 0);
    }
}
