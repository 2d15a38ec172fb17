//! Embedded Kubernetes API of one machine (ARCHITECTURE.md, "The plane").
//!
//! Entry point: [`plane::Plane`]. The way of a request: `server` (TLS, identity) or [`plane::Plane::service`],
//! `http` (path, verb, shape of the answer), `authz` (may he), `objects` (read, compute, commit, wait until
//! durable), `rules` (what a create, update or delete makes of an object), `store` (objects, indexes, watch
//! window, watchers; one synchronous owner), `journal` (durability as a port: SQLite, or nothing).
//!
//! - `resources`: a table row for each kind, with its defaults, rules, columns and list keys: add a kind there;
//! - `patch`, `fields`, `selector`, `validate`, `proto`: reading what clients send;
//! - `controllers`: scheduler, owner-reference collector, namespaces, node health, old events;
//! - `proxy`: logs and exec to the node.
//!
//! What is not implemented is refused in the API's own words; nothing is guessed. Places are left for custom
//! resources (`resources::by_path`), server-side apply (`patch::Patch::parse`) and port-forward
//! (`http::special`).

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
