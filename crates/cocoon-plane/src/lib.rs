//! Embedded Kubernetes API of one machine (ARCHITECTURE.md, "The plane").
//!
//! - `store`: objects, indexes and the watch window, one synchronous owner;
//! - `journal`: durability as a port (SQLite, or nothing);
//! - `resources`: a table row for each kind;
//! - `http`: routes, content negotiation, patches, tables, OpenAPI, discovery;
//! - `auth`: client certificates and tokens;
//! - `controllers`: scheduler, owner-reference collector, pod finalisation, node health, namespaces;
//! - `proxy`: logs and exec to the node.
//!
//! What is not implemented is refused in the API's own words; nothing is guessed.

mod auth;
mod authz;
mod controllers;
mod error;
mod fields;
mod http;
mod journal;
mod json;
mod objects;
mod patch;
pub mod plane;
mod proto;
mod proxy;
mod resources;
mod rules;
mod selector;
mod server;
mod store;
mod validate;
