//! The packet filter as text: pure functions from a network to `nft` input, and back from its listing.
//!
//! Two tables a network, both named `cocoon_<bridge>`:
//! - family `inet`: what a guest may reach (nothing of this host but DHCP; nothing at all by a tap that is
//!   in no bridge), forwarding, masquerading;
//! - family `bridge`: what may leave a tap. Sets: `taps` (ours to filter), `macs` and `chaddrs` (tap and
//!   its VM's MAC), `addrs` (MAC and leased address).
//!
//! Invariants: a row of `taps` is there before the tap is a port of the bridge; `addrs` has a row exactly
//! while there is a lease.

use std::{collections::BTreeSet, fmt::Write as _, net::Ipv4Addr};

use serde_json::Value;

use crate::{
    config::NetworkConfig,
    names::{Mac, TAP_GROUP, table_name},
};

/// A tap and the MAC that may use it.
pub(crate) type TapRow = (String, Mac);
/// A MAC and the address that it may use.
pub(crate) type AddressRow = (Mac, Ipv4Addr);

/// The `inet` table, whole: replaces an older one in the same transaction. `note` is kept as its comment.
pub(crate) fn host_table(network: &NetworkConfig, note: &str) -> String {
    let (table, bridge) = (table_name(&network.bridge), &network.bridge);
    let subnet = network.subnet.trunc();
    let between = if network.vm_to_vm { "accept" } else { "drop" };
    let masquerade = if network.masquerade {
        format!(
            "  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {subnet} oifname != \"{bridge}\" masquerade
  }}\n"
        )
    } else {
        String::new()
    };
    // Behind a masquerade nobody outside knows a guest's address, unless by a route that leads here by
    // accident: what was not asked for by a guest, or forwarded to it on purpose, does not come in.
    let inward = if network.masquerade {
        format!(
            "  oifname \"{bridge}\" ct state established,related accept
    oifname \"{bridge}\" ct status dnat accept
    oifname \"{bridge}\" counter drop"
        )
    } else {
        format!("  oifname \"{bridge}\" accept")
    };
    // `guard` sees packets before any DNAT, so a port that the host forwards elsewhere is closed too. What
    // comes in by a tap itself, and not by the bridge, comes from a guest whose bridge is gone.
    format!(
        "add table inet {table}
delete table inet {table}
table inet {table} {{
  comment \"{note}\"
  chain guard {{
    type filter hook prerouting priority mangle; policy accept;
    iifgroup {TAP_GROUP} counter drop
    iifname != \"{bridge}\" return
    meta nfproto != ipv4 drop
    udp sport 68 udp dport 67 return
    ip saddr != {subnet} counter drop
    ct state established,related return
    fib daddr type != unicast jump host
  }}
  chain host {{
    udp sport 68 udp dport 67 return
    counter drop
  }}
  chain input {{
    type filter hook input priority filter - 1; policy accept;
    iifgroup {TAP_GROUP} drop
    iifname != \"{bridge}\" return
    ct state established,related accept
    meta nfproto ipv4 jump host
    meta nfproto ipv4 accept
    drop
  }}
  chain forward {{
    type filter hook forward priority filter - 1; policy accept;
    oifname \"{bridge}\" iifname \"{bridge}\" {between}
    iifname \"{bridge}\" ip daddr 169.254.0.0/16 counter drop
    iifname \"{bridge}\" accept
  {inward}
  }}
{masquerade}}}\n"
    )
}

/// The `bridge` table: rules are replaced, rows of taps are kept and `taps` added to them, the rows of
/// addresses become exactly `addresses`.
pub(crate) fn tap_table(
    network: &NetworkConfig,
    taps: &BTreeSet<TapRow>,
    addresses: &BTreeSet<AddressRow>,
) -> String {
    let mut text = tap_rules(&table_name(&network.bridge), network.gateway);
    for (tap, mac) in taps {
        text.push_str(&add_tap(&network.bridge, tap, *mac));
    }
    for (mac, ip) in addresses {
        text.push_str(&add_address(&network.bridge, *mac, *ip));
    }
    text
}

/// A client may speak DHCP from whatever address it believes to have: one that woke up, or whose lease is
/// gone, is told so by the server. Its MAC is checked, and the server goes by nothing else.
fn tap_rules(table: &str, gateway: Ipv4Addr) -> String {
    format!(
        "table bridge {table} {{
  set taps {{ type ifname; }}
  set macs {{ type ifname . ether_addr; }}
  set chaddrs {{ typeof iifname . @th,288,48; }}
  set addrs {{ type ether_addr . ipv4_addr; }}
  set floods {{ type ifname; size 4096; flags dynamic; timeout 1m; }}
  chain incoming {{ type filter hook prerouting priority -300; policy accept; }}
  chain local {{ type filter hook input priority -300; policy accept; }}
  chain guest {{ }}
  chain guest_arp {{ }}
  chain guest_dhcp {{ }}
}}
flush table bridge {table}
table bridge {table} {{
  chain incoming {{
    iifname @taps jump guest
  }}
  chain local {{
    iifname @taps ether daddr 01:80:c2:00:00:00/40 drop
  }}
  chain guest {{
    iifname . ether saddr != @macs counter drop
    ether type arp goto guest_arp
    ether type != ip counter drop
    ip daddr 169.254.0.0/16 counter drop
    ip frag-off & 0x1fff == 0 udp sport 67 counter drop
    ip frag-off & 0x1fff == 0 udp dport 67 goto guest_dhcp
    ether saddr . ip saddr @addrs accept
    counter drop
  }}
  chain guest_arp {{
    arp htype != 1 counter drop
    arp ptype != ip counter drop
    arp hlen != 6 counter drop
    arp plen != 4 counter drop
    iifname . arp saddr ether != @macs counter drop
    arp saddr ip 0.0.0.0 accept
    ether saddr . arp saddr ip @addrs accept
    counter drop
  }}
  chain guest_dhcp {{
    ip frag-off & 0x3fff != 0 counter drop
    udp sport != 68 counter drop
    @th,64,24 != 0x010106 counter drop
    iifname . @th,288,48 != @chaddrs counter drop
    update @floods {{ iifname limit rate over 10/second burst 20 packets }} counter drop
    ip daddr {{ 255.255.255.255, {gateway} }} accept
    counter drop
  }}
}}
flush set bridge {table} addrs
"
    )
}

/// Lets `mac` leave `tap`.
pub(crate) fn add_tap(bridge: &str, tap: &str, mac: Mac) -> String {
    tap_rows("add", &table_name(bridge), tap, mac)
}

/// Removes the rows of `tap` and `mac`, which need not be there: what is deleted is added first.
pub(crate) fn delete_tap(bridge: &str, tap: &str, mac: Mac) -> String {
    let table = table_name(bridge);
    tap_rows("add", &table, tap, mac) + &tap_rows("delete", &table, tap, mac)
}

fn tap_rows(verb: &str, table: &str, tap: &str, mac: Mac) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{verb} element bridge {table} taps {{ \"{tap}\" }}");
    let _ = writeln!(text, "{verb} element bridge {table} macs {{ \"{tap}\" . {mac} }}");
    let _ = writeln!(text, "{verb} element bridge {table} chaddrs {{ \"{tap}\" . 0x{} }}", mac.hex());
    text
}

/// Lets `mac` use `ip`.
pub(crate) fn add_address(bridge: &str, mac: Mac, ip: Ipv4Addr) -> String {
    format!("add element bridge {} addrs {{ {mac} . {ip} }}\n", table_name(bridge))
}

/// Takes `ip` away from `mac`; the row need not be there.
pub(crate) fn delete_address(bridge: &str, mac: Mac, ip: Ipv4Addr) -> String {
    let add = add_address(bridge, mac, ip);
    format!("{add}delete element bridge {} addrs {{ {mac} . {ip} }}\n", table_name(bridge))
}

/// Removes both tables, which need not be there.
pub(crate) fn delete_tables(bridge: &str) -> String {
    ["inet", "bridge"].map(|family| delete_table(family, &table_name(bridge))).concat()
}

fn delete_table(family: &str, table: &str) -> String {
    format!("add table {family} {table}\ndelete table {family} {table}\n")
}

/// The commands that list both tables. One a call: two in one input confuse the cache of nft 1.0.6.
pub(crate) fn list_tables(bridge: &str) -> [String; 2] {
    let table = table_name(bridge);
    ["inet", "bridge"].map(|family| format!("list table {family} {table}"))
}

/// Removes the `bridge` table, which need not be there, with whatever somebody put into it.
pub(crate) fn delete_tap_table(bridge: &str) -> String {
    delete_table("bridge", &table_name(bridge))
}

/// The rows of the sets of a `bridge` table.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    taps: BTreeSet<String>,
    macs: BTreeSet<TapRow>,
    chaddrs: BTreeSet<TapRow>,
    addrs: BTreeSet<AddressRow>,
}

impl Rows {
    /// The command whose answer [`Rows::parse`] reads.
    pub(crate) fn list(bridge: &str) -> String {
        let [_, taps] = list_tables(bridge);
        taps
    }

    /// The rows in an answer to [`Rows::list`].
    pub(crate) fn parse(objects: &[Value]) -> Self {
        Self {
            taps: elements(objects, "taps").filter_map(|tap| Some(tap.as_str()?.to_owned())).collect(),
            macs: pairs(objects, "macs")
                .filter_map(|(tap, mac)| Some((tap, mac.as_str()?.parse().ok()?)))
                .collect(),
            chaddrs: pairs(objects, "chaddrs")
                .filter_map(|(tap, mac)| Some((tap, Mac::from_number(mac.as_u64()?)?)))
                .collect(),
            addrs: pairs(objects, "addrs")
                .filter_map(|(mac, ip)| Some((mac.parse().ok()?, ip.as_str()?.parse().ok()?)))
                .collect(),
        }
    }

    /// Each tap and MAC that some row lets through.
    pub(crate) fn taps(self) -> BTreeSet<TapRow> {
        self.macs.into_iter().chain(self.chaddrs).collect()
    }

    /// Each MAC and the address that it may use.
    pub(crate) fn addresses(self) -> BTreeSet<AddressRow> {
        self.addrs
    }

    /// Whether `tap` is filtered, to `mac`.
    pub(crate) fn filter(&self, tap: &str, mac: Mac) -> bool {
        let row = (tap.to_owned(), mac);
        self.taps.contains(tap) && self.macs.contains(&row) && self.chaddrs.contains(&row)
    }

    /// Whether all of `live` may be used, and nothing that is not in `known`.
    pub(crate) fn grant(&self, live: &BTreeSet<AddressRow>, known: &BTreeSet<AddressRow>) -> bool {
        live.is_subset(&self.addrs) && self.addrs.is_subset(known)
    }
}

/// The rows of a set of two columns, of which the first is text.
fn pairs<'a>(objects: &'a [Value], set: &'a str) -> impl Iterator<Item = (String, &'a Value)> {
    elements(objects, set).filter_map(|element| {
        let [first, second] = element.get("concat")?.as_array()?.as_slice() else { return None };
        Some((first.as_str()?.to_owned(), second))
    })
}

fn elements<'a>(objects: &'a [Value], set: &'a str) -> impl Iterator<Item = &'a Value> {
    objects
        .iter()
        .filter_map(|object| object.get("set"))
        .filter(move |found| found.get("name").and_then(Value::as_str) == Some(set))
        .filter_map(|found| found.get("elem")?.as_array())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_of_a_network_is_this_text() {
        let network = crate::testing::network(std::path::Path::new("/nowhere"));
        let (mac, ip) = (Mac::new([0x52, 0x54, 0, 0xab, 0xcd, 1]), Ipv4Addr::new(10, 77, 0, 9));
        let (taps, addresses) = (BTreeSet::from([("bt0-0".to_owned(), mac)]), BTreeSet::from([(mac, ip)]));
        insta::assert_snapshot!(host_table(&network, "note") + &tap_table(&network, &taps, &addresses));
    }

    #[test]
    fn an_open_network_without_masquerading_differs_in_just_that() {
        let closed = crate::testing::network(std::path::Path::new("/nowhere"));
        let open = NetworkConfig { vm_to_vm: true, masquerade: false, ..closed.clone() };
        let (open, closed) = (host_table(&open, ""), host_table(&closed, ""));
        let only = |a: &str, b: &str| -> Vec<String> {
            a.lines().filter(|line| !b.contains(line)).map(|line| line.trim().to_owned()).collect()
        };
        let wide = ["oifname \"cocoon0\" iifname \"cocoon0\" accept", "oifname \"cocoon0\" accept"];
        assert_eq!(only(&open, &closed), wide);
        let masquerade = [
            "oifname \"cocoon0\" iifname \"cocoon0\" drop",
            "oifname \"cocoon0\" ct state established,related accept",
            "oifname \"cocoon0\" ct status dnat accept",
            "oifname \"cocoon0\" counter drop",
            "chain postrouting {",
            "type nat hook postrouting priority srcnat; policy accept;",
            "ip saddr 10.77.0.0/24 oifname != \"cocoon0\" masquerade",
        ];
        assert_eq!(only(&closed, &open), masquerade);
    }

    #[test]
    fn rows_come_back_from_what_nft_prints() {
        let set = |name: &str, elements: Value| serde_json::json!({"set": {"family": "bridge", "name": name, "table": "cocoon_c0", "elem": elements}});
        let printed = [
            serde_json::json!({"metainfo": {}}),
            set("taps", serde_json::json!(["bt0-0", 7])),
            set("macs", serde_json::json!([{"concat": ["bt0-0", "52:54:00:ab:cd:01"]}, {"strange": 1}])),
            set(
                "chaddrs",
                serde_json::json!([{"concat": ["bt0-0", 0x5254_00ab_cd01_u64]}, {"concat": ["x", 1_u64 << 48]}]),
            ),
            set(
                "addrs",
                serde_json::json!([{"concat": ["52:54:00:ab:cd:01", "10.0.0.4"]}, {"concat": ["x"]}]),
            ),
        ];
        let mac = Mac::new([0x52, 0x54, 0, 0xab, 0xcd, 1]);
        let (rows, leases) = (Rows::parse(&printed), BTreeSet::from([(mac, Ipv4Addr::new(10, 0, 0, 4))]));
        assert!(rows.filter("bt0-0", mac) && !rows.filter("bt0-1", mac));
        assert!(rows.grant(&leases, &leases) && rows.grant(&BTreeSet::new(), &leases));
        assert!(!rows.grant(&leases, &BTreeSet::new()) && !Rows::default().grant(&leases, &leases));
        assert_eq!(Vec::from_iter(rows.taps()), [("bt0-0".to_owned(), mac)]);
    }
}
