//! Living beside other firewalls: a packet must pass every table, so an accept in ours does not overrule
//! a drop in theirs. Where chains of others would drop a guest's packets at their end (a FORWARD or INPUT policy
//! of drop, a last rule that rejects), accept rules with our tag are put into them.
//!
//! Entry points: [`list_tables`], [`accepts`], [`removals`] (pure: a listing in, `nft` text out). Invariants: only rules
//! that carry the tag of this bridge are ever removed; what another firewall refuses by a rule of its own
//! stays refused, only what it refuses by default is opened; a table of `iptables` stays one that `iptables` can show.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{config::NetworkConfig, names::TABLE_PREFIX};

/// The command that lists what [`list_tables`] reads.
pub(crate) const LIST_CHAINS: &str = "list chains";
/// Chains that lead to chains: deeper ones say nothing.
const DEPTH: usize = 8;

/// The tag of our rules in tables of others.
fn tag(bridge: &str) -> String {
    format!("cocoon:{bridge}")
}

/// The commands that list, one a call, the tables of others with a base chain that guests' packets pass.
pub(crate) fn list_tables(chains: &[Value]) -> Vec<String> {
    let chains = chains.iter().filter_map(|object| Chain::of(object.get("chain")?));
    let tables: BTreeSet<String> = chains
        .filter(|chain| chain.hook.is_some_and(|hook| matches!(hook, "forward" | "input")))
        .map(|chain| format!("list table {} {}", chain.family, chain.table))
        .collect();
    tables.into_iter().collect()
}

/// What has to change in the listed tables so that they let the bridge's traffic pass: one transaction a
/// chain. Empty: nothing.
///
/// `others` are bridges that belong to others, such as those of containers: what guests send to them is
/// left to the rules of whoever made them, so that only ports which are published anyway are reached.
pub(crate) fn accepts(listing: &[Value], network: &NetworkConfig, others: &[String]) -> Vec<String> {
    let listing = Listing(listing);
    let docker = listing.chains().any(|chain| chain.is("DOCKER-USER"));
    let wanted = |chain: Chain<'_>| -> Option<(Vec<String>, bool)> {
        let bridge = &network.bridge;
        if chain.is("DOCKER-USER") {
            // `return` hands the packet on to Docker's own rules.
            let past = others.iter().map(|other| format!("iifname \"{bridge}\" oifname \"{other}\" return"));
            return Some((past.chain(forwarding(network, chain)).collect(), false));
        }
        // Of Docker's two chains, its user's is asked first.
        let asked = !(docker && chain.is("FORWARD")) && listing.denies(chain);
        match chain.hook.filter(|_| asked)? {
            "forward" => Some((forwarding(network, chain), false)),
            "input" => Some((vec![format!("iifname \"{bridge}\" udp dport 67 accept")], true)),
            _ => None,
        }
    };
    let wishes = listing.chains().filter_map(|chain| Some((chain, wanted(chain)?)));
    wishes.filter_map(|(chain, (rules, front))| listing.wish(chain, &network.bridge, &rules, front)).collect()
}

/// What a guest sends, and what may come to it: answers, and what the host forwards on purpose, unless the
/// network is routed. `iptables` shows a table no more that has a rule with a connection's state made by
/// `nft`, so its table is opened as a whole; packets pass the same limit in our own table before.
fn forwarding(network: &NetworkConfig, chain: Chain<'_>) -> Vec<String> {
    let bridge = &network.bridge;
    let limited = network.masquerade && (chain.family, chain.table) != ("ip", "filter");
    let inward: &[&str] = if limited { &["ct state established,related ", "ct status dnat "] } else { &[""] };
    let inward = inward.iter().map(|limit| format!("oifname \"{bridge}\" {limit}accept"));
    std::iter::once(format!("iifname \"{bridge}\" accept")).chain(inward).collect()
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

/// What has to be removed from the listed tables to leave nothing of this bridge in them.
pub(crate) fn removals(listing: &[Value], bridge: &str) -> String {
    let rules = Listing(listing).rules();
    rules.filter(|rule| rule.is_ours(bridge)).map(|rule| rule.delete()).collect()
}

/// A chain of somebody else whose names can be put into `nft` text.
#[derive(Debug, Clone, Copy)]
struct Chain<'a> {
    family: &'a str,
    table: &'a str,
    name: &'a str,
    hook: Option<&'a str>,
    drops: bool,
}

impl<'a> Chain<'a> {
    fn of(value: &'a Value) -> Option<Self> {
        let text = |key: &str| value.get(key).and_then(Value::as_str);
        let (family, table, name) = (text("family")?, text("table")?, text("name")?);
        let usable = matches!(family, "ip" | "inet") && !table.starts_with(TABLE_PREFIX);
        (usable && is_plain(table) && is_plain(name)).then_some(())?;
        Some(Self { family, table, name, hook: text("hook"), drops: text("policy") == Some("drop") })
    }

    /// Whether it is this chain of `iptables`' filter table.
    fn is(&self, name: &str) -> bool {
        (self.family, self.table, self.name) == ("ip", "filter", name)
    }

    fn path(&self) -> String {
        format!("{} {} {}", self.family, self.table, self.name)
    }
}

/// What needs no quotes, and is no more than a name.
fn is_plain(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
}

#[derive(Debug, Clone, Copy)]
struct Rule<'a> {
    family: &'a str,
    table: &'a str,
    chain: &'a str,
    handle: u64,
    comment: &'a str,
    statements: &'a [Value],
}

impl<'a> Rule<'a> {
    fn of(value: &'a Value) -> Option<Self> {
        let text = |key: &str| value.get(key).and_then(Value::as_str);
        Some(Self {
            family: text("family")?,
            table: text("table")?,
            chain: text("chain")?,
            handle: value.get("handle")?.as_u64()?,
            comment: text("comment").unwrap_or_default(),
            statements: value.get("expr").and_then(Value::as_array).map_or(&[], Vec::as_slice),
        })
    }

    /// Rules of older versions carry the tag alone.
    fn is_ours(&self, bridge: &str) -> bool {
        let rest = self.comment.strip_prefix(&tag(bridge));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    }

    fn delete(&self) -> String {
        format!("delete rule {} {} {} handle {}\n", self.family, self.table, self.chain, self.handle)
    }

    /// Its verdict, if it has the same for every packet.
    fn verdict(&self) -> Option<(&'a str, &'a Value)> {
        let aside = |statement: &&Value| statement.get("counter").is_none() && statement.get("log").is_none();
        let mut statements = self.statements.iter().filter(aside);
        let (last, more) = (statements.next()?, statements.next());
        let (name, value) = last.as_object()?.iter().next()?;
        more.is_none().then_some((name.as_str(), value))
    }
}

/// How a walk through a chain ends for every packet that comes so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Denied,
    Accepted,
    Returned,
}

struct Listing<'a>(&'a [Value]);

impl<'a> Listing<'a> {
    fn chains(&self) -> impl Iterator<Item = Chain<'a>> + use<'a> {
        self.0.iter().filter_map(|object| Chain::of(object.get("chain")?))
    }

    fn rules(&self) -> impl Iterator<Item = Rule<'a>> + use<'a> {
        self.0.iter().filter_map(|object| Rule::of(object.get("rule")?))
    }

    fn rules_of(&self, chain: Chain<'a>) -> impl Iterator<Item = Rule<'a>> + use<'a> {
        let path = (chain.family, chain.table, chain.name);
        self.rules().filter(move |rule| (rule.family, rule.table, rule.chain) == path)
    }

    /// Whether packets that no rule speaks of are dropped.
    fn denies(&self, chain: Chain<'a>) -> bool {
        match self.end(chain, DEPTH) {
            Some((_, End::Denied)) => true,
            Some((_, End::Accepted)) => false,
            Some((_, End::Returned)) | None => chain.drops,
        }
    }

    /// The first rule behind which no packet comes, and what it does.
    fn end(&self, chain: Chain<'a>, depth: usize) -> Option<(u64, End)> {
        self.rules_of(chain).find_map(|rule| Some((rule.handle, self.end_of(chain, &rule, depth)?)))
    }

    fn end_of(&self, chain: Chain<'a>, rule: &Rule<'a>, depth: usize) -> Option<End> {
        let (verdict, value) = rule.verdict()?;
        let target = || {
            let name = value.get("target")?.as_str()?;
            let next = Chain { name, hook: None, ..chain };
            self.end(next, depth.checked_sub(1)?).map(|(_, end)| end)
        };
        match verdict {
            "drop" | "reject" => Some(End::Denied),
            "xt" if value.get("name").and_then(Value::as_str) == Some("REJECT") => Some(End::Denied),
            "accept" => Some(End::Accepted),
            "return" => Some(End::Returned),
            "jump" => target().filter(|end| *end != End::Returned),
            "goto" => Some(target().unwrap_or(End::Returned)),
            _ => None,
        }
    }

    /// Makes `rules` our rules of `chain`, in this order: at its front, or at its end, which is before the rule
    /// that lets nothing pass. What they are is kept as a number in their comments, so that a look tells
    /// whether they are these.
    fn wish(&self, chain: Chain<'a>, bridge: &str, rules: &[String], front: bool) -> Option<String> {
        let comment = format!("{} {:08x}", tag(bridge), fingerprint(rules));
        let passes = |rule: &Rule<'a>| self.end_of(chain, rule, DEPTH).is_none();
        let reached = self.rules_of(chain).take_while(passes).filter(|rule| rule.comment == comment).count();
        let ours: Vec<Rule<'_>> = self.rules_of(chain).filter(|rule| rule.is_ours(bridge)).collect();
        if reached == rules.len() && ours.len() == rules.len() {
            return None;
        }
        let mut text: String = ours.iter().map(Rule::delete).collect();
        let end = self.rules_of(chain).find(|rule| !passes(rule));
        let path = chain.path();
        let verb = match end {
            _ if front => format!("insert rule {path}"),
            Some(end) => format!("insert rule {path} position {}", end.handle),
            None => format!("add rule {path}"),
        };
        // Each goes to the very front, or behind the one before.
        let mut lines: Vec<String> =
            rules.iter().map(|rule| format!("{verb} {rule} comment \"{comment}\"\n")).collect();
        if front {
            lines.reverse();
        }
        text.extend(lines);
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn network(masquerade: bool) -> NetworkConfig {
        NetworkConfig { masquerade, ..crate::testing::network(std::path::Path::new("/nowhere")) }
    }

    fn chain(name: &str, policy: Option<&str>) -> Value {
        let hook = policy.map(|_| name.to_lowercase());
        json!({"chain": {"family": "ip", "table": "filter", "name": name, "handle": 1, "policy": policy, "hook": hook}})
    }

    fn rule(chain: &str, handle: u64, comment: &str) -> Value {
        json!({"rule": {"family": "ip", "table": "filter", "chain": chain, "handle": handle, "comment": comment,
            "expr": [{"match": {}}, {"accept": null}]}})
    }

    fn always(chain: &str, handle: u64, verdict: &Value) -> Value {
        json!({"rule": {"family": "ip", "table": "filter", "chain": chain, "handle": handle,
            "expr": [{"counter": {"packets": 0}}, verdict]}})
    }

    /// The texts without the numbers in the comments.
    fn plain(texts: &[String]) -> Vec<&str> {
        let lines = texts.iter().flat_map(|text| text.lines());
        lines.map(|line| line.split_once(" comment").map_or(line, |(rule, _)| rule)).collect()
    }

    /// The listing after `texts` were applied to `chains`, which had no rules before.
    fn after(chains: &[Value], texts: &[String]) -> Vec<Value> {
        let rules = texts.concat();
        let rules = rules.lines().enumerate().map(|(at, line)| {
            let chain = line.split(' ').nth(4).unwrap();
            rule(chain, at as u64 + 10, line.split('"').rev().nth(1).unwrap())
        });
        chains.iter().cloned().chain(rules).collect()
    }

    #[test]
    fn accepts_go_where_packets_would_be_dropped_and_only_once() {
        let network = network(true);
        let accept = [chain("FORWARD", Some("accept")), chain("INPUT", Some("accept"))];
        assert!(accepts(&accept, &network, &[]).is_empty());
        let ufw = [chain("FORWARD", Some("drop")), chain("INPUT", Some("drop"))];
        let texts = accepts(&ufw, &network, &["virbr0".to_owned()]);
        let wanted = [
            "add rule ip filter FORWARD iifname \"cocoon0\" accept",
            "add rule ip filter FORWARD oifname \"cocoon0\" accept",
            "insert rule ip filter INPUT iifname \"cocoon0\" udp dport 67 accept",
        ];
        assert_eq!(plain(&texts), wanted);
        assert!(accepts(&after(&ufw, &texts), &network, &[]).is_empty());
    }

    #[test]
    fn only_a_routed_network_is_open_to_whoever_has_a_route() {
        let chains = [
            json!({"chain": {"family": "inet", "table": "filter", "name": "fw", "hook": "forward", "policy": "drop"}}),
        ];
        let inward = |masquerade| {
            let texts = accepts(&chains, &network(masquerade), &[]);
            let lines = plain(&texts).into_iter().filter(|line| line.contains("oifname"));
            lines.map(|line| line.split_once("\"cocoon0\" ").unwrap().1.to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(inward(true), ["ct state established,related accept", "ct status dnat accept"]);
        assert_eq!(inward(false), ["accept"]);
    }

    #[test]
    fn a_chain_that_refuses_at_its_end_is_opened_just_before_that() {
        let reject = json!({"xt": {"type": "target", "name": "REJECT"}});
        let jump = json!({"jump": {"target": "last"}});
        let chains = [
            chain("FORWARD", Some("accept")),
            chain("last", None),
            rule("FORWARD", 5, "the administrator's own"),
            always("FORWARD", 6, &jump),
            always("last", 7, &reject),
        ];
        let texts = accepts(&chains, &network(true), &[]);
        let first = "insert rule ip filter FORWARD position 6 iifname \"cocoon0\" accept";
        assert_eq!(plain(&texts)[0], first);
        // Rules of ours behind that end are never reached: they are put anew.
        let late = after(&chains, &texts);
        assert!(
            accepts(&late, &network(true), &[])[0].starts_with("delete rule ip filter FORWARD handle 10")
        );
        let open = [chain("FORWARD", Some("drop")), always("FORWARD", 5, &json!({"accept": null}))];
        assert!(accepts(&open, &network(true), &[]).is_empty());
        let round = [chain("FORWARD", Some("accept")), chain("a", None), chain("b", None)];
        let goto = |to: &str| json!({"goto": {"target": to}});
        let rules =
            [always("FORWARD", 1, &goto("a")), always("a", 2, &goto("b")), always("b", 3, &goto("a"))];
        assert!(accepts(&[&round[..], &rules].concat(), &network(true), &[]).is_empty());
    }

    #[test]
    fn tables_of_nft_firewalls_are_looked_at_too_but_never_ours_or_strange_ones() {
        let base = |family: &str, table: &str, hook: &str| json!({"chain": {"family": family, "table": table, "name": "forward", "hook": hook, "policy": "drop"}});
        let chains = [
            base("inet", "filter", "forward"),
            base("inet", "filter", "output"),
            base("inet", "cocoon_cocoon0", "forward"),
            base("inet", "a b; flush ruleset", "forward"),
            base("bridge", "other", "forward"),
            base("ip", "nat", "prerouting"),
        ];
        assert_eq!(list_tables(&chains), ["list table inet filter"]);
        let texts = accepts(&chains, &network(true), &[]);
        assert_eq!(texts.len(), 1);
        assert!(
            texts[0].starts_with("add rule inet filter forward iifname \"cocoon0\" accept"),
            "{}",
            texts[0]
        );
    }

    #[test]
    fn what_goes_to_bridges_of_containers_is_left_to_docker() {
        let network = network(true);
        let chains = [chain("FORWARD", Some("drop")), chain("DOCKER-USER", None)];
        let docker0 = ["docker0".to_owned()];
        let texts = accepts(&chains, &network, &docker0);
        let wanted = [
            "add rule ip filter DOCKER-USER iifname \"cocoon0\" oifname \"docker0\" return",
            "add rule ip filter DOCKER-USER iifname \"cocoon0\" accept",
            "add rule ip filter DOCKER-USER oifname \"cocoon0\" accept",
        ];
        assert_eq!(plain(&texts), wanted);
        let listing = after(&chains, &texts);
        assert!(accepts(&listing, &network, &docker0).is_empty());
        // A network that came later, and rules of an older version: all of ours are put anew.
        let more = [docker0[0].clone(), "br-0123456789ab".to_owned()];
        let texts = accepts(&listing, &network, &more);
        assert_eq!(
            plain(&texts)[..3],
            [10, 11, 12].map(|at| format!("delete rule ip filter DOCKER-USER handle {at}"))
        );
        assert_eq!(texts.concat().matches("return").count(), 2);
        let old = [chain("DOCKER-USER", None), rule("DOCKER-USER", 7, "cocoon:cocoon0")];
        assert!(accepts(&old, &network, &[])[0].starts_with("delete rule ip filter DOCKER-USER handle 7\n"));
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
