//! What no safe crate offers: the ioctl that opens a tap, and waiting for a descriptor of our own.
//!
//! Entry points: [`open_tap`], [`watch`]. Invariant: the interface is not persistent, so it goes with the descriptor.
#![allow(unsafe_code)]

use std::{
    fs::OpenOptions,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use tokio::io::unix::AsyncFd;

use crate::names::MAX_INTERFACE;

/// Creates the tap `name` in the network namespace of the calling thread. The name must be free.
pub(crate) fn open_tap(name: &str, vnet_header: bool) -> io::Result<OwnedFd> {
    if name.len() > MAX_INTERFACE {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "an interface name has at most 15 bytes"));
    }
    // The standard library opens with close-on-exec.
    let device = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let header = if vnet_header { libc::IFF_VNET_HDR } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_TUN_EXCL | header;
    // SAFETY: `ifreq` is plain data; all zero bytes are a valid value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte.cast_signed();
    }
    // The kernel reads these as 16 bits without sign; all of them fit.
    #[allow(clippy::cast_possible_truncation)]
    {
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
    }
    // SAFETY: the descriptor is open, and the kernel reads and writes one `ifreq` at this address, which
    // lives until the call returns. The name is zero-terminated, since it is shorter than the array.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(OwnedFd::from(device))
}

/// Lets the runtime wait until `fd` can be read. It must not block.
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names the same open descriptor until it is dropped, and it is moved into the result, which
    // takes it out of the runtime's list first.
    let watched = unsafe { AsyncFd::register(fd) };
    Ok(watched?)
}
