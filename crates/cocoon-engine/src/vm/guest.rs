//! Guest ports: who may use which, and an open channel on one.
//!
//! Port 0 belongs to the holder of `agent.lock`; the others are claimed by flock, one a call.

use std::{io, path::Path, time::Duration};

use cocoon_guest::host::{Channel, GuestError};
use cocoon_kit::files::Lock;
use rustix::fs::{FlockOperation, flock};
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    paths::{LogFolder, RunFolder, connect, named},
    qemu::command::GUEST_PORTS,
};

/// Why no channel could be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum PortError {
    /// All ports are in use.
    #[error(
        "all {GUEST_PORTS} guest ports are in use; end another session with this guest (`cocoon vm exec`), then try again"
    )]
    Busy,
    /// The socket or the lock file.
    #[error("guest port")]
    Io(#[from] io::Error),
    /// The agent.
    #[error("guest agent")]
    Guest(#[from] GuestError),
}

/// An open channel with the lock that makes its port ours.
#[derive(Debug)]
pub(crate) struct Open {
    /// The channel.
    pub(crate) channel: Channel,
    /// Held as long as the channel is used.
    pub(crate) lock: Lock,
}

/// Claims a port and opens a channel on it, within `limit`.
pub(crate) async fn open(run: &RunFolder, agent_port: bool, limit: Duration) -> Result<Open, PortError> {
    let deadline = Instant::now() + limit;
    let (index, lock) = loop {
        if let Some(found) = claim(run, agent_port)? {
            break found;
        }
        if Instant::now() >= deadline {
            return Err(PortError::Busy);
        }
        sleep(Duration::from_millis(20)).await;
    };
    let rest = deadline.saturating_duration_since(Instant::now());
    let silent = || GuestError::Silent(limit);
    let stream = timeout_at(deadline, connect(&run.port(index))).await.map_err(|_| silent())??;
    let channel = timeout_at(deadline, Channel::open(stream, rest)).await.map_err(|_| silent())??;
    Ok(Open { channel, lock })
}

fn claim(run: &RunFolder, agent_port: bool) -> io::Result<Option<(usize, Lock)>> {
    let ports = if agent_port { 0..1 } else { 1..GUEST_PORTS };
    for index in ports {
        let path = run.port_lock(index);
        let lock = Lock::try_acquire(&path).map_err(|error| named(&path, &error))?;
        if let Some(lock) = lock {
            return Ok(Some((index, lock)));
        }
    }
    Ok(None)
}

/// Cuts what a guest can make grow: its console, and QEMU's complaints about it. Costs two looks at a
/// file's length as long as nothing grew. A log that cannot be cut says nothing about its VM, so it only
/// warns.
pub(crate) fn trim_logs(logs: &LogFolder) {
    for path in [logs.console(), logs.qemu()] {
        if let Err(error) = trim_console(&path) {
            tracing::warn!(%error, path = %path.display(), "a log could not be cut");
        }
    }
}

/// Cuts a log that has grown past 4 MiB to its last MiB. QEMU appends, so it goes on.
fn trim_console(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileExt as _;
    const LIMIT: u64 = 4 << 20;
    const KEPT: usize = 1 << 20;
    let file = match std::fs::File::options().read(true).append(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let length = file.metadata()?.len();
    if length <= LIMIT {
        return Ok(());
    }
    // Two that cut at once would each put back what the other had put back.
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    let length = file.metadata()?.len();
    if length <= LIMIT {
        return Ok(());
    }
    let mut kept = vec![0; KEPT];
    file.read_exact_at(&mut kept, length - KEPT as u64)?;
    let first_line = kept.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    file.set_len(0)?;
    io::Write::write_all(&mut &file, kept.get(first_line..).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_console_keeps_its_last_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.log");
        trim_console(&path).unwrap();
        std::fs::write(&path, "short\n").unwrap();
        trim_console(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "short\n");
        let line = "0123456789\n";
        std::fs::write(&path, line.repeat(500_000)).unwrap();
        trim_console(&path).unwrap();
        let kept = std::fs::read_to_string(&path).unwrap();
        assert!(kept.len() <= 1 << 20 && kept.len() > 1 << 19);
        assert!(kept.lines().all(|kept| kept.len() == 10));
    }

    #[test]
    fn a_log_that_somebody_else_is_cutting_is_left_to_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.log");
        std::fs::write(&path, "x".repeat(5 << 20)).unwrap();
        let other = std::fs::File::open(&path).unwrap();
        flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        trim_console(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 5 << 20);
        // Closing alone lets go only once no process that is being started shares the descriptor.
        flock(&other, FlockOperation::Unlock).unwrap();
        trim_console(&path).unwrap();
        assert!(std::fs::metadata(&path).unwrap().len() <= 1 << 20);
    }

    #[test]
    fn port_zero_is_the_agents_alone_and_the_others_are_handed_out_once() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder(folder.path().to_owned());
        let calls: Vec<_> = (1..GUEST_PORTS).map(|_| claim(&run, false).unwrap().unwrap()).collect();
        assert!(calls.iter().all(|(index, _)| *index > 0));
        assert!(claim(&run, false).unwrap().is_none());
        assert_eq!(claim(&run, true).unwrap().unwrap().0, 0);
        drop(calls);
        assert!(claim(&run, false).unwrap().is_some());
    }
}
