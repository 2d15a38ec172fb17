//! Who may do what.
//!
//! Entry points: [`check`], [`rules`]. Three kinds of users: members of `system:masters` may do everything; a
//! node (`system:node:NAME` in `system:nodes`) may do what its agent needs, for itself and the pods bound to
//! it; everybody else may look at discovery, version and health and ask about himself. Metrics are for the
//! first two kinds and members of `system:monitoring`. Anything not listed is refused.

use serde_json::{Value, json};

use crate::{
    error::ApiError,
    http::{params::Params, path::Address},
    objects::Objects,
    plane::User,
    resources::{self, Kind},
};

/// Group of users who may do everything.
const MASTERS: &str = "system:masters";
/// Groups of users who may read metrics.
const MEASURING: [&str; 3] = [MASTERS, "system:nodes", "system:monitoring"];
/// Path of the metrics.
const METRICS: &str = "/metrics";
/// Paths that everybody may read.
const READABLE: [&str; 11] = [
    "/api",
    "/api/*",
    "/apis",
    "/apis/*",
    "/healthz",
    "/livez",
    "/openapi",
    "/openapi/*",
    "/readyz",
    "/version",
    "/version/",
];

/// What somebody wants to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) verb: String,
    pub(crate) group: String,
    /// Empty for paths that are no resources.
    pub(crate) resource: String,
    /// A path that is no resource.
    pub(crate) path: String,
    pub(crate) subresource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The node that a list or watch of pods is limited to.
    pub(crate) node: Option<String>,
}

impl Attributes {
    pub(crate) fn of(verb: &str, address: &Address, params: &Params) -> Self {
        let kind = resources::by_path(&address.group, &address.version, &address.resource);
        let selection = kind.and_then(|kind| params.selection(kind).ok()).unwrap_or_default();
        let name = if address.name.is_empty() { selection.name().unwrap_or_default() } else { &address.name };
        Self {
            verb: verb.into(),
            group: address.group.clone(),
            resource: address.resource.clone(),
            path: String::new(),
            subresource: address.subresource.clone(),
            namespace: address.namespace.clone(),
            name: name.into(),
            node: selection.node().map(Into::into),
        }
    }

    /// Reading a path that is no resource.
    pub(crate) fn of_path(path: &str) -> Self {
        Self { verb: "get".into(), path: path.into(), ..Self::default() }
    }

    fn refusal(&self, user: &User) -> ApiError {
        if self.resource.is_empty() {
            let message =
                format!("forbidden: User \"{}\" cannot {} path \"{}\"", user.name, self.verb, self.path);
            return ApiError::new(403, "Forbidden", message);
        }
        let resource = if self.subresource.is_empty() {
            self.resource.clone()
        } else {
            format!("{}/{}", self.resource, self.subresource)
        };
        let scope = if self.namespace.is_empty() {
            "at the cluster scope".to_owned()
        } else {
            format!("in the namespace \"{}\"", self.namespace)
        };
        let full = if self.group.is_empty() {
            self.resource.clone()
        } else {
            format!("{}.{}", self.resource, self.group)
        };
        let name = if self.name.is_empty() { String::new() } else { format!(" \"{}\"", self.name) };
        let message = format!(
            "{full}{name} is forbidden: User \"{}\" cannot {} resource \"{resource}\" in API group \"{}\" {scope}",
            user.name, self.verb, self.group
        );
        ApiError::new(403, "Forbidden", message)
    }
}

/// `Ok` if `user` may.
pub(crate) fn check(user: &User, attributes: &Attributes, objects: &Objects) -> Result<(), ApiError> {
    let master = user.groups.iter().any(|group| group == MASTERS);
    if master || (attributes.resource.is_empty() && may_read(user, attributes)) {
        return Ok(());
    }
    if attributes.verb == "create" && attributes.resource.starts_with("selfsubject") {
        return Ok(());
    }
    match own_node(user) {
        Some(node) if node_may(node, attributes, |namespace, pod| node_of(objects, namespace, pod)) => Ok(()),
        _ => Err(attributes.refusal(user)),
    }
}

/// What is neither a resource nor the metrics is discovery, version or health, or does not exist.
fn may_read(user: &User, attributes: &Attributes) -> bool {
    let metrics = attributes.path.trim_end_matches('/') == METRICS;
    attributes.verb == "get" && (!metrics || user.groups.iter().any(|own| MEASURING.contains(&own.as_str())))
}

/// Who may do what, in the form of a `SelfSubjectRulesReview`'s status: what [`check`] says, as far as its
/// form can say it.
pub(crate) fn rules(user: &User) -> Value {
    let resource = |verbs: &[&str], group: &str, resources: &[&str], names: &[&str]| {
        let mut rule = json!({ "verbs": verbs, "apiGroups": [group], "resources": resources });
        if !names.is_empty() {
            rule["resourceNames"] = json!(names);
        }
        rule
    };
    let path = |verb: &str, paths: &[&str]| json!({ "verbs": [verb], "nonResourceURLs": paths });
    if user.groups.iter().any(|group| group == MASTERS) {
        return json!({
            "resourceRules": [resource(&["*"], "*", &["*"], &[])],
            "nonResourceRules": [path("*", &["*"])], "incomplete": false,
        });
    }
    let (authentication, authorization) = ("authentication.k8s.io", "authorization.k8s.io");
    let mut resources = vec![
        resource(&["create"], authentication, &["selfsubjectreviews"], &[]),
        resource(&["create"], authorization, &["selfsubjectaccessreviews", "selfsubjectrulesreviews"], &[]),
    ];
    let mut paths = vec![path("get", &READABLE)];
    if user.groups.iter().any(|own| MEASURING.contains(&own.as_str())) {
        paths.push(path("get", &[METRICS]));
    }
    let Some(node) = own_node(user) else {
        return json!({ "resourceRules": resources, "nonResourceRules": paths, "incomplete": false });
    };
    resources.extend([
        resource(&["list", "watch", "get", "update", "patch", "delete"], "", &["pods"], &[]),
        resource(&["get", "update", "patch"], "", &["pods/status"], &[]),
        resource(&["create"], "", &["nodes"], &[]),
        resource(&["get", "list", "watch", "update", "patch"], "", &["nodes", "nodes/status"], &[node]),
        resource(
            &["create", "get", "update", "patch", "delete"],
            "coordination.k8s.io",
            &["leases"],
            &[node],
        ),
        resource(&["create", "patch", "update"], "", &["events"], &[]),
        resource(&["create", "patch", "update"], "events.k8s.io", &["events"], &[]),
        resource(&["get"], "", &["namespaces"], &[]),
        resource(&["create"], authentication, &["tokenreviews"], &[]),
        resource(&["create"], authorization, &["subjectaccessreviews"], &[]),
    ]);
    json!({
        "resourceRules": resources, "nonResourceRules": paths, "incomplete": true,
        "evaluationError": "pods are those bound to this node, leases those in kube-node-lease",
    })
}

/// A node makes its own node object and lease only. The name of a create stands in its body.
pub(crate) fn check_created(user: &User, kind: &Kind, name: &str) -> Result<(), ApiError> {
    let Some(node) = own_node(user) else { return Ok(()) };
    if matches!(kind.table, "nodes" | "leases.coordination.k8s.io") && name != node {
        let why = format!("node \"{node}\" may create this only under its own name");
        return Err(ApiError::forbidden(kind, name, &why));
    }
    Ok(())
}

/// The node that `user` is, unless he may do everything anyway.
fn own_node(user: &User) -> Option<&str> {
    let member = |group: &str| user.groups.iter().any(|own| own == group);
    let name = user.name.strip_prefix("system:node:").filter(|name| !name.is_empty())?;
    (member("system:nodes") && !member(MASTERS)).then_some(name)
}

fn node_of(objects: &Objects, namespace: &str, name: &str) -> Option<String> {
    let kind = resources::by_table("pods")?;
    Some(objects.find(kind, namespace, name)?.field(kind, "spec.nodeName").to_owned())
}

/// What the agent of `node` may do. `bound_to` tells a pod's node; `None` if there is no such pod.
fn node_may(node: &str, a: &Attributes, bound_to: impl Fn(&str, &str) -> Option<String>) -> bool {
    let verb = a.verb.as_str();
    let own_name = a.name == node;
    match (a.group.as_str(), a.resource.as_str(), a.subresource.as_str()) {
        ("", "pods", "") if matches!(verb, "list" | "watch") => a.node.as_deref() == Some(node),
        ("", "pods", "" | "status") => {
            let known =
                matches!(verb, "get" | "update" | "patch") || (verb == "delete" && a.subresource.is_empty());
            // A pod that is gone is told 404 rather than 403.
            known && bound_to(&a.namespace, &a.name).is_none_or(|bound| bound == node)
        }
        // The name of a create stands in the body; the object's own rules hold there.
        ("", "nodes", "") if verb == "create" => true,
        ("", "nodes", "" | "status") => {
            own_name && matches!(verb, "get" | "list" | "watch" | "update" | "patch")
        }
        ("coordination.k8s.io", "leases", "") if a.namespace == "kube-node-lease" => {
            verb == "create" || (own_name && matches!(verb, "get" | "update" | "patch" | "delete"))
        }
        ("" | "events.k8s.io", "events", "") => matches!(verb, "create" | "patch" | "update"),
        ("authentication.k8s.io", "tokenreviews", "")
        | ("authorization.k8s.io", "subjectaccessreviews", "") => verb == "create",
        ("", "namespaces", "") => verb == "get",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(verb: &str, resource: &str, namespace: &str, name: &str, node: Option<&str>) -> bool {
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let group = if resource == "leases" { "coordination.k8s.io" } else { "" };
        let attributes = Attributes {
            verb: verb.into(),
            group: group.into(),
            resource: resource.into(),
            path: String::new(),
            subresource: subresource.into(),
            namespace: namespace.into(),
            name: name.into(),
            node: node.map(Into::into),
        };
        node_may("n1", &attributes, |_, pod| match pod {
            "mine" => Some("n1".into()),
            "other" => Some("n2".into()),
            "unbound" => Some(String::new()),
            _ => None,
        })
    }

    #[test]
    fn everybody_is_told_the_rules_that_hold_for_him() {
        let told = |name: &str, groups: &[&str]| {
            let user =
                User { name: name.into(), groups: groups.iter().map(|group| (*group).into()).collect() };
            rules(&user)
        };
        let master = told("admin", &[MASTERS, "system:authenticated"]);
        assert_eq!(master["resourceRules"][0]["resources"], json!(["*"]));
        let bob = told("bob", &[]);
        assert!(
            bob["resourceRules"].as_array().unwrap().iter().all(|rule| rule["verbs"] == json!(["create"]))
        );
        assert!(
            !bob.to_string().contains(METRICS)
                && told("m", &["system:monitoring"]).to_string().contains(METRICS)
        );
        let node = told("system:node:n1", &["system:nodes"]);
        assert_eq!(node["incomplete"], true);
        // Nothing is told that is refused, for what belongs to the node itself.
        for rule in node["resourceRules"].as_array().unwrap() {
            for (verb, resource) in rule["verbs"].as_array().unwrap().iter().flat_map(|verb| {
                rule["resources"].as_array().unwrap().iter().map(move |resource| (verb, resource))
            }) {
                let (verb, resource) = (verb.as_str().unwrap(), resource.as_str().unwrap());
                let (plain, subresource) = resource.split_once('/').unwrap_or((resource, ""));
                let attributes = Attributes {
                    verb: verb.into(),
                    group: rule["apiGroups"][0].as_str().unwrap().into(),
                    resource: plain.into(),
                    subresource: subresource.into(),
                    namespace: "kube-node-lease".into(),
                    name: "n1".into(),
                    node: Some("n1".into()),
                    path: String::new(),
                };
                let own = plain.starts_with("selfsubject");
                assert!(own || node_may("n1", &attributes, |_, _| Some("n1".into())), "{verb} {resource}");
            }
        }
    }

    #[test]
    fn a_node_may_do_what_its_agent_needs_and_no_more() {
        for (verb, resource, namespace, name, node, wanted) in [
            ("list", "pods", "", "", Some("n1"), true),
            ("watch", "pods", "", "", Some("n2"), false),
            ("list", "pods", "", "", None, false),
            ("get", "pods", "a", "mine", None, true),
            ("get", "pods", "a", "gone", None, true),
            ("get", "pods", "a", "other", None, false),
            ("patch", "pods/status", "a", "mine", None, true),
            ("patch", "pods", "a", "unbound", None, false),
            ("delete", "pods", "a", "mine", None, true),
            ("delete", "pods", "a", "other", None, false),
            ("create", "pods", "a", "", None, false),
            ("create", "pods/binding", "a", "unbound", None, false),
            ("get", "pods/exec", "a", "mine", None, false),
            ("create", "nodes", "", "", None, true),
            ("patch", "nodes/status", "", "n1", None, true),
            ("patch", "nodes", "", "n2", None, false),
            ("delete", "nodes", "", "n1", None, false),
            ("update", "leases", "kube-node-lease", "n1", None, true),
            ("update", "leases", "kube-node-lease", "n2", None, false),
            ("update", "leases", "default", "n1", None, false),
            ("create", "events", "a", "", None, true),
            ("list", "events", "a", "", None, false),
            ("get", "secrets", "a", "s", None, false),
            ("list", "namespaces", "", "", None, false),
        ] {
            assert_eq!(
                may(verb, resource, namespace, name, node),
                wanted,
                "{verb} {resource} {namespace}/{name}"
            );
        }
    }
}
