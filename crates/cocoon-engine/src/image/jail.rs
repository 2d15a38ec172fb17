//! A thread whose view of one folder is `nodev,nosuid,noexec`.
//!
//! Entry point: [`inside`]. The mount lives in a mount namespace of that thread alone, so it is gone
//! when the thread ends, however it ends. Where a namespace cannot be had the work goes on without it:
//! it is the second fence, the first being that no device node or setuid file is ever made.

use std::{io, path::Path};

use rustix::mount::{MountFlags, MountPropagationFlags, mount_bind, mount_change, mount_remount};

/// Runs `work` on a thread of its own, behind the fence around `folder`, and waits for it.
pub(super) fn inside<T: Send>(folder: &Path, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("cocoon-unpack".to_owned()).spawn_scoped(scope, || {
            if let Err(error) = fence(folder) {
                tracing::warn!(folder = %folder.display(), %error, "unpacking without a nodev, nosuid mount");
            }
            work()
        })?;
        thread.join().map_err(|_| io::Error::other("the unpacking thread panicked"))
    })
}

fn fence(folder: &Path) -> rustix::io::Result<()> {
    super::sys::own_mount_namespace()?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount_bind(folder, folder)?;
    mount_remount(folder, MountFlags::BIND | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC, "")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_fence_is_seen_by_the_thread_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap().to_owned();
        let line = |table: String| {
            table.lines().find(|line| line.split(' ').nth(4) == Some(&path)).map(str::to_owned)
        };
        let within = super::inside(folder.path(), || {
            line(std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap())
        });
        let within = within.unwrap().expect("needs root: the bind mount must be there");
        assert!(["nodev", "nosuid", "noexec"].iter().all(|flag| within.contains(flag)), "{within}");
        assert_eq!(line(std::fs::read_to_string("/proc/self/mountinfo").unwrap()), None);
    }
}
