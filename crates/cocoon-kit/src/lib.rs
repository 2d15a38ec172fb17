//! What every daemon of this workspace needs and nothing more.
//!
//! - [`world`]: clock, ids and randomness as a value, so that tests decide what time it is;
//! - [`backoff`]: growing delays with jitter and a ceiling;
//! - [`tasks`]: named background tasks with an owner, a kind and an end;
//! - [`files`]: durable file replacement (write, sync, rename, sync the folder) and file locks;
//! - [`tls`]: a small certificate authority, TLS configurations, and who a certificate is of;
//! - [`door`]: who gets a place at a TLS port, and for how long without being known;
//! - [`head`]: the answer to a HEAD, over every version of HTTP;
//! - [`failure`]: an error and its causes as one sentence;
//! - [`telemetry`]: one place that sets up logging to stderr.
//!
//! Invariant: nothing here knows Kubernetes, virtual machines or registries.

pub mod backoff;
pub mod door;
pub mod failure;
pub mod files;
pub mod head;
pub mod tasks;
pub mod telemetry;
pub mod tls;
pub mod world;
