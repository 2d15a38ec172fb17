//! Sixteen clones of one snapshot at once: whether all answer, and what they hold in memory together.
//!
//! The budget takes as "the base once" only the pages of the snapshot's file that the clones map, so
//! whatever is over is QEMU's own.

use std::time::{Duration, Instant};

use cocoon_engine::model::{Snapshot, Vm};
use futures::future::join_all;

use super::{
    Parts, Row,
    lab::Lab,
    memory::{Held, mib, of_file, of_process},
};

const CLONES: u32 = 16;
const MIB: u64 = 256;
/// What a clone may hold besides guest memory.
const EACH: f64 = 30.0;

/// Clones, asks, weighs.
pub(super) async fn measure(parts: &Parts) -> anyhow::Result<Vec<Row>> {
    let lab = Lab::start(parts).await?;
    let measured = herd(&lab).await;
    let ended = lab.end().await;
    let rows = measured?;
    ended?;
    Ok(rows)
}

async fn herd(lab: &Lab) -> anyhow::Result<Vec<Row>> {
    let snapshot = lab.snapshot(MIB).await?;
    let begun = Instant::now();
    let clones = join_all((0..CLONES).map(|index| one(lab, &snapshot, index))).await;
    let mut vms = Vec::new();
    for clone in clones {
        match clone {
            Ok(vm) => vms.push(vm),
            Err(error) => eprintln!("a clone failed: {error:#}"),
        }
    }
    let warned = vms.iter().filter(|vm| !vm.warnings.is_empty()).count();
    eprintln!(
        "{} of {CLONES} clones answered after {:.1} s, {warned} with warnings",
        vms.len(),
        begun.elapsed().as_secs_f64()
    );
    tokio::time::sleep(Duration::from_secs(3)).await;
    let mut rows = vec![Row::at_least(
        "16 clones at once: clones that answer",
        "clones",
        f64::from(CLONES),
        count(&vms),
    )];
    rows.push(weigh(&vms, &snapshot)?);
    Ok(rows)
}

/// Clones without warnings.
fn count(vms: &[Vm]) -> f64 {
    let whole = vms.iter().filter(|vm| vm.warnings.is_empty()).count();
    u32::try_from(whole).map_or(0.0, f64::from)
}

/// A clone that read one page of what its source had in memory; reading all of it would measure the
/// emulator (`wc` over 64 MiB in 16 guests took 50 s).
async fn one(lab: &Lab, snapshot: &Snapshot, index: u32) -> anyhow::Result<Vm> {
    let name = format!("clone-{index}");
    let vm = lab.clone_of(snapshot, &name).await?;
    lab.shell(&name, "dd if=/run/fill/data bs=4k skip=1000 count=1 2>/dev/null | grep -q cocoon").await?;
    Ok(vm)
}

fn weigh(vms: &[Vm], snapshot: &Snapshot) -> anyhow::Result<Row> {
    let file = snapshot.folder.join("memory-ranges");
    let (mut all, mut ram) = (Held::default(), Held::default());
    for vm in vms {
        all = all.and(of_process(vm.pid)?);
        ram = ram.and(of_file(vm.pid, &file)?);
    }
    let (changed, base) = (mib(ram.anonymous + ram.swap), mib(ram.pss.saturating_sub(ram.anonymous)));
    let clones = u32::try_from(vms.len()).map_or(0.0, f64::from);
    let (held, budget) = (mib(all.pss + all.swap), changed.mul_add(1.5, EACH.mul_add(clones, base)));
    eprintln!(
        "held {held:.0} MiB: changed pages {changed:.0}, base {base:.0}, QEMU itself {:.1} each",
        (held - changed - base) / clones.max(1.0)
    );
    Ok(Row::at_most("16 clones at once: memory (PSS)", "MiB", budget, held))
}
