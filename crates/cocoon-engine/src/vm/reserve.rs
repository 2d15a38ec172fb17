//! The first phase of every VM: an id with its lock, a name, and all that is known before it exists.
//!
//! Entry points: [`reserve`], [`fill`]. From here on the VM is a [`Half`]: it becomes a VM or is taken
//! down, whatever happens to whoever waits for it.

use std::{
    collections::BTreeMap,
    future::Future,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{Shared, tear_down};
use crate::{
    error::BringUpError,
    hold::Hold,
    image::BootSet,
    model::{Disk, Hypervisor, NetworkInterface, Vm, VmConfig, VmState},
    qemu::machine::{MAX_LAYERS, Machine},
    records::{BootRecord, Record},
};

/// `[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}`.
pub(crate) fn check_name(name: &str) -> Result<(), BringUpError> {
    let fits = (1..=63).contains(&name.len());
    let first = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if fits && first && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
        return Ok(());
    }
    Err(BringUpError::Invalid(format!(
        "VM name {name:?} cannot be used: 1 to 63 letters, digits, dots, dashes and underscores, \
         the first a letter or digit"
    )))
}

/// A VM in the making. It ends as a VM or is taken down, also when whoever waits for it goes away: then what still
/// blocks for it ends first, because it may be starting the QEMU that is to be taken down.
pub(crate) struct Half {
    shared: Arc<Shared>,
    parts: Option<(Record, Hold)>,
    reserved: Record,
}

impl Half {
    /// The record as it was reserved.
    pub(crate) const fn record(&self) -> &Record {
        &self.reserved
    }

    /// Does `work` of the VM's bring-up under its lock.
    pub(crate) async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        match &self.parts {
            Some((_, hold)) => hold.during(work).await,
            None => work.await,
        }
    }

    /// Keeps the VM, or takes down what there is of it.
    pub(crate) async fn end(mut self, done: Result<Vm, BringUpError>) -> Result<Vm, BringUpError> {
        if let Some((record, hold)) = self.parts.take()
            && done.is_err()
        {
            tear_down::unwind(&self.shared, &record, hold.alone().await).await;
        }
        done
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        let Some((record, hold)) = self.parts.take() else { return };
        let shared = Arc::clone(&self.shared);
        // Without a runtime the process ends, and the next one finds the record.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { tear_down::unwind(&shared, &record, hold.alone().await).await });
        }
    }
}

/// Takes a new id's lock, then the name. The record is written before anything else exists.
pub(crate) async fn reserve(
    shared: &Arc<Shared>,
    config: VmConfig,
    fill: impl FnOnce(&mut Record),
) -> Result<Half, BringUpError> {
    let id = shared.world.engine_id();
    let lock = shared.lock(&id, "a VM in the making").await?;
    let mut record = Record::new(blank(id, config, shared.world.now()));
    fill(&mut record);
    match shared.records.reserve(record).await {
        Ok(record) => {
            let parts = Some((record.clone(), Hold::new(lock)));
            Ok(Half { shared: Arc::clone(shared), reserved: record, parts })
        }
        Err(error) => {
            let _ = std::fs::remove_file(lock.path());
            Err(error)
        }
    }
}

/// A VM whose name and id are taken, and nothing else yet.
pub(crate) fn blank(id: String, config: VmConfig, now: jiff::Timestamp) -> Vm {
    Vm {
        id,
        hypervisor: Hypervisor::Qemu,
        state: VmState::Creating,
        config,
        pid: 0,
        socket_path: String::new(),
        network_configs: Vec::new(),
        storage_configs: Vec::new(),
        first_booted: false,
        snapshot_ids: BTreeMap::new(),
        paused: false,
        cloned_from: String::new(),
        warnings: Vec::new(),
        links_down: false,
        disk_full: false,
        transition_generation: 0,
        created_at: now,
        updated_at: now,
        started_at: None,
        stopped_at: None,
    }
}

/// Everything about a VM that is known before it exists.
pub(crate) fn fill(shared: &Shared, record: &mut Record, boot: &BootSet, machine: Machine) {
    let run = shared.run_folder(&record.vm.id);
    record.boot = BootRecord {
        kernel: boot.kernel.clone(),
        initrd: boot.initrd.clone(),
        cmdline: cmdline(&record.vm.config.name, boot.layers.len()),
    };
    record.recorded_boot = Some(boot.recorded());
    record.layers = boot.layers.iter().map(|layer| layer.path.clone()).collect();
    record.image_blob_ids.clone_from(&boot.blob_ids);
    record.cow = vec![run.cow()];
    record.vm.network_configs = interfaces(shared, &record.vm.id, machine.nics());
    record.vm.storage_configs = storage(&record.layers, &run.cow());
    record.machine = Some(machine);
}

fn cmdline(name: &str, layers: usize) -> String {
    let serials: Vec<String> = (0..layers).rev().map(|index| format!("cocoon-layer{index}")).collect();
    format!(
        "console=ttyS0 loglevel=3 panic=-1 net.ifnames=0 boot=cocoon-overlay rw cocoon.layers={} \
         cocoon.cow=cocoon-cow cocoon.hostname={name}",
        serials.join(",")
    )
}

fn interfaces(shared: &Shared, id: &str, nics: usize) -> Vec<NetworkInterface> {
    let bridge = shared.config.network.as_ref().map(|network| network.bridge.clone()).unwrap_or_default();
    let short: String = id.chars().take(8).collect::<String>().to_lowercase();
    (0..nics)
        .map(|index| NetworkInterface {
            tap: format!("bt{short}-{index}"),
            mac: random_mac(shared),
            backend: "bridge".into(),
            bridge_dev: bridge.clone(),
        })
        .collect()
}

/// Random, locally administered, unicast.
fn random_mac(shared: &Shared) -> String {
    let mut bytes = [0_u8; 6];
    shared.world.random(&mut bytes);
    bytes[0] = (bytes[0] & 0xfc) | 0x02;
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

fn storage(layers: &[PathBuf], cow: &Path) -> Vec<Disk> {
    let layer = |(index, path): (usize, &PathBuf)| Disk {
        path: path.display().to_string(),
        ro: true,
        serial: format!("cocoon-layer{index}"),
        role: "layer".into(),
    };
    let mut disks: Vec<Disk> = layers.iter().enumerate().map(layer).collect();
    disks.push(Disk {
        path: cow.display().to_string(),
        ro: false,
        serial: "cocoon-cow".into(),
        role: "cow".into(),
    });
    disks
}

const _: () = assert!(MAX_LAYERS >= crate::image::MAX_LAYERS);
