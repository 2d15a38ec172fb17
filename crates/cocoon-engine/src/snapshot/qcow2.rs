//! qcow2 headers: read with distrust, written for empty overlays. Pure.
//!
//! Entry points: [`check`] for a file that came from outside, [`empty`] for a new overlay. An overlay's
//! header names no backing file: QEMU is told the chain node by node.

use thiserror::Error;

/// Bytes of a header that [`check`] wants at most.
pub(crate) const HEADER: usize = 112;
const MAGIC: [u8; 4] = *b"QFI\xfb";
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Bytes of guest disk that one entry of the first-level table stands for, with our cluster size.
const PER_L1: u64 = CLUSTER * (CLUSTER / 8);
/// Largest disk that is accepted or made: 16 TiB.
pub(crate) const MAX_SIZE: u64 = 16 << 40;

/// Why a disk file is refused.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum Qcow2Error {
    /// No qcow2, or cut off.
    #[error("it is not a qcow2 file")]
    NotQcow2,
    /// Only versions 2 and 3 exist.
    #[error("its qcow2 version {0} is not supported")]
    Version(u32),
    /// It wants another file to be read.
    #[error("it names a backing file")]
    BackingFile,
    /// It wants another file to be read.
    #[error("it keeps its data in another file")]
    DataFile,
    /// Encryption, unknown or refused features.
    #[error("it uses qcow2 features that are refused ({0})")]
    Features(&'static str),
    /// Numbers that make no sense or no good.
    #[error("its {0} is out of bounds")]
    Bounds(&'static str),
}

/// A checked header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Bytes of the guest's disk.
    pub(crate) size: u64,
}

fn word(bytes: &[u8], at: usize) -> Result<u32, Qcow2Error> {
    let slice = bytes.get(at..at + 4).ok_or(Qcow2Error::NotQcow2)?;
    slice.try_into().map(u32::from_be_bytes).map_err(|_| Qcow2Error::NotQcow2)
}

fn long(bytes: &[u8], at: usize) -> Result<u64, Qcow2Error> {
    Ok(u64::from(word(bytes, at)?) << 32 | u64::from(word(bytes, at + 4)?))
}

/// Reads the header at the start of a file of `length` bytes, refusing all that reaches outside the
/// file or that a disk of ours never has.
pub(crate) fn check(bytes: &[u8], length: u64) -> Result<Header, Qcow2Error> {
    if bytes.get(..4) != Some(&MAGIC) {
        return Err(Qcow2Error::NotQcow2);
    }
    let version = word(bytes, 4)?;
    if !(2..=3).contains(&version) {
        return Err(Qcow2Error::Version(version));
    }
    if long(bytes, 8)? != 0 || word(bytes, 16)? != 0 {
        return Err(Qcow2Error::BackingFile);
    }
    if version == 3 {
        features(bytes)?;
    }
    if word(bytes, 32)? != 0 {
        return Err(Qcow2Error::Features("encryption"));
    }
    if word(bytes, 60)? != 0 {
        return Err(Qcow2Error::Features("internal snapshots"));
    }
    tables(bytes, length)
}

fn features(bytes: &[u8]) -> Result<(), Qcow2Error> {
    let incompatible = long(bytes, 72)?;
    if incompatible & 0b100 != 0 {
        return Err(Qcow2Error::DataFile);
    }
    // Bit 0 is "dirty": refcounts may be behind, which QEMU repairs.
    if incompatible & !1 != 0 {
        return Err(Qcow2Error::Features("incompatible features"));
    }
    let header = word(bytes, 100)?;
    if !(104..=4096).contains(&header) || !header.is_multiple_of(8) {
        return Err(Qcow2Error::Bounds("header length"));
    }
    if word(bytes, 96)? > 6 {
        return Err(Qcow2Error::Bounds("refcount width"));
    }
    Ok(())
}

fn tables(bytes: &[u8], length: u64) -> Result<Header, Qcow2Error> {
    let bits = word(bytes, 20)?;
    if !(9..=21).contains(&bits) {
        return Err(Qcow2Error::Bounds("cluster size"));
    }
    let size = long(bytes, 24)?;
    if size > MAX_SIZE || !size.is_multiple_of(512) {
        return Err(Qcow2Error::Bounds("disk size"));
    }
    let per_l1 = 1_u64 << (2 * bits - 3);
    let entries = u64::from(word(bytes, 36)?);
    if entries < size.div_ceil(per_l1) || entries > size.div_ceil(per_l1) + (1 << bits) {
        return Err(Qcow2Error::Bounds("first-level table"));
    }
    inside(long(bytes, 40)?, entries * 8, bits, length, "first-level table")?;
    let refcounts = u64::from(word(bytes, 56)?);
    inside(long(bytes, 48)?, refcounts << bits, bits, length, "refcount table")?;
    Ok(Header { size })
}

fn inside(offset: u64, size: u64, bits: u32, length: u64, what: &'static str) -> Result<(), Qcow2Error> {
    let aligned = offset.trailing_zeros() >= bits;
    let fits = offset.checked_add(size).is_some_and(|end| end <= length.next_multiple_of(1 << bits));
    if aligned && fits { Ok(()) } else { Err(Qcow2Error::Bounds(what)) }
}

/// The bytes of an empty qcow2 file for a disk of `size` bytes. The file holds nothing else.
pub(crate) fn empty(size: u64) -> Result<Vec<u8>, Qcow2Error> {
    if size == 0 || size > MAX_SIZE || !size.is_multiple_of(512) {
        return Err(Qcow2Error::Bounds("disk size"));
    }
    let entries = size.div_ceil(PER_L1);
    let l1_clusters = (entries * 8).div_ceil(CLUSTER);
    // Clusters: header, refcount table, refcount block, first-level table.
    let clusters = 3 + l1_clusters;
    let mut file = vec![0; usize::try_from(clusters * CLUSTER).map_err(|_| Qcow2Error::Bounds("disk size"))?];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = file.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(0, &MAGIC);
    put(4, &3_u32.to_be_bytes());
    put(20, &CLUSTER_BITS.to_be_bytes());
    put(24, &size.to_be_bytes());
    put(36, &u32::try_from(entries).unwrap_or(u32::MAX).to_be_bytes());
    put(40, &(3 * CLUSTER).to_be_bytes());
    put(48, &CLUSTER.to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    // Refcounts of 16 bits (1 << 4), a header of 104 bytes.
    put(96, &4_u32.to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    let cluster = usize::try_from(CLUSTER).unwrap_or(0);
    put(cluster, &(2 * CLUSTER).to_be_bytes());
    for index in 0..usize::try_from(clusters).unwrap_or(0) {
        put(2 * cluster + 2 * index, &1_u16.to_be_bytes());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Vec<u8> {
        empty(10 << 30).unwrap()
    }

    fn verdict(at: usize, bytes: &[u8]) -> Result<Header, Qcow2Error> {
        let mut file = sample();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        check(&file, file.len() as u64)
    }

    #[test]
    fn what_we_write_we_accept() {
        for size in [512, 1 << 20, 10 << 30, 10 << 40, MAX_SIZE] {
            let file = empty(size).unwrap();
            assert_eq!(check(&file, file.len() as u64), Ok(Header { size }), "{size}");
        }
        for size in [0, 513, MAX_SIZE + 512] {
            assert_eq!(empty(size), Err(Qcow2Error::Bounds("disk size")), "{size}");
        }
    }

    #[test]
    fn a_header_that_reaches_outside_or_is_odd_is_refused() {
        let table: [(usize, &[u8], Qcow2Error); 14] = [
            (0, b"QFIx", Qcow2Error::NotQcow2),
            (4, &[0, 0, 0, 9], Qcow2Error::Version(9)),
            (8, &[0, 0, 0, 0, 0, 0, 2, 0], Qcow2Error::BackingFile),
            (16, &[0, 0, 0, 11], Qcow2Error::BackingFile),
            (72, &[0, 0, 0, 0, 0, 0, 0, 4], Qcow2Error::DataFile),
            (72, &[0, 0, 0, 0, 0, 0, 0, 2], Qcow2Error::Features("incompatible features")),
            (72, &[1, 0, 0, 0, 0, 0, 0, 0], Qcow2Error::Features("incompatible features")),
            (32, &[0, 0, 0, 2], Qcow2Error::Features("encryption")),
            (60, &[0, 0, 0, 1], Qcow2Error::Features("internal snapshots")),
            (20, &[0, 0, 0, 40], Qcow2Error::Bounds("cluster size")),
            (24, &[0x7f, 0, 0, 0, 0, 0, 0, 0], Qcow2Error::Bounds("disk size")),
            (36, &[0, 0, 0, 0], Qcow2Error::Bounds("first-level table")),
            (40, &[0, 0, 0, 9, 0, 0, 0, 0], Qcow2Error::Bounds("first-level table")),
            (100, &[0, 0, 0xff, 0], Qcow2Error::Bounds("header length")),
        ];
        for (at, bytes, expected) in table {
            assert_eq!(verdict(at, bytes), Err(expected), "{at} {bytes:?}");
        }
    }

    #[test]
    fn qemu_itself_finds_our_empty_file_clean() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        std::fs::write(&path, sample()).unwrap();
        let check = std::process::Command::new("qemu-img").arg("check").arg(&path).output();
        let check = check.expect("qemu-img is missing: apt-get install qemu-utils");
        assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_check_panic_or_accept_a_link_to_another_file(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..300),
            length in any::<u64>(),
            start in prop_oneof![Just(true), Just(false)],
        ) {
            if start && bytes.len() >= 8 {
                bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
            }
            if check(&bytes, length).is_ok() {
                prop_assert_eq!(&bytes[8..20], &[0_u8; 12][..]);
            }
        }

        #[test]
        fn a_changed_byte_never_hides_a_backing_file(at in 8_usize..20, value in 1_u8..) {
            prop_assert_eq!(verdict(at, &[value]), Err(Qcow2Error::BackingFile));
        }
    }
}
