//! The VM engine: hypervisors, images, disks, snapshots, gc. Knows no Kubernetes.
//!
//! - [`model`]: records and requests, as users and callers see them (`engine-cli` §1);
//! - [`error`]: one enum an operation, with the phrases of `engine-cli` §1.8;
//! - [`engine`]: [`engine::Engine`], the one entry point;
//! - `records`: SQLite, one file for all indexes;
//! - `vm`: bring-up and teardown as phases that unwind;
//! - `qemu`: command line (pure), launch and confinement, QMP, memory capture;
//! - `image`: layers to erofs, boot files, the writable disk;
//! - `snapshot`: the snapshot store and `qemu.json`;
//! - `room`: what a full disk lacks;
//! - `gc`: what nothing needs any more;
//! - `sys`: the crate's only unsafe code.

pub mod db;
pub mod embed;
pub mod engine;
pub mod error;
pub mod image;
pub mod model;

mod cgroup;
mod disk;
mod gc;
mod hold;
mod paths;
mod process;
mod qemu;
mod records;
mod room;
mod snapshot;
mod sys;
mod vm;
