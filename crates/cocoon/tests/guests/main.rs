//! Real guests under a whole `cocoon up`, each in a lab of its own (`xtask::lab`).
//!
//! Run by `cargo xtask test --only guests`; one at a time, since they share two cores.

#![allow(clippy::panic, reason = "a helper of a test fails the test")]

mod bad_input;
mod common;
mod faults;
mod hardship;
mod story;
