//! A snapshot that comes from outside: every file is checked before it gets a name.
//!
//! Entry points: [`adopt`], [`files`]. Paths in the sidecar are never followed; what a VM is built from
//! stands in `qemu.json` and is checked there.

use std::{collections::BTreeMap, fs, io, path::Path};

use cocoon_oci::snapshot::{Empty, Envelope, SourceFile};

use super::{
    description::{COCOON_JSON, COW, Description, MEMORY_RANGES, MemoryMode, QEMU_JSON, QEMU_STATE},
    store::Stage,
};
use crate::{
    error::{ChangeError, Fault, LookupError},
    gc::is_id,
    model::Snapshot,
    vm::{
        Shared, blocking, capture,
        clone::{disk_header, read_bounded},
    },
};

/// Largest device state; a full stream may hold all memory besides.
const MAX_STATE: u64 = 256 << 20;
/// Largest sidecar.
const MAX_SIDECAR: u64 = 1 << 20;

/// Makes staged files the snapshot `name`.
pub(crate) async fn adopt(
    shared: &Shared,
    stage: Stage,
    name: &str,
    mut envelope: Envelope,
) -> Result<Snapshot, ChangeError> {
    capture::check_name(name)?;
    let folder = stage.folder().to_owned();
    let checked = blocking(&format!("files of snapshot {name}"), move || check(&folder)).await?;
    let description =
        checked.map_err(|why| ChangeError::Invalid(format!("snapshot {name} is refused: {why}")))?;
    if envelope.hypervisor != "qemu" {
        let other = &envelope.hypervisor;
        return Err(ChangeError::Invalid(format!(
            "snapshot {name} is refused: it was made by {other:?}, this engine restores snapshots of \"qemu\""
        )));
    }
    name.clone_into(&mut envelope.name);
    envelope.cpu = description.machine.cpus;
    envelope.memory = description.machine.memory;
    envelope.storage = description.storage;
    envelope.nics = description.machine.nics() as u64;
    envelope.image_blob_ids = description.image_blob_ids.into_iter().map(|id| (id, Empty {})).collect();
    envelope.id = id(shared, &envelope.id).await?;
    let snapshot = Snapshot { envelope, created_at: shared.world.now(), folder: stage.folder().to_owned() };
    shared.snapshots.publish(stage, snapshot, true).await
}

/// The snapshot's own id, unless it is malformed or taken: an older snapshot keeps its folder until the
/// new one is complete, also when it is replaced.
async fn id(shared: &Shared, wanted: &str) -> Result<String, Fault> {
    if is_id(wanted) {
        match shared.snapshots.find(wanted).await {
            Err(LookupError::SnapshotNotFound(_)) => return Ok(wanted.to_owned()),
            Err(LookupError::Fault(fault)) => return Err(fault),
            _ => {}
        }
    }
    Ok(shared.world.engine_id())
}

/// Checks kinds, names, sizes and headers. The inner error is the snapshot's fault, the outer is ours.
fn check(folder: &Path) -> io::Result<Result<Description, String>> {
    let mut sizes = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let meta = fs::symlink_metadata(entry.path())?;
        if !meta.is_file() {
            return Ok(Err(format!("{name:?} is not a regular file")));
        }
        sizes.insert(name, meta.len());
    }
    if !sizes.contains_key(QEMU_JSON) {
        return Ok(Err(format!("{QEMU_JSON} is missing; it was not made by this engine")));
    }
    let description = match Description::parse(&read_bounded(&folder.join(QEMU_JSON))?) {
        Ok(description) => description,
        Err(error) => return Ok(Err(cocoon_kit::failure::chain(&error))),
    };
    if let Err(why) = check_sizes(&sizes, &description) {
        return Ok(Err(why));
    }
    match disk_header(&folder.join(COW)) {
        Ok(header) if header.size == description.storage => Ok(Ok(description)),
        Ok(_) => Ok(Err(format!("{COW} is not a disk of {} bytes", description.storage))),
        Err(error) => Ok(Err(error.to_string())),
    }
}

/// The right files, each of a length that it can have.
fn check_sizes(sizes: &BTreeMap<String, u64>, description: &Description) -> Result<(), String> {
    let ranges = description.memory_mode == MemoryMode::Ranges;
    let memory = description.machine.memory;
    for name in sizes.keys() {
        let known = [QEMU_JSON, QEMU_STATE, COW, COCOON_JSON].contains(&name.as_str());
        if !(known || ranges && name == MEMORY_RANGES) {
            return Err(format!("{name:?} is no file of such a snapshot"));
        }
    }
    if ranges && sizes.get(MEMORY_RANGES) != Some(&memory) {
        return Err(format!("{MEMORY_RANGES} is not {memory} bytes long"));
    }
    let most = if ranges { MAX_STATE } else { MAX_STATE + memory + memory / 8 };
    if !sizes.get(QEMU_STATE).is_some_and(|length| (1..=most).contains(length)) {
        return Err(format!("{QEMU_STATE} is missing, empty or longer than {most} bytes"));
    }
    if sizes.get(COCOON_JSON).is_some_and(|length| *length > MAX_SIDECAR) {
        return Err(format!("{COCOON_JSON} is longer than {MAX_SIDECAR} bytes"));
    }
    if sizes.contains_key(COW) { Ok(()) } else { Err(format!("{COW} is missing")) }
}

/// The files of a complete snapshot, by name.
pub(crate) fn files(folder: &Path) -> io::Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        files.push(SourceFile { name, path: entry.path(), mode: 0o444 });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}
