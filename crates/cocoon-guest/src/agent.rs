//! The guest's side: the agent `cocoon-guest-agent`.
//!
//! Entry point: [`main`], which the binary calls. One program, by its first argument:
//!
//! | call | work |
//! |---|---|
//! | `/init` as PID 1 | [`boot`]: from the initrd into the image's root, then one of the next two |
//! | `serve` as PID 1 | serve the ports, reap what is left behind, run DHCP |
//! | `keep` beside `/sbin/init` | run `serve` and start it again should it end |
//! | `serve` beside `/sbin/init` | serve the ports, run DHCP |
//! | `poweroff`, `reboot` | end the guest in good order |
//!
//! The agent is single-threaded; a session is [`session::serve`], a port [`link`].

mod boot;
mod cmdline;
mod dhcp;
mod identity;
pub mod link;
mod machine;
mod network;
mod port;
mod power;
mod reap;
pub mod session;

use std::{process::ExitCode, sync::Arc};

use tokio::task::JoinSet;

use self::{machine::Guest, session::Machine};

/// Where the agent, its busybox and its scripts live in the image's root, on a tmpfs of their own.
pub(crate) const HOME: &str = "/run/cocoon";

/// A line on the console.
pub(crate) fn say(text: &str) {
    eprintln!("cocoon: {text}");
}

/// The binary's entry point.
#[must_use]
pub fn main() -> ExitCode {
    let verb = std::env::args().nth(1);
    let result = match verb.as_deref() {
        Some("serve") => serve(),
        Some("keep") => boot::keep(),
        Some("poweroff") => power::end(power::End::PowerOff),
        Some("reboot") => power::end(power::End::Reboot),
        // The kernel passes words it does not know to PID 1, so any others mean nothing.
        _ if std::process::id() == 1 => boot::boot(),
        _ => Err("usage: cocoon-guest-agent serve|poweroff|reboot (as PID 1: boots the guest)".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            say(&why);
            ExitCode::FAILURE
        }
    }
}

/// Serves for ever.
fn serve() -> Result<(), String> {
    // PID 1 is spared anyhow; beside another one, memory is to be found elsewhere. Commands are reset.
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-900") {
        say(&format!("oom_score_adj: {error}"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("no runtime: {error}"))?;
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        let machine: Arc<dyn Machine> = Arc::new(Guest { leases: dhcp::start(&mut tasks) });
        say(&format!("{} is up", rustix::system::uname().nodename().to_string_lossy()));
        for index in 0..port::PORTS {
            tasks.spawn(port::serve(index, Arc::clone(&machine)));
        }
        if std::process::id() == 1 {
            reap::start(&mut tasks);
            power::start(&mut tasks);
        }
        // None of them ends but by a bug; PID 1 must go on without it.
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended {
                say(&format!("a task of the agent failed: {error}"));
            }
        }
        Err("nothing left to serve".into())
    })
}
