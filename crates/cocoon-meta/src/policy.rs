//! Decisions that node agent and operator must take alike: when to save a VM, and how to connect to it.

use cocoon_api::SnapshotPolicy;

use crate::names::Role;
use crate::vm::VmSpec;

/// Whether a VM is saved as `:latest` when its pod goes. Policy and role decide, whether the VM is
/// managed does not: that is the caller's question. An unset policy is `always`.
pub fn should_snapshot_vm(spec: &VmSpec, role: Role) -> bool {
    should_snapshot(&spec.snapshot_policy(), role)
}

/// The same for a policy that was read elsewhere.
pub fn should_snapshot(policy: &SnapshotPolicy, role: Role) -> bool {
    match policy {
        SnapshotPolicy::Never => false,
        SnapshotPolicy::MainOnly => role == Role::Main,
        // Unknown policies save: too many snapshots can be deleted, a lost VM cannot be had again.
        SnapshotPolicy::Always | SnapshotPolicy::Other(_) => true,
    }
}

/// Protocol by which a person connects: an explicit one wins, then a VNC port, then the guest's system
/// (android: adb, windows: rdp, else ssh). All three are texts, unknown ones pass through.
pub fn connection_type<'a>(os: &str, has_vnc_port: bool, override_with: &'a str) -> &'a str {
    match (override_with, has_vnc_port, os) {
        (set, _, _) if !set.is_empty() => set,
        (_, true, _) => "vnc",
        (_, _, "android") => "adb",
        (_, _, "windows") => "rdp",
        _ => "ssh",
    }
}
