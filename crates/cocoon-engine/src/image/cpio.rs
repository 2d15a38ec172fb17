//! The `newc` cpio format, as the kernel reads it from an initrd. Pure.
//!
//! Entry points: [`archive`] and [`padding`]. The kernel unpacks several archives laid end to end, each
//! starting at a multiple of four bytes; so a small archive can be appended to a finished initrd.

/// A file to pack; its folder must exist in an earlier archive or be the root.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member<'a> {
    /// Path without a leading slash.
    pub(super) name: &'a str,
    /// Type and permission bits, such as `0o100755`.
    pub(super) mode: u32,
    /// Content.
    pub(super) data: &'a [u8],
}

const END: &str = "TRAILER!!!";

/// Packs `members`, owned by root, without times. A file must be shorter than 4 GiB: `None` otherwise.
pub(super) fn archive(members: &[Member<'_>]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    for (at, member) in members.iter().enumerate() {
        push(&mut out, u32::try_from(at + 1).ok()?, *member)?;
    }
    push(&mut out, 0, Member { name: END, mode: 0, data: &[] })?;
    Some(out)
}

fn push(out: &mut Vec<u8>, inode: u32, member: Member<'_>) -> Option<()> {
    let links = 1;
    let (size, name_size) =
        (u32::try_from(member.data.len()).ok()?, u32::try_from(member.name.len() + 1).ok()?);
    out.extend_from_slice(b"070701");
    // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
    for field in [inode, member.mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0] {
        out.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    out.extend_from_slice(member.name.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(member.data);
    pad(out);
    Some(())
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Zero bytes to write after an initrd of `length` bytes before another archive may follow.
pub(super) const fn padding(length: u64) -> usize {
    match length % 4 {
        1 => 3,
        2 => 2,
        3 => 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        process::{Command, Stdio},
    };

    use proptest::prelude::*;

    use super::*;

    fn parse(mut rest: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut members = Vec::new();
        loop {
            assert_eq!(&rest[..6], b"070701");
            let field = |at: usize| {
                u32::from_str_radix(std::str::from_utf8(&rest[6 + 8 * at..14 + 8 * at]).unwrap(), 16).unwrap()
                    as usize
            };
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name = String::from_utf8(rest[110..110 + name_size - 1].to_vec()).unwrap();
            let data = (110 + name_size).next_multiple_of(4);
            if name == END {
                assert_eq!(rest.len(), data);
                return members;
            }
            members.push((name, u32::try_from(mode).unwrap(), rest[data..data + size].to_vec()));
            rest = &rest[(data + size).next_multiple_of(4)..];
        }
    }

    proptest! {
        #[test]
        fn what_is_packed_is_read_back_and_every_archive_ends_on_four_bytes(
            files in proptest::collection::vec(("[a-z]{1,9}", proptest::collection::vec(any::<u8>(), 0..40)), 0..6)
        ) {
            let members: Vec<_> =
                files.iter().map(|(name, data)| Member { name, mode: 0o100_755, data }).collect();
            let packed = archive(&members).unwrap();
            prop_assert_eq!(packed.len() % 4, 0);
            let read: Vec<_> = parse(&packed).into_iter().map(|(name, _, data)| (name, data)).collect();
            prop_assert_eq!(read, files);
        }

        #[test]
        fn padding_reaches_the_next_multiple_of_four(length in 0_u64..10_000) {
            prop_assert_eq!((length + padding(length) as u64) % 4, 0);
            prop_assert!(padding(length) < 4);
        }
    }

    #[test]
    fn the_cpio_program_reads_it() {
        let packed = archive(&[Member { name: "init", mode: 0o100_755, data: b"hello" }]).unwrap();
        let mut cpio = Command::new("cpio")
            .args(["-it", "--quiet", "-v"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cpio is missing; apt-get install cpio");
        cpio.stdin.take().unwrap().write_all(&packed).unwrap();
        let listed = String::from_utf8(cpio.wait_with_output().unwrap().stdout).unwrap();
        assert!(listed.starts_with("-rwxr-xr-x   1 root     root            5"), "{listed}");
        assert!(listed.trim_end().ends_with(" init"), "{listed}");
    }
}
