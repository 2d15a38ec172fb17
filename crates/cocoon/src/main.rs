//! One binary: command line, configuration, wiring.
fn main() {}
