//! The crate's only unsafe code: starting a confined process, handing descriptors over a socket, and
//! writing out a part of a file.
#![allow(unsafe_code)]

use std::{
    ffi::CStr,
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
        unix::process::CommandExt as _,
    },
    process::{Child, Command},
};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// What a child gives up before it becomes another program.
#[derive(Debug)]
pub(crate) struct Confinement {
    /// User and group of the child; supplementary groups are dropped, but [`Confinement::group`]. 0 keeps
    /// root (tests only).
    pub(crate) uid: u32,
    /// The one supplementary group that the child keeps: that of `/dev/kvm`, which QEMU opens itself.
    pub(crate) group: Option<u32>,
    /// Descriptors that stay open, under the numbers they have here.
    pub(crate) keep: Vec<OwnedFd>,
    /// Gets the `stat` line of the child from the child itself, before it becomes the program: whoever
    /// finds the program running also finds this file.
    pub(crate) pid_file: Option<OwnedFd>,
    /// `cgroup.procs` of the control group to enter.
    pub(crate) cgroup: Option<OwnedFd>,
    /// What the kernel's OOM killer adds to the child's badness.
    pub(crate) oom_score_adj: &'static [u8],
    /// No huge pages for the child.
    pub(crate) small_pages: bool,
}

/// Starts `command` in a session and an empty network namespace of its own, as an unprivileged user that
/// can never gain a right, with no descriptor but 0-2 and [`Confinement::keep`].
pub(crate) fn spawn(mut command: Command, confinement: Confinement) -> io::Result<Child> {
    let child = move || confine(&confinement);
    // SAFETY: `confine` calls only async-signal-safe functions and allocates nothing.
    unsafe { command.pre_exec(child) };
    command.spawn()
}

fn confine(this: &Confinement) -> io::Result<()> {
    // SAFETY: plain system calls on integers and on buffers that live through the call.
    unsafe {
        check(libc::setsid())?;
        if let Some(file) = &this.pid_file {
            note_self(file.as_raw_fd())?;
        }
        if let Some(group) = &this.cgroup {
            // Best effort: a control group that cannot be entered confines less, it does not stop a VM.
            libc::write(group.as_raw_fd(), c"0".as_ptr().cast(), 1);
        }
        oom_score(this.oom_score_adj);
        let limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        check(libc::setrlimit(libc::RLIMIT_CORE, &raw const limit))?;
        if this.small_pages {
            libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0);
        }
        // Taps and sockets come as descriptors and work from anywhere, so what the guest may break into
        // needs no network: in one of its own there is nobody to talk to.
        check(libc::unshare(libc::CLONE_NEWNET))?;
        keep_open(&this.keep)?;
        if this.uid != 0 {
            let (count, list) = this.group.as_ref().map_or((0, std::ptr::null()), |gid| (1, &raw const *gid));
            check(libc::setgroups(count, list))?;
            check(libc::setresgid(this.uid, this.uid, this.uid))?;
            check(libc::setresuid(this.uid, this.uid, this.uid))?;
        }
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
    }
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// # Safety
/// Only between fork and exec.
unsafe fn keep_open(keep: &[OwnedFd]) -> io::Result<()> {
    // SAFETY: marks descriptors of this process; none is closed here.
    unsafe {
        check(libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) as libc::c_int)?;
        for fd in keep {
            check(libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0))?;
        }
    }
    Ok(())
}

/// # Safety
/// Only between fork and exec.
unsafe fn oom_score(text: &[u8]) {
    // SAFETY: the path is a constant string, the text lives through the call.
    unsafe {
        let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, text.as_ptr().cast(), text.len());
            libc::close(fd);
        }
    }
}

/// Copies `/proc/self/stat` into `file`: it starts with the process id and holds the start time.
///
/// # Safety
/// Only between fork and exec.
unsafe fn note_self(file: RawFd) -> io::Result<()> {
    const STAT: &CStr = c"/proc/self/stat";
    let mut buffer = [0_u8; 1024];
    // SAFETY: reads at most the buffer's length into it and writes what was read.
    unsafe {
        let fd = libc::open(STAT.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        check(fd)?;
        let length = libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len());
        libc::close(fd);
        let Ok(length) = usize::try_from(length) else { return Err(io::Error::last_os_error()) };
        if libc::write(file, buffer.as_ptr().cast(), length) != length as isize {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Writes out what is cached of `length` bytes of a file and waits for it, so that a later `fsync` has
/// little left to do. File systems without that do nothing.
pub(crate) fn write_out(file: &std::fs::File, offset: u64, length: u64) -> io::Result<()> {
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let (offset, length) = (
        libc::off64_t::try_from(offset).map_err(io::Error::other)?,
        libc::off64_t::try_from(length).map_err(io::Error::other)?,
    );
    // SAFETY: a system call on integers, with a descriptor that is open while `file` is borrowed.
    match check(unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, flags) }) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::ESPIPE | libc::EINVAL)) => {
            Ok(())
        }
        done => done,
    }
}

/// Sends `bytes` with `fd` attached. May send fewer bytes; the descriptor goes with the first one.
pub(crate) fn send_with_fd(socket: impl AsFd, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for one descriptor"));
    }
    let slices = [io::IoSlice::new(bytes)];
    Ok(sendmsg(socket, &slices, &mut ancillary, SendFlags::NOSIGNAL)?)
}

/// A private, writable mapping of a file: what a clone's QEMU has of its base.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct PrivateMap {
    start: *mut u8,
    length: usize,
}

#[cfg(test)]
impl PrivateMap {
    pub(crate) fn new(file: &std::fs::File, length: usize) -> Self {
        use rustix::mm::{MapFlags, ProtFlags};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel picks.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE, file, 0) };
        Self { start: start.unwrap().cast(), length }
    }

    pub(crate) fn write(&self, at: usize, byte: u8) {
        assert!(at < self.length);
        // SAFETY: inside the mapping, which lives as long as `self`.
        unsafe { self.start.add(at).write_volatile(byte) };
    }
}

#[cfg(test)]
impl Drop for PrivateMap {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `new` mapped.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.length) };
    }
}
