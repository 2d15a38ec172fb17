//! A process by identity: its id, its start time and the boot, so that a reused id is never taken for it.
//!
//! Entry points: [`Process::of_pid_file`], [`Process::alive`], [`Process::kill`]. Signals and waiting go
//! through pidfds. Invariant: a process that cannot be looked at is never said to be gone.

use std::{io, os::fd::AsFd as _, path::Path, sync::OnceLock, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid},
};
use serde::{Deserialize, Serialize};

use crate::paths::named;

/// A process of this boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Which boot of the host.
    pub(crate) boot: u64,
    /// Process id.
    pub(crate) pid: u32,
    /// Clock ticks after boot at which it started.
    pub(crate) start: u64,
}

const fn is_dead(state: char) -> bool {
    matches!(state, 'Z' | 'X')
}

/// This boot of the host.
fn this_boot() -> io::Result<u64> {
    static BOOT: OnceLock<u64> = OnceLock::new();
    if let Some(boot) = BOOT.get() {
        return Ok(*boot);
    }
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    let boot = u64::from_str_radix(&digits, 16).map_err(io::Error::other)?;
    Ok(*BOOT.get_or_init(|| boot))
}

/// The first line of a pid file; the process' own `stat` line follows.
pub(crate) fn pid_file_head() -> io::Result<String> {
    Ok(format!("{}\n", this_boot()?))
}

/// Boot and process of a pid file.
fn parse_pid_file(text: &str) -> Option<Process> {
    let (boot, stat) = text.split_once('\n')?;
    parse_stat(stat, boot.parse().ok()?).map(|(process, _)| process)
}

/// Process id, state and start time from a line of `/proc/PID/stat`.
fn parse_stat(line: &str, boot: u64) -> Option<(Process, char)> {
    // The command stands in parentheses and may itself hold spaces and parentheses.
    let (head, tail) = line.rsplit_once(')')?;
    let pid = head.split(' ').next()?.parse().ok()?;
    let mut fields = tail.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // Field 22 of the line; the state was field 3.
    let start = fields.nth(18)?.parse().ok()?;
    Some((Process { boot, pid, start }, state))
}

/// What the answer of `/proc/PID/stat` says of the process. `None`: there is none. All else that stands in the
/// way, such as a limit on open files, says nothing about it.
fn seen(stat: io::Result<String>, boot: u64) -> io::Result<Option<(Process, char)>> {
    match stat {
        Ok(line) => parse_stat(&line, boot).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()),
        // The second is the answer while it goes.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Process {
    /// The process that wrote its `stat` line into `path` (`sys::Confinement::pid_file`). `None`: no
    /// file, or no process in it, so none was ever started for it.
    pub(crate) fn of_pid_file(path: &Path) -> io::Result<Option<Self>> {
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(parse_pid_file(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The running process `pid`, if there is one.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn of_pid(pid: u32) -> Option<Self> {
        let found = Self::look(pid).unwrap();
        found.filter(|(_, state)| !is_dead(*state)).map(|(process, _)| process)
    }

    fn look(pid: u32) -> io::Result<Option<(Self, char)>> {
        // Without a `/proc` there is no boot either: then this is no answer, not "gone".
        let (boot, path) = (this_boot()?, format!("/proc/{pid}/stat"));
        seen(std::fs::read_to_string(&path), boot).map_err(|error| named(Path::new(&path), &error))
    }

    /// Whether it still runs; an error is no answer. A zombie does not; one of ours is reaped.
    pub(crate) fn alive(self) -> io::Result<bool> {
        Ok(match Self::look(self.pid)? {
            Some((process, state)) if process == self && !is_dead(state) => true,
            // Only this very zombie: another child of ours may have the id by now.
            Some((process, _)) if process == self => {
                self.reap();
                false
            }
            _ => false,
        })
    }

    /// Its state, as a letter of `/proc/PID/stat`; `None`: it is gone.
    pub(crate) fn state(self) -> io::Result<Option<char>> {
        let found = Self::look(self.pid)?.filter(|(process, _)| *process == self);
        Ok(found.map(|(_, state)| state))
    }

    fn reap(self) {
        if let Some(pid) = self.raw() {
            // Somebody else's child: nothing to reap.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        }
    }

    fn raw(self) -> Option<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw)
    }

    /// Kills it, if `is_ours` says so of the running process, and waits until it is gone. Returns whether it is:
    /// gone already is success, somebody else's goes on. Blocks.
    pub(crate) fn kill(
        self,
        limit: Duration,
        is_ours: impl FnOnce() -> io::Result<bool>,
    ) -> io::Result<bool> {
        self.end(Some(Signal::KILL), limit, is_ours)
    }

    /// Waits until it is gone. Blocks.
    pub(crate) fn wait(self, limit: Duration) -> io::Result<()> {
        self.end(None, limit, || Ok(true)).map(drop)
    }

    fn end(
        self,
        signal: Option<Signal>,
        limit: Duration,
        is_ours: impl FnOnce() -> io::Result<bool>,
    ) -> io::Result<bool> {
        let Some(pid) = self.raw() else { return Ok(true) };
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => handle,
            Err(Errno::SRCH) => return Ok(true),
            Err(error) => return Err(error.into()),
        };
        // The descriptor is fixed to one process; only now is it known which.
        if !self.alive()? {
            return Ok(true);
        }
        if !is_ours()? {
            return Ok(false);
        }
        if let Some(signal) = signal {
            match pidfd_send_signal(&handle, signal) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let timeout = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        let ready = poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&timeout))?;
        if ready == 0 {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("process {} did not end", self.pid)));
        }
        // Reaps it if it was ours; somebody else's child cannot be, and need not.
        let _ = waitid(WaitId::PidFd(handle.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_name_with_spaces_and_parentheses_does_not_hide_the_start_time() {
        let line = "4242 (a) b (c) S 1 4242 4242 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 2 3";
        let process = Process { boot: 7, pid: 4242, start: 987_654 };
        assert_eq!(parse_stat(line, 7), Some((process, 'S')));
        assert_eq!(parse_pid_file(&format!("7\n{line}\n")), Some(process));
        for text in ["garbage", "", "7\n", "7\n4242 (a) S", &format!("x\n{line}")] {
            assert_eq!(parse_pid_file(text), None, "{text:?}");
        }
    }

    #[test]
    fn only_an_answer_that_there_is_no_such_process_means_that_it_is_gone() {
        let line = "42 (a) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 2 3";
        let process = Process { boot: 7, pid: 42, start: 987_654 };
        let failed = |code: i32| Err(io::Error::from_raw_os_error(code));
        for (what, stat, known) in [
            ("it runs", Ok(line.to_owned()), Some(Some((process, 'S')))),
            ("there is none", failed(libc::ENOENT), Some(None)),
            ("it went meanwhile", failed(libc::ESRCH), Some(None)),
            ("this process has no descriptor left", failed(libc::EMFILE), None),
            ("the host has none left", failed(libc::ENFILE), None),
            ("no memory", failed(libc::ENOMEM), None),
            ("not allowed", failed(libc::EACCES), None),
            ("interrupted", failed(libc::EINTR), None),
            ("half a line", Ok("42 (a) S".into()), None),
            ("nothing", Ok(String::new()), None),
        ] {
            assert_eq!(seen(stat, 7).ok(), known, "{what}");
        }
    }

    #[test]
    #[expect(clippy::zombie_processes, reason = "the code under test reaps it")]
    fn a_child_is_alive_until_killed_and_a_stranger_with_its_id_is_not_it() {
        let child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = Process::of_pid(child.id()).unwrap();
        assert!(process.alive().unwrap());
        assert!(!Process { start: process.start + 1, ..process }.alive().unwrap());
        assert!(!Process { boot: process.boot + 1, ..process }.alive().unwrap());
        let stranger = Process { start: process.start + 1, ..process };
        assert!(stranger.kill(Duration::from_secs(1), || Ok(true)).unwrap());
        assert!(process.alive().unwrap());
        assert!(!process.kill(Duration::from_secs(1), || Ok(false)).unwrap(), "somebody else's goes on");
        let doubt = || Err(io::ErrorKind::PermissionDenied.into());
        assert!(process.kill(Duration::from_secs(1), doubt).is_err(), "so does one of which nobody knows");
        assert!(process.alive().unwrap());
        assert!(process.kill(Duration::from_secs(120), || Ok(true)).unwrap());
        assert!(!process.alive().unwrap());
        assert!(process.kill(Duration::from_secs(120), || Ok(true)).unwrap());
    }
}
