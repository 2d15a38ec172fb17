//! Which blobs of a layout this process has verified, so that none is trusted by its name and length alone.
//!
//! Entry point: [`Verified`]. Invariants: an entry says that the file with this [`Stamp`] had the content of
//! its digest; any write, replacement or new time stamp of the file makes another stamp, and the blob is then
//! hashed again. The table is bounded, and forgetting costs a reading, never correctness. It is in memory
//! only: after a crash of the machine nothing is trusted unread.

use std::{
    collections::HashMap,
    fs::{File, Metadata},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::digest::Hasher;

/// Entries of one generation; two are kept, so at most 65,536 blobs (256 GiB of 4 MiB chunks, some 14 MiB).
const GENERATION: usize = 32_768;
/// Blobs that are looked at in parallel; the same blob never is, so that it is read once.
const TURNS: usize = 16;
const BLOCK: usize = 1 << 20;

/// What tells a file from itself after any change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    pub(super) const fn length(self) -> u64 {
        self.length
    }
}

/// The table. The oldest unused half goes when it is full.
#[derive(Debug, Default)]
pub(super) struct Verified {
    generations: Mutex<Generations>,
    turns: [Mutex<()>; TURNS],
    read: AtomicU64,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<String, Stamp>,
    old: HashMap<String, Stamp>,
}

impl Verified {
    /// Whether the file with this stamp was seen to be the blob.
    pub(super) fn knows(&self, digest: &str, stamp: Stamp) -> bool {
        let generations = self.generations();
        let known = generations.young.get(digest).or_else(|| generations.old.get(digest));
        known.is_some_and(|known| *known == stamp)
    }

    /// Notes that the file with this stamp is the blob. The stamp must be older than the last byte's reading.
    pub(super) fn record(&self, digest: &str, stamp: Stamp) {
        let mut generations = self.generations();
        if generations.young.len() >= GENERATION && !generations.young.contains_key(digest) {
            generations.old = std::mem::take(&mut generations.young);
        }
        generations.old.remove(digest);
        generations.young.insert(digest.to_owned(), stamp);
    }

    /// Reads a file from its start; whether it is the blob. `stamp` is from before the first byte.
    pub(super) fn read(&self, digest: &str, mut file: &File, stamp: Stamp) -> io::Result<bool> {
        let mut hasher = Hasher::default();
        let mut block = vec![0; usize::try_from(stamp.length).unwrap_or(BLOCK).clamp(1, BLOCK)];
        while hasher.length() <= stamp.length {
            let read = file.read(&mut block)?;
            if read == 0 {
                break;
            }
            self.read.fetch_add(read as u64, Ordering::Relaxed);
            hasher.update(&block[..read]);
        }
        let whole = hasher.length() == stamp.length && hasher.finish() == digest;
        if whole {
            self.record(digest, stamp);
        }
        Ok(whole)
    }

    /// Held while one blob is looked at: whoever comes next for it finds the entry. Taken before the layout's
    /// lock, and by nobody who holds that exclusively.
    pub(super) fn turn(&self, digest: &str) -> MutexGuard<'_, ()> {
        let last = digest.bytes().last().unwrap_or_default();
        self.turns[usize::from(last) % TURNS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that were read to verify stored blobs.
    pub(super) fn bytes(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.generations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(inode: u64) -> Stamp {
        Stamp { device: 1, inode, length: 3, modified: (1, 2), changed: (1, 2) }
    }

    #[test]
    fn an_entry_holds_for_one_stamp_only() {
        let table = Verified::default();
        table.record("a", stamp(1));
        assert!(table.knows("a", stamp(1)));
        for other in [
            stamp(2),
            Stamp { device: 2, ..stamp(1) },
            Stamp { length: 4, ..stamp(1) },
            Stamp { modified: (1, 3), ..stamp(1) },
            Stamp { changed: (1, 3), ..stamp(1) },
        ] {
            assert!(!table.knows("a", other), "{other:?}");
        }
        assert!(!table.knows("b", stamp(1)));
    }

    #[test]
    fn the_table_is_bounded_and_what_is_used_stays() {
        let table = Verified::default();
        for number in 0..200_000_u64 {
            table.record(&number.to_string(), stamp(number));
            if number % 1000 == 0 {
                table.record("used", stamp(7));
            }
        }
        let generations = table.generations();
        assert!(generations.young.len() + generations.old.len() <= 2 * GENERATION);
        drop(generations);
        assert!(table.knows("used", stamp(7)) && table.knows("199999", stamp(199_999)));
        assert!(!table.knows("1", stamp(1)));
    }
}
