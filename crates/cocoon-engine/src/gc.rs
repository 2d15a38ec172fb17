//! What nothing needs any more: half-made VMs without an owner, folders without a record, links,
//! snapshot folders, blobs of images.
//!
//! Entry points: [`all`], and for what a crash leaves [`half_made`] and [`strays`]. Whoever owns a VM holds its lock, so a lock that can be had
//! says that nobody works on it.

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use cocoon_kit::files::Lock;

use crate::{
    error::{Fault, LookupError},
    model::VmState,
    vm::{Shared, tear_down},
};

/// Pause between two looks at a lock.
const LOOK: Duration = Duration::from_millis(3);
/// How many looks starting a process takes at most, as a rule: 60 ms. Looks are counted, not time: on a machine
/// that stood still meanwhile, the process did too. All half-made VMs share them, so that a command beside busy
/// makers is not slow.
const LOOKS: u32 = 20;

/// Takes everything that can go; returns one line for each thing that went.
pub(crate) async fn all(shared: &Shared) -> Result<Vec<String>, Fault> {
    let mut gone = half_made(shared).await?;
    gone.extend(strays(shared).await?);
    gone.extend(shared.snapshots.collect().await?);
    // First nobody starts, then it is asked what VMs need.
    let quiet = shared.images.quiet().await?;
    let records = shared.records.list().await?;
    if let Some(network) = &shared.config.network {
        let live: BTreeSet<String> = records.iter().map(|record| record.vm.id.clone()).collect();
        let swept = cocoon_net::links::collect(network, &live).await;
        swept.map_err(|error| Fault::new("links without a VM", error))?;
    }
    let mut needed: BTreeSet<String> = records.into_iter().flat_map(|record| record.image_blob_ids).collect();
    for snapshot in shared.snapshots.list().await? {
        needed.extend(snapshot.envelope.image_blob_ids.into_keys());
    }
    let blobs = quiet.collect(&needed).await?;
    gone.extend(blobs.into_iter().map(|blob| format!("image blob {blob}")));
    Ok(gone)
}

/// Takes down `creating` VMs that nobody is creating. One that cannot be taken down does not stop the
/// others: the next gc tries it again.
pub(crate) async fn half_made(shared: &Shared) -> Result<Vec<String>, Fault> {
    let mut gone = Vec::new();
    let mut looks = LOOKS;
    for record in shared.records.list().await? {
        if record.vm.state != VmState::Creating {
            continue;
        }
        let (name, id) = (record.vm.config.name, record.vm.id);
        match abandoned(shared, &id, &mut looks).await {
            Ok(true) => gone.push(format!("half-made VM {name} ({id})")),
            Ok(false) => {}
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                tracing::warn!(vm = %name, %error, cause, "a half-made VM could not be taken down");
            }
        }
    }
    Ok(gone)
}

/// Takes down one half-made VM, unless somebody works on it.
async fn abandoned(shared: &Shared, id: &str, looks: &mut u32) -> Result<bool, Fault> {
    let Some(lock) = free_lock(shared, id, looks).await? else { return Ok(false) };
    // Asked again under the lock: it may have become a VM, or be gone.
    match shared.records.find(id).await {
        Ok(record) if record.vm.state == VmState::Creating => {
            tear_down::all(shared, &record, lock).await?;
            Ok(true)
        }
        Err(LookupError::VmNotFound(_)) => {
            let _ = fs::remove_file(lock.path());
            Ok(false)
        }
        Err(LookupError::Fault(fault)) => Err(fault),
        _ => Ok(false),
    }
}

/// The lock of a VM that nobody works on. A process that is being started shares its maker's lock until it
/// has become QEMU, also when its maker was killed meanwhile, so a lock is tried for a moment.
async fn free_lock(shared: &Shared, id: &str, looks: &mut u32) -> Result<Option<Lock>, Fault> {
    loop {
        let lock = shared.try_lock(id)?;
        if lock.is_some() || *looks == 0 {
            return Ok(lock);
        }
        *looks -= 1;
        tokio::time::sleep(LOOK).await;
    }
}

/// Run and log folders and lock files without a record, with whatever process they still have: whoever was
/// killed before it wrote the record, or after it removed that, leaves one.
pub(crate) async fn strays(shared: &Shared) -> Result<Vec<String>, Fault> {
    let mut ids = BTreeSet::new();
    for folder in [&shared.config.run_dir, &shared.config.log_dir, &shared.config.root_dir.join("locks")] {
        ids.extend(names(folder)?);
    }
    for record in shared.records.list().await? {
        ids.remove(&record.vm.id);
    }
    let mut gone = Vec::new();
    for id in ids {
        let Some(lock) = shared.try_lock(&id)? else { continue };
        if matches!(shared.records.find(&id).await, Err(LookupError::VmNotFound(_))) {
            tear_down::parts(shared, &id, None).await?;
            let _ = fs::remove_file(lock.path());
            gone.push(format!("leftovers of VM {id}"));
        }
    }
    Ok(gone)
}

/// Names in a folder that have the form of our ids; anything else is not ours.
fn names(folder: &Path) -> Result<Vec<String>, Fault> {
    let fault = |error| Fault::new(format!("folder {}", folder.display()), error);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(fault)? {
        let name = entry.map_err(fault)?.file_name();
        let name = name.to_string_lossy();
        let name = name.strip_suffix(".lock").unwrap_or(&name);
        if is_id(name) {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Whether this has the form of our ids.
pub(crate) fn is_id(name: &str) -> bool {
    name.len() == 26 && name.chars().all(|c| c.is_ascii_uppercase() || ('2'..='7').contains(&c))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cocoon_kit::world::RealWorld;

    use super::*;
    use crate::{
        engine::Engine,
        model::VmConfig,
        records::Record,
        vm::{reserve::blank, tests::config},
    };

    #[tokio::test]
    async fn the_next_engine_takes_a_lock_file_that_nobody_holds_and_no_record_names() {
        let folder = tempfile::tempdir().unwrap();
        let shared = Shared::open(config(folder.path()), Arc::new(RealWorld)).await.unwrap();
        let [left, held] = ["AAAAAAAAAAAAAAAAAAAAAAAAAA", "BBBBBBBBBBBBBBBBBBBBBBBBBB"];
        drop(shared.try_lock(left).unwrap().unwrap());
        let _maker = shared.try_lock(held).unwrap().unwrap();
        Engine::open(config(folder.path()), Arc::new(RealWorld)).await.unwrap();
        assert_eq!([left, held].map(|id| shared.lock_file(id).exists()), [false, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_made_vm_goes_once_its_last_helper_has_started_and_not_while_somebody_makes_it() {
        let folder = tempfile::tempdir().unwrap();
        let shared = Shared::open(config(folder.path()), Arc::new(RealWorld)).await.unwrap();
        for (id, held_for, goes) in [
            ("AAAAAAAAAAAAAAAAAAAAAAAAAA", Duration::ZERO, true),
            ("BBBBBBBBBBBBBBBBBBBBBBBBBB", Duration::from_millis(15), true),
            ("CCCCCCCCCCCCCCCCCCCCCCCCCC", Duration::from_secs(1), false),
        ] {
            let config = VmConfig { name: format!("vm-{held_for:?}"), ..VmConfig::default() };
            let record = Record::new(blank(id.into(), config, shared.world.now()));
            shared.records.reserve(record).await.unwrap();
            let lock = shared.try_lock(id).unwrap().unwrap();
            let holder = tokio::spawn(async move {
                tokio::time::sleep(held_for).await;
                drop(lock);
            });
            let begun = tokio::time::Instant::now();
            assert_eq!(half_made(&shared).await.unwrap().len(), usize::from(goes), "{held_for:?}");
            assert!(begun.elapsed() < Duration::from_millis(500), "a busy maker is not waited for");
            holder.await.unwrap();
        }
    }

    #[test]
    fn only_names_with_the_form_of_an_id_are_ours() {
        for (name, ours) in [
            ("ABCDEFGHIJKLMNOPQRSTUVWXY2", true),
            ("abcdefghijklmnopqrstuvwxy2", false),
            ("ABCDEFGHIJKLMNOPQRSTUVWXY1", false),
            ("ABC", false),
            ("network.json", false),
        ] {
            assert_eq!(is_id(name), ours, "{name}");
        }
    }
}
