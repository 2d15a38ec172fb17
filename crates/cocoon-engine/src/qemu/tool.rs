//! Short-lived helpers on what a guest wrote, such as `qemu-img`: confined like QEMU, and ended in time.
//!
//! Entry point: [`Tool::start`]. Invariant: a helper never outlives its [`Tool`].

use std::{
    io::{self, Read as _},
    os::fd::OwnedFd,
    process::{Child, Command, ExitStatus, Stdio},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};

use super::limit::Stop;
use crate::sys::{self, Confinement};

/// What is kept of what a helper says.
const SAID: u64 = 4096;
/// How often it is asked whether the helper has to end.
const PIECE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// A running helper; dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Tool(Child);

impl Tool {
    /// Starts `command` as user and group `uid`, besides in `group`, with the descriptors `keep`.
    pub(crate) fn start(
        mut command: Command,
        uid: u32,
        group: Option<u32>,
        keep: Vec<OwnedFd>,
    ) -> io::Result<Self> {
        command.stdin(Stdio::null());
        let confinement = Confinement {
            uid,
            group,
            keep,
            pid_file: None,
            cgroup: None,
            oom_score_adj: b"500",
            small_pages: false,
        };
        sys::spawn(command, confinement).map(Self)
    }

    /// Not confined: that needs root, and tests with real guests look at it.
    #[cfg(test)]
    pub(crate) fn unconfined(mut command: Command) -> io::Result<Self> {
        command.stdin(Stdio::null()).spawn().map(Self)
    }

    /// Waits until it ends. Told to stop first, it is an error.
    pub(crate) fn wait(&mut self, stop: &Stop) -> io::Result<ExitStatus> {
        let handle = pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty())?;
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            stop.check()?;
            match poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&PIECE)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The start of what an ended helper wrote to its piped standard output and error. Does not wait:
    /// something that it left behind may hold them open.
    pub(crate) fn said(&mut self) -> io::Result<String> {
        let mut said = Vec::new();
        if let Some(pipe) = self.0.stdout.take() {
            drain(pipe, &mut said)?;
        }
        if let Some(pipe) = self.0.stderr.take() {
            drain(pipe, &mut said)?;
        }
        Ok(String::from_utf8_lossy(&said).trim().to_owned())
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        // Ended already is an error that means nothing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn drain(pipe: impl Into<OwnedFd>, said: &mut Vec<u8>) -> io::Result<()> {
    let pipe = pipe.into();
    fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
    match std::fs::File::from(pipe).take(SAID).read_to_end(said) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::process::Process;

    fn shell(script: &str) -> Tool {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        Tool::unconfined(command).unwrap()
    }

    #[test]
    fn a_helper_that_is_told_to_stop_or_dropped_is_killed() {
        let mut tool = shell("exec sleep 600");
        let process = Process::of_pid(tool.0.id()).unwrap();
        let begun = Instant::now();
        let error = tool.wait(&Stop::after(Duration::from_millis(100))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(process.alive().unwrap());
        drop(tool);
        assert!(!process.alive().unwrap());
        assert!(begun.elapsed() < Duration::from_secs(300), "it was waited for");
    }

    #[test]
    fn what_an_ended_helper_said_is_known_even_if_something_of_it_lives_on() {
        let mut tool = shell("sleep 600 & echo $!; echo err >&2; exit 3");
        assert_eq!(tool.wait(&Stop::default()).unwrap().code(), Some(3));
        let said = tool.said().unwrap();
        let (left, error) = said.split_once('\n').unwrap();
        let left = Process::of_pid(left.parse().unwrap()).unwrap();
        assert_eq!((error, left.alive().unwrap()), ("err", true), "it was not waited for");
        left.kill(Duration::from_secs(120), || Ok(true)).unwrap();
    }
}
