//! VMs and local snapshots, by our own engine in this process.

use std::{io, os::unix::fs::MetadataExt as _, path::PathBuf};

use async_trait::async_trait;
use cocoon_engine::{
    engine::Engine,
    error::{BringUpError, ChangeError, LookupError},
    model::{CloneIdentity, CloneSpec, RunSpec, Snapshot, Vm, VmState},
};
use cocoon_kit::failure;

use crate::{
    ports::{
        CloneRequest, PortError, PortResult, RunRequest, SnapshotView, Snapshots, Upkeep, VmPhase, VmView,
        Vms, real::taps,
    },
    reason::Reason,
};

/// The engine as a port.
#[derive(Debug, Clone)]
pub struct EnginePort {
    engine: Engine,
}

impl EnginePort {
    /// The port of this engine.
    #[must_use]
    pub const fn new(engine: Engine) -> Self {
        Self { engine }
    }
}

#[async_trait]
impl Vms for EnginePort {
    async fn list(&self) -> PortResult<Vec<VmView>> {
        let vms = self.engine.list().await.map_err(|error| lookup("listing VMs", error))?;
        Ok(vms.into_iter().map(vm_view).collect())
    }

    async fn inspect(&self, vm: &str) -> PortResult<Option<VmView>> {
        match self.engine.inspect(vm).await {
            // A name must not be found as the prefix of somebody's id.
            Ok(found) if found.config.name == vm || found.id == vm => Ok(Some(vm_view(found))),
            Ok(_) | Err(LookupError::VmNotFound(_)) => Ok(None),
            Err(error) => Err(lookup(&format!("inspecting VM {vm}"), error)),
        }
    }

    async fn run(&self, request: RunRequest) -> PortResult<VmView> {
        let what = format!("booting VM {} from {}", request.name, request.image);
        let RunRequest { name, image, cpu, memory, storage } = request;
        let spec = RunSpec { name, image, cpu, memory, storage, nics: self.nics() };
        self.engine.run(spec).await.map(vm_view).map_err(|error| bring_up(what, error))
    }

    async fn clone_vm(&self, request: CloneRequest) -> PortResult<VmView> {
        let what = format!("cloning VM {} from snapshot {}", request.name, request.snapshot);
        let identity = if request.same_machine { CloneIdentity::Same } else { CloneIdentity::New };
        let spec = CloneSpec { name: request.name, snapshot: request.snapshot, identity };
        self.engine.clone_vm(spec).await.map(vm_view).map_err(|error| bring_up(what, error))
    }

    async fn start(&self, vm: &str) -> PortResult<VmView> {
        let started = self.engine.start(vm).await;
        started.map(vm_view).map_err(|error| bring_up(format!("starting VM {vm}"), error))
    }

    async fn remove(&self, vm: &str) -> PortResult<()> {
        match self.engine.remove(vm, true).await {
            Ok(()) | Err(ChangeError::Lookup(LookupError::VmNotFound(_))) => Ok(()),
            Err(error) => Err(change(format!("removing VM {vm}"), error)),
        }
    }

    async fn remove_captured(&self, vm: &str, snapshot: &str) -> PortResult<()> {
        match self.engine.remove_captured(vm, snapshot).await {
            Ok(()) | Err(ChangeError::Lookup(LookupError::VmNotFound(_))) => Ok(()),
            Err(error @ ChangeError::WentOn(_)) => {
                Err(change(format!("removing VM {vm}, whose hibernation begins anew now"), error))
            }
            Err(error) => Err(change(format!("removing VM {vm}"), error)),
        }
    }

    async fn capture(&self, vm: &str, name: &str) -> PortResult<SnapshotView> {
        let taken = self.engine.capture(vm, name).await;
        taken.map(snapshot_view).map_err(|error| change(format!("capturing VM {vm}"), error))
    }

    async fn save(&self, vm: &str, name: &str) -> PortResult<SnapshotView> {
        let saved = self.engine.save(vm, name, "").await;
        saved.map(snapshot_view).map_err(|error| change(format!("saving VM {vm} as {name}"), error))
    }

    async fn resume(&self, vm: &str) -> PortResult<()> {
        self.engine.resume(vm).await.map_err(|error| change(format!("resuming VM {vm}"), error))
    }
}

#[async_trait]
impl Upkeep for EnginePort {
    async fn tend(&self) -> PortResult<()> {
        let done = self.engine.tend().await;
        done.map(drop).map_err(|error| lookup("the upkeep of VMs", error.into()))
    }

    async fn capture_size(&self, vm: &str) -> PortResult<Option<u64>> {
        match self.engine.capture_size(vm).await {
            Err(LookupError::VmNotFound(_)) => Ok(None),
            counted => {
                counted.map_err(|error| lookup(&format!("counting what a capture of VM {vm} holds"), error))
            }
        }
    }

    async fn disk_used(&self) -> PortResult<u64> {
        let vms = self.engine.list().await.map_err(|error| lookup("listing VMs", error))?;
        let disks = vms.into_iter().flat_map(|vm| vm.storage_configs).filter(|disk| !disk.ro);
        let paths: Vec<PathBuf> = disks.map(|disk| disk.path.into()).collect();
        allocated("counting what the VMs' disks take", paths).await
    }
}

impl EnginePort {
    fn nics(&self) -> usize {
        usize::from(self.engine.config().network.is_some())
    }
}

#[async_trait]
impl Snapshots for EnginePort {
    async fn get(&self, name: &str) -> PortResult<Option<SnapshotView>> {
        match self.engine.snapshot(name).await {
            Ok(found) if found.envelope.name == name => Ok(Some(snapshot_view(found))),
            Ok(_) | Err(LookupError::SnapshotNotFound(_)) => Ok(None),
            Err(error) => Err(lookup(&format!("looking for snapshot {name}"), error)),
        }
    }

    async fn remove(&self, name: &str) -> PortResult<()> {
        if Snapshots::get(self, name).await?.is_none() {
            return Ok(());
        }
        match self.engine.snapshot_remove(name).await {
            Ok(()) | Err(LookupError::SnapshotNotFound(_)) => Ok(()),
            Err(error) => Err(lookup(&format!("removing snapshot {name}"), error)),
        }
    }
}

/// Bytes that files really take. A file that is gone takes none; one that cannot be looked at may take any number,
/// which is an error and never nothing.
pub(super) async fn allocated(what: &str, paths: Vec<PathBuf>) -> PortResult<u64> {
    const BLOCK: u64 = 512;
    let blocks = |path: PathBuf| match std::fs::metadata(&path) {
        Ok(facts) => Ok(facts.blocks()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
    };
    let count = move || paths.into_iter().map(blocks).sum::<io::Result<u64>>();
    let counted =
        tokio::task::spawn_blocking(count).await.map_err(io::Error::other).and_then(|counted| counted);
    counted
        .map(|blocks| blocks.saturating_mul(BLOCK))
        .map_err(|error| PortError::caused(Reason::EngineUnavailable, what, error))
}

fn vm_view(vm: Vm) -> VmView {
    let phase = match (vm.state, vm.paused) {
        (VmState::Creating, _) => VmPhase::Creating,
        (VmState::Running, true) => VmPhase::Paused,
        (VmState::Running, false) => VmPhase::Running,
        (VmState::Created | VmState::Stopped | VmState::Error | VmState::Stale, _) => VmPhase::Stopped,
    };
    let stopped_in_order = vm.state == VmState::Stopped;
    // The last warning is the one about it.
    let starved = vm.disk_full.then(|| vm.warnings.last().cloned().unwrap_or_default());
    let taps = vm.network_configs.iter().map(|nic| nic.tap.as_str());
    let lost_tap = if vm.state == VmState::Running { taps::lost(vm.pid, taps) } else { None };
    VmView {
        id: vm.id,
        name: vm.config.name,
        phase,
        pid: vm.pid,
        macs: vm.network_configs.into_iter().map(|nic| nic.mac.to_lowercase()).collect(),
        hypervisor: hypervisor_word(&vm.hypervisor),
        came_up: vm.first_booted,
        links_down: vm.links_down,
        stopped_in_order,
        started_at: vm.started_at,
        starved,
        lost_tap,
    }
}

/// The contract's word for a hypervisor.
fn hypervisor_word(hypervisor: &cocoon_engine::model::Hypervisor) -> String {
    serde_json::to_value(hypervisor)
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// A snapshot of the engine as the planner sees it.
pub(super) fn snapshot_view(snapshot: Snapshot) -> SnapshotView {
    let envelope = snapshot.envelope;
    SnapshotView { id: envelope.id, name: envelope.name, hypervisor: envelope.hypervisor }
}

/// A failed look-up.
pub(super) fn lookup(what: &str, error: LookupError) -> PortError {
    PortError::caused(Reason::EngineUnavailable, what, error)
}

fn bring_up(what: String, error: BringUpError) -> PortError {
    let reason = match &error {
        BringUpError::ImageNotResolved(_) | BringUpError::Lookup(LookupError::ImageNotFound(_)) => {
            Reason::ImageNotFound
        }
        BringUpError::Lookup(LookupError::SnapshotNotFound(_)) => Reason::SnapshotNotFound,
        BringUpError::SnapshotIncompatible { .. } => Reason::SnapshotIncompatible,
        BringUpError::GuestSilent { .. } => Reason::GuestSilent,
        BringUpError::HostMissing { .. } => Reason::HostMissing,
        _ if failure::is_disk_full(&error) => Reason::DiskFull,
        _ => Reason::CreateFailed,
    };
    PortError::caused(reason, what, error)
}

/// A failed change.
pub(super) fn change(what: String, error: ChangeError) -> PortError {
    let reason = match &error {
        ChangeError::DiskFull { .. } => Reason::DiskFull,
        ChangeError::WentOn(_) => Reason::HibernateOutrun,
        ChangeError::Unloadable { .. } => Reason::StateUnloadable,
        _ if failure::is_disk_full(&error) => Reason::DiskFull,
        _ => Reason::EngineUnavailable,
    };
    PortError::caused(reason, what, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_found_no_space_runs_and_carries_the_engines_sentence() {
        let shown = |disk_full: bool| {
            let vm = serde_json::json!({
                "id": "A", "hypervisor": "qemu", "state": "running", "config": {"name": "vm"}, "pid": 7,
                "network_configs": [], "storage_configs": [], "first_booted": true, "snapshot_ids": {},
                "warnings": ["another", "no space"], "disk_full": disk_full,
                "created_at": "2026-01-02T03:04:05Z", "updated_at": "2026-01-02T03:04:05Z",
            });
            vm_view(serde_json::from_value(vm).unwrap())
        };
        let starved = shown(true);
        assert_eq!((starved.phase, starved.starved.as_deref()), (VmPhase::Running, Some("no space")));
        assert_eq!(shown(false).starved, None);
    }

    #[test]
    fn what_a_step_must_know_of_a_refused_change_has_a_word_of_its_own() {
        let unloadable = || ChangeError::Unloadable {
            vm: "vm".into(),
            version: "7.2".into(),
            theirs: "pc-q35-7.1".into(),
            ours: "pc-q35-7.2".into(),
        };
        let rows = [
            (ChangeError::WentOn("vm".into()), "HibernateOutrun"),
            (unloadable(), "StateUnloadable"),
            (ChangeError::NotRunning("vm".into()), "HibernateSnapshotFailed"),
        ];
        for (error, word) in rows {
            let trouble =
                change("capturing VM vm".into(), error).trouble().r#as(Reason::HibernateSnapshotFailed);
            assert_eq!(trouble.reason.to_string(), word, "{trouble}");
        }
        assert!(change("capturing".into(), unloadable()).trouble().message.contains("cocoon vm stop vm"));
    }

    #[tokio::test]
    async fn a_disk_counts_with_what_it_takes_not_with_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let [sparse, full, gone] = ["sparse", "full", "gone"].map(|name| folder.path().join(name));
        std::fs::File::create(&sparse).unwrap().set_len(1 << 30).unwrap();
        std::fs::write(&full, vec![1_u8; 1 << 20]).unwrap();
        std::fs::File::open(&full).unwrap().sync_all().unwrap();
        let used = allocated("counting", vec![sparse, full, gone]).await.unwrap();
        assert!((1 << 20..2 << 20).contains(&used), "{used}");
    }

    #[tokio::test]
    async fn a_disk_that_cannot_be_looked_at_is_an_error_that_names_it_and_never_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, [1]).unwrap();
        let below = file.join("disk");
        let error = allocated("counting", vec![file, below.clone()]).await.unwrap_err();
        assert!(error.trouble().message.contains(&below.display().to_string()), "{error:?}");
    }
}
