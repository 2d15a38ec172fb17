//! What has no safe wrapper: `ioctl`s on network interfaces and on the kernel's random number generator,
//! and handing a descriptor to tokio.
//!
//! Invariant of every `ioctl` here: the kernel gets a pointer to a live value of exactly the type that the
//! request names, and keeps none of it.
#![allow(unsafe_code)]

use std::{
    fs::OpenOptions,
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use tokio::io::{Interest, unix::AsyncFd};

/// `_IOW('R', 0x03, int[2])`.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
/// `_IO('R', 0x07)`.
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// Most bytes that one call mixes in.
const POOL: usize = 512;

/// `struct rand_pool_info` with room for [`POOL`] bytes.
#[repr(C)]
struct Entropy {
    bits: libc::c_int,
    size: libc::c_int,
    bytes: [u8; POOL],
}

/// Mixes `bytes` (at most 512 are used) into the kernel's generator, credits them, and reseeds it.
pub(crate) fn add_entropy(bytes: &[u8]) -> io::Result<()> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/urandom")?;
    let n = bytes.len().min(POOL);
    let mut entropy = Entropy { bits: 0, size: 0, bytes: [0; POOL] };
    entropy.bytes[..n].copy_from_slice(&bytes[..n]);
    // At most 512, so both fit.
    entropy.size = libc::c_int::try_from(n).unwrap_or(0);
    entropy.bits = entropy.size * 8;
    if n > 0 {
        // SAFETY: RNDADDENTROPY reads a `rand_pool_info` and `size` bytes behind it, all inside `entropy`.
        check(unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, &raw const entropy) })?;
    }
    // SAFETY: RNDRESEEDCRNG takes no argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) })
}

/// Sets an interface up or down.
pub(crate) fn set_up(interface: &str, up: bool) -> io::Result<()> {
    let socket = control()?;
    let mut request = request(interface)?;
    // SAFETY: SIOCGIFFLAGS fills `ifru_flags` of the `ifreq`.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) })?;
    // IFF_UP is 1: it fits.
    let flag = libc::c_short::try_from(libc::IFF_UP).unwrap_or(1);
    // SAFETY: the call above wrote `ifru_flags`.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = if up { flags | flag } else { flags & !flag };
    // SAFETY: SIOCSIFFLAGS reads the `ifreq`.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) })
}

/// Gives an interface a MAC address; it must be down.
pub(crate) fn set_mac(interface: &str, mac: [u8; 6]) -> io::Result<()> {
    let socket = control()?;
    let mut request = request(interface)?;
    let mut address = libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data: [0; 14] };
    for (to, from) in address.sa_data.iter_mut().zip(mac) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_hwaddr = address;
    // SAFETY: SIOCSIFHWADDR reads the `ifreq`.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFHWADDR, &raw const request) })
}

/// Takes the first IPv4 address off an interface. False when it has none.
pub(crate) fn drop_address(interface: &str) -> io::Result<bool> {
    let socket = control()?;
    let mut request = request(interface)?;
    // SAFETY: SIOCGIFADDR fills `ifru_addr` of the `ifreq`.
    match check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFADDR, &raw mut request) }) {
        Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => return Ok(false),
        other => other?,
    }
    // AF_INET is 2: it fits.
    let family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(2);
    request.ifr_ifru.ifru_addr = libc::sockaddr { sa_family: family, sa_data: [0; 14] };
    // SAFETY: SIOCSIFADDR reads the `ifreq`; the address 0.0.0.0 deletes.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw const request) })?;
    Ok(true)
}

/// Lets tokio wait until `fd` is readable.
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` stays open, and the same descriptor, for as long as the `AsyncFd` owns it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

fn control() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// An `ifreq` that names `interface`, with the union zeroed.
fn request(interface: &str) -> io::Result<libc::ifreq> {
    // SAFETY: `ifreq` is integers, arrays and a null pointer: all zero is a value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    Ok(request)
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
