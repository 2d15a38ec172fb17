//! `cocoon snapshot`: save, list, inspect, rm (`engine-cli` §1.5).

use std::collections::BTreeMap;

use anyhow::bail;
use clap::{Args, Subcommand};
use cocoon_engine::{
    engine::{Engine, MemoryRecipe},
    error::LookupError,
};
use cocoon_kit::world::{RealWorld, World as _};
use cocoon_oci::snapshot::Envelope;

use super::{
    Exit,
    output::{self, note, print},
    owned::Owners,
    settings::Settings,
};

/// Longest name; names may hold slashes and colons.
const MAX_NAME: usize = 63;

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Save a running VM; the guest pauses for the capture only.
    #[command(
        after_help = "Example:\n  cocoon snapshot save --name before-upgrade demo\n\nExit status: 0 saved, 1 not saved; a taken name says \"already exists\"."
    )]
    Save(SaveArgs),
    /// List snapshots.
    #[command(visible_alias = "ls", after_help = LIST_HELP)]
    List(ListArgs),
    /// Print one snapshot as JSON.
    #[command(
        after_help = "Example:\n  cocoon snapshot inspect before-upgrade\n\nExit status: 0 printed, 1 unknown: \"snapshot not found\"."
    )]
    Inspect {
        /// Id, name, or unique start of an id.
        snapshot: String,
    },
    /// Remove snapshots. One unknown name removes none. VMs cloned from them go on.
    #[command(
        after_help = "Example:\n  cocoon snapshot rm before-upgrade\n\nExit status: 0 removed, 1 nothing was removed."
    )]
    Rm {
        /// Also snapshots that a pod of `cocoon up` wakes or is forked from.
        #[arg(long)]
        force: bool,
        /// Ids, names or unique starts of ids.
        #[arg(required = true)]
        snapshots: Vec<String>,
    },
}

const LIST_HELP: &str = "Example:\n  cocoon snapshot list --vm demo -o json\n\n\
    Exit status: 0 printed, also when there is none; 1 failed, such as for an unknown VM or format.";

/// `snapshot save`.
#[derive(Debug, Clone, Args)]
pub struct SaveArgs {
    /// Name of the snapshot [default: snapshot- and eight characters].
    #[arg(long, default_value = "", hide_default_value = true)]
    name: String,
    /// Free text.
    #[arg(long, default_value = "", hide_default_value = true)]
    description: String,
    /// Id, name, or unique start of a VM's id.
    vm: String,
}

/// `snapshot list`.
#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// `table` or `json`.
    #[arg(short = 'o', long, visible_alias = "output", default_value = "table")]
    format: String,
    /// Only snapshots taken of this VM.
    #[arg(long)]
    vm: Option<String>,
}

/// Runs a verb.
pub async fn run(command: SnapshotCommand, settings: &Settings) -> anyhow::Result<Exit> {
    if let SnapshotCommand::Save(args) = &command {
        check_name(&args.name)?;
    }
    let Some(engine) = settings.existing(MemoryRecipe::Auto).await? else { return nothing(command) };
    match command {
        SnapshotCommand::Save(args) => save(&engine, args).await?,
        SnapshotCommand::List(args) => list(&engine, &args).await?,
        SnapshotCommand::Inspect { snapshot } => print(&output::json(&engine.snapshot(&snapshot).await?)?)?,
        SnapshotCommand::Rm { snapshots, force } => remove(&engine, &snapshots, force, settings).await?,
    }
    Ok(Exit::SUCCESS)
}

/// The answer where there is no data folder.
fn nothing(command: SnapshotCommand) -> anyhow::Result<Exit> {
    let missing = match command {
        SnapshotCommand::List(ListArgs { vm: Some(vm), .. }) | SnapshotCommand::Save(SaveArgs { vm, .. }) => {
            LookupError::VmNotFound(vm)
        }
        SnapshotCommand::List(ListArgs { format, vm: None }) => {
            print(&output::snapshots(&[], &format, false)?)?;
            return Ok(Exit::SUCCESS);
        }
        SnapshotCommand::Inspect { snapshot } => LookupError::SnapshotNotFound(snapshot),
        SnapshotCommand::Rm { snapshots, .. } => {
            LookupError::SnapshotNotFound(snapshots.into_iter().next().unwrap_or_default())
        }
    };
    Err(missing.into())
}

fn check_name(name: &str) -> anyhow::Result<()> {
    if name.len() > MAX_NAME || name.contains(|c: char| c.is_control() || c.is_whitespace()) {
        bail!("snapshot name {name:?} cannot be used; a name has up to {MAX_NAME} characters and no spaces");
    }
    Ok(())
}

async fn save(engine: &Engine, args: SaveArgs) -> anyhow::Result<()> {
    let name = if args.name.is_empty() {
        format!("snapshot-{}", RealWorld.engine_id()[..8].to_ascii_lowercase())
    } else {
        args.name
    };
    let saved = engine.save(&args.vm, &name, &args.description).await?;
    note(format_args!("saved {} ({})", output::plain(&name), saved.envelope.id));
    Ok(())
}

async fn list(engine: &Engine, args: &ListArgs) -> anyhow::Result<()> {
    let of_vm = match &args.vm {
        Some(vm) => Some(engine.inspect(vm).await?.snapshot_ids),
        None => None,
    };
    let mut snapshots = engine.snapshots().await?;
    if let Some(ids) = &of_vm {
        snapshots.retain(|snapshot| ids.contains_key(&snapshot.envelope.id));
    }
    print(&output::snapshots(&snapshots, &args.format, of_vm.is_some())?)
}

async fn remove(engine: &Engine, refs: &[String], force: bool, settings: &Settings) -> anyhow::Result<()> {
    let mut found: BTreeMap<String, Envelope> = BTreeMap::new();
    for wanted in refs {
        let about = engine.snapshot(wanted).await?.envelope;
        found.insert(about.id.clone(), about);
    }
    let owners = Owners::of(settings).await;
    owners.allow(found.values().map(|about| owners.snapshot(about)), force)?;
    for id in found.into_keys() {
        engine.snapshot_remove(&id).await?;
        note(format_args!("removed {id}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_may_look_like_references_but_not_be_long_or_have_spaces() {
        for (name, fine) in [
            ("org/app:1.0", true),
            ("", true),
            (&"a".repeat(63), true),
            (&"a".repeat(64), false),
            ("a b", false),
            ("a\nb", false),
        ] {
            assert_eq!(super::check_name(name).is_ok(), fine, "{name:?}");
        }
    }
}
