//! Where a pod goes. Pure.
//!
//! Entry point: [`decide`]. Looked at: node selector, node affinity, taints, readiness, `unschedulable`,
//! requests against allocatable (pods included). Demands that are not served (affinity between pods,
//! spreading) leave the pod pending with a message that says so. The same objects always give the same
//! decision: nodes are compared by score, then by name.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    json::{flag, list, pairs, text},
    resources::{Requests, quantity},
    selector::Demand,
};

/// What the scheduler knows of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    labels: BTreeMap<String, String>,
    taints: Vec<Taint>,
    /// Why it takes no pods at all.
    closed: Option<&'static str>,
    allocatable: BTreeMap<String, i128>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Taint {
    key: String,
    value: String,
    effect: String,
}

impl Node {
    pub(super) fn of(value: &Value) -> Self {
        let ready = list(value, "/status/conditions").iter().find(|c| text(c, "/type") == "Ready");
        let closed = if flag(value, "/spec/unschedulable") {
            Some("node(s) were unschedulable")
        } else if ready.is_none_or(|condition| text(condition, "/status") != "True") {
            Some("node(s) were not ready")
        } else if value.pointer("/metadata/deletionTimestamp").is_some() {
            Some("node(s) were being deleted")
        } else {
            None
        };
        let taint = |t: &Value| Taint {
            key: text(t, "/key").into(),
            value: text(t, "/value").into(),
            effect: text(t, "/effect").into(),
        };
        let amount = |(name, text): (&str, &str)| Some((name.to_owned(), quantity::milli(text)?));
        Self {
            name: text(value, "/metadata/name").into(),
            labels: pairs(value, "/metadata/labels").map(|(k, v)| (k.into(), v.into())).collect(),
            taints: list(value, "/spec/taints").iter().map(taint).collect(),
            closed,
            allocatable: pairs(value, "/status/allocatable").filter_map(amount).collect(),
        }
    }
}

/// What runs where.
#[derive(Debug, Default)]
pub(super) struct Usage {
    pods: BTreeMap<Box<str>, (String, Requests)>,
    nodes: BTreeMap<String, BTreeMap<String, i128>>,
}

impl Usage {
    pub(super) fn add(&mut self, uid: &str, node: &str, requests: Requests) {
        self.remove(uid);
        let sums = self.nodes.entry(node.to_owned()).or_default();
        for (name, amount) in &requests.0 {
            *sums.entry(name.clone()).or_default() += amount;
        }
        self.pods.insert(uid.into(), (node.to_owned(), requests));
    }

    /// True if something was freed.
    pub(super) fn remove(&mut self, uid: &str) -> bool {
        let Some((node, requests)) = self.pods.remove(uid) else { return false };
        if let Some(sums) = self.nodes.get_mut(&node) {
            for (name, amount) in &requests.0 {
                *sums.entry(name.clone()).or_default() -= amount;
            }
        }
        true
    }

    /// Whether the pod is counted.
    pub(super) fn knows(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    fn of(&self, node: &str, name: &str) -> i128 {
        self.nodes.get(node).and_then(|sums| sums.get(name)).copied().unwrap_or_default()
    }
}

/// Where a pod goes, or why nowhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    Bind(String),
    Nowhere(String),
}

/// Decides about one pod.
pub(super) fn decide<'a>(pod: &Value, nodes: impl Iterator<Item = &'a Node>, usage: &Usage) -> Decision {
    if let Some(why) = not_served(pod) {
        return Decision::Nowhere(why.into());
    }
    let requests = Requests::of(pod);
    let (mut best, mut reasons, mut all) = (None, BTreeMap::<String, usize>::new(), 0);
    for node in nodes {
        all += 1;
        match fits(pod, &requests, node, usage) {
            Ok(()) => {
                let score = score(pod, &requests, node, usage);
                if best.as_ref().is_none_or(|(top, _)| score > *top) {
                    best = Some((score, node.name.clone()));
                }
            }
            Err(whys) => whys.into_iter().for_each(|why| *reasons.entry(why).or_default() += 1),
        }
    }
    match best {
        Some((_, name)) => Decision::Bind(name),
        None if all == 0 => Decision::Nowhere("no nodes available to schedule pods".into()),
        None => {
            let reasons: Vec<_> = reasons.iter().map(|(why, count)| format!("{count} {why}")).collect();
            Decision::Nowhere(format!("0/{all} nodes are available: {}.", reasons.join(", ")))
        }
    }
}

fn not_served(pod: &Value) -> Option<&'static str> {
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    for kind in ["podAffinity", "podAntiAffinity"] {
        if !list(pod, &format!("/spec/affinity/{kind}/{required}")).is_empty() {
            return Some("required affinity between pods is not served by this scheduler");
        }
    }
    let spread = list(pod, "/spec/topologySpreadConstraints");
    if spread.iter().any(|c| text(c, "/whenUnsatisfiable") == "DoNotSchedule") {
        return Some("topology spread constraints are not served by this scheduler");
    }
    None
}

fn fits(pod: &Value, requests: &Requests, node: &Node, usage: &Usage) -> Result<(), Vec<String>> {
    if let Some(closed) = node.closed {
        return Err(vec![closed.into()]);
    }
    if !selects(pod, node) {
        return Err(vec!["node(s) didn't match Pod's node affinity/selector".into()]);
    }
    let untolerated = |taint: &&Taint| taint.effect != "PreferNoSchedule" && !tolerates(pod, taint);
    if let Some(taint) = node.taints.iter().find(untolerated) {
        return Err(vec![format!("node(s) had untolerated taint {{{}: {}}}", taint.key, taint.value)]);
    }
    let short = |(name, amount): (&String, &i128)| {
        let free = node.allocatable.get(name).copied().unwrap_or_default() - usage.of(&node.name, name);
        let missing = *amount > 0 && *amount > free;
        missing.then(|| if name == "pods" { "Too many pods".into() } else { format!("Insufficient {name}") })
    };
    let whys: Vec<String> = requests.0.iter().filter_map(short).collect();
    if whys.is_empty() { Ok(()) } else { Err(whys) }
}

fn tolerates(pod: &Value, taint: &Taint) -> bool {
    list(pod, "/spec/tolerations").iter().any(|t| {
        let (key, effect) = (text(t, "/key"), text(t, "/effect"));
        (effect.is_empty() || effect == taint.effect)
            && (key.is_empty() || key == taint.key)
            && match text(t, "/operator") {
                "Exists" => true,
                _ => key == taint.key && text(t, "/value") == taint.value,
            }
    })
}

fn selects(pod: &Value, node: &Node) -> bool {
    let plain =
        pairs(pod, "/spec/nodeSelector").all(|(k, v)| node.labels.get(k).is_some_and(|found| found == v));
    let path = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    let terms = list(pod, path);
    plain && (pod.pointer(path).is_none() || terms.iter().any(|term| matches_term(term, node)))
}

/// All expressions of a term; an empty term matches nothing.
fn matches_term(term: &Value, node: &Node) -> bool {
    let (expressions, fields) = (list(term, "/matchExpressions"), list(term, "/matchFields"));
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let label = |key: &str| node.labels.get(key).map(String::as_str);
    let field = |key: &str| (key == "metadata.name").then_some(node.name.as_str());
    expressions.iter().all(|e| demand(e).is_some_and(|demand| demand.holds(label)))
        && fields.iter().all(|e| demand(e).is_some_and(|demand| demand.holds(field)))
}

fn demand(expression: &Value) -> Option<Demand> {
    let key = text(expression, "/key").into();
    let values = || list(expression, "/values").iter().filter_map(Value::as_str);
    let number = || values().next()?.parse().ok();
    match text(expression, "/operator") {
        "In" => Some(Demand::In(key, values().map(Into::into).collect())),
        "NotIn" => Some(Demand::NotIn(key, values().map(Into::into).collect())),
        "Exists" => Some(Demand::Exists(key)),
        "DoesNotExist" => Some(Demand::Missing(key)),
        "Gt" => Some(Demand::Greater(key, number()?)),
        "Lt" => Some(Demand::Less(key, number()?)),
        _ => None,
    }
}

/// Better first: wanted by the pod, fewer soft taints, more left over (in thousandths).
fn score(pod: &Value, requests: &Requests, node: &Node, usage: &Usage) -> (i64, i64, i128) {
    let preferred = list(pod, "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution");
    let weight = |p: &Value| {
        let matches = p.get("preference").is_some_and(|term| matches_term(term, node));
        if matches { p["weight"].as_i64().unwrap_or_default() } else { 0 }
    };
    let soft = node.taints.iter().filter(|t| t.effect == "PreferNoSchedule" && !tolerates(pod, t)).count();
    let left = ["cpu", "memory"].iter().map(|name| {
        let all = node.allocatable.get(*name).copied().unwrap_or_default();
        let used = usage.of(&node.name, name) + requests.0.get(*name).copied().unwrap_or_default();
        if all > 0 { (all - used) * 1000 / all } else { 0 }
    });
    (preferred.iter().map(weight).sum(), -i64::try_from(soft).unwrap_or_default(), left.sum())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(name: &str, extra: Value) -> Node {
        let mut node = json!({
            "metadata": { "name": name, "labels": { "pool": "a", "size": "5" } },
            "status": {
                "allocatable": { "cpu": "4", "memory": "8Gi", "pods": "2" },
                "conditions": [{ "type": "Ready", "status": "True" }]
            }
        });
        json_patch::merge(&mut node, &extra);
        Node::of(&node)
    }

    fn pod(spec: Value) -> Value {
        let mut pod = json!({ "spec": { "containers": [{ "resources": { "requests": { "cpu": "1" } } }] } });
        json_patch::merge(&mut pod["spec"], &spec);
        pod
    }

    fn decision(pod: &Value, nodes: &[Node]) -> Decision {
        decide(pod, nodes.iter(), &Usage::default())
    }

    #[test]
    fn a_pod_goes_where_it_may_and_fits() {
        let tainted = node(
            "t",
            json!({ "spec": { "taints": [
            { "key": "virtual-kubelet.io/provider", "value": "cocoon", "effect": "NoSchedule" }
        ] } }),
        );
        let required = |term: Value| {
            json!({ "affinity": { "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [term] }
        } } })
        };
        let term = |key: &str, operator: &str, values: Value| {
            required(json!({ "matchExpressions": [{ "key": key, "operator": operator, "values": values }] }))
        };
        for (spec, node, wanted) in [
            (json!({}), node("n", json!({})), true),
            (json!({}), tainted.clone(), false),
            (
                json!({ "tolerations": [{ "key": "virtual-kubelet.io/provider", "operator": "Exists" }] }),
                tainted.clone(),
                true,
            ),
            (json!({ "tolerations": [{ "operator": "Exists" }] }), tainted.clone(), true),
            (
                json!({ "tolerations": [{ "key": "virtual-kubelet.io/provider", "value": "other" }] }),
                tainted,
                false,
            ),
            (json!({ "nodeSelector": { "pool": "a" } }), node("n", json!({})), true),
            (json!({ "nodeSelector": { "pool": "b" } }), node("n", json!({})), false),
            (term("pool", "In", json!(["a", "b"])), node("n", json!({})), true),
            (term("pool", "NotIn", json!(["a"])), node("n", json!({})), false),
            (term("size", "Gt", json!(["4"])), node("n", json!({})), true),
            (term("size", "Around", json!(["4"])), node("n", json!({})), false),
            (required(json!({})), node("n", json!({})), false),
            (
                required(
                    json!({ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["n"] }] }),
                ),
                node("n", json!({})),
                true,
            ),
            (json!({}), node("n", json!({ "spec": { "unschedulable": true } })), false),
            (json!({}), node("n", json!({ "status": { "conditions": [] } })), false),
            (json!({}), node("n", json!({ "status": { "allocatable": { "cpu": "500m" } } })), false),
            (
                json!({ "topologySpreadConstraints": [{ "whenUnsatisfiable": "DoNotSchedule" }] }),
                node("n", json!({})),
                false,
            ),
        ] {
            let found = decision(&pod(spec.clone()), std::slice::from_ref(&node));
            assert_eq!(matches!(found, Decision::Bind(_)), wanted, "{spec} on {node:?}: {found:?}");
        }
    }

    #[test]
    fn the_emptier_node_wins_and_names_break_ties() {
        let nodes = [node("a", json!({})), node("b", json!({}))];
        let mut usage = Usage::default();
        assert_eq!(decide(&pod(json!({})), nodes.iter(), &usage), Decision::Bind("a".into()));
        usage.add("u", "a", Requests::of(&pod(json!({}))));
        assert_eq!(decide(&pod(json!({})), nodes.iter(), &usage), Decision::Bind("b".into()));
        usage.add("v", "b", Requests::of(&pod(json!({}))));
        usage.add("w", "b", Requests::of(&pod(json!({}))));
        usage.add("x", "a", Requests::of(&pod(json!({}))));
        let Decision::Nowhere(why) = decide(&pod(json!({})), nodes.iter(), &usage) else { panic!("fits") };
        assert_eq!(why, "0/2 nodes are available: 2 Too many pods.");
        assert!(usage.remove("u") && !usage.remove("u"));
        assert_eq!(decide(&pod(json!({})), nodes.iter(), &usage), Decision::Bind("a".into()));
    }
}
