//! `/openapi/v3`: small documents with the paths, kinds and query parameters that a stock `kubectl` looks for.
//!
//! Schemas are open on purpose: the server itself validates (`fieldValidation`).

use serde_json::{Map, Value, json};

use super::discovery::group_versions;
use crate::resources::{KINDS, Kind};

/// Changes when the documents do, so that clients may cache them.
const HASH: &str = concat!("cocoon-", env!("CARGO_PKG_VERSION"), "-1");

fn place(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
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

fn schema(kind: &Kind) -> Value {
    json!({
        "type": "object",
        "description": format!("{}; this server publishes no schema, it validates by itself", kind.kind),
        "properties": {
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
        },
        "x-kubernetes-preserve-unknown-fields": true,
        "x-kubernetes-group-version-kind": [gvk(kind)],
    })
}

fn object_path(kind: &Kind, methods: &[&str]) -> Value {
    let mut path = Map::new();
    let parameter =
        |name: &str, kind: &str| json!({ "name": name, "in": kind, "schema": { "type": "string" } });
    for method in methods {
        let mut parameters = vec![parameter("pretty", "query")];
        let (action, names): (&str, &[&str]) = match *method {
            "get" => ("get", &[]),
            "post" => ("post", &["dryRun", "fieldManager", "fieldValidation"]),
            "put" => ("put", &["dryRun", "fieldManager", "fieldValidation"]),
            "patch" => ("patch", &["dryRun", "fieldManager", "fieldValidation", "force"]),
            _ => ("delete", &["dryRun", "gracePeriodSeconds", "propagationPolicy"]),
        };
        parameters.extend(names.iter().map(|name| parameter(name, "query")));
        let operation = json!({
            "description": format!("{action} {}", kind.plural),
            "parameters": parameters,
            "responses": { "200": { "description": "OK" } },
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": gvk(kind),
        });
        path.insert((*method).to_owned(), operation);
    }
    Value::Object(path)
}
