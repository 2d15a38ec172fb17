//! Owner records in SQLite: one row a VM name, every write synced before it counts.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use rusqlite::{Connection, OpenFlags, params};

use crate::{
    ports::{PortError, PortResult, Records},
    reason::Reason,
    record::OwnerRecord,
};

/// The version of the file that this program reads and writes.
const VERSION: i64 = 1;
/// Space that is set aside for writes on a full disk.
const LOG: u64 = 8 << 20;

/// The records file.
#[derive(Debug, Clone)]
pub struct SqliteRecords {
    connection: Arc<Mutex<Connection>>,
}

impl SqliteRecords {
    /// Opens or creates the file; refuses one of another version.
    pub fn open(path: &Path) -> PortResult<Self> {
        let what = || format!("owner records {}", path.display());
        let connection = prepare(path).map_err(|error| fault(what(), error))?;
        let version: i64 = connection
            .pragma_query_value(None, "user_version", |row| row.get(0))
            .map_err(|error| fault(what(), error))?;
        match version {
            VERSION => {}
            0 => migrate(&connection).map_err(|error| fault(what(), error))?,
            other => return Err(of_another_version(&what(), other)),
        }
        cocoon_kit::files::reserve_log(path, LOG);
        Ok(Self { connection: Arc::new(Mutex::new(connection)) })
    }

    /// Opens the file for reading only, beside an agent that may be running; `None`: no agent ever wrote one.
    pub fn read_only(path: &Path) -> PortResult<Option<Self>> {
        let what = || format!("owner records {}", path.display());
        if !path.try_exists().map_err(|error| PortError::caused(Reason::RecordsUnavailable, what(), error))? {
            return Ok(None);
        }
        let open = || {
            let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
            connection.busy_timeout(Duration::from_secs(10))?;
            let version = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
            Ok((connection, version))
        };
        let (connection, version): (Connection, i64) = open().map_err(|error| fault(what(), error))?;
        match version {
            VERSION => Ok(Some(Self { connection: Arc::new(Mutex::new(connection)) })),
            // Its agent has only just made it.
            0 => Ok(None),
            other => Err(of_another_version(&what(), other)),
        }
    }

    async fn call<T, F>(&self, what: String, work: F) -> PortResult<T>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        let connection = Arc::clone(&self.connection);
        let done = tokio::task::spawn_blocking(move || {
            work(&connection.lock().unwrap_or_else(PoisonError::into_inner))
        });
        match done.await {
            Ok(result) => result.map_err(|error| fault(what, error)),
            Err(panicked) => Err(PortError::caused(Reason::RecordsUnavailable, what, panicked)),
        }
    }
}

fn of_another_version(what: &str, found: i64) -> PortError {
    let message = format!(
        "{what} have version {found}, this program reads version {VERSION}; use the matching release or another \
         data folder"
    );
    PortError::new(Reason::RecordsUnavailable, message)
}

fn prepare(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(10))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    Ok(connection)
}

fn migrate(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(
        "CREATE TABLE IF NOT EXISTS owners (vm_name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT, WITHOUT ROWID",
    )?;
    connection.pragma_update(None, "user_version", VERSION)
}

fn fault(what: String, error: rusqlite::Error) -> PortError {
    PortError::caused(Reason::RecordsUnavailable, what, error)
}

#[async_trait]
impl Records for SqliteRecords {
    async fn load(&self) -> PortResult<Vec<OwnerRecord>> {
        let rows = self.call("reading owner records".to_owned(), |connection| {
            let mut rows = connection.prepare("SELECT body FROM owners ORDER BY vm_name")?;
            rows.query_map([], |row| row.get::<_, String>(0))?.collect::<rusqlite::Result<Vec<_>>>()
        });
        let read = |body: &String| {
            serde_json::from_str(body).map_err(|error| {
                let what = "an owner record cannot be read; use the release that wrote it";
                PortError::caused(Reason::RecordsUnavailable, what, error)
            })
        };
        rows.await?.iter().map(read).collect()
    }

    async fn put(&self, record: &OwnerRecord) -> PortResult<()> {
        let what = format!("writing the owner record of VM {}", record.vm_name);
        let body = serde_json::to_string(record)
            .map_err(|error| PortError::caused(Reason::RecordsUnavailable, what.clone(), error))?;
        let name = record.vm_name.clone();
        self.call(what, move |connection| {
            let sql = "INSERT INTO owners (vm_name, body) VALUES (?1, ?2) \
                       ON CONFLICT (vm_name) DO UPDATE SET body = excluded.body";
            connection.execute(sql, params![name, body]).map(|_| ())
        })
        .await
    }

    async fn forget(&self, vm_name: &str) -> PortResult<()> {
        let (what, name) = (format!("forgetting the owner record of VM {vm_name}"), vm_name.to_owned());
        self.call(what, move |connection| {
            connection.execute("DELETE FROM owners WHERE vm_name = ?1", params![name]).map(|_| ())
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::fake::record;

    #[tokio::test]
    async fn records_survive_the_process_and_are_replaced_whole() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("node.db");
        let records = SqliteRecords::open(&file).unwrap();
        records.put(&record("vm-a")).await.unwrap();
        let mut changed = record("vm-a");
        changed.restarts = 3;
        records.put(&changed).await.unwrap();
        records.put(&record("vm-b")).await.unwrap();
        records.forget("vm-b").await.unwrap();
        records.forget("vm-b").await.unwrap();
        drop(records);
        assert_eq!(SqliteRecords::open(&file).unwrap().load().await.unwrap(), [changed]);
    }

    #[tokio::test]
    async fn records_are_read_beside_a_running_agent_and_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("node.db");
        assert!(SqliteRecords::read_only(&file).unwrap().is_none());
        let agent = SqliteRecords::open(&file).unwrap();
        agent.put(&record("vm-a")).await.unwrap();
        let reader = SqliteRecords::read_only(&file).unwrap().unwrap();
        assert_eq!(reader.load().await.unwrap(), [record("vm-a")]);
        agent.put(&record("vm-b")).await.unwrap();
        assert_eq!(reader.load().await.unwrap().len(), 2);
        assert!(reader.put(&record("vm-c")).await.is_err(), "a reader changes nothing");
        drop(reader);
        drop(agent);
        let reader = SqliteRecords::read_only(&file).unwrap().unwrap();
        assert_eq!(reader.load().await.unwrap().len(), 2);
        drop(reader);
        let agent = SqliteRecords::open(&file).unwrap();
        agent.put(&record("vm-c")).await.unwrap();
        assert_eq!(agent.load().await.unwrap().len(), 3);
    }

    #[tokio::test]
    async fn a_file_of_another_version_is_refused_with_the_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("node.db");
        let connection = Connection::open(&file).unwrap();
        connection.pragma_update(None, "user_version", 99).unwrap();
        drop(connection);
        for error in [SqliteRecords::open(&file).unwrap_err(), SqliteRecords::read_only(&file).unwrap_err()] {
            assert!(
                error.message.contains("version 99") && error.message.contains("use the matching release")
            );
        }
    }
}
