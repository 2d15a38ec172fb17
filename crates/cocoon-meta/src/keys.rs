//! Every identifier that cocoon components stamp on Kubernetes objects, in one place.
//!
//! The prefix tells who owns a value: `cocoonset.cocoonstack.io/` is the CocoonSet group, pod selector
//! labels and the fields the operator mirrors onto a pod; `vm.cocoonstack.io/` is metadata of one VM;
//! `cocoonstack.io/` are labels of nodes.

/// Kind of the owner references that tie a pod to its set.
pub const KIND_COCOON_SET: &str = "CocoonSet";
/// Taint of our virtual nodes and the toleration every cocoon pod carries.
pub const TOLERATION_KEY: &str = "virtual-kubelet.io/provider";

/// Label: name of the owning CocoonSet.
pub const LABEL_COCOON_SET: &str = "cocoonset.cocoonstack.io/name";
/// Label: role of the pod in its set (`main`, `sub-agent`, `toolbox`).
pub const LABEL_ROLE: &str = "cocoonset.cocoonstack.io/role";
/// Label: slot number of an agent, or the name of a toolbox.
pub const LABEL_SLOT: &str = "cocoonset.cocoonstack.io/slot";

/// Label, selector and annotation: the pool of nodes a pod belongs to.
pub const LABEL_NODE_POOL: &str = "cocoonstack.io/pool";
/// The pool of a pod that names none.
pub const DEFAULT_NODE_POOL: &str = "default";
/// Node label and selector: the certified CPU class snapshots may move within.
pub const LABEL_SNAPSHOT_COMPATIBILITY_CLASS: &str = "cocoonstack.io/snapshot-cpu-class";

/// How the VM comes to be: `clone`, `run` or `static`.
pub const ANNOTATION_MODE: &str = "cocoonset.cocoonstack.io/mode";
/// Image or snapshot reference the VM comes from.
pub const ANNOTATION_IMAGE: &str = "cocoonset.cocoonstack.io/image";
/// Operating system family of the guest.
pub const ANNOTATION_OS: &str = "cocoonset.cocoonstack.io/os";
/// Size of the root volume, a canonical quantity.
pub const ANNOTATION_STORAGE: &str = "cocoonset.cocoonstack.io/storage";
/// Which VMs are saved as `:latest` when their pod goes.
pub const ANNOTATION_SNAPSHOT_POLICY: &str = "cocoonset.cocoonstack.io/snapshot-policy";
/// Network the VM is attached to.
pub const ANNOTATION_NETWORK: &str = "cocoonset.cocoonstack.io/network";
/// Present (`true`) when the node agent owns the VM's life.
pub const ANNOTATION_MANAGED: &str = "cocoonset.cocoonstack.io/managed";
/// Present (`true`) when the image is pulled even if a copy is here.
pub const ANNOTATION_FORCE_PULL: &str = "cocoonset.cocoonstack.io/force-pull";
/// Generation of the owning CocoonSet that this pod was last seen with.
pub const ANNOTATION_COCOON_SET_GENERATION: &str = "cocoonset.cocoonstack.io/generation";
/// On a CocoonSet: the node its main agent left at a release suspend; a hint for the wake.
pub const ANNOTATION_HIBERNATED_ON_NODE: &str = "cocoonset.cocoonstack.io/hibernated-on-node";
/// Operator-private, on a pod: the sub-agent used up its rebuilds.
pub const ANNOTATION_DEAD_LETTER: &str = "cocoonset.cocoonstack.io/dead-letter";
/// Operator-private, on a CocoonSet: VM names whose tags are collected after deletion.
pub const ANNOTATION_DELETE_VM_NAMES: &str = "cocoonset.cocoonstack.io/delete-vm-names";
/// Operator-private, on a CocoonSet: rebuild counts of sub-agents.
pub const ANNOTATION_REBUILD_HISTORY: &str = "cocoonset.cocoonstack.io/rebuild-history";

/// Name of the VM; also repository of its snapshots and hostname of the guest.
pub const ANNOTATION_VM_NAME: &str = "vm.cocoonstack.io/name";
/// Engine id of the running VM; absent while there is none.
pub const ANNOTATION_VM_ID: &str = "vm.cocoonstack.io/id";
/// Address of the running VM.
pub const ANNOTATION_IP: &str = "vm.cocoonstack.io/ip";
/// VNC port of a static VM.
pub const ANNOTATION_VNC_PORT: &str = "vm.cocoonstack.io/vnc-port";
/// Present (`true`) while the VM is asked to be hibernated.
pub const ANNOTATION_HIBERNATE: &str = "vm.cocoonstack.io/hibernate";
/// Present (`true`) when the pod must be restored from its `:hibernate` tag.
pub const ANNOTATION_RESTORE_FROM_HIBERNATE: &str = "vm.cocoonstack.io/restore-from-hibernate";
/// Present (`true`) when a delete only gives the seat free: the local snapshot stays as a cache.
pub const ANNOTATION_KEEP_SNAPSHOT_ON_DELETE: &str = "vm.cocoonstack.io/keep-snapshot-on-delete";
/// Name of the VM this one is forked from.
pub const ANNOTATION_FORK_FROM: &str = "vm.cocoonstack.io/fork-from";
/// Absolute path of an exported snapshot to clone from, past the snapshot database.
pub const ANNOTATION_CLONE_FROM_DIR: &str = "vm.cocoonstack.io/clone-from-dir";
/// Protocol by which a person connects.
pub const ANNOTATION_CONN_TYPE: &str = "vm.cocoonstack.io/conn-type";
/// Hypervisor the VM asks for.
pub const ANNOTATION_BACKEND: &str = "vm.cocoonstack.io/backend";
/// Present (`true`) when writable disks do not use O_DIRECT.
pub const ANNOTATION_NO_DIRECT_IO: &str = "vm.cocoonstack.io/no-direct-io";
/// TCP port that answers once the VM is ready; without it readiness is an ICMP answer.
pub const ANNOTATION_PROBE_PORT: &str = "vm.cocoonstack.io/probe-port";
/// State of the VM's life as the node agent reports it.
pub const ANNOTATION_LIFECYCLE_STATE: &str = "vm.cocoonstack.io/lifecycle-state";
/// The CocoonSet generation that state belongs to.
pub const ANNOTATION_LIFECYCLE_OBSERVED_GENERATION: &str = "vm.cocoonstack.io/lifecycle-observed-generation";
/// Why the state is what it is; absent when there is nothing to say.
pub const ANNOTATION_LIFECYCLE_STATE_MESSAGE: &str = "vm.cocoonstack.io/lifecycle-state-message";
/// JSON object of OCI annotations put on every snapshot pushed for the pod.
pub const ANNOTATION_SNAPSHOT_ANNOTATIONS: &str = "vm.cocoonstack.io/snapshot-annotations";
/// Asks for a live snapshot: `repo[:tag]`.
pub const ANNOTATION_SNAPSHOT_REQUEST: &str = "vm.cocoonstack.io/snapshot";
/// Answer to [`ANNOTATION_SNAPSHOT_REQUEST`], JSON.
pub const ANNOTATION_SNAPSHOT_STATUS: &str = "vm.cocoonstack.io/snapshot-status";
/// Base64 of the shell lines that set up a clone's network by hand.
pub const ANNOTATION_POST_CLONE_HINT: &str = "vm.cocoonstack.io/post-clone-hint";
/// What the automatic set-up of a clone failed with.
pub const ANNOTATION_POST_CLONE_ERRORS: &str = "vm.cocoonstack.io/post-clone-errors";
/// `running`, `done` or `failed` around the set-up of a clone; a restart marker.
pub const ANNOTATION_POST_CLONE_STATE: &str = "vm.cocoonstack.io/post-clone-state";
/// Private to this project: id of the snapshot the running VM woke from. Written in the same patch as
/// id and address, it lets the operator drop exactly the tag that was consumed.
pub const ANNOTATION_WOKEN_FROM: &str = "vm.cocoonstack.io/woken-from";

/// Tag a hibernation snapshot is pushed under.
pub const HIBERNATE_SNAPSHOT_TAG: &str = "hibernate";
/// Tag a routine snapshot is pushed under when its pod goes.
pub const DEFAULT_SNAPSHOT_TAG: &str = "latest";
/// Added to the VM name for the local import of a hibernation snapshot, so that it never collides with
/// the live VM.
pub const HIBERNATE_IMPORT_SUFFIX: &str = "-hibernate-import";
/// Snapshot annotations under this prefix belong to the wire format; callers may not set them.
pub const RESERVED_SNAPSHOT_ANNOTATION_PREFIX: &str = "cocoonstack.";

/// The one text that means true; anything else, and absence, is false.
pub const TRUE: &str = "true";
