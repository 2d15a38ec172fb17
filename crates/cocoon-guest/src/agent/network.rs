//! Network interfaces as the agent needs them: who is there, who has a carrier, MAC and addresses.

use std::{io, os::fd::OwnedFd, time::Duration};

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink, recv, socket_with};
use tokio::{io::unix::AsyncFd, time::timeout};

use crate::sys;

/// `RTMGRP_LINK`: changes of interfaces.
const LINK_GROUP: u32 = 1;
/// Bound of every wait for a change, should one be missed.
const GLANCE: Duration = Duration::from_secs(1);
/// More addresses than any guest of ours has.
const ADDRESSES: usize = 64;

/// A MAC address.
pub(crate) type Mac = [u8; 6];

/// The guest's virtio NICs, by name.
pub(crate) fn interfaces() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with("eth"))
        .collect();
    names.sort();
    names
}

/// Whether the link is up. An interface that is down itself has none.
pub(crate) fn has_carrier(interface: &str) -> bool {
    std::fs::read_to_string(format!("/sys/class/net/{interface}/carrier"))
        .is_ok_and(|text| text.trim() == "1")
}

/// The present MAC address.
pub(crate) fn mac(interface: &str) -> Option<Mac> {
    parse_mac(std::fs::read_to_string(format!("/sys/class/net/{interface}/address")).ok()?.trim())
}

/// Reads `aa:bb:cc:dd:ee:ff`.
pub(crate) fn parse_mac(text: &str) -> Option<Mac> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part =
            parts.next().filter(|part| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

/// Gives an interface a MAC address and brings it up.
pub(crate) fn set_mac(interface: &str, mac: Mac) -> Result<(), String> {
    let set = || -> io::Result<()> {
        sys::set_up(interface, false)?;
        sys::set_mac(interface, mac)?;
        sys::set_up(interface, true)
    };
    set().map_err(|error| format!("MAC of {interface}: {error}"))
}

/// Takes all IPv4 addresses, and with them the routes, off an interface.
pub(crate) fn flush(interface: &str) -> Result<(), String> {
    for _ in 0..ADDRESSES {
        match sys::drop_address(interface) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => return Err(format!("addresses of {interface}: {error}")),
        }
    }
    Err(format!("{interface} keeps its addresses"))
}

/// Tells when an interface has changed.
#[derive(Debug)]
pub(crate) struct Changes(AsyncFd<OwnedFd>);

impl Changes {
    /// Listens from now on.
    pub(crate) fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Protocol 0 of this family is NETLINK_ROUTE.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&socket, &netlink::SocketAddrNetlink::new(0, LINK_GROUP))?;
        Ok(Self(sys::watch(socket)?))
    }

    /// Waits for a change, or a second.
    pub(crate) async fn next(&mut self) {
        // Which interface changed and how is read from /sys; a lost or late message costs a second.
        drop(timeout(GLANCE, self.drain()).await);
    }

    async fn drain(&self) -> io::Result<()> {
        let mut guard = self.0.readable().await?;
        let mut buffer = [0_u8; 8192];
        while recv(self.0.get_ref(), &mut buffer[..], RecvFlags::empty()).is_ok() {}
        guard.clear_ready();
        Ok(())
    }

    /// Waits until the interface has a carrier.
    pub(crate) async fn carrier(&mut self, interface: &str) {
        while !has_carrier(interface) {
            self.next().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::parse_mac;

    proptest! {
        #[test]
        fn a_printed_mac_reads_back(mac in any::<[u8; 6]>()) {
            let text = mac.map(|b| format!("{b:02x}")).join(":");
            prop_assert_eq!(parse_mac(&text), Some(mac));
        }

        #[test]
        fn nothing_else_is_a_mac(text in "[0-9a-g:+ ]{0,20}") {
            let sound = text.len() == 17
                && text.split(':').all(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()));
            prop_assert_eq!(parse_mac(&text).is_some(), sound);
        }
    }
}
