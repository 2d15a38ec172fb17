//! Node agent: a virtual kubelet that turns pods into VMs.
