//! CocoonSet: one main agent, its forks, and the toolboxes beside them.

// The lint takes the words that kube's printer columns repeat for duplicates.
#![allow(clippy::duplicated_attributes)]

use k8s_openapi::api::core::v1::{EnvFromSource, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;
use crate::{
    AgentMode, Backend, CocoonSetPhase, ConnType, HibernatePolicy, OSType, SnapshotPolicy, ToolboxMode,
    schema,
};

/// What a CocoonSet should be.
#[derive(CustomResource, Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "cocoonset.cocoonstack.io",
    version = "v1",
    kind = "CocoonSet",
    plural = "cocoonsets",
    namespaced,
    status = "CocoonSetStatus",
    derive = "PartialEq",
    derive = "Default",
    shortname = "cs",
    shortname = "cocoonsets",
    category = "cocoon",
    doc = "A main agent VM, the sub-agents forked from it, and the toolboxes beside them.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyAgents"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desiredAgents"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = schema::set_rules()))]
pub struct CocoonSetSpec {
    /// Hibernate every managed VM and keep it so.
    #[serde(default, skip_serializing_if = "is_false")]
    #[schemars(extend("default" = false))]
    pub suspend: bool,
    /// Which VMs are saved as `latest` when their pod is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "SnapshotPolicy", extend("default" = "always"))]
    pub snapshot_policy: Option<SnapshotPolicy>,
    /// What happens to the pods' seats while the set is suspended. `release` is for a main agent alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "HibernatePolicy", extend("default" = "retain"))]
    pub hibernate_policy: Option<HibernatePolicy>,
    /// Pool of nodes the pods go to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String", extend("default" = "default"))]
    pub node_pool: Option<String>,
    /// Certified CPU class that every pod of the set must run on; cannot be changed once set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String", length(max = 63), regex(pattern = schema::LABEL_VALUE))]
    pub snapshot_compatibility_class: Option<String>,
    /// Node the main agent must run on. Changing it migrates the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub node_name: Option<String>,
    /// The agents.
    pub agent: AgentSpec,
    /// VMs beside the agents. Names are unique, and no integers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub toolboxes: Vec<ToolboxSpec>,
}

/// The agents of a set: one main agent and `replicas` forks of it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentSpec {
    /// Number of sub-agents; the main agent always comes on top.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub replicas: i32,
    /// Image (mode run) or snapshot (mode clone) the main agent comes from.
    #[schemars(length(min = 1))]
    pub image: String,
    /// How the main agent comes to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "AgentMode", extend("default" = "clone"))]
    pub mode: Option<AgentMode>,
    /// Sources of environment variables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::env_from")]
    pub env_from: Vec<EnvFromSource>,
    /// Service account of the agents' pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub service_account_name: Option<String>,
    /// Options of the VM.
    #[serde(flatten)]
    pub vm: VmOptions,
}

/// One VM beside the agents.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ToolboxSpec {
    /// Name within the set; the pod is called `<set>-<name>`.
    #[schemars(length(min = 1), regex(pattern = schema::DNS_LABEL))]
    pub name: String,
    /// Image or snapshot; needed unless the mode is static.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub image: Option<String>,
    /// How the VM comes to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "ToolboxMode", extend("default" = "run"))]
    pub mode: Option<ToolboxMode>,
    /// Address of a static VM.
    #[serde(rename = "staticIP", default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub static_ip: Option<String>,
    /// Id of a static VM.
    #[serde(rename = "staticVMID", default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub static_vm_id: Option<String>,
    /// VNC port of a static VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i32", range(min = 0, max = 65535))]
    pub vnc_port: Option<i32>,
    /// Options of the VM.
    #[serde(flatten)]
    pub vm: VmOptions,
}

/// Options that agents and toolboxes share; they stand inline in both.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VmOptions {
    /// Operating system family of the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "OSType", extend("default" = "linux"))]
    pub os: Option<OSType>,
    /// Hypervisor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Backend", extend("default" = "cloud-hypervisor"))]
    pub backend: Option<Backend>,
    /// Protocol by which a person connects; inferred when unset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "ConnType")]
    pub conn_type: Option<ConnType>,
    /// Network the VM is attached to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub network: Option<String>,
    /// Pull the image even when a copy is on the node.
    #[serde(default, skip_serializing_if = "is_false")]
    pub force_pull: bool,
    /// No O_DIRECT on writable disks (cloud-hypervisor only).
    #[serde(rename = "noDirectIO", default, skip_serializing_if = "is_false")]
    pub no_direct_io: bool,
    /// TCP port that answers once the VM is ready; replaces the ICMP check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i32", range(min = 0, max = 65535))]
    pub probe_port: Option<i32>,
    /// Size of the root volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Quantity")]
    pub storage: Option<Quantity>,
    /// CPU and memory.
    #[serde(default, deserialize_with = "schema::resources", skip_serializing_if = "no_resources")]
    #[schemars(schema_with = "schema::resource_requirements")]
    pub resources: ResourceRequirements,
}

/// How a CocoonSet is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CocoonSetStatus {
    /// Generation of the spec this status was derived from.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub observed_generation: i64,
    /// Where the set stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "CocoonSetPhase")]
    pub phase: Option<CocoonSetPhase>,
    /// Agents whose pod is ready.
    #[serde(default)]
    pub ready_agents: i32,
    /// Agents there should be: the main agent and `replicas`.
    #[serde(default)]
    pub desired_agents: i32,
    /// Toolboxes whose pod is ready.
    #[serde(default)]
    pub ready_toolboxes: i32,
    /// Toolboxes there should be.
    #[serde(default)]
    pub desired_toolboxes: i32,
    /// Each agent, main first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["slot"]))]
    pub agents: Vec<AgentStatus>,
    /// Each toolbox, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub toolboxes: Vec<ToolboxStatus>,
    /// Conditions `Ready` and `Progressing`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// The pod and VM of a member of a set. Its fields stand among those of the member.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VmStatus {
    /// Its pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod_name: String,
    /// Its VM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub vm_name: String,
    /// Engine id of its VM.
    #[serde(rename = "vmID", default, skip_serializing_if = "String::is_empty")]
    pub vm_id: String,
    /// Address.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ip: String,
    /// Phase of its pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub phase: String,
}

/// How one agent is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// Slot; 0 is the main agent.
    pub slot: i32,
    /// `main` or `sub-agent`.
    pub role: String,
    /// Its pod and VM.
    #[serde(flatten)]
    pub vm: VmStatus,
    /// VM it was forked from.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub forked_from: String,
}

/// How one toolbox is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ToolboxStatus {
    /// Name within the set.
    pub name: String,
    /// Its pod and VM.
    #[serde(flatten)]
    pub vm: VmStatus,
    /// Protocol by which a person connects.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub conn_type: String,
    /// VNC port of a static VM.
    #[serde(default, skip_serializing_if = "is_zero_port")]
    pub vnc_port: i32,
}

fn is_false(flag: &bool) -> bool {
    !*flag
}

fn is_zero(number: &i64) -> bool {
    *number == 0
}

fn is_zero_port(port: &i32) -> bool {
    *port == 0
}

fn no_resources(resources: &ResourceRequirements) -> bool {
    *resources == ResourceRequirements::default()
}
