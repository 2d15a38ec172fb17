//! The parts of the CRD schemas that types alone do not say: rules, patterns, list keys, and what the
//! generated document must not contain.

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::quantity;
use crate::{CocoonHibernation, CocoonSet};

/// Lower-case DNS label, of any length.
pub(crate) const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// Value of a Kubernetes label; may be empty.
pub(crate) const LABEL_VALUE: &str = "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$";

/// CEL rules on the spec of a CocoonSet.
pub(crate) fn set_rules() -> Value {
    json!([
        {
            "rule": "!has(self.hibernatePolicy) || self.hibernatePolicy != 'release' || \
                ((!has(self.agent.replicas) || self.agent.replicas == 0) && \
                (!has(self.toolboxes) || size(self.toolboxes) == 0))",
            "message": "hibernatePolicy release is for a main agent alone: set agent.replicas to 0 and remove toolboxes",
        },
        {
            "rule": "!has(oldSelf.snapshotCompatibilityClass) || (has(self.snapshotCompatibilityClass) && \
                self.snapshotCompatibilityClass == oldSelf.snapshotCompatibilityClass)",
            "message": "snapshotCompatibilityClass cannot be changed or removed once it is set",
        },
    ])
}

/// CEL rule on the pod reference of a CocoonHibernation.
pub(crate) fn pod_ref_rules() -> Value {
    json!([{ "rule": "self == oldSelf", "message": "podRef cannot be changed: make another CocoonHibernation" }])
}

/// Conditions, as Kubernetes itself describes them.
pub(crate) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "lastTransitionTime": { "type": "string", "format": "date-time" },
                "message": { "type": "string", "maxLength": 32768 },
                "observedGeneration": { "type": "integer", "format": "int64", "minimum": 0 },
                "reason": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                "type": {
                    "type": "string",
                    "maxLength": 316,
                    "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
                },
            },
        },
    })
}

/// CPU and memory of a VM; quantities may be numbers or texts.
pub(crate) fn resource_requirements(_: &mut SchemaGenerator) -> Schema {
    let quantities = json!({
        "type": "object",
        "additionalProperties": {
            "anyOf": quantity::kinds(),
            "pattern": quantity::PATTERN,
            "x-kubernetes-int-or-string": true,
        },
    });
    json_schema!({
        "type": "object",
        "properties": {
            "claims": {
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": { "name": { "type": "string" }, "request": { "type": "string" } },
                },
            },
            "limits": quantities,
            "requests": quantities,
        },
    })
}

/// Sources of environment variables.
pub(crate) fn env_from(_: &mut SchemaGenerator) -> Schema {
    let reference = json!({
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": { "name": { "type": "string", "default": "" }, "optional": { "type": "boolean" } },
    });
    json_schema!({
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "configMapRef": reference,
                "prefix": { "type": "string" },
                "secretRef": reference,
            },
        },
    })
}

/// Reads resources whose quantities may be numbers, as the schema allows.
pub(crate) fn resources<'de, D: Deserializer<'de>>(from: D) -> Result<ResourceRequirements, D::Error> {
    let mut value = Value::deserialize(from)?;
    if value.is_null() {
        return Ok(ResourceRequirements::default());
    }
    for list in ["limits", "requests"] {
        let Some(quantities) = value.get_mut(list).and_then(Value::as_object_mut) else { continue };
        for quantity in quantities.values_mut().filter(|quantity| quantity.is_number()) {
            *quantity = quantity.to_string().into();
        }
    }
    serde_json::from_value(value).map_err(serde::de::Error::custom)
}

/// The CocoonSet CRD.
pub fn cocoon_set_crd() -> CustomResourceDefinition {
    tidy(&CocoonSet::crd())
}

/// The CocoonHibernation CRD.
pub fn cocoon_hibernation_crd() -> CustomResourceDefinition {
    tidy(&CocoonHibernation::crd())
}

/// Takes out what schema generation adds and the contract does not have.
fn tidy(crd: &CustomResourceDefinition) -> CustomResourceDefinition {
    let mut value = serde_json::to_value(crd).unwrap_or_default();
    if let Some(versions) = value["spec"]["versions"].as_array_mut() {
        for version in versions {
            tidy_schema(&mut version["schema"]["openAPIV3Schema"]);
        }
    }
    // The value was a CRD a moment ago and only lost optional members; the fallback is that CRD.
    serde_json::from_value(value).unwrap_or_else(|_| crd.clone())
}

/// `nullable` goes: an explicit null is then dropped and defaulted, as with the Go types. A quantity gets
/// its two kinds back, which the structural rewriting takes away.
fn tidy_schema(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            if members.get("nullable") == Some(&Value::Bool(true)) {
                members.remove("nullable");
            }
            if members.get("x-kubernetes-int-or-string") == Some(&Value::Bool(true)) {
                members.insert("anyOf".to_owned(), quantity::kinds());
            }
            members.values_mut().for_each(tidy_schema);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy_schema),
        _ => {}
    }
}
