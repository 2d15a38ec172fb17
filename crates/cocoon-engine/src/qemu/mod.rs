//! QEMU: the machine, its command line, launch and confinement, QMP, memory.

pub(crate) mod command;
pub(crate) mod launch;
pub(crate) mod limit;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod qmp;
pub(crate) mod tool;
pub(crate) mod version;
