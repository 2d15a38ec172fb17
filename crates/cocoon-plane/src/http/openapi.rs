//! `/openapi/v3`: small documents with the paths, kinds and query parameters that a stock `kubectl` looks for.
//!
//! Schemas are open on purpose: the server itself validates (`fieldValidation`).

use http::{HeaderMap, header};
use serde_json::{Map, Value, json};

use super::discovery::group_versions;
use crate::{
    error::{respond, respond_json},
    plane::Response,
    resources::{KINDS, Kind},
};

/// Changes when the documents do, so that clients may cache them.
const HASH: &str = concat!("cocoon-", env!("CARGO_PKG_VERSION"), "-3");

fn place(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

/// `/openapi/v2`, which kubectl reads for a `List` alone: a document without definitions, so that it leaves
/// validation to the server.
pub(super) fn version_2(headers: &HeaderMap) -> Response {
    const PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if accept.contains("proto-openapi.spec.v2") {
        // swagger (field 1) and info (field 2) with a title (field 1).
        return respond(200, PROTOBUF, &b"\x0a\x032.0\x12\x0c\x0a\x0aKubernetes"[..]);
    }
    let info = json!({ "title": "Kubernetes", "version": env!("CARGO_PKG_VERSION") });
    respond_json(200, &json!({ "swagger": "2.0", "info": info, "paths": {}, "definitions": {} }))
}

/// Paths of all documents.
pub(super) fn index() -> Value {
    let paths: Map<String, Value> = group_versions()
        .into_iter()
        .map(|(group, version)| {
            let place = place(group, version);
            let url = format!("/openapi/v3/{place}?hash={HASH}");
            (place, json!({ "serverRelativeURL": url }))
        })
        .collect();
    json!({ "paths": paths })
}

/// The document of one group version.
pub(super) fn document(words: &[&str]) -> Option<Value> {
    let wanted = words.join("/");
    let (group, version) =
        group_versions().into_iter().find(|(group, version)| place(group, version) == wanted)?;
    let mut paths = Map::new();
    let mut schemas = Map::new();
    for kind in KINDS.iter().filter(|kind| kind.group == group && kind.version == version) {
        let middle = if kind.namespaced { "namespaces/{namespace}/" } else { "" };
        let collection = format!("/{wanted}/{middle}{}", kind.plural);
        paths.insert(format!("{collection}/{{name}}"), object_path(kind, &["get", "put", "patch", "delete"]));
        if kind.status {
            paths
                .insert(format!("{collection}/{{name}}/status"), object_path(kind, &["get", "put", "patch"]));
        }
        paths.insert(collection, object_path(kind, &["get", "post", "delete"]));
        schemas.insert(schema_name(kind), schema(kind));
    }
    Some(json!({
        "openapi": "3.0.0",
        "info": { "title": "Kubernetes", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "components": { "schemas": schemas },
    }))
}

fn schema_name(kind: &Kind) -> String {
    let group = if kind.group.is_empty() { "core" } else { kind.group.split('.').next().unwrap_or_default() };
    format!("io.k8s.api.{group}.{}.{}", kind.version, kind.kind)
}

fn gvk(kind: &Kind) -> Value {
    json!({ "group": kind.group, "version": kind.version, "kind": kind.kind })
}

/// What `kubectl explain` says; validation needs none of it.
fn schema(kind: &Kind) -> Value {
    const REFERENCE: &str = "as in https://kubernetes.io/docs/reference/kubernetes-api/";
    let open = |what: &str| {
        let description =
            format!("{what} of a {}, {REFERENCE}; this server does not list its fields", kind.kind);
        json!({ "type": "object", "description": description, "x-kubernetes-preserve-unknown-fields": true })
    };
    let mut properties = json!({
        "apiVersion": { "type": "string", "description": "group and version" },
        "kind": { "type": "string", "description": "the kind" },
        "metadata": open("metadata"),
    });
    if kind.status {
        properties["spec"] = open("spec");
        properties["status"] = open("status");
    }
    json!({
        "type": "object",
        "description": format!(
            "{}, {REFERENCE}. This server validates it but publishes no schema, so `kubectl explain` ends here.",
            kind.kind
        ),
        "properties": properties,
        "x-kubernetes-preserve-unknown-fields": true,
        "x-kubernetes-group-version-kind": [gvk(kind)],
    })
}

fn object_path(kind: &Kind, methods: &[&str]) -> Value {
    let path =
        methods.iter().map(|method| ((*method).to_owned(), operation(method, kind.plural, &gvk(kind))));
    Value::Object(path.collect())
}

fn operation(method: &str, what: &str, gvk: &Value) -> Value {
    let parameter = |name: &str| json!({ "name": name, "in": "query", "schema": { "type": "string" } });
    let names: &[&str] = match method {
        "get" => &["pretty"],
        "post" | "put" => &["pretty", "dryRun", "fieldManager", "fieldValidation"],
        "patch" => &["pretty", "dryRun", "fieldManager", "fieldValidation", "force"],
        _ => &["pretty", "dryRun", "gracePeriodSeconds", "propagationPolicy"],
    };
    json!({
        "description": format!("{method} {what}"),
        "parameters": names.iter().map(|name| parameter(name)).collect::<Vec<_>>(),
        "responses": { "200": { "description": "OK" } },
        "x-kubernetes-action": method,
        "x-kubernetes-group-version-kind": gvk,
    })
}
