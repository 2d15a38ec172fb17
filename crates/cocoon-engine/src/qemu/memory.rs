//! Guest memory of a running QEMU: where it is mapped, and copies of it.
//!
//! Entry points: [`Ram::find`], [`Ram::is_private`], [`Ram::capture`], [`copy_sparse_until`]. All block; what
//! copies does so in pieces and looks at its [`Stop`] before each. Invariants: a page of a private
//! mapping is taken from the process whenever it is not plainly the base's own (present and
//! file-backed, or never touched); nothing here grows with the size of the guest.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ioctl_ficlone, seek};
use serde::{Deserialize, Serialize};

use super::limit::Stop;
use crate::{paths::named, process::Process};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;
/// Bytes that are copied at once.
const BUFFER: usize = 1 << 20;
/// Pages whose state is read at once: 64 KiB of `pagemap` for 32 MiB of memory.
const PAGES: usize = 8192;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE_BACKED: u64 = 1 << 61;

/// Which file, on this boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileId {
    /// Device.
    pub(crate) device: u64,
    /// Inode.
    pub(crate) inode: u64,
}

impl FileId {
    /// Of an open file.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self::from(&meta))
    }

    /// Of what is at `path`; `None`: there is nothing.
    pub(crate) fn at(path: &Path) -> io::Result<Option<Self>> {
        match std::fs::metadata(path) {
            Ok(meta) => Ok(Some(Self::from(&meta))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(named(path, &error)),
        }
    }
}

impl From<&std::fs::Metadata> for FileId {
    fn from(meta: &std::fs::Metadata) -> Self {
        Self { device: meta.dev(), inode: meta.ino() }
    }
}

/// One line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Region {
    range: String,
    start: u64,
    end: u64,
    permissions: String,
    offset: u64,
    inode: u64,
}

fn parse_region(line: &str) -> Option<Region> {
    let mut fields = line.split_ascii_whitespace();
    let range = fields.next()?;
    let (start, end) = range.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let permissions = fields.next()?.to_owned();
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    (start < end).then(|| Region { range: range.to_owned(), start, end, permissions, offset, inode })
}

/// The guest memory of a process: all mappings of one file that cover it from start to end.
#[derive(Debug)]
pub(crate) struct Ram {
    process: Process,
    regions: Vec<Region>,
}

impl Ram {
    /// Finds the mappings of `file` in `process`. `None`: they do not cover exactly `size` bytes.
    pub(crate) fn find(process: Process, file: FileId, size: u64) -> io::Result<Option<Self>> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.pid))?;
        let mut regions: Vec<Region> =
            maps.lines().filter_map(parse_region).filter(|region| region.inode == file.inode).collect();
        regions.sort_by_key(|region| region.offset);
        let mut covered = 0;
        for region in &regions {
            // The device number in `maps` is not always that of stat; the link's target has it.
            let meta = std::fs::metadata(map_file(process, region))?;
            let same = FileId { device: meta.dev(), inode: meta.ino() } == file;
            if !same || region.offset != covered {
                return Ok(None);
            }
            covered += region.end - region.start;
        }
        Ok((covered == size).then_some(Self { process, regions }))
    }

    /// Whether every write of the process stays its own.
    #[must_use]
    pub(crate) fn is_private(&self) -> bool {
        self.regions.iter().all(|region| region.permissions == "rw-p")
    }

    /// The mapped file, opened anew through the process.
    pub(crate) fn file(&self) -> io::Result<File> {
        let region = self.regions.first().ok_or(io::ErrorKind::NotFound)?;
        File::open(map_file(self.process, region))
    }

    /// Bytes that a copy would hold at most.
    pub(crate) fn footprint(&self) -> io::Result<u64> {
        let mut bytes = self.file()?.metadata()?.blocks() * 512;
        self.own_runs(&Stop::default(), |_, run| {
            bytes += run.end - run.start;
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Writes the memory into `out`, an empty file: sparse, of the full size.
    pub(crate) fn capture(&self, out: &File, size: u64, stop: &Stop) -> io::Result<()> {
        copy_sparse_until(&self.file()?, out, size, stop)?;
        if !self.is_private() {
            return Ok(());
        }
        let memory = File::open(format!("/proc/{}/mem", self.process.pid))?;
        let mut pieces = Pieces::new(out, true, stop);
        self.own_runs(stop, |region, run| {
            let at = region.offset + run.start;
            pieces.copy(at..at + (run.end - run.start), |chunk, position| {
                memory.read_exact_at(chunk, region.start + (position - region.offset))
            })
        })
    }

    /// Calls `each` with the byte ranges of a private mapping, from its start, that are the process' own.
    fn own_runs(
        &self,
        stop: &Stop,
        mut each: impl FnMut(&Region, Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        if !self.is_private() {
            return Ok(());
        }
        let pagemap = File::open(format!("/proc/{}/pagemap", self.process.pid))?;
        let page = PAGE as u64;
        for region in &self.regions {
            let read = |entries: &mut [u8], first: u64| {
                stop.check()?;
                pagemap.read_exact_at(entries, (region.start / page + first) * 8)
            };
            changed_runs((region.end - region.start) / page, PAGES, read, |run| {
                each(region, run.start * page..run.end * page)
            })?;
        }
        Ok(())
    }
}

fn map_file(process: Process, region: &Region) -> PathBuf {
    PathBuf::from(format!("/proc/{}/map_files/{}", process.pid, region.range))
}

/// Runs of pages that are the process' own, of `pages` whose entries in `pagemap` are read from the page
/// given, `piece` pages at once; a run ends with its piece. Unsure means taken.
fn changed_runs(
    pages: u64,
    piece: usize,
    read: impl Fn(&mut [u8], u64) -> io::Result<()>,
    mut each: impl FnMut(Range<u64>) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; piece * 8];
    let mut first = 0;
    while first < pages {
        let count = usize::try_from(pages - first).unwrap_or(piece).min(piece);
        let entries = buffer.get_mut(..count * 8).ok_or(io::ErrorKind::InvalidInput)?;
        read(entries, first)?;
        for run in entries.as_chunks::<8>().0.chunk_by(|a, b| is_own(*a) == is_own(*b)) {
            let end = first + run.len() as u64;
            if run.first().is_some_and(|entry| is_own(*entry)) {
                each(first..end)?;
            }
            first = end;
        }
    }
    Ok(())
}

const fn is_own(entry: [u8; 8]) -> bool {
    let entry = u64::from_le_bytes(entry);
    entry & SWAPPED != 0 || (entry & PRESENT != 0 && entry & FILE_BACKED == 0)
}

/// Makes `to`, an empty file, a copy of the first `size` bytes of `from`: by reflink where the file
/// system can, else data only, and of that only pages that are not zero.
pub(crate) fn copy_sparse(from: &File, to: &File, size: u64) -> io::Result<()> {
    copy_sparse_until(from, to, size, &Stop::default())
}

/// [`copy_sparse`], unless it is told to stop before its end.
pub(crate) fn copy_sparse_until(from: &File, to: &File, size: u64, stop: &Stop) -> io::Result<()> {
    stop.check()?;
    if from.metadata()?.len() == size && ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    to.set_len(size)?;
    let mut pieces = Pieces::new(to, false, stop);
    let mut at = 0;
    while let Some((start, end)) = next_data(from, at, size)? {
        pieces.copy(start..end, |chunk, position| from.read_exact_at(chunk, position))?;
        at = end;
    }
    Ok(())
}

/// Copies into a file piece by piece.
struct Pieces<'a> {
    to: &'a File,
    overwrite: bool,
    stop: &'a Stop,
    buffer: Vec<u8>,
}

impl<'a> Pieces<'a> {
    /// `overwrite`: something else than a hole may stand there already.
    fn new(to: &'a File, overwrite: bool, stop: &'a Stop) -> Self {
        Self { to, overwrite, stop, buffer: vec![0; BUFFER] }
    }

    /// Fills `range` with what `read` gives for each position in it.
    fn copy(&mut self, range: Range<u64>, read: impl Fn(&mut [u8], u64) -> io::Result<()>) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            self.stop.check()?;
            let length = usize::try_from(range.end - at).unwrap_or(BUFFER).min(BUFFER);
            let chunk = self.buffer.get_mut(..length).ok_or(io::ErrorKind::InvalidInput)?;
            read(chunk, at)?;
            put(self.to, chunk, at, self.overwrite)?;
            at += length as u64;
        }
        Ok(())
    }
}

/// The next extent with data in `at..size`.
fn next_data(file: &File, at: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= size {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) if start < size => start,
        Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = seek(file, SeekFrom::Hole(start))?.min(size);
    Ok(Some((start, end)))
}

/// Writes `chunk` at `offset`, zero pages as holes. `overwrite`: something else may stand there.
fn put(to: &File, chunk: &[u8], offset: u64, overwrite: bool) -> io::Result<()> {
    let pages: Vec<&[u8]> = chunk.chunks(PAGE).collect();
    let mut at = 0;
    while at < pages.len() {
        let zero = is_zero(pages.get(at).copied().unwrap_or_default());
        let same = pages.iter().skip(at).take_while(|page| is_zero(page) == zero).count();
        let (from, to_byte) = (at * PAGE, ((at + same) * PAGE).min(chunk.len()));
        let run = chunk.get(from..to_byte).unwrap_or_default();
        let position = offset + from as u64;
        if !zero {
            to.write_all_at(run, position)?;
        } else if overwrite {
            clear(to, run, position)?;
        }
        at += same;
    }
    Ok(())
}

fn clear(to: &File, zeros: &[u8], offset: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(to, flags, offset, zeros.len() as u64) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::OPNOTSUPP) => to.write_all_at(zeros, offset),
        Err(error) => Err(error.into()),
    }
}

fn is_zero(page: &[u8]) -> bool {
    let (words, rest) = page.as_chunks::<16>();
    words.iter().all(|word| u128::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_content_and_keeps_the_holes() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("b"));
        let (source, target) = (File::create_new(&from).unwrap(), File::create_new(&to).unwrap());
        let size = 64 << 20;
        source.set_len(size).unwrap();
        source.write_all_at(&[7; 5000], 1 << 20).unwrap();
        source.write_all_at(&[0; 1 << 20], 8 << 20).unwrap();
        source.write_all_at(&[9; 100], size - 100).unwrap();
        copy_sparse(&File::open(&from).unwrap(), &target, size).unwrap();
        assert_eq!(std::fs::read(&from).unwrap(), std::fs::read(&to).unwrap());
        assert!(target.metadata().unwrap().blocks() * 512 <= 32 << 10, "zeros became holes");
    }

    #[test]
    fn zero_pages_over_old_data_read_as_zeros() {
        let target = tempfile::tempfile().unwrap();
        target.write_all_at(&[1; 4 * PAGE], 0).unwrap();
        let mut chunk = vec![0; 3 * PAGE];
        chunk[PAGE..2 * PAGE].fill(5);
        put(&target, &chunk, 0, true).unwrap();
        let mut read = vec![9; 4 * PAGE];
        target.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read[..3 * PAGE], chunk);
        assert!(read[3 * PAGE..].iter().all(|byte| *byte == 1));
    }

    /// What `changed_runs` gives for these entries, its runs joined.
    fn joined(entries: &[u64], piece: usize) -> Vec<Range<u64>> {
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        let mut runs: Vec<Range<u64>> = Vec::new();
        let read = |to: &mut [u8], first: u64| {
            let at = usize::try_from(first).unwrap() * 8;
            assert!(to.len() <= piece * 8, "{} bytes at once", to.len());
            to.copy_from_slice(&bytes[at..at + to.len()]);
            Ok(())
        };
        changed_runs(entries.len() as u64, piece, read, |run| {
            match runs.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => runs.push(run),
            }
            Ok(())
        })
        .unwrap();
        runs
    }

    /// The same over the whole map at once, page by page.
    fn at_once(entries: &[u64]) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (page, entry) in entries.iter().enumerate() {
            if entry & SWAPPED == 0 && (entry & PRESENT == 0 || entry & FILE_BACKED != 0) {
                continue;
            }
            let page = page as u64;
            match runs.last_mut() {
                Some(run) if run.end == page => run.end += 1,
                _ => runs.push(page..page + 1),
            }
        }
        runs
    }

    proptest::proptest! {
        #[test]
        fn read_in_pieces_a_map_has_the_same_pages_as_at_once(
            bits in proptest::collection::vec(0_u64..8, 0..300),
            rest in 0_u64..1 << 55,
            piece in 1_usize..80,
        ) {
            let entries: Vec<u64> = bits.iter().map(|bits| bits << 61 | rest).collect();
            proptest::prop_assert_eq!(joined(&entries, piece), at_once(&entries));
        }
    }

    #[test]
    fn a_page_is_left_out_only_if_it_is_plainly_the_bases() {
        let table = [0, PRESENT | FILE_BACKED, PRESENT, SWAPPED, SWAPPED | FILE_BACKED, PRESENT, FILE_BACKED];
        assert_eq!(at_once(&table).first(), Some(&(2..6)));
        for piece in [1, 2, 3, 7, PAGES] {
            assert_eq!(joined(&table, piece), at_once(&table), "{piece} at once");
        }
    }

    #[test]
    fn the_mapping_of_a_private_page_is_captured_over_its_base() {
        // Longer than what is read of its state at once, and with a change across that border.
        let pages = PAGES + 5;
        let size = (pages * PAGE) as u64;
        let base = tempfile::tempfile().unwrap();
        base.set_len(size).unwrap();
        base.write_all_at(&[3; 2 * PAGE], 0).unwrap();
        base.write_all_at(&[4; PAGE], size - PAGE as u64).unwrap();
        let map = crate::sys::PrivateMap::new(&base, pages * PAGE);
        for (page, byte) in [(0, 0), (5, 8), (PAGES - 1, 6), (PAGES, 7), (PAGES + 2, 9)] {
            map.write(page * PAGE, byte);
        }
        let me = Process::of_pid(std::process::id()).unwrap();
        let ram = Ram::find(me, FileId::of(&base).unwrap(), size).unwrap().unwrap();
        assert!(ram.is_private());
        let out = tempfile::tempfile().unwrap();
        ram.capture(&out, size, &Stop::default()).unwrap();
        let mut read = vec![1; pages * PAGE];
        out.read_exact_at(&mut read, 0).unwrap();
        let seen = [0, 1, PAGE, 5 * PAGE, 6 * PAGE, (PAGES - 1) * PAGE, PAGES * PAGE, (PAGES + 2) * PAGE];
        assert_eq!(seen.map(|at| read[at]), [0, 3, 3, 8, 0, 6, 7, 9]);
        assert_eq!((read[(PAGES + 1) * PAGE], read[(PAGES + 4) * PAGE]), (0, 4));
        let base_bytes = base.metadata().unwrap().blocks() * 512;
        assert_eq!(ram.footprint().unwrap(), base_bytes + 5 * PAGE as u64);
    }

    #[tokio::test]
    async fn a_copy_from_a_slow_source_ends_with_its_limit_and_writes_no_more() {
        let out = tempfile::NamedTempFile::new().unwrap();
        let (to, path) = (out.reopen().unwrap(), out.path().to_owned());
        let work = move |stop: &Stop| {
            let _partial = out;
            Pieces::new(&to, false, stop).copy(0..64 << 30, |chunk, _| {
                chunk.fill(1);
                std::thread::sleep(std::time::Duration::from_millis(10));
                Ok(())
            })
        };
        let limit = std::time::Duration::from_millis(100);
        let error = crate::qemu::limit::limited("copying memory of VM a", limit, work).await.unwrap_err();
        assert_eq!(error.to_string(), "copying memory of VM a");
        // The file that the work owned goes when the work does.
        for _ in 0..6000 {
            if !path.exists() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("the copy goes on");
    }

    #[test]
    fn lines_of_maps_are_understood() {
        let line = "7ff84ffff000-7ff86ffff000 rw-p 00000000 fe:00 10012219    /tmp/a file";
        let region = parse_region(line).unwrap();
        assert_eq!((region.end - region.start, region.inode), (512 << 20, 10_012_219));
        assert_eq!(region.permissions, "rw-p");
        assert_eq!(parse_region("7ff84ffff000-7ff86ffff000 rw-p 00000000 00:00 0").unwrap().inode, 0);
        assert_eq!(parse_region(""), None);
        assert_eq!(parse_region("2-1 rw-p 0 0:0 1"), None);
    }
}
