//! Golden vectors, benches, conformance.
