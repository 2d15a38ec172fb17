//! The real thing: bridge, taps, filters, DHCP and daemon in network namespaces, with busybox' `udhcpc` as
//! the guest's client and frames made by hand as the attacker's.

#![allow(clippy::unwrap_used, clippy::unwrap_in_result, clippy::panic)]

mod support;

use std::{collections::BTreeSet, net::Ipv4Addr, path::Path, time::Instant};

use cocoon_net::{
    bridge::{self, BridgeError},
    config::NetworkConfig,
    control, daemon,
    daemon::DaemonError,
    leases::{self, lookup},
    links,
};
use jiff::Timestamp;
use support::{
    Daemon, Guest, HANGS, Namespace, RawGuest, eventually, frames, host_network, network, ok,
    on_a_fresh_host, shell,
};
use tokio_util::sync::CancellationToken;

const VM_A: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAA";
const VM_B: &str = "BBBBBBBBBBBBBBBBBBBBBBBBBB";
const MAC_A: &str = "52:54:00:ab:cd:01";
const MAC_B: &str = "52:54:00:ab:cd:02";
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

fn address_rows() -> String {
    ok("nft", "list set bridge cocoon_cocoon0 addrs")
}

/// The network's filter, as far as it is there, without what comes and goes by itself.
fn filter() -> String {
    let rows = ["taps", "macs", "chaddrs", "addrs"]
        .map(|set| format!("nft list set bridge cocoon_cocoon0 {set};"))
        .concat();
    shell(&format!(
        "nft -s -t list table inet cocoon_cocoon0; nft -s -t list table bridge cocoon_cocoon0; {rows} true"
    ))
}

#[test]
fn a_guest_gets_an_address_and_the_host_reaches_it_but_not_the_other_way() {
    on_a_fresh_host("a_guest_gets_an_address_and_the_host_reaches_it_but_not_the_other_way", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::start(&network).await;
        let guest = Guest::new(&network, VM_A, MAC_A).await;
        assert_eq!(guest.tap.name, "btaaaaaaaa-0");
        let link = ok("ip", "-d link show dev btaaaaaaaa-0");
        for part in [
            "alias cocoon:AAAAAAAAAAAAAAAAAAAAAAAAAA",
            "master cocoon0",
            "isolated on",
            "learning off",
            "vnet_hdr on",
            "persist off",
        ] {
            assert!(link.contains(part), "{part} in {link}");
        }
        let (success, text) = guest.dhcp().await;
        assert!(success, "{text}");
        let address = guest.address().await.unwrap();
        assert_eq!(lookup(&network.lease_file(), MAC_A, Timestamp::now()).unwrap(), Some(address));
        assert!(address_rows().contains(&format!("{MAC_A} . {address}")));
        ok("busybox", &format!("ping -c 1 -W 2 {address}"));
        let (reaches, _) = guest.inside.try_shell(&format!("busybox ping -c 1 -W 1 {GATEWAY}")).await;
        assert!(!reaches, "the host answers a guest's ping");
        host_ports_are_closed(&guest).await;
        let (success, text) = guest.dhcp().await;
        assert!(success && guest.address().await == Some(address), "asked again: {text}");
        released_addresses_are_useless(&network, &guest, address).await;
        drop(guest);
        daemon.stop().await;
    });
}

async fn host_ports_are_closed(guest: &Guest) {
    ok("ip", "addr add 192.0.2.1/24 dev lo");
    let listener = std::net::TcpListener::bind("0.0.0.0:8080").unwrap();
    // A port that the host forwards elsewhere is a port of the host too.
    shell(
        "nft 'add table ip forwarder; add chain ip forwarder pre { type nat hook prerouting priority dstnat; }; add rule ip forwarder pre tcp dport 9090 dnat to 192.0.2.1:8080'",
    );
    let ask = "busybox nc -w 1";
    for target in ["10.77.0.1 8080", "192.0.2.1 8080", "10.77.0.1 9090", "192.0.2.1 9090"] {
        let (reaches, text) = guest.inside.try_shell(&format!("echo | {ask} {target}")).await;
        assert!(!reaches, "{target} is open to a guest: {text}");
    }
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err());
    shell("nft delete table ip forwarder");
}

/// And a client that still believes in its address is answered when it renews it.
async fn released_addresses_are_useless(network: &NetworkConfig, guest: &Guest, address: Ipv4Addr) {
    leases::release(&network.control_socket, MAC_A).await.unwrap();
    leases::release(&network.control_socket, MAC_A).await.unwrap();
    assert_eq!(lookup(&network.lease_file(), MAC_A, Timestamp::now()).unwrap(), None);
    assert!(!address_rows().contains(MAC_A));
    assert!(
        tokio::process::Command::new("busybox")
            .args(["ping", "-c", "1", "-W", "1", &address.to_string()])
            .output()
            .await
            .is_ok_and(|out| !out.status.success())
    );
    std::fs::remove_file(network.lease_file()).unwrap();
    let mac = frames::mac(MAC_A);
    guest.tap.send(&frames::renewal(mac, address));
    eventually("the renewed lease in the file", || {
        lookup(&network.lease_file(), MAC_A, Timestamp::now()).unwrap() == Some(address)
    })
    .await;
    std::fs::remove_file(network.lease_file()).unwrap();
    eventually("the lease file again", || {
        lookup(&network.lease_file(), MAC_A, Timestamp::now()).unwrap() == Some(address)
    })
    .await;
}

#[test]
fn forged_frames_do_not_leave_a_tap() {
    on_a_fresh_host("forged_frames_do_not_leave_a_tap", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::start(&network).await;
        let guest = Guest::new(&network, VM_A, MAC_A).await;
        shell(
            "nft 'add table inet seen; add chain inet seen pre { type filter hook prerouting priority -350; }; add rule inet seen pre udp dport 7777 counter'",
        );
        let seen = || {
            ok("nft", "list table inet seen")
                .split("packets ")
                .nth(1)
                .and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok())
                .unwrap()
        };
        let (own, other) = (frames::mac(MAC_A), frames::mac(MAC_B));
        let bridge = frames::mac("02:c0:0a:4d:00:01");
        let wrong = Ipv4Addr::new(10, 77, 0, 99);
        let world = Ipv4Addr::new(198, 51, 100, 7);
        let udp = |from, source, target| frames::udp(from, bridge, (source, 5), (target, 7777), b"x");

        // Before there is a lease: DHCP and address probes, nothing else.
        guest.tap.send(&udp(own, wrong, world));
        guest.tap.send(&udp(own, Ipv4Addr::UNSPECIFIED, world));
        assert_eq!(seen(), 0);
        let (success, text) = guest.dhcp().await;
        assert!(success, "{text}");
        let address = guest.address().await.unwrap();

        guest.tap.send(&udp(own, address, world));
        assert_eq!(seen(), 1, "an honest packet passes");
        guest.tap.send(&udp(own, wrong, world));
        guest.tap.send(&udp(own, GATEWAY, world));
        guest.tap.send(&udp(other, address, world));
        guest.tap.send(&udp(bridge, address, world));
        guest.tap.send(&udp(own, address, Ipv4Addr::new(169, 254, 169, 254)));
        guest.tap.send(&udp(own, address, world));
        assert_eq!(seen(), 2, "a forged or forbidden packet passes");
        drop(guest);
        forged_arp_and_dhcp(&network, own, other, address, wrong).await;
        daemon.stop().await;
    });
}

async fn forged_arp_and_dhcp(
    network: &NetworkConfig,
    own: frames::Mac,
    other: frames::Mac,
    address: Ipv4Addr,
    wrong: Ipv4Addr,
) {
    let guest = RawGuest::new(network, VM_A, MAC_A).await;
    let answered = async |frame: Vec<u8>, fits: fn(&[u8]) -> bool| {
        guest.send(&frame);
        guest.hears(fits).await
    };
    let arp = frames::is_arp_reply as fn(&[u8]) -> bool;
    // The bridge may drop what it sends in the first moments after its first port came.
    let mut tries = 0;
    while !answered(frames::arp(own, (own, address), GATEWAY), arp).await {
        tries += 1;
        assert!(tries < 50, "an honest ARP request is answered");
    }
    assert!(
        answered(frames::arp(own, (own, Ipv4Addr::UNSPECIFIED), GATEWAY), arp).await,
        "an address probe is answered"
    );
    assert!(!answered(frames::arp(own, (own, wrong), GATEWAY), arp).await, "ARP with a forged address");
    assert!(
        !answered(frames::arp(own, (other, address), GATEWAY), arp).await,
        "ARP with a forged MAC inside"
    );
    assert!(!answered(frames::arp(other, (other, address), GATEWAY), arp).await, "ARP in a forged frame");
    tagged_and_linklocal_frames_are_dropped(&guest, own, other, address);
    let dhcp = frames::is_dhcp_reply as fn(&[u8]) -> bool;
    let mut tries = 0;
    while !answered(frames::discover(own, own), dhcp).await {
        tries += 1;
        assert!(tries < 50, "an honest DISCOVER is answered");
    }
    assert!(!answered(frames::discover(own, other), dhcp).await, "DHCP with a forged chaddr");
    assert!(!answered(frames::discover(other, other), dhcp).await, "DHCP in a forged frame");
    let learned = ok("bridge", "fdb show br cocoon0");
    assert!(
        !learned.contains(MAC_B)
            && learned.contains(&format!("{MAC_A} dev btaaaaaaaa-0 master cocoon0 static")),
        "{learned}"
    );
}

fn tagged_and_linklocal_frames_are_dropped(
    guest: &RawGuest,
    own: frames::Mac,
    other: frames::Mac,
    address: Ipv4Addr,
) {
    let dropped = || -> u64 {
        let listing = ok("nft", "list table bridge cocoon_cocoon0");
        let counts =
            listing.split("packets ").skip(1).filter_map(|rest| rest.split(' ').next()?.parse::<u64>().ok());
        counts.sum()
    };
    let plain = frames::arp(own, (own, address), GATEWAY);
    let tagged = [&plain[..12], &[0x81, 0, 0, 5], &plain[12..]].concat();
    let ipv6 = frames::ethernet(frames::BROADCAST, own, 0x86dd, &[0x60; 60]);
    for (what, frame) in [("a VLAN tag", tagged), ("IPv6", ipv6)] {
        let before = dropped();
        guest.send(&frame);
        assert_eq!(dropped(), before + 1, "a frame with {what} passes");
    }
    // Such a frame is for the bridge itself; a bridge that learned from it would send B's frames to A.
    guest.send(&frames::ethernet([1, 0x80, 0xc2, 0, 0, 0x0e], other, 0x88cc, &[0; 40]));
    assert!(!ok("bridge", "fdb show br cocoon0").contains(MAC_B));
}

#[test]
fn a_tap_whose_bridge_is_gone_leads_nowhere() {
    on_a_fresh_host("a_tap_whose_bridge_is_gone_leads_nowhere", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        bridge::ensure(&network).await.unwrap();
        let guest = RawGuest::new(&network, VM_A, MAC_A).await;
        // Nobody repairs it, as while the daemon is restarted.
        shell("ip link del cocoon0; ip addr add 192.0.2.1/24 dev lo");
        shell("for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done");
        assert!(ok("ip", "link show dev btaaaaaaaa-0").contains("UP"));
        let service = std::net::UdpSocket::bind("0.0.0.0:7777").unwrap();
        service.set_nonblocking(true).unwrap();
        let own = frames::mac(MAC_A);
        let (from, host) = (Ipv4Addr::new(10, 77, 0, 9), Ipv4Addr::new(192, 0, 2, 1));
        let knock = frames::udp(own, frames::BROADCAST, (from, 5), (host, 7777), b"x");
        let reached = || {
            guest.send(&knock);
            service.recv(&mut [0; 8]).is_ok()
        };
        assert!(!reached(), "a guest reaches a port of the host past the bridge");
        let question = frames::arp(own, (own, from), host);
        guest.send(&question);
        assert!(!guest.hears(frames::is_arp_reply).await, "the host tells a guest its addresses");
        shell("nft flush ruleset; echo 0 > /proc/sys/net/ipv4/conf/btaaaaaaaa-0/arp_ignore");
        assert!(reached(), "it was the filter that kept the guest out");
        guest.send(&question);
        assert!(guest.hears(frames::is_arp_reply).await, "it was the switch that kept the host silent");
    });
}

#[test]
fn vms_cannot_talk_to_one_another_unless_the_network_says_so() {
    on_a_fresh_host("vms_cannot_talk_to_one_another_unless_the_network_says_so", async || {
        let folder = tempfile::tempdir().unwrap();
        let mut network = network(folder.path());
        let daemon = Daemon::start(&network).await;
        let (one, two) = (Guest::new(&network, VM_A, MAC_A).await, Guest::new(&network, VM_B, MAC_B).await);
        assert!(one.dhcp().await.0 && two.dhcp().await.0);
        let target = two.address().await.unwrap();
        assert_ne!(one.address().await, Some(target));
        let ping = format!("busybox ping -c 1 -W 1 {target}");
        assert!(!one.inside.try_shell(&ping).await.0, "VMs reach one another");
        // By way of the host's routing neither.
        one.inside.shell(&format!("ip route add {target}/32 via {GATEWAY}")).await;
        assert!(!one.inside.try_shell(&ping).await.0, "VMs reach one another through the host");
        one.inside.shell(&format!("ip route del {target}/32")).await;
        daemon.stop().await;
        network.vm_to_vm = true;
        let daemon = Daemon::start(&network).await;
        let before = one.address().await;
        assert!(
            one.dhcp().await.0 && one.address().await == before,
            "a daemon that starts anew knows its leases"
        );
        // The neighbour entry may be one that failed a moment ago.
        one.inside.shell(&format!("{ping} || {ping} || {ping}")).await;
        daemon.stop().await;
    });
}

/// A machine beyond the host, without a route to the guests.
async fn world() -> Namespace {
    let world = Namespace::new();
    shell(&format!(
        "ip link add up0 type veth peer name eth0 netns {} && ip addr add 198.51.100.1/24 dev up0 && ip link set up0 up",
        world.pid()
    ));
    world.shell("ip addr add 198.51.100.7/24 dev eth0 && ip link set eth0 up").await;
    world
}

/// A container on Docker's own bridge.
async fn container() -> Namespace {
    let container = Namespace::new();
    shell(&format!(
        "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up && \
         ip link add veth0 master docker0 type veth peer name eth0 netns {} && ip link set veth0 up",
        container.pid()
    ));
    container
        .shell("ip addr add 172.17.0.2/16 dev eth0 && ip link set eth0 up && ip route add default via 172.17.0.1")
        .await;
    container
}

#[test]
fn a_guest_reaches_the_world_behind_dockers_firewall_and_teardown_leaves_nothing() {
    on_a_fresh_host(
        "a_guest_reaches_the_world_behind_dockers_firewall_and_teardown_leaves_nothing",
        async || {
            let folder = tempfile::tempdir().unwrap();
            let network = network(folder.path());
            let world = world().await;
            // As Docker leaves it, with matches that nft itself cannot read.
            shell(
                "iptables -P FORWARD DROP; iptables -P INPUT DROP; iptables -N DOCKER-USER; iptables -A DOCKER-USER -j RETURN; iptables -A FORWARD -j DOCKER-USER; \
               iptables -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -m comment --comment hello -j ACCEPT; \
               iptables -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j ACCEPT; iptables -A INPUT -p icmp -j ACCEPT",
            );
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "0").unwrap();
            let container = container().await;
            let before = host_network();
            let daemon = Daemon::start(&network).await;
            let guest = Guest::new(&network, VM_A, MAC_A).await;
            let (success, text) = guest.dhcp().await;
            assert!(success, "{text}");
            guest.inside.shell("busybox ping -c 3 -W 2 198.51.100.7").await;
            ok("busybox", "ping -c 3 -W 2 172.17.0.2");
            let (reaches, _) = guest.inside.try_shell("busybox ping -c 1 -W 1 172.17.0.2").await;
            assert!(!reaches, "a guest reaches what a container does not publish");
            // What Docker does when it starts anew.
            shell("iptables -F DOCKER-USER; iptables -A DOCKER-USER -j RETURN");
            eventually("the rules in Docker's chain", || {
                shell("iptables -S").contains("-A DOCKER-USER -i cocoon0")
            })
            .await;
            let twice = shell("iptables -S");
            tokio::time::sleep(std::time::Duration::from_millis(700)).await;
            assert_eq!(shell("iptables -S"), twice, "sweeps add no rule again");
            assert!(matches!(bridge::teardown(&network, false).await, Err(BridgeError::DaemonRuns(_, _))));
            daemon.stop().await;
            guest.inside.shell("busybox ping -c 3 -W 2 198.51.100.7").await;
            let refused = bridge::teardown(&network, false).await.unwrap_err().to_string();
            assert!(refused.contains("btaaaaaaaa-0"), "{refused}");
            drop(guest);
            links::collect(&network, &BTreeSet::new()).await.unwrap();
            daemon::teardown(&network, false).await.unwrap();
            assert_eq!(host_network(), before);
            assert_eq!(files(&network.state_dir), ["daemon.lock"]);
            daemon::teardown(&network, false).await.unwrap();
            drop((world, container));
        },
    );
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn what_somebody_else_breaks_is_repaired_and_guests_go_on() {
    on_a_fresh_host("what_somebody_else_breaks_is_repaired_and_guests_go_on", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::start(&network).await;
        let guest = Guest::new(&network, VM_A, MAC_A).await;
        assert!(guest.dhcp().await.0);
        let address = guest.address().await.unwrap();
        let (rules, link) = (
            filter(),
            "ip -d -o link show dev btaaaaaaaa-0 \
               | grep -oE 'master cocoon0|state forwarding|(learning|flood) off|(isolated|locked) on'; \
             bridge fdb show dev btaaaaaaaa-0 | grep 52:54:00:ab:cd:01; cat /proc/sys/net/ipv4/ip_forward",
        );
        let wired = shell(link);
        assert_eq!(wired.lines().count(), 8, "{wired}");
        let damages = [
            "nft flush ruleset",
            "ip link del cocoon0",
            "nft flush ruleset; ip link del cocoon0",
            "ip addr flush dev cocoon0",
            "nft flush chain bridge cocoon_cocoon0 guest",
            "ip link set btaaaaaaaa-0 nomaster",
            "echo 0 > /proc/sys/net/ipv4/ip_forward",
            "bridge link set dev btaaaaaaaa-0 isolated off",
            "bridge link set dev btaaaaaaaa-0 locked off learning on flood on",
            "bridge fdb del 52:54:00:ab:cd:01 dev btaaaaaaaa-0 master",
        ];
        for damage in damages {
            shell(damage);
            eventually(damage, || {
                filter() == rules
                    && shell("ip -4 addr show dev cocoon0 || true").contains("10.77.0.1/24")
                    && shell(&format!("{link} || true")) == wired
            })
            .await;
            // The neighbour entry is as old as the bridge.
            let end = Instant::now() + HANGS;
            while !tokio::process::Command::new("busybox")
                .args(["ping", "-c", "1", "-W", "1", &address.to_string()])
                .output()
                .await
                .unwrap()
                .status
                .success()
            {
                assert!(Instant::now() < end, "{damage}: the guest is lost");
            }
            let (success, text) = guest.dhcp().await;
            assert!(success && guest.address().await == Some(address), "{damage}: {text}");
        }
        daemon.stop().await;
    });
}

#[test]
fn a_dead_vm_leaves_nothing_and_its_restart_gets_its_address_again() {
    on_a_fresh_host("a_dead_vm_leaves_nothing_and_its_restart_gets_its_address_again", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::start(&network).await;
        let idle = filter();
        let links_before = ok("ip", "-o link show");
        let mut addresses = BTreeSet::new();
        for round in 0..6 {
            let guest = Guest::new(&network, VM_A, MAC_A).await;
            assert!(guest.dhcp().await.0);
            addresses.insert(guest.address().await);
            let other = RawGuest::new(&network, VM_B, MAC_B).await;
            // Half of the VMs are killed, half are removed in order.
            if round % 2 == 0 {
                drop(guest);
                links::collect(&network, &BTreeSet::from([VM_B.to_owned()])).await.unwrap();
            } else {
                links::detach(&network, VM_A).await.unwrap();
                drop(guest);
            }
            assert!(ok("ip", "-o link show").contains(&other.name), "another VM's tap is left alone");
            assert!(ok("nft", "list set bridge cocoon_cocoon0 macs").contains(&other.name));
            links::collect(&network, &BTreeSet::new()).await.unwrap();
            assert!(!ok("ip", "-o link show").contains(&other.name), "gc takes the tap of a VM that is gone");
        }
        assert_eq!(addresses.len(), 1, "a restarted VM keeps its address");
        leases::release(&network.control_socket, MAC_A).await.unwrap();
        eventually("the filter without rows", || filter() == idle).await;
        assert_eq!(ok("ip", "-o link show").lines().count(), links_before.lines().count());
        daemon.stop().await;
    });
}

#[test]
fn one_mac_is_on_one_tap_and_bad_requests_are_named() {
    on_a_fresh_host("one_mac_is_on_one_tap_and_bad_requests_are_named", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let error = links::attach(&network, VM_A, 0, MAC_A).await.unwrap_err().to_string();
        assert!(error.contains("cocoon0 does not exist") && error.contains("cocoon net daemon"), "{error}");
        links::detach(&network, VM_A).await.unwrap();
        links::collect(&network, &BTreeSet::new()).await.unwrap();
        bridge::ensure(&network).await.unwrap();
        let _one = RawGuest::new(&network, VM_A, MAC_A).await;
        for (vm, index, mac, part) in [
            (VM_B, 0, MAC_A, "already in use"),
            (VM_B, 0, "01:00:5e:00:00:01", "cannot be an interface's own"),
            (VM_B, 0, "no mac", "not an Ethernet address"),
            (VM_B, 10_000, MAC_B, "too high"),
            ("a b", 0, MAC_B, "letters, digits"),
        ] {
            let error = links::attach(&network, vm, index, mac).await.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(!ok("ip", "-o link show").contains("btbbbbbbbb"));
        assert!(!ok("nft", "list ruleset").contains("btbbbbbbbb"));
    });
}

#[test]
fn a_daemon_refuses_a_taken_folder_a_corrupt_lease_file_and_a_subnet_in_use() {
    on_a_fresh_host("a_daemon_refuses_a_taken_folder_a_corrupt_lease_file_and_a_subnet_in_use", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let run = async |network: &NetworkConfig| {
            daemon::run(network.clone().into(), CancellationToken::new()).await.unwrap_err()
        };
        let daemon = Daemon::start(&network).await;
        let ping =
            control::ask(&network.control_socket, &control::Request::Ping { ping: true }).await.unwrap();
        assert_eq!(ping.pid, Some(std::process::id()));
        let error = run(&network).await;
        assert!(
            matches!(&error, DaemonError::Taken { pid, .. } if *pid == std::process::id().to_string()),
            "{error}"
        );
        let mut rival = network.clone();
        rival.state_dir = folder.path().join("rival");
        let error = run(&rival).await;
        assert!(matches!(&error, DaemonError::BridgeTaken(_)), "{error}");
        daemon.stop().await;
        assert!(!network.control_socket.exists());
        assert!(ok("ip", "link show cocoon0").contains("UP"), "the network outlives its daemon");

        std::fs::write(network.lease_file(), "{").unwrap();
        let error = run(&network).await.to_string();
        assert!(error.contains("leases.json") && error.contains("corrupt"), "{error}");
        assert_eq!(std::fs::read_to_string(network.lease_file()).unwrap(), "{");
        std::fs::remove_file(network.lease_file()).unwrap();
        bridge::teardown(&network, false).await.unwrap();

        ok("ip", "link add other type veth peer name other2");
        ok("ip", "addr add 10.77.0.200/25 dev other");
        let error = run(&network).await.to_string();
        assert!(error.contains("10.77.0.200/25"), "{error}");
        let mut taken = network.clone();
        taken.bridge = "other".to_owned();
        let error = run(&taken).await.to_string();
        assert!(error.contains("not a bridge"), "{error}");
    });
}

#[test]
fn a_copy_of_a_state_folder_touches_nothing_of_the_original_while_its_daemon_lives() {
    on_a_fresh_host(
        "a_copy_of_a_state_folder_touches_nothing_of_the_original_while_its_daemon_lives",
        async || {
            let folder = tempfile::tempdir().unwrap();
            let original = network(&folder.path().join("original"));
            let daemon = Daemon::start(&original).await;
            ok("cp", &format!("-a {0}/original {0}/copy", folder.path().display()));
            let copy = network(&folder.path().join("copy"));
            std::fs::remove_file(&copy.control_socket).unwrap();
            // No VM yet: only the bridge is there to be lost.
            let refused = bridge::teardown(&copy, true).await.unwrap_err().to_string();
            assert!(refused.contains("cocoon0") && refused.contains("another state folder"), "{refused}");
            let guest = Guest::new(&original, VM_A, MAC_A).await;
            assert!(guest.dhcp().await.0);
            let (links, rows) = (ok("ip", "-o link show"), filter());
            // It knows VM A by its id, or by nothing, and has one of its own.
            links::detach(&copy, VM_A).await.unwrap();
            links::collect(&copy, &BTreeSet::new()).await.unwrap();
            for vm in [VM_A, VM_B] {
                let refused = links::attach(&copy, vm, 0, MAC_B).await.unwrap_err().to_string();
                assert!(refused.contains("another state folder") && refused.contains("/copy/"), "{refused}");
            }
            assert!(matches!(bridge::teardown(&copy, true).await, Err(BridgeError::OfAnother { .. })));
            assert_eq!((ok("ip", "-o link show"), filter()), (links, rows));
            ok("busybox", &format!("ping -c 1 -W 2 {}", guest.address().await.unwrap()));
            // Without its daemon, the one that comes next has the network.
            daemon.stop().await;
            let daemon = Daemon::start(&copy).await;
            links::detach(&original, VM_A).await.unwrap();
            assert!(ok("ip", "-o link show").contains("btaaaaaaaa-0"));
            links::detach(&copy, VM_A).await.unwrap();
            assert!(!ok("ip", "-o link show").contains("btaaaaaaaa-0"));
            drop(guest);
            daemon.stop().await;
            bridge::teardown(&copy, false).await.unwrap();
        },
    );
}

/// A second network for the same host.
fn another(folder: &Path) -> NetworkConfig {
    NetworkConfig {
        bridge: "cocoon1".to_owned(),
        subnet: "10.78.0.0/24".parse().unwrap(),
        gateway: Ipv4Addr::new(10, 78, 0, 1),
        ..network(folder)
    }
}

#[test]
fn two_networks_live_side_by_side_and_the_last_one_restores_the_host() {
    on_a_fresh_host("two_networks_live_side_by_side_and_the_last_one_restores_the_host", async || {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let one = network(first.path());
        let two = another(second.path());
        let before = host_network();
        let daemons = (Daemon::start(&one).await, Daemon::start(&two).await);
        let guests = (Guest::new(&one, VM_A, MAC_A).await, Guest::new(&two, VM_B, MAC_A).await);
        assert!(guests.0.dhcp().await.0 && guests.1.dhcp().await.0);
        assert_eq!(guests.1.address().await.unwrap().octets()[..3], [10, 78, 0]);
        links::collect(&one, &BTreeSet::from([VM_A.to_owned()])).await.unwrap();
        links::detach(&one, VM_B).await.unwrap();
        assert!(
            ok("ip", "-o link show").contains("btbbbbbbbb-0"),
            "the other network's tap is not ours to collect, nor to remove by its VM's id"
        );
        let taken = links::attach(&one, VM_B, 0, MAC_B).await.unwrap_err().to_string();
        assert!(taken.contains("btbbbbbbbb-0") && taken.contains("copied data folder"), "{taken}");
        drop(guests);
        daemons.0.stop().await;
        daemons.1.stop().await;
        bridge::teardown(&one, false).await.unwrap();
        assert_eq!(std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap(), "1\n");
        bridge::teardown(&two, false).await.unwrap();
        assert_eq!(host_network(), before);
    });
}

#[test]
fn networks_that_come_at_once_restore_what_the_host_had() {
    on_a_fresh_host("networks_that_come_at_once_restore_what_the_host_had", async || {
        for _ in 0..10 {
            let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let one = network(first.path());
            let two = another(second.path());
            tokio::try_join!(bridge::ensure(&one), bridge::ensure(&two)).unwrap();
            bridge::teardown(&one, false).await.unwrap();
            bridge::teardown(&two, false).await.unwrap();
            assert_eq!(std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap(), "0\n");
        }
    });
}

#[test]
fn a_tap_that_comes_while_the_rows_of_its_dead_namesake_go_is_filtered() {
    on_a_fresh_host("a_tap_that_comes_while_the_rows_of_its_dead_namesake_go_is_filtered", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        bridge::ensure(&network).await.unwrap();
        let alive = BTreeSet::from([VM_A.to_owned()]);
        for _ in 0..15 {
            // It dies and leaves its rows.
            drop(RawGuest::new(&network, VM_A, MAC_A).await);
            let collect = async {
                for _ in 0..4 {
                    links::collect(&network, &alive).await.unwrap();
                }
            };
            let (guest, ()) = tokio::join!(RawGuest::new(&network, VM_A, MAC_A), collect);
            for set in ["taps", "macs", "chaddrs"] {
                let rows = ok("nft", &format!("list set bridge cocoon_cocoon0 {set}"));
                assert!(rows.contains(&guest.name), "{set}: {rows}");
            }
        }
    });
}

#[test]
fn many_vms_come_and_go_at_once() {
    on_a_fresh_host("many_vms_come_and_go_at_once", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::start(&network).await;
        let idle = filter();
        let vm = |index: usize| format!("{index:02}AAAAAAAAAAAAAAAAAAAAAAAA");
        let start = Instant::now();
        let attached = (0..16).map(async |index| {
            links::attach(&network, &vm(index), 0, &format!("52:54:00:00:00:{index:02x}")).await.unwrap()
        });
        let taps = futures::future::join_all(attached).await;
        println!("16 taps at once: {:?}", start.elapsed());
        let rows = ok("nft", "list set bridge cocoon_cocoon0 chaddrs");
        assert!(taps.iter().all(|tap| rows.contains(&tap.name)), "{rows}");
        // Frames may be lost: the first ones of a new port, and those that a busy machine has no room for.
        let ask = control::Request::Status { status: true };
        let end = Instant::now() + HANGS;
        loop {
            for (index, tap) in taps.iter().enumerate() {
                let mac = [0x52, 0x54, 0, 0, 0, u8::try_from(index).unwrap()];
                let packet = [&[0; 10][..], &frames::discover(mac, mac)].concat();
                rustix::io::write(&tap.fd, &packet).unwrap();
            }
            tokio::time::sleep(std::time::Duration::from_millis(150)).await;
            let status = control::ask(&network.control_socket, &ask).await.unwrap().status.unwrap();
            if status["pool_available"] == 253 - 16 {
                break;
            }
            assert!(Instant::now() < end, "not every VM has an address: {status}");
        }
        let ids: Vec<String> = (0..16).map(vm).collect();
        let detached = ids.iter().map(|id| links::detach(&network, id));
        assert!(futures::future::join_all(detached).await.iter().all(Result::is_ok));
        drop(taps);
        eventually("the filter without rows", || filter() == idle).await;
        daemon.stop().await;
    });
}

#[test]
fn thirty_taps_of_one_vm_are_attached_and_detached() {
    on_a_fresh_host("thirty_taps_of_one_vm_are_attached_and_detached", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        bridge::ensure(&network).await.unwrap();
        let mut taps = Vec::new();
        let mut times = Vec::new();
        for index in 0..30 {
            let start = Instant::now();
            taps.push(
                links::attach(&network, VM_A, index, &format!("52:54:00:00:00:{index:02x}")).await.unwrap(),
            );
            times.push(start.elapsed());
        }
        times.sort();
        println!("attach: median {:?}, worst {:?}", times[15], times[29]);
        let start = Instant::now();
        links::detach(&network, VM_A).await.unwrap();
        println!("detach of 30: {:?}", start.elapsed());
    });
}
