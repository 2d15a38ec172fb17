//! The DHCP server as a state machine: a packet and a time go in, a reply and effects come out.
//!
//! - [`packet`]: requests from bytes, replies to bytes;
//! - [`table`]: who owns which address;
//! - this module: [`Server`], which answers requests from the table, throttles and counts.
//!
//! The caller makes the effects real, in this order: leases durable, filter rows, then the reply. If one
//! of the first two fails it puts the table back ([`Server::checkpoint`], [`Server::restore`]) and sends
//! [`Outcome::refusal`] instead. Invariants: no two live leases share an address; nothing here does I/O.

pub mod packet;
pub mod table;

use std::{collections::BTreeMap, net::Ipv4Addr, time::Duration};

use jiff::Timestamp;
use serde::Serialize;

use self::{
    packet::{Kind, Reply, Request},
    table::{Claim, Table},
};
use crate::{leases::Lease, names::Mac};

/// What every reply carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Server id, router and `siaddr`.
    pub gateway: Ipv4Addr,
    /// Subnet mask.
    pub mask: Ipv4Addr,
    /// Name servers.
    pub dns: Vec<Ipv4Addr>,
    /// How long a lease lasts.
    pub lease_time: Duration,
}

/// Why a packet got no reply. Each reason has a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ignored {
    /// Not a DHCP request of an Ethernet client, or one that came through a relay.
    Malformed,
    /// A message type that this server does not answer.
    Unhandled,
    /// The client chose another server.
    OtherServer,
    /// A request that names no address.
    NoAddress,
    /// No address is free, or too many are on offer.
    PoolEmpty,
    /// The client sends too many packets.
    Throttled,
}

/// A change that must be real before the reply is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The address may be used by the MAC from now on.
    Grant {
        /// The new owner.
        mac: Mac,
        /// Its address.
        ip: Ipv4Addr,
    },
    /// The MAC owns the address no more.
    Revoke {
        /// The old owner.
        mac: Mac,
        /// Its address.
        ip: Ipv4Addr,
    },
}

/// What one packet leads to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What to send once the effects are real.
    pub reply: Option<Reply>,
    /// What to send if they cannot be made real. A client that renews gets nothing and keeps its address.
    pub refusal: Option<Reply>,
    /// In order. Not empty means that the set of leases changed.
    pub effects: Vec<Effect>,
    /// Why there is no reply.
    pub ignored: Option<Ignored>,
}

/// Figures for status and metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Requests naming an address that were answered with ACK, renewals included.
    pub leases_ok: u64,
    /// Requests naming an address that were refused.
    pub leases_failed: u64,
    /// Packets without an answer, by reason.
    pub ignored: BTreeMap<Ignored, u64>,
}

/// The server of one network.
#[derive(Debug)]
pub struct Server {
    settings: Settings,
    table: Table,
    throttle: Throttle,
    counters: Counters,
}

impl Server {
    /// A server that hands out `pool`, with the leases that are in force already.
    #[must_use]
    pub fn new(
        settings: Settings,
        pool: impl IntoIterator<Item = Ipv4Addr>,
        leases: impl IntoIterator<Item = Lease>,
    ) -> Self {
        let table = Table::new(pool, leases, settings.lease_time);
        Self { settings, table, throttle: Throttle::default(), counters: Counters::default() }
    }

    /// Answers one packet.
    pub fn handle(&mut self, packet: &[u8], now: Timestamp) -> Outcome {
        let outcome = match Request::parse(packet) {
            Some(request) if !self.throttle.admits(request.mac, now) => ignored(Ignored::Throttled),
            Some(request) => self.answer(&request, now),
            None => ignored(Ignored::Malformed),
        };
        if let Some(reason) = outcome.ignored {
            *self.counters.ignored.entry(reason).or_default() += 1;
        }
        outcome
    }

    fn answer(&mut self, request: &Request, now: Timestamp) -> Outcome {
        match request.kind {
            Kind::Discover => self.discover(request, now),
            Kind::Request => self.request(request, now),
            Kind::Release => self.release(request.mac, now),
            Kind::Decline => self.decline(request, now),
            Kind::Other => ignored(Ignored::Unhandled),
        }
    }

    fn discover(&mut self, request: &Request, now: Timestamp) -> Outcome {
        match self.table.offer(request.mac, request.requested, now) {
            Some(ip) => {
                Outcome { reply: Some(Reply::offer(&self.settings, request, ip)), ..Outcome::default() }
            }
            None => ignored(Ignored::PoolEmpty),
        }
    }

    fn request(&mut self, request: &Request, now: Timestamp) -> Outcome {
        if request.server.is_some_and(|server| server != self.settings.gateway) {
            self.table.withdraw(request.mac);
            return ignored(Ignored::OtherServer);
        }
        let Some(ip) = request.requested.or(request.current) else { return ignored(Ignored::NoAddress) };
        let refusal = Reply::refuse(&self.settings, request);
        match self.table.claim(request.mac, ip, now) {
            Claim::Refused => {
                self.counters.leases_failed += 1;
                Outcome { reply: Some(refusal), ..Outcome::default() }
            }
            Claim::Granted { renewed, given_up } => {
                self.counters.leases_ok += 1;
                let mut effects = vec![Effect::Grant { mac: request.mac, ip }];
                effects.extend(given_up.map(|ip| Effect::Revoke { mac: request.mac, ip }));
                let reply = Some(Reply::acknowledge(&self.settings, request, ip));
                Outcome { reply, refusal: (!renewed).then_some(refusal), effects, ignored: None }
            }
        }
    }

    /// Forgets the lease of `mac`, if it has one.
    pub fn release(&mut self, mac: Mac, now: Timestamp) -> Outcome {
        let effects = self.table.release(mac, now).map(|ip| Effect::Revoke { mac, ip }).into_iter().collect();
        Outcome { effects, ..Outcome::default() }
    }

    /// The client found its address in use by somebody else: nobody gets it for a while.
    fn decline(&mut self, request: &Request, now: Timestamp) -> Outcome {
        let held = request.requested.and_then(|ip| Some((ip, self.table.decline(request.mac, ip, now)?)));
        let revoke =
            held.filter(|(_, leased)| *leased).map(|(ip, _)| Effect::Revoke { mac: request.mac, ip });
        Outcome { effects: revoke.into_iter().collect(), ..Outcome::default() }
    }

    /// Drops what lapsed; the revoked leases are returned.
    pub fn sweep(&mut self, now: Timestamp) -> Vec<Effect> {
        self.throttle.sweep(now);
        self.table.sweep(now).into_iter().map(|(mac, ip)| Effect::Revoke { mac, ip }).collect()
    }

    /// Keeps `addresses` from being given until `until`.
    pub fn set_aside(&mut self, addresses: impl IntoIterator<Item = Ipv4Addr>, until: Timestamp) {
        self.table.set_aside(addresses, until);
    }

    /// A copy of who owns what, for [`Self::restore`].
    #[must_use]
    pub fn checkpoint(&self) -> Table {
        self.table.clone()
    }

    /// Undoes everything since the checkpoint. `failed` requests count as refused.
    pub fn restore(&mut self, checkpoint: Table, failed: u64) {
        self.table = checkpoint;
        self.counters.leases_ok = self.counters.leases_ok.saturating_sub(failed);
        self.counters.leases_failed += failed;
    }

    /// The leases, for the lease file, in order of MAC.
    #[must_use]
    pub fn leases(&self) -> Vec<Lease> {
        self.table.leases()
    }

    /// How many leases are in force.
    #[must_use]
    pub fn active(&self, now: Timestamp) -> usize {
        self.table.active(now)
    }

    /// How many addresses could be offered.
    #[must_use]
    pub fn free(&self, now: Timestamp) -> usize {
        self.table.free(now)
    }

    /// Figures since the start.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }
}

fn ignored(reason: Ignored) -> Outcome {
    Outcome { ignored: Some(reason), ..Outcome::default() }
}

/// A bucket of [`Throttle::BURST`] packets a MAC that fills up again at [`Throttle::RATE`] a second. A guest cannot keep
/// the disk and the packet filter busy by asking again and again.
#[derive(Debug, Default)]
struct Throttle {
    /// When each MAC's bucket was last used, and what was in it then.
    buckets: BTreeMap<Mac, (Timestamp, f64)>,
}

impl Throttle {
    const BURST: f64 = 20.0;
    const RATE: f64 = 2.0;
    /// Of more MACs than this at once, the newest are not served.
    const MAX_MACS: usize = 8192;

    fn admits(&mut self, mac: Mac, now: Timestamp) -> bool {
        if self.buckets.len() >= Self::MAX_MACS && !self.buckets.contains_key(&mac) {
            self.sweep(now);
            if self.buckets.len() >= Self::MAX_MACS {
                return false;
            }
        }
        let (at, level) = self.buckets.entry(mac).or_insert((now, Self::BURST));
        *level = Self::level(*at, *level, now);
        *at = now;
        let admitted = *level >= 1.0;
        if admitted {
            *level -= 1.0;
        }
        admitted
    }

    fn sweep(&mut self, now: Timestamp) {
        self.buckets.retain(|_, (at, level)| Self::level(*at, *level, now) < Self::BURST);
    }

    /// A clock that was set back must not lock a client out: then the bucket is full.
    fn level(at: Timestamp, level: f64, now: Timestamp) -> f64 {
        let passed = now.duration_since(at).as_secs_f64();
        if passed < 0.0 { Self::BURST } else { (level + passed * Self::RATE).min(Self::BURST) }
    }
}

#[cfg(test)]
mod tests;
