//! The tar format, block by block and without I/O.
//!
//! Entry points: [`Assembler`] turns header blocks (and the extension bodies it asks for) into
//! [`Member`]s; [`header`] writes a member's header exactly as the contract's writer does: USTAR where it
//! fits, else a PAX record block before it. GNU sparse members are refused: their layout differs from
//! what the header says.

use std::collections::BTreeMap;

/// Size of a block.
pub(crate) const BLOCK: usize = 512;
/// Largest extension body (PAX records, long name); the contract's own limit.
pub(crate) const MAX_EXTENSION: u64 = 1 << 20;

/// Bytes from `size` to the next block.
pub(crate) const fn padding(size: u64) -> u64 {
    (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64
}

/// One member of an archive.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// Target of a link.
    pub(crate) link: String,
    pub(crate) mode: i64,
    pub(crate) size: u64,
    pub(crate) kind: u8,
    /// PAX records of this member.
    pub(crate) pax: BTreeMap<String, String>,
}

impl Member {
    pub(crate) fn is_file(&self) -> bool {
        matches!(self.kind, b'0' | b'7') || (self.kind == 0 && !self.name.ends_with('/'))
    }
}

/// What a header block meant.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fed {
    /// A block of zeros: two of them end the archive.
    Zero,
    /// Read this many bytes (plus padding) and give them to [`Assembler::extension`].
    Extension(u64),
    /// A member; its body follows.
    Member(Member),
}

/// Collects extensions until their member comes.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    pax: BTreeMap<String, String>,
    long_name: Option<String>,
    long_link: Option<String>,
    pending: u8,
}

impl Assembler {
    /// Takes a header block.
    pub(crate) fn feed(&mut self, block: &[u8; BLOCK]) -> Result<Fed, String> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(Fed::Zero);
        }
        check_sum(block)?;
        let kind = block[156];
        let size = number(&block[124..136])?;
        let size = u64::try_from(size).map_err(|_| "a member has a negative size".to_owned())?;
        match kind {
            b'x' | b'g' | b'L' | b'K' => {
                if size > MAX_EXTENSION {
                    return Err(format!("an extension header of {size} bytes (at most {MAX_EXTENSION})"));
                }
                self.pending = kind;
                Ok(Fed::Extension(size))
            }
            b'S' => Err("a GNU sparse member".to_owned()),
            _ => self.member(block, kind, size).map(Fed::Member),
        }
    }

    /// Takes the body that was asked for.
    pub(crate) fn extension(&mut self, body: &[u8]) -> Result<(), String> {
        let text = |body: &[u8]| {
            let end = body.iter().position(|byte| *byte == 0).unwrap_or(body.len());
            String::from_utf8(body[..end].to_vec()).map_err(|_| "a name is not UTF-8".to_owned())
        };
        match self.pending {
            b'x' => self.pax.extend(records(body)?),
            b'L' => self.long_name = Some(text(body)?),
            b'K' => self.long_link = Some(text(body)?),
            _ => {} // global records say nothing that is used here
        }
        Ok(())
    }

    fn member(&mut self, block: &[u8; BLOCK], kind: u8, size: u64) -> Result<Member, String> {
        let pax = std::mem::take(&mut self.pax);
        if pax.keys().any(|key| key.starts_with("GNU.sparse.")) {
            return Err("a GNU sparse member".to_owned());
        }
        let mut member = Member {
            name: short_name(block)?,
            link: field(&block[157..257])?,
            mode: number(&block[100..108])?,
            size,
            kind,
            pax: BTreeMap::new(),
        };
        if let Some(name) = self.long_name.take() {
            member.name = name;
        }
        if let Some(link) = self.long_link.take() {
            member.link = link;
        }
        if let Some(path) = pax.get("path").filter(|path| !path.is_empty()) {
            member.name.clone_from(path);
        }
        if let Some(link) = pax.get("linkpath").filter(|link| !link.is_empty()) {
            member.link.clone_from(link);
        }
        if let Some(text) = pax.get("size").filter(|text| !text.is_empty()) {
            member.size = text.parse().map_err(|_| format!("a size of {text:?}"))?;
        }
        // Links, devices and folders have no body, whatever their header says.
        if matches!(kind, b'1'..=b'6') || (kind == 0 && member.name.ends_with('/')) {
            member.size = 0;
        }
        member.pax = pax;
        Ok(member)
    }
}

fn check_sum(block: &[u8; BLOCK]) -> Result<(), String> {
    let stated = number(&block[148..156]).map_err(|_| "not a tar header".to_owned())?;
    let byte = |(at, byte): (usize, &u8)| if (148..156).contains(&at) { b' ' } else { *byte };
    let unsigned: i64 = block.iter().enumerate().map(byte).map(i64::from).sum();
    let signed: i64 = block.iter().enumerate().map(byte).map(|byte| i64::from(byte.cast_signed())).sum();
    if stated == unsigned || stated == signed {
        Ok(())
    } else {
        Err("not a tar header (check sum)".to_owned())
    }
}

/// Octal text, or base-256 when the first bit is set.
fn number(field: &[u8]) -> Result<i64, String> {
    if field[0] & 0x80 != 0 {
        if field[0] & 0x40 != 0 {
            return Ok(-1); // any negative number; nothing here may be negative
        }
        let value = field.iter().enumerate().try_fold(0_i64, |value, (at, byte)| {
            let byte = if at == 0 { byte & 0x7f } else { *byte };
            value.checked_mul(256).map(|value| value | i64::from(byte))
        });
        return value.ok_or_else(|| "a number out of range".to_owned());
    }
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let text = field[..end].trim_ascii();
    text.iter().try_fold(0_i64, |value, byte| match byte {
        b'0'..=b'7' => value
            .checked_mul(8)
            .map(|value| value | i64::from(byte - b'0'))
            .ok_or_else(|| "a number out of range".to_owned()),
        _ => Err("a number that is not octal".to_owned()),
    })
}

fn field(bytes: &[u8]) -> Result<String, String> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8(bytes[..end].to_vec()).map_err(|_| "a name is not UTF-8".to_owned())
}

fn short_name(block: &[u8; BLOCK]) -> Result<String, String> {
    let name = field(&block[..100])?;
    let posix = &block[257..263] == b"ustar\0";
    let prefix = if posix { field(&block[345..500])? } else { String::new() };
    Ok(if prefix.is_empty() { name } else { format!("{prefix}/{name}") })
}

/// Parses PAX records: `LENGTH KEY=VALUE\n`, the length counting the whole record.
fn records(mut body: &[u8]) -> Result<BTreeMap<String, String>, String> {
    let mut found = BTreeMap::new();
    while !body.is_empty() {
        let record = record(body).ok_or("malformed PAX records")?;
        let (length, key, value) = record;
        found.insert(key.to_owned(), value.to_owned());
        body = &body[length..];
    }
    Ok(found)
}

fn record(body: &[u8]) -> Option<(usize, &str, &str)> {
    let space = body.iter().take(21).position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&body[..space]).ok()?.parse().ok()?;
    let record = body.get(space + 1..length)?.strip_suffix(b"\n")?;
    let (key, value) = std::str::from_utf8(record).ok()?.split_once('=')?;
    let sound = !key.is_empty() && !key.contains('\0');
    sound.then_some((length, key, value))
}

/// The header blocks of a regular file.
pub(crate) fn header(
    name: &str,
    mode: i64,
    size: u64,
    mtime: i64,
    private: &BTreeMap<String, String>,
) -> Result<Vec<u8>, String> {
    let mut pax = private.clone();
    let split = if name.is_ascii() { split_name(name) } else { None };
    if split.is_none() {
        pax.insert("path".to_owned(), name.to_owned());
    }
    if size > OCTAL_11 {
        pax.insert("size".to_owned(), size.to_string());
    }
    let mut out = Vec::new();
    if pax.is_empty() {
        let (prefix, name) = split.unwrap_or(("", name));
        out.extend(block(&Fields { prefix, name, mode, size, mtime, kind: b'0' })?);
        return Ok(out);
    }
    let body: String = pax.iter().map(|(key, value)| write_record(key, value)).collect();
    if body.len() as u64 > MAX_EXTENSION {
        return Err(format!("PAX records of {} bytes for {name:?} (at most {MAX_EXTENSION})", body.len()));
    }
    let extension = ascii_name(&pax_name(name));
    let size_of_body = body.len() as u64;
    out.extend(block(&Fields {
        prefix: "",
        name: &extension,
        mode: 0,
        size: size_of_body,
        mtime: 0,
        kind: b'x',
    })?);
    out.extend_from_slice(body.as_bytes());
    out.resize(out.len().next_multiple_of(BLOCK), 0);
    let size = if size > OCTAL_11 { 0 } else { size };
    out.extend(block(&Fields { prefix: "", name: &ascii_name(name), mode, size, mtime, kind: b'0' })?);
    Ok(out)
}

const OCTAL_11: u64 = 0o77_777_777_777;

/// Splits a name into USTAR prefix and name; `None` when it does not fit.
fn split_name(name: &str) -> Option<(&str, &str)> {
    if name.len() <= 100 {
        return Some(("", name));
    }
    let head = &name[..name.len().min(156)];
    let at = head.trim_end_matches('/').rfind('/')?;
    let (prefix, rest) = (&name[..at], &name[at + 1..]);
    (!prefix.is_empty() && !rest.is_empty() && rest.len() <= 100).then_some((prefix, rest))
}

/// `DIR/PaxHeaders.0/FILE`.
fn pax_name(name: &str) -> String {
    match name.rsplit_once('/') {
        Some((folder, file)) => format!("{folder}/PaxHeaders.0/{file}"),
        None => format!("PaxHeaders.0/{name}"),
    }
}

/// What of a name a USTAR field can hold.
fn ascii_name(name: &str) -> String {
    let plain: String = name.chars().filter(|c| c.is_ascii() && *c != '\0').take(100).collect();
    plain.trim_end_matches('/').to_owned()
}

fn write_record(key: &str, value: &str) -> String {
    let rest = key.len() + value.len() + 3; // space, equals, newline
    let mut length = rest + rest.to_string().len();
    length = rest + length.to_string().len();
    format!("{length} {key}={value}\n")
}

struct Fields<'a> {
    prefix: &'a str,
    name: &'a str,
    mode: i64,
    size: u64,
    mtime: i64,
    kind: u8,
}

fn block(fields: &Fields<'_>) -> Result<[u8; BLOCK], String> {
    let mut block = [0_u8; BLOCK];
    put(&mut block[..100], fields.name);
    put(&mut block[100..108], &octal(fields.mode, 7)?);
    put(&mut block[108..116], &octal(0, 7)?);
    put(&mut block[116..124], &octal(0, 7)?);
    put(&mut block[124..136], &octal(fields.size.try_into().unwrap_or(-1), 11)?);
    put(&mut block[136..148], &octal(fields.mtime, 11)?);
    block[156] = fields.kind;
    put(&mut block[257..265], "ustar\x0000");
    if fields.kind != b'x' {
        // The contract's writer gives its extension headers no device numbers.
        put(&mut block[329..337], &octal(0, 7)?);
        put(&mut block[337..345], &octal(0, 7)?);
    }
    put(&mut block[345..500], fields.prefix);
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    put(&mut block[148..156], &format!("{sum:06o}\0 "));
    Ok(block)
}

fn put(field: &mut [u8], text: &str) {
    field[..text.len()].copy_from_slice(text.as_bytes());
}

fn octal(value: i64, digits: usize) -> Result<String, String> {
    let text = format!("{value:0digits$o}");
    if value < 0 || text.len() > digits {
        return Err(format!("{value} does not fit a tar header"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read_back(bytes: &[u8]) -> Member {
        let mut assembler = Assembler::default();
        let mut at = 0;
        loop {
            let block: [u8; BLOCK] = bytes[at..at + BLOCK].try_into().unwrap();
            at += BLOCK;
            match assembler.feed(&block).unwrap() {
                Fed::Zero => panic!("no member"),
                Fed::Member(member) => return member,
                Fed::Extension(size) => {
                    let size = usize::try_from(size).unwrap();
                    assembler.extension(&bytes[at..at + size]).unwrap();
                    at += size.next_multiple_of(BLOCK);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn a_written_header_reads_back(
            name in "[a-zü/_.]{1,300}",
            mode in 0_i64..0o7777,
            size in prop_oneof![0_u64..5000, (1_u64 << 33)..(1 << 40)],
            map in "[ -~]{0,200}",
        ) {
            let private = BTreeMap::from([("COCOON.sparse.map".to_owned(), map)]);
            let member = read_back(&header(&name, mode, size, 1, &private).unwrap());
            let short = !name.is_ascii() || name.len() > 100;
            prop_assert!(member.name == name || !short || member.name.is_empty());
            prop_assert_eq!((member.mode, member.size, member.kind), (mode, size, b'0'));
            prop_assert_eq!(&member.pax["COCOON.sparse.map"], &private["COCOON.sparse.map"]);
        }

        #[test]
        fn records_of_every_length_count_themselves(value in "[a-z]{0,1200}") {
            let text = write_record("k", &value);
            prop_assert_eq!(records(text.as_bytes()).unwrap()["k"].clone(), value);
        }

        #[test]
        fn hostile_blocks_never_panic(
            bytes in proptest::collection::vec(any::<u8>(), BLOCK),
            body in proptest::collection::vec(any::<u8>(), 0..100),
            kind in prop::sample::select(b"0xgLKS157\0".to_vec()),
        ) {
            let mut block: [u8; BLOCK] = bytes.try_into().unwrap();
            block[156] = kind;
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            let mut assembler = Assembler::default();
            let _ = assembler.feed(&block);
            let _ = assembler.extension(&body);
        }
    }
}
