//! Other firewalls and those who tamper with ours, in network namespaces with real `nft` and `iptables`.

#![allow(clippy::unwrap_used, clippy::unwrap_in_result, clippy::panic)]

// The other test binary uses the rest.
#[allow(dead_code)]
mod support;

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use cocoon_net::bridge;
use support::{
    Daemon, Guest, HANGS, Namespace, RawGuest, eventually, frames, network, ok, on_a_fresh_host, shell,
};

const VM_A: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAA";
const MAC_A: &str = "52:54:00:ab:cd:01";
const MAC_B: &str = "52:54:00:ab:cd:02";
/// No poll comes to help within a test.
const NEVER: Duration = Duration::from_secs(600);

/// Our tables with the rows of taps, as far as they are there.
fn filter() -> String {
    let rows = ["taps", "macs", "chaddrs", "addrs"]
        .map(|set| format!("nft list set bridge cocoon_cocoon0 {set};"))
        .concat();
    shell(&format!(
        "exec 2>/dev/null; nft -s -t list table inet cocoon_cocoon0; nft -s -t list table bridge cocoon_cocoon0; {rows} true"
    ))
}

/// How long it takes until `fact` holds.
/// Looks from another thread, so that the daemon, which runs on this one, is not held up.
async fn until(what: &str, fact: impl Fn() -> bool + Send + 'static) -> Duration {
    let start = Instant::now();
    let looking = tokio::task::spawn_blocking(move || {
        while !fact() {
            if start.elapsed() > HANGS {
                return None;
            }
        }
        Some(start.elapsed())
    });
    looking.await.unwrap().unwrap_or_else(|| panic!("{what}: not within {HANGS:?}"))
}

#[test]
fn a_filter_that_somebody_takes_away_is_back_without_a_poll() {
    on_a_fresh_host("a_filter_that_somebody_takes_away_is_back_without_a_poll", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::sweeping(&network, NEVER).await;
        let guest = Guest::new(&network, VM_A, MAC_A).await;
        assert!(guest.dhcp().await.0);
        let rules = filter();
        let damages = [
            "nft flush ruleset",
            "nft delete table bridge cocoon_cocoon0",
            "nft delete table inet cocoon_cocoon0",
            "nft flush chain bridge cocoon_cocoon0 incoming",
            "nft insert rule bridge cocoon_cocoon0 guest accept",
            "nft flush set bridge cocoon_cocoon0 taps",
            "nft flush set bridge cocoon_cocoon0 macs",
            "nft flush set bridge cocoon_cocoon0 chaddrs",
            "nft flush set bridge cocoon_cocoon0 addrs",
            "nft add chain bridge cocoon_cocoon0 foreign '{ type filter hook prerouting priority -400; }'",
            "nft 'add set bridge cocoon_cocoon0 foreign { type ether_addr; }; \
             add chain bridge cocoon_cocoon0 more; add rule bridge cocoon_cocoon0 more ether saddr @foreign accept; \
             insert rule bridge cocoon_cocoon0 guest jump more'",
            "nft flush ruleset",
        ];
        let mut times = Vec::new();
        for damage in damages {
            shell(damage);
            let whole = rules.clone();
            let took = until(damage, move || filter() == whole).await;
            println!("{damage}: repaired after {took:?}");
            times.push(took);
        }
        times.sort();
        println!("median: {:?}", times[times.len() / 2]);
        // A storm of it ends with the filter in force as well.
        shell("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do nft flush ruleset; done");
        until("after a storm", move || filter() == rules).await;
        daemon.stop().await;
    });
}

#[test]
fn what_is_changed_while_a_repair_runs_is_not_taken_for_what_was_made() {
    on_a_fresh_host("what_is_changed_while_a_repair_runs_is_not_taken_for_what_was_made", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        // From its first moment on, with a rule that lets everything pass as soon as there is a place for it.
        let meddle = |and_then: &str| {
            shell(&format!(
                "exec 2>/dev/null; {and_then}
                 for i in $(seq 500); do nft insert rule bridge cocoon_cocoon0 guest accept && exit 0; done; exit 1"
            ));
        };
        let whole = {
            let daemon = Daemon::sweeping(&network, NEVER).await;
            let rules = filter();
            daemon.stop().await;
            shell("nft flush ruleset");
            rules
        };
        let first = tokio::task::spawn_blocking(move || meddle(""));
        let daemon = Daemon::sweeping(&network, NEVER).await;
        first.await.unwrap();
        for round in 0..20 {
            let expected = whole.clone();
            until(&format!("round {round}"), move || filter() == expected).await;
            tokio::task::spawn_blocking(move || meddle("nft flush ruleset;")).await.unwrap();
        }
        until("at last", move || filter() == whole).await;
        daemon.stop().await;
    });
}

#[test]
fn neither_a_lost_nor_a_changed_lease_file_costs_a_guest_its_address() {
    on_a_fresh_host("neither_a_lost_nor_a_changed_lease_file_costs_a_guest_its_address", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::sweeping(&network, NEVER).await;
        let guest = Guest::new(&network, VM_A, MAC_A).await;
        assert!(guest.dhcp().await.0);
        let (rules, file) = (filter(), network.lease_file());
        let leases = std::fs::read_to_string(&file).unwrap();
        let stranger = leases.replace(MAC_A, MAC_B);
        for content in [None, Some(""), Some("[]"), Some("[{"), Some(stranger.as_str())] {
            match content {
                None => std::fs::remove_file(&file).unwrap(),
                Some(text) => std::fs::write(&file, text).unwrap(),
            }
            shell("nft flush ruleset");
            let (rules, leases, file) = (rules.clone(), leases.clone(), file.clone());
            until(&format!("{content:?}"), move || {
                filter() == rules && std::fs::read_to_string(&file).is_ok_and(|text| text == leases)
            })
            .await;
        }
        daemon.stop().await;
    });
}

#[test]
fn a_lease_file_that_was_moved_away_while_no_daemon_ran_costs_no_guest_its_address() {
    on_a_fresh_host(
        "a_lease_file_that_was_moved_away_while_no_daemon_ran_costs_no_guest_its_address",
        async || {
            let folder = tempfile::tempdir().unwrap();
            let network = network(folder.path());
            let daemon = Daemon::sweeping(&network, NEVER).await;
            let guest = Guest::new(&network, VM_A, MAC_A).await;
            assert!(guest.dhcp().await.0);
            let (rules, address) = (filter(), guest.address().await);
            daemon.stop().await;
            std::fs::remove_file(network.lease_file()).unwrap();
            let daemon = Daemon::sweeping(&network, NEVER).await;
            assert_eq!(filter(), rules);
            let (success, text) = guest.dhcp().await;
            assert!(success && guest.address().await == address, "{text}");
            daemon.stop().await;
        },
    );
}

#[test]
fn taps_whose_filter_cannot_be_put_back_are_down_until_it_can() {
    on_a_fresh_host("taps_whose_filter_cannot_be_put_back_are_down_until_it_can", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::sweeping(&network, NEVER).await;
        let guest = RawGuest::new(&network, VM_A, MAC_A).await;
        let rules = filter();
        let up = || ok("ip", "-o link show dev btaaaaaaaa-0").contains(",UP");
        assert!(up());
        // Somebody's set stands where ours has to go.
        shell(
            "nft 'flush ruleset; add table bridge cocoon_cocoon0; add set bridge cocoon_cocoon0 taps { type ipv4_addr; }'",
        );
        let took = until("the tap is down", move || !up()).await;
        println!("set down after {took:?}");
        shell("nft flush ruleset");
        until("the filter again", move || filter() == rules && up()).await;
        drop(guest);
        daemon.stop().await;
    });
}

#[test]
fn an_address_of_ours_on_another_interface_keeps_no_filter_from_its_repair() {
    on_a_fresh_host("an_address_of_ours_on_another_interface_keeps_no_filter_from_its_repair", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let daemon = Daemon::sweeping(&network, NEVER).await;
        let _guest = RawGuest::new(&network, VM_A, MAC_A).await;
        let rules = filter();
        shell("ip link add other type veth peer name other2; ip addr add 10.77.0.200/25 dev other");
        for damage in ["nft flush set bridge cocoon_cocoon0 taps", "nft flush ruleset"] {
            shell(damage);
            let rules = rules.clone();
            until(damage, move || filter() == rules).await;
        }
        daemon.stop().await;
    });
}

#[test]
fn without_any_filter_a_guest_has_no_mac_but_its_own_and_no_neighbours() {
    on_a_fresh_host("without_any_filter_a_guest_has_no_mac_but_its_own_and_no_neighbours", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        bridge::ensure(&network).await.unwrap();
        let (guest, other) =
            (RawGuest::new(&network, VM_A, MAC_A).await, RawGuest::new(&network, "BB", MAC_B).await);
        // Nobody repairs it, as while the daemon is restarted.
        shell("nft flush ruleset");
        let service = std::net::UdpSocket::bind("0.0.0.0:7777").unwrap();
        service.set_nonblocking(true).unwrap();
        let seen = || std::iter::from_fn(|| service.recv(&mut [0; 8]).ok()).count();
        let gateway = frames::mac("02:c0:0a:4d:00:01");
        let knock = |from: &str, to| {
            let (source, target) = ((Ipv4Addr::new(10, 77, 0, 9), 5), (network.gateway, 7777));
            frames::udp(frames::mac(from), to, source, target, b"x")
        };
        eventually("the port forwards", || {
            guest.send(&knock(MAC_A, gateway));
            seen() > 0
        })
        .await;
        guest.send(&knock(MAC_B, gateway));
        guest.send(&knock("02:c0:0a:4d:00:01", gateway));
        guest.send(&knock(MAC_A, gateway));
        assert_eq!(seen(), 1, "a forged MAC passes");
        guest.send(&knock(MAC_A, frames::mac(MAC_B)));
        guest.send(&knock(MAC_A, frames::BROADCAST));
        let meant = |frame: &[u8]| frame.get(36..38) == Some(&7777_u16.to_be_bytes());
        assert!(!other.hears(meant).await, "a neighbour hears a guest");
    });
}

/// A machine beyond the host that has a route to the guests, and a service.
async fn world() -> Namespace {
    let world = Namespace::new();
    shell(&format!(
        "ip link add up0 type veth peer name eth0 netns {} && ip addr add 198.51.100.1/24 dev up0 && ip link set up0 up",
        world.pid()
    ));
    world
        .shell("ip addr add 198.51.100.7/24 dev eth0 && ip link set eth0 up && ip route add 10.77.0.0/24 via 198.51.100.1")
        .await;
    world
}

/// Firewalls as people have them: how it is set up, and how it is cleared.
const FIREWALLS: [(&str, &str); 6] = [
    ("true", "true"),
    (
        "iptables -P FORWARD DROP; iptables -P INPUT DROP",
        "iptables -P FORWARD ACCEPT; iptables -P INPUT ACCEPT",
    ),
    (
        "iptables -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; iptables -N last; iptables -A last -j REJECT; iptables -A FORWARD -j last",
        "true",
    ),
    (
        "nft 'add table inet filter; add chain inet filter forward { type filter hook forward priority filter; policy drop; }; \
         add chain inet filter input { type filter hook input priority filter; policy drop; }; add rule inet filter input ct state established accept'",
        "true",
    ),
    (
        "nft 'add table ip mine; add chain ip mine fw { type filter hook forward priority 5; }; add rule ip mine fw counter drop'",
        "true",
    ),
    (
        "iptables -P FORWARD DROP; iptables -N DOCKER-USER; iptables -A DOCKER-USER -j RETURN; iptables -A FORWARD -j DOCKER-USER",
        "iptables -P FORWARD ACCEPT",
    ),
];

#[test]
fn behind_any_firewall_guests_reach_the_world_and_the_world_does_not_reach_guests() {
    on_a_fresh_host(
        "behind_any_firewall_guests_reach_the_world_and_the_world_does_not_reach_guests",
        async || {
            let folder = tempfile::tempdir().unwrap();
            let network = network(folder.path());
            let world = world().await;
            let daemon = Daemon::start(&network).await;
            let guest = Guest::new(&network, VM_A, MAC_A).await;
            assert!(guest.dhcp().await.0);
            let address = guest.address().await.unwrap();
            for (firewall, clear) in FIREWALLS {
                shell(firewall);
                let out = "busybox ping -c 1 -W 1 198.51.100.7";
                let end = Instant::now() + HANGS;
                while !guest.inside.try_shell(out).await.0 {
                    assert!(Instant::now() < end, "{firewall}: a guest does not reach the world");
                }
                let (reaches, _) = world.try_shell(&format!("busybox ping -c 1 -W 1 {address}")).await;
                assert!(!reaches, "{firewall}: the world reaches a guest");
                assert!(guest.dhcp().await.0, "{firewall}: DHCP");
                if firewall.contains("iptables") {
                    // It shows its tables no more if they have rules that it cannot express.
                    ok("iptables", "-S");
                }
                forwarded_on_purpose(firewall, &guest, &world, address).await;
                shell(clear);
                shell("nft flush ruleset");
                eventually("the filter again", || filter().contains("iifname @taps jump guest")).await;
            }
            drop(guest);
            daemon.stop().await;
        },
    );
}

/// A port that the host forwards to a guest is open.
async fn forwarded_on_purpose(firewall: &str, guest: &Guest, world: &Namespace, address: Ipv4Addr) {
    shell(&format!(
        "nft 'add table ip forwarder; add chain ip forwarder pre {{ type nat hook prerouting priority dstnat; }}; add rule ip forwarder pre iifname up0 tcp dport 8080 dnat to {address}:80'"
    ));
    let serve = "timeout 5 busybox nc -l -p 80 -e busybox echo hello";
    let ask = "sleep 0.3; busybox nc -w 2 198.51.100.1 8080 < /dev/null";
    let end = Instant::now() + HANGS;
    loop {
        let ((_, _), (asked, text)) = tokio::join!(guest.inside.try_shell(serve), world.try_shell(ask));
        if asked && text.contains("hello") {
            break;
        }
        assert!(Instant::now() < end, "{firewall}: a forwarded port is closed: {text}");
    }
    shell("nft delete table ip forwarder");
}

#[test]
fn a_routed_network_is_reached_from_the_world() {
    on_a_fresh_host("a_routed_network_is_reached_from_the_world", async || {
        let folder = tempfile::tempdir().unwrap();
        let mut network = network(folder.path());
        network.masquerade = false;
        let world = world().await;
        shell("iptables -P FORWARD DROP");
        let daemon = Daemon::start(&network).await;
        let guest = Guest::new(&network, VM_A, MAC_A).await;
        assert!(guest.dhcp().await.0);
        let address = guest.address().await.unwrap();
        world.shell(&format!("busybox ping -c 3 -W 1 {address}")).await;
        drop(guest);
        daemon.stop().await;
    });
}

#[test]
fn what_an_administrator_refuses_stays_refused() {
    on_a_fresh_host("what_an_administrator_refuses_stays_refused", async || {
        let folder = tempfile::tempdir().unwrap();
        let network = network(folder.path());
        let world = world().await;
        world.shell("ip addr add 198.51.100.8/24 dev eth0").await;
        shell("iptables -P FORWARD DROP; iptables -A FORWARD -d 198.51.100.8 -j DROP");
        let daemon = Daemon::start(&network).await;
        let guest = Guest::new(&network, VM_A, MAC_A).await;
        assert!(guest.dhcp().await.0);
        guest.inside.shell("busybox ping -c 3 -W 1 198.51.100.7").await;
        let (reaches, _) = guest.inside.try_shell("busybox ping -c 1 -W 1 198.51.100.8").await;
        assert!(!reaches, "our accept overrules a drop that is meant");
        drop(guest);
        daemon.stop().await;
    });
}
