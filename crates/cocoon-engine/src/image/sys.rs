//! The one unsafe call of this module.
#![allow(unsafe_code)]

use rustix::thread::UnshareFlags;

/// Gives the calling thread a mount namespace of its own. Must be called on a thread that ends with the
/// work: the thread does not come back.
pub(super) fn own_mount_namespace() -> rustix::io::Result<()> {
    // SAFETY: unshare is unsafe for CLONE_FILES only, where descriptors of one thread vanish for others;
    // NEWNS leaves the descriptor table shared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
}
