//! Opens a plain tap for a pretended guest.
#![allow(unsafe_code)]

use std::{
    fs::OpenOptions,
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

/// Creates the tap `name` in the calling thread's network namespace.
pub(crate) fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: `ifreq` is plain data; all zero bytes are a valid value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes().take(15)) {
        *slot = byte.cast_signed();
    }
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_TAP | libc::IFF_NO_PI).unwrap();
    // SAFETY: the descriptor is open and `request` lives until the call returns.
    if unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(OwnedFd::from(device))
}
