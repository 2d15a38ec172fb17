//! Events: one storage in the core form, two views.

use serde_json::Value;

use crate::{
    error::Causes,
    json::{self, text},
};

/// Field names of `events.k8s.io` and of the stored core form.
pub(super) const RENAMES: &[(&str, &str)] = &[
    ("note", "message"),
    ("regarding", "involvedObject"),
    ("reportingController", "reportingComponent"),
    ("deprecatedCount", "count"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedSource", "source"),
];

pub(super) const SELECTABLE: &[&str] = &[
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "source",
    "type",
];

pub(super) fn default(event: &mut Value) {
    let reporter = text(event, "/source/component").to_owned();
    let map = json::map(event);
    if !reporter.is_empty() {
        json::default(map, "reportingComponent", reporter);
    }
}

pub(super) fn validate(event: &Value, causes: &mut Causes) {
    let (own, about) = (text(event, "/metadata/namespace"), text(event, "/involvedObject/namespace"));
    if !about.is_empty() && own != about {
        causes.invalid("involvedObject.namespace", &about.into(), "does not match event.namespace");
    }
}

pub(super) fn validate_new(event: &Value, causes: &mut Causes) {
    let (own, about) = (text(event, "/metadata/namespace"), text(event, "/regarding/namespace"));
    if !about.is_empty() && own != about {
        causes.invalid("regarding.namespace", &about.into(), "does not match event.namespace");
    }
    for field in ["reportingController", "reportingInstance", "reason", "action"] {
        if text(event, &format!("/{field}")).is_empty() {
            causes.required(field, "");
        }
    }
    if !matches!(text(event, "/type"), "Normal" | "Warning") {
        causes.unsupported("type", text(event, "/type"), &["Normal", "Warning"]);
    }
}
