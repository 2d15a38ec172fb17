//! The metadata contract of cocoonstack: keys, typed annotations, names, roles, policy, lifecycle.
