//! References, registries (OCI layout now, the distribution API later), snapshot and OS-image artifacts.
//!
//! - [`registry`]: the port, and its error that tells "not there" from "could not tell";
//! - [`layout`]: an OCI image-layout folder as a registry;
//! - [`reference`], [`media`], [`manifest`], [`digest`]: names and kinds (`spec/snapshot-wire-format.md` §4, §12, §14);
//! - [`snapshot`]: snapshot artifacts, pushed from and pulled into a folder of files;
//! - [`stream`]: the export tar with sparse records (§5, `engine-cli` §3);
//! - [`cloudimg`]: OS images (§13);
//! - [`memory`]: a registry in memory, for tests and golden vectors;
//! - [`image`]: container images, read layer by layer.
//!
//! The artifact code does no I/O of its own: it reads and writes through the port and through folders
//! that the caller names. Every byte that comes out of a registry is verified against its digest.

pub mod cloudimg;
pub mod digest;
pub mod image;
mod json;
pub mod layout;
pub mod manifest;
pub mod media;
pub mod memory;
mod patience;
pub mod reference;
pub mod registry;
pub mod snapshot;
pub mod stream;
mod tarfmt;
