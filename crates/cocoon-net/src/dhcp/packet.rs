//! DHCPv4 packets: the requests that this server understands, and its replies.
//!
//! Entry points: [`Request::parse`], [`Reply`]. Invariants: no bytes make the parser panic; a reply is at
//! least 300 bytes long, as BOOTP clients expect, and its options are in ascending order.

use std::net::Ipv4Addr;

use dhcproto::{
    Decodable as _, Decoder, Encodable as _,
    v4::{DhcpOption, HType, Message, MessageType, Opcode, OptionCode},
};

use super::Settings;
use crate::names::Mac;

/// The shortest BOOTP message.
const MIN_REPLY: usize = 300;
const MAGIC_AT: usize = 236;
const MAGIC: [u8; 4] = [99, 130, 83, 99];
const PAD: u8 = 0;
const END: u8 = 255;
/// Codes and lengths of the options that are read: the address asked for, the kind of message, the server.
const KNOWN: [(u8, usize); 3] = [(50, 4), (53, 1), (54, 4)];

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any address.
    Discover,
    /// This address.
    Request,
    /// It needs its address no more.
    Release,
    /// The address that it got is in use.
    Decline,
    /// Anything else.
    Other,
}

/// The part of a request that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What the client wants.
    pub kind: Kind,
    /// The client: `chaddr` alone.
    pub mac: Mac,
    /// The address that it has (`ciaddr`).
    pub current: Option<Ipv4Addr>,
    /// The address that it asks for (option 50).
    pub requested: Option<Ipv4Addr>,
    /// The server that it speaks to (option 54).
    pub server: Option<Ipv4Addr>,
    xid: u32,
    flags: u16,
}

impl Request {
    /// Reads a packet. `None`: not a request of an Ethernet client, or it came through a relay.
    #[must_use]
    pub fn parse(packet: &[u8]) -> Option<Self> {
        if packet.get(MAGIC_AT..MAGIC_AT + 4)? != MAGIC {
            return None;
        }
        let message = Message::decode(&mut Decoder::new(&with_known_options(packet)?)).ok()?;
        // The length is checked before `chaddr()`, which trusts it.
        let ethernet = message.htype() == HType::Eth && message.hlen() == 6;
        if message.opcode() != Opcode::BootRequest || !ethernet || message.giaddr() != Ipv4Addr::UNSPECIFIED {
            return None;
        }
        let mac = Mac::new(message.chaddr().try_into().ok()?);
        mac.is_unicast().then_some(Self {
            kind: kind(message.opts().msg_type()?),
            mac,
            current: Some(message.ciaddr()).filter(|address| !address.is_unspecified()),
            requested: match message.opts().get(OptionCode::RequestedIpAddress) {
                Some(DhcpOption::RequestedIpAddress(address)) => Some(*address),
                _ => None,
            },
            server: match message.opts().get(OptionCode::ServerIdentifier) {
                Some(DhcpOption::ServerIdentifier(address)) => Some(*address),
                _ => None,
            },
            xid: message.xid(),
            flags: message.flags().into(),
        })
    }
}

/// The packet with the options alone that are read here, with the lengths that they must have. The decoder asserts
/// lengths of some others.
fn with_known_options(packet: &[u8]) -> Option<Vec<u8>> {
    let mut known = packet.get(..MAGIC_AT + 4)?.to_vec();
    let mut rest = packet.get(MAGIC_AT + 4..)?;
    while let [code, tail @ ..] = rest {
        match *code {
            PAD => rest = tail,
            END => break,
            code => {
                let length = usize::from(*tail.first()?);
                let option = rest.get(..length + 2)?;
                if KNOWN.contains(&(code, length)) {
                    known.extend_from_slice(option);
                }
                rest = rest.get(length + 2..)?;
            }
        }
    }
    known.push(END);
    Some(known)
}

const fn kind(message: MessageType) -> Kind {
    match message {
        MessageType::Discover => Kind::Discover,
        MessageType::Request => Kind::Request,
        MessageType::Release => Kind::Release,
        MessageType::Decline => Kind::Decline,
        _ => Kind::Other,
    }
}

/// A reply ready to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// The packet.
    pub bytes: Vec<u8>,
    /// Where to: the client's own address, or broadcast to a client without one.
    pub to: Ipv4Addr,
}

impl Reply {
    pub(super) fn offer(settings: &Settings, request: &Request, ip: Ipv4Addr) -> Self {
        Self::with_address(settings, request, ip, MessageType::Offer)
    }

    pub(super) fn acknowledge(settings: &Settings, request: &Request, ip: Ipv4Addr) -> Self {
        Self::with_address(settings, request, ip, MessageType::Ack)
    }

    pub(super) fn refuse(settings: &Settings, request: &Request) -> Self {
        let options =
            vec![DhcpOption::MessageType(MessageType::Nak), DhcpOption::ServerIdentifier(settings.gateway)];
        let bytes = encode(settings, request, Ipv4Addr::UNSPECIFIED, options);
        Self { bytes, to: Ipv4Addr::BROADCAST }
    }

    fn with_address(settings: &Settings, request: &Request, ip: Ipv4Addr, kind: MessageType) -> Self {
        let seconds = u32::try_from(settings.lease_time.as_secs()).unwrap_or(u32::MAX);
        let mut options = vec![
            DhcpOption::SubnetMask(settings.mask),
            DhcpOption::Router(vec![settings.gateway]),
            DhcpOption::AddressLeaseTime(seconds),
            DhcpOption::MessageType(kind),
            DhcpOption::ServerIdentifier(settings.gateway),
        ];
        if !settings.dns.is_empty() {
            options.push(DhcpOption::DomainNameServer(settings.dns.clone()));
        }
        let to = request.current.unwrap_or(Ipv4Addr::BROADCAST);
        Self { bytes: encode(settings, request, ip, options), to }
    }
}

fn encode(settings: &Settings, request: &Request, ip: Ipv4Addr, options: Vec<DhcpOption>) -> Vec<u8> {
    let none = Ipv4Addr::UNSPECIFIED;
    let mut message =
        Message::new_with_id(request.xid, none, ip, settings.gateway, none, &request.mac.bytes());
    message
        .set_opcode(Opcode::BootReply)
        .set_flags(request.flags.into())
        .set_opts(options.into_iter().collect());
    // Encoding fails only for names too long for their fields, and a reply has no names.
    let mut bytes = message.to_vec().unwrap_or_default();
    bytes.resize(bytes.len().max(MIN_REPLY), 0);
    bytes
}

#[cfg(test)]
pub(crate) fn request(kind: MessageType, mac: Mac, current: Ipv4Addr, options: Vec<DhcpOption>) -> Vec<u8> {
    let none = Ipv4Addr::UNSPECIFIED;
    let mut message = Message::new_with_id(7, current, none, none, none, &mac.bytes());
    message.set_opts(options.into_iter().chain([DhcpOption::MessageType(kind)]).collect());
    message.to_vec().unwrap()
}
