//! Defaults and rules of the smaller kinds.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::Value;

use super::quantity;
use crate::{
    error::Causes,
    json::{self, flag, list, text},
    validate,
};

pub(super) fn default_namespace(namespace: &mut Value) {
    let name = text(namespace, "/metadata/name").to_owned();
    let metadata = json::map(namespace).entry("metadata").or_insert(Value::Null);
    json::object(metadata, "labels").insert("kubernetes.io/metadata.name".into(), name.into());
}

pub(super) fn create_namespace(namespace: &mut Value) {
    let finalizers = Value::Array(vec!["kubernetes".into()]);
    json::object(namespace, "spec").insert("finalizers".into(), finalizers);
    json::object(namespace, "status").insert("phase".into(), "Active".into());
}

pub(super) fn normalize_node(node: &mut Value) {
    for field in ["capacity", "allocatable"] {
        if let Some(map) = node.pointer_mut(&format!("/status/{field}")) {
            quantity::spell_out(map);
        }
    }
}

pub(super) fn validate_node(node: &Value, causes: &mut Causes) {
    let mut seen = std::collections::BTreeSet::new();
    for (at, taint) in list(node, "/spec/taints").iter().enumerate() {
        let field = |name: &str| format!("spec.taints[{at}].{name}");
        let (key, effect) = (text(taint, "/key"), text(taint, "/effect"));
        if let Err(why) = validate::qualified_name(key) {
            causes.invalid(field("key"), &key.into(), &why);
        }
        if let Err(why) = validate::label_value(text(taint, "/value")) {
            causes.invalid(field("value"), &taint["value"], &why);
        }
        if !super::pods::EFFECTS.contains(&effect) {
            causes.unsupported(field("effect"), effect, super::pods::EFFECTS);
        }
        if !seen.insert((key, effect)) {
            causes.duplicate(format!("spec.taints[{at}]"), key);
        }
    }
    for name in ["capacity", "allocatable"] {
        let path = format!("status.{name}");
        quantity::validate_map(node.pointer(&format!("/status/{name}")), &path, causes);
    }
}

/// Moves the write-only `stringData` into `data`.
pub(super) fn default_secret(secret: &mut Value) {
    let plain = json::map(secret).remove("stringData");
    if let Some(Value::Object(plain)) = plain {
        let data = json::object(secret, "data");
        for (key, value) in plain {
            let encoded = BASE64_STANDARD.encode(value.as_str().unwrap_or_default());
            data.insert(key, encoded.into());
        }
    }
    json::default(json::map(secret), "type", "Opaque");
}

fn validate_data(object: &Value, fields: &[&str], causes: &mut Causes) {
    let mut size = 0;
    for field in fields {
        for (key, value) in json::pairs(object, &format!("/{field}")) {
            size += value.len();
            let bad = key.len() > 253
                || matches!(key, "" | "." | "..")
                || !key.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c));
            if bad {
                let why = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'";
                causes.invalid(format!("{field}[{key}]"), &key.into(), why);
            }
        }
    }
    if size > (1 << 20) * 4 / 3 {
        causes.forbidden(fields[0], "Too long: may not be more than 1048576 bytes");
    }
}

pub(super) fn validate_config_map(map: &Value, causes: &mut Causes) {
    validate_data(map, &["data", "binaryData"], causes);
}

pub(super) fn validate_secret(secret: &Value, causes: &mut Causes) {
    validate_data(secret, &["data"], causes);
}

fn keep_immutable(old: &Value, new: &Value, fields: &[&str], causes: &mut Causes) {
    if !flag(old, "/immutable") {
        return;
    }
    if !flag(new, "/immutable") {
        causes.forbidden("immutable", "field is immutable when `immutable` is set");
    }
    for field in fields {
        if old.get(field) != new.get(field) {
            causes.forbidden(*field, "field is immutable when `immutable` is set");
        }
    }
}

pub(super) fn update_config_map(old: &Value, new: &Value, causes: &mut Causes) {
    keep_immutable(old, new, &["data", "binaryData"], causes);
}

pub(super) fn update_secret(old: &Value, new: &Value, causes: &mut Causes) {
    if old.get("type") != new.get("type") {
        causes.invalid("type", &new["type"], "field is immutable");
    }
    keep_immutable(old, new, &["data"], causes);
}
