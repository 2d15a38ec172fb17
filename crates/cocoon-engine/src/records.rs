//! VM records: one row a VM, written whole.
//!
//! Entry point: [`Records`]. A row exists before anything else of a VM does and goes after everything
//! else is gone, so whatever a crash leaves is found by its row. Invariants (kept by the database, over
//! all processes): ids, names and user slots are unique.

use std::{collections::BTreeSet, path::PathBuf};

use rusqlite::{Connection, OptionalExtension as _, params};
use serde::{Deserialize, Serialize};

use crate::{
    db::Db,
    error::{BringUpError, Fault, LookupError},
    image::RecordedBoot,
    model::Vm,
    process::Process,
    qemu::{machine::Machine, memory::FileId},
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
            ram: None,
            links_down: false,
            identity_is_new: false,
            captured_as: None,
        }
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
}

const STEP: &str = "engine records: VMs";

impl Records {
    /// Creates the table if needed.
    pub(crate) async fn open(db: Db) -> Result<Self, Fault> {
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
        Ok(Self { db })
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
        let mut records = bodies.iter().map(|body| parse(body)).collect::<Result<Vec<_>, _>>()?;
        records.sort_by(|a: &Record, b| (a.vm.created_at, &a.vm.id).cmp(&(b.vm.created_at, &b.vm.id)));
        Ok(records)
    }

    /// One record by id, name or unique prefix of an id.
    pub(crate) async fn find(&self, reference: &str) -> Result<Record, LookupError> {
        let wanted = reference.to_owned();
        let found = self.db.call(STEP, move |connection| find(connection, "vms", &wanted)).await?;
        match found.as_slice() {
            [] => Err(LookupError::VmNotFound(reference.to_owned())),
            [body] => Ok(parse(body)?),
            _ => Err(LookupError::Ambiguous(reference.to_owned())),
        }
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

fn parse(body: &str) -> Result<Record, Fault> {
    serde_json::from_str(body).map_err(|error| Fault::new(STEP, error))
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
        let records = Records::open(db).await.unwrap();
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
    async fn a_removed_record_cannot_be_saved() {
        let (_folder, records) = records().await;
        let kept = records.reserve(record("AAA1", "a")).await.unwrap();
        records.save(&kept).await.unwrap();
        records.remove("AAA1").await.unwrap();
        records.remove("AAA1").await.unwrap();
        assert!(records.save(&kept).await.is_err());
    }
}
