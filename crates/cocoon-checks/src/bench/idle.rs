//! `cocoon up` without VMs: how soon it is ready, how much memory all its processes hold.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use super::{
    Parts, Row,
    lab::{end, scratch},
    memory::{Held, family, mib, of_process},
    report::median,
};

/// Each start has a data folder of its own; memory is looked at once it has settled.
pub(super) fn measure(parts: &Parts) -> anyhow::Result<Vec<Row>> {
    let (mut ready, mut own, mut pss, mut rss) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for run in 0..parts.runs {
        let folder = scratch()?;
        let (mut up, wall, said) = start(parts, folder.path())?;
        sleep(Duration::from_millis(if run == 0 { 5000 } else { 500 }));
        let held = together(&up);
        end(&mut up)?;
        let held = held?;
        eprintln!(
            "up {run}: ready in {wall:.3} s (says {said} s), PSS {:.1} MiB, RSS {:.1} MiB",
            mib(held.pss),
            mib(held.rss)
        );
        ready.push(wall);
        own.push(said);
        pss.push(mib(held.pss));
        rss.push(mib(held.rss));
    }
    eprintln!(
        "medians: ready {:.3} s, says {:.3} s, RSS {:.1} MiB",
        median(&ready),
        median(&own),
        median(&rss)
    );
    Ok(vec![
        Row::at_most("cocoon up without VMs: memory of all processes (PSS)", "MiB", 80.0, median(&pss)),
        Row::at_most("cocoon up without VMs: start to ready", "s", 1.0, median(&ready)),
    ])
}

fn together(up: &Child) -> anyhow::Result<Held> {
    family(up.id()).into_iter().try_fold(Held::default(), |sum, pid| Ok(sum.and(of_process(pid)?)))
}

/// Starts it; seconds by our clock and by its own words.
fn start(parts: &Parts, data: &Path) -> anyhow::Result<(Child, f64, f64)> {
    let log = std::fs::File::create(data.join("up.log"))?;
    let begun = Instant::now();
    let mut up = Command::new(&parts.cocoon)
        .arg("up")
        .arg("--data-dir")
        .arg(data.join("data"))
        .arg("--boot-bundle")
        .arg(&parts.bundle)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("starting cocoon up")?;
    let output = up.stdout.take().context("no output of cocoon up")?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        if let Some(said) = line.strip_prefix("ready in ").and_then(|rest| rest.strip_suffix(" s")) {
            return Ok((up, begun.elapsed().as_secs_f64(), said.parse()?));
        }
    }
    let status = up.wait()?;
    bail!("cocoon up ended ({status}): {}", std::fs::read_to_string(data.join("up.log")).unwrap_or_default())
}
