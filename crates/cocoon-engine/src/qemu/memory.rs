//! Guest memory of a running QEMU: where it is mapped, and copies of it.
//!
//! Entry points: [`Ram::find`], [`Ram::is_private`], [`Ram::capture`], [`copy_sparse`]. All block.
//! Invariant: a page of a private mapping is taken from the process whenever it is not plainly the
//! base's own (present and file-backed, or never touched).

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::PathBuf,
};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ioctl_ficlone, seek};
use serde::{Deserialize, Serialize};

use crate::process::Process;

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;
const BUFFER: usize = 1 << 20;
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
        Ok(Self { device: meta.dev(), inode: meta.ino() })
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
        if self.is_private() {
            for region in &self.regions {
                let changed = changed_runs(&pagemap(self.process, region)?);
                bytes += changed.iter().map(|(_, pages)| pages * PAGE as u64).sum::<u64>();
            }
        }
        Ok(bytes)
    }

    /// Writes the memory into `out`, an empty file: sparse, of the full size.
    pub(crate) fn capture(&self, out: &File, size: u64) -> io::Result<()> {
        let base = self.file()?;
        copy_sparse(&base, out, size)?;
        if !self.is_private() {
            return Ok(());
        }
        let memory = File::open(format!("/proc/{}/mem", self.process.pid))?;
        let mut buffer = vec![0; BUFFER];
        for region in &self.regions {
            for (first, pages) in changed_runs(&pagemap(self.process, region)?) {
                let (from, to) = (first * PAGE as u64, (first + pages) * PAGE as u64);
                let mut at = from;
                while at < to {
                    let length = usize::try_from(to - at).unwrap_or(BUFFER).min(BUFFER);
                    let chunk = buffer.get_mut(..length).ok_or(io::ErrorKind::InvalidInput)?;
                    memory.read_exact_at(chunk, region.start + at)?;
                    put(out, chunk, region.offset + at, true)?;
                    at += length as u64;
                }
            }
        }
        Ok(())
    }
}

fn map_file(process: Process, region: &Region) -> PathBuf {
    PathBuf::from(format!("/proc/{}/map_files/{}", process.pid, region.range))
}

fn pagemap(process: Process, region: &Region) -> io::Result<Vec<u8>> {
    let page = PAGE as u64;
    let length = usize::try_from((region.end - region.start) / page * 8).map_err(io::Error::other)?;
    let mut entries = vec![0; length];
    File::open(format!("/proc/{}/pagemap", process.pid))?
        .read_exact_at(&mut entries, region.start / page * 8)?;
    Ok(entries)
}

/// Runs of pages (first, count) that are the process' own. Unsure means taken.
fn changed_runs(pagemap: &[u8]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (page, entry) in pagemap.as_chunks::<8>().0.iter().enumerate() {
        let entry = u64::from_le_bytes(*entry);
        let own = entry & SWAPPED != 0 || (entry & PRESENT != 0 && entry & FILE_BACKED == 0);
        if !own {
            continue;
        }
        let page = page as u64;
        match runs.last_mut() {
            Some((first, count)) if *first + *count == page => *count += 1,
            _ => runs.push((page, 1)),
        }
    }
    runs
}

/// Makes `to`, an empty file, a copy of the first `size` bytes of `from`: by reflink where the file
/// system can, else data only, and of that only pages that are not zero.
pub(crate) fn copy_sparse(from: &File, to: &File, size: u64) -> io::Result<()> {
    if from.metadata()?.len() == size && ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    to.set_len(size)?;
    let mut buffer = vec![0; BUFFER];
    let mut at = 0;
    while let Some((start, end)) = next_data(from, at, size)? {
        let mut position = start;
        while position < end {
            let length = usize::try_from(end - position).unwrap_or(BUFFER).min(BUFFER);
            let chunk = buffer.get_mut(..length).ok_or(io::ErrorKind::InvalidInput)?;
            from.read_exact_at(chunk, position)?;
            put(to, chunk, position, false)?;
            position += length as u64;
        }
        at = end;
    }
    Ok(())
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

    #[test]
    fn a_page_is_left_out_only_if_it_is_plainly_the_bases() {
        let table = [
            (0, false),
            (PRESENT | FILE_BACKED, false),
            (PRESENT, true),
            (SWAPPED, true),
            (SWAPPED | FILE_BACKED, true),
            (PRESENT, true),
        ];
        let entries: Vec<u8> =
            table.iter().flat_map(|(entry, _): &(u64, bool)| entry.to_le_bytes()).collect();
        assert_eq!(changed_runs(&entries), vec![(2, 4)]);
    }

    #[test]
    fn the_mapping_of_a_private_page_is_captured_over_its_base() {
        let base = tempfile::tempfile().unwrap();
        let size = 16 * PAGE as u64;
        base.set_len(size).unwrap();
        base.write_all_at(&[3; 2 * PAGE], 0).unwrap();
        let map = crate::sys::PrivateMap::new(&base, usize::try_from(size).unwrap());
        map.write(5 * PAGE, 8);
        map.write(0, 0);
        let me = Process::of_pid(std::process::id()).unwrap();
        let ram = Ram::find(me, FileId::of(&base).unwrap(), size).unwrap().unwrap();
        assert!(ram.is_private());
        let out = tempfile::tempfile().unwrap();
        ram.capture(&out, size).unwrap();
        let mut read = vec![1; usize::try_from(size).unwrap()];
        out.read_exact_at(&mut read, 0).unwrap();
        assert_eq!((read[0], read[1], read[PAGE], read[5 * PAGE], read[6 * PAGE]), (0, 3, 3, 8, 0));
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
