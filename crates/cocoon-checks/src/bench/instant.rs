//! Ports of the node agent that do everything at once: what is left of an operation's time is the
//! agent's own.
//!
//! Entry point: [`ports`]. Owner records are the real ones, in SQLite: they are the agent's own work.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use cocoon_guest::host::Exec;
use cocoon_node::{
    ports::{
        Awaited, CloneRequest, Guest, GuestSession, Images, Leases, PortError, PortResult, Ports, Prober,
        PushRequest, Registry, RunRequest, SnapshotView, Snapshots, TagView, Upkeep, VmPhase, VmView, Vms,
        real::{SqliteRecords, ThisHost},
    },
    reason::Reason,
};

/// Ports over nothing, with records in `folder`.
pub(super) fn ports(folder: &Path) -> anyhow::Result<Ports> {
    let all = Arc::new(Instant::default());
    Ok(Ports {
        vms: Arc::clone(&all) as _,
        upkeep: Arc::clone(&all) as _,
        snapshots: Arc::clone(&all) as _,
        images: Arc::clone(&all) as _,
        guest: Arc::clone(&all) as _,
        registry: Some(Arc::clone(&all) as _),
        leases: Arc::clone(&all) as _,
        prober: all,
        records: Arc::new(SqliteRecords::open(&folder.join("node.db"))?),
        host: Arc::new(ThisHost::new(folder.to_owned())),
    })
}

#[derive(Debug, Default)]
struct Things {
    vms: BTreeMap<String, VmView>,
    snapshots: BTreeMap<String, SnapshotView>,
    tags: BTreeMap<(String, String), TagView>,
    made: u32,
}

#[derive(Debug, Default)]
struct Instant(Mutex<Things>);

impl Instant {
    fn things(&self) -> MutexGuard<'_, Things> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self, name: &str) -> VmView {
        let mut things = self.things();
        things.made += 1;
        let [_, _, high, low] = things.made.to_be_bytes();
        let vm = VmView {
            id: format!("{:026}", things.made),
            name: name.to_owned(),
            phase: VmPhase::Running,
            pid: 1,
            macs: vec![format!("02:00:00:00:{high:02x}:{low:02x}")],
            hypervisor: "qemu".into(),
            came_up: true,
            links_down: false,
            stopped_in_order: false,
            started_at: None,
            starved: None,
            lost_tap: None,
        };
        things.vms.insert(name.to_owned(), vm.clone());
        vm
    }

    fn phase(&self, vm: &str, phase: VmPhase) -> PortResult<VmView> {
        let mut things = self.things();
        let vm = things.vms.get_mut(vm).ok_or_else(|| gone(vm))?;
        vm.phase = phase;
        Ok(vm.clone())
    }

    fn snapshot(&self, name: &str) -> SnapshotView {
        let mut things = self.things();
        things.made += 1;
        let (id, name) = (format!("S{:025}", things.made), name.to_owned());
        let view = SnapshotView { id, name: name.clone(), hypervisor: "qemu".into() };
        things.snapshots.insert(name, view.clone());
        view
    }
}

fn gone(what: &str) -> PortError {
    PortError::new(Reason::VMGone, format!("there is no {what}"))
}

#[async_trait]
impl Vms for Instant {
    async fn list(&self) -> PortResult<Vec<VmView>> {
        Ok(self.things().vms.values().cloned().collect())
    }

    async fn inspect(&self, vm: &str) -> PortResult<Option<VmView>> {
        Ok(self.things().vms.values().find(|known| known.name == vm || known.id == vm).cloned())
    }

    async fn run(&self, request: RunRequest) -> PortResult<VmView> {
        Ok(self.make(&request.name))
    }

    async fn clone_vm(&self, request: CloneRequest) -> PortResult<VmView> {
        Ok(self.make(&request.name))
    }

    async fn start(&self, vm: &str) -> PortResult<VmView> {
        self.phase(vm, VmPhase::Running)
    }

    async fn remove(&self, vm: &str) -> PortResult<()> {
        self.things().vms.retain(|name, known| name != vm && known.id != vm);
        Ok(())
    }

    /// Nobody else is there who could let a guest go on.
    async fn remove_captured(&self, vm: &str, _snapshot: &str) -> PortResult<()> {
        Vms::remove(self, vm).await
    }

    async fn capture(&self, vm: &str, name: &str) -> PortResult<SnapshotView> {
        self.phase(vm, VmPhase::Paused)?;
        Ok(self.snapshot(name))
    }

    async fn save(&self, _vm: &str, name: &str) -> PortResult<SnapshotView> {
        Ok(self.snapshot(name))
    }

    async fn resume(&self, vm: &str) -> PortResult<()> {
        self.phase(vm, VmPhase::Running).map(drop)
    }
}

#[async_trait]
impl Upkeep for Instant {
    async fn tend(&self) -> PortResult<()> {
        Ok(())
    }

    async fn capture_size(&self, _vm: &str) -> PortResult<Option<u64>> {
        Ok(None)
    }

    async fn disk_used(&self) -> PortResult<u64> {
        Ok(0)
    }
}

#[async_trait]
impl Snapshots for Instant {
    async fn get(&self, name: &str) -> PortResult<Option<SnapshotView>> {
        Ok(self.things().snapshots.get(name).cloned())
    }

    async fn remove(&self, name: &str) -> PortResult<()> {
        self.things().snapshots.remove(name);
        Ok(())
    }
}

#[async_trait]
impl Images for Instant {
    async fn ensure(&self, image: &str, _force: bool) -> PortResult<String> {
        Ok(image.to_owned())
    }

    async fn here(&self, _wanted: &BTreeSet<Awaited>) -> PortResult<BTreeSet<Awaited>> {
        Ok(BTreeSet::new())
    }
}

#[async_trait]
impl Guest for Instant {
    async fn exec(&self, vm: &str, _exec: Exec) -> PortResult<GuestSession> {
        Err(PortError::new(Reason::GuestSilent, format!("VM {vm} has no guest")))
    }

    async fn console(&self, vm: &str) -> PortResult<PathBuf> {
        Err(gone(vm))
    }
}

#[async_trait]
impl Registry for Instant {
    async fn facts(&self, repository: &str, tag: &str) -> PortResult<Option<TagView>> {
        Ok(self.things().tags.get(&(repository.to_owned(), tag.to_owned())).cloned())
    }

    async fn push(&self, request: PushRequest) -> PortResult<String> {
        let mut things = self.things();
        let digest = format!("sha256:{:0>64}", request.snapshot.to_lowercase());
        let snapshot_id = things
            .snapshots
            .values()
            .find(|known| known.id == request.snapshot || known.name == request.snapshot)
            .map(|known| known.id.clone())
            .ok_or_else(|| gone(&request.snapshot))?;
        let view = TagView {
            digest: digest.clone(),
            snapshot_id,
            base_image: request.base_image,
            vm_name: request.vm_name,
        };
        things.tags.insert((request.repository, request.tag), view);
        Ok(digest)
    }

    async fn push_blobs(&self, _request: PushRequest) -> PortResult<u64> {
        Ok(0)
    }

    fn throughput(&self) -> Option<u64> {
        None
    }

    async fn pull(&self, _repository: &str, _reference: &str, name: &str) -> PortResult<SnapshotView> {
        Ok(self.snapshot(name))
    }

    async fn drop_tag(&self, repository: &str, tag: &str, _digest: &str, _snapshot: &str) -> PortResult<()> {
        self.things().tags.remove(&(repository.to_owned(), tag.to_owned()));
        Ok(())
    }
}

#[async_trait]
impl Leases for Instant {
    async fn lookup(&self, mac: &str) -> PortResult<Option<Ipv4Addr>> {
        let last = mac.rsplit(':').next().and_then(|hex| u8::from_str_radix(hex, 16).ok());
        Ok(last.map(|last| Ipv4Addr::new(172, 31, 240, last)))
    }

    async fn held(&self) -> PortResult<Vec<String>> {
        Ok(Vec::new())
    }

    async fn release(&self, _mac: &str) -> PortResult<()> {
        Ok(())
    }
}

#[async_trait]
impl Prober for Instant {
    async fn probe(&self, _ip: Ipv4Addr, _port: Option<u16>, _limit: Duration) -> Result<(), String> {
        Ok(())
    }

    fn is_own(&self, _ip: Ipv4Addr) -> bool {
        false
    }
}
