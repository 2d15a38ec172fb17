//! What the planner sees: values only.
//!
//! Entry points: [`Observation`], [`Wish`], [`Seen`]. Invariant: what was not looked at is `Unknown`,
//! what could not be read is `Failed`; neither is ever treated as "not there" (I5).

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;

use crate::{
    ports::{SnapshotView, TagView, VmPhase, VmView},
    reason::{Reason, Trouble},
    record::OwnerRecord,
};

/// Something of the outside that may have been looked at.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Seen<T> {
    /// Not looked at since it may have changed.
    #[default]
    Unknown,
    /// The authoritative answer.
    Known(T),
    /// No answer.
    Failed(Trouble),
}

impl<T> Seen<T> {
    /// The answer, if there is one.
    pub const fn known(&self) -> Option<&T> {
        match self {
            Self::Known(value) => Some(value),
            Self::Unknown | Self::Failed(_) => None,
        }
    }
}

/// Namespace and name of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodKey {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl std::fmt::Display for PodKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A snapshot in the registry that a clone-mode pod names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceRef {
    /// Repository, relative to the base.
    pub repository: String,
    /// Tag or digest.
    pub reference: String,
    /// Its local name.
    pub local: String,
}

/// How a pod's VM comes to be when nothing is saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum How {
    /// Boot an image.
    Run,
    /// Clone a snapshot.
    Clone(SourceRef),
    /// Clone the baseline of another VM.
    Fork(String),
    /// Not possible; the pod is told why.
    Refused(Trouble),
}

/// Sizes of a VM that boots an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// vCPUs.
    pub cpu: u64,
    /// Bytes.
    pub memory: u64,
    /// Bytes of the writable disk.
    pub storage: u64,
}

/// What one pod incarnation asks for. Made by `wish::read`, or from an owner record when the pod is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// Which pod.
    pub key: PodKey,
    /// Which incarnation.
    pub uid: String,
    /// Its VM.
    pub vm_name: String,
    /// The agent owns the VM's life.
    pub managed: bool,
    /// macOS guests are kept out of most paths.
    pub macos: bool,
    /// Image ref.
    pub image: String,
    /// Where a fresh VM comes from.
    pub how: How,
    /// The operator marked it as a wake.
    pub restore_marked: bool,
    /// `hibernate` is exactly `true`.
    pub hibernate: bool,
    /// The API wants it gone.
    pub deleting: bool,
    /// The API does not have it any more.
    pub gone: bool,
    /// Its phase is final.
    pub terminal: bool,
    /// Its policy demands `:latest` on delete.
    pub snapshot_on_delete: bool,
    /// Local snapshots are kept on delete.
    pub keep_snapshot: bool,
    /// Sizes for `run`.
    pub sizes: Sizes,
    /// The true hypervisor that the pod's backend means here; empty when any will do.
    pub hypervisor: String,
    /// Ask the registry for the image again.
    pub force_pull: bool,
    /// TCP port to probe; else ICMP.
    pub probe_port: Option<u16>,
    /// The set's generation, to be echoed.
    pub generation: i64,
    /// Annotations for pushes.
    pub annotations: BTreeMap<String, String>,
    /// An unanswered live snapshot request.
    pub live_request: Option<String>,
    /// `vm.cocoonstack.io/id` as it stands on the pod.
    pub id: String,
    /// `vm.cocoonstack.io/ip` as it stands on the pod.
    pub ip: String,
    /// `woken-from` as it stands on the pod.
    pub woken_from: String,
    /// The lifecycle on the pod says `ready`.
    pub said_ready: bool,
    /// The pod cannot be served as it is.
    pub problem: Option<Trouble>,
}

/// How much of the planner's will may be carried out now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cooling {
    /// Everything.
    #[default]
    None,
    /// After a failure: compensations only, until the retry is due.
    Soft,
    /// After a failed compensation: nothing, until the retry is due.
    Hard,
}

/// One process of a VM: what is true of its guest is not true of the next one's.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Process {
    /// Engine id of the VM.
    pub vm_id: String,
    /// Process id; 0 without one (unmanaged VMs).
    pub pid: u32,
    /// When it was started, if the engine says so.
    pub started: Option<Timestamp>,
}

impl From<&VmView> for Process {
    fn from(vm: &VmView) -> Self {
        Self { vm_id: vm.id.clone(), pid: vm.pid, started: vm.started_at }
    }
}

/// What the guest's probe says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reach {
    /// What was probed: it says nothing about any other process.
    pub of: Process,
    /// Its address, once leased.
    pub ip: Option<std::net::Ipv4Addr>,
    /// A probe succeeded (and no three failed since).
    pub ready: bool,
    /// Why not.
    pub message: String,
    /// Why its guest can be given no address, when that is what it waits for.
    pub obstacle: Option<Trouble>,
}

/// A clone's guest that has not taken its identity: the VM runs, its links are down, nobody can reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Silence {
    /// Id and process of the VM: another one is told afresh.
    pub vm: (String, u32),
    /// How often it was told again in vain.
    pub tries: u32,
    /// What else than silence the last of them met.
    pub obstacle: Option<Trouble>,
}

impl Silence {
    /// Tries in vain from which on the pod counts as failed; it is told again all the same.
    pub const FAILED: u32 = 3;

    /// What the pod says about it. Without figures that grow: what has not changed is not written again.
    #[must_use]
    pub fn trouble(&self, vm_name: &str) -> Trouble {
        let obstacle = self.obstacle.as_ref().map_or_else(String::new, |met| format!(" ({})", met.message));
        let message = format!(
            "VM {vm_name} runs, but its guest agent has not taken its identity{obstacle}, so its network stays off; it \
             is told again, after growing pauses of at most 5 minutes. See `cocoon vm logs {vm_name}`; \
             `cocoon vm start {vm_name}` tells it at once; if the image has no guest agent that works, delete \
             the pod"
        );
        Trouble::new(Reason::GuestSilent, message)
    }
}

/// Everything the planner decides on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observation {
    /// The incarnation at the head of the queue.
    pub wish: Option<Wish>,
    /// Another incarnation waits for this one to end.
    pub next_waits: bool,
    /// The durable record.
    pub record: Option<OwnerRecord>,
    /// There is a registry.
    pub registry: bool,
    /// `<vm>` in the engine.
    pub vm: Seen<Option<VmView>>,
    /// Its phase when it was known last: what the pod goes on showing while it is asked for again.
    pub last_phase: Option<VmPhase>,
    /// Its guest stands still because the host's disk is full, as far as is known.
    pub starved: Option<Trouble>,
    /// Its tap was deleted under its running hypervisor, as far as is known.
    pub tap_lost: Option<Trouble>,
    /// Local snapshot `<vm>`.
    pub saved: Seen<Option<SnapshotView>>,
    /// Local snapshot `<vm>-hibernate-import`.
    pub import: Seen<Option<SnapshotView>>,
    /// Local snapshot `fork-<vm>`.
    pub baseline: Seen<Option<SnapshotView>>,
    /// The snapshot that a clone-mode pod names.
    pub source: Seen<Option<SnapshotView>>,
    /// `<vm>:hibernate` in the registry.
    pub tag: Seen<Option<TagView>>,
    /// The fork source's answer: the baseline to clone.
    pub fork: Seen<SnapshotView>,
    /// How long the push of a capture would take; `None`: nobody knows.
    pub push_time: Seen<Option<Duration>>,
    /// This process pushed a live capture's blobs ahead of this hibernation, or tried to.
    pub prepushed: bool,
    /// The image is local, under this ref.
    pub image: Seen<String>,
    /// This process made this capture, and the guest has not run since.
    pub captured_now: Option<String>,
    /// When this process began its last capture: from then on the guest may be paused.
    pub capture_began: Option<Timestamp>,
    /// The longest pause of a guest by a hibernation; `None`: the default.
    pub pause_limit: Option<Duration>,
    /// This process pushed `:latest` with this digest.
    pub latest_now: Option<String>,
    /// This process served a live snapshot request: which, and with what outcome.
    pub live_now: Option<crate::record::LiveAnswer>,
    /// Leases were given back.
    pub released: bool,
    /// Local snapshots were dropped.
    pub dropped: bool,
    /// The API accepted the end of the pod.
    pub finalised: bool,
    /// Somebody waits for the baseline.
    pub baseline_wanted: bool,
    /// The API accepted everything that the view says now.
    pub published: bool,
    /// Since when the view waits to be accepted.
    pub unpublished_for: Duration,
    /// What the probe said last; whether that is true of the present process: [`Observation::answers`].
    pub reach: Reach,
    /// The guest does not take its identity.
    pub silence: Option<Silence>,
    /// The failure of this attempt, until another step of it succeeds.
    pub trouble: Option<Trouble>,
    /// The last failure, until the goal is reached or the wish changes: what the pod shows.
    pub failure: Option<Trouble>,
    /// What a delete waits for longer than people wait without a word; only the view is about that.
    pub waits: Option<Trouble>,
    /// Failures in a row, none of them followed by the goal.
    pub failures: u32,
    /// Whether the retry is due.
    pub cooling: Cooling,
    /// Wall clock.
    pub now: Timestamp,
}

impl Observation {
    /// How much longer a guest that was paused at `since` may be paused.
    #[must_use]
    pub fn pause_left(&self, since: Option<Timestamp>) -> Duration {
        let limit = self.pause_limit.unwrap_or(crate::planner::PAUSE_LIMIT);
        let paused =
            since.map(|since| Duration::try_from(self.now.duration_since(since)).unwrap_or_default());
        limit.saturating_sub(paused.unwrap_or_default())
    }

    /// Whether the guest runs, as far as anybody knows.
    #[must_use]
    pub fn runs(&self) -> bool {
        let phase = self.vm_there().map(|vm| vm.phase).or(self.last_phase);
        phase.is_none_or(|phase| phase == VmPhase::Running)
    }

    /// Whether a probe reached the process that the VM has now: what was true of a former one is no answer
    /// (I4). While the VM is asked for again, what was known of it stands.
    #[must_use]
    pub fn answers(&self) -> bool {
        let same = self.vm.known().is_none_or(|vm| vm.as_ref().is_some_and(|vm| self.reach.of == vm.into()));
        same && self.reach.ready
    }

    /// The VM, if the engine has one for sure.
    #[must_use]
    pub fn vm_there(&self) -> Option<&VmView> {
        self.vm.known().and_then(Option::as_ref)
    }
}
