//! A layer's tar, read with limits.
//!
//! Entry point: [`each`]. The `tar` crate splits the stream into raw records; names, pax records and
//! sizes are read here, so that no length in the archive decides how much memory is used.
//!
//! Invariants: extension records are at most 1 MiB; entries, name bytes and stream bytes are counted
//! against one [`Budget`] for the whole image; the stream is read to its end, so its digest is checked.

use std::{
    collections::BTreeMap,
    io::{self, Read},
};

use tar::EntryType;

use super::path::Inside;

/// Largest pax or GNU long-name record.
const MAX_EXTENSION: u64 = 1 << 20;
/// Largest extended attribute (the kernel's own limit).
const MAX_XATTR: usize = 64 << 10;

/// What one image may use; shared by its layers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    /// Entries left.
    pub(super) entries: u64,
    /// Bytes of uncompressed tar left.
    pub(super) bytes: u64,
    /// Bytes of names left.
    pub(super) names: u64,
}

impl Budget {
    /// A million entries, `bytes` of content, 256 MiB of names.
    pub(super) const fn new(bytes: u64) -> Self {
        Self { entries: 1_000_000, bytes, names: 256 << 20 }
    }
}

/// Why a layer was not taken.
#[derive(Debug)]
pub(super) enum LayerError {
    /// The archive breaks a rule.
    Hostile {
        /// Path as written in the archive.
        entry: String,
        /// Which rule.
        reason: String,
    },
    /// The layer refers to files of lower layers: unpack all layers into one tree.
    NeedsLower,
    /// Reading the stream or writing the tree failed.
    Io(io::Error),
}

impl From<io::Error> for LayerError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<rustix::io::Errno> for LayerError {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}

/// A refusal. The name is made safe to print.
pub(super) fn hostile(entry: impl std::fmt::Display, reason: impl Into<String>) -> LayerError {
    LayerError::Hostile { entry: printable(entry.to_string().as_bytes()), reason: reason.into() }
}

/// What a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    /// A folder.
    Folder,
    /// A file; its bytes come with it.
    File,
    /// A symbolic link with its target, uninterpreted.
    Symlink(Vec<u8>),
    /// A hard link to another path of the tree.
    Hardlink(Inside),
}

/// One member of a layer.
#[derive(Debug, Clone)]
pub(super) struct Member {
    /// Where it goes.
    pub(super) path: Inside,
    /// What it is.
    pub(super) kind: Kind,
    /// Permission bits with setuid, setgid and sticky.
    pub(super) mode: u32,
    /// Owner.
    pub(super) uid: u32,
    /// Group.
    pub(super) gid: u32,
    /// Bytes of content.
    pub(super) size: u64,
    /// Extended attributes.
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Calls `take` with each member and its content, then reads the rest of the stream.
pub(super) fn each(
    stream: &mut dyn Read,
    budget: &mut Budget,
    take: &mut dyn FnMut(Member, &mut dyn Read) -> Result<(), LayerError>,
) -> Result<(), LayerError> {
    let mut metered = Metered { stream, left: budget.bytes };
    let result = members(&mut metered, budget, take).and_then(|()| drain(&mut metered));
    budget.bytes = metered.left;
    match result {
        Err(LayerError::Io(error)) if error.kind() == io::ErrorKind::FileTooLarge => {
            Err(hostile("(the whole archive)", TOO_LONG))
        }
        other => other,
    }
}

fn members(
    stream: &mut Metered<'_>,
    budget: &mut Budget,
    take: &mut dyn FnMut(Member, &mut dyn Read) -> Result<(), LayerError>,
) -> Result<(), LayerError> {
    let mut archive = tar::Archive::new(stream);
    let mut extension = Extension::default();
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        let header = entry.header().clone();
        budget.entries = budget.entries.checked_sub(1).ok_or_else(|| {
            hostile(
                printable(&entry.path_bytes()),
                "more entries than an image may have; drop what the guest does not need",
            )
        })?;
        if extension.absorb(header.entry_type(), &mut entry)? {
            continue;
        }
        let member = std::mem::take(&mut extension).member(&header)?;
        let length = member.path.as_path().as_os_str().len() as u64;
        budget.names = budget.names.checked_sub(length).ok_or_else(|| {
            hostile(
                &member.path,
                "more bytes of names than an image may have; drop what the guest does not need",
            )
        })?;
        take(member, &mut entry)?;
    }
    Ok(())
}

/// Some archives have padding after their end marker; bounded by the budget.
fn drain(stream: &mut Metered<'_>) -> Result<(), LayerError> {
    io::copy(stream, &mut io::sink())?;
    Ok(())
}

/// Counts a stream down; reading past the limit fails with `FileTooLarge`.
struct Metered<'a> {
    stream: &'a mut dyn Read,
    left: u64,
}

impl Read for Metered<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(buffer)?;
        self.left = self.left.checked_sub(read as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(read)
    }
}

/// What the records before a member say about it.
#[derive(Debug, Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    uid: Option<u64>,
    gid: Option<u64>,
    size: Option<u64>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Extension {
    /// Takes an extension record; `false` if the entry is a member.
    fn absorb(&mut self, kind: EntryType, entry: &mut impl Read) -> Result<bool, LayerError> {
        match kind {
            EntryType::GNULongName => self.path = Some(c_string(&record(entry)?)),
            EntryType::GNULongLink => self.link = Some(c_string(&record(entry)?)),
            EntryType::XHeader => self.pax(&record(entry)?)?,
            // git and bsdtar leave comments; anything that would change members is refused.
            EntryType::XGlobalHeader => {
                let mut global = Self::default();
                global.pax(&record(entry)?)?;
                if global.path.is_some()
                    || global.link.is_some()
                    || global.size.is_some()
                    || !global.xattrs.is_empty()
                {
                    return Err(hostile(
                        "(global pax header)",
                        "it changes the names or sizes of all entries",
                    ));
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn pax(&mut self, record: &[u8]) -> Result<(), LayerError> {
        for (key, value) in pax(record).ok_or_else(|| hostile("(pax header)", "malformed"))? {
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"uid" => self.uid = Some(number(value)?),
                b"gid" => self.gid = Some(number(value)?),
                b"size" => self.size = Some(number(value)?),
                _ => self.other(key, value)?,
            }
        }
        Ok(())
    }

    fn other(&mut self, key: &[u8], value: &[u8]) -> Result<(), LayerError> {
        if key.starts_with(b"GNU.sparse.") {
            return Err(hostile(
                "(pax header)",
                "sparse entries are not taken; write the archive without --sparse",
            ));
        }
        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            if value.len() > MAX_XATTR || name.len() > 255 {
                return Err(hostile("(pax header)", "an extended attribute is too long"));
            }
            self.xattrs.insert(name.to_vec(), value.to_vec());
        }
        Ok(())
    }

    fn member(self, header: &tar::Header) -> Result<Member, LayerError> {
        let raw = self.path.unwrap_or_else(|| header.path_bytes().into_owned());
        let shown = printable(&raw);
        let path = Inside::parse(&raw).map_err(|reason| hostile(&shown, reason))?;
        let size = header.entry_size().map_err(|_| hostile(&shown, "malformed size"))?;
        if self.size.is_some_and(|pax| pax != size) {
            return Err(hostile(&shown, "header and pax header disagree about the size"));
        }
        let link = self.link.or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned));
        let kind = kind_of(header.entry_type(), &raw, link, &shown)?;
        let owner = |pax: Option<u64>, field: &[u8], header: io::Result<u64>| {
            // Some writers leave a zero field blank.
            let blank = field.iter().all(|byte| matches!(byte, 0 | b' '));
            let id =
                pax.map_or(if blank { Ok(0) } else { header }, Ok).ok().and_then(|id| u32::try_from(id).ok());
            // u32::MAX is "leave as it is" to chown.
            id.filter(|id| *id != u32::MAX).ok_or_else(|| hostile(&shown, "malformed owner or group"))
        };
        let old = header.as_old();
        Ok(Member {
            kind,
            mode: header.mode().map_err(|_| hostile(&shown, "malformed mode"))? & 0o7777,
            uid: owner(self.uid, &old.uid, header.uid())?,
            gid: owner(self.gid, &old.gid, header.gid())?,
            size,
            xattrs: self.xattrs,
            path,
        })
    }
}

fn kind_of(kind: EntryType, raw: &[u8], link: Option<Vec<u8>>, shown: &str) -> Result<Kind, LayerError> {
    let target =
        || link.filter(|link| !link.is_empty()).ok_or_else(|| hostile(shown, "a link without a target"));
    match kind {
        EntryType::Directory => Ok(Kind::Folder),
        // Before ustar a folder was a file whose name ends with a slash.
        EntryType::Regular | EntryType::Continuous if raw.ends_with(b"/") => Ok(Kind::Folder),
        EntryType::Regular | EntryType::Continuous => Ok(Kind::File),
        EntryType::Symlink => {
            let target = target()?;
            if target.contains(&0) || target.len() > super::path::MAX_PATH {
                return Err(hostile(shown, "malformed link target"));
            }
            Ok(Kind::Symlink(target))
        }
        EntryType::Link => {
            let target = target()?;
            let inside = Inside::parse(&target)
                .map_err(|rule| hostile(shown, format!("hard link to {:?}: {rule}", printable(&target))))?;
            Ok(Kind::Hardlink(inside))
        }
        EntryType::Char | EntryType::Block => Err(hostile(shown, DEVICE)),
        EntryType::Fifo => Err(hostile(
            shown,
            "named pipe; whoever needs it makes it when it starts, so drop it from the archive",
        )),
        EntryType::GNUSparse => {
            Err(hostile(shown, "sparse entries are not taken; write the archive without --sparse"))
        }
        other => Err(hostile(shown, format!("unknown entry type {:#04x}", other.as_byte()))),
    }
}

/// What a bomb is refused with.
pub(super) const TOO_LONG: &str =
    "more unpacked bytes than an image may have; drop what the guest does not need";

/// Device nodes are never made, and no guest needs them.
const DEVICE: &str = "device node; a guest mounts a /dev of its own, so drop them from the archive, such as with \
                      `tar --delete --wildcards -f FILE './dev/*'` (from one that is not compressed)";

fn record(entry: &mut impl Read) -> Result<Vec<u8>, LayerError> {
    let mut out = Vec::new();
    entry.take(MAX_EXTENSION + 1).read_to_end(&mut out)?;
    if out.len() as u64 > MAX_EXTENSION {
        return Err(hostile("(extension header)", "longer than 1 MiB"));
    }
    Ok(out)
}

fn c_string(raw: &[u8]) -> Vec<u8> {
    raw.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
}

fn number(raw: &[u8]) -> Result<u64, LayerError> {
    std::str::from_utf8(raw)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| hostile("(pax header)", "malformed number"))
}

/// Records of the form `LENGTH KEY=VALUE\n`, the length counting all of it. `None`: malformed.
fn pax(mut rest: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut out = Vec::new();
    while !rest.is_empty() {
        let space = rest.iter().take(20).position(|byte| *byte == b' ')?;
        let length: usize = std::str::from_utf8(&rest[..space]).ok()?.parse().ok()?;
        let line = rest.get(space + 1..length)?.strip_suffix(b"\n")?;
        let equals = line.iter().position(|byte| *byte == b'=')?;
        out.push((&line[..equals], &line[equals + 1..]));
        rest = &rest[length..];
    }
    Some(out)
}

/// A name from an archive, safe to print.
pub(super) fn printable(raw: &[u8]) -> String {
    let text = String::from_utf8_lossy(&raw[..raw.len().min(200)]);
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pax_records_are_split_by_length_so_values_may_hold_newlines() {
        assert_eq!(pax(b"9 a=b\nc\n\n"), Some(vec![(&b"a"[..], &b"b\nc\n"[..])]));
        assert_eq!(pax(b"8 a=b\nc\n10 path=x\n"), Some(vec![(&b"a"[..], &b"b\nc"[..]), (b"path", b"x")]));
        for bad in [&b"99 a=b\n"[..], b"x a=b\n", b"6 ab=c", b"0 ", b"6 abcd\n", b"-1 a=b\n"] {
            assert_eq!(pax(bad), None, "{}", printable(bad));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_end_in_a_result(raw in proptest::collection::vec(any::<u8>(), 0..2048)) {
            let _ = pax(&raw);
            let mut budget = Budget::new(1 << 20);
            let _ = each(&mut raw.as_slice(), &mut budget, &mut |_, _| Ok(()));
        }

        #[test]
        fn a_header_with_any_one_byte_changed_ends_in_a_result(at in 0_usize..512, to in any::<u8>()) {
            let mut builder = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_ustar();
            header.set_size(5);
            header.set_mode(0o644);
            builder.append_data(&mut header, "a/b", &b"hello"[..]).unwrap();
            let mut raw = builder.into_inner().unwrap();
            raw[at] = to;
            // Keep the checksum right, so that the fields themselves are what is tried.
            let mut header = tar::Header::from_byte_slice(&raw[..512]).clone();
            header.set_cksum();
            raw[..512].copy_from_slice(header.as_bytes());
            let mut budget = Budget::new(1 << 20);
            let _ = each(&mut raw.as_slice(), &mut budget, &mut |_, body| {
                io::copy(body, &mut io::sink())?;
                Ok(())
            });
        }
    }
}
