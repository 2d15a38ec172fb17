//! What the commands print. Pure, except [`print`].
//!
//! stdout carries data only; notes and errors go to stderr. JSON has two spaces of indent. An empty list
//! prints a line of words even where JSON was asked for: that is the contract (`engine-cli` §1.4-1.6).

use std::io::{self, Write as _};

use cocoon_engine::model::{Image, Snapshot, Vm, VmState};
use jiff::Timestamp;
use serde::Serialize;

use super::size;

/// Whether a command that changes something is to print what it did; only `json` does (`engine-cli` §1.2).
#[must_use]
pub fn wants_json(output: &str) -> bool {
    output == "json"
}

/// How a list is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Table,
    Json,
}

/// A format that is not known is an error, not a table. An empty list is words in every format, so there
/// it is not asked for (the contract's own answer to `-o yaml`).
fn format(output: &str) -> anyhow::Result<Format> {
    match output {
        "" | "table" => Ok(Format::Table),
        "json" => Ok(Format::Json),
        other => anyhow::bail!("lists are not printed as {other:?}; use -o table or -o json"),
    }
}

/// Indented JSON with a final newline.
pub fn json(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Writes data to stdout. A reader that went away is no failure.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A note for the person at the terminal.
pub fn note(text: impl std::fmt::Display) {
    eprintln!("{text}");
}

/// `vm list`.
pub fn vms(vms: &[Vm], output: &str) -> anyhow::Result<String> {
    if vms.is_empty() {
        return Ok("No VMs found.\n".to_owned());
    }
    if format(output)? == Format::Json {
        return json(&vms);
    }
    let row = |vm: &Vm| {
        vec![
            vm.id.clone(),
            vm.config.name.clone(),
            state(vm),
            vm.config.cpu.to_string(),
            size::show(vm.config.memory),
            size::show(vm.config.storage),
            vm.config.image.clone(),
            stamp(vm.created_at),
        ]
    };
    let head = ["ID", "NAME", "STATE", "CPU", "MEMORY", "STORAGE", "IMAGE", "CREATED"];
    Ok(table(&head, vms.iter().map(row).collect()))
}

fn state(vm: &Vm) -> String {
    let state = match vm.state {
        VmState::Creating => "creating",
        VmState::Created => "created",
        VmState::Running if vm.paused => "running (paused)",
        VmState::Running => "running",
        VmState::Stopped => "stopped",
        VmState::Error => "error",
        VmState::Stale => "stopped (stale)",
    };
    state.to_owned()
}

/// `snapshot list`; `of_vm`: only those of one VM were asked for.
pub fn snapshots(snapshots: &[Snapshot], output: &str, of_vm: bool) -> anyhow::Result<String> {
    if snapshots.is_empty() {
        let words = if of_vm { "No snapshots found for VM.\n" } else { "No snapshots found.\n" };
        return Ok(words.to_owned());
    }
    if format(output)? == Format::Json {
        return json(&snapshots);
    }
    let row = |snapshot: &Snapshot| {
        let about = &snapshot.envelope;
        vec![
            about.id.clone(),
            about.name.clone(),
            about.hypervisor.clone(),
            about.cpu.to_string(),
            size::show(about.memory),
            size::show(about.storage),
            about.image.clone(),
            stamp(snapshot.created_at),
            about.description.clone(),
        ]
    };
    let head = ["ID", "NAME", "HYPERVISOR", "CPU", "MEMORY", "STORAGE", "IMAGE", "CREATED", "DESCRIPTION"];
    Ok(table(&head, snapshots.iter().map(row).collect()))
}

/// `image list`.
pub fn images(images: &[Image], output: &str) -> anyhow::Result<String> {
    if images.is_empty() {
        return Ok("No images found.\n".to_owned());
    }
    if format(output)? == Format::Json {
        return json(&images);
    }
    let row = |image: &Image| {
        let short = image.id.get(..19).unwrap_or(&image.id).to_owned();
        vec![image.name.clone(), short, image.kind.clone(), size::show(image.size), stamp(image.created_at)]
    };
    Ok(table(&["NAME", "DIGEST", "TYPE", "SIZE", "CREATED"], images.iter().map(row).collect()))
}

fn stamp(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// No cell of a table is longer; what is cut can be seen with `-o json`.
const WIDEST: usize = 250;

/// Columns as wide as their widest cell, two spaces between, none at the end of a line. Cells come from
/// snapshots and archives, so control characters are shown as `?`, and what is long is cut.
fn table(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let all: Vec<Vec<String>> = std::iter::once(head.iter().map(ToString::to_string).collect())
        .chain(rows)
        .map(|row: Vec<String>| row.into_iter().map(|cell| cut(&plain(&cell))).collect())
        .collect();
    let widths: Vec<usize> = (0..head.len())
        .map(|at| {
            all.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    all.iter().map(line).collect()
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(WIDEST) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// A text that cannot steer a terminal.
#[must_use]
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests;
