//! Discovery: which groups, versions and resources there are.

use http::{HeaderMap, HeaderValue, header};
use serde_json::{Value, json};

use super::view;
use crate::{
    error::{ApiError, respond_json},
    plane::Response,
    resources::{KINDS, Kind, group_version},
};

/// Kubernetes version whose behaviour is followed.
const MINOR: &str = "37";
const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
const GET: &[&str] = &["get"];
const CHANGE: &[&str] = &["get", "patch", "update"];
const CREATE: &[&str] = &["create"];
const STREAM: &[&str] = &["create", "get"];
const ALL: &[&str] = &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

/// A resource of discovery that is not a stored kind: a subresource or a review.
struct Extra {
    group: &'static str,
    parent: &'static str,
    name: &'static str,
    namespaced: bool,
    kind: (&'static str, &'static str, &'static str),
    verbs: &'static [&'static str],
}

const fn sub(parent: &'static str, name: &'static str, verbs: &'static [&'static str]) -> Extra {
    Extra { group: "", parent, name, namespaced: true, kind: ("", "v1", "Pod"), verbs }
}

const fn review(group: &'static str, name: &'static str, kind: &'static str) -> Extra {
    Extra { group, parent: "", name, namespaced: false, kind: (group, "v1", kind), verbs: CREATE }
}

/// Order: as in discovery.
const EXTRAS: &[Extra] = &[
    Extra { namespaced: false, kind: ("", "v1", "Namespace"), ..sub("namespaces", "finalize", &["update"]) },
    Extra { kind: ("", "v1", "Binding"), ..sub("pods", "binding", CREATE) },
    Extra { kind: ("policy", "v1", "Eviction"), ..sub("pods", "eviction", CREATE) },
    Extra { kind: ("", "v1", "PodExecOptions"), ..sub("pods", "exec", STREAM) },
    sub("pods", "log", GET),
    review("authentication.k8s.io", "selfsubjectreviews", "SelfSubjectReview"),
    review("authentication.k8s.io", "tokenreviews", "TokenReview"),
    review("authorization.k8s.io", "selfsubjectaccessreviews", "SelfSubjectAccessReview"),
    review("authorization.k8s.io", "selfsubjectrulesreviews", "SelfSubjectRulesReview"),
    review("authorization.k8s.io", "subjectaccessreviews", "SubjectAccessReview"),
];

/// `/version`.
pub(super) fn version() -> Value {
    json!({
        "major": "1", "minor": MINOR, "gitVersion": format!("v1.{MINOR}.0+cocoon"), "gitCommit": "",
        "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "rustc",
        "platform": format!("linux/{}", if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }),
    })
}

/// All groups with their versions; the core group first.
pub(crate) fn group_versions() -> Vec<(&'static str, &'static str)> {
    let kinds = KINDS.iter().map(|kind| (kind.group, kind.version));
    let extras = EXTRAS.iter().filter(|extra| extra.parent.is_empty()).map(|extra| (extra.group, "v1"));
    let mut found: Vec<_> = kinds.chain(extras).collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn aggregated(headers: &HeaderMap, core: bool) -> Option<Response> {
    if !view::wants(headers, "apidiscovery.k8s.io", "v2", "APIGroupDiscoveryList") {
        return None;
    }
    let groups = group_versions().into_iter().filter(|(group, _)| group.is_empty() == core);
    let items: Vec<Value> = groups
        .map(|(group, version)| {
            let resources: Vec<Value> = kinds(group, version)
                .map(aggregated_resource)
                .chain(reviews(group, version).map(aggregated_review))
                .collect();
            json!({
                "metadata": { "name": group, "creationTimestamp": null },
                "versions": [{ "version": version, "freshness": "Current", "resources": resources }],
            })
        })
        .collect();
    let list = json!({ "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items });
    let mut response = respond_json(200, &list);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(AGGREGATED));
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept"));
    Some(response)
}

fn kinds<'a>(group: &'a str, version: &'a str) -> impl Iterator<Item = &'static Kind> {
    KINDS.iter().filter(move |kind| kind.group == group && kind.version == version)
}

fn reviews<'a>(group: &'a str, version: &'a str) -> impl Iterator<Item = &'static Extra> {
    EXTRAS.iter().filter(move |extra| extra.parent.is_empty() && extra.group == group && version == "v1")
}

fn subresources(kind: &Kind) -> impl Iterator<Item = &'static Extra> {
    EXTRAS.iter().filter(move |extra| {
        !extra.parent.is_empty() && extra.group == kind.group && extra.parent == kind.plural
    })
}

fn response_kind((group, version, kind): (&str, &str, &str)) -> Value {
    json!({ "group": group, "version": version, "kind": kind })
}

fn scope(namespaced: bool) -> &'static str {
    if namespaced { "Namespaced" } else { "Cluster" }
}

fn aggregated_resource(kind: &'static Kind) -> Value {
    let own = (kind.group, kind.version, kind.kind);
    let mut subs: Vec<Value> = subresources(kind)
        .map(|extra| {
            json!({ "subresource": extra.name, "responseKind": response_kind(extra.kind), "verbs": extra.verbs })
        })
        .collect();
    if kind.status {
        subs.push(json!({ "subresource": "status", "responseKind": response_kind(own), "verbs": CHANGE }));
    }
    let mut resource = json!({
        "resource": kind.plural, "responseKind": response_kind(own), "scope": scope(kind.namespaced),
        "singularResource": kind.singular, "verbs": ALL,
    });
    for (field, words) in [("shortNames", kind.short_names), ("categories", kind.categories)] {
        if !words.is_empty() {
            resource[field] = json!(words);
        }
    }
    if !subs.is_empty() {
        resource["subresources"] = json!(subs);
    }
    resource
}

fn aggregated_review(extra: &'static Extra) -> Value {
    json!({
        "resource": extra.name, "responseKind": response_kind(extra.kind), "scope": scope(extra.namespaced),
        "singularResource": extra.kind.2.to_lowercase(), "verbs": extra.verbs,
    })
}

/// `/api`.
pub(super) fn core(headers: &HeaderMap) -> Result<Response, ApiError> {
    if let Some(response) = aggregated(headers, true) {
        return Ok(response);
    }
    view::check_accept(headers)?;
    let versions = json!({
        "kind": "APIVersions", "versions": ["v1"],
        "serverAddressByClientCIDRs": [{ "clientCIDR": "0.0.0.0/0", "serverAddress": "" }],
    });
    Ok(respond_json(200, &versions))
}

/// `/apis`.
pub(super) fn groups(headers: &HeaderMap) -> Result<Response, ApiError> {
    if let Some(response) = aggregated(headers, false) {
        return Ok(response);
    }
    view::check_accept(headers)?;
    let groups: Vec<Value> = group_versions().into_iter().filter_map(|(name, _)| group_body(name)).collect();
    Ok(respond_json(200, &json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups })))
}

/// `/apis/GROUP`.
pub(super) fn group(name: &str) -> Option<Value> {
    let mut group = group_body(name)?;
    group["kind"] = "APIGroup".into();
    group["apiVersion"] = "v1".into();
    Some(group)
}

fn group_body(name: &str) -> Option<Value> {
    let versions: Vec<Value> = group_versions()
        .into_iter()
        .filter(|(group, _)| *group == name && !group.is_empty())
        .map(|(group, version)| json!({ "groupVersion": group_version(group, version), "version": version }))
        .collect();
    let preferred = versions.first()?.clone();
    Some(json!({ "name": name, "versions": versions, "preferredVersion": preferred }))
}

/// `/api/v1` and `/apis/GROUP/VERSION`.
pub(super) fn resources(group: &str, version: &str) -> Option<Value> {
    let mut found = Vec::new();
    for kind in kinds(group, version) {
        let mut resource = json!({
            "name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced, "kind": kind.kind, "verbs": ALL,
        });
        for (field, words) in [("shortNames", kind.short_names), ("categories", kind.categories)] {
            if !words.is_empty() {
                resource[field] = json!(words);
            }
        }
        found.push(resource);
        found.extend(
            subresources(kind).map(|extra| flat(extra, &format!("{}/{}", extra.parent, extra.name), group)),
        );
        if kind.status {
            found.push(json!({
                "name": format!("{}/status", kind.plural), "singularName": "", "namespaced": kind.namespaced,
                "kind": kind.kind, "verbs": CHANGE,
            }));
        }
    }
    found.extend(reviews(group, version).map(|extra| flat(extra, extra.name, group)));
    (!found.is_empty()).then(|| {
        json!({
            "kind": "APIResourceList", "apiVersion": "v1",
            "groupVersion": group_version(group, version), "resources": found,
        })
    })
}

fn flat(extra: &Extra, name: &str, group: &str) -> Value {
    let mut resource = json!({
        "name": name, "singularName": "", "namespaced": extra.namespaced, "kind": extra.kind.2, "verbs": extra.verbs,
    });
    if extra.kind.0 != group {
        resource["group"] = extra.kind.0.into();
        resource["version"] = extra.kind.1.into();
    }
    resource
}
