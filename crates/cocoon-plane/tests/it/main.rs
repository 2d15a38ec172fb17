//! The plane as its clients see it: requests in, answers and watches out.

// Helpers of tests are test code, too; clippy's own exception covers the test functions only.
#![allow(clippy::unwrap_used, clippy::panic)]

mod controllers;
mod kube_client;
mod objects;
mod server;
mod support;
mod watches;
