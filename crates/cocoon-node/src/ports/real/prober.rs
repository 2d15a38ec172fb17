//! Asks a guest whether it is reachable: a TCP connect, or an ICMP echo whose reply is checked. A request that is
//! lost, because the guest's link is just coming up, is sent again within the same probe.

use std::{
    io,
    net::{Ipv4Addr, SocketAddrV4},
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpStream, UdpSocket};

use crate::ports::Prober;

/// Between two requests of one echo.
const SEND_AGAIN: Duration = Duration::from_millis(250);

/// Probes over the host's network.
#[derive(Debug, Default)]
pub struct NetProber {
    sequence: AtomicU16,
}

#[async_trait]
impl Prober for NetProber {
    async fn probe(&self, ip: Ipv4Addr, port: Option<u16>, limit: Duration) -> Result<(), String> {
        let what =
            port.map_or_else(|| format!("ICMP echo to {ip}"), |port| format!("TCP connect to {ip}:{port}"));
        let outcome = match port {
            Some(port) => tokio::time::timeout(limit, connect(ip, port)).await,
            None => tokio::time::timeout(limit, self.echo(ip)).await,
        };
        match outcome {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("{what}: {error}")),
            Err(_) => Err(format!("{what}: no answer within {} s", limit.as_secs())),
        }
    }

    fn is_own(&self, ip: Ipv4Addr) -> bool {
        is_own(ip)
    }
}

/// Whether the kernel takes packets to this address in itself. Only to such an address can a socket be bound; where
/// an administrator lifted that rule, only to such an address a packet goes from that address itself (an address
/// beside the first one of its interface is not recognised then). Nothing is sent.
fn is_own(ip: Ipv4Addr) -> bool {
    const LIFTED: &str = "/proc/sys/net/ipv4/ip_nonlocal_bind";
    let bound = std::net::UdpSocket::bind((ip, 0));
    let lifted = || std::fs::read_to_string(LIFTED).is_ok_and(|value| value.trim() != "0");
    bound.is_ok_and(|socket| {
        !lifted()
            || std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
                .and_then(|free| free.connect((ip, 9)).and_then(|()| free.local_addr()))
                .is_ok_and(|from| Some(from.ip()) == socket.local_addr().ok().map(|bound| bound.ip()))
    })
}

async fn connect(ip: Ipv4Addr, port: u16) -> io::Result<()> {
    TcpStream::connect(SocketAddrV4::new(ip, port)).await.map(drop)
}

impl NetProber {
    async fn echo(&self, ip: Ipv4Addr) -> io::Result<()> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let mut nonce = [0_u8; 16];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
        let (socket, raw) = open()?;
        answered(&socket, raw, SocketAddrV4::new(ip, 0), sequence, &nonce).await
    }
}

/// One request, sent again and again until it is answered; every packet that is not its exact reply is passed over.
async fn answered(
    socket: &UdpSocket,
    raw: bool,
    to: SocketAddrV4,
    sequence: u16,
    nonce: &[u8; 16],
) -> io::Result<()> {
    let request = request(sequence, nonce);
    let mut again = tokio::time::interval(SEND_AGAIN);
    let mut buffer = [0_u8; 256];
    loop {
        tokio::select! {
            _ = again.tick() => drop(socket.send_to(&request, to).await?),
            received = socket.recv_from(&mut buffer) => {
                let (length, from) = received?;
                let of_guest = from.ip() == *to.ip();
                if of_guest && is_reply(&buffer[..length], raw, sequence, nonce) {
                    return Ok(());
                }
            }
        }
    }
}

/// A socket for ICMP; true when packets come with their IP header.
fn open() -> io::Result<(UdpSocket, bool)> {
    let raw = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::ICMPV4));
    let (socket, raw) = match raw {
        Ok(socket) => (socket, true),
        Err(_) => (Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::ICMPV4))?, false),
    };
    socket.set_nonblocking(true)?;
    // The kernel's send and receive calls are the same for all datagram sockets.
    Ok((UdpSocket::from_std(socket.into())?, raw))
}

const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;

fn request(sequence: u16, nonce: &[u8; 16]) -> [u8; 24] {
    let mut packet = [0_u8; 24];
    packet[0] = ECHO_REQUEST;
    packet[4..6].copy_from_slice(&nonce[..2]);
    packet[6..8].copy_from_slice(&sequence.to_be_bytes());
    packet[8..].copy_from_slice(nonce);
    let sum = checksum(&packet);
    packet[2..4].copy_from_slice(&sum.to_be_bytes());
    packet
}

fn checksum(packet: &[u8]) -> u16 {
    let words =
        packet.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(u16::MAX)
}

/// The reply to our request: right type, sequence and nonce. The identifier is left out, because the
/// kernel rewrites it on unprivileged sockets; the nonce is the proof.
fn is_reply(packet: &[u8], raw: bool, sequence: u16, nonce: &[u8; 16]) -> bool {
    let header = if raw { packet.first().map_or(0, |first| usize::from(first & 0x0f) * 4) } else { 0 };
    let Some(icmp) = packet.get(header..).filter(|icmp| icmp.len() >= 24) else { return false };
    icmp[0] == ECHO_REPLY && icmp[1] == 0 && icmp[6..8] == sequence.to_be_bytes() && icmp[8..24] == *nonce
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[tokio::test]
    async fn a_listening_port_is_reachable_and_a_closed_one_is_not() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let prober = NetProber::default();
        // Long enough for a machine that stands still for a while; neither answer waits for it.
        let (ip, limit) = (Ipv4Addr::LOCALHOST, Duration::from_secs(120));
        prober.probe(ip, Some(port), limit).await.unwrap();
        // Bound and deaf: refused, and nobody else's meanwhile.
        let deaf = tokio::net::TcpSocket::new_v4().unwrap();
        deaf.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let closed = deaf.local_addr().unwrap().port();
        let why = prober.probe(ip, Some(closed), limit).await.unwrap_err();
        assert!(why.starts_with("TCP connect to 127.0.0.1:"), "{why}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_lost_is_sent_again() {
        let (prober, guest) = (UdpSocket::bind("127.0.0.1:0").await, UdpSocket::bind("127.0.0.1:0").await);
        let (prober, guest) = (prober.unwrap(), guest.unwrap());
        let std::net::SocketAddr::V4(to) = guest.local_addr().unwrap() else { panic!("bound to IPv4") };
        let nonce = [7; 16];
        let deaf_at_first = async {
            let mut packet = [0; 24];
            guest.recv_from(&mut packet).await.unwrap();
            let (_, from) = guest.recv_from(&mut packet).await.unwrap();
            packet[0] = ECHO_REPLY;
            guest.send_to(&packet, from).await.unwrap();
        };
        let (answered, ()) = tokio::join!(answered(&prober, false, to, 3, &nonce), deaf_at_first);
        answered.unwrap();
    }

    #[test]
    fn an_address_of_this_host_is_its_own_and_one_that_nobody_has_is_not() {
        let prober = NetProber::default();
        for (ip, own) in [([127, 0, 0, 1], true), ([127, 9, 9, 9], true), ([192, 0, 2, 1], false)] {
            assert_eq!(prober.is_own(ip.into()), own, "{ip:?}");
        }
    }

    #[test]
    fn only_the_exact_reply_counts() {
        let nonce = [7; 16];
        let mut packet = request(3, &nonce);
        assert_eq!(checksum(&packet), 0, "a packet with its checksum sums to nothing");
        assert!(!is_reply(&packet, false, 3, &nonce), "our own request is not a reply");
        packet[0] = ECHO_REPLY;
        assert!(is_reply(&packet, false, 3, &nonce));
        assert!(!is_reply(&packet, false, 4, &nonce) && !is_reply(&packet, false, 3, &[8; 16]));
    }

    proptest! {
        #[test]
        fn no_packet_makes_the_reader_panic(packet in proptest::collection::vec(any::<u8>(), 0..100), raw: bool) {
            let _ = is_reply(&packet, raw, 1, &[0; 16]);
        }
    }
}
