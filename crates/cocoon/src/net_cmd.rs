//! `cocoon net`: the network daemon, and taking the network down by hand.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use cocoon_net::{config::NetworkConfig, daemon};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// What `cocoon net` takes.
#[derive(Debug, Args)]
pub struct NetArgs {
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
        /// Folder with `network.json`, `leases.json`, lock and log.
        #[arg(long, default_value = "/var/lib/cocoon/net")]
        state_dir: PathBuf,
    },
    /// Remove bridge, rules and leases, and restore the sysctls that were changed.
    #[command(after_help = "Example:\n  cocoon net teardown\n\nExit status: 0 nothing is left, 1 failed.")]
    Teardown {
        /// Also while VMs are attached: they lose their network.
        #[arg(long)]
        force: bool,
        /// Folder with `network.json`.
        #[arg(long, default_value = "/var/lib/cocoon/net")]
        state_dir: PathBuf,
    },
}

/// Runs a `cocoon net` command.
pub async fn run(args: &NetArgs) -> anyhow::Result<()> {
    match &args.command {
        NetCommand::Daemon { state_dir } => {
            // A session of its own: the terminal that started us may go away.
            let _ = rustix::process::setsid();
            let network = NetworkConfig::load(state_dir)?;
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
        NetCommand::Teardown { state_dir, force } => {
            Ok(daemon::teardown(&NetworkConfig::load(state_dir)?, *force).await?)
        }
    }
}
