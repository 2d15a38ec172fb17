//! In which shape a client wants objects, and making that shape.
//!
//! Entry points: [`View::of`] and [`Presenter`]. Protobuf is not served: a client that also takes JSON
//! gets JSON, one that takes nothing else gets 406.

use bytes::Bytes;
use http::{HeaderMap, header};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::params::Params;
use crate::{error::ApiError, resources::Kind, store::Object};

/// A shape of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    /// Whole objects.
    Object,
    /// `meta.k8s.io/v1` Table.
    Table(Include),
    /// Metadata alone.
    Partial,
}

/// What a table row carries of its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Include {
    Nothing,
    Metadata,
    Object,
}

/// One media range of an Accept header, with its parameters.
fn ranges(headers: &HeaderMap) -> Vec<(String, Vec<(String, String)>)> {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let ranges = values.flat_map(|value| value.split(','));
    ranges
        .map(|range| {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default().to_lowercase();
            let pairs = parts
                .filter_map(|part| part.split_once('='))
                .map(|(k, v)| (k.trim().into(), v.trim().into()));
            (media, pairs.collect())
        })
        .filter(|(media, _)| !media.is_empty())
        .collect()
}

fn takes_json(media: &str) -> bool {
    matches!(media, "application/json" | "application/*" | "*/*")
}

/// Whether the client takes `as` (with its group and version) as JSON before plain JSON.
pub(crate) fn wants(headers: &HeaderMap, group: &str, version: &str, shape: &str) -> bool {
    let plain = |pairs: &[(String, String)]| !pairs.iter().any(|(key, _)| key == "as");
    let asked = |pairs: &[(String, String)]| {
        let has = |key: &str, wanted: &str| pairs.iter().any(|(k, v)| k == key && v == wanted);
        has("as", shape) && has("g", group) && has("v", version)
    };
    ranges(headers)
        .into_iter()
        .filter(|(media, _)| takes_json(media))
        .take_while(|(_, pairs)| !plain(pairs))
        .any(|(_, pairs)| asked(&pairs))
}

/// 406 unless the client takes JSON.
pub(crate) fn check_accept(headers: &HeaderMap) -> Result<(), ApiError> {
    let ranges = ranges(headers);
    if ranges.is_empty() || ranges.iter().any(|(media, _)| takes_json(media)) {
        return Ok(());
    }
    let message = "only the following media types are accepted: application/json";
    Err(ApiError::new(406, "NotAcceptable", message))
}

impl View {
    pub(crate) fn of(headers: &HeaderMap, params: &Params) -> Result<Self, ApiError> {
        check_accept(headers)?;
        let include = match params.get("includeObject") {
            "None" => Include::Nothing,
            "Object" => Include::Object,
            _ => Include::Metadata,
        };
        let meta = |shape| wants(headers, "meta.k8s.io", "v1", shape);
        Ok(if meta("Table") {
            Self::Table(include)
        } else if meta("PartialObjectMetadata") || meta("PartialObjectMetadataList") {
            Self::Partial
        } else {
            Self::Object
        })
    }
}

/// Makes answers of one kind in one shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Presenter {
    pub(crate) kind: &'static Kind,
    pub(crate) view: View,
    pub(crate) now: Timestamp,
}

impl Presenter {
    /// One object as an answer of its own; `headed` tables bring their column definitions.
    pub(crate) fn one(&self, object: &Object, headed: bool) -> Bytes {
        match self.view {
            View::Object if self.kind.is_stored_form() => object.bytes.clone(),
            View::Object => text(&self.kind.shown(object.value())),
            View::Partial => text(&partial(&object.value())),
            View::Table(_) => {
                let columns = if headed { self.columns() } else { json!(null) };
                text(&json!({
                    "kind": "Table", "apiVersion": "meta.k8s.io/v1",
                    "metadata": { "resourceVersion": object.revision.to_string() },
                    "columnDefinitions": columns, "rows": [self.row(object)],
                }))
            }
        }
    }

    /// One object inside a list.
    pub(crate) fn item(&self, object: &Object) -> Bytes {
        match self.view {
            View::Table(_) => text(&self.row(object)),
            View::Object | View::Partial => self.one(object, false),
        }
    }

    /// What stands before and after the items of a list.
    pub(crate) fn list_frame(&self, metadata: &Value) -> (String, &'static str) {
        let head = match self.view {
            View::Object => format!(
                "{{\"kind\":\"{}List\",\"apiVersion\":\"{}\",\"metadata\":{metadata},\"items\":[",
                self.kind.kind,
                self.kind.api_version()
            ),
            View::Partial => format!(
                "{{\"kind\":\"PartialObjectMetadataList\",\"apiVersion\":\"meta.k8s.io/v1\",\"metadata\":{metadata},\
                 \"items\":["
            ),
            View::Table(_) => format!(
                "{{\"kind\":\"Table\",\"apiVersion\":\"meta.k8s.io/v1\",\"metadata\":{metadata},\
                 \"columnDefinitions\":{},\"rows\":[",
                self.columns()
            ),
        };
        (head, "]}\n")
    }

    /// The object of a bookmark.
    pub(crate) fn bookmark(&self, revision: u64, initial_end: bool) -> Value {
        let mut metadata = json!({ "resourceVersion": revision.to_string(), "creationTimestamp": null });
        if initial_end {
            metadata["annotations"] = json!({ "k8s.io/initial-events-end": "true" });
        }
        match self.view {
            View::Table(_) => json!({
                "kind": "Table", "apiVersion": "meta.k8s.io/v1",
                "metadata": { "resourceVersion": revision.to_string() }, "columnDefinitions": null, "rows": [{
                    "cells": [], "object": { "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata },
                }],
            }),
            View::Partial => {
                json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata })
            }
            View::Object => self.bare_bookmark(&metadata),
        }
    }

    /// Typed clients read a bookmark as an object of the kind: it has the fields that types demand.
    fn bare_bookmark(&self, metadata: &Value) -> Value {
        let mut object = json!({ "metadata": metadata });
        self.kind.stamp(&mut object);
        for (table, field, value) in [
            ("pods", "spec", json!({ "containers": null })),
            ("pods", "status", json!({})),
            ("nodes", "spec", json!({})),
            ("nodes", "status", json!({})),
            ("namespaces", "spec", json!({})),
            ("namespaces", "status", json!({})),
            ("leases.coordination.k8s.io", "spec", json!({})),
        ] {
            if self.kind.table == table {
                object[field] = value;
            }
        }
        if self.kind.table == "events" {
            object[if self.kind.is_stored_form() { "involvedObject" } else { "regarding" }] = json!({});
        }
        object
    }

    fn columns(&self) -> Value {
        let definitions = self.kind.columns.iter().map(|column| {
            json!({
                "name": column.name, "type": column.kind, "format": column.format,
                "description": column.about, "priority": i32::from(column.wide),
            })
        });
        definitions.collect()
    }

    fn row(&self, object: &Object) -> Value {
        let value = object.value();
        let mut row = json!({ "cells": (self.kind.hooks.row)(&value, self.now) });
        match self.view {
            View::Table(Include::Object) => row["object"] = self.kind.shown(value),
            View::Table(Include::Metadata) => row["object"] = partial(&value),
            _ => {}
        }
        row
    }
}

fn partial(value: &Value) -> Value {
    json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": value["metadata"] })
}

fn text(value: &Value) -> Bytes {
    Bytes::from(value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(accept: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::ACCEPT, accept.parse().unwrap())])
    }

    #[test]
    fn the_accept_header_picks_the_shape() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        for (accept, wanted) in [
            (table, Some(View::Table(Include::Metadata))),
            ("application/json", Some(View::Object)),
            ("application/json,application/json;as=Table;v=v1;g=meta.k8s.io", Some(View::Object)),
            ("application/vnd.kubernetes.protobuf, application/json", Some(View::Object)),
            ("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", Some(View::Partial)),
            ("application/json;as=Table;v=v1beta1;g=meta.k8s.io", Some(View::Object)),
            ("*/*", Some(View::Object)),
            ("application/vnd.kubernetes.protobuf", None),
            ("text/html", None),
        ] {
            assert_eq!(View::of(&headers(accept), &Params::default()).ok(), wanted, "{accept}");
        }
    }
}
