//! The end of a guest: every process asked, then killed, disks synced and read-only, power off.
//!
//! Entry points: [`end`] (the agent's own subcommands, which the engine runs over the channel) and
//! [`start`] (signals to PID 1, as Ctrl-Alt-Del and busybox' `poweroff` send them).

use std::{
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    process::{Pid, Signal, kill_process, test_kill_process},
    system::{RebootCommand, reboot},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
};

use super::say;

/// How long processes get between the request and the kill.
const GRACE: Duration = Duration::from_secs(3);
/// Long enough for the kernel's own thread to remount all disks read-only.
const REMOUNT: Duration = Duration::from_millis(100);

/// How the guest ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Power off.
    PowerOff,
    /// Start again.
    Reboot,
}

/// Ends the guest. An image's own systemd does it its own way.
pub(crate) fn end(end: End) -> Result<(), String> {
    if std::process::id() != 1 && Path::new("/run/systemd/system").is_dir() {
        let verb = if end == End::PowerOff { "poweroff" } else { "reboot" };
        let status = Command::new("systemctl").arg("--no-block").arg(verb).stdin(Stdio::null()).status();
        if status.is_ok_and(|status| status.success()) {
            return Ok(());
        }
    }
    stop_processes();
    rustix::fs::sync();
    // Reaches file systems that have no path any more, such as the one under the overlay.
    if std::fs::write("/proc/sysrq-trigger", "u").is_ok() {
        thread::sleep(REMOUNT);
    }
    rustix::fs::sync();
    let command = if end == End::PowerOff { RebootCommand::PowerOff } else { RebootCommand::Restart };
    reboot(command).map_err(|error| format!("{end:?} refused: {error}"))
}

/// Asks all processes to end, then kills them. Neither PID 1 nor the caller is among them.
fn stop_processes() {
    let until = Instant::now() + GRACE;
    signal_all(Signal::TERM);
    while Instant::now() < until && others().any(|pid| test_kill_process(pid).is_ok()) {
        thread::sleep(Duration::from_millis(20));
    }
    signal_all(Signal::KILL);
}

fn signal_all(signal: Signal) {
    for pid in others() {
        // Gone already is as good.
        let _ = kill_process(pid, signal);
    }
}

/// Every process but kernel threads, PID 1, ourselves and our parent (the agent that serves the session).
fn others() -> impl Iterator<Item = Pid> {
    let (me, parent) = (std::process::id(), std::os::unix::process::parent_id());
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        if [1, me, parent].contains(&pid) {
            return None;
        }
        // Kernel threads and zombies have no command line.
        let command = std::fs::read(entry.path().join("cmdline")).ok()?;
        if command.is_empty() { None } else { Pid::from_raw(i32::try_from(pid).ok()?) }
    })
}

/// Obeys the signals that mean an end to PID 1.
pub(crate) fn start(tasks: &mut JoinSet<()>) {
    // Ctrl-Alt-Del becomes a SIGINT instead of a reset without sync.
    let _ = reboot(RebootCommand::CadOff);
    let meanings = [
        (SignalKind::interrupt(), End::Reboot),
        (SignalKind::terminate(), End::Reboot),
        (SignalKind::user_defined1(), End::PowerOff),
        (SignalKind::user_defined2(), End::PowerOff),
    ];
    for (kind, meaning) in meanings {
        let Ok(mut signals) = signal(kind) else { continue };
        tasks.spawn(async move {
            while signals.recv().await.is_some() {
                if let Err(why) = end(meaning) {
                    say(&why);
                }
            }
        });
    }
}
