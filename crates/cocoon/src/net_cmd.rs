//! `cocoon net`: the network daemon, and taking the network down by hand.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use cocoon_net::{config::NetworkConfig, daemon};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::cli::settings::{Flags, Settings};

/// What `cocoon net` takes.
#[derive(Debug, Args)]
pub struct NetArgs {
    #[command(flatten)]
    pub(crate) flags: Flags,
    #[command(subcommand)]
    command: NetCommand,
}

#[derive(Debug, Subcommand)]
enum NetCommand {
    /// Serve DHCP on the bridge that `network.json` of the state folder describes; makes the bridge.
    #[command(
        after_help = "Example:\n  cocoon net daemon --state-dir /var/lib/cocoon/net\n\nExit status: 0 ended by a signal, 1 failed."
    )]
    Daemon {
        /// Folder with `network.json`, `leases.json`, lock and log; the --network-dir by default.
        #[arg(long, value_name = "DIR")]
        state_dir: Option<PathBuf>,
    },
    /// Remove bridge, rules and leases, and restore the sysctls that were changed.
    #[command(
        after_help = "Examples:\n  cocoon net teardown\n  cocoon net teardown --root-dir /srv/cocoon\n\nExit status: 0 nothing is left, 1 failed."
    )]
    Teardown {
        /// Also while VMs are attached: they lose their network.
        #[arg(long)]
        force: bool,
        /// Folder with `network.json`; the --network-dir by default.
        #[arg(long, value_name = "DIR")]
        state_dir: Option<PathBuf>,
    },
}

impl NetArgs {
    /// What the flags come to. One that names the state folder is enough: the daemon that `cocoon up` starts goes by
    /// nothing else.
    pub(crate) fn settings(&self, flags: Flags) -> anyhow::Result<Settings> {
        let (NetCommand::Daemon { state_dir } | NetCommand::Teardown { state_dir, .. }) = &self.command;
        match state_dir {
            Some(folder) => {
                let flags = Flags { network_dir: Some(folder.clone()), ..flags };
                Settings::resolve(flags, |_| None, "")
            }
            None => Settings::load(flags),
        }
    }
}

/// Runs a `cocoon net` command.
pub async fn run(args: &NetArgs, settings: &Settings) -> anyhow::Result<()> {
    match &args.command {
        NetCommand::Daemon { .. } => {
            // A session of its own: the terminal that started us may go away.
            let _ = rustix::process::setsid();
            let network = NetworkConfig::load(&settings.network_dir)?;
            let token = CancellationToken::new();
            let ended = token.clone();
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            tokio::spawn(async move {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                ended.cancel();
            });
            Ok(daemon::run(network.into(), token).await?)
        }
        NetCommand::Teardown { force, .. } => {
            Ok(daemon::teardown(&NetworkConfig::load(&settings.network_dir)?, *force).await?)
        }
    }
}
