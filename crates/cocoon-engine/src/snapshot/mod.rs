//! Snapshots: `qemu.json`, the files, the store.

pub(crate) mod adopt;
pub(crate) mod description;
pub(crate) mod qcow2;
pub(crate) mod store;
