//! Who owns which address: leases, offers, addresses set aside, and who had an address last.
//!
//! Entry point: [`Table`]. An address of the pool is in one of these states:
//!
//! ```text
//! free --offer--> offered --claim--> leased --release, sweep--> free
//!   \-----------------claim----------^   \-----decline--> set aside --time--> free
//! ```
//!
//! Invariants: an address has at most one owner; a MAC has at most one lease and one offer; an address outside the
//! pool (a lease of an earlier, wider pool) is never given again; every collection is bounded.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    sync::Arc,
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};

use crate::{leases::Lease, names::Mac};

/// How long an offer stands.
const OFFER_HOLD: SignedDuration = SignedDuration::from_secs(60);
/// How long an address that a client found in use is given to nobody.
const DECLINED_HOLD: SignedDuration = SignedDuration::from_secs(600);
/// How many former owners are remembered.
const MAX_MEMORY: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    ip: Ipv4Addr,
    until: Timestamp,
}

/// The answer to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// The address cannot be this client's.
    Refused,
    /// It is leased to the client now.
    Granted {
        /// The client had it already.
        renewed: bool,
        /// Another address of the client, free again.
        given_up: Option<Ipv4Addr>,
    },
}

/// Who owns which address.
#[derive(Debug, Clone)]
pub struct Table {
    pool: Arc<BTreeSet<Ipv4Addr>>,
    lease_time: SignedDuration,
    leases: BTreeMap<Mac, Held>,
    offers: BTreeMap<Mac, Held>,
    /// Address to owner, for leases and offers alike.
    owners: BTreeMap<Ipv4Addr, Mac>,
    aside: BTreeMap<Ipv4Addr, Timestamp>,
    /// Who had which address last, and when (a running number).
    memory: BTreeMap<Mac, (Ipv4Addr, u64)>,
    clock: u64,
}

impl Table {
    /// A table of `pool` in which `leases` are in force. Rows that contradict each other are nobody's:
    /// their address is set aside until the last of them lapses.
    pub(super) fn new(
        pool: impl IntoIterator<Item = Ipv4Addr>,
        leases: impl IntoIterator<Item = Lease>,
        lease_time: Duration,
    ) -> Self {
        let mut table = Self {
            pool: Arc::new(pool.into_iter().collect()),
            lease_time: SignedDuration::try_from(lease_time).unwrap_or(SignedDuration::MAX),
            leases: BTreeMap::new(),
            offers: BTreeMap::new(),
            owners: BTreeMap::new(),
            aside: BTreeMap::new(),
            memory: BTreeMap::new(),
            clock: 0,
        };
        let rows: BTreeMap<String, Lease> =
            leases.into_iter().map(|lease| (lease.mac.clone(), lease)).collect();
        for lease in rows.values() {
            table.adopt(lease, rows.values().filter(|other| other.ip == lease.ip).count() > 1);
        }
        table
    }

    fn adopt(&mut self, lease: &Lease, contested: bool) {
        let Ok(mac) = lease.mac.parse() else { return };
        if contested {
            let until = self.aside.entry(lease.ip).or_insert(lease.expiry);
            *until = lease.expiry.max(*until);
        } else {
            self.leases.insert(mac, Held { ip: lease.ip, until: lease.expiry });
            self.owners.insert(lease.ip, mac);
        }
    }

    /// The address to offer to `mac`: its lease, its standing offer, the one it had last, the one it
    /// wishes, or another. `None`: nothing is free, or too much is on offer.
    pub(super) fn offer(&mut self, mac: Mac, wish: Option<Ipv4Addr>, now: Timestamp) -> Option<Ipv4Addr> {
        if let Some(lease) = self.leases.get(&mac).filter(|lease| lease.until > now) {
            return Some(lease.ip);
        }
        if let Some(offer) = self.offers.get(&mac).filter(|offer| offer.until > now) {
            return Some(offer.ip);
        }
        self.sweep_offers(now);
        if self.offers.len() >= (self.pool.len() / 2).max(16) {
            return None;
        }
        let ip = self.choose(mac, wish, now)?;
        let until = now.saturating_add(OFFER_HOLD).unwrap_or(Timestamp::MAX);
        self.offers.insert(mac, Held { ip, until });
        self.owners.insert(ip, mac);
        Some(ip)
    }

    fn choose(&self, mac: Mac, wish: Option<Ipv4Addr>, now: Timestamp) -> Option<Ipv4Addr> {
        let before = self.memory.get(&mac).map(|(ip, _)| *ip);
        if let Some(ip) = [before, wish].into_iter().flatten().find(|ip| self.is_free(*ip, now)) {
            return Some(ip);
        }
        let last_use: BTreeMap<Ipv4Addr, u64> = self.memory.values().copied().collect();
        let free = self.pool.iter().filter(|ip| self.is_free(**ip, now));
        free.min_by_key(|ip| last_use.get(ip).copied().unwrap_or(0)).copied()
    }

    fn is_free(&self, ip: Ipv4Addr, now: Timestamp) -> bool {
        let aside = self.aside.get(&ip).is_some_and(|until| *until > now);
        self.pool.contains(&ip) && !self.owners.contains_key(&ip) && !aside
    }

    /// Leases `ip` to `mac` if it is its own already, offered to it, or free.
    pub(super) fn claim(&mut self, mac: Mac, ip: Ipv4Addr, now: Timestamp) -> Claim {
        self.sweep_offers(now);
        let old = self.leases.get(&mac).copied().filter(|lease| lease.until > now);
        let own = self.owners.get(&ip) == Some(&mac);
        if !own && !self.is_free(ip, now) {
            return Claim::Refused;
        }
        self.withdraw(mac);
        let given_up = self.leases.remove(&mac).map(|lease| lease.ip).filter(|before| *before != ip);
        if let Some(before) = given_up {
            self.owners.remove(&before);
        }
        self.owners.insert(ip, mac);
        self.leases.insert(mac, Held { ip, until: self.expiry(now) });
        self.remember(mac, ip);
        Claim::Granted { renewed: old.is_some_and(|lease| lease.ip == ip), given_up }
    }

    /// Whole seconds, rounded up: the server never forgets before the client does.
    fn expiry(&self, now: Timestamp) -> Timestamp {
        let second = now.as_second().saturating_add(i64::from(now.subsec_nanosecond() > 0));
        let start = Timestamp::from_second(second).unwrap_or(now);
        start.saturating_add(self.lease_time).unwrap_or(Timestamp::MAX)
    }

    /// Takes back the offer to `mac`.
    pub(super) fn withdraw(&mut self, mac: Mac) {
        if let Some(offer) = self.offers.remove(&mac) {
            self.disown(mac, offer.ip);
        }
    }

    /// Frees an address unless the MAC owns it in another way too.
    fn disown(&mut self, mac: Mac, ip: Ipv4Addr) {
        let still =
            [self.leases.get(&mac), self.offers.get(&mac)].into_iter().flatten().any(|held| held.ip == ip);
        if !still && self.owners.get(&ip) == Some(&mac) {
            self.owners.remove(&ip);
        }
    }

    /// Ends the lease of `mac`; its address, if it had one in force.
    pub(super) fn release(&mut self, mac: Mac, now: Timestamp) -> Option<Ipv4Addr> {
        self.leases.get(&mac).filter(|lease| lease.until > now)?;
        let lease = self.leases.remove(&mac)?;
        self.disown(mac, lease.ip);
        Some(lease.ip)
    }

    /// Sets `ip` aside if it is offered or leased to `mac`; tells whether it was leased. At most an
    /// eighth of the pool is set aside in this way, so declining cannot empty it.
    pub(super) fn decline(&mut self, mac: Mac, ip: Ipv4Addr, now: Timestamp) -> Option<bool> {
        if self.owners.get(&ip) != Some(&mac) {
            return None;
        }
        let leased = self.leases.get(&mac).is_some_and(|lease| lease.ip == ip);
        if leased {
            self.leases.remove(&mac);
        }
        if self.offers.get(&mac).is_some_and(|offer| offer.ip == ip) {
            self.offers.remove(&mac);
        }
        self.owners.remove(&ip);
        self.memory.remove(&mac);
        self.aside.retain(|_, until| *until > now);
        if self.aside.len() < (self.pool.len() / 8).max(1) {
            self.aside.insert(ip, now.saturating_add(DECLINED_HOLD).unwrap_or(Timestamp::MAX));
        }
        Some(leased)
    }

    pub(super) fn set_aside(&mut self, addresses: impl IntoIterator<Item = Ipv4Addr>, until: Timestamp) {
        for ip in addresses {
            let held = self.aside.entry(ip).or_insert(until);
            *held = until.max(*held);
        }
    }

    /// Drops lapsed leases and offers; the lapsed leases are returned.
    pub(super) fn sweep(&mut self, now: Timestamp) -> Vec<(Mac, Ipv4Addr)> {
        self.sweep_offers(now);
        self.aside.retain(|_, until| *until > now);
        let lapsed = self.leases.iter().filter(|(_, lease)| lease.until <= now);
        let lapsed: Vec<_> = lapsed.map(|(mac, lease)| (*mac, lease.ip)).collect();
        for (mac, ip) in &lapsed {
            self.leases.remove(mac);
            self.disown(*mac, *ip);
        }
        lapsed
    }

    fn sweep_offers(&mut self, now: Timestamp) {
        let lapsed: Vec<Mac> =
            self.offers.iter().filter(|(_, offer)| offer.until <= now).map(|(mac, _)| *mac).collect();
        for mac in lapsed {
            self.withdraw(mac);
        }
    }

    fn remember(&mut self, mac: Mac, ip: Ipv4Addr) {
        self.clock += 1;
        self.memory.insert(mac, (ip, self.clock));
        if self.memory.len() > MAX_MEMORY {
            let oldest = self.memory.iter().min_by_key(|(_, (_, at))| *at).map(|(mac, _)| *mac);
            oldest.and_then(|mac| self.memory.remove(&mac));
        }
    }

    pub(super) fn leases(&self) -> Vec<Lease> {
        let row =
            |(mac, held): (&Mac, &Held)| Lease { mac: mac.to_string(), ip: held.ip, expiry: held.until };
        self.leases.iter().map(row).collect()
    }

    pub(super) fn active(&self, now: Timestamp) -> usize {
        self.leases.values().filter(|lease| lease.until > now).count()
    }

    pub(super) fn free(&self, now: Timestamp) -> usize {
        let offered = |ip: &Ipv4Addr| {
            let owner = self.owners.get(ip)?;
            self.offers.get(owner).filter(|offer| offer.ip == *ip && offer.until <= now)
        };
        let aside = |ip: &Ipv4Addr| self.aside.get(ip).is_some_and(|until| *until > now);
        let free = |ip: &&Ipv4Addr| (!self.owners.contains_key(ip) || offered(ip).is_some()) && !aside(ip);
        self.pool.iter().filter(free).count()
    }
}
