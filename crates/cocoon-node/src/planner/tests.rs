//! Placeholder for the rows' tables.
