//! Sparse files (§5): the map of data extents, and a file read through it.
//!
//! A payload is the extents one after the other. Extents that are closer than [`JOIN`] are one, so a
//! map stays far below the 1 MiB that the contract's tar reader takes.

use std::{
    fs::File,
    io,
    os::{fd::AsFd as _, unix::fs::FileExt as _},
    sync::Arc,
};

use rustix::fs::{SeekFrom, seek};

use crate::json::{Node, parse};

/// Holes smaller than this are sent as data.
pub(crate) const JOIN: u64 = 64 << 10;
/// Largest map text we write.
const MAX_MAP: usize = 512 << 10;
/// Largest logical file that is accepted.
pub(crate) const MAX_LOGICAL: u64 = 64 << 40;

/// A run of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Extent {
    const fn end(self) -> u64 {
        self.offset + self.length
    }
}

/// Parses a map and checks it against the logical size and the payload.
pub(crate) fn parse_map(text: &str, logical: u64, payload: u64) -> Result<Vec<Extent>, String> {
    if logical == 0 || logical > MAX_LOGICAL {
        return Err(format!("a logical size of {logical}"));
    }
    let items = match parse(text.as_bytes()).map_err(|why| format!("its sparse map cannot be read: {why}"))? {
        Node::Null => Vec::new(),
        Node::List(items) => items,
        _ => return Err("its sparse map is not a list".to_owned()),
    };
    let mut extents = Vec::with_capacity(items.len());
    let (mut end, mut total) = (0_u64, 0_u64);
    for item in &items {
        let part = |key| {
            let value = item.int(key)?.unwrap_or_default();
            u64::try_from(value).map_err(|_| format!("its sparse map has a negative number {value}"))
        };
        let extent = Extent { offset: part("o")?, length: part("l")? };
        let sound = matches!(item, Node::Map(_))
            && extent.offset >= end
            && extent.offset <= logical
            && extent.length <= logical - extent.offset;
        if !sound {
            return Err("its sparse map is unsorted, overlaps or passes the file's end".to_owned());
        }
        end = extent.end();
        total += extent.length;
        extents.push(extent);
    }
    if total != payload {
        return Err(format!("its sparse map covers {total} bytes of a payload of {payload}"));
    }
    Ok(extents)
}

/// The map's text, as the contract writes it (`null` when there is no data at all).
pub(crate) fn map_text(extents: &[Extent]) -> String {
    if extents.is_empty() {
        return "null".to_owned();
    }
    let items: Vec<String> =
        extents.iter().map(|extent| format!("{{\"o\":{},\"l\":{}}}", extent.offset, extent.length)).collect();
    format!("[{}]", items.join(","))
}

/// Joins extents that are closer than `gap`.
fn join(extents: &[Extent], gap: u64) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::with_capacity(extents.len());
    for extent in extents {
        match joined.last_mut() {
            Some(last) if extent.offset - last.end() < gap => last.length = extent.end() - last.offset,
            _ => joined.push(*extent),
        }
    }
    joined
}

/// Extents rounded to whole windows of `stride` bytes, the last one cut at the file's end.
pub(crate) fn widen(extents: &[Extent], stride: u64, logical: u64) -> Vec<Extent> {
    let whole = |extent: &Extent| {
        let offset = extent.offset / stride * stride;
        let end = extent.end().div_ceil(stride).saturating_mul(stride).min(logical);
        Extent { offset, length: end - offset }
    };
    let mut widened: Vec<Extent> = Vec::with_capacity(extents.len());
    for extent in extents.iter().map(whole) {
        match widened.last_mut() {
            // The window in which the one before ends may be the one in which this begins.
            Some(last) if extent.offset <= last.end() => {
                last.length = extent.end().max(last.end()) - last.offset
            }
            _ => widened.push(extent),
        }
    }
    widened
}

/// The data extents of a file, joined.
pub(crate) fn scan(file: &File, logical: u64) -> io::Result<Vec<Extent>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < logical {
        let data = match seek(file.as_fd(), SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break, // only a hole is left
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
                return Ok(vec![Extent { offset: 0, length: logical }]);
            }
            Err(error) => return Err(error.into()),
        };
        if data >= logical {
            break;
        }
        let hole = seek(file.as_fd(), SeekFrom::Hole(data))?.min(logical);
        found.push(Extent { offset: data, length: hole - data });
        at = hole;
    }
    let mut gap = JOIN;
    let mut joined = join(&found, gap);
    while map_text(&joined).len() > MAX_MAP {
        gap *= 2;
        joined = join(&joined, gap);
    }
    Ok(joined)
}

/// A file seen as its payload.
#[derive(Debug)]
pub(crate) struct Payload {
    file: File,
    extents: Vec<Extent>,
    /// Payload offset at which each extent starts.
    starts: Vec<u64>,
    length: u64,
}

impl Payload {
    pub(crate) fn new(file: File, extents: Vec<Extent>) -> Self {
        let mut length = 0;
        let starts = extents
            .iter()
            .map(|extent| {
                let start = length;
                length += extent.length;
                start
            })
            .collect();
        Self { file, extents, starts, length }
    }

    /// A file that is all data.
    pub(crate) fn whole(file: File, length: u64) -> Self {
        Self::new(file, vec![Extent { offset: 0, length }])
    }

    pub(crate) const fn length(&self) -> u64 {
        self.length
    }

    pub(crate) const fn file(&self) -> &File {
        &self.file
    }

    /// Where the payload's byte `at` lies in the file, and how many bytes follow it there.
    fn locate(&self, at: u64) -> Option<(u64, u64)> {
        let index = self.starts.partition_point(|start| *start <= at).checked_sub(1)?;
        let inside = at - self.starts[index];
        let extent = self.extents[index];
        (inside < extent.length).then(|| (extent.offset + inside, extent.length - inside))
    }

    /// Fills `buffer` with the payload from `at`.
    pub(crate) fn read_exact_at(&self, mut buffer: &mut [u8], mut at: u64) -> io::Result<()> {
        while !buffer.is_empty() {
            let (offset, left) = self.locate(at).ok_or(io::ErrorKind::UnexpectedEof)?;
            let part = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let (now, later) = buffer.split_at_mut(part);
            self.file.read_exact_at(now, offset)?;
            at += part as u64;
            buffer = later;
        }
        Ok(())
    }

    /// Writes `bytes` at the payload's byte `at`, leaving out blocks of zeros: a new file is a hole there.
    pub(crate) fn write_all_at(&self, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let (offset, left) = self.locate(at).ok_or(io::ErrorKind::UnexpectedEof)?;
            let part = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = bytes.split_at(part);
            write_data(&self.file, now, offset)?;
            at += part as u64;
            bytes = later;
        }
        Ok(())
    }
}

const BLOCK: usize = 4096;

/// Writes runs of blocks that are not all zero.
fn write_data(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        let data = !is_zero(&bytes[at..next_block(offset, at, bytes.len())]);
        while at < bytes.len() {
            let next = next_block(offset, at, bytes.len());
            if is_zero(&bytes[at..next]) == data {
                break;
            }
            at = next;
        }
        if data {
            file.write_all_at(&bytes[start..at], offset + start as u64)?;
        }
    }
    Ok(())
}

/// The end of the file block in which `at` lies.
fn next_block(offset: u64, at: usize, length: usize) -> usize {
    let inside = usize::try_from((offset + at as u64) % BLOCK as u64).unwrap_or_default();
    (at + BLOCK - inside).min(length)
}

fn is_zero(bytes: &[u8]) -> bool {
    let words = bytes.chunks_exact(16);
    words.remainder().iter().all(|byte| *byte == 0) && words.into_iter().all(|word| word == [0; 16])
}

/// A range of a payload, to be read where blocking is allowed.
#[derive(Debug, Clone)]
pub(crate) struct Range {
    pub(crate) payload: Arc<Payload>,
    pub(crate) at: u64,
    pub(crate) length: u64,
}

impl Range {
    pub(crate) fn all(payload: Arc<Payload>) -> Self {
        let length = payload.length();
        Self { payload, at: 0, length }
    }

    /// Reads the whole range into memory.
    pub(crate) fn to_vec(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.length).map_err(|_| io::ErrorKind::OutOfMemory)?];
        self.payload.read_exact_at(&mut bytes, self.at)?;
        Ok(bytes)
    }
}

impl io::Read for Range {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let part = usize::try_from(self.length).unwrap_or(usize::MAX).min(buffer.len());
        self.payload.read_exact_at(&mut buffer[..part], self.at)?;
        self.at += part as u64;
        self.length -= part as u64;
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Extents from (gap, length) pairs, and a logical size with a tail.
    fn layout(parts: &[(u64, u64)], tail: u64) -> (Vec<Extent>, u64, u64) {
        let mut extents = Vec::new();
        let (mut at, mut payload) = (0, 0);
        for (gap, length) in parts {
            extents.push(Extent { offset: at + gap, length: *length });
            at += gap + length;
            payload += length;
        }
        (extents, at + tail, payload)
    }

    proptest! {
        #[test]
        fn a_map_reads_back(parts in prop::collection::vec((0_u64..9000, 1_u64..9000), 0..20), tail in 1_u64..99) {
            let (extents, logical, payload) = layout(&parts, tail);
            prop_assert_eq!(parse_map(&map_text(&extents), logical, payload).unwrap(), extents);
        }

        #[test]
        fn hostile_maps_never_panic(text in ".{0,80}", logical in any::<u64>(), payload in any::<u64>()) {
            let _ = parse_map(&text, logical, payload);
            let one = format!("[{{\"o\":{logical},\"l\":{payload}}}]");
            let _ = parse_map(&one, logical, payload);
        }

        #[test]
        fn joining_keeps_the_data_and_leaves_no_small_gap(
            parts in prop::collection::vec((0_u64..200_000, 1_u64..9000), 1..30),
        ) {
            let (extents, logical, _) = layout(&parts, 1);
            let joined = join(&extents, JOIN);
            for extent in &extents {
                prop_assert!(joined.iter().any(|j| j.offset <= extent.offset && extent.end() <= j.end()));
            }
            for pair in joined.windows(2) {
                prop_assert!(pair[1].offset - pair[0].end() >= JOIN);
            }
            let payload = joined.iter().map(|extent| extent.length).sum();
            prop_assert_eq!(parse_map(&map_text(&joined), logical, payload).unwrap(), joined);
        }

        #[test]
        fn widened_extents_are_all_the_windows_that_have_data_and_no_others(
            parts in prop::collection::vec((0_u64..9000, 1_u64..9000), 0..20),
            tail in 0_u64..3000,
            stride in 1_u64..4000,
        ) {
            let (extents, logical, _) = layout(&parts, tail);
            let widened = widen(&extents, stride, logical.max(1));
            let payload = widened.iter().map(|extent| extent.length).sum();
            prop_assert_eq!(&parse_map(&map_text(&widened), logical.max(1), payload).unwrap(), &widened);
            for start in (0..logical).step_by(usize::try_from(stride).unwrap()) {
                let end = (start + stride).min(logical);
                let touches = |extent: &&Extent| extent.offset < end && extent.end() > start;
                let covers = |extent: &&Extent| extent.offset <= start && extent.end() >= end;
                let has_data = extents.iter().any(|extent| touches(&extent));
                prop_assert_eq!(widened.iter().filter(covers).count(), usize::from(has_data));
                prop_assert_eq!(widened.iter().filter(touches).count(), usize::from(has_data));
            }
        }

        #[test]
        fn what_is_written_through_a_map_reads_back_in_any_cut(
            parts in prop::collection::vec((0_u64..20_000, 1_u64..20_000), 1..6),
            cut in 1_usize..9000,
            zeros in 0_usize..30_000,
        ) {
            let (extents, logical, payload) = layout(&parts, 7);
            let file = tempfile::tempfile().unwrap();
            file.set_len(logical).unwrap();
            let mut bytes: Vec<u8> = (0..payload).map(|at| (at % 251) as u8).collect();
            let end = zeros.min(bytes.len());
            bytes[..end].fill(0);
            let view = Payload::new(file, extents);
            for (index, part) in bytes.chunks(cut).enumerate() {
                view.write_all_at(part, (index * cut) as u64).unwrap();
            }
            prop_assert_eq!(Range::all(Arc::new(view)).to_vec().unwrap(), bytes);
        }
    }

    #[test]
    fn overlapping_unsorted_and_passing_maps_are_refused() {
        for bad in [
            r#"[{"o":0,"l":10},{"o":5,"l":10}]"#,
            r#"[{"o":50,"l":10},{"o":5,"l":10}]"#,
            r#"[{"o":90,"l":20}]"#,
            r#"[{"o":-1,"l":20}]"#,
            r#"[{"o":0,"l":20},{"o":9223372036854775807,"l":9223372036854775807}]"#,
            "garbage",
            "{}",
        ] {
            assert!(parse_map(bad, 100, 20).is_err(), "{bad}");
        }
        assert!(parse_map("null", 100, 1).is_err());
        assert!(parse_map("null", 0, 0).is_err());
        assert_eq!(parse_map("[]", 100, 0).unwrap(), []);
    }
}
