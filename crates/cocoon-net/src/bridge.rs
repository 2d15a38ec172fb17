//! The bridge with all that belongs to it on the host: address, forwarding, packet filter.
//!
//! Entry points: [`ensure`] (makes or repairs, as often as one likes), [`intact`] (a cheap look), [`teardown`].
//! Invariants: everything happens in the network namespace of the calling thread; a bridge that we did
//! not make is used but never removed; what was changed is recorded before it is changed, and put back.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::Ipv4Addr,
    time::Duration,
};

use cocoon_kit::files;
use jiff::Timestamp;
use serde_json::Value;
use thiserror::Error;

use crate::{
    claim::{self, Claim},
    coexist,
    config::{ConfigError, NetworkConfig},
    leases::{self, Lease, LeaseError},
    links::{self, LinkError},
    names::{self, BRIDGE_ALIAS, Mac, TABLE_PREFIX, table_name},
    netlink::{Link, Netlink},
    nft::{self, NftError},
    rules::{self, AddressRow, TapRow},
    sysctl::{self, Saved},
};

/// How long a daemon that was told to end may take.
const DAEMON_ENDS: Duration = Duration::from_secs(2);

/// Why a host network could not be made, checked or removed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BridgeError {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The leases, which say who may use which address, cannot be read.
    #[error(transparent)]
    Leases(#[from] LeaseError),
    /// A tap or its filter rows could not be put in order.
    #[error(transparent)]
    Links(#[from] LinkError),
    /// The interface name belongs to something else.
    #[error("interface {0} exists and is not a bridge; choose another bridge name")]
    NotABridge(String),
    /// The subnet is in use.
    #[error("subnet {subnet} overlaps {address} of another interface; choose another subnet")]
    Overlap {
        /// The network's subnet.
        subnet: String,
        /// An address that the host has already.
        address: String,
    },
    /// The kernel refused, or a file failed.
    #[error("{step} of bridge {bridge}")]
    System {
        /// What was tried.
        step: &'static str,
        /// Which network.
        bridge: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The packet filter refused.
    #[error("packet filter of bridge {bridge}: {message}")]
    Filter {
        /// Which network.
        bridge: String,
        /// What `nft` said.
        message: String,
    },
    /// VMs still use the network.
    #[error("bridge {bridge} still has taps ({taps}); remove their VMs first, or force the teardown")]
    InUse {
        /// Which network.
        bridge: String,
        /// The taps.
        taps: String,
    },
    /// The daemon of another state folder serves this bridge.
    #[error(
        "bridge {bridge} is served by the network daemon of another state folder than {folder}; nothing was done; \
         end that daemon first, or leave its network alone"
    )]
    OfAnother {
        /// Which network.
        bridge: String,
        /// Whose it is not.
        folder: String,
    },
    /// The daemon still serves the network.
    #[error(
        "the network daemon of {0} is still running; delete the pods and end `cocoon up`, which ends it too, or end \
         the process `cocoon net daemon` (its id is in {1})"
    )]
    DaemonRuns(String, String),
}

/// What [`ensure`] left behind, for [`intact`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Interface index of the bridge; another one means that the bridge was made anew.
    pub index: u32,
    /// How the packet filter lists our tables when nobody touched them.
    listing: String,
}

/// Makes the network, or repairs what is missing of it, where no other interface has its addresses.
pub async fn ensure(network: &NetworkConfig) -> Result<State, BridgeError> {
    network.check()?;
    let netlink = Netlink::open().map_err(At(network).system("opening netlink"))?;
    // Before anything is made.
    refuse_overlap(network, &netlink).await?;
    find_bridge(network, &netlink).await?;
    repair(network).await
}

/// As [`ensure`], for a network that is in use: rows for live taps and leases are put back too, and what others do with
/// its addresses keeps no filter from being in force.
pub(crate) async fn repair(network: &NetworkConfig) -> Result<State, BridgeError> {
    let at = At(network);
    files::private_folder(&network.state_dir).map_err(at.system("state folder"))?;
    network.save()?;
    let netlink = Netlink::open().map_err(at.system("opening netlink"))?;
    let saved = remember_forwarding(network).await?;
    // Before there is a bridge to filter; and before the switch is turned, so that another network of this host that
    // finds it turned finds the note in our table too.
    let listing = apply_filter(network, &netlink, &saved.ip_forward).await?;
    sysctl::forwarding_on().map_err(at.system("net.ipv4.ip_forward"))?;
    let bridge = ensure_bridge(network, &netlink).await?;
    coexist_with_others(network).await;
    repair_taps(network, &netlink, bridge).await?;
    // A tap may have gone while its rows were put back.
    links::drop_stale_rows(network, &netlink).await?;
    Ok(State { index: bridge, listing })
}

/// What a look at the network found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// Everything is as it was made.
    Intact,
    /// A tap is not wired or not filtered, as one that is just being made or removed: worth a second look.
    Unwired,
    /// Bridge, address, forwarding, tables or rules are not as they were made.
    Broken,
}

/// Whether everything of ours is still as `state` says, taps included.
pub async fn intact(network: &NetworkConfig, state: &State) -> Result<bool, BridgeError> {
    Ok(look(network, state).await? == Look::Intact)
}

/// As [`intact`], and what kind of damage there is.
pub(crate) async fn look(network: &NetworkConfig, state: &State) -> Result<Look, BridgeError> {
    let at = At(network);
    // Before the interfaces: the tap of a row that is seen here existed before it.
    let Ok(rows) = links::list_rows(network).await else { return Ok(Look::Broken) };
    let netlink = Netlink::open().map_err(at.system("opening netlink"))?;
    let links = netlink.links().await.map_err(at.system("listing interfaces"))?;
    let bridge =
        links.iter().find(|link| link.name == network.bridge && link.index == state.index && link.up);
    let addressed = has_address(network, &netlink, state.index).await?;
    let forwarding = sysctl::forwarding().map_err(at.system("net.ipv4.ip_forward"))?;
    if bridge.is_none()
        || !addressed
        || !sysctl::is_on(&forwarding)
        || !as_made(network, &state.listing).await
    {
        return Ok(Look::Broken);
    }
    let reached = netlink.reached().await.map_err(at.system("listing forwarding entries"))?;
    let wired = |(tap, mac): &(&Link, Mac)| {
        let port = tap.up && tap.controller == Some(state.index) && tap.port.fit(!network.vm_to_vm);
        port && reached.contains(&(tap.index, *mac)) && rows.filter(&tap.name, *mac)
    };
    let leases = leases::load(&network.lease_file())?;
    let granted = rows.grant(&address_rows(&leases.live(Timestamp::now())), &address_rows(&leases.all()));
    let whole = granted
        && links::taps_of(network, &links).iter().all(wired)
        && !rows.taps().iter().any(|row| links::is_stale(network, &links, row));
    Ok(if whole { Look::Intact } else { Look::Unwired })
}

/// Whether the filter is in force, as `state` says and for every tap. What cannot be seen is not.
pub(crate) async fn filtered(network: &NetworkConfig, state: &State) -> bool {
    let Ok(rows) = links::list_rows(network).await else { return false };
    let Ok(netlink) = Netlink::open() else { return false };
    let Ok(links) = netlink.links().await else { return false };
    let taps = links::taps_of(network, &links);
    as_made(network, &state.listing).await && taps.iter().all(|(tap, mac)| rows.filter(&tap.name, *mac))
}

/// Who may use which address by the filter that is in force; nobody if there is none.
pub(crate) async fn granted(network: &NetworkConfig) -> BTreeSet<AddressRow> {
    links::list_rows(network).await.unwrap_or_default().addresses()
}

/// Whether our tables hold what was put there, rows apart.
async fn as_made(network: &NetworkConfig, listing: &str) -> bool {
    list_tables(network).await.is_ok_and(|found| found == listing)
}

/// Removes the network: filter, bridge, changed switches and the state files. Refuses while VMs have
/// taps on it, unless `force` is set, and while its daemon runs.
pub async fn teardown(network: &NetworkConfig, force: bool) -> Result<(), BridgeError> {
    let at = At(network);
    names::check_bridge(&network.bridge).map_err(ConfigError::Value)?;
    files::private_folder(&network.state_dir).map_err(at.system("state folder"))?;
    let _lock = daemon_gone(network).await?;
    // Nor may one come.
    let _claim = claim(network).await?;
    let netlink = Netlink::open().map_err(at.system("opening netlink"))?;
    remove_taps(network, &netlink, force).await?;
    let found = netlink.link(&network.bridge).await.map_err(at.system("lookup"))?;
    if let Some(bridge) = found.filter(|link| link.alias.as_deref() == Some(BRIDGE_ALIAS)) {
        netlink.delete(bridge.index).await.map_err(at.system("removal"))?;
    }
    let others = tables_of_others().await.map_err(at.filter())?;
    let foreign = coexist::removals(&others, &network.bridge);
    let text = rules::delete_tables(&network.bridge) + &foreign;
    nft::apply(&text).await.map_err(at.filter())?;
    let others = !other_tables(network).await.map_err(at.filter())?.is_empty();
    sysctl::forwarding_back(&network.state_dir, others).map_err(at.system("net.ipv4.ip_forward"))?;
    remove_state(network).map_err(at.system("state files"))
}

/// Waits a moment for a daemon that is ending.
async fn daemon_gone(network: &NetworkConfig) -> Result<files::Lock, BridgeError> {
    let file = crate::daemon::lock_file(network);
    let lock = || files::Lock::try_acquire(&file).map_err(At(network).system("daemon lock"));
    let lock = given_up(lock).await?;
    lock.ok_or_else(|| BridgeError::DaemonRuns(network.bridge.clone(), file.display().to_string()))
}

/// The bridge, while it is taken down. A daemon that is killed lets go of its lock a moment before.
async fn claim(network: &NetworkConfig) -> Result<Claim, BridgeError> {
    let claim = given_up(|| Claim::take(network).map_err(At(network).system("claim"))).await?;
    claim.ok_or_else(|| {
        let folder = network.state_dir.display().to_string();
        BridgeError::OfAnother { bridge: network.bridge.clone(), folder }
    })
}

/// What a daemon that is ending gives up within [`DAEMON_ENDS`]; `None`: it keeps it.
async fn given_up<T>(take: impl Fn() -> Result<Option<T>, BridgeError>) -> Result<Option<T>, BridgeError> {
    let end = tokio::time::Instant::now() + DAEMON_ENDS;
    loop {
        let taken = take()?;
        if taken.is_some() || tokio::time::Instant::now() > end {
            return Ok(taken);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn remove_taps(network: &NetworkConfig, netlink: &Netlink, force: bool) -> Result<(), BridgeError> {
    let at = At(network);
    let links = netlink.links().await.map_err(at.system("listing interfaces"))?;
    let taps = links::taps_of(network, &links);
    if !taps.is_empty() && !force {
        let taps = taps.iter().map(|(tap, _)| tap.name.as_str()).collect::<Vec<_>>().join(", ");
        return Err(BridgeError::InUse { bridge: network.bridge.clone(), taps });
    }
    for (tap, _) in taps {
        netlink.delete(tap.index).await.map_err(at.system("removal of a tap"))?;
    }
    Ok(())
}

fn remove_state(network: &NetworkConfig) -> io::Result<()> {
    for file in [network.lease_file(), network.network_file(), network.control_socket.clone()] {
        match std::fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    // The lock file stays: a lock on an unlinked file guards nothing.
    files::sync_folder(&network.state_dir)
}

async fn refuse_overlap(network: &NetworkConfig, netlink: &Netlink) -> Result<(), BridgeError> {
    let at = At(network);
    let links = netlink.links().await.map_err(at.system("listing interfaces"))?;
    let own = links.iter().find(|link| link.name == network.bridge).map(|link| link.index);
    let addresses = netlink.addresses().await.map_err(at.system("listing addresses"))?;
    let (first, last) = (network.subnet.network(), network.subnet.broadcast());
    let overlaps = |net: &ipnet::Ipv4Net| net.network() <= last && first <= net.broadcast();
    match addresses.iter().find(|(index, net)| Some(*index) != own && overlaps(net)) {
        None => Ok(()),
        Some((_, net)) => {
            Err(BridgeError::Overlap { subnet: network.subnet.to_string(), address: net.to_string() })
        }
    }
}

/// The bridge, if there is one; something else of its name is an error.
async fn find_bridge(network: &NetworkConfig, netlink: &Netlink) -> Result<Option<Link>, BridgeError> {
    match netlink.link(&network.bridge).await.map_err(At(network).system("lookup"))? {
        Some(link) if !link.is_bridge => Err(BridgeError::NotABridge(network.bridge.clone())),
        found => Ok(found),
    }
}

async fn ensure_bridge(network: &NetworkConfig, netlink: &Netlink) -> Result<u32, BridgeError> {
    let at = At(network);
    let name = &network.bridge;
    let mut found = find_bridge(network, netlink).await?;
    if found.is_none() {
        netlink.add_bridge(name, bridge_mac(network.gateway)).await.map_err(at.system("creation"))?;
        found = find_bridge(network, netlink).await?;
    }
    // It was there a moment ago.
    let bridge = found.ok_or_else(|| BridgeError::NotABridge(name.clone()))?;
    if bridge.alias.as_deref() == Some(BRIDGE_ALIAS) {
        // Guests are IPv4 only; a kernel without IPv6 has no such switch.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
    }
    if !has_address(network, netlink, bridge.index).await? {
        let prefix = network.subnet.prefix_len();
        netlink.add_address(bridge.index, network.gateway, prefix).await.map_err(at.system("address"))?;
    }
    netlink.up(bridge.index).await.map_err(at.system("start"))?;
    Ok(bridge.index)
}

async fn list_tables(network: &NetworkConfig) -> Result<String, NftError> {
    let [host, taps] = rules::list_tables(&network.bridge);
    let (host, taps) = tokio::try_join!(nft::list(&host), nft::list(&taps))?;
    Ok(host + &taps)
}

/// The same on every host, so that a guest that wakes elsewhere finds its gateway where it was; and
/// fixed, so that it does not follow the ports as a bridge's own choice does.
fn bridge_mac(gateway: Ipv4Addr) -> Mac {
    let [a, b, c, d] = gateway.octets();
    Mac::new([0x02, 0xc0, a, b, c, d])
}

async fn has_address(network: &NetworkConfig, netlink: &Netlink, index: u32) -> Result<bool, BridgeError> {
    let addresses = netlink.addresses().await.map_err(At(network).system("listing addresses"))?;
    let (gateway, prefix) = (network.gateway, network.subnet.prefix_len());
    Ok(addresses.iter().any(|(at, net)| *at == index && net.addr() == gateway && net.prefix_len() == prefix))
}

/// Puts the filter in force and returns how it is listed when nobody touches it. That is not asked of the tables just
/// made: what somebody changed meanwhile would be taken for ours.
async fn apply_filter(
    network: &NetworkConfig,
    netlink: &Netlink,
    old_forward: &str,
) -> Result<String, BridgeError> {
    let at = At(network);
    let links = netlink.links().await.map_err(at.system("listing interfaces"))?;
    let mut taps: BTreeSet<TapRow> =
        links::taps_of(network, &links).into_iter().map(|(tap, mac)| (tap.name.clone(), mac)).collect();
    let addresses = address_rows(&leases::load(&network.lease_file())?.live(Timestamp::now()));
    let host = rules::host_table(network, &(note(old_forward) + &claim::mark(network)));
    let rules = format!("{host}{}", rules::tap_table(network, &BTreeSet::new(), &BTreeSet::new()));
    let text = format!("{host}{}", rules::tap_table(network, &taps, &addresses));
    let tables = rules::list_tables(&network.bridge);
    let (listing, applied) = tokio::join!(nft::list_made(&rules, &tables), nft::apply(&text));
    applied.map_err(at.filter())?;
    let listing = listing.map_err(at.filter())?;
    if !as_made(network, &listing).await {
        // Somebody has chains or sets of his own among ours, which go with the table. A row that comes in this moment
        // goes too; the alarm, which hears that, has it put back.
        taps.extend(links::list_rows(network).await.unwrap_or_default().taps());
        let anew =
            rules::delete_tap_table(&network.bridge) + &host + &rules::tap_table(network, &taps, &addresses);
        nft::apply(&anew).await.map_err(at.filter())?;
    }
    Ok(listing)
}

fn address_rows(leases: &BTreeMap<String, Lease>) -> BTreeSet<AddressRow> {
    leases.values().filter_map(|lease| Some((lease.mac.parse().ok()?, lease.ip))).collect()
}

async fn repair_taps(network: &NetworkConfig, netlink: &Netlink, bridge: u32) -> Result<(), BridgeError> {
    let links = netlink.links().await.map_err(At(network).system("listing interfaces"))?;
    for (tap, mac) in links::taps_of(network, &links) {
        match links::plug(netlink, network, tap.index, bridge, mac).await {
            Err(error) if !is_gone(&error) => return Err(At(network).system("wiring of a tap")(error)),
            _ => {}
        }
    }
    Ok(())
}

/// The tap went while we looked: its VM ended.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO))
}

const NOTE: &str = "cocoon, ip_forward was ";

fn note(old_forward: &str) -> String {
    let known = matches!(old_forward, "0" | "1");
    format!("{NOTE}{}", if known { old_forward } else { "0" })
}

/// Records what the switch was before any network of ours was on this host. Read before the others' notes: one that
/// turns it now has left its note already.
async fn remember_forwarding(network: &NetworkConfig) -> Result<Saved, BridgeError> {
    let at = At(network);
    let found = sysctl::forwarding().map_err(at.system("net.ipv4.ip_forward"))?;
    let found = inherited_forwarding(network).await.unwrap_or(found);
    sysctl::remember_forwarding(&network.state_dir, found).map_err(at.system("net.ipv4.ip_forward"))
}

/// What another network of ours on this host found when it turned forwarding on.
async fn inherited_forwarding(network: &NetworkConfig) -> Option<String> {
    for table in other_tables(network).await.ok()? {
        let listing = nft::list(&format!("list table inet {table}")).await.ok()?;
        if let Some((_, rest)) = listing.split_once(NOTE) {
            return rest.chars().next().map(String::from);
        }
    }
    None
}

/// The tables of our other networks in this namespace.
async fn other_tables(network: &NetworkConfig) -> Result<Vec<String>, NftError> {
    let own = table_name(&network.bridge);
    let tables = nft::list_json("list tables inet").await?;
    let names = tables.iter().filter_map(|object| object.pointer("/table/name")?.as_str());
    Ok(names.filter(|name| name.starts_with(TABLE_PREFIX) && *name != own).map(str::to_owned).collect())
}

/// Opens the tables of other firewalls for guests, where they would drop their packets. Best effort: the
/// other may be changing its own table at this moment; the next sweep looks again.
pub(crate) async fn coexist_with_others(network: &NetworkConfig) {
    let listing = match tables_of_others().await {
        // No such table is the ordinary case.
        Ok(listing) if listing.is_empty() => return,
        Ok(listing) => listing,
        Err(error) => {
            tracing::warn!(bridge = network.bridge, %error, "whether the host's own firewall blocks guests is not known");
            return;
        }
    };
    // One table may refuse (it has an owner, or is changed right now) without keeping back the others.
    for text in coexist::accepts(&listing, network, &bridges_of_others(network).await) {
        match nft::apply(&text).await {
            Ok(()) => tracing::info!(bridge = network.bridge, "the host's own firewall is opened for guests"),
            Err(error) => {
                tracing::warn!(bridge = network.bridge, %error, "the host's own firewall may block guests");
            }
        }
    }
}

/// The tables of other firewalls that may drop what we let pass, whole.
async fn tables_of_others() -> Result<Vec<Value>, NftError> {
    let chains = nft::list_json(coexist::LIST_CHAINS).await?;
    let mut listing = Vec::new();
    for command in coexist::list_tables(&chains) {
        match nft::list_json(&command).await {
            // Its owner took it away since.
            Err(NftError::NotThere(_)) => {}
            table => listing.extend(table?),
        }
    }
    Ok(listing)
}

/// The host's other bridges, without those that lead to the world: they are networks of containers and VMs.
async fn bridges_of_others(network: &NetworkConfig) -> Vec<String> {
    let Ok(netlink) = Netlink::open() else { return Vec::new() };
    let links = netlink.links().await.unwrap_or_default();
    // Of this thread's network namespace, as all that is done here.
    let routes = std::fs::read_to_string("/proc/thread-self/net/route").unwrap_or_default();
    let uplinks = coexist::uplinks(&routes);
    let others = links.into_iter().filter(|link| link.is_bridge && link.name != network.bridge);
    let mut names: Vec<String> = others
        .map(|link| link.name)
        // A name that cannot be put into a rule is not one that Docker gives.
        .filter(|name| !uplinks.contains(&name.as_str()) && names::check_bridge(name).is_ok())
        .collect();
    names.sort();
    names
}

/// Names the network in errors.
struct At<'a>(&'a NetworkConfig);

impl At<'_> {
    fn system(&self, step: &'static str) -> impl FnOnce(io::Error) -> BridgeError + use<> {
        let bridge = self.0.bridge.clone();
        move |source| BridgeError::System { step, bridge, source }
    }

    fn filter(&self) -> impl FnOnce(NftError) -> BridgeError + use<> {
        let bridge = self.0.bridge.clone();
        move |error| BridgeError::Filter { bridge, message: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_has_the_same_mac_on_every_host() {
        let mac = bridge_mac(Ipv4Addr::new(172, 20, 100, 1));
        assert_eq!(mac.to_string(), "02:c0:ac:14:64:01");
        assert!(mac.is_unicast());
    }

    #[test]
    fn a_strange_switch_value_never_reaches_nft_text() {
        assert_eq!(note("1\" }"), "cocoon, ip_forward was 0");
    }
}
