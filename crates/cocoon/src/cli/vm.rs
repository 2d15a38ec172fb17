//! `cocoon vm`: run, clone, list, inspect, rm, exec, logs, start, stop (`engine-cli` §1.2-1.4).
//!
//! Flags that this engine does not serve are refused with the reason; a flag is ignored, with a note,
//! only where ignoring it changes nothing that the caller can see.

use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use cocoon_engine::{
    engine::{Engine, MemoryRecipe},
    error::{BringUpError, LookupError},
    model::{CloneIdentity, CloneSpec, RunSpec, Snapshot, Vm},
};
use cocoon_kit::world::{RealWorld, World as _};
use serde::Serialize;

use super::{
    Exit,
    exec::{self, ExecArgs},
    logs::{self, LogsArgs},
    output::{self, note, print, wants_json},
    owned::Owners,
    settings::Settings,
    size,
};

mod name;

use name::{check_name, default_name};

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Boot a new VM from an image and wait until its agent answers.
    #[command(after_help = RUN_HELP)]
    Run(RunArgs),
    /// Make a VM that goes on where a snapshot was taken.
    #[command(after_help = CLONE_HELP)]
    Clone(CloneArgs),
    /// List VMs, oldest first.
    #[command(visible_alias = "ls", after_help = LIST_HELP)]
    List(ListArgs),
    /// Print one VM as JSON.
    #[command(
        after_help = "Example:\n  cocoon vm inspect demo\n\nExit status: 0 printed, 1 unknown: \"VM not found\"."
    )]
    Inspect {
        /// Id, name, or unique start of an id (3 characters or more).
        vm: String,
    },
    /// Remove VMs with their disks. One unknown name removes none.
    #[command(after_help = RM_HELP)]
    Rm(RmArgs),
    /// Run a command in the guest, as root and without a shell.
    #[command(after_help = exec::HELP)]
    Exec(ExecArgs),
    /// Print the guest's console.
    #[command(after_help = logs::HELP)]
    Logs(LogsArgs),
    /// Boot stopped VMs from their own disks.
    #[command(
        after_help = "Example:\n  cocoon vm start demo\n\nExit status: 0 all run (also those that did before), 1 one does not."
    )]
    Start(ManyArgs),
    /// Stop VMs: they are asked to shut down, and killed if they take too long.
    #[command(
        after_help = "Example:\n  cocoon vm stop --timeout 10 demo\n\nExit status: 0 none runs (also if none did before), 1 one still does."
    )]
    Stop(StopArgs),
}

const RUN_HELP: &str = "Example:\n  cocoon vm run --name demo --memory 1G cocoon-demo:1\n  \
    cocoon vm run --name demo --nics 0 -o json cocoon-demo:1\n\nExit status: 0 the VM runs, 1 it does not (nothing is left of it).";
const LIST_HELP: &str = "Example:\n  cocoon vm list -o json\n\n\
    Exit status: 0 printed, also when there is none; 1 failed, such as for an unknown format.";
const RM_HELP: &str = "Example:\n  cocoon vm rm --force demo\n\n\
    Exit status: 0 all are gone, 1 one is not; an unknown name says \"VM not found\" and removes none.";
const CLONE_HELP: &str = "Example:\n  cocoon vm clone --name demo-2 my-snapshot\n\n\
    A clone has the sizes of its snapshot, and a MAC, host name and machine id of its own.\n\n\
    Exit status: 0 the VM runs, 1 it does not (nothing is left of it).";

/// `vm run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Local image (see `cocoon image list`).
    image: String,
    /// VM name [default: from the image's name].
    #[arg(long)]
    name: Option<String>,
    /// Processors of the guest [default: 2, or what the host has].
    #[arg(long, allow_negative_numbers = true)]
    cpu: Option<i64>,
    /// Memory, at least 512M.
    #[arg(long, default_value = "1G", allow_hyphen_values = true)]
    memory: String,
    /// Writable disk, at least 10G; it is sparse.
    #[arg(long, default_value = "10G", allow_hyphen_values = true)]
    storage: String,
    /// Network interfaces; 0 is an isolated VM.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    nics: i64,
    /// `json` prints the VM; else nothing is printed.
    #[arg(short, long, visible_alias = "format", default_value = "", hide_default_value = true)]
    output: String,
    #[command(flatten)]
    shared: SharedArgs,
    /// Refused: Firecracker is not part of this release.
    #[arg(long)]
    fc: bool,
    /// Refused: Windows guests are not part of this release.
    #[arg(long)]
    windows: bool,
    /// Login of cloud images; other images keep their own.
    #[arg(long, default_value = "root")]
    user: String,
    /// Password of cloud images; other images keep their own.
    #[arg(long, default_value = "cocoon", hide_default_value = true)]
    password: String,
    /// Refused: data disks are not part of this release.
    #[arg(long)]
    data_disk: Vec<String>,
    /// No effect here: guest memory is always a file.
    #[arg(long, hide = true)]
    shared_memory: bool,
    /// No effect here: there is no watchdog.
    #[arg(long, hide = true)]
    no_watchdog: bool,
    /// Refused: CPU policy is not part of this release.
    #[arg(long, hide = true)]
    cpu_weight: Option<String>,
    /// Refused, like --cpu-weight.
    #[arg(long, hide = true)]
    cpu_quota_us: Option<String>,
    /// Refused, like --cpu-weight.
    #[arg(long, hide = true)]
    cpu_period_us: Option<String>,
}

/// Flags of run and clone that name a network or tune a backend.
#[derive(Debug, Clone, Args)]
struct SharedArgs {
    /// Must be the bridge of --network-dir, which is used anyway.
    #[arg(long, conflicts_with = "network")]
    bridge: Option<String>,
    /// Refused: networks by name are not part of this release.
    #[arg(long)]
    network: Option<String>,
    /// Ring depth; only 0, the default, is taken.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, hide = true)]
    queue_size: i64,
    /// Ring depth; only 0, the default, is taken.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, hide = true)]
    disk_queue_size: i64,
    /// No effect here: disks go through the host's cache.
    #[arg(long)]
    no_direct_io: bool,
}

/// `vm clone`.
#[derive(Debug, Clone, Args)]
pub struct CloneArgs {
    /// Snapshot: id, name, or unique start of an id.
    #[arg(required_unless_present = "from_dir")]
    snapshot: Option<String>,
    /// VM name [default: cocoon-clone- and eight characters].
    #[arg(long)]
    name: Option<String>,
    /// `json` prints the VM; else nothing is printed.
    #[arg(short, long, visible_alias = "format", default_value = "", hide_default_value = true)]
    output: String,
    #[command(flatten)]
    shared: SharedArgs,
    /// How memory comes in: mmap and ondemand share the snapshot's pages, copy reads all of them first.
    #[arg(long, value_parser = ["copy", "ondemand", "mmap"])]
    restore_mode: Option<String>,
    /// The older spelling of --restore-mode ondemand.
    #[arg(long, hide = true)]
    on_demand: bool,
    /// No effect here: the image must be on this host; if it is not, the error names it.
    #[arg(long)]
    pull: bool,
    /// Refused: clones of a folder are not part of this release.
    #[arg(long, conflicts_with = "snapshot")]
    from_dir: Option<String>,
    /// Must be the snapshot's.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, hide = true)]
    cpu: i64,
    /// Must be the snapshot's.
    #[arg(long, default_value = "", allow_hyphen_values = true, hide = true)]
    memory: String,
    /// Must be the snapshot's.
    #[arg(long, default_value = "", allow_hyphen_values = true, hide = true)]
    storage: String,
    /// Must be the snapshot's.
    #[arg(long, allow_negative_numbers = true, hide = true)]
    nics: Option<i64>,
    /// Refused: data disks are not part of this release.
    #[arg(long, hide = true)]
    data_disk: Vec<String>,
}

/// `vm list`.
#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// `table` or `json`.
    #[arg(short = 'o', long, visible_alias = "output", default_value = "table")]
    format: String,
}

/// `vm rm`.
#[derive(Debug, Clone, Args)]
pub struct RmArgs {
    /// Ids, names or unique starts of ids.
    #[arg(required = true)]
    vms: Vec<String>,
    /// Also running ones, which are killed, and those that a pod of `cocoon up` owns.
    #[arg(long)]
    force: bool,
    /// `json` prints the removed ids.
    #[arg(short, long, default_value = "", hide_default_value = true)]
    output: String,
}

/// `vm start`.
#[derive(Debug, Clone, Args)]
pub struct ManyArgs {
    /// Ids, names or unique starts of ids.
    #[arg(required = true)]
    vms: Vec<String>,
    /// `json` prints the started ids.
    #[arg(short, long, default_value = "", hide_default_value = true)]
    output: String,
}

/// `vm stop`.
#[derive(Debug, Clone, Args)]
pub struct StopArgs {
    /// Ids, names or unique starts of ids.
    #[arg(required = true)]
    vms: Vec<String>,
    /// Kill at once.
    #[arg(long)]
    force: bool,
    /// Seconds that a guest may take to shut down before it is killed [default: stop_timeout_seconds of the
    /// configuration file, else 30].
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "SECONDS")]
    timeout: u64,
    /// `json` prints the stopped ids.
    #[arg(short, long, default_value = "", hide_default_value = true)]
    output: String,
}

#[derive(Debug, Serialize)]
struct Succeeded {
    succeeded: Vec<String>,
}

/// Runs a verb.
pub async fn run(command: VmCommand, settings: &Settings) -> anyhow::Result<Exit> {
    if let VmCommand::Run(args) = &command {
        args.check()?;
    }
    if let VmCommand::Clone(args) = &command {
        args.check()?;
    }
    let memory = match &command {
        VmCommand::Clone(args) if args.restore_mode.as_deref() == Some("copy") => MemoryRecipe::FullStream,
        _ => MemoryRecipe::Auto,
    };
    let Some(engine) = settings.existing(memory).await? else { return nothing(command, settings) };
    match command {
        VmCommand::Run(args) => run_vm(&engine, args, settings).await?,
        VmCommand::Clone(args) => clone_vm(&engine, args, settings).await?,
        VmCommand::List(args) => print(&output::vms(&engine.list().await?, &args.format)?)?,
        VmCommand::Inspect { vm } => print(&output::json(&engine.inspect(&vm).await?)?)?,
        VmCommand::Rm(args) => remove(&engine, args, settings).await?,
        VmCommand::Exec(args) => return exec::run(&engine, args).await,
        VmCommand::Logs(args) => logs::run(&engine, &args).await?,
        VmCommand::Start(args) => start(&engine, args).await?,
        VmCommand::Stop(args) => stop(&engine, args, settings).await?,
    }
    Ok(Exit::SUCCESS)
}

/// The answer where there is no data folder: nothing that was named can be there.
fn nothing(command: VmCommand, settings: &Settings) -> anyhow::Result<Exit> {
    let first = |vms: Vec<String>| vms.into_iter().next().unwrap_or_default();
    let vm = match command {
        VmCommand::Run(args) => {
            args.shared.check_bridge(settings)?;
            return Err(BringUpError::ImageNotResolved(args.image).into());
        }
        VmCommand::Clone(args) => {
            args.shared.check_bridge(settings)?;
            return Err(LookupError::SnapshotNotFound(args.snapshot.unwrap_or_default()).into());
        }
        VmCommand::List(args) => {
            print(&output::vms(&[], &args.format)?)?;
            return Ok(Exit::SUCCESS);
        }
        VmCommand::Inspect { vm } => vm,
        VmCommand::Exec(args) => args.vm,
        VmCommand::Logs(args) => args.vm,
        VmCommand::Rm(args) => first(args.vms),
        VmCommand::Start(args) => first(args.vms),
        VmCommand::Stop(args) => first(args.vms),
    };
    Err(LookupError::VmNotFound(vm).into())
}

impl SharedArgs {
    fn check(&self) -> anyhow::Result<()> {
        if self.queue_size < 0 || self.disk_queue_size < 0 {
            bail!("--queue-size and --disk-queue-size cannot be negative");
        }
        if self.queue_size > 0 || self.disk_queue_size > 0 {
            bail!("--queue-size and --disk-queue-size are fixed by the qemu backend; leave them out");
        }
        if let Some(network) = self.network.as_deref().filter(|name| !name.is_empty()) {
            bail!(
                "--network {network}: networks by name are not part of this release; --network-dir names the network"
            );
        }
        Ok(())
    }

    /// Once the network is known: the named bridge must be its bridge.
    fn check_bridge(&self, settings: &Settings) -> anyhow::Result<bool> {
        let network = settings.network()?;
        let Some(wanted) = self.bridge.as_deref().filter(|name| !name.is_empty()) else {
            return Ok(network.is_some());
        };
        match network {
            Some(network) if network.bridge == wanted => Ok(true),
            Some(network) => {
                bail!("--bridge {wanted}: the network of --network-dir has the bridge {}", network.bridge)
            }
            None => bail!(
                "--bridge {wanted}: there is no network in {}; {NETWORK_REMEDY}",
                settings.network_dir.display()
            ),
        }
    }
}

const NETWORK_REMEDY: &str =
    "start `cocoon up` or `cocoon net daemon`, or name its folder with --network-dir";

impl RunArgs {
    /// What can be said without looking at the host. The contract's order: name, sizes, then the rest.
    fn check(&self) -> anyhow::Result<()> {
        check_name(&self.vm_name())?;
        if self.cpu.is_some_and(|cpu| cpu < 1) {
            bail!("--cpu must be at least 1");
        }
        self.memory()?;
        self.storage()?;
        self.shared.check()?;
        if !self.user.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
            || !self.user.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-".contains(c))
            || self.user.len() > 32
        {
            bail!("--user {:?} is not a Linux user name in lower case", self.user);
        }
        if self
            .password
            .contains(|c: char| c.is_whitespace() || c.is_control() || "\"'`$\\;&|<>(){}[]*?!#~".contains(c))
        {
            bail!("--password has a character that means something to a shell; use letters and digits");
        }
        self.refused()
    }

    fn refused(&self) -> anyhow::Result<()> {
        if self.fc {
            bail!("--fc: Firecracker is not part of this release; leave the flag out to use qemu");
        }
        if self.windows {
            bail!("--windows: Windows guests are not part of this release");
        }
        if !self.data_disk.is_empty() {
            bail!(
                "--data-disk: data disks are not part of this release; give --storage the size that is needed"
            );
        }
        if [&self.cpu_weight, &self.cpu_quota_us, &self.cpu_period_us].iter().any(|flag| flag.is_some()) {
            bail!(
                "--cpu-weight, --cpu-quota-us and --cpu-period-us are not part of this release; leave them out"
            );
        }
        Ok(())
    }

    fn vm_name(&self) -> String {
        self.name.clone().unwrap_or_else(|| default_name(&self.image))
    }

    fn memory(&self) -> anyhow::Result<u64> {
        at_least("--memory", &self.memory, 512 << 20)
    }

    fn storage(&self) -> anyhow::Result<u64> {
        at_least("--storage", &self.storage, 10 << 30)
    }
}

fn at_least(flag: &str, text: &str, floor: u64) -> anyhow::Result<u64> {
    let bytes = size::parse(text).map_err(|why| anyhow::anyhow!("{flag} {why}"))?;
    if bytes < floor {
        bail!("{flag} {text} is too small; it must be at least {}", size::show(floor));
    }
    Ok(bytes)
}

async fn run_vm(engine: &Engine, args: RunArgs, settings: &Settings) -> anyhow::Result<()> {
    let network = args.shared.check_bridge(settings)?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let cpu = args.cpu.and_then(|cpu| u64::try_from(cpu).ok()).unwrap_or(2.min(cores));
    let name = args.vm_name();
    // An unknown image is said before a host that is too small or lacks something.
    if matches!(engine.image(&args.image).await, Err(LookupError::ImageNotFound(_))) {
        return Err(BringUpError::ImageNotResolved(args.image).into());
    }
    if cpu > cores {
        bail!("--cpu {cpu}: this host has {cores}");
    }
    let mut nics = usize::try_from(args.nics).unwrap_or(0);
    if nics > 0 && !network {
        nics = 0;
        note(format_args!(
            "note: there is no network in {}; the VM gets no NIC. {NETWORK_REMEDY}",
            settings.network_dir.display()
        ));
    }
    if (args.user.as_str(), args.password.as_str()) != ("root", "cocoon") {
        note("note: --user and --password are for cloud images; this image keeps its own accounts");
    }
    let spec = RunSpec {
        name,
        image: args.image.clone(),
        cpu,
        memory: args.memory()?,
        storage: args.storage()?,
        nics,
    };
    shown(engine, engine.run(spec).await?, &args.output).await
}

/// Prints the VM as it is now, or says on stderr which one was made.
async fn shown(engine: &Engine, vm: Vm, wanted: &str) -> anyhow::Result<()> {
    for warning in &vm.warnings {
        note(format_args!("warning: {warning}"));
    }
    if !wants_json(wanted) {
        note(format_args!("{} is running ({})", vm.config.name, vm.id));
        return Ok(());
    }
    let now = match engine.inspect(&vm.id).await {
        Ok(now) => now,
        Err(error) => {
            note(format_args!(
                "warning: {} was made but cannot be read again: {error}; inspect it",
                vm.config.name
            ));
            vm
        }
    };
    print(&output::json(&now)?)
}

impl CloneArgs {
    fn check(&self) -> anyhow::Result<()> {
        if let Some(name) = &self.name {
            check_name(name)?;
        }
        self.shared.check()?;
        if let Some(folder) = &self.from_dir {
            bail!(
                "--from-dir {folder}: clones of a folder are not part of this release; clone a snapshot of this host"
            );
        }
        if !self.data_disk.is_empty() {
            bail!("--data-disk: data disks are not part of this release");
        }
        Ok(())
    }

    /// Sizes are part of the captured state; the older flags are taken only where they say the same.
    fn check_sizes(&self, snapshot: &Snapshot) -> anyhow::Result<()> {
        let about = &snapshot.envelope;
        let size = |flag: &str, text: &str| {
            if text.is_empty() {
                Ok(0)
            } else {
                size::parse(text).map_err(|why| anyhow::anyhow!("{flag} {why}"))
            }
        };
        let cpu = u64::try_from(self.cpu).context("--cpu cannot be negative")?;
        for (flag, wanted, has) in [
            ("--cpu", cpu, about.cpu),
            ("--memory", size("--memory", &self.memory)?, about.memory),
            ("--storage", size("--storage", &self.storage)?, about.storage),
        ] {
            if wanted != 0 && wanted < has {
                bail!("{flag} {wanted} is below snapshot minimum {has}; leave the flag out");
            }
            if wanted != 0 && wanted != has {
                bail!("{flag} {wanted}: a clone has its snapshot's {has}; leave the flag out");
            }
        }
        // 0 was the older way to say "as in the snapshot".
        if self.nics.is_some_and(|nics| nics != 0 && u64::try_from(nics) != Ok(about.nics)) {
            bail!("nic count mismatch: the snapshot has {}; leave --nics out", about.nics);
        }
        Ok(())
    }
}

async fn clone_vm(engine: &Engine, args: CloneArgs, settings: &Settings) -> anyhow::Result<()> {
    args.shared.check_bridge(settings)?;
    let snapshot = engine.snapshot(args.snapshot.as_deref().unwrap_or_default()).await?;
    args.check_sizes(&snapshot)?;
    let fresh = || format!("cocoon-clone-{}", &RealWorld.engine_id()[..8].to_ascii_lowercase());
    let name = args.name.clone().unwrap_or_else(fresh);
    let spec = CloneSpec { name, snapshot: snapshot.envelope.id, identity: CloneIdentity::New };
    shown(engine, engine.clone_vm(spec).await?, &args.output).await
}

/// All refs first: one that is unknown changes nothing.
async fn resolve(engine: &Engine, refs: &[String]) -> anyhow::Result<Vec<Vm>> {
    let mut vms: Vec<Vm> = Vec::new();
    for wanted in refs {
        let vm = engine.inspect(wanted).await?;
        if vms.iter().all(|known| known.id != vm.id) {
            vms.push(vm);
        }
    }
    Ok(vms)
}

/// Prints what was done, or fails with each VM that could not be served.
fn finish(done: Vec<(Vm, anyhow::Result<()>)>, verb: &str, wanted: &str) -> anyhow::Result<()> {
    let mut succeeded = Vec::new();
    let mut failed = Vec::new();
    for (vm, result) in done {
        match result {
            Ok(()) => {
                note(format_args!("{verb} {} ({})", vm.config.name, vm.id));
                succeeded.push(vm.id);
            }
            Err(error) => failed.push(format!("{}: {error:#}", vm.config.name)),
        }
    }
    if !failed.is_empty() {
        bail!(failed.join("; "));
    }
    if wants_json(wanted) {
        print(&output::json(&Succeeded { succeeded })?)?;
    }
    Ok(())
}

async fn remove(engine: &Engine, args: RmArgs, settings: &Settings) -> anyhow::Result<()> {
    let vms = resolve(engine, &args.vms).await?;
    let owners = Owners::of(settings).await;
    owners.allow(vms.iter().map(|vm| owners.vm(vm)), args.force)?;
    let mut done = Vec::new();
    for vm in vms {
        let result = engine.remove(&vm.id, args.force).await;
        done.push((vm, result.map_err(Into::into)));
    }
    finish(done, "removed", &args.output)
}

async fn start(engine: &Engine, args: ManyArgs) -> anyhow::Result<()> {
    let vms = resolve(engine, &args.vms).await?;
    let starts = vms.into_iter().map(async |vm| {
        let result = engine.start(&vm.id).await;
        (vm, result.map(drop).map_err(Into::into))
    });
    finish(futures::future::join_all(starts).await, "started", &args.output)
}

async fn stop(engine: &Engine, args: StopArgs, settings: &Settings) -> anyhow::Result<()> {
    let timeout = if args.timeout == 0 { settings.stop_timeout } else { Duration::from_secs(args.timeout) };
    let vms = resolve(engine, &args.vms).await?;
    let owners = Owners::of(settings).await;
    vms.iter().filter_map(|vm| owners.stopping(vm)).for_each(|said| note(format_args!("warning: {said}")));
    let stops = vms.into_iter().map(async |vm| {
        let result = engine.stop(&vm.id, args.force, timeout).await;
        (vm, result.map_err(Into::into))
    });
    finish(futures::future::join_all(stops).await, "stopped", &args.output)
}

#[cfg(test)]
mod tests;
