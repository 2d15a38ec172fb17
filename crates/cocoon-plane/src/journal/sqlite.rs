//! The journal as an SQLite file in WAL mode.
//!
//! Format, version 1 (`user_version`): `objects(tab, namespace, name, revision, body)` holds the last
//! text of each object, `state(revision)` the highest revision. A change of either raises the version.

use std::{
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use rusqlite::{Connection, params};

use super::{Journal, JournalError, Loaded, Record};
use crate::plane::OpenError;

/// The format that this program reads and writes.
const VERSION: i64 = 1;
/// Space that is set aside for writes on a full disk: hours of them, since a log that cannot be written back grows.
const LOG: u64 = 16 << 20;

/// One transaction: a kill before its end leaves an empty file, which the next start fills.
const SCHEMA: &str = "
    BEGIN;
    CREATE TABLE objects (
        tab TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
        revision INTEGER NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (tab, namespace, name)
    );
    CREATE TABLE state (revision INTEGER NOT NULL);
    INSERT INTO state VALUES (0);
    PRAGMA user_version = 1;
    COMMIT;
";

/// A journal file that this process holds alone.
pub(crate) struct SqliteJournal {
    connection: Connection,
}

impl SqliteJournal {
    /// Opens or makes the file at `path`, mode 0600.
    pub(crate) fn open(path: &Path) -> Result<Self, OpenError> {
        let on_error = |source: JournalError| OpenError::Journal { path: path.display().to_string(), source };
        // SQLite gives its side files the mode of the main file: it holds secrets.
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        options.open(path).map_err(|error| on_error(error.into()))?;
        let connection = prepare(path).map_err(|error| on_error(error.into()))?;
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(|error| on_error(error.into()))?;
        match found {
            VERSION => {}
            0 => connection.execute_batch(SCHEMA).map_err(|error| on_error(error.into()))?,
            found => {
                return Err(OpenError::Version { path: path.display().to_string(), found, ours: VERSION });
            }
        }
        // Pods must be able to say that the disk is full.
        cocoon_kit::files::reserve_log(path, LOG);
        Ok(Self { connection })
    }
}

fn prepare(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(PathBuf::from(path))?;
    connection.busy_timeout(std::time::Duration::from_secs(2))?;
    // Exclusive: a second process is told that the file is locked, and no shared-memory file is needed.
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    connection.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "cache_size", -512)?;
    Ok(connection)
}

impl Journal for SqliteJournal {
    fn load(&mut self) -> Result<Loaded, JournalError> {
        let revision: i64 = self.connection.query_row("SELECT revision FROM state", [], |row| row.get(0))?;
        let mut statement = self.connection.prepare("SELECT tab, revision, body FROM objects")?;
        let rows = statement.query_map([], |row| {
            let revision: i64 = row.get(1)?;
            Ok((row.get(0)?, revision.unsigned_abs(), row.get(2)?))
        })?;
        Ok(Loaded { revision: revision.unsigned_abs(), objects: rows.collect::<Result<_, _>>()? })
    }

    fn append(&mut self, batch: &[Record]) -> Result<(), JournalError> {
        let Some(last) = batch.last() else { return Ok(()) };
        let transaction = self.connection.transaction()?;
        {
            let mut put =
                transaction.prepare_cached("INSERT OR REPLACE INTO objects VALUES (?1, ?2, ?3, ?4, ?5)")?;
            let mut remove = transaction
                .prepare_cached("DELETE FROM objects WHERE tab = ?1 AND namespace = ?2 AND name = ?3")?;
            for record in batch {
                let (table, namespace, name) = (record.key.table, &*record.key.namespace, &*record.key.name);
                match &record.bytes {
                    Some(bytes) => {
                        put.execute(params![table, namespace, name, signed(record.revision)?, &bytes[..]])?
                    }
                    None => remove.execute(params![table, namespace, name])?,
                };
            }
        }
        transaction.execute("UPDATE state SET revision = ?1", [signed(last.revision)?])?;
        transaction.commit()?;
        Ok(())
    }
}

fn signed(revision: u64) -> Result<i64, JournalError> {
    Ok(i64::try_from(revision)?)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::store::Key;

    fn record(revision: u64, name: &str, body: Option<&'static str>) -> Record {
        let bytes = body.map(|body| Bytes::from_static(body.as_bytes()));
        Record { revision, key: Key::new("pods", "default", name), bytes }
    }

    #[test]
    fn what_was_appended_is_loaded_again_and_the_revision_never_goes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plane.db");
        let mut journal = SqliteJournal::open(&path).unwrap();
        journal.append(&[record(1, "a", Some("{}")), record(2, "b", Some("{}"))]).unwrap();
        journal.append(&[record(3, "a", Some("{\"x\":1}")), record(4, "b", None)]).unwrap();
        drop(journal);
        let loaded = SqliteJournal::open(&path).unwrap().load().unwrap();
        assert_eq!(loaded.revision, 4);
        assert_eq!(loaded.objects, vec![("pods".to_owned(), 3, b"{\"x\":1}".to_vec())]);
    }

    #[test]
    fn a_file_of_another_version_is_refused_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plane.db");
        drop(SqliteJournal::open(&path).unwrap());
        Connection::open(&path).unwrap().pragma_update(None, "user_version", 7).unwrap();
        let error = SqliteJournal::open(&path).err().unwrap();
        assert!(matches!(error, OpenError::Version { found: 7, ours: 1, .. }), "{error}");
    }

    #[test]
    fn a_kill_while_the_tables_are_made_leaves_a_file_that_the_next_start_fills() {
        let statements: Vec<_> = SCHEMA.trim().split_inclusive(';').collect();
        for done in 1..statements.len() {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("plane.db");
            prepare(&path).unwrap().execute_batch(&statements[..done].concat()).unwrap();
            let loaded = SqliteJournal::open(&path).unwrap().load().unwrap();
            assert_eq!((loaded.revision, loaded.objects.len()), (0, 0), "killed after {done} statements");
        }
    }

    #[test]
    fn a_journal_has_one_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plane.db");
        let mut first = SqliteJournal::open(&path).unwrap();
        first.append(&[record(1, "a", Some("{}"))]).unwrap();
        assert!(matches!(SqliteJournal::open(&path), Err(OpenError::Journal { .. })));
    }
}
