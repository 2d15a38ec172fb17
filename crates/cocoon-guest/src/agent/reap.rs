//! PID 1 inherits orphans: what nobody of ours waits for is reaped here.
//!
//! Entry points: [`Claim`] marks a child that its owner waits for; [`start`] reaps all others.

use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::process::{Pid, WaitOptions, waitpid};
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::sleep,
};

use super::say;

static CLAIMED: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
/// Orphans die in swarms; one look for all of them.
const SETTLE: Duration = Duration::from_millis(50);

fn claimed() -> MutexGuard<'static, BTreeSet<i32>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A child that somebody waits for. To be made before the reaper can run: the agent is single-threaded,
/// so it is enough not to await between spawning and claiming.
#[derive(Debug)]
pub(crate) struct Claim(Pid);

impl Claim {
    /// Claims a child.
    pub(crate) fn new(pid: u32) -> Option<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
        claimed().insert(pid.as_raw_nonzero().get());
        Some(Self(pid))
    }

    /// The child.
    pub(crate) fn pid(&self) -> Pid {
        self.0
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        claimed().remove(&self.0.as_raw_nonzero().get());
    }
}

/// Reaps orphans for ever.
pub(crate) fn start(tasks: &mut JoinSet<()>) {
    match signal(SignalKind::child()) {
        Ok(mut deaths) => {
            tasks.spawn(async move {
                while deaths.recv().await.is_some() {
                    sleep(SETTLE).await;
                    children().filter(|pid| !claimed().contains(pid)).for_each(reap);
                }
            });
        }
        Err(error) => say(&format!("cannot reap orphans: {error}")),
    }
}

fn reap(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        // Still alive, or reaped by another: both are fine.
        let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    }
}

/// Our children. A kernel without `CONFIG_PROC_CHILDREN` gets them from the parent field of each process.
fn children() -> Box<dyn Iterator<Item = i32>> {
    let me = std::process::id();
    if let Ok(list) = std::fs::read_to_string(format!("/proc/{me}/task/{me}/children")) {
        let pids: Vec<i32> = list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect();
        return Box::new(pids.into_iter());
    }
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    Box::new(entries.filter_map(move |entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        (parent(&stat)? == me).then_some(pid)
    }))
}

/// The parent in a `/proc/PID/stat`; the name before it may hold anything, parentheses too.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::parent;

    #[test]
    fn the_parent_is_found_behind_any_name() {
        for (stat, want) in [
            ("12 (sh) Z 1 12 12 0", Some(1)),
            ("12 (a) b (c) S 77 12", Some(77)),
            ("12 (sh", None),
            ("", None),
        ] {
            assert_eq!(parent(stat), want, "{stat}");
        }
    }
}
