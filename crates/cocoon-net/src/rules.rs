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
pub(crate) fn tap_table(network: &NetworkConfig, taps: &[TapRow], addresses: &[AddressRow]) -> String {
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
    let table = table_name(bridge);
    ["inet", "bridge"]
        .map(|family| format!("add table {family} {table}\ndelete table {family} {table}\n"))
        .concat()
}

/// The commands that list both tables. One a call: two in one input confuse the cache of nft 1.0.6.
pub(crate) fn list_tables(bridge: &str) -> [String; 2] {
    let table = table_name(bridge);
    ["inet", "bridge"].map(|family| format!("list table {family} {table}"))
}

/// The command that lists the rows of taps.
pub(crate) fn list_rows(bridge: &str) -> String {
    format!("list set bridge {} macs", table_name(bridge))
}

/// The command that lists the taps that are filtered.
pub(crate) fn list_filtered(bridge: &str) -> String {
    format!("list set bridge {} taps", table_name(bridge))
}

/// The taps in the answer to [`list_filtered`].
pub(crate) fn parse_filtered(objects: &[Value]) -> BTreeSet<String> {
    elements(objects).filter_map(|element| Some(element.as_str()?.to_owned())).collect()
}

/// The rows in the answer to [`list_rows`].
pub(crate) fn parse_rows(objects: &[Value]) -> BTreeSet<TapRow> {
    elements(objects)
        .filter_map(|element| {
            let pair = element.get("concat")?.as_array()?;
            let (tap, mac) = (pair.first()?.as_str()?, pair.get(1)?.as_str()?);
            Some((tap.to_owned(), mac.parse().ok()?))
        })
        .collect()
}

fn elements(objects: &[Value]) -> impl Iterator<Item = &Value> {
    objects.iter().filter_map(|object| object.pointer("/set/elem")?.as_array()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_of_a_network_is_this_text() {
        let network = crate::testing::network(std::path::Path::new("/nowhere"));
        let (mac, ip) = (Mac::new([0x52, 0x54, 0, 0xab, 0xcd, 1]), Ipv4Addr::new(10, 77, 0, 9));
        let taps = [("bt0-0".to_owned(), mac)];
        insta::assert_snapshot!(host_table(&network, "note") + &tap_table(&network, &taps, &[(mac, ip)]));
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
        let printed = serde_json::json!({"set": {"family": "bridge", "name": "macs", "table": "cocoon_c0",
            "type": ["ifname", "ether_addr"], "handle": 2, "elem": [{"concat": ["bt0-0", "52:54:00:ab:cd:01"]}, {"strange": 1}]}});
        let rows = parse_rows(&[serde_json::json!({"metainfo": {}}), printed]);
        assert_eq!(
            rows.into_iter().collect::<Vec<_>>(),
            [("bt0-0".to_owned(), Mac::new([0x52, 0x54, 0, 0xab, 0xcd, 1]))]
        );
    }
}
