//! The command line: roles, their flags, exit status.
//!
//! Entry point: [`main`]. Contract (`engine-cli` §0): data on stdout, everything else on stderr; a
//! failure ends with a line that begins `Error: ` and exit status 1, and never prints the usage; only
//! `vm exec` returns another status, the guest's.

use std::{ffi::OsString, process::ExitCode};

use clap::{ArgAction, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, error::ErrorKind};

pub mod exec;
pub mod image;
pub mod logs;
pub mod output;
pub mod owned;
pub mod settings;
pub mod size;
pub mod snapshot;
pub mod system;
pub mod vm;

use settings::{Flags, Settings};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit(u8);

impl Exit {
    /// All went well.
    pub const SUCCESS: Self = Self(0);

    /// A guest's exit code; -1 (ended by a signal) becomes 255.
    #[must_use]
    pub fn from_guest(code: i32) -> Self {
        Self(u8::try_from(code & 0xff).unwrap_or(u8::MAX))
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.0)
    }
}

/// Kubernetes pods as microVMs that can be snapshotted, cloned, hibernated and woken.
#[derive(Debug, Parser)]
#[command(name = "cocoon", version, propagate_version = false, after_help = ROOT_HELP)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    role: Role,
}

const ROOT_HELP: &str = "Examples:\n  cocoon up\n  cocoon image import cocoon-demo:1 demo.tar\n  \
    cocoon vm run --name demo cocoon-demo:1\n  cocoon vm exec demo -- uname -a\n\n\
    Exit status: 0 success, 1 failure (stderr ends with a line \"Error: ...\"); `vm exec` returns the guest's.";

#[derive(Debug, Subcommand)]
enum Role {
    /// Everything on one machine, with an embedded Kubernetes API.
    Up(Box<crate::up::UpArgs>),
    /// The host network of the VMs.
    #[command(
        after_help = "Example:\n  cocoon net teardown\n\n`cocoon up` starts and ends the network by itself."
    )]
    Net(Box<crate::net_cmd::NetArgs>),
    /// Virtual machines.
    #[command(
        after_help = "Examples:\n  cocoon vm run --name demo cocoon-demo:1\n  cocoon vm exec demo -- uname -a"
    )]
    Vm(Box<Group<vm::VmCommand>>),
    /// Snapshots of virtual machines.
    #[command(
        after_help = "Examples:\n  cocoon snapshot save --name before-upgrade demo\n  cocoon vm clone --name demo-2 before-upgrade"
    )]
    Snapshot(Group<snapshot::SnapshotCommand>),
    /// Guest images.
    #[command(after_help = "Examples:\n  cocoon image import cocoon-demo:1 demo.tar\n  cocoon image list")]
    Image(Group<image::ImageCommand>),
    /// Remove what no VM, snapshot, image or tag of the registry folder needs.
    #[command(
        after_help = "Example:\n  cocoon gc\n\nExit status: 0 done, 1 failed, such as when an image import takes longer than 10 s."
    )]
    Gc {
        #[command(flatten)]
        flags: Flags,
    },
    /// Print the version.
    #[command(
        after_help = "Example:\n  cocoon version\n\nGit hash and build time are known in binaries that `cargo xtask` built. Exit status: 0."
    )]
    Version,
}

/// Verbs of an engine command; the global flags may stand behind the command, too.
#[derive(Debug, Args)]
struct Group<C: Subcommand> {
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    command: C,
}

/// What the binary knows of its own build. It is taken in by the binary and not by this library: these facts
/// change with each commit, and then only a few lines are compiled again.
#[derive(Debug, Clone, Copy, Default)]
pub struct Build {
    /// Commit, with `-dirty` behind it when files were changed since.
    pub git: Option<&'static str>,
    /// Time.
    pub built: Option<&'static str>,
}

/// The whole program.
pub fn main(arguments: impl IntoIterator<Item = OsString>, build: Build) -> ExitCode {
    let cli = match parse(arguments) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&anyhow::Error::from(error).context("starting the runtime")),
    };
    let done = runtime.block_on(cli.run(build));
    // A thread may still wait for standard input; it has no say any more.
    runtime.shutdown_background();
    match done {
        Ok(exit) => exit.into(),
        Err(error) => fail(&error),
    }
}

fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let matches = command().try_get_matches_from(arguments)?;
    Cli::from_arg_matches(&matches)
}

/// The flags of a group are taken by all of its verbs. The root's are not, since roles such as `up` have
/// flags of the same names.
fn command() -> clap::Command {
    let shared: Vec<clap::Id> = Flags::augment_args(clap::Command::new("flags"))
        .get_arguments()
        .map(|arg| arg.get_id().clone())
        .collect();
    let command = ["vm", "snapshot", "image", "net"].into_iter().fold(Cli::command(), |command, group| {
        command.mut_subcommand(group, |group| {
            shared.iter().fold(group, |group, id| group.mut_arg(id.clone(), |arg| arg.global(true)))
        })
    });
    last_wins(command)
}

/// A flag that is given twice counts as the last one, as in the original; scripts rely on it.
fn last_wins(command: clap::Command) -> clap::Command {
    let once = |action: &ArgAction| matches!(action, ArgAction::Set | ArgAction::SetTrue);
    let command = command.mut_args(|arg| {
        if arg.is_positional() || !once(arg.get_action()) {
            return arg;
        }
        let id = arg.get_id().clone();
        arg.overrides_with(id)
    });
    command.mut_subcommands(last_wins)
}

impl Cli {
    async fn run(self, build: Build) -> anyhow::Result<Exit> {
        let settings = |flags: Flags| {
            let settings = Settings::load(flags.or(self.flags.clone()))?;
            cocoon_kit::telemetry::init(&settings.log_level);
            anyhow::Ok(settings)
        };
        match self.role {
            Role::Up(args) => {
                misplaced(&self.flags, "up")?;
                cocoon_kit::telemetry::init(&args.log_level);
                crate::up::run(&args).await.map(|()| Exit::SUCCESS)
            }
            Role::Net(args) => {
                let settings = args.settings(args.flags.clone().or(self.flags))?;
                cocoon_kit::telemetry::init(&settings.log_level);
                crate::net_cmd::run(&args, &settings).await.map(|()| Exit::SUCCESS)
            }
            Role::Vm(group) => vm::run(group.command, &settings(group.flags)?).await,
            Role::Snapshot(group) => snapshot::run(group.command, &settings(group.flags)?).await,
            Role::Image(group) => image::run(group.command, &settings(group.flags)?).await,
            Role::Gc { flags } => system::gc(&settings(flags)?).await,
            Role::Version => system::version(build),
        }
    }
}

/// A flag that would silently mean nothing is an error.
fn misplaced(flags: &Flags, role: &str) -> anyhow::Result<()> {
    if *flags != Flags::default() {
        anyhow::bail!(
            "the flags before `{role}` are those of the engine commands; give `{role}` its own after it"
        );
    }
    Ok(())
}

/// Help and version are answers; anything else is one line, without the usage.
fn refuse(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return match output::print(&error.render().to_string()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&error),
        };
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        eprint!("{}", error.render());
        eprintln!("Error: a command is missing");
        return ExitCode::FAILURE;
    }
    let text = error.render().to_string();
    let said: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    eprintln!("Error: {}", said.join(" ").trim_start_matches("error: "));
    ExitCode::FAILURE
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("Error: {}", output::plain(&format!("{error:#}")));
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests;
