//! Checks that span crates: the golden vectors ([`vectors`]) and the measurements ([`bench`]).

pub mod bench;
pub mod vectors;
