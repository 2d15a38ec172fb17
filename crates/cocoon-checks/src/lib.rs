//! Checks that span crates: today the golden vectors ([`vectors`]).

pub mod vectors;
