//! The owner record: what survives a kill, written durably *before* the engine is called.
//!
//! Entry point: [`OwnerRecord`]. One row a VM name. Invariant: a VM of ours without a row has no owner
//! that could prove its claim, so it is never destroyed (only reported, or adopted by the pod whose
//! own name it bears).

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{planner::observation::Wish, reason::Trouble};

/// Saved state that a VM comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// Snapshot id.
    pub snapshot: String,
    /// Manifest digest of the tag; `None` when the local snapshot is the evidence.
    pub digest: Option<String>,
}

/// Where a VM is in its life, as far as this agent durably knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// The engine is (or was) asked to make it.
    Creating {
        /// The saved state it is restored from; `None` is a fresh boot, clone or fork.
        restore: Option<Saved>,
    },
    /// It was seen running.
    Up,
    /// A hibernation is under way whose push would be long: a live capture's blobs go ahead while the guest runs.
    Prepushing,
    /// A hibernation is under way.
    Hibernating {
        /// The capture of this round; the guest has not run since.
        captured: Option<String>,
        /// The tag holds that capture (or, without a registry, the local snapshot is complete).
        pushed: Option<Saved>,
        /// When the guest was paused.
        paused_at: Option<Timestamp>,
    },
    /// Removing failed after the push; the VM is there, so the push is taken back.
    RollingBack {
        /// What this attempt pushed.
        pushed: Saved,
        /// When the guest was paused.
        #[serde(default)]
        paused_at: Option<Timestamp>,
    },
    /// No VM; the state is saved.
    Hibernated {
        /// Where.
        saved: Saved,
    },
    /// The VM is lost for this incarnation; the pod says why.
    Lost {
        /// Why.
        trouble: Trouble,
    },
    /// The incarnation is being deleted.
    Deleting {
        /// The VM was alive when the delete began.
        live: bool,
        /// Saved state that must survive the delete (a hibernated pod).
        keep: Option<Saved>,
        /// The capture for `:latest`; the guest has not run since.
        captured: Option<String>,
        /// `:latest` holds it.
        pushed: bool,
        /// Snapshot ids that the live VM has outrun: a tag that holds one of them goes (rule (d)).
        outrun: Vec<String>,
    },
}

/// One VM name's owner, durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerRecord {
    /// VM name: the row's key.
    pub vm_name: String,
    /// Pod namespace.
    pub namespace: String,
    /// Pod name.
    pub pod: String,
    /// Pod incarnation.
    pub uid: String,
    /// The pod's image ref.
    pub image: String,
    /// The pod's policy demands `:latest` on delete.
    pub snapshot_on_delete: bool,
    /// The pod asks to keep local snapshots on delete.
    pub keep_snapshot: bool,
    /// Annotations for pushes.
    pub annotations: BTreeMap<String, String>,
    /// Where it is.
    pub phase: Phase,
    /// Engine id, once seen.
    pub vm_id: String,
    /// MAC addresses, for leases.
    pub macs: Vec<String>,
    /// When the pod was first taken up.
    pub accepted: Timestamp,
    /// When the VM last came up.
    pub started: Option<Timestamp>,
    /// Restarts in place.
    pub restarts: u32,
    /// The last of them.
    pub last_restart: Option<Timestamp>,
    /// A restart was decided and not yet seen to work.
    pub restart_pending: bool,
    /// The restart is a wake from the same saved state again, not before then: the guest stopped so soon
    /// after its wake that what was saved counts for more than what it did since.
    #[serde(default)]
    pub rewake: Option<Timestamp>,
    /// The stop that this restart answers was somebody's order, no death.
    #[serde(default)]
    pub stop_ordered: bool,
    /// What this owner last wrote to `:hibernate` or woke from (manifest digests).
    pub written: Option<String>,
    /// The saved state that the VM woke from.
    pub woken_from: Option<Saved>,
    /// When its process was started for that wake, by the engine's word.
    #[serde(default)]
    pub woken_at: Option<Timestamp>,
    /// That wake reached `ready`, so its saved state is consumed.
    pub woken_ready: bool,
    /// A wake's import may still be there.
    pub import_left: bool,
    /// The answer to the last live snapshot request.
    #[serde(default)]
    pub live: Option<LiveAnswer>,
    /// Captures that the guest has outrun and whose push may have reached `:hibernate`, or may yet: where
    /// the tag holds one of them, it is ours to overwrite and owed to be dropped.
    #[serde(default)]
    pub strays: Vec<String>,
}

/// An answer to a live snapshot request; each request is answered once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveAnswer {
    /// The request, as it stands on the pod.
    pub reference: String,
    /// `None`: pushed. Else why it failed.
    pub failure: Option<String>,
}

/// Strays that are remembered; the oldest go first (I9).
const MAX_STRAYS: usize = 16;

impl Phase {
    /// The capture that counts: the guest has not run since.
    #[must_use]
    pub const fn captured(&self) -> Option<&String> {
        match self {
            Self::Hibernating { captured, .. } | Self::Deleting { captured, .. } => captured.as_ref(),
            Self::RollingBack { pushed, .. } => Some(&pushed.snapshot),
            _ => None,
        }
    }
}

impl OwnerRecord {
    /// The record of an incarnation that begins in `phase`: nothing is known of a VM yet.
    #[must_use]
    pub fn new(wish: &Wish, accepted: Timestamp, phase: Phase) -> Self {
        Self {
            vm_name: wish.vm_name.clone(),
            namespace: wish.key.namespace.clone(),
            pod: wish.key.name.clone(),
            uid: wish.uid.clone(),
            image: wish.image.clone(),
            snapshot_on_delete: wish.snapshot_on_delete,
            keep_snapshot: wish.keep_snapshot,
            annotations: wish.annotations.clone(),
            phase,
            vm_id: String::new(),
            macs: Vec::new(),
            accepted,
            started: None,
            restarts: 0,
            last_restart: None,
            restart_pending: false,
            rewake: None,
            stop_ordered: false,
            written: None,
            woken_from: None,
            woken_at: None,
            woken_ready: false,
            import_left: false,
            live: None,
            strays: Vec::new(),
        }
    }

    /// The same record in another phase, in which the capture `snapshot` is stale wherever it may be.
    #[must_use]
    pub fn outrunning(&self, snapshot: &str, phase: Phase) -> Self {
        let mut next = self.in_phase(phase);
        next.strays.retain(|known| known != snapshot);
        next.strays.push(snapshot.to_owned());
        let surplus = next.strays.len().saturating_sub(MAX_STRAYS);
        next.strays.drain(..surplus);
        next
    }

    /// The same record in another phase.
    #[must_use]
    pub fn in_phase(&self, phase: Phase) -> Self {
        Self { phase, ..self.clone() }
    }
}
