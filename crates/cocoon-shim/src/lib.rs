//! Preloaded into QEMU: turns one shared mapping private (ARCHITECTURE.md, the memory recipe).
//!
//! QEMU is started with `share=on` on an empty RAM file of its own. This library takes the place of
//! `mmap`: when the file that is mapped shared is that RAM file (known by device and inode, from
//! `COCOON_SHIM_RAM_DEV` and `COCOON_SHIM_RAM_INO`), the snapshot's memory, inherited read-only as
//! descriptor `COCOON_SHIM_BASE_FD`, is mapped privately in its place. Every other call goes through
//! untouched, and so does everything when a variable is missing or wrong: the engine checks the result
//! in `/proc/PID/maps`, so a failure here is slow, never wrong.
//!
//! Invariants: no allocation, no locks, no panics: `mmap` is called before `main` and by the allocator.
#![allow(unsafe_code)]

use libc::{MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, MAP_TYPE, c_char, c_int, c_long, c_void, off_t, size_t};

/// The RAM file and what to map in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Swap {
    device: u64,
    inode: u64,
    base: c_int,
}

/// The flags of the private mapping, if this call maps the RAM file shared.
fn private_flags(swap: Swap, device: u64, inode: u64, flags: c_int) -> Option<c_int> {
    let shared = flags & MAP_TYPE == MAP_SHARED;
    let ram = device == swap.device && inode == swap.inode;
    (shared && ram).then_some((flags & !MAP_TYPE) | MAP_PRIVATE | MAP_NORESERVE)
}

/// A decimal number, nothing else; `None` for anything that is not one or does not fit.
fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |sum, byte| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

fn variable(name: &'static [u8]) -> Option<u64> {
    debug_assert_eq!(name.last(), Some(&0));
    // SAFETY: `name` ends with a zero byte; QEMU does not change its environment after start.
    let value = unsafe { libc::getenv(name.as_ptr().cast::<c_char>()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: getenv returned a string that ends with a zero byte and stays where it is.
    decimal(unsafe { std::ffi::CStr::from_ptr(value) }.to_bytes())
}

fn swap() -> Option<Swap> {
    Some(Swap {
        device: variable(b"COCOON_SHIM_RAM_DEV\0")?,
        inode: variable(b"COCOON_SHIM_RAM_INO\0")?,
        base: c_int::try_from(variable(b"COCOON_SHIM_BASE_FD\0")?).ok()?,
    })
}

/// Device and inode of an open file.
fn identity(fd: c_int) -> Option<(u64, u64)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `stat` has room for the answer; a bad descriptor makes the call fail, nothing else.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: fstat succeeded, so it filled the structure.
    let stat = unsafe { stat.assume_init() };
    Some((stat.st_dev, stat.st_ino))
}

/// Flags and descriptor of the private mapping that a call with these gets instead, if it maps the RAM
/// file shared.
fn private(flags: c_int, fd: c_int) -> Option<(c_int, c_int)> {
    if fd < 0 || flags & MAP_TYPE != MAP_SHARED {
        return None;
    }
    let swap = swap()?;
    let (device, inode) = identity(fd)?;
    Some((private_flags(swap, device, inode, flags)?, swap.base))
}

macro_rules! take_the_place_of {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As `mmap` itself.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            addr: *mut c_void,
            length: size_t,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: off_t,
        ) -> *mut c_void {
            let private = private(flags, fd);
            let (flags, fd) = private.unwrap_or((flags, fd));
            let [protection, flags, fd] = [protection, flags, fd].map(c_long::from);
            let number = libc::SYS_mmap;
            // SAFETY: the caller's promise is that of mmap itself, and its request is unchanged but perhaps
            // for the file, which the engine made at least as long.
            let mapped = unsafe { libc::syscall(number, addr, length, protection, flags, fd, offset) };
            let mapped = mapped as *mut c_void;
            if private.is_some() && mapped != libc::MAP_FAILED {
                // SAFETY: the range was mapped by the line above. Huge pages would blur what changed.
                unsafe { libc::madvise(mapped, length, libc::MADV_NOHUGEPAGE) };
            }
            mapped
        }
    };
}

take_the_place_of! {
    /// Takes the place of the C library's `mmap`.
    mmap
}
take_the_place_of! {
    /// The name under which programs with large-file support call `mmap`; `off_t` has 64 bits on our only
    /// architecture.
    mmap64
}

#[cfg(test)]
mod mapped;
#[cfg(test)]
mod tests {
    use super::*;

    const SWAP: Swap = Swap { device: 7, inode: 42, base: 9 };

    #[test]
    fn only_a_shared_mapping_of_the_ram_file_turns_private() {
        let private = MAP_PRIVATE | MAP_NORESERVE;
        let table = [
            ((7, 42, MAP_SHARED), Some(private)),
            ((7, 42, MAP_SHARED | libc::MAP_FIXED), Some(private | libc::MAP_FIXED)),
            ((7, 42, MAP_PRIVATE), None),
            ((7, 43, MAP_SHARED), None),
            ((8, 42, MAP_SHARED), None),
        ];
        for ((device, inode, flags), expected) in table {
            assert_eq!(private_flags(SWAP, device, inode, flags), expected, "{device} {inode} {flags:x}");
        }
    }

    #[test]
    fn a_number_that_is_not_plain_decimal_is_no_number() {
        for (text, expected) in [
            ("0", Some(0)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("", None),
            ("-1", None),
            ("1 ", None),
            ("0x1", None),
        ] {
            assert_eq!(decimal(text.as_bytes()), expected, "{text:?}");
        }
    }
}
