//! Living beside other firewalls: a packet must pass every table, so an accept in ours does not overrule
//! a drop in theirs. Where the tables of `iptables` would drop a guest's packets (Docker's
//! FORWARD policy, a host firewall's INPUT policy), accept rules with our tag are put into them.
//!
//! Entry points: [`accepts`], [`removals`] (pure: a listing in, `nft` text out). Invariant: only rules that carry
//! the tag of this bridge are ever removed.

use serde_json::Value;

/// The command that lists what [`accepts`] and [`removals`] read.
pub(crate) const LIST: &str = "list table ip filter";

/// The tag of our rules in tables of others.
fn tag(bridge: &str) -> String {
    format!("cocoon:{bridge}")
}

/// What has to change in the listed table so that it lets the bridge's traffic pass. Empty: nothing.
///
/// `others` are bridges that belong to others, such as those of containers: what guests send to them is
/// left to the rules of whoever made them, so that only ports which are published anyway are reached.
pub(crate) fn accepts(listing: &[Value], bridge: &str, others: &[String]) -> String {
    let tagged = tagged(listing, bridge);
    let mut text = String::new();
    let both = ["iifname", "oifname"].map(|direction| format!("{direction} \"{bridge}\" accept"));
    if has_chain(listing, "DOCKER-USER", |_| true) {
        // `return` hands the packet on to Docker's own rules.
        let past = others.iter().map(|other| format!("iifname \"{bridge}\" oifname \"{other}\" return"));
        wish(&mut text, &tagged, "DOCKER-USER", bridge, &past.chain(both).collect::<Vec<_>>());
    } else if has_chain(listing, "FORWARD", drops) {
        wish(&mut text, &tagged, "FORWARD", bridge, &both);
    }
    if has_chain(listing, "INPUT", drops) {
        let dhcp = format!("iifname \"{bridge}\" udp dport 67 accept");
        wish(&mut text, &tagged, "INPUT", bridge, &[dhcp]);
    }
    text
}

/// Makes `rules` our rules of `chain`, in this order and before all others. What they are is kept as a
/// number in their comments, so that a look tells whether they are these.
fn wish(text: &mut String, tagged: &[Rule], chain: &str, bridge: &str, rules: &[String]) {
    let comment = format!("{} {:08x}", tag(bridge), fingerprint(rules));
    let present: Vec<&Rule> = tagged.iter().filter(|rule| rule.chain == chain).collect();
    if present.len() == rules.len() && present.iter().all(|rule| rule.comment == comment) {
        return;
    }
    text.extend(present.into_iter().map(delete));
    // Each goes to the front.
    for rule in rules.iter().rev() {
        text.push_str(&format!("insert rule ip filter {chain} {rule} comment \"{comment}\"\n"));
    }
}

/// FNV-1a: the same in every build.
fn fingerprint(rules: &[String]) -> u32 {
    let bytes = rules.iter().flat_map(|rule| rule.bytes().chain([b'\n']));
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// The interfaces of default routes, out of `/proc/net/route`.
pub(crate) fn uplinks(routes: &str) -> Vec<&str> {
    let fields = routes.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields
        .filter_map(|fields| {
            let (name, target, mask) = (fields.first()?, fields.get(1)?, fields.get(7)?);
            (*target == "00000000" && *mask == "00000000").then_some(*name)
        })
        .collect()
}

/// What has to be removed from the listed table to leave nothing of this bridge in it.
pub(crate) fn removals(listing: &[Value], bridge: &str) -> String {
    let rules = tagged(listing, bridge);
    rules.iter().map(delete).collect()
}

fn delete(rule: &Rule) -> String {
    format!("delete rule ip filter {} handle {}\n", rule.chain, rule.handle)
}

struct Rule {
    chain: String,
    handle: u64,
    comment: String,
}

fn tagged(listing: &[Value], bridge: &str) -> Vec<Rule> {
    let tag = tag(bridge);
    let rules = listing.iter().filter_map(|object| object.get("rule"));
    rules
        .filter_map(|rule| {
            let comment = rule.get("comment")?.as_str()?;
            // Rules of older versions carry the tag alone.
            comment.strip_prefix(&tag).filter(|rest| rest.is_empty() || rest.starts_with(' '))?;
            Some(Rule {
                chain: rule.get("chain")?.as_str()?.to_owned(),
                handle: rule.get("handle")?.as_u64()?,
                comment: comment.to_owned(),
            })
        })
        .collect()
}

fn has_chain(listing: &[Value], name: &str, fits: impl Fn(&Value) -> bool) -> bool {
    let chains = listing.iter().filter_map(|object| object.get("chain"));
    chains.into_iter().any(|chain| chain.get("name").and_then(Value::as_str) == Some(name) && fits(chain))
}

fn drops(chain: &Value) -> bool {
    chain.get("policy").and_then(Value::as_str) == Some("drop")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chain(name: &str, policy: Option<&str>) -> Value {
        json!({"chain": {"family": "ip", "table": "filter", "name": name, "handle": 1, "policy": policy}})
    }

    fn rule(chain: &str, handle: u64, comment: &str) -> Value {
        json!({"rule": {"family": "ip", "table": "filter", "chain": chain, "handle": handle, "comment": comment,
            "expr": [{"accept": null}]}})
    }

    /// The text without the numbers in the comments.
    fn plain(text: &str) -> Vec<&str> {
        text.lines().map(|line| line.split_once(" comment").map_or(line, |(rule, _)| rule)).collect()
    }

    /// The listing after `text` was applied to `chains`.
    fn after(chains: &[Value], text: &str) -> Vec<Value> {
        let rules = text.lines().enumerate().map(|(at, line)| {
            let chain = line.split(' ').nth(4).unwrap();
            rule(chain, at as u64 + 10, line.split('"').rev().nth(1).unwrap())
        });
        chains.iter().cloned().chain(rules).collect()
    }

    #[test]
    fn accepts_go_where_packets_would_be_dropped_and_only_once() {
        let accept = [chain("FORWARD", Some("accept")), chain("INPUT", Some("accept"))];
        assert_eq!(accepts(&accept, "cocoon0", &[]), "");
        let ufw = [chain("FORWARD", Some("drop")), chain("INPUT", Some("drop"))];
        let text = accepts(&ufw, "cocoon0", &["virbr0".to_owned()]);
        let wanted = [
            "insert rule ip filter FORWARD oifname \"cocoon0\" accept",
            "insert rule ip filter FORWARD iifname \"cocoon0\" accept",
            "insert rule ip filter INPUT iifname \"cocoon0\" udp dport 67 accept",
        ];
        assert_eq!(plain(&text), wanted);
        assert_eq!(accepts(&after(&ufw, &text), "cocoon0", &[]), "");
    }

    #[test]
    fn what_goes_to_bridges_of_containers_is_left_to_docker() {
        let chains = [chain("FORWARD", Some("drop")), chain("DOCKER-USER", None)];
        let docker0 = ["docker0".to_owned()];
        let text = accepts(&chains, "cocoon0", &docker0);
        let wanted = [
            "insert rule ip filter DOCKER-USER oifname \"cocoon0\" accept",
            "insert rule ip filter DOCKER-USER iifname \"cocoon0\" accept",
            "insert rule ip filter DOCKER-USER iifname \"cocoon0\" oifname \"docker0\" return",
        ];
        assert_eq!(plain(&text), wanted);
        let listing = after(&chains, &text);
        assert_eq!(accepts(&listing, "cocoon0", &docker0), "");
        // A network that came later, and rules of an older version: all of ours are put anew.
        let more = [docker0[0].clone(), "br-0123456789ab".to_owned()];
        let text = accepts(&listing, "cocoon0", &more);
        assert_eq!(
            plain(&text)[..3],
            [10, 11, 12].map(|at| format!("delete rule ip filter DOCKER-USER handle {at}"))
        );
        assert_eq!(text.matches("return").count(), 2);
        let old = [chain("DOCKER-USER", None), rule("DOCKER-USER", 7, "cocoon:cocoon0")];
        assert!(accepts(&old, "cocoon0", &[]).starts_with("delete rule ip filter DOCKER-USER handle 7\n"));
    }

    #[test]
    fn an_uplink_is_where_a_default_route_goes() {
        let routes = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
            vmbr0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
            tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n\
            docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\nshort\n";
        assert_eq!(uplinks(routes), ["vmbr0"]);
    }

    #[test]
    fn only_our_own_rules_are_removed() {
        let listing = [
            rule("FORWARD", 6, "cocoon:cocoon0"),
            rule("FORWARD", 7, "cocoon:cocoon0 0123abcd"),
            rule("FORWARD", 8, "cocoon:cocoon01 0123abcd"),
            rule("INPUT", 9, ""),
        ];
        let removed = "delete rule ip filter FORWARD handle 6\ndelete rule ip filter FORWARD handle 7\n";
        assert_eq!(removals(&listing, "cocoon0"), removed);
    }
}
