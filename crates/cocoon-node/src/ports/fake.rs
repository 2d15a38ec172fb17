//! In-memory ports for tests: a small world of VMs, snapshots and tags that checks I1 and I3 by itself.
//!
//! Every guest has a `state`, a number that grows while it runs; snapshots and tags hold the state they
//! were taken at. So a test can tell what was lost. Failures and kills are injected by call name.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use cocoon_guest::host::Exec;
use tokio::sync::Notify;

use super::*;
use crate::record::{OwnerRecord, Phase};

/// A record of a running VM.
pub(crate) fn record(vm_name: &str) -> OwnerRecord {
    let pod = crate::owner::stage::pod("demo-0", "uid-1", &[]);
    let wish = crate::wish::read(&pod, &crate::config::NodeConfig::new("n"), true).unwrap();
    OwnerRecord {
        vm_name: vm_name.to_owned(),
        vm_id: "ID1".to_owned(),
        macs: vec!["02:00:00:00:00:01".to_owned()],
        ..OwnerRecord::new(&wish, jiff::Timestamp::UNIX_EPOCH, Phase::Up)
    }
}

/// A guest.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    pub(crate) view: VmView,
    /// What the guest has done so far.
    pub(crate) state: u64,
    /// The guest truly stands still, whatever the engine's flag in `view` says.
    pub(crate) frozen: bool,
}

/// A snapshot, local or behind a tag.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Held {
    pub(crate) id: String,
    pub(crate) state: u64,
    pub(crate) base_image: String,
    /// The VM that a push stamped.
    pub(crate) vm_name: String,
}

#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) vms: BTreeMap<String, Machine>,
    pub(crate) snapshots: BTreeMap<String, Held>,
    pub(crate) tags: BTreeMap<String, Held>,
    pub(crate) images: Vec<String>,
    pub(crate) records: BTreeMap<String, OwnerRecord>,
    pub(crate) calls: Vec<String>,
    pub(crate) called_at: Vec<tokio::time::Instant>,
    /// Calls that take their time.
    pub(crate) slow: BTreeMap<String, Duration>,
    pub(crate) disk_used: u64,
    /// MACs that hold a lease; a test puts them there, a release takes them away.
    pub(crate) leases: BTreeSet<String>,
    /// Guests get no address, and why.
    pub(crate) leaseless: Option<Trouble>,
    /// Bytes a second of the last push, and bytes of a capture.
    pub(crate) throughput: Option<u64>,
    pub(crate) capture_size: u64,
    /// States whose blobs went ahead.
    pub(crate) ahead: Vec<u64>,
    /// Guests of clones do not take their identity.
    pub(crate) mute: bool,
    /// A start succeeds and changes nothing about that.
    pub(crate) deaf: bool,
    /// Call name → how often it fails yet, and with what.
    failing: BTreeMap<String, (u32, Reason)>,
    /// Effects until the agent is killed; the effect that reaches 0 is done and never answered.
    pub(crate) kill_after: Option<u32>,
    /// Broken invariants.
    pub(crate) broken: Vec<String>,
    pub(crate) unreachable: bool,
    /// Addresses of the host itself, and those that were probed.
    pub(crate) own: BTreeSet<Ipv4Addr>,
    pub(crate) probed: BTreeSet<Ipv4Addr>,
    /// A VM must not be removed while no copy holds what its guest did last.
    pub(crate) judged: bool,
    /// When the agent is killed, so is every hypervisor.
    pub(crate) crash: bool,
    /// So many pushes are done, but their answer is lost.
    pub(crate) unheard: u32,
    made: u64,
}

/// All ports at once. Clones are the same world.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fake {
    pub(crate) world: Arc<Mutex<World>>,
    pub(crate) killed: Arc<Notify>,
}

impl Fake {
    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ports(&self, registry: bool) -> Ports {
        let all = Arc::new(self.clone());
        Ports {
            vms: Arc::clone(&all) as _,
            upkeep: Arc::clone(&all) as _,
            snapshots: Arc::clone(&all) as _,
            images: Arc::clone(&all) as _,
            guest: Arc::clone(&all) as _,
            registry: registry.then(|| Arc::clone(&all) as _),
            leases: Arc::clone(&all) as _,
            prober: Arc::clone(&all) as _,
            records: Arc::clone(&all) as _,
            host: all,
        }
    }

    /// Lets the next `times` calls of this name fail.
    pub(crate) fn fail(&self, call: &str, times: u32, reason: Reason) {
        self.world().failing.insert(call.to_owned(), (times, reason));
    }

    pub(crate) fn calls(&self, name: &str) -> usize {
        self.world().calls.iter().filter(|call| call.split(' ').next() == Some(name)).count()
    }

    fn begin(&self, call: &str, object: &str) -> PortResult<()> {
        let mut world = self.world();
        world.calls.push(format!("{call} {object}"));
        world.called_at.push(tokio::time::Instant::now());
        let exact = format!("{call} {object}");
        let call = if world.failing.contains_key(&exact) { exact.as_str() } else { call };
        match world.failing.get_mut(call) {
            Some((0, _)) | None => Ok(()),
            Some((left, reason)) => {
                *left -= 1;
                Err(PortError::new(*reason, format!("{call}: injected")))
            }
        }
    }

    async fn slowly(&self, call: &str) {
        let wait = self.world().slow.get(call).copied();
        if let Some(wait) = wait {
            tokio::time::sleep(wait).await;
        }
    }

    /// An effect is done; perhaps the agent does not live to hear of it.
    async fn done(&self) {
        let kill = {
            let mut world = self.world();
            match &mut world.kill_after {
                Some(0) => false,
                Some(left) => {
                    *left -= 1;
                    *left == 0
                }
                None => false,
            }
        };
        if kill {
            self.killed.notify_one();
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    fn make(&self, name: &str, state: u64) -> PortResult<VmView> {
        let mut world = self.world();
        if world.vms.contains_key(name) {
            world.broken.push(format!("I1: a second VM {name} was asked for"));
            return Err(PortError::new(Reason::CreateFailed, format!("vm name {name:?} already exists")));
        }
        world.made += 1;
        let view = VmView {
            id: format!("VM{}", world.made),
            name: name.to_owned(),
            phase: VmPhase::Running,
            pid: 100 + u32::try_from(world.made).unwrap_or_default(),
            macs: vec![format!("02:00:00:00:00:{:02x}", world.made)],
            hypervisor: "qemu".to_owned(),
            came_up: true,
            links_down: false,
            stopped_in_order: false,
            started_at: None,
            starved: None,
            lost_tap: None,
        };
        world.vms.insert(name.to_owned(), Machine { view: view.clone(), state, frozen: false });
        Ok(view)
    }

    fn take_snapshot(&self, vm: &str, name: &str, pause: bool) -> PortResult<SnapshotView> {
        let mut world = self.world();
        let missing = || PortError::new(Reason::EngineUnavailable, format!("VM not running: {vm}"));
        let machine =
            world.vms.get_mut(vm).filter(|m| m.view.phase == VmPhase::Running).ok_or_else(missing)?;
        if pause {
            machine.view.phase = VmPhase::Paused;
            machine.frozen = true;
        }
        let state = machine.state;
        world.made += 1;
        let held = Held { id: format!("S{}", world.made), state, ..Held::default() };
        let view = snapshot_view(name, &held);
        world.snapshots.insert(name.to_owned(), held);
        Ok(view)
    }

    /// The guest of every running VM goes on for a while.
    pub(crate) fn live(&self) {
        for machine in self.world().vms.values_mut().filter(|machine| !machine.frozen) {
            machine.state += 1;
        }
    }

    /// What happens while the agent is dead: guests go on, and perhaps their hypervisors die.
    pub(crate) fn meanwhile(&self) {
        self.live();
        let mut world = self.world();
        if world.crash {
            for machine in world.vms.values_mut() {
                (machine.view.phase, machine.frozen) = (VmPhase::Stopped, true);
            }
        }
    }
}

fn snapshot_view(name: &str, held: &Held) -> SnapshotView {
    SnapshotView { id: held.id.clone(), name: name.to_owned(), hypervisor: "qemu".to_owned() }
}

#[async_trait]
impl Vms for Fake {
    async fn list(&self) -> PortResult<Vec<VmView>> {
        self.begin("list", "")?;
        Ok(self.world().vms.values().map(|machine| machine.view.clone()).collect())
    }

    async fn inspect(&self, vm: &str) -> PortResult<Option<VmView>> {
        self.begin("inspect", vm)?;
        Ok(self.world().vms.get(vm).map(|machine| machine.view.clone()))
    }

    async fn run(&self, request: RunRequest) -> PortResult<VmView> {
        self.begin("run", &format!("{} {}", request.name, request.image))?;
        let made = self.make(&request.name, 0)?;
        self.done().await;
        Ok(made)
    }

    async fn clone_vm(&self, request: CloneRequest) -> PortResult<VmView> {
        self.begin("clone", &format!("{} {}", request.name, request.snapshot))?;
        let held = self.world().snapshots.get(&request.snapshot).cloned();
        let missing =
            || PortError::new(Reason::SnapshotNotFound, format!("no snapshot {}", request.snapshot));
        let mut made = self.make(&request.name, held.ok_or_else(missing)?.state)?;
        made.links_down = self.world().mute;
        if let Some(machine) = self.world().vms.get_mut(&request.name) {
            machine.view.links_down = made.links_down;
        }
        self.done().await;
        Ok(made)
    }

    async fn start(&self, vm: &str) -> PortResult<VmView> {
        self.begin("start", vm)?;
        let started = {
            let mut world = self.world();
            world.made += 1;
            let (deaf, pid) = (world.deaf, 100 + u32::try_from(world.made).unwrap_or_default());
            let machine = world.vms.get_mut(vm).ok_or_else(|| PortError::new(Reason::VMGone, "no VM"))?;
            if machine.view.phase != VmPhase::Running {
                machine.view.pid = pid;
            }
            (machine.view.phase, machine.frozen) = (VmPhase::Running, false);
            machine.view.links_down &= deaf;
            machine.view.clone()
        };
        self.done().await;
        Ok(started)
    }

    async fn remove(&self, vm: &str) -> PortResult<()> {
        self.begin("remove", vm)?;
        self.slowly("remove").await;
        {
            let mut world = self.world();
            let last = world.vms.remove(vm).map_or(0, |machine| machine.state);
            let copies = world.snapshots.iter().chain(&world.tags);
            let kept = copies.filter(|(name, _)| name.starts_with(vm)).map(|(_, held)| held.state).max();
            if world.judged && kept.unwrap_or_default() < last {
                world.broken.push(format!("I3: {vm} was removed at {last}, the newest copy is {kept:?}"));
            }
        }
        self.done().await;
        Ok(())
    }

    async fn remove_captured(&self, vm: &str, snapshot: &str) -> PortResult<()> {
        let outrun = {
            let world = self.world();
            let held = world.snapshots.values().find(|held| held.id == snapshot).map(|held| held.state);
            world.vms.get(vm).is_some_and(|machine| Some(machine.state) != held)
        };
        if outrun {
            self.begin("remove", vm)?;
            let message = format!("the guest of VM {vm} ran since its capture {snapshot}");
            return Err(PortError::new(Reason::HibernateOutrun, message));
        }
        Vms::remove(self, vm).await
    }

    async fn capture(&self, vm: &str, name: &str) -> PortResult<SnapshotView> {
        self.begin("capture", vm)?;
        self.slowly("capture").await;
        let taken = self.take_snapshot(vm, name, true)?;
        self.done().await;
        Ok(taken)
    }

    async fn save(&self, vm: &str, name: &str) -> PortResult<SnapshotView> {
        self.begin("save", &format!("{vm} {name}"))?;
        let taken = self.take_snapshot(vm, name, false)?;
        self.done().await;
        Ok(taken)
    }

    async fn resume(&self, vm: &str) -> PortResult<()> {
        self.begin("resume", vm)?;
        let paused = |m: &&mut Machine| m.view.phase == VmPhase::Paused;
        if let Some(machine) = self.world().vms.get_mut(vm).filter(paused) {
            machine.frozen = false;
            machine.state += 1;
        }
        // The engine may die between the two: its flag is stale then.
        self.done().await;
        if let Some(machine) = self.world().vms.get_mut(vm).filter(paused) {
            machine.view.phase = VmPhase::Running;
        }
        self.done().await;
        Ok(())
    }
}

#[async_trait]
impl Upkeep for Fake {
    async fn tend(&self) -> PortResult<()> {
        self.begin("tend", "")
    }

    async fn capture_size(&self, vm: &str) -> PortResult<Option<u64>> {
        self.begin("size", vm)?;
        Ok(Some(self.world().capture_size))
    }

    async fn disk_used(&self) -> PortResult<u64> {
        self.begin("disk", "")?;
        Ok(self.world().disk_used)
    }
}

#[async_trait]
impl Snapshots for Fake {
    async fn get(&self, name: &str) -> PortResult<Option<SnapshotView>> {
        self.begin("snapshot", name)?;
        Ok(self.world().snapshots.get(name).map(|held| snapshot_view(name, held)))
    }

    async fn remove(&self, name: &str) -> PortResult<()> {
        self.begin("drop", name)?;
        self.world().snapshots.remove(name);
        self.done().await;
        Ok(())
    }
}

#[async_trait]
impl Images for Fake {
    async fn ensure(&self, image: &str, _force: bool) -> PortResult<String> {
        self.begin("image", image)?;
        self.slowly("image").await;
        let there = self.world().images.iter().any(|known| known == image);
        let missing =
            || PortError::new(Reason::ImageNotFound, format!("image {image:?} is nowhere; import it"));
        there.then(|| image.to_owned()).ok_or_else(missing)
    }

    async fn here(&self, wanted: &BTreeSet<Awaited>) -> PortResult<BTreeSet<Awaited>> {
        self.begin("here", "")?;
        let world = self.world();
        let is_here = |what: &&Awaited| match what {
            Awaited::Image(image) => world.images.contains(image),
            Awaited::Snapshot(repository, tag) => world.tags.contains_key(&format!("{repository}:{tag}")),
            Awaited::Vm(_) => false,
        };
        Ok(wanted.iter().filter(is_here).cloned().collect())
    }
}

#[async_trait]
impl Guest for Fake {
    async fn exec(&self, vm: &str, _exec: Exec) -> PortResult<GuestSession> {
        Err(PortError::new(Reason::GuestSilent, format!("no guest in {vm}")))
    }

    async fn console(&self, _vm: &str) -> PortResult<PathBuf> {
        Ok(PathBuf::from("/nonexistent"))
    }
}

fn digest(held: &Held) -> String {
    format!("sha256:{}", held.id)
}

#[async_trait]
impl Registry for Fake {
    async fn facts(&self, repository: &str, tag: &str) -> PortResult<Option<TagView>> {
        self.begin("facts", &format!("{repository}:{tag}"))?;
        let held = self.world().tags.get(&format!("{repository}:{tag}")).cloned();
        Ok(held.map(|held| TagView {
            digest: digest(&held),
            snapshot_id: held.id.clone(),
            base_image: held.base_image,
            vm_name: held.vm_name,
        }))
    }

    async fn push(&self, request: PushRequest) -> PortResult<String> {
        let name = format!("{}:{}", request.repository, request.tag);
        self.begin("push", &name)?;
        self.slowly("push").await;
        let digest = {
            let mut world = self.world();
            let found = world.snapshots.values().find(|held| held.id == request.snapshot).cloned();
            let mut held =
                found.ok_or_else(|| PortError::new(Reason::SnapshotNotFound, "no such snapshot"))?;
            if let (Guard::AbsentOr(digests), Some(before)) = (&request.guard, world.tags.get(&name))
                && !digests.contains(&digest(before))
            {
                return Err(PortError::new(Reason::TagMoved, format!("{name} was moved by somebody else")));
            }
            held.base_image.clone_from(&request.base_image);
            held.vm_name.clone_from(&request.vm_name);
            let digest = digest(&held);
            world.tags.insert(name, held);
            digest
        };
        self.done().await;
        let unheard = {
            let mut world = self.world();
            let unheard = world.unheard > 0;
            world.unheard = world.unheard.saturating_sub(1);
            unheard
        };
        if unheard {
            return Err(PortError::new(
                Reason::RegistryUnavailable,
                format!("{}: answer lost", request.repository),
            ));
        }
        Ok(digest)
    }

    async fn push_blobs(&self, request: PushRequest) -> PortResult<u64> {
        self.begin("blobs", &request.snapshot)?;
        self.slowly("blobs").await;
        {
            let mut world = self.world();
            let found = world.snapshots.values().find(|held| held.id == request.snapshot).cloned();
            let gone = || PortError::new(Reason::SnapshotNotFound, "no such snapshot");
            let state = found.ok_or_else(gone)?.state;
            world.ahead.push(state);
        }
        self.done().await;
        Ok(1)
    }

    fn throughput(&self) -> Option<u64> {
        self.world().throughput
    }

    async fn pull(&self, repository: &str, reference: &str, name: &str) -> PortResult<SnapshotView> {
        self.begin("pull", &format!("{repository} {reference}"))?;
        let pulled = {
            let mut world = self.world();
            let by_digest = |(key, held): &(&String, &Held)| {
                key.starts_with(&format!("{repository}:"))
                    && (digest(held) == reference || **key == format!("{repository}:{reference}"))
            };
            let held = world.tags.iter().find(by_digest).map(|(_, held)| held.clone());
            let held = held.ok_or_else(|| PortError::new(Reason::SnapshotNotFound, "not in the registry"))?;
            let view = snapshot_view(name, &held);
            world.snapshots.insert(name.to_owned(), held);
            view
        };
        self.done().await;
        Ok(pulled)
    }

    async fn drop_tag(&self, repository: &str, tag: &str, gone: &str, _snapshot: &str) -> PortResult<()> {
        let name = format!("{repository}:{tag}");
        self.begin("droptag", &name)?;
        {
            let mut world = self.world();
            if world.tags.get(&name).is_some_and(|held| digest(held) == gone) {
                if !world.vms.contains_key(repository) && !world.records.contains_key(repository) {
                    world.broken.push(format!("I3: {name} was dropped and nothing is left"));
                }
                world.tags.remove(&name);
            }
        }
        self.done().await;
        Ok(())
    }
}

#[async_trait]
impl Leases for Fake {
    async fn lookup(&self, mac: &str) -> PortResult<Option<Ipv4Addr>> {
        if self.world().leaseless.is_some() {
            return Ok(None);
        }
        let last = mac.rsplit(':').next().and_then(|hex| u8::from_str_radix(hex, 16).ok()).unwrap_or(1);
        Ok(Some(Ipv4Addr::new(172, 31, 240, last)))
    }

    async fn held(&self) -> PortResult<Vec<String>> {
        self.begin("held", "")?;
        Ok(self.world().leases.iter().cloned().collect())
    }

    async fn release(&self, mac: &str) -> PortResult<()> {
        self.begin("release", mac)?;
        self.world().leases.remove(mac);
        Ok(())
    }

    async fn obstacle(&self) -> Option<Trouble> {
        self.world().leaseless.clone()
    }
}

#[async_trait]
impl Prober for Fake {
    async fn probe(&self, ip: Ipv4Addr, _port: Option<u16>, _limit: Duration) -> Result<(), String> {
        self.slowly("probe").await;
        let mut world = self.world();
        world.probed.insert(ip);
        if world.unreachable { Err(format!("{ip} did not answer")) } else { Ok(()) }
    }

    fn is_own(&self, ip: Ipv4Addr) -> bool {
        self.world().own.contains(&ip)
    }
}

#[async_trait]
impl Records for Fake {
    async fn load(&self) -> PortResult<Vec<OwnerRecord>> {
        Ok(self.world().records.values().cloned().collect())
    }

    async fn put(&self, record: &OwnerRecord) -> PortResult<()> {
        self.begin("put", &record.vm_name)?;
        self.world().records.insert(record.vm_name.clone(), record.clone());
        self.done().await;
        Ok(())
    }

    async fn forget(&self, vm_name: &str) -> PortResult<()> {
        self.begin("forget", vm_name)?;
        {
            let mut world = self.world();
            if world.vms.contains_key(vm_name) {
                world.broken.push(format!("I6: the record of {vm_name} went before its VM"));
            }
            world.records.remove(vm_name);
        }
        self.done().await;
        Ok(())
    }
}

#[async_trait]
impl Host for Fake {
    async fn view(&self) -> HostView {
        HostView::default()
    }

    fn address(&self) -> Option<IpAddr> {
        None
    }
}
