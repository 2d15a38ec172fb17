//! Controllers. Today: the one rule that drops a consumed hibernate tag.
//!
//! Entry point: [`hibernate_tags::run`]. `CocoonSet` and `CocoonHibernation` get their controllers beside it.

pub mod hibernate_tags;
