use std::collections::BTreeSet;

use dhcproto::v4::{DhcpOption, MessageType};
use proptest::prelude::*;

use super::{packet::request, *};

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn mac(number: u8) -> Mac {
    Mac::new([2, 0xaa, 0xbb, 0xcc, 0xdd, number])
}

fn ip(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, last)
}

fn server(pool: std::ops::Range<u8>) -> Server {
    let settings = Settings {
        gateway: GATEWAY,
        mask: Ipv4Addr::new(255, 255, 255, 0),
        dns: vec![Ipv4Addr::new(8, 8, 8, 8)],
        lease_time: Duration::from_secs(3600),
    };
    Server::new(settings, pool.map(ip), [])
}

fn discover(client: u8) -> Vec<u8> {
    request(MessageType::Discover, mac(client), Ipv4Addr::UNSPECIFIED, vec![])
}

fn ask(client: u8, address: u8) -> Vec<u8> {
    request(
        MessageType::Request,
        mac(client),
        Ipv4Addr::UNSPECIFIED,
        vec![DhcpOption::RequestedIpAddress(ip(address))],
    )
}

fn renew(client: u8, address: u8) -> Vec<u8> {
    request(MessageType::Request, mac(client), ip(address), vec![])
}

/// Type and address of a reply.
fn said(outcome: &Outcome) -> (Option<u8>, Ipv4Addr) {
    let Some(reply) = &outcome.reply else { return (None, Ipv4Addr::UNSPECIFIED) };
    let options = &reply.bytes[240..];
    let at = options.windows(2).position(|pair| pair == [53, 1]).unwrap();
    (Some(options[at + 2]), Ipv4Addr::new(reply.bytes[16], reply.bytes[17], reply.bytes[18], reply.bytes[19]))
}

const OFFER: Option<u8> = Some(2);
const ACK: Option<u8> = Some(5);
const NAK: Option<u8> = Some(6);

#[test]
fn an_address_is_sticky_while_it_is_free_and_goes_to_others_last() {
    let mut server = server(10..13);
    assert_eq!(said(&server.handle(&ask(1, 10), at(0))), (ACK, ip(10)));
    server.release(mac(1), at(1));
    assert_eq!(
        said(&server.handle(&discover(2), at(2))),
        (OFFER, ip(11)),
        "addresses without a history go first"
    );
    assert_eq!(said(&server.handle(&discover(1), at(3))), (OFFER, ip(10)));
    assert_eq!(said(&server.handle(&discover(3), at(4))), (OFFER, ip(12)));
    assert_eq!(server.handle(&discover(4), at(5)).ignored, Some(Ignored::PoolEmpty));
    assert_eq!(server.counters().ignored[&Ignored::PoolEmpty], 1);
    assert_eq!(
        said(&server.handle(&discover(4), at(63))),
        (OFFER, ip(11)),
        "an offer lapses after 60 s, not renewed"
    );
}

#[test]
fn a_lease_that_cannot_be_made_durable_is_refused_and_the_address_is_free_again() {
    let mut server = server(10..11);
    let before = server.checkpoint();
    let outcome = server.handle(&ask(1, 10), at(0));
    assert_eq!(said(&Outcome { reply: outcome.refusal, ..Outcome::default() }).0, NAK);
    server.restore(before, 1);
    assert_eq!((server.free(at(0)), server.active(at(0))), (1, 0));
    assert_eq!((server.counters().leases_ok, server.counters().leases_failed), (0, 1));
    server.handle(&ask(1, 10), at(1));
    assert_eq!(server.handle(&renew(1, 10), at(2)).refusal, None, "a client that renews keeps its address");
}

#[test]
fn a_declined_address_is_given_to_nobody_for_a_while_and_only_its_owner_can_decline_it() {
    let mut server = server(10..30);
    let decline = |client, address| {
        let options = vec![DhcpOption::RequestedIpAddress(ip(address))];
        request(MessageType::Decline, mac(client), Ipv4Addr::UNSPECIFIED, options)
    };
    server.handle(&ask(1, 10), at(0));
    assert_eq!(server.handle(&decline(2, 10), at(1)).effects, []);
    assert_eq!(server.handle(&decline(1, 10), at(1)).effects, [Effect::Revoke { mac: mac(1), ip: ip(10) }]);
    assert_eq!(said(&server.handle(&ask(2, 10), at(2))).0, NAK);
    assert_eq!(server.free(at(2)), 19);
    assert_eq!(said(&server.handle(&ask(2, 10), at(602))), (ACK, ip(10)));
}

#[test]
fn declining_cannot_empty_the_pool() {
    let mut server = server(10..26);
    for round in 0..16 {
        let (_, address) = said(&server.handle(&discover(round), at(0)));
        let options = vec![DhcpOption::RequestedIpAddress(address)];
        server.handle(&request(MessageType::Decline, mac(round), Ipv4Addr::UNSPECIFIED, options), at(0));
    }
    assert_eq!(server.free(at(0)), 14);
}

#[test]
fn a_client_that_chose_another_server_takes_nothing() {
    let mut server = server(10..11);
    server.handle(&discover(1), at(0));
    let options = vec![DhcpOption::RequestedIpAddress(ip(10)), DhcpOption::ServerIdentifier(ip(2))];
    let outcome =
        server.handle(&request(MessageType::Request, mac(1), Ipv4Addr::UNSPECIFIED, options), at(1));
    assert_eq!(outcome.ignored, Some(Ignored::OtherServer));
    assert_eq!(server.free(at(1)), 1);
}

#[test]
fn leases_of_an_earlier_pool_are_kept_but_their_address_is_not_given_again() {
    let old = Lease { mac: mac(1).to_string(), ip: ip(200), expiry: at(100) };
    let settings = server(10..11).settings;
    let mut server = Server::new(settings, [ip(10)], [old]);
    assert_eq!(said(&server.handle(&renew(1, 200), at(0))), (ACK, ip(200)));
    server.release(mac(1), at(1));
    assert_eq!(said(&server.handle(&ask(1, 200), at(2))).0, NAK);
    assert_eq!(server.free(at(2)), 1);
}

#[test]
fn an_address_that_two_kept_rows_claim_is_nobodys_until_both_lapse() {
    let row = |client, until| Lease { mac: mac(client).to_string(), ip: ip(10), expiry: at(until) };
    let mut server = Server::new(server(10..11).settings, [ip(10)], [row(1, 50), row(2, 90)]);
    assert_eq!(said(&server.handle(&renew(1, 10), at(60))).0, NAK);
    assert_eq!(said(&server.handle(&renew(1, 10), at(91))).0, ACK);
}

#[test]
fn a_client_that_floods_is_throttled_and_others_are_not() {
    let mut server = server(10..20);
    let admitted = (0..100).filter(|_| server.handle(&discover(1), at(0)).reply.is_some()).count();
    assert_eq!(admitted, 20);
    assert!(server.handle(&discover(2), at(0)).reply.is_some());
    assert!(server.handle(&discover(1), at(1)).reply.is_some(), "the bucket fills up again");
}

#[test]
fn an_expiry_is_never_before_the_one_the_client_was_told() {
    let mut server = server(10..11);
    let now = Timestamp::new(1_800_000_000, 1).unwrap();
    server.handle(&ask(1, 10), now);
    assert_eq!(server.leases()[0].expiry, at(3601));
}

/// One thing that can happen to a server.
#[derive(Debug, Clone)]
enum Step {
    Discover(u8),
    Ask(u8, u8),
    Renew(u8, u8),
    Release(u8),
    Decline(u8, u8),
    Wait(u16),
    FailedAsk(u8, u8),
}

fn step() -> impl Strategy<Value = Step> {
    let (client, address) = (0..6_u8, 8..16_u8);
    prop_oneof![
        client.clone().prop_map(Step::Discover),
        (client.clone(), address.clone()).prop_map(|(c, a)| Step::Ask(c, a)),
        (client.clone(), address.clone()).prop_map(|(c, a)| Step::Renew(c, a)),
        client.clone().prop_map(Step::Release),
        (client.clone(), address.clone()).prop_map(|(c, a)| Step::Decline(c, a)),
        (0..2000_u16).prop_map(Step::Wait),
        (client, address).prop_map(|(c, a)| Step::FailedAsk(c, a)),
    ]
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Request::parse(&bytes);
    }

    #[test]
    fn no_option_of_a_wrong_length_makes_the_server_panic(code: u8, length in 0..40_u8, fill: u8) {
        let mut packet = ask(1, 10);
        packet.truncate(240);
        packet.extend([&[53, 1, 3, code, length][..], &vec![fill; usize::from(length)], &[255]].concat());
        let _ = server(10..12).handle(&packet, at(0));
    }

    #[test]
    fn no_damage_to_a_real_packet_makes_the_server_panic(at_byte in 0..300_usize, value: u8, cut in 0..320_usize) {
        let mut packet = ask(1, 10);
        packet.resize(300, 0);
        packet[at_byte] = value;
        packet.truncate(cut);
        let _ = server(10..12).handle(&packet, at(0));
    }

    #[test]
    fn whatever_clients_do_no_two_live_leases_share_an_address(steps in prop::collection::vec(step(), 1..60)) {
        let mut server = server(10..14);
        let mut now = 0;
        // What the effects say, as the packet filter sees it.
        let mut rows: BTreeSet<(Mac, Ipv4Addr)> = BTreeSet::new();
        for step in steps {
            let mut apply = |effects: &[Effect]| for effect in effects {
                match *effect {
                    Effect::Grant { mac, ip } => { rows.insert((mac, ip)); }
                    Effect::Revoke { mac, ip } => { rows.remove(&(mac, ip)); }
                }
            };
            apply(&server.sweep(at(now)));
            let outcome = match step {
                Step::Discover(c) => server.handle(&discover(c), at(now)),
                Step::Ask(c, a) => server.handle(&ask(c, a), at(now)),
                Step::Renew(c, a) => server.handle(&renew(c, a), at(now)),
                Step::Release(c) => server.release(mac(c), at(now)),
                Step::Decline(c, a) => {
                    let options = vec![DhcpOption::RequestedIpAddress(ip(a))];
                    server.handle(&request(MessageType::Decline, mac(c), Ipv4Addr::UNSPECIFIED, options), at(now))
                }
                Step::Wait(seconds) => { now += i64::from(seconds); Outcome::default() }
                Step::FailedAsk(c, a) => {
                    let before = server.checkpoint();
                    server.handle(&ask(c, a), at(now));
                    server.restore(before, 0);
                    Outcome::default()
                }
            };
            apply(&outcome.effects);
            apply(&server.sweep(at(now)));
            let leases = server.leases();
            let addresses: BTreeSet<Ipv4Addr> = leases.iter().map(|lease| lease.ip).collect();
            prop_assert_eq!(addresses.len(), leases.len());
            prop_assert!(addresses.iter().all(|address| (10..14).contains(&address.octets()[3])));
            prop_assert_eq!(&rows, &leases.iter().map(|lease| (lease.mac.parse().unwrap(), lease.ip)).collect());
            prop_assert!(server.free(at(now)) + leases.len() <= 4);
        }
    }
}
