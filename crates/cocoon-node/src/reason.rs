//! The stable words for everything that can go wrong or be worth an event.
//!
//! Entry points: [`Reason`] (its `Display` is the word) and [`Trouble`] (a reason with its sentence).
//! Invariant: a word, once released, is never changed; people and programs match on it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A stable word, as it appears in pod status, events and lifecycle messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Reason {
    // What the pod says.
    /// The pod has no `vm.cocoonstack.io/name`.
    MissingVMName,
    /// A managed pod's VM name is too long for its import name.
    VMNameTooLong,
    /// A managed pod names a VM that is not its own.
    VMNameMismatch,
    /// Another live pod has this VM name.
    VMNameInUse,
    /// An annotation cannot be read.
    InvalidAnnotation,
    /// An annotation that nobody knows.
    UnknownAnnotation,
    /// The image was changed under a VM, which keeps its own.
    ImageChanged,
    /// A resource quantity cannot be read.
    InvalidResources,
    /// An unmanaged pod without id or address.
    UnmanagedIncomplete,
    /// Hibernation is not possible for this kind of pod.
    HibernateUnsupported,
    /// This release does not serve the request.
    NotSupported,
    /// Two clone sources that exclude one another.
    SourceConflict,
    /// The pod wants another snapshot class than the node has.
    SnapshotClassMismatch,

    // Making a VM.
    /// The image is nowhere.
    ImageNotFound,
    /// The image is a snapshot; clone mode is meant.
    ImageIsSnapshot,
    /// The image was found and cannot be used.
    ImageRefused,
    /// The snapshot to clone is nowhere.
    SnapshotNotFound,
    /// The snapshot does not fit this host.
    SnapshotIncompatible,
    /// The fork's source cannot be used.
    ForkSourceUnavailable,
    /// The guest never answered.
    GuestSilent,
    /// A part is missing on the host.
    HostMissing,
    /// The disk is full.
    DiskFull,
    /// The VM could not be made.
    CreateFailed,

    // Hibernate and wake.
    /// Evidence of saved state could not be read (I5).
    HibernateEvidenceUnavailable,
    /// Saved state was expected and is not there.
    HibernateEvidenceMissing,
    /// Saved state belongs to another image.
    HibernateImageConflict,
    /// What is tagged as this VM's saved state is another VM's.
    HibernateVMConflict,
    /// Saved state exists and the pod names another source.
    HibernateSourceConflict,
    /// Saved state exists, so the pod is restored from it.
    HibernateSnapshotExists,
    /// The capture failed.
    HibernateSnapshotFailed,
    /// The bulk could not be pushed ahead of the pause; the hibernation goes on without that.
    HibernatePrepushFailed,
    /// The push failed.
    HibernatePushFailed,
    /// The push was longer than a guest may be paused.
    HibernatePauseLimit,
    /// The VM could not be removed after the push.
    HibernateRemoveFailed,
    /// The guest has run since its capture (the engine's command line let it), so that is stale: the hibernation
    /// begins anew.
    HibernateOutrun,
    /// What would be saved of the VM could be loaded by no host.
    StateUnloadable,
    /// The tag was moved by somebody else.
    TagMoved,
    /// The saved state could not be pulled.
    WakePullFailed,
    /// The VM could not be cloned from the saved state.
    WakeCloneFailed,
    /// The pod is being hibernated.
    Hibernating,
    /// The pod is hibernated.
    Hibernated,
    /// The pod is awake again.
    Woken,

    // Living.
    /// The VM is gone without anybody asking for it.
    VMGone,
    /// The VM's process died and was started again.
    VMRestarted,
    /// It died again too soon.
    RestartCooldown,
    /// It could not be started again.
    RestartFailed,
    /// The host's end of a running VM's network card is gone.
    TapLost,
    /// A paused guest could not be resumed.
    ResumeFailed,
    /// The VM belongs to an incarnation that is being finished first.
    Replacing,

    // Delete.
    /// The snapshot that the policy demands is saved.
    DeleteSnapshotPushed,
    /// The snapshot that the policy demands is not saved yet.
    DeleteSnapshotFailed,
    /// The snapshot that the policy demands was skipped: there is no registry.
    DeleteSnapshotSkipped,
    /// The VM could not be removed.
    DeleteRemoveFailed,
    /// Something local could not be removed.
    CleanupFailed,

    // Below.
    /// The engine gave no clear answer.
    EngineUnavailable,
    /// The registry gave no clear answer.
    RegistryUnavailable,
    /// The node's own records could not be written.
    RecordsUnavailable,
    /// The API server could not be asked.
    ApiUnavailable,
    /// A guest waits for an address and all of the network's are taken.
    NoFreeAddress,
    /// A guest waits for an address and the daemon that gives them does not answer.
    NetworkDaemonDown,
    /// The probe did not succeed (yet).
    ProbeFailed,
    /// The VM was made.
    Created,
    /// The VM is being made.
    ContainerCreating,
    /// The pod is being deleted.
    Terminating,
    /// A VM that no pod and no owner record names.
    OrphanVM,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A reason with the sentence that names object, problem and way out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// The stable word.
    pub reason: Reason,
    /// The sentence.
    pub message: String,
}

impl Trouble {
    /// A trouble.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    /// The same sentence under another word (the step that failed knows better what it was for).
    #[must_use]
    pub fn r#as(mut self, reason: Reason) -> Self {
        if self.reason.is_general() {
            self.reason = reason;
        }
        self
    }
}

impl Reason {
    /// Whether the word says only which part failed, so that a step may put its own word in its place.
    #[must_use]
    pub const fn is_general(self) -> bool {
        matches!(self, Self::EngineUnavailable | Self::RegistryUnavailable | Self::CreateFailed)
    }

    /// Whether trying again cannot help before the pod or the node changes.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(
            self,
            Self::MissingVMName
                | Self::VMNameTooLong
                | Self::VMNameMismatch
                | Self::InvalidAnnotation
                | Self::InvalidResources
                | Self::UnmanagedIncomplete
                | Self::HibernateUnsupported
                | Self::NotSupported
                | Self::SourceConflict
                | Self::SnapshotClassMismatch
        )
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}
