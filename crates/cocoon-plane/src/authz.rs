//! Who may do what.
//!
//! Entry point: [`check`]. Three kinds of users: members of `system:masters` may do everything; a node
//! (`system:node:NAME` in `system:nodes`) may do what its agent needs, for itself and the pods bound to it;
//! everybody else may look at discovery and ask about himself. Anything not listed is refused.

use crate::{
    error::ApiError,
    http::{params::Params, path::Address},
    objects::Objects,
    plane::User,
    resources::{self, Kind},
};

/// Group of users who may do everything.
const MASTERS: &str = "system:masters";

/// What somebody wants to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) verb: String,
    pub(crate) group: String,
    /// Empty for paths that are no resources.
    pub(crate) resource: String,
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
            subresource: address.subresource.clone(),
            namespace: address.namespace.clone(),
            name: name.into(),
            node: selection.node().map(Into::into),
        }
    }

    fn refusal(&self, user: &User) -> ApiError {
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
    if master || (attributes.resource.is_empty() && attributes.verb == "get") {
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
