//! The narrow port to the kernel's interfaces: one netlink socket, opened in the network namespace of
//! the calling thread.
//!
//! Entry point: [`Netlink`]. Invariants: dropping it ends its task and closes its socket; a list is whole, and of one
//! moment: what is cut off or was changed while the kernel wrote it is never taken for all there is.

use std::{collections::BTreeSet, io, net::Ipv4Addr, time::Duration};

use futures::{StreamExt as _, TryStreamExt as _};
use ipnet::Ipv4Net;
use rtnetlink::{
    Error, Handle, LinkBridge, LinkBridgePort, LinkUnspec,
    packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
        link::{
            InfoBridgePort, InfoKind, InfoPortData, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, Prop,
        },
        neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState},
    },
};
use tokio::task::JoinHandle;

use crate::names::{BRIDGE_ALIAS, Mac, TAP_GROUP};

/// How often, and how long apart, a list is asked for that changes while it is read.
const LOOKS: u32 = 50;
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// An interface, as far as this crate looks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) alias: Option<String>,
    pub(crate) alternatives: Vec<String>,
    pub(crate) controller: Option<u32>,
    pub(crate) up: bool,
    pub(crate) mtu: u32,
    pub(crate) is_bridge: bool,
    /// How it behaves as a port of a bridge, as far as the kernel says.
    pub(crate) port: PortFlags,
}

/// Switches of a bridge's port. `None`: the kernel does not know it, or it is no port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PortFlags {
    isolated: Option<bool>,
    learning: Option<bool>,
    flood: Option<bool>,
    locked: Option<bool>,
}

impl PortFlags {
    /// Whether they are as [`Netlink::plug`] sets them.
    pub(crate) fn fit(self, isolated: bool) -> bool {
        self.isolated.is_none_or(|set| set == isolated)
            && self.learning != Some(true)
            && self.flood != Some(true)
            && self.locked != Some(false)
    }
}

/// How a tap behaves as a port of the bridge.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Port {
    pub(crate) bridge: u32,
    pub(crate) isolated: bool,
    pub(crate) mac: Mac,
}

/// A netlink socket and the task that serves it.
#[derive(Debug)]
pub(crate) struct Netlink {
    handle: Handle,
    task: JoinHandle<()>,
}

impl Drop for Netlink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Netlink {
    pub(crate) fn open() -> io::Result<Self> {
        let (mut connection, handle, _) = rtnetlink::new_connection()?;
        // Else an answer that was cut off looks like a whole one.
        connection.set_forward_done(true);
        Ok(Self { handle, task: tokio::spawn(connection) })
    }

    pub(crate) async fn links(&self) -> io::Result<Vec<Link>> {
        let messages = self.list(&RouteNetlinkMessage::GetLink(LinkMessage::default())).await?;
        Ok(messages
            .iter()
            .filter_map(|message| match message {
                RouteNetlinkMessage::NewLink(message) => Some(link(message)),
                _ => None,
            })
            .collect())
    }

    /// The answer to a question for a list.
    async fn list(&self, question: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..LOOKS {
            let mut message = NetlinkMessage::from(question.clone());
            message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
            let answers = self.handle.clone().request(message).map_err(system)?;
            if let Some(list) = whole(answers.collect().await)? {
                return Ok(list);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Err(io::Error::other("the list changed whenever it was read; try again when fewer VMs come and go"))
    }

    pub(crate) async fn link(&self, name: &str) -> io::Result<Option<Link>> {
        match self.handle.link().get().match_name(name).execute().try_next().await.map_err(system) {
            Ok(found) => Ok(found.as_ref().map(link)),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A bridge that learns nothing from link-local frames and does not snoop multicast.
    pub(crate) async fn add_bridge(&self, name: &str, mac: Mac) -> io::Result<()> {
        let message = LinkBridge::new(name)
            .address(mac.bytes().to_vec())
            .no_linklocal_learn(true)
            .mcast_snooping(false)
            .build();
        self.handle.link().add(message).execute().await.map_err(system)?;
        // The alias is not taken on creation by every kernel.
        let message = LinkUnspec::new_with_name(name).alias(BRIDGE_ALIAS).build();
        self.handle.link().set(message).execute().await.map_err(system)
    }

    pub(crate) async fn delete(&self, index: u32) -> io::Result<()> {
        match self.handle.link().del(index).execute().await.map_err(system) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            result => result,
        }
    }

    pub(crate) async fn up(&self, index: u32) -> io::Result<()> {
        self.handle.link().set(LinkUnspec::new_with_index(index).up().build()).execute().await.map_err(system)
    }

    pub(crate) async fn down(&self, index: u32) -> io::Result<()> {
        self.handle
            .link()
            .set(LinkUnspec::new_with_index(index).down().build())
            .execute()
            .await
            .map_err(system)
    }

    /// Marks a new tap as ours (alias, alternative name, group) and gives it the MTU of its bridge.
    pub(crate) async fn label(&self, index: u32, alias: &str, alternative: &str, mtu: u32) -> io::Result<()> {
        let links = self.handle.link();
        let message = LinkUnspec::new_with_index(index)
            .alias(alias)
            .mtu(mtu)
            .append_extra_attribute(LinkAttribute::Group(TAP_GROUP))
            .build();
        links.set(message).execute().await.map_err(system)?;
        links.property_add(index).alt_ifname(&[alternative]).execute().await.map_err(system)
    }

    /// Makes a filtered tap a port of the bridge. The bridge learns no address from it: the one MAC that
    /// may use it is entered by hand, so a guest cannot draw another's frames to itself. The port is locked,
    /// so the bridge drops frames of any other source by itself, also while there is no packet filter (a
    /// kernel before 5.16 takes no notice of that).
    pub(crate) async fn plug(&self, index: u32, port: Port) -> io::Result<()> {
        let links = self.handle.link();
        let message = LinkUnspec::new_with_index(index)
            .append_extra_attribute(LinkAttribute::Group(TAP_GROUP))
            .controller(port.bridge)
            .build();
        links.set(message).execute().await.map_err(system)?;
        let message = LinkBridgePort::new(index)
            .isolated(port.isolated)
            .learning(false)
            .flood(false)
            .locked(true)
            .build();
        links.set_port(message).execute().await.map_err(system)?;
        self.handle
            .neighbours()
            .add_bridge(index, &port.mac.bytes())
            .state(NeighbourState::Noarp)
            .flags(NeighbourFlags::Controller)
            .replace()
            .execute()
            .await
            .map_err(system)?;
        self.up(index).await
    }

    /// The ports, by index, and the MACs that bridges of this namespace reach by them.
    pub(crate) async fn reached(&self) -> io::Result<BTreeSet<(u32, Mac)>> {
        let mut question = NeighbourMessage::default();
        question.header.family = AddressFamily::Bridge;
        let messages = self.list(&RouteNetlinkMessage::GetNeighbour(question)).await?;
        Ok(messages
            .iter()
            .filter_map(|message| match message {
                RouteNetlinkMessage::NewNeighbour(message) => reached(message),
                _ => None,
            })
            .collect())
    }

    pub(crate) async fn add_address(&self, index: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        self.handle.address().add(index, address.into(), prefix).replace().execute().await.map_err(system)
    }

    /// Every IPv4 address of this namespace with its interface.
    pub(crate) async fn addresses(&self) -> io::Result<Vec<(u32, Ipv4Net)>> {
        let messages = self.list(&RouteNetlinkMessage::GetAddress(AddressMessage::default())).await?;
        Ok(messages
            .iter()
            .filter_map(|message| match message {
                RouteNetlinkMessage::NewAddress(message) => address(message),
                _ => None,
            })
            .collect())
    }
}

/// What a list holds; `None` if it changed, or the socket lost some of it, while it was read.
fn whole(answers: Vec<NetlinkMessage<RouteNetlinkMessage>>) -> io::Result<Option<Vec<RouteNetlinkMessage>>> {
    let (mut found, mut changed) = (Vec::new(), false);
    for answer in answers {
        changed |= answer.header.flags & NLM_F_DUMP_INTR != 0;
        match answer.payload {
            NetlinkPayload::InnerMessage(message) => found.push(message),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            NetlinkPayload::Done(done) if done.code < 0 => {
                return Err(io::Error::from_raw_os_error(done.code.saturating_neg()));
            }
            NetlinkPayload::Done(_) => return Ok((!changed).then_some(found)),
            NetlinkPayload::Overrun(_) => return Ok(None),
            _ => {}
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the kernel's answer was cut off"))
}

fn reached(message: &NeighbourMessage) -> Option<(u32, Mac)> {
    message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => {
            Some((message.header.ifindex, Mac::new(bytes.as_slice().try_into().ok()?)))
        }
        _ => None,
    })
}

fn address(message: &AddressMessage) -> Option<(u32, Ipv4Net)> {
    message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(std::net::IpAddr::V4(address)) => {
            let net = Ipv4Net::new(*address, message.header.prefix_len).ok()?;
            Some((message.header.index, net))
        }
        _ => None,
    })
}

fn link(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        up: message.header.flags.contains(LinkFlags::Up),
        ..Link::default()
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias.clone()),
            LinkAttribute::Controller(index) => link.controller = Some(*index).filter(|index| *index != 0),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::PropList(list) => {
                link.alternatives.extend(list.iter().filter_map(|prop| match prop {
                    Prop::AltIfName(name) => Some(name.clone()),
                    _ => None,
                }))
            }
            LinkAttribute::LinkInfo(infos) => {
                link.is_bridge = infos.iter().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Bridge)));
                link.port = port_flags(infos);
            }
            _ => {}
        }
    }
    link
}

fn port_flags(infos: &[LinkInfo]) -> PortFlags {
    let mut flags = PortFlags::default();
    let ports = infos.iter().filter_map(|info| match info {
        LinkInfo::PortData(InfoPortData::BridgePort(port)) => Some(port),
        _ => None,
    });
    for attribute in ports.flatten() {
        match *attribute {
            InfoBridgePort::Isolated(set) => flags.isolated = Some(set),
            InfoBridgePort::Learning(set) => flags.learning = Some(set),
            InfoBridgePort::UnicastFlood(set) => flags.flood = Some(set),
            InfoBridgePort::Locked(set) => flags.locked = Some(set),
            _ => {}
        }
    }
    flags
}

/// The kernel's error number where there is one.
fn system(error: Error) -> io::Error {
    match error {
        Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::{DoneMessage, NetlinkHeader};

    use super::*;

    fn answer(
        flags: u16,
        payload: NetlinkPayload<RouteNetlinkMessage>,
    ) -> NetlinkMessage<RouteNetlinkMessage> {
        let mut message = NetlinkMessage::new(NetlinkHeader::default(), payload);
        message.header.flags = flags;
        message
    }

    #[test]
    fn only_a_list_that_ends_and_did_not_change_is_taken_for_whole() {
        let link = |flags| {
            let message = RouteNetlinkMessage::NewLink(LinkMessage::default());
            answer(flags, NetlinkPayload::InnerMessage(message))
        };
        let done = |flags, code| {
            let mut done = DoneMessage::default();
            done.code = code;
            answer(flags, NetlinkPayload::Done(done))
        };
        let overrun = || answer(0, NetlinkPayload::Overrun(Vec::new()));
        let intr = NLM_F_DUMP_INTR;
        for (sentence, answers, links) in [
            ("whole", vec![link(0), link(0), done(0, 0)], Ok(Some(2))),
            ("none", vec![done(0, 0)], Ok(Some(0))),
            ("changed early", vec![link(intr), link(0), done(0, 0)], Ok(None)),
            ("changed at the end", vec![link(0), done(intr, 0)], Ok(None)),
            ("lost", vec![link(0), overrun()], Ok(None)),
            ("given up", vec![link(0), done(0, -libc::ENOMEM)], Err(Some(libc::ENOMEM))),
            ("cut off", vec![link(0)], Err(None)),
            ("no answer", Vec::new(), Err(None)),
        ] {
            let found = whole(answers).map(|list| list.map(|list| list.len()));
            assert_eq!(found.map_err(|error| error.raw_os_error()), links, "{sentence}");
        }
    }
}
