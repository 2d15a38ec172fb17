//! Controllers.
