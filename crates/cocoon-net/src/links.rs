//! Taps: one for each NIC of a VM, on the bridge, filtered.
//!
//! A tap is not persistent: it goes with the last descriptor, so a dead hypervisor leaves no interface.
//! Its filter rows are removed by [`detach`] and, for what a crash left, by [`collect`].
//!
//! Entry points: [`attach`], [`detach`], [`collect`]. Invariants: the filter of a tap is in force before
//! the tap is a port of the bridge; only interfaces of this network with an alias `cocoon:<vm id>` are
//! ever removed; one MAC is on at most one tap of a network (the kernel refuses the second).

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::Duration,
};

use thiserror::Error;

use crate::{
    claim,
    config::NetworkConfig,
    names::{self, Mac},
    netlink::{Link, Netlink, Port},
    nft::{self, NftError},
    rules::{self, Rows, TapRow},
    sys,
};

/// How often, and how long apart, a name is tried that a dying hypervisor still holds.
const NAME_TRIES: u32 = 20;
const NAME_PAUSE: Duration = Duration::from_millis(50);

const TAKEN: &str =
    "creation (the name is taken, as by the same VM of a copied data folder; end that one first)";

/// Why a tap could not be made or removed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The bridge is not there: the network was never set up, or was taken down.
    #[error("bridge {0} does not exist; start the network with `cocoon net daemon`")]
    NoBridge(String),
    /// The daemon of another state folder serves this bridge.
    #[error(
        "bridge {bridge} is served by the network daemon of another state folder than {folder}, as of the data folder \
         that this one is a copy of; end that daemon first, or use this folder in another network namespace"
    )]
    OfAnother {
        /// The bridge.
        bridge: String,
        /// Whose it is not.
        folder: String,
    },
    /// A name, id or MAC that cannot be used.
    #[error("tap of VM {vm}: {message}")]
    Value {
        /// Whose tap.
        vm: String,
        /// What is wrong with which value.
        message: String,
    },
    /// Another tap of this network has this MAC.
    #[error("tap {interface}: MAC {mac} is already in use on bridge {bridge}; give each NIC its own")]
    MacTaken {
        /// The tap that was to be made.
        interface: String,
        /// The MAC asked for.
        mac: String,
        /// The network.
        bridge: String,
    },
    /// The kernel refused.
    #[error("{step} for interface {interface}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// On which interface.
        interface: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The packet filter refused.
    #[error("packet filter rules for interface {interface}: {message}")]
    Filter {
        /// On which interface.
        interface: String,
        /// What `nft` said.
        message: String,
    },
}

/// An open tap: hand `fd` to the hypervisor.
#[derive(Debug)]
pub struct Tap {
    /// Interface name, at most 15 bytes: `bt<first 8 of the VM id, lower case>-<index>`.
    pub name: String,
    /// The tap's descriptor (`IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`), close-on-exec.
    pub fd: OwnedFd,
}

/// Makes the tap of NIC `index`, with alias `cocoon:<vm id>`, enslaved, isolated, up, and filtered to `mac`.
/// Dropping the result removes the interface.
pub async fn attach(network: &NetworkConfig, vm_id: &str, index: usize, mac: &str) -> Result<Tap, LinkError> {
    let value = |message: String| LinkError::Value { vm: vm_id.to_owned(), message };
    names::check_bridge(&network.bridge).map_err(value)?;
    let name = names::tap_name(vm_id, index).map_err(value)?;
    let mac: Mac = mac.parse().map_err(|error: names::NotAMac| value(error.to_string()))?;
    if !mac.is_unicast() {
        return Err(value(format!("MAC {mac} cannot be an interface's own address")));
    }
    let netlink = open(&name)?;
    let bridge = find_bridge(&netlink, network).await?;
    let (fd, rows, strangers) =
        tokio::join!(open_tap(&name), list_rows(network), is_strangers(network, &name));
    if strangers? {
        let folder = network.state_dir.display().to_string();
        return Err(LinkError::OfAnother { bridge: network.bridge.clone(), folder });
    }
    let made = New { network, netlink: &netlink, vm_id, name: &name, mac };
    let (fd, rows) = (fd?, rows.map(Rows::taps).map_err(|error| filter(&name, &error))?);
    match made.finish(&bridge, &rows).await {
        Ok(()) => Ok(Tap { name, fd }),
        Err(error) => {
            drop(fd);
            if let Err(error) = nft::apply(&rules::delete_tap(&network.bridge, &name, mac)).await {
                tracing::warn!(tap = name, %error, "filter rows of a tap that failed are left to gc");
            }
            Err(error)
        }
    }
}

/// Removes what is left of the VM's taps and all their filter rows. Nothing there is success, and on the bridge of
/// another state folder's daemon nothing is ours.
pub async fn detach(network: &NetworkConfig, vm_id: &str) -> Result<(), LinkError> {
    let value = |message: String| LinkError::Value { vm: vm_id.to_owned(), message };
    names::check_bridge(&network.bridge).map_err(value)?;
    let prefix = names::tap_prefix(vm_id).map_err(value)?;
    if is_strangers(network, &prefix).await? {
        return Ok(());
    }
    let alias = names::tap_alias(vm_id);
    let netlink = open(&prefix)?;
    let links = netlink.links().await.map_err(kernel("listing interfaces", &prefix))?;
    // By its network too: a copied data folder has the same ids, on another bridge as well.
    let own = |link: &Link| link.alias.as_deref() == Some(&alias) && mac_of(network, link).is_some();
    for link in links.iter().filter(|link| own(link) && link.name.starts_with(&prefix)) {
        netlink.delete(link.index).await.map_err(kernel("removal", &link.name))?;
    }
    // Another VM whose id begins alike may own rows under the same prefix: those taps still exist. Rows come first, as
    // in `collect`.
    let rows = rows_or_none(network, &prefix).await?;
    let links = netlink.links().await.map_err(kernel("listing interfaces", &prefix))?;
    let gone = rows.into_iter().filter(|(tap, _)| tap.starts_with(&prefix) && !exists(&links, tap));
    remove_rows(network, &netlink, gone.collect()).await
}

/// Removes interfaces and rows of ours whose VM is not in `live` (VM ids); as in [`detach`], nothing is ours on another's
/// bridge.
pub async fn collect(network: &NetworkConfig, live: &BTreeSet<String>) -> Result<(), LinkError> {
    let value = |message: String| LinkError::Value { vm: "(all)".to_owned(), message };
    names::check_bridge(&network.bridge).map_err(value)?;
    let bridge = &network.bridge;
    if is_strangers(network, bridge).await? {
        return Ok(());
    }
    // Rows first: the tap of a row that is seen here existed before it, so if it is not among the
    // interfaces listed later, it is gone for good.
    let rows = rows_or_none(network, bridge).await?;
    let netlink = open(bridge)?;
    let links = netlink.links().await.map_err(kernel("listing interfaces", bridge))?;
    let mut removed = BTreeSet::new();
    for link in links.iter().filter(|link| is_orphan(network, link, live)) {
        netlink.delete(link.index).await.map_err(kernel("removal", &link.name))?;
        removed.insert(link.name.as_str());
    }
    let gone = rows.into_iter().filter(|(tap, _)| removed.contains(tap.as_str()) || !exists(&links, tap));
    remove_rows(network, &netlink, gone.collect()).await
}

/// The taps of this network that exist now, read from the kernel.
pub(crate) fn taps_of<'a>(network: &NetworkConfig, links: &'a [Link]) -> Vec<(&'a Link, Mac)> {
    links.iter().filter_map(|link| Some((link, mac_of(network, link)?))).collect()
}

/// Wires a tap of ours to the bridge; repeating it repairs it.
pub(crate) async fn plug(
    netlink: &Netlink,
    network: &NetworkConfig,
    tap: u32,
    bridge: u32,
    mac: Mac,
) -> io::Result<()> {
    netlink.plug(tap, Port { bridge, isolated: !network.vm_to_vm, mac }).await
}

/// Sets every tap of this network down: without a filter in force no guest is to reach anything. [`plug`] sets
/// them up again.
pub(crate) async fn cut_off(network: &NetworkConfig) -> Result<usize, LinkError> {
    let netlink = open(&network.bridge)?;
    let links = netlink.links().await.map_err(kernel("listing interfaces", &network.bridge))?;
    let taps = taps_of(network, &links);
    for (tap, _) in &taps {
        match netlink.down(tap.index).await {
            // It went with its VM.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
            result => result.map_err(kernel("setting down", &tap.name))?,
        }
    }
    Ok(taps.len())
}

/// Removes rows whose tap is gone or has another MAC. Rows are listed before interfaces, so a tap being made is safe.
pub(crate) async fn drop_stale_rows(network: &NetworkConfig, netlink: &Netlink) -> Result<(), LinkError> {
    let rows = rows_or_none(network, &network.bridge).await?;
    let links = netlink.links().await.map_err(kernel("listing interfaces", &network.bridge))?;
    let stale = rows.into_iter().filter(|row| is_stale(network, &links, row));
    remove_rows(network, netlink, stale.collect()).await
}

struct New<'a> {
    network: &'a NetworkConfig,
    netlink: &'a Netlink,
    vm_id: &'a str,
    name: &'a str,
    mac: Mac,
}

impl New<'_> {
    async fn finish(&self, bridge: &Link, rows: &BTreeSet<TapRow>) -> Result<(), LinkError> {
        let Self { network, name, mac, .. } = *self;
        let index = rustix::net::netdevice::name_to_index(self.probe()?.as_fd(), name)
            .map_err(|error| kernel("lookup", name)(error.into()))?;
        self.label(index, bridge.mtu).await?;
        // A row that a crash left behind must not let an older MAC out.
        let stale = rows.iter().filter(|(tap, old)| tap == name && *old != mac);
        let mut text: String =
            stale.map(|(tap, old)| rules::delete_tap(&network.bridge, tap, *old)).collect();
        text.push_str(&rules::add_tap(&network.bridge, name, mac));
        nft::apply(&text).await.map_err(|error| filter(name, &error))?;
        // Taps carry no IPv6; a kernel without it has no such switch.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
        // The filter knows no ARP outside of a bridge: a tap that lost its bridge is not answered. With a
        // bridge this switch means nothing, so a kernel that refuses it is no reason to fail.
        let _ = std::fs::write(format!("/proc/sys/net/ipv4/conf/{name}/arp_ignore"), "8");
        plug(self.netlink, network, index, bridge.index, mac).await.map_err(kernel("wiring", name))
    }

    async fn label(&self, index: u32, mtu: u32) -> Result<(), LinkError> {
        let alternative = names::alternative_name(&self.network.bridge, self.mac);
        match self.netlink.label(index, &names::tap_alias(self.vm_id), &alternative, mtu).await {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Err(LinkError::MacTaken {
                interface: self.name.to_owned(),
                mac: self.mac.to_string(),
                bridge: self.network.bridge.clone(),
            }),
            result => result.map_err(kernel("labelling", self.name)),
        }
    }

    fn probe(&self) -> Result<OwnedFd, LinkError> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
        socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| kernel("opening a socket", self.name)(error.into()))
    }
}

async fn open_tap(name: &str) -> Result<OwnedFd, LinkError> {
    let mut tries = 0;
    loop {
        match sys::open_tap(name, true) {
            Err(error) if tries < NAME_TRIES && error.raw_os_error() == Some(libc::EBUSY) => {
                tries += 1;
                tokio::time::sleep(NAME_PAUSE).await;
            }
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(kernel(TAKEN, name)(error));
            }
            result => return result.map_err(kernel("creation", name)),
        }
    }
}

async fn is_strangers(network: &NetworkConfig, interface: &str) -> Result<bool, LinkError> {
    claim::is_strangers(network).await.map_err(|error| filter(interface, &error))
}

async fn find_bridge(netlink: &Netlink, network: &NetworkConfig) -> Result<Link, LinkError> {
    let found = netlink.link(&network.bridge).await.map_err(kernel("lookup", &network.bridge))?;
    found.filter(|link| link.is_bridge).ok_or_else(|| LinkError::NoBridge(network.bridge.clone()))
}

/// The rows of the filter that is in force.
pub(crate) async fn list_rows(network: &NetworkConfig) -> Result<Rows, NftError> {
    Ok(Rows::parse(&nft::list_json(&Rows::list(&network.bridge)).await?))
}

/// The taps of [`list_rows`]; a table that is not there has none.
async fn rows_or_none(network: &NetworkConfig, interface: &str) -> Result<BTreeSet<TapRow>, LinkError> {
    match list_rows(network).await {
        Err(NftError::NotThere(_)) => Ok(BTreeSet::new()),
        rows => rows.map(Rows::taps).map_err(|error| filter(interface, &error)),
    }
}

/// Removes rows, and puts back those of taps that came meanwhile: a VM that starts again has the name and the rows that
/// its death left.
async fn remove_rows(
    network: &NetworkConfig,
    netlink: &Netlink,
    rows: BTreeSet<TapRow>,
) -> Result<(), LinkError> {
    let bridge = &network.bridge;
    let apply = async |text: String| match text.is_empty() {
        true => Ok(()),
        false => nft::apply(&text).await.map_err(|error| filter(bridge, &error)),
    };
    if rows.is_empty() {
        return Ok(());
    }
    apply(rows.iter().map(|(tap, mac)| rules::delete_tap(bridge, tap, *mac)).collect()).await?;
    let links = netlink.links().await.map_err(kernel("listing interfaces", bridge))?;
    let back = taps_of(network, &links).into_iter().map(|(tap, mac)| (tap.name.clone(), mac));
    let back = back.filter(|row| rows.contains(row));
    apply(back.map(|(tap, mac)| rules::add_tap(bridge, &tap, mac)).collect()).await
}

fn is_orphan(network: &NetworkConfig, link: &Link, live: &BTreeSet<String>) -> bool {
    let vm = link.alias.as_deref().and_then(names::vm_of_alias);
    mac_of(network, link).is_some() && vm.is_some_and(|vm| !live.contains(vm))
}

fn mac_of(network: &NetworkConfig, link: &Link) -> Option<Mac> {
    link.alias.as_deref().and_then(names::vm_of_alias)?;
    link.alternatives.iter().find_map(|name| names::mac_of_alternative(&network.bridge, name))
}

/// Whether a row lets nobody of ours through. Of an interface that is not named as ours yet, the row stays.
pub(crate) fn is_stale(network: &NetworkConfig, links: &[Link], (tap, mac): &TapRow) -> bool {
    match links.iter().find(|link| link.name == *tap) {
        None => true,
        Some(link) => mac_of(network, link).is_some_and(|own| own != *mac),
    }
}

fn exists(links: &[Link], name: &str) -> bool {
    links.iter().any(|link| link.name == name)
}

fn open(interface: &str) -> Result<Netlink, LinkError> {
    Netlink::open().map_err(kernel("opening netlink", interface))
}

fn kernel(step: &'static str, interface: &str) -> impl FnOnce(io::Error) -> LinkError {
    let interface = interface.to_owned();
    move |source| LinkError::Kernel { step, interface, source }
}

fn filter(interface: &str, error: &NftError) -> LinkError {
    LinkError::Filter { interface: interface.to_owned(), message: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::network;

    fn tap(alias: &str, alternative: &str) -> Link {
        Link { alias: Some(alias.to_owned()), alternatives: vec![alternative.to_owned()], ..Link::default() }
    }

    #[test]
    fn only_taps_of_this_network_whose_vm_is_gone_are_orphans() {
        let network = network(std::path::Path::new("/nowhere"));
        let live = BTreeSet::from(["LIVE".to_owned()]);
        let orphan = |alias, alternative| is_orphan(&network, &tap(alias, alternative), &live);
        assert!(orphan("cocoon:GONE", "cocoon0_525400abcd01"));
        assert!(!orphan("cocoon:LIVE", "cocoon0_525400abcd01"));
        assert!(!orphan("cocoon:GONE", "cocoon1_525400abcd01"), "another network's tap");
        assert!(!orphan("cocoon:bridge", "cocoon0_525400abcd01"));
        assert!(!orphan("vm GONE", "cocoon0_525400abcd01"), "somebody else's interface");
        assert!(!orphan("cocoon:GONE", "eth7"));
    }
}
