//! How much memory processes hold, from `/proc/PID/smaps`. Parsing is pure.

use std::{collections::BTreeSet, path::Path};

use anyhow::Context as _;

/// KiB of one mapping, or of a sum of mappings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// Its share: pages divided by how many map them.
    pub(super) pss: u64,
    /// All that is there.
    pub(super) rss: u64,
    /// Pages of its own that no file backs.
    pub(super) anonymous: u64,
    /// Swapped out.
    pub(super) swap: u64,
}

impl Held {
    fn add(&mut self, line: &str) {
        let Some((key, value)) = line.split_once(':') else { return };
        let Ok(value) = value.trim().trim_end_matches(" kB").parse::<u64>() else { return };
        match key {
            "Pss" => self.pss += value,
            "Rss" => self.rss += value,
            "Anonymous" => self.anonymous += value,
            "Swap" => self.swap += value,
            _ => {}
        }
    }

    /// Both together.
    pub(super) const fn and(self, other: Self) -> Self {
        Self {
            pss: self.pss + other.pss,
            rss: self.rss + other.rss,
            anonymous: self.anonymous + other.anonymous,
            swap: self.swap + other.swap,
        }
    }
}

/// What the mappings of `text` (smaps) hold; only those of the file `inode`, if one is given.
fn sum(text: &str, inode: Option<u64>) -> Held {
    let (mut held, mut counts) = (Held::default(), inode.is_none());
    for line in text.lines() {
        if let Some(of) = header_inode(line) {
            counts = inode.is_none_or(|inode| inode == of);
        } else if counts {
            held.add(line);
        }
    }
    held
}

/// The inode of a line that begins a mapping (`start-end perms offset dev inode path`).
fn header_inode(line: &str) -> Option<u64> {
    let mut fields = line.split_ascii_whitespace();
    let (start, _) = fields.next()?.split_once('-')?;
    u64::from_str_radix(start, 16).ok()?;
    fields.nth(3)?.parse().ok()
}

/// What a process holds.
pub(super) fn of_process(pid: u32) -> anyhow::Result<Held> {
    let path = format!("/proc/{pid}/smaps_rollup");
    Ok(sum(&std::fs::read_to_string(&path).with_context(|| path)?, None))
}

/// What a process holds of a mapped file.
pub(super) fn of_file(pid: u32, file: &Path) -> anyhow::Result<Held> {
    use std::os::unix::fs::MetadataExt as _;
    let inode = std::fs::metadata(file).with_context(|| file.display().to_string())?.ino();
    let path = format!("/proc/{pid}/smaps");
    Ok(sum(&std::fs::read_to_string(&path).with_context(|| path)?, Some(inode)))
}

/// A process and all that descend from it.
pub(super) fn family(pid: u32) -> BTreeSet<u32> {
    let mut all = BTreeSet::from([pid]);
    let mut ask = vec![pid];
    while let Some(pid) = ask.pop() {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            let new = children.split_whitespace().filter_map(|child| child.parse().ok());
            ask.extend(new.filter(|child| all.insert(*child)));
        }
    }
    all
}

/// KiB as MiB.
#[expect(clippy::cast_precision_loss, reason = "no process holds 2^53 KiB")]
pub(super) const fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0010000000 rw-p 00000000 fe:00 4711 /data/memory-ranges
Size:             262144 kB
Rss:               40960 kB
Pss:               12000 kB
Pss_Dirty:          8000 kB
Anonymous:          8000 kB
Swap:                 16 kB
VmFlags: rd wr mr mw me nr nh
7f0010000000-7f0010001000 rw-p 00000000 00:00 0 [heap]
Rss:                 100 kB
Pss:                 100 kB
Anonymous:           100 kB
";

    #[test]
    fn the_mappings_of_one_file_are_told_from_the_rest() {
        let file = sum(SMAPS, Some(4711));
        assert_eq!(file, Held { pss: 12000, rss: 40960, anonymous: 8000, swap: 16 });
        let all = sum(SMAPS, None);
        assert_eq!((all.pss, all.rss), (12100, 41060));
        assert_eq!(sum(SMAPS, Some(1)), Held::default());
    }

    #[test]
    fn a_rollup_is_a_sum_already() {
        let text = "55d0-7fff ---p 00000000 00:00 0 [rollup]\nRss: 10 kB\nPss: 4 kB\n";
        assert_eq!(sum(text, None).pss, 4);
    }

    #[test]
    fn a_process_belongs_to_its_family() {
        let me = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(family(me).contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(of_process(me).unwrap().rss > 0);
    }
}
