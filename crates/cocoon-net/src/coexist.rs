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

/// What has to be added to the listed table so that it lets the bridge's traffic pass. Empty: nothing.
pub(crate) fn accepts(listing: &[Value], bridge: &str) -> String {
    let tagged = tagged(listing, bridge);
    let mut text = String::new();
    let forward = if has_chain(listing, "DOCKER-USER", |_| true) { "DOCKER-USER" } else { "FORWARD" };
    if forward == "DOCKER-USER" || has_chain(listing, "FORWARD", drops) {
        for direction in ["iifname", "oifname"] {
            add(&mut text, &tagged, forward, bridge, &format!("{direction} \"{bridge}\""));
        }
    }
    if has_chain(listing, "INPUT", drops) {
        add(&mut text, &tagged, "INPUT", bridge, &format!("iifname \"{bridge}\" udp dport 67"));
    }
    text
}

fn add(text: &mut String, tagged: &[Rule], chain: &str, bridge: &str, matching: &str) {
    let wanted = matching.split(' ').next().unwrap_or_default();
    if !tagged.iter().any(|rule| rule.chain == chain && rule.key == wanted) {
        let tag = tag(bridge);
        text.push_str(&format!("insert rule ip filter {chain} {matching} accept comment \"{tag}\"\n"));
    }
}

/// What has to be removed from the listed table to leave nothing of this bridge in it.
pub(crate) fn removals(listing: &[Value], bridge: &str) -> String {
    let rules = tagged(listing, bridge);
    rules
        .iter()
        .map(|rule| format!("delete rule ip filter {} handle {}\n", rule.chain, rule.handle))
        .collect()
}

struct Rule {
    chain: String,
    handle: u64,
    /// The first thing it matches, such as `iifname`.
    key: String,
}

fn tagged(listing: &[Value], bridge: &str) -> Vec<Rule> {
    let tag = tag(bridge);
    let rules = listing.iter().filter_map(|object| object.get("rule"));
    rules
        .filter(|rule| rule.get("comment").and_then(Value::as_str) == Some(&tag))
        .filter_map(|rule| {
            let key = rule.pointer("/expr/0/match/left/meta/key").and_then(Value::as_str).unwrap_or_default();
            Some(Rule {
                chain: rule.get("chain")?.as_str()?.to_owned(),
                handle: rule.get("handle")?.as_u64()?,
                key: key.to_owned(),
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

    fn rule(chain: &str, handle: u64, key: &str, comment: &str) -> Value {
        json!({"rule": {"family": "ip", "table": "filter", "chain": chain, "handle": handle, "comment": comment,
            "expr": [{"match": {"op": "==", "left": {"meta": {"key": key}}, "right": "cocoon0"}}, {"accept": null}]}})
    }

    #[test]
    fn accepts_go_where_packets_would_be_dropped_and_only_once() {
        let accept = [chain("FORWARD", Some("accept")), chain("INPUT", Some("accept"))];
        assert_eq!(accepts(&accept, "cocoon0"), "");
        let ufw = [chain("FORWARD", Some("drop")), chain("INPUT", Some("drop"))];
        assert_eq!(
            accepts(&ufw, "cocoon0"),
            "insert rule ip filter FORWARD iifname \"cocoon0\" accept comment \"cocoon:cocoon0\"\n\
             insert rule ip filter FORWARD oifname \"cocoon0\" accept comment \"cocoon:cocoon0\"\n\
             insert rule ip filter INPUT iifname \"cocoon0\" udp dport 67 accept comment \"cocoon:cocoon0\"\n"
        );
        let docker = [
            chain("FORWARD", Some("drop")),
            chain("DOCKER-USER", None),
            rule("DOCKER-USER", 7, "iifname", "cocoon:cocoon0"),
        ];
        assert_eq!(
            accepts(&docker, "cocoon0"),
            "insert rule ip filter DOCKER-USER oifname \"cocoon0\" accept comment \"cocoon:cocoon0\"\n"
        );
    }

    #[test]
    fn only_our_own_rules_are_removed() {
        let listing = [
            rule("FORWARD", 7, "iifname", "cocoon:cocoon0"),
            rule("FORWARD", 8, "iifname", "cocoon:cocoon1"),
            rule("INPUT", 9, "iifname", ""),
        ];
        assert_eq!(removals(&listing, "cocoon0"), "delete rule ip filter FORWARD handle 7\n");
    }
}
