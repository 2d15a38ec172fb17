//! The library in a real process: the test runs itself again with the variables that QEMU gets. In a test
//! program, too, our two functions take the place of the C library's.

use std::{
    fs::File,
    os::{
        fd::{AsRawFd as _, FromRawFd as _},
        unix::fs::{FileExt as _, MetadataExt as _},
    },
    process::Command,
};

use libc::{MAP_PRIVATE, MAP_SHARED, c_int, c_void, off_t, size_t};

const PAGE: usize = 4096;
const NAME: &str = "the_ram_file_is_mapped_privately_under_both_names_and_nothing_else_is";
const FILES: &str = "COCOON_SHIM_TEST_FILES";

type Mmap = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, off_t) -> *mut c_void;

#[test]
fn the_ram_file_is_mapped_privately_under_both_names_and_nothing_else_is() {
    if let Ok(files) = std::env::var(FILES) {
        return inside(&files.split(' ').map(|fd| fd.parse().unwrap()).collect::<Vec<_>>());
    }
    let (ram, base, other) = (memory_file(1), memory_file(2), memory_file(3));
    let meta = ram.metadata().unwrap();
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("mapped::{NAME}"), "--nocapture"])
        .env(FILES, [&ram, &base, &other].map(|file| file.as_raw_fd().to_string()).join(" "))
        .env("COCOON_SHIM_RAM_DEV", meta.dev().to_string())
        .env("COCOON_SHIM_RAM_INO", meta.ino().to_string())
        .env("COCOON_SHIM_BASE_FD", base.as_raw_fd().to_string())
        .status();
    assert!(done.unwrap().success());
    let first = |file: &File| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        byte[0]
    };
    assert_eq!((first(&ram), first(&base), first(&other)), (1, 2, 9), "only the other file was written to");
}

/// A file of two pages of `byte` that a child inherits.
fn memory_file(byte: u8) -> File {
    // SAFETY: a constant name; the descriptor is new and owned by the file alone.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"shim-test".as_ptr(), 0)) };
    file.write_all_at(&[byte; 2 * PAGE], 0).unwrap();
    file
}

fn inside(files: &[c_int]) {
    let &[ram, base, other] = files else { panic!("three files") };
    for mmap in [crate::mmap as Mmap, crate::mmap64 as Mmap] {
        assert_eq!(seen_and_written(mmap, ram, MAP_SHARED, 9), 2, "the base's in place of the RAM file's");
        assert_eq!(seen_and_written(mmap, ram, MAP_PRIVATE, 9), 1, "not shared: left alone");
        assert_eq!(seen_and_written(mmap, base, MAP_SHARED, 2), 2, "the base itself is left alone");
        seen_and_written(mmap, other, MAP_SHARED, 9);
        assert_eq!(seen_and_written(mmap, other, MAP_SHARED, 9), 9, "another file stays shared");
    }
    let bad = mapped(crate::mmap, -1, MAP_SHARED);
    assert_eq!(bad, libc::MAP_FAILED);
}

/// The first byte of a new mapping of `fd`; then `byte` is written there.
fn seen_and_written(mmap: Mmap, fd: c_int, flags: c_int, byte: u8) -> u8 {
    let at = mapped(mmap, fd, flags);
    assert_ne!(at, libc::MAP_FAILED);
    let at = at.cast::<u8>();
    // SAFETY: two pages were mapped there for reading and writing, and are unmapped by nobody else.
    unsafe {
        let seen = at.read_volatile();
        at.write_volatile(byte);
        libc::munmap(at.cast(), 2 * PAGE);
        seen
    }
}

fn mapped(mmap: Mmap, fd: c_int, flags: c_int) -> *mut c_void {
    // SAFETY: a new mapping at a place that the kernel picks.
    unsafe { mmap(std::ptr::null_mut(), 2 * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) }
}
