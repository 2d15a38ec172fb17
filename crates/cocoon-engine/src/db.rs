//! One SQLite file for all of the engine's indexes, shared by processes.
//!
//! Entry point: [`Db::call`]. WAL mode, full sync: a finished write survives a power cut. Calls run on
//! tokio's blocking pool, one at a time per process; another process' writes are waited for (10 s).
//! Each module owns its tables and creates them in its own `migrate` with `CREATE TABLE IF NOT EXISTS`.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rusqlite::Connection;

use crate::error::Fault;

/// The version of the data folder that this program reads and writes (`PRAGMA user_version`).
pub const VERSION: i64 = 1;
/// Space that is set aside for writes on a full disk.
const LOG: u64 = 8 << 20;

/// A handle on the database; clones share one connection.
#[derive(Debug, Clone)]
pub struct Db {
    connection: Arc<Mutex<Connection>>,
}

impl Db {
    /// Opens or creates the file; refuses one of another version.
    pub fn open(path: &Path) -> Result<Self, Fault> {
        let step = || format!("engine records {}", path.display());
        let connection = Self::prepare(path).map_err(|source| Fault::new(step(), source))?;
        let version: i64 = connection
            .pragma_query_value(None, "user_version", |row| row.get(0))
            .map_err(|source| Fault::new(step(), source))?;
        match version {
            VERSION => {}
            0 => connection
                .pragma_update(None, "user_version", VERSION)
                .map_err(|source| Fault::new(step(), source))?,
            other => {
                let message = format!(
                    "the data folder has version {other}, this program reads version {VERSION}; \
                     use the matching release or another --root-dir"
                );
                return Err(Fault::new(step(), message));
            }
        }
        cocoon_kit::files::reserve_log(path, LOG);
        Ok(Self { connection: Arc::new(Mutex::new(connection)) })
    }

    fn prepare(path: &Path) -> rusqlite::Result<Connection> {
        let connection = Connection::open(path)?;
        connection.busy_timeout(Duration::from_secs(10))?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        Ok(connection)
    }

    /// Runs `work` on the connection; `step` names it in the error. Use a transaction for more than one write.
    pub async fn call<T, F>(&self, step: &str, work: F) -> Result<T, Fault>
    where
        T: Send + 'static,
        F: FnOnce(&mut Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        let connection = Arc::clone(&self.connection);
        let done = tokio::task::spawn_blocking(move || {
            work(&mut connection.lock().unwrap_or_else(PoisonError::into_inner))
        });
        match done.await {
            Ok(result) => result.map_err(|source| Fault::new(step, source)),
            Err(panicked) => Err(Fault::new(step, panicked)),
        }
    }
}
