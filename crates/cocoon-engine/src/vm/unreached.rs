//! Why the QEMU of a running VM cannot be reached, and what helps.
//!
//! Entry point: [`explained`]. Somebody may stop a QEMU by a signal, or take its sockets away; its guest is not lost by
//! that, but what the kernel says of it ("Resource temporarily unavailable") helps nobody.

use std::{error::Error, io};

use thiserror::Error;

use crate::{paths::RunFolder, process::Process, qemu::qmp::QmpError};

/// A QEMU that runs and is not reached, in words.
#[derive(Debug, Error)]
#[error("{why}")]
pub(crate) struct Unreached {
    why: String,
    #[source]
    source: Box<dyn Error + Send + Sync>,
}

/// What stands in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Obstacle {
    /// Its sockets are gone, or nobody listens at them.
    Sockets,
    /// It says nothing.
    Silence,
    /// The guest says nothing, which is the guest's affair unless its QEMU stands still.
    Guest,
}

/// `error` with the state of the VM's QEMU and the way out, if that is not reached at all; else as it was.
pub(crate) fn explained(
    run: &RunFolder,
    vm: &str,
    error: impl Error + Send + Sync + 'static,
) -> Box<dyn Error + Send + Sync> {
    let Some(obstacle) = obstacle(&error) else { return error.into() };
    let process = Process::of_pid_file(&run.pid_file()).ok().flatten();
    let state = process.and_then(|process| Some((process.pid, process.state().ok().flatten()?)));
    match sentence(vm, &run.0.display().to_string(), obstacle, state) {
        Some(why) => Unreached { why, source: error.into() }.into(),
        None => error.into(),
    }
}

fn obstacle(error: &(dyn Error + 'static)) -> Option<Obstacle> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(QmpError::Silent(_)) = error.downcast_ref() {
            return Some(Obstacle::Silence);
        }
        if let Some(cocoon_guest::host::GuestError::Silent(_)) = error.downcast_ref() {
            return Some(Obstacle::Guest);
        }
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return match io.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Some(Obstacle::Sockets),
                io::ErrorKind::WouldBlock => Some(Obstacle::Silence),
                _ => None,
            };
        }
        next = error.source();
    }
    None
}

/// What to say, given the process' id and state as in `/proc/PID/stat`. A process that ended says more elsewhere.
fn sentence(vm: &str, folder: &str, obstacle: Obstacle, process: Option<(u32, char)>) -> Option<String> {
    let anew = format!(
        "`cocoon vm stop --force {vm}` and `cocoon vm start {vm}` boot it anew from its disk (what is only in its \
         memory is lost)"
    );
    match (process?, obstacle) {
        ((_, 'Z' | 'X'), _) => None,
        ((pid, 'T' | 't'), _) => Some(format!(
            "QEMU of VM {vm} (process {pid}) was stopped by a signal or a debugger; `kill -CONT {pid}` lets it go on \
             and nothing is lost; {anew}"
        )),
        (_, Obstacle::Guest) => None,
        ((pid, _), Obstacle::Sockets) => Some(format!(
            "QEMU of VM {vm} (process {pid}) runs, but its sockets in {folder} were removed, and without them it can be \
             told nothing; {anew}"
        )),
        ((pid, state), Obstacle::Silence) => Some(format!(
            "QEMU of VM {vm} (process {pid}, state {state}) does not answer; a host that is busy or whose disk hangs \
             makes it slow, then try again; {anew}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::process::{Signal, kill_process};

    use super::*;
    use crate::{process::pid_file_head, vm::connect};

    #[test]
    fn each_state_of_a_qemu_that_is_not_reached_is_told_with_its_way_out() {
        use Obstacle::{Guest, Silence, Sockets};
        for (obstacle, process, said) in [
            (Silence, Some((7, 'T')), Some("`kill -CONT 7`")),
            (Sockets, Some((7, 't')), Some("`kill -CONT 7`")),
            (Sockets, Some((7, 'S')), Some("its sockets in /run/a were removed")),
            (Silence, Some((7, 'D')), Some("state D) does not answer")),
            (Guest, Some((7, 'T')), Some("`kill -CONT 7`")),
            (Guest, Some((7, 'S')), None),
            (Silence, Some((7, 'Z')), None),
            (Sockets, None, None),
        ] {
            let text = sentence("vm-a", "/run/a", obstacle, process);
            assert_eq!(text.is_some(), said.is_some(), "{text:?}");
            for part in said.into_iter().flat_map(|said| [said, "VM vm-a (process 7", "cocoon vm start vm-a"])
            {
                assert!(text.as_ref().unwrap().contains(part), "{text:?}");
            }
        }
        let refused = QmpError::Refused { command: "stop".into(), message: "no".into() };
        assert_eq!(obstacle(&refused), None, "it answered");
        assert_eq!(obstacle(&QmpError::Io(io::ErrorKind::WouldBlock.into())), Some(Silence));
    }

    #[tokio::test]
    async fn a_stopped_process_and_removed_sockets_are_told_by_who_connects() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder(folder.path().to_owned());
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Process::of_pid(child.id()).unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.pid)).unwrap();
        std::fs::write(run.pid_file(), pid_file_head().unwrap() + &stat).unwrap();
        let said = async || cocoon_kit::failure::chain(&connect(&run, "vm-a").await.unwrap_err());
        let text = said().await;
        assert!(
            text.starts_with("monitor of VM vm-a: QEMU of VM vm-a") && text.contains("were removed"),
            "{text}"
        );
        kill_process(rustix::process::Pid::from_child(&child), Signal::STOP).unwrap();
        while pid.state().unwrap() != Some('T') {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let text = said().await;
        assert!(text.contains(&format!("kill -CONT {}", pid.pid)), "{text}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
