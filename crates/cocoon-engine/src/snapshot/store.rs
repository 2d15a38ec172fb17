//! The snapshot store: folders of read-only files, and their rows.
//!
//! Entry points: [`Store::stage`], [`Store::publish`], [`Store::find`], [`Store::remove`]. A snapshot is
//! made in `snapshot/staging/`, synced, renamed into `snapshot/localfile/<id>/`, and exists once its row
//! does. Invariants: files of a snapshot never change; a folder that is worked on is locked, so that gc
//! leaves it alone; one complete snapshot a name.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
};

use cocoon_kit::files::{private_folder, sync_folder};

use rusqlite::{OptionalExtension as _, params};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::{
    db::Db,
    error::{ChangeError, Fault, LookupError},
    model::Snapshot,
    paths::{named, remove_folder},
    records::{find, json},
    vm::blocking,
};

const STEP: &str = "engine records: snapshots";
/// How often a staging folder is made anew when gc took it before it could be locked.
const STAGE_TRIES: usize = 20;
/// How often a held lock is tried again, and the pause before each.
const LOCK_TRIES: usize = 10;
const LOCK_PAUSE: std::time::Duration = std::time::Duration::from_millis(2);

/// The store of one root folder.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    db: Db,
    staging: PathBuf,
    complete: PathBuf,
}

/// A folder in the making; dropped, it is removed.
#[derive(Debug)]
pub(crate) struct Stage {
    folder: PathBuf,
    /// Held until the folder is gone, or is a snapshot with a row.
    lock: Option<File>,
}

impl Stage {
    /// Where the files go.
    #[must_use]
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Published, it is not there any more.
        if !self.folder.exists() {
            return;
        }
        let (folder, lock) = (std::mem::take(&mut self.folder), self.lock.take());
        let remove = move || {
            let _ = remove_folder(&folder);
            drop(lock);
        };
        // Gigabytes take their time: not on a thread that serves others. What is left, gc takes.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(remove)),
            Err(_) => remove(),
        }
    }
}

/// What a row holds beside what [`Snapshot`] prints.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    #[serde(flatten)]
    snapshot: Snapshot,
}

impl Store {
    /// Makes folders and table.
    pub(crate) async fn open(root: &Path, db: Db) -> Result<Self, Fault> {
        let base = root.join("snapshot");
        let (staging, complete) = (base.join("staging"), base.join("localfile"));
        for folder in [&staging, &complete] {
            private_folder(folder)
                .map_err(|error| Fault::new(format!("folder {}", folder.display()), error))?;
        }
        db.call(STEP, |connection| {
            connection.execute_batch(
                "CREATE TABLE IF NOT EXISTS snapshots (
                     id TEXT PRIMARY KEY,
                     name TEXT NOT NULL,
                     body TEXT NOT NULL
                 ) STRICT;
                 CREATE UNIQUE INDEX IF NOT EXISTS snapshot_names ON snapshots (name) WHERE name <> ''",
            )
        })
        .await?;
        Ok(Self { db, staging, complete })
    }

    /// An empty, locked folder on the store's file system.
    pub(crate) fn stage(&self, id: &str) -> Result<Stage, Fault> {
        let folder = self.staging.join(id);
        let fault = |error| Fault::new(format!("staging folder {}", folder.display()), error);
        for _ in 0..STAGE_TRIES {
            private_folder(&folder).map_err(fault)?;
            match lock(&folder) {
                Ok(Some(lock)) => return Ok(Stage { folder, lock: Some(lock) }),
                // gc was quicker than our lock.
                Ok(None) => std::thread::sleep(LOCK_PAUSE),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(fault(error)),
            }
        }
        Err(fault(io::Error::new(io::ErrorKind::ResourceBusy, "somebody else works in it")))
    }

    /// The id that holds `name`.
    pub(crate) async fn holder(&self, name: &str) -> Result<Option<String>, Fault> {
        let name = name.to_owned();
        self.db
            .call(STEP, move |connection| {
                let sql = "SELECT id FROM snapshots WHERE name = ?1 AND name <> ''";
                connection.query_row(sql, params![name], |row| row.get(0)).optional()
            })
            .await
    }

    /// Makes the staged files the snapshot. With `replace`, an older one of that name goes in the same
    /// transaction; without, a taken name is an error.
    pub(crate) async fn publish(
        &self,
        stage: Stage,
        mut snapshot: Snapshot,
        replace: bool,
    ) -> Result<Snapshot, ChangeError> {
        let id = snapshot.envelope.id.clone();
        let folder = self.complete.join(&id);
        self.clear(&id).await?;
        let (from, to) = (stage.folder.clone(), folder.clone());
        blocking(&format!("snapshot folder {}", folder.display()), move || seal(&from, &to)).await?;
        snapshot.folder.clone_from(&folder);
        let (name, kept) = (snapshot.envelope.name.clone(), snapshot.clone());
        let recorded = self.db.call(STEP, move |connection| record(connection, kept, replace)).await;
        let error = match recorded {
            Ok(Ok(replaced)) => {
                if let Some(old) = replaced {
                    self.discard(&old).await;
                }
                return Ok(snapshot);
            }
            Ok(Err(holder)) => ChangeError::SnapshotExists { name, holder },
            Err(fault) => fault.into(),
        };
        // The stage's lock is still on it.
        let _ = blocking("snapshot folder without a row", move || remove_folder(&folder)).await;
        Err(error)
    }

    /// Makes room for a snapshot's folder: a crash may have left one without a row there.
    async fn clear(&self, id: &str) -> Result<(), Fault> {
        let folder = self.complete.join(id);
        let step = format!("snapshot folder {}", folder.display());
        let busy = |why: &str| Fault::new(step.clone(), io::Error::new(io::ErrorKind::ResourceBusy, why));
        let lock = match lock(&folder) {
            Ok(Some(lock)) => lock,
            Ok(None) => return Err(busy("somebody else works in it; try again")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Fault::new(step, error)),
        };
        if self.is_recorded(id).await? {
            return Err(busy("it belongs to another snapshot"));
        }
        blocking(&step, move || remove_folder(&folder).map(|()| drop(lock))).await
    }

    /// All snapshots, oldest first.
    pub(crate) async fn list(&self) -> Result<Vec<Snapshot>, Fault> {
        let bodies: Vec<String> = self
            .db
            .call(STEP, |connection| {
                let mut statement = connection.prepare_cached("SELECT body FROM snapshots")?;
                statement.query_map([], |row| row.get(0))?.collect()
            })
            .await?;
        let mut all = bodies.iter().map(|body| self.parse(body)).collect::<Result<Vec<_>, _>>()?;
        all.sort_by(|a, b| (a.created_at, &a.envelope.id).cmp(&(b.created_at, &b.envelope.id)));
        Ok(all)
    }

    /// One snapshot by id, name or unique prefix of an id.
    pub(crate) async fn find(&self, reference: &str) -> Result<Snapshot, LookupError> {
        let wanted = reference.to_owned();
        let found = self.db.call(STEP, move |connection| find(connection, "snapshots", &wanted)).await?;
        match found.as_slice() {
            [] => Err(LookupError::SnapshotNotFound(reference.to_owned())),
            [body] => self.present(self.parse(body)?, reference).await,
            _ => Err(LookupError::Ambiguous(reference.to_owned())),
        }
    }

    /// A row is made after its folder and goes before it, so one without a folder tells that somebody
    /// removed the files by hand: the snapshot is gone, and a wake must look elsewhere. Only a clear
    /// "not there" counts.
    async fn present(&self, snapshot: Snapshot, reference: &str) -> Result<Snapshot, LookupError> {
        let gone = matches!(snapshot.folder.try_exists(), Ok(false)) && self.complete.is_dir();
        if !gone {
            return Ok(snapshot);
        }
        let (id, folder) = (snapshot.envelope.id, snapshot.folder);
        tracing::warn!(snapshot = id, folder = %folder.display(), "the files of a snapshot were removed; it is forgotten");
        self.db
            .call(STEP, move |connection| {
                connection.execute("DELETE FROM snapshots WHERE id = ?1", params![id])
            })
            .await?;
        Err(LookupError::SnapshotNotFound(reference.to_owned()))
    }

    /// Removes a snapshot: the row first, so that nobody finds half of it.
    pub(crate) async fn remove(&self, reference: &str) -> Result<(), LookupError> {
        let id = self.find(reference).await?.envelope.id;
        let gone = id.clone();
        let rows = self
            .db
            .call(STEP, move |connection| {
                connection.execute("DELETE FROM snapshots WHERE id = ?1", params![gone])
            })
            .await?;
        self.discard(&id).await;
        if rows == 0 { Err(LookupError::SnapshotNotFound(reference.to_owned())) } else { Ok(()) }
    }

    /// Removes folders that nobody works in and no row names; returns what went.
    pub(crate) async fn collect(&self) -> Result<Vec<String>, Fault> {
        let mut gone = Vec::new();
        for folder in [&self.staging, &self.complete] {
            let fault = |error| Fault::new(format!("snapshot gc in {}", folder.display()), error);
            for entry in fs::read_dir(folder).map_err(fault)? {
                let path = entry.map_err(fault)?.path();
                let Some(lock) = lock(&path).ok().flatten() else { continue };
                // Asked after the lock: who made a row held it until then.
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if folder == &self.complete && self.is_recorded(&name).await? {
                    continue;
                }
                let step = format!("snapshot gc of {}", path.display());
                blocking(&step, move || remove_folder(&path).map(|()| drop(lock))).await?;
                gone.push(format!("snapshot folder {name}"));
            }
        }
        Ok(gone)
    }

    async fn is_recorded(&self, id: &str) -> Result<bool, Fault> {
        let id = id.to_owned();
        self.db
            .call(STEP, move |connection| {
                let sql = "SELECT 1 FROM snapshots WHERE id = ?1";
                Ok(connection.query_row(sql, params![id], |_| Ok(())).optional()?.is_some())
            })
            .await
    }

    /// Removes the folder of a snapshot whose row is gone.
    async fn discard(&self, id: &str) {
        if let Err(error) = self.clear(id).await {
            tracing::warn!(%error, snapshot = id, "a removed snapshot left files; gc takes them");
        }
    }

    fn parse(&self, body: &str) -> Result<Snapshot, Fault> {
        let row: Row = serde_json::from_str(body).map_err(|error| Fault::new(STEP, error))?;
        let folder = self.complete.join(&row.snapshot.envelope.id);
        Ok(Snapshot { folder, ..row.snapshot })
    }
}

fn record(
    connection: &mut rusqlite::Connection,
    snapshot: Snapshot,
    replace: bool,
) -> rusqlite::Result<Result<Option<String>, String>> {
    let (id, name) = (snapshot.envelope.id.clone(), snapshot.envelope.name.clone());
    let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    let sql = "SELECT id FROM snapshots WHERE name = ?1 AND name <> ''";
    let holder: Option<String> = transaction.query_row(sql, params![name], |row| row.get(0)).optional()?;
    if let Some(holder) = &holder {
        if !replace {
            return Ok(Err(holder.clone()));
        }
        transaction.execute("DELETE FROM snapshots WHERE id = ?1", params![holder])?;
    }
    let body = json(&Row { snapshot })?;
    transaction
        .execute("INSERT INTO snapshots (id, name, body) VALUES (?1, ?2, ?3)", params![id, name, body])?;
    transaction.commit()?;
    Ok(Ok(holder.filter(|old| *old != id)))
}

/// Locks a folder by its descriptor. `None`: somebody else has it, or had it and took it away.
fn lock(folder: &Path) -> io::Result<Option<File>> {
    let file = File::open(folder)?;
    let mut tries = 0;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            // A process that is being started shares every descriptor between fork and exec, so a lock that
            // was let go may look held for a moment.
            Err(rustix::io::Errno::WOULDBLOCK) if tries < LOCK_TRIES => tries += 1,
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    // A lock on a folder that is not at its path any more guards nothing.
    let (held, named) = (file.metadata()?, fs::metadata(folder)?);
    Ok(((held.dev(), held.ino()) == (named.dev(), named.ino())).then_some(file))
}

/// Makes the files ours, read-only and durable, then moves the folder to its place.
fn seal(from: &Path, to: &Path) -> io::Result<()> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let file = File::open(&path).map_err(|error| named(&path, &error))?;
        // A disk was written by a confined user; an owner could make it writable again.
        fchown(&file, Some(user), Some(group)).map_err(|error| named(&path, &error))?;
        file.set_permissions(Permissions::from_mode(0o444))?;
        file.sync_all().map_err(|error| named(&path, &error))?;
    }
    sync_folder(from)?;
    fs::rename(from, to)?;
    to.parent().map_or(Ok(()), sync_folder)
}

#[cfg(test)]
mod tests {
    use cocoon_oci::snapshot::Envelope;
    use jiff::Timestamp;

    use super::*;

    async fn store() -> (tempfile::TempDir, Store) {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::open(&folder.path().join("engine.db")).unwrap();
        let store = Store::open(folder.path(), db).await.unwrap();
        (folder, store)
    }

    fn snapshot(id: &str, name: &str) -> Snapshot {
        Snapshot {
            envelope: Envelope { id: id.into(), name: name.into(), ..Envelope::default() },
            created_at: Timestamp::UNIX_EPOCH,
            folder: PathBuf::new(),
        }
    }

    async fn publish(store: &Store, id: &str, name: &str, replace: bool) -> Result<Snapshot, ChangeError> {
        let stage = store.stage(id).unwrap();
        fs::write(stage.folder().join("a"), id).unwrap();
        store.publish(stage, snapshot(id, name), replace).await
    }

    #[tokio::test]
    async fn a_snapshot_whose_files_were_removed_by_hand_is_not_there_any_more() {
        let (_root, store) = store().await;
        let kept = publish(&store, "AAA1", "vm", false).await.unwrap();
        fs::remove_dir_all(&kept.folder).unwrap();
        assert!(matches!(store.find("vm").await, Err(LookupError::SnapshotNotFound(_))));
        publish(&store, "BBB1", "vm", false).await.unwrap();
    }

    #[tokio::test]
    async fn a_name_is_replaced_only_on_request_and_only_by_a_complete_snapshot() {
        let (_root, store) = store().await;
        let first = publish(&store, "AAA1", "vm", false).await.unwrap();
        assert_eq!(fs::metadata(first.folder.join("a")).unwrap().permissions().mode() & 0o777, 0o444);
        let error = publish(&store, "BBB1", "vm", false).await.unwrap_err();
        assert_eq!(error.to_string(), "snapshot \"vm\" already exists, held by AAA1");
        assert!(!store.complete.join("BBB1").exists());
        publish(&store, "CCC1", "vm", true).await.unwrap();
        assert!(!first.folder.exists());
        assert_eq!(store.find("vm").await.unwrap().envelope.id, "CCC1");
        assert_eq!(store.list().await.unwrap().len(), 1);
    }

    async fn gone(folder: &Path) {
        for _ in 0..6000 {
            if !folder.exists() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("{} is still there", folder.display());
    }

    #[tokio::test]
    async fn a_folder_that_a_crash_left_does_not_stop_the_next_snapshot_of_its_id() {
        let (_root, store) = store().await;
        let left = store.complete.join("AAA1");
        private_folder(&left).unwrap();
        fs::write(left.join("old"), "x").unwrap();
        let made = publish(&store, "AAA1", "vm", true).await.unwrap();
        assert!(made.folder.join("a").exists() && !left.join("old").exists());
        let error = publish(&store, "AAA1", "vm", true).await.unwrap_err();
        assert!(error.to_string().contains("AAA1"), "{error}");
        store.find("vm").await.unwrap();
        assert!(made.folder.join("a").exists(), "a recorded folder is never cleared");
    }

    #[tokio::test]
    async fn a_folder_that_somebody_publishes_is_not_cleared() {
        let (_root, store) = store().await;
        let busy = store.complete.join("AAA1");
        private_folder(&busy).unwrap();
        let lock = lock(&busy).unwrap().unwrap();
        publish(&store, "AAA1", "vm", true).await.unwrap_err();
        drop(lock);
        publish(&store, "AAA1", "vm", true).await.unwrap();
    }

    #[tokio::test]
    async fn files_of_a_snapshot_belong_to_who_runs_the_engine() {
        let (_root, store) = store().await;
        let stage = store.stage("AAA1").unwrap();
        let disk = stage.folder().join("cow.qcow2");
        fs::write(&disk, "x").unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&disk, Some(3_000_001), Some(3_000_001)).unwrap();
        }
        let made = store.publish(stage, snapshot("AAA1", "vm"), false).await.unwrap();
        let found = fs::metadata(made.folder.join("cow.qcow2")).unwrap();
        assert_eq!(found.uid(), rustix::process::geteuid().as_raw());
        assert_eq!(found.gid(), rustix::process::getegid().as_raw());
    }

    #[tokio::test]
    async fn a_dropped_stage_leaves_nothing_and_gc_leaves_a_live_one_alone() {
        let (_root, store) = store().await;
        let stage = store.stage("AAA1").unwrap();
        fs::write(stage.folder().join("a"), "x").unwrap();
        assert!(store.collect().await.unwrap().is_empty());
        let folder = stage.folder().to_owned();
        drop(stage);
        gone(&folder).await;
        private_folder(&store.staging.join("dead")).unwrap();
        private_folder(&store.complete.join("dead")).unwrap();
        publish(&store, "BBB1", "vm", false).await.unwrap();
        assert_eq!(store.collect().await.unwrap().len(), 2);
        store.find("vm").await.unwrap();
    }

    #[tokio::test]
    async fn a_removed_snapshot_is_not_found_and_its_files_are_gone() {
        let (_root, store) = store().await;
        let made = publish(&store, "AAA1", "repo:tag", false).await.unwrap();
        store.remove("repo:tag").await.unwrap();
        assert!(!made.folder.exists());
        let error = store.remove("repo:tag").await.unwrap_err();
        assert_eq!(error.to_string(), "snapshot not found: repo:tag");
    }
}
