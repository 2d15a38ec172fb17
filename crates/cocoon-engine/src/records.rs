//! VM records: one row a VM, written whole.
//!
//! Entry point: [`Records`]. A row exists before anything else of a VM does and goes after everything
//! else is gone, so whatever a crash leaves is found by its row. Invariants (kept by the database, over
//! all processes): ids, names and user slots are unique. Files are where the folders are now, moved or copied.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use rusqlite::{Connection, OptionalExtension as _, params};
use serde::{Deserialize, Serialize};

use crate::{
    db::Db,
    error::{BringUpError, Fault, LookupError},
    image::RecordedBoot,
    model::Vm,
    process::Process,
    qemu::{machine::Machine, memory::FileId},
    vm::whose::Noted,
};

/// First user id of VMs; the slot is added.
pub(crate) const FIRST_UID: u32 = 3_000_000;

/// What a VM boots with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BootRecord {
    /// Kernel file.
    pub(crate) kernel: PathBuf,
    /// Initrd file.
    pub(crate) initrd: PathBuf,
    /// Kernel command line.
    pub(crate) cmdline: String,
}

/// The memory of a running VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RamRecord {
    /// The mapped file.
    pub(crate) file: FileId,
    /// A snapshot's file, mapped privately.
    pub(crate) private: bool,
}

/// All that the engine knows about a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The object that users see; its state is the stored one.
    pub(crate) vm: Vm,
    /// Decides the VM's user id; given by [`Records::reserve`].
    pub(crate) slot: u32,
    /// The machine; `None` until bring-up has decided it.
    pub(crate) machine: Option<Machine>,
    /// Kernel, initrd, command line.
    pub(crate) boot: BootRecord,
    /// The same files by digest, for snapshots.
    pub(crate) recorded_boot: Option<RecordedBoot>,
    /// erofs files, lowest first.
    pub(crate) layers: Vec<PathBuf>,
    /// Files of the writable disk, top first.
    pub(crate) cow: Vec<PathBuf>,
    /// Blobs of the image store that it needs.
    pub(crate) image_blob_ids: BTreeSet<String>,
    /// Its hypervisor.
    pub(crate) process: Option<Process>,
    /// The file of the writable disk that its hypervisor was started on: in a copy of the folders, the disk is
    /// another file, and the process that the record names another folder's.
    #[serde(default)]
    pub(crate) disk: Option<FileId>,
    /// Its memory.
    pub(crate) ram: Option<RamRecord>,
    /// A clone whose guest has not taken its identity yet: the links are down.
    #[serde(default)]
    pub(crate) links_down: bool,
    /// The clone is a machine of its own, not its source going on.
    #[serde(default)]
    pub(crate) identity_is_new: bool,
    /// The snapshot that holds all that the guest ever did: it has not run since that capture.
    #[serde(default)]
    pub(crate) captured_as: Option<String>,
    /// Somebody had it stopped. Written before its hypervisor is ended, so that nobody who looks in between takes
    /// the end for a crash; until the next start.
    #[serde(default)]
    pub(crate) stop_ordered: bool,
}

impl Record {
    /// A new record that only holds a name.
    #[must_use]
    pub(crate) fn new(vm: Vm) -> Self {
        Self {
            vm,
            slot: 0,
            machine: None,
            boot: BootRecord::default(),
            recorded_boot: None,
            layers: Vec::new(),
            cow: Vec::new(),
            image_blob_ids: BTreeSet::new(),
            process: None,
            disk: None,
            ram: None,
            links_down: false,
            identity_is_new: false,
            captured_as: None,
            stop_ordered: false,
        }
    }

    /// Its hypervisor, as the record has it.
    #[must_use]
    pub(crate) fn noted(&self) -> Option<Noted> {
        self.process.map(|process| Noted { process, disk: self.disk })
    }

    /// The user that its QEMU runs as.
    #[must_use]
    pub(crate) const fn uid(&self) -> u32 {
        FIRST_UID + self.slot
    }
}

/// The table of VMs.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    db: Db,
    home: Arc<Home>,
}

/// Where this engine's folders are. Rows hold whole paths, and the folders may have been moved or copied since:
/// a VM of a copy must never write to the disk of its original.
#[derive(Debug)]
struct Home {
    root: PathBuf,
    run: PathBuf,
}

impl Home {
    /// The record with its files where they are in these folders.
    fn own(&self, mut record: Record) -> Record {
        let run = self.run.join(&record.vm.id);
        for path in &mut record.cow {
            *path = moved(path, &run);
        }
        for path in record.layers.iter_mut().chain([&mut record.boot.kernel, &mut record.boot.initrd]) {
            *path = self.stored(path);
        }
        for disk in &mut record.vm.storage_configs {
            let path = Path::new(&disk.path);
            let path = if disk.ro { self.stored(path) } else { moved(path, &run) };
            disk.path = path.display().to_string();
        }
        record
    }

    /// A file of the image store.
    fn stored(&self, path: &Path) -> PathBuf {
        let parts: Vec<_> = path.iter().collect();
        match parts.iter().rposition(|part| *part == STORE) {
            Some(at) => {
                parts.get(at..).unwrap_or_default().iter().fold(self.root.clone(), |all, part| all.join(part))
            }
            None => path.to_owned(),
        }
    }
}

/// The file of the same name in `folder`.
fn moved(path: &Path, folder: &Path) -> PathBuf {
    path.file_name().map_or_else(|| path.to_owned(), |name| folder.join(name))
}

/// The image store's folder below the root.
const STORE: &str = "oci";
const STEP: &str = "engine records: VMs";

impl Records {
    /// Creates the table if needed; `root` and `run` are where this engine's folders are now.
    pub(crate) async fn open(db: Db, root: &Path, run: &Path) -> Result<Self, Fault> {
        db.call(STEP, |connection| {
            connection.execute_batch(
                "CREATE TABLE IF NOT EXISTS vms (
                     id TEXT PRIMARY KEY,
                     name TEXT NOT NULL UNIQUE,
                     slot INTEGER NOT NULL UNIQUE,
                     body TEXT NOT NULL
                 ) STRICT",
            )
        })
        .await?;
        Ok(Self { db, home: Arc::new(Home { root: root.to_owned(), run: run.to_owned() }) })
    }

    /// Reserves id, name and a free slot.
    pub(crate) async fn reserve(&self, mut record: Record) -> Result<Record, BringUpError> {
        let (id, name) = (record.vm.id.clone(), record.vm.config.name.clone());
        let wanted = name.clone();
        let mut draft = record.clone();
        let outcome = self
            .db
            .call(STEP, move |connection| {
                let transaction =
                    connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
                if let Some(holder) = holder(&transaction, &wanted)? {
                    return Ok(Err(holder));
                }
                draft.slot = free_slot(&transaction)?;
                let sql = "INSERT INTO vms (id, name, slot, body) VALUES (?1, ?2, ?3, ?4)";
                transaction.execute(sql, params![id, wanted, draft.slot, json(&draft)?])?;
                transaction.commit()?;
                Ok(Ok(draft.slot))
            })
            .await?;
        match outcome {
            Ok(slot) => {
                record.slot = slot;
                Ok(record)
            }
            Err(holder) => Err(BringUpError::NameTaken { name, id: holder }),
        }
    }

    /// Writes a reserved record anew.
    pub(crate) async fn save(&self, record: &Record) -> Result<(), Fault> {
        let (id, record) = (record.vm.id.clone(), record.clone());
        let rows = self
            .db
            .call(STEP, move |connection| {
                connection.execute("UPDATE vms SET body = ?2 WHERE id = ?1", params![id, json(&record)?])
            })
            .await?;
        if rows == 1 { Ok(()) } else { Err(Fault::new(STEP, "the record is gone")) }
    }

    /// Forgets a VM; not there is success.
    pub(crate) async fn remove(&self, id: &str) -> Result<(), Fault> {
        let id = id.to_owned();
        self.db
            .call(STEP, move |connection| connection.execute("DELETE FROM vms WHERE id = ?1", params![id]))
            .await
            .map(drop)
    }

    /// All records, oldest first.
    pub(crate) async fn list(&self) -> Result<Vec<Record>, Fault> {
        let bodies: Vec<String> = self
            .db
            .call(STEP, |connection| {
                let mut statement = connection.prepare_cached("SELECT body FROM vms")?;
                statement.query_map([], |row| row.get(0))?.collect()
            })
            .await?;
        let mut records = bodies.iter().map(|body| self.parse(body)).collect::<Result<Vec<_>, _>>()?;
        records.sort_by(|a: &Record, b| (a.vm.created_at, &a.vm.id).cmp(&(b.vm.created_at, &b.vm.id)));
        Ok(records)
    }

    /// One record by id, name or unique prefix of an id.
    pub(crate) async fn find(&self, reference: &str) -> Result<Record, LookupError> {
        let wanted = reference.to_owned();
        let found = self.db.call(STEP, move |connection| find(connection, "vms", &wanted)).await?;
        match found.as_slice() {
            [] => Err(LookupError::VmNotFound(reference.to_owned())),
            [body] => Ok(self.parse(body)?),
            _ => Err(LookupError::Ambiguous(reference.to_owned())),
        }
    }

    fn parse(&self, body: &str) -> Result<Record, Fault> {
        let record = serde_json::from_str(body).map_err(|error| Fault::new(STEP, error))?;
        Ok(self.home.own(record))
    }
}

/// Bodies of the rows of `table` (a constant) that `reference` names: by id, else by name, else by a
/// prefix of at least three characters of the id.
pub(crate) fn find(connection: &Connection, table: &str, reference: &str) -> rusqlite::Result<Vec<String>> {
    for column in ["id", "name"] {
        let sql = format!("SELECT body FROM {table} WHERE {column} = ?1");
        let mut statement = connection.prepare_cached(&sql)?;
        let found: Option<String> = statement.query_row(params![reference], |row| row.get(0)).optional()?;
        if let Some(body) = found {
            return Ok(vec![body]);
        }
    }
    if reference.chars().count() < 3 {
        return Ok(Vec::new());
    }
    let sql = format!("SELECT body FROM {table} WHERE substr(id, 1, length(?1)) = ?1 LIMIT 2");
    let mut statement = connection.prepare_cached(&sql)?;
    statement.query_map(params![reference], |row| row.get(0))?.collect()
}

fn holder(connection: &Connection, name: &str) -> rusqlite::Result<Option<String>> {
    connection.query_row("SELECT id FROM vms WHERE name = ?1", params![name], |row| row.get(0)).optional()
}

fn free_slot(connection: &Connection) -> rusqlite::Result<u32> {
    let mut statement = connection.prepare_cached("SELECT slot FROM vms ORDER BY slot")?;
    let taken: Vec<u32> = statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    let gap = (1..).zip(&taken).find(|(slot, taken)| slot != *taken).map(|(slot, _)| slot);
    Ok(gap.unwrap_or_else(|| taken.last().copied().unwrap_or(0) + 1))
}

/// A value as JSON, with the database's error type.
pub(crate) fn json<T: Serialize>(value: &T) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::VmConfig, vm::reserve::blank};

    fn record(id: &str, name: &str) -> Record {
        let config = VmConfig { name: name.into(), ..VmConfig::default() };
        Record::new(blank(id.into(), config, jiff::Timestamp::UNIX_EPOCH))
    }

    async fn records() -> (tempfile::TempDir, Records) {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::open(&folder.path().join("engine.db")).unwrap();
        let records = Records::open(db, folder.path(), &folder.path().join("run")).await.unwrap();
        (folder, records)
    }

    #[tokio::test]
    async fn a_name_has_one_holder_and_slots_are_the_lowest_free() {
        let (_folder, records) = records().await;
        for (id, name, slot) in [("AAA1", "a", 1), ("BBB1", "b", 2), ("CCC1", "c", 3)] {
            assert_eq!(records.reserve(record(id, name)).await.unwrap().slot, slot);
        }
        let error = records.reserve(record("DDD1", "b")).await.unwrap_err();
        assert_eq!(error.to_string(), "vm name \"b\" already exists (id: BBB1)");
        records.remove("BBB1").await.unwrap();
        assert_eq!(records.reserve(record("DDD1", "b")).await.unwrap().slot, 2);
        assert_eq!(records.reserve(record("EEE1", "e")).await.unwrap().uid(), FIRST_UID + 4);
    }

    #[tokio::test]
    async fn a_reference_is_an_id_then_a_name_then_a_unique_prefix_of_three() {
        let (_folder, records) = records().await;
        for (id, name) in [("ABCD1", "x"), ("ABCE2", "ABCD1-not"), ("ZZZZ3", "ABC")] {
            records.reserve(record(id, name)).await.unwrap();
        }
        for (reference, id) in
            [("ABCD1", "ABCD1"), ("x", "ABCD1"), ("ABC", "ZZZZ3"), ("ABCE", "ABCE2"), ("ZZZ", "ZZZZ3")]
        {
            assert_eq!(records.find(reference).await.unwrap().vm.id, id, "{reference}");
        }
        assert!(matches!(records.find("ZZ").await, Err(LookupError::VmNotFound(_))));
        assert!(matches!(records.find("zzz").await, Err(LookupError::VmNotFound(_))));
        records.reserve(record("ABCE3", "y")).await.unwrap();
        assert!(matches!(records.find("ABCE").await, Err(LookupError::Ambiguous(_))));
    }

    #[tokio::test]
    async fn the_files_of_a_vm_are_those_of_the_folders_that_the_record_is_in() {
        let (folder, records) = records().await;
        let mut record = record("AAA1", "a");
        let old = Path::new("/oci/old");
        record.cow = vec![old.join("run/AAA1/cow.qcow2"), old.join("run/AAA1/cow-base.qcow2")];
        record.layers = vec![old.join("oci/blobs/aa.erofs")];
        record.boot.kernel = old.join("oci/boot/bundle-bb/vmlinuz");
        record.boot.initrd = "/elsewhere/initrd.img".into();
        let disk = |path: &Path, ro| crate::model::Disk {
            path: path.display().to_string(),
            ro,
            serial: String::new(),
            role: String::new(),
        };
        record.vm.storage_configs = vec![disk(&record.layers[0], true), disk(&record.cow[0], false)];
        records.reserve(record).await.unwrap();
        let found = records.find("a").await.unwrap();
        let here = |path: &str| folder.path().join(path);
        assert_eq!(found.cow, [here("run/AAA1/cow.qcow2"), here("run/AAA1/cow-base.qcow2")]);
        assert_eq!(found.layers, [here("oci/blobs/aa.erofs")]);
        assert_eq!(found.boot.kernel, here("oci/boot/bundle-bb/vmlinuz"));
        assert_eq!(found.boot.initrd, Path::new("/elsewhere/initrd.img"), "not ours to move");
        let shown: Vec<_> = found.vm.storage_configs.iter().map(|disk| PathBuf::from(&disk.path)).collect();
        assert_eq!(shown, [here("oci/blobs/aa.erofs"), here("run/AAA1/cow.qcow2")]);
        assert_eq!(records.list().await.unwrap(), [found]);
    }

    #[tokio::test]
    async fn a_removed_record_cannot_be_saved() {
        let (_folder, records) = records().await;
        let kept = records.reserve(record("AAA1", "a")).await.unwrap();
        records.save(&kept).await.unwrap();
        records.remove("AAA1").await.unwrap();
        records.remove("AAA1").await.unwrap();
        assert!(records.save(&kept).await.is_err());
    }
}
