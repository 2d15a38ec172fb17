//! Word from the kernel that somebody changed our tables of the packet filter, at once.
//!
//! Entry point: [`Alarm`]. Invariants: it hears every network's changes but rings for the tables of its own
//! only; what it cannot read, or has missed, rings too; it rings at most once in [`PAUSE`], counted
//! from the end of the repair ([`Alarm::rest`]), so that others are served in a storm of changes.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::Duration,
};

use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink, recv, socket_with, sockopt,
};
use tokio::{
    io::unix::AsyncFd,
    time::{Instant, sleep_until},
};

use crate::{names::table_name, sys};

/// From one ring to the next.
const PAUSE: Duration = Duration::from_millis(50);
/// From a fault of the socket to the next try.
const FAULT: Duration = Duration::from_secs(1);
/// The kernel cuts its news into pieces much smaller than this.
const BUFFER: usize = 64 * 1024;
/// What may queue up while the daemon is busy; past it the kernel says that news were lost.
const BACKLOG: usize = 1 << 20;

/// `NFNLGRP_NFTABLES`, as a bit.
const GROUP: u32 = 1 << (7 - 1);
/// `NFNL_SUBSYS_NFTABLES`: the upper byte of a message's type.
const SUBSYSTEM: u8 = 10;
/// `NFT_MSG_NEWSETELEM`: rows that come take nothing away, and each tap and lease brings some. Strange ones are for the sweep.
const NEW_ELEMENT: u8 = 12;
/// `NFT_MSG_NEWGEN`: names no table.
const NEW_GENERATION: u8 = 15;
/// Every other message names its table in its first kind of attribute.
const TABLE_ATTRIBUTE: u16 = 1;
/// `struct nlmsghdr` and `struct nfgenmsg`.
const HEADER: usize = 16;
const FAMILY: usize = 4;

/// A socket that hears of every change of the packet filter in the network namespace of the thread that
/// opened it.
#[derive(Debug)]
pub(crate) struct Alarm {
    socket: AsyncFd<OwnedFd>,
    table: String,
    buffer: Vec<u8>,
    heard: bool,
    quiet_until: Instant,
}

impl Alarm {
    /// For the tables of `bridge`.
    pub(crate) fn open(bridge: &str) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::NETFILTER))?;
        sockopt::set_socket_recv_buffer_size(&socket, BACKLOG)?;
        bind(&socket, &netlink::SocketAddrNetlink::new(0, GROUP))?;
        Ok(Self {
            socket: sys::watch(socket)?,
            table: table_name(bridge),
            buffer: vec![0; BUFFER],
            heard: false,
            quiet_until: Instant::now(),
        })
    }

    /// Returns once something about our tables changed. May be dropped at any await.
    pub(crate) async fn rings(&mut self) {
        while !self.heard {
            self.hear().await;
        }
        sleep_until(self.quiet_until).await;
        self.drain();
        self.heard = false;
        self.quiet_until = Instant::now() + PAUSE;
    }

    /// Rings by itself after `pause`.
    pub(crate) fn ring_after(&mut self, pause: Duration) {
        self.heard = true;
        self.quiet_until = Instant::now() + pause;
    }

    /// Does not ring for a while: what the daemon just did itself has been heard, too.
    pub(crate) fn rest(&mut self) {
        self.quiet_until = self.quiet_until.max(Instant::now() + PAUSE);
    }

    /// Waits for news.
    async fn hear(&mut self) {
        match self.socket.readable().await {
            Ok(mut ready) => ready.clear_ready(),
            Err(error) => return self.fault(&error),
        }
        self.drain();
    }

    /// Reads all that is there.
    fn drain(&mut self) {
        loop {
            match recv(self.socket.get_ref().as_fd(), &mut self.buffer[..], RecvFlags::empty()) {
                Ok((0, _)) => return,
                Ok((length, _)) => {
                    self.heard |= concerns(self.buffer.get(..length).unwrap_or_default(), &self.table);
                }
                Err(rustix::io::Errno::AGAIN) => return,
                Err(rustix::io::Errno::INTR) => {}
                // Some news were lost; they may have been about us.
                Err(rustix::io::Errno::NOBUFS) => self.heard = true,
                Err(error) => return self.fault(&error.into()),
            }
        }
    }

    fn fault(&mut self, error: &io::Error) {
        tracing::warn!(%error, "listening for changes of the packet filter");
        self.ring_after(FAULT);
    }
}

/// Whether one of these messages says that something of `table` changed, other than a row that came.
fn concerns(mut messages: &[u8], table: &str) -> bool {
    while !messages.is_empty() {
        let Some(length) = field(messages, 0).map(u32::from_ne_bytes) else { return true };
        let length = length as usize;
        let Some(message) = messages.get(..length).filter(|message| message.len() >= HEADER) else {
            return true;
        };
        if of_table(message, table) {
            return true;
        }
        messages = messages.get(align(length)..).unwrap_or_default();
    }
    false
}

/// Whether this one message does. What it cannot read counts as ours.
fn of_table(message: &[u8], table: &str) -> bool {
    let Some([low, high]) = field(message, 4).map(|kind: [u8; 2]| u16::from_ne_bytes(kind).to_le_bytes())
    else {
        return true;
    };
    if high != SUBSYSTEM || low == NEW_ELEMENT || low == NEW_GENERATION {
        return false;
    }
    let mut attributes = message.get(HEADER + FAMILY..).unwrap_or_default();
    while !attributes.is_empty() {
        let (Some(length), Some(kind)) = (field(attributes, 0), field(attributes, 2)) else { return true };
        let length = usize::from(u16::from_ne_bytes(length));
        let Some(value) = attributes.get(4..length) else { return true };
        if u16::from_ne_bytes(kind) == TABLE_ATTRIBUTE {
            return value.strip_suffix(&[0]).unwrap_or(value) == table.as_bytes();
        }
        attributes = attributes.get(align(length)..).unwrap_or_default();
    }
    true
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Netlink pads to four bytes.
fn align(length: usize) -> usize {
    length.next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(kind: u8, table: &str) -> Vec<u8> {
        let name = [table.as_bytes(), &[0]].concat();
        let length = u16::try_from(4 + name.len()).unwrap();
        let mut attributes = [&length.to_ne_bytes()[..], &TABLE_ATTRIBUTE.to_ne_bytes(), &name].concat();
        attributes.resize(align(attributes.len()), 0);
        let total = u32::try_from(HEADER + FAMILY + attributes.len()).unwrap();
        let kind = u16::from_le_bytes([kind, SUBSYSTEM]);
        [&total.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10], &[7, 0, 0, 0], &attributes].concat()
    }

    #[test]
    fn it_rings_for_what_goes_or_changes_in_its_own_tables() {
        let (table, rule, del_table, del_rule, del_set, del_element) = (0, 6, 2, 8, 11, 14);
        for kind in [table, rule, del_table, del_rule, del_set, del_element] {
            let news = [message(kind, "filter"), message(kind, "cocoon_cocoon0")].concat();
            assert!(concerns(&news, "cocoon_cocoon0"), "{kind}");
            assert!(!concerns(&news, "cocoon_cocoon"), "{kind}");
        }
        let rows = [message(NEW_ELEMENT, "cocoon_cocoon0"), message(NEW_GENERATION, "x")].concat();
        assert!(!concerns(&rows, "cocoon_cocoon0"));
        assert!(!concerns(&[], "cocoon_cocoon0"));
    }

    #[test]
    fn what_is_cut_off_rings() {
        let news = message(2, "filter");
        for length in 1..news.len() {
            assert!(concerns(&news[..length], "cocoon_cocoon0"), "{length}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_fail(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0_usize..60) {
            concerns(&bytes, "cocoon_cocoon0");
            let mut news = message(2, "cocoon_cocoon0");
            news.truncate(cut);
            concerns(&[news, bytes].concat(), "cocoon_cocoon0");
        }
    }
}
