//! A clone of a local snapshot against QEMU's own restore of the same state, interleaved, for two sizes
//! of guest.
//!
//! The clone's time is from the call to the guest agent's first answer: our clock around the call, less
//! what the engine's own log says it did after that answer (identity, links, record).

use std::{collections::BTreeMap, time::Instant};

use anyhow::{Context as _, ensure};
use cocoon_engine::model::Snapshot;

use super::{Parts, Row, lab::Lab, phases::Phases, report::median, rival::Recipe};

const SIZES: [u64; 2] = [256, 2048];

struct Contest {
    mib: u64,
    snapshot: Snapshot,
    recipe: Recipe,
    clone: Vec<f64>,
    whole: Vec<f64>,
    rival: Vec<f64>,
    phases: BTreeMap<&'static str, Vec<f64>>,
}

/// Runs the contests.
pub(super) async fn measure(parts: &Parts, phases: &Phases) -> anyhow::Result<Vec<Row>> {
    let lab = Lab::start(parts).await?;
    let measured = contests(parts, &lab, phases).await;
    let ended = lab.end().await;
    let contests = measured?;
    ended?;
    Ok(rows(&contests))
}

async fn contests(parts: &Parts, lab: &Lab, phases: &Phases) -> anyhow::Result<Vec<Contest>> {
    let mut contests = Vec::new();
    for mib in SIZES {
        let snapshot = lab.snapshot(mib).await?;
        let vm = lab.clone_of(&snapshot, "recorded").await?;
        let recipe = Recipe::of(&vm, &snapshot)?;
        lab.engine.remove("recorded", true).await?;
        let (clone, whole, rival) = (Vec::new(), Vec::new(), Vec::new());
        contests.push(Contest { mib, snapshot, recipe, clone, whole, rival, phases: BTreeMap::new() });
    }
    for run in 0..parts.runs {
        for contest in &mut contests {
            round(lab, phases, contest).await.with_context(|| format!("run {run}, {} MiB", contest.mib))?;
            eprintln!(
                "run {run}, {} MiB: clone {:.0} ms, QEMU {:.0} ms",
                contest.mib,
                contest.clone.last().copied().unwrap_or_default(),
                contest.rival.last().copied().unwrap_or_default()
            );
        }
    }
    Ok(contests)
}

async fn round(lab: &Lab, phases: &Phases, contest: &mut Contest) -> anyhow::Result<()> {
    phases.take();
    let begun = Instant::now();
    let vm = lab.clone_of(&contest.snapshot, "clone").await?;
    let whole = begun.elapsed().as_secs_f64() * 1000.0;
    ensure!(vm.warnings.is_empty(), "the clone is not whole: {}", vm.warnings.join("; "));
    let marks = phases.take().context("the engine logged no phases of the clone")?;
    let mark =
        |name: &str| marks.get(name).copied().with_context(|| format!("no {name} in the engine's log"));
    contest.clone.push(whole - (mark("total_ms")? - mark("answered_ms")?));
    contest.whole.push(whole);
    for (name, value) in marks {
        contest.phases.entry(name).or_default().push(value);
    }
    lab.engine.remove("clone", true).await?;
    contest.rival.push(contest.recipe.race(lab).await? * 1000.0);
    Ok(())
}

fn rows(contests: &[Contest]) -> Vec<Row> {
    let mut rows = Vec::new();
    for contest in contests {
        let (clone, rival) = (median(&contest.clone), median(&contest.rival));
        let marks: Vec<_> =
            contest.phases.iter().map(|(name, values)| format!("{name} {:.0}", median(values))).collect();
        eprintln!(
            "medians, {} MiB: first answer {clone:.0} ms, whole call {:.0} ms, QEMU {rival:.0} ms; in the engine: {}",
            contest.mib,
            median(&contest.whole),
            marks.join(", ")
        );
        let what = format!("clone to first answer / QEMU's exec to cont, {} MiB guest", contest.mib);
        rows.push(Row::at_most(what, "x", 3.0, clone / rival));
    }
    if let [small, large] = contests {
        let apart = (median(&large.clone) / median(&small.clone) - 1.0) * 100.0;
        let what = format!("flatness: {} MiB against {} MiB guest ({apart:+.1} %)", large.mib, small.mib);
        rows.push(Row::at_most(what, "%", 25.0, apart.abs()));
    }
    rows
}
