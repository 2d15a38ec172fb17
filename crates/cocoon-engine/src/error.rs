//! One enum an operation. The phrases of `engine-cli` §1.8 stand here and nowhere else.

use thiserror::Error;

/// Something below an operation failed: a file, a process, a database, QEMU. `step` says what was tried.
#[derive(Debug, Error)]
#[error("{step}")]
pub struct Fault {
    /// What was tried, on which object.
    pub step: String,
    /// Why it failed.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl Fault {
    /// A fault of `step`.
    pub fn new(step: impl Into<String>, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { step: step.into(), source: source.into() }
    }
}

/// Looking something up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LookupError {
    /// The authoritative "no such VM".
    #[error("VM not found: {0}")]
    VmNotFound(String),
    /// The authoritative "no such snapshot".
    #[error("snapshot not found: {0}")]
    SnapshotNotFound(String),
    /// The authoritative "no such image".
    #[error("image {0:?} not found in any backend")]
    ImageNotFound(String),
    /// A prefix fits several.
    #[error("ambiguous ref {0:?}")]
    Ambiguous(String),
    /// Could not tell: never to be read as "not there" (I5).
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// Making a VM: run, clone, start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BringUpError {
    /// See [`LookupError`].
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The name is taken.
    #[error("vm name {name:?} already exists (id: {id})")]
    NameTaken {
        /// The name.
        name: String,
        /// Its holder.
        id: String,
    },
    /// The request cannot be served as it is.
    #[error("{0}")]
    Invalid(String),
    /// The image is not here.
    #[error("image {0:?} not resolved; import it with `cocoon image import {0} FILE`")]
    ImageNotResolved(String),
    /// The snapshot does not fit this host.
    #[error(
        "snapshot {snapshot} is incompatible: it has {theirs}, this host has {ours}; clone it on a host that has \
         what it has, or bring this host to that"
    )]
    SnapshotIncompatible {
        /// Which snapshot.
        snapshot: String,
        /// Its side.
        theirs: String,
        /// Our side.
        ours: String,
    },
    /// A part that must be on the host is missing.
    #[error("{what} is missing; {remedy}")]
    HostMissing {
        /// What.
        what: String,
        /// The command or step that helps.
        remedy: String,
    },
    /// The guest never came up.
    #[error("guest of {vm} did not answer within {seconds} s; {said}")]
    GuestSilent {
        /// Which VM.
        vm: String,
        /// How long was waited.
        seconds: u64,
        /// The last lines of its logs, or where they are.
        said: String,
    },
    /// Anything below.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// Saving, resuming, stopping, removing.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// See [`LookupError`].
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The operation needs a running VM.
    #[error("VM not running: {0}")]
    NotRunning(String),
    /// Removal of a running VM without force.
    #[error("VM {0} is running (force required)")]
    ForceRequired(String),
    /// The guest has run since the capture that its removal relies on.
    #[error("VM {0} has run since it was captured, so removing it would lose work; capture it again")]
    WentOn(String),
    /// What would be saved could be loaded by no host.
    #[error(
        "VM {vm} cannot be saved: its QEMU {version} runs it as {theirs} instead of {ours}, and no host loads such a \
         state; `cocoon vm stop {vm}` and `cocoon vm start {vm}` boot it as one that can be saved (what is only in \
         its memory is lost)"
    )]
    Unloadable {
        /// Which VM; its guest goes on.
        vm: String,
        /// Version of the QEMU under it.
        version: String,
        /// What the VM has.
        theirs: String,
        /// What that QEMU loads.
        ours: String,
    },
    /// The snapshot name is taken.
    #[error("snapshot {name:?} already exists, held by {holder}")]
    SnapshotExists {
        /// The name.
        name: String,
        /// Its holder's id.
        holder: String,
    },
    /// Not enough disk for what must be written.
    #[error(
        "disk full: {needed} bytes are needed in {folder}, {free} are free; free space or move --root-dir"
    )]
    DiskFull {
        /// Where.
        folder: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The name cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// Anything below.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// Importing an image.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The archive has something that is never unpacked.
    #[error("image {image}: entry {entry:?} is refused: {reason}")]
    Hostile {
        /// Image ref.
        image: String,
        /// Path inside the archive.
        entry: String,
        /// Which rule.
        reason: String,
    },
    /// Not an image of a kind we know.
    #[error("image {image}: {reason}")]
    Unusable {
        /// Image ref.
        image: String,
        /// Why.
        reason: String,
    },
    /// A part that must be on the host is missing.
    #[error("{what} is missing; {remedy}")]
    HostMissing {
        /// What.
        what: String,
        /// The command or step that helps.
        remedy: String,
    },
    /// Anything below.
    #[error(transparent)]
    Fault(#[from] Fault),
}
