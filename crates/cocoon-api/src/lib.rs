//! CRD types of cocoonstack: CocoonSet and CocoonHibernation.
