//! A journal for tests: it fails while `broken` and hangs while `held`.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{Journal, JournalError, Loaded, Record};

#[derive(Debug, Clone, Default)]
pub(crate) struct Fake {
    pub(crate) broken: Arc<Mutex<bool>>,
    pub(crate) held: Arc<AtomicBool>,
    pub(crate) batches: Arc<Mutex<Vec<Vec<u64>>>>,
}

impl Fake {
    pub(crate) fn hold(&self, held: bool) {
        self.held.store(held, Ordering::Relaxed);
    }
}

impl Journal for Fake {
    fn load(&mut self) -> Result<Loaded, JournalError> {
        Ok(Loaded::default())
    }

    fn append(&mut self, batch: &[Record]) -> Result<(), JournalError> {
        while self.held.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
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
