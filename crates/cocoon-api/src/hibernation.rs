//! CocoonHibernation: hibernate or wake one pod.

// The lint takes the words that kube's printer columns repeat for duplicates.
#![allow(clippy::duplicated_attributes)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{CocoonHibernationPhase, HibernationDesire, schema};

/// Which pod, and what is wanted of it.
#[derive(CustomResource, Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "cocoonset.cocoonstack.io",
    version = "v1",
    kind = "CocoonHibernation",
    plural = "cocoonhibernations",
    namespaced,
    status = "CocoonHibernationStatus",
    derive = "PartialEq",
    shortname = "ch",
    shortname = "cocoonhibernations",
    category = "cocoon",
    doc = "Asks for one pod's VM to be hibernated or woken.",
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.podRef.name"),
    printcolumn(name = "Desire", type_ = "string", json_path = ".spec.desire"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct CocoonHibernationSpec {
    /// The pod, in the same namespace; cannot be changed.
    #[schemars(extend("x-kubernetes-validations" = schema::pod_ref_rules()))]
    pub pod_ref: PodReference,
    /// What is wanted.
    pub desire: HibernationDesire,
}

/// A pod in the same namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodReference {
    /// Name of the pod.
    #[schemars(length(min = 1))]
    pub name: String,
}

/// How the hibernation stands.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CocoonHibernationStatus {
    /// Generation of the spec this status was derived from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i64")]
    pub observed_generation: Option<i64>,
    /// Where it stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "CocoonHibernationPhase")]
    pub phase: Option<CocoonHibernationPhase>,
    /// VM the pod had when it was last seen.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub vm_name: String,
    /// Condition `Ready`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}
