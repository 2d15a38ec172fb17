//! The metadata contract (cocoon-meta, and the vocabularies of cocoon-api).

use anyhow::{Context, Result};
use cocoon_api::{
    AgentMode, AgentSpec, Backend, ConnType, HibernatePolicy, HibernationDesire, OSType, SnapshotPolicy,
    ToolboxMode, ToolboxSpec,
};
use cocoon_meta::{self as contract, LifecycleState, LifecycleStatus, Role, VmRuntime, VmSpec, keys};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use serde_json::{Map, Value, json};

use super::checkers::unknown_function;
use super::folder::Vector;

// ---- annotations -------------------------------------------------------------------------------

pub(crate) fn annotations(vector: &Vector) -> Result<Value> {
    let mut metadata = ObjectMeta { annotations: vector.parse("annotations")?, ..ObjectMeta::default() };
    let object = &mut metadata;
    match vector.function.as_str() {
        "vmspec_parse" => return Ok(spec_to_json(&VmSpec::parse(object))),
        "vmspec_apply" => spec_from_json(&vector.input["spec"]).apply(object),
        "vmruntime_parse" => return Ok(runtime_to_json(&VmRuntime::parse(object))),
        "vmruntime_apply" => runtime_from_json(&vector.input["runtime"])?.apply(object),
        "hibernate_read" => return Ok(contract::HibernateState::read(object).0.into()),
        "hibernate_set" => contract::HibernateState(true).apply(object),
        "hibernate_clear" => contract::HibernateState(false).apply(object),
        "restore_from_hibernate_read" => return Ok(contract::RestoreFromHibernate::read(object).0.into()),
        "restore_from_hibernate_set" => contract::RestoreFromHibernate(true).apply(object),
        "keep_snapshot_on_delete_read" => return Ok(contract::KeepSnapshotOnDelete::read(object).0.into()),
        "keep_snapshot_on_delete_set" => contract::KeepSnapshotOnDelete(true).apply(object),
        "lifecycle_apply" => lifecycle_from_json(&vector.input["status"])?.apply(object),
        "lifecycle_read" => return Ok(lifecycle_read(object, vector)),
        "lifecycle_merge_patch" => return lifecycle_patch(vector),
        "stamp_generation" => {
            let generation = vector.text("generation").parse().context("generation")?;
            contract::stamp_cocoon_set_generation(object, generation);
        }
        "from_agent_spec" => return from_agent_spec(vector),
        "from_toolbox_spec" => return from_toolbox_spec(vector),
        _ => return unknown_function(vector),
    }
    Ok(json!(metadata.annotations))
}

fn spec_from_json(value: &Value) -> VmSpec {
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let flag = |name: &str| value[name].as_bool().unwrap_or_default();
    VmSpec {
        vm_name: text("vm_name"),
        image: text("image"),
        mode: text("mode"),
        os: text("os"),
        storage: text("storage"),
        snapshot_policy: text("snapshot_policy"),
        network: text("network"),
        fork_from: text("fork_from"),
        managed: flag("managed"),
        force_pull: flag("force_pull"),
        no_direct_io: flag("no_direct_io"),
        conn_type: text("conn_type"),
        backend: text("backend"),
        probe_port: text("probe_port"),
    }
}

fn spec_to_json(spec: &VmSpec) -> Value {
    json!({
        "vm_name": spec.vm_name,
        "image": spec.image,
        "mode": spec.mode,
        "os": spec.os,
        "storage": spec.storage,
        "snapshot_policy": spec.snapshot_policy,
        "network": spec.network,
        "fork_from": spec.fork_from,
        "managed": spec.managed,
        "force_pull": spec.force_pull,
        "no_direct_io": spec.no_direct_io,
        "conn_type": spec.conn_type,
        "backend": spec.backend,
        "probe_port": spec.probe_port,
    })
}

fn runtime_from_json(value: &Value) -> Result<VmRuntime> {
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let vnc_port = value["vnc_port"].as_i64().unwrap_or_default();
    Ok(VmRuntime { vm_id: text("vmid"), ip: text("ip"), vnc_port: vnc_port.try_into().context("vnc_port")? })
}

fn runtime_to_json(runtime: &VmRuntime) -> Value {
    json!({ "vmid": runtime.vm_id, "ip": runtime.ip, "vnc_port": runtime.vnc_port })
}

fn lifecycle_from_json(value: &Value) -> Result<LifecycleStatus> {
    let text = |name: &str| value[name].as_str().unwrap_or_default();
    Ok(LifecycleStatus {
        state: text("state").into(),
        observed_generation: text("observed_generation").parse().context("observed_generation")?,
        message: text("message").to_owned(),
    })
}

/// The vectors hide the message behind `true`; ours must then be the one of the input.
fn lifecycle_read(object: &ObjectMeta, vector: &Vector) -> Value {
    let status = LifecycleStatus::read(object);
    let given = vector.input["annotations"][keys::ANNOTATION_LIFECYCLE_STATE_MESSAGE].as_str();
    let message = match status.message.as_str() {
        "" => json!(""),
        message if Some(message) == given => json!(true),
        other => json!(other),
    };
    json!({
        "cocoonset_generation": contract::read_cocoon_set_generation(object).to_string(),
        "status": {
            "state": status.state.as_str(),
            "observed_generation": status.observed_generation.to_string(),
            "message": message,
        },
    })
}

/// The body is compared as JSON: the originals escape `<`, `>` and `&`, which means the same.
fn lifecycle_patch(vector: &Vector) -> Result<Value> {
    let status = lifecycle_from_json(&vector.input["status"])?;
    let expected = vector.output["body"].as_str().unwrap_or_default();
    let ours = status.merge_patch();
    let same = serde_json::from_str::<Value>(expected).ok().as_ref() == Some(&ours);
    Ok(json!({
        "body": if same { expected.to_owned() } else { ours.to_string() },
        "snapshot_key": status.comparison_key(),
        "terminal": status.state.is_terminal(),
    }))
}

fn from_agent_spec(vector: &Vector) -> Result<Value> {
    let agent: AgentSpec = vector.parse("agent")?;
    let policy = SnapshotPolicy::from(vector.text("snapshot_policy"));
    Ok(with_annotations(&VmSpec::from_agent_spec(
        &agent,
        vector.text("vm_name"),
        vector.text("fork_from"),
        Some(&policy),
    )))
}

fn from_toolbox_spec(vector: &Vector) -> Result<Value> {
    let toolbox: ToolboxSpec = vector.parse("toolbox")?;
    let policy = SnapshotPolicy::from(vector.text("snapshot_policy"));
    Ok(with_annotations(&VmSpec::from_toolbox_spec(&toolbox, vector.text("vm_name"), Some(&policy))))
}

fn with_annotations(spec: &VmSpec) -> Value {
    let mut metadata = ObjectMeta::default();
    spec.apply(&mut metadata);
    json!({ "spec": spec_to_json(spec), "annotations": metadata.annotations })
}

// ---- policy ------------------------------------------------------------------------------------

pub(crate) fn policy(vector: &Vector) -> Result<Value> {
    match vector.function.as_str() {
        "should_snapshot" => {
            // Roles are a closed set with us; a text that is none of them is not the main agent.
            let role = Role::parse(vector.text("role")).unwrap_or(Role::Toolbox);
            Ok(contract::should_snapshot_vm(&with_policy(vector), role).into())
        }
        "should_snapshot_pod" => {
            let pod = owned_pod(vector.text("ns"), vector.text("owner_set"));
            let role = contract::role_for_pod(&pod, vector.text("vm"));
            let snapshot = contract::should_snapshot_vm(&with_policy(vector), role);
            Ok(json!({ "role": role.as_str(), "snapshot": snapshot }))
        }
        "connection_type" => {
            let (os, port) = (vector.text("os"), vector.flag("has_vnc_port"));
            Ok(contract::connection_type(os, port, vector.text("override")).into())
        }
        "has_cocoon_toleration" => {
            let pod =
                pod(json!({ "spec": { "tolerations": vector.input["tolerations"], "containers": [] } }))?;
            Ok(contract::has_cocoon_toleration_key(&pod).into())
        }
        "pod_predicates" => {
            let pod = pod(json!({ "status": vector.input["status"] }))?;
            Ok(json!({
                "container_running": contract::is_container_running(&pod),
                "ready": contract::is_pod_ready(&pod),
                "terminal": contract::is_pod_terminal(&pod),
            }))
        }
        "pod_node_pool" => {
            let pod = pod(json!({
                "metadata": { "annotations": vector.input["annotations"], "labels": vector.input["labels"] },
                "spec": { "nodeSelector": vector.input["node_selector"], "containers": [] },
            }))?;
            Ok(contract::pod_node_pool(&pod).into())
        }
        "lifecycle_is_terminal" => Ok(LifecycleState::from(vector.text("state")).is_terminal().into()),
        "enums" => Ok(enums(vector.text("value"))),
        "ready_condition" => ready_condition(vector),
        "constant" => {
            constant(vector.text("name")).map(Value::from).map_or_else(|| unknown_constant(vector), Ok)
        }
        _ => unknown_function(vector),
    }
}

fn with_policy(vector: &Vector) -> VmSpec {
    VmSpec { snapshot_policy: vector.text("policy").to_owned(), ..VmSpec::default() }
}

fn pod(value: Value) -> Result<Pod> {
    serde_json::from_value(value).context("the input is no pod")
}

fn owned_pod(namespace: &str, set: &str) -> Pod {
    let owner =
        OwnerReference { kind: keys::KIND_COCOON_SET.into(), name: set.into(), ..OwnerReference::default() };
    let mut pod = Pod::default();
    pod.metadata.namespace = Some(namespace.to_owned());
    pod.metadata.owner_references = (!set.is_empty()).then(|| vec![owner]);
    pod
}

macro_rules! enum_answers {
    ($text:expr, $($name:literal: $kind:ty $(, $default:ident)?;)+) => {{
        let mut answers = Map::new();
        $(
            let value = <$kind>::from($text);
            #[allow(unused_mut)]
            let mut answer = json!({ "valid": value.is_valid() });
            $( answer["default"] = value.$default().as_str().into(); )?
            answers.insert($name.to_owned(), answer);
        )+
        Value::Object(answers)
    }};
}

fn enums(text: &str) -> Value {
    enum_answers! { text,
        "agent_mode": AgentMode, or_default;
        "backend": Backend, or_default;
        "conn_type": ConnType;
        "hibernate_policy": HibernatePolicy, or_default;
        "hibernation_desire": HibernationDesire;
        "os": OSType, or_default;
        "snapshot_policy": SnapshotPolicy, or_default;
        "toolbox_mode": ToolboxMode, or_default;
    }
}

/// The originals leave the time open, and the message is hidden behind `true`.
fn ready_condition(vector: &Vector) -> Result<Value> {
    let generation = vector.input["generation"].as_i64().unwrap_or_default();
    let message = vector.text("message");
    let epoch: Time = serde_json::from_value(json!("1970-01-01T00:00:00Z"))?;
    let condition =
        cocoon_api::ready_condition(generation, vector.text("status"), vector.text("reason"), message, epoch);
    let mut answer = serde_json::to_value(condition)?;
    answer["lastTransitionTime"] = Value::Null;
    if !message.is_empty() && answer["message"] == message {
        answer["message"] = true.into();
    }
    Ok(answer)
}

fn unknown_constant<T>(vector: &Vector) -> Result<T> {
    anyhow::bail!("no constant of ours has the name {:?}", vector.text("name"))
}

fn constant(name: &str) -> Option<&'static str> {
    Some(match name {
        "KindCocoonSet" => keys::KIND_COCOON_SET,
        "TolerationKey" => keys::TOLERATION_KEY,
        "LabelCocoonSet" => keys::LABEL_COCOON_SET,
        "LabelRole" => keys::LABEL_ROLE,
        "LabelSlot" => keys::LABEL_SLOT,
        "LabelNodePool" => keys::LABEL_NODE_POOL,
        "DefaultNodePool" => keys::DEFAULT_NODE_POOL,
        "LabelSnapshotCompatibilityClass" => keys::LABEL_SNAPSHOT_COMPATIBILITY_CLASS,
        "AnnotationMode" => keys::ANNOTATION_MODE,
        "AnnotationImage" => keys::ANNOTATION_IMAGE,
        "AnnotationOS" => keys::ANNOTATION_OS,
        "AnnotationStorage" => keys::ANNOTATION_STORAGE,
        "AnnotationManaged" => keys::ANNOTATION_MANAGED,
        "AnnotationSnapshotPolicy" => keys::ANNOTATION_SNAPSHOT_POLICY,
        "AnnotationNetwork" => keys::ANNOTATION_NETWORK,
        "AnnotationForcePull" => keys::ANNOTATION_FORCE_PULL,
        "AnnotationCocoonSetGeneration" => keys::ANNOTATION_COCOON_SET_GENERATION,
        "AnnotationHibernatedOnNode" => keys::ANNOTATION_HIBERNATED_ON_NODE,
        "AnnotationVMID" => keys::ANNOTATION_VM_ID,
        "AnnotationVMName" => keys::ANNOTATION_VM_NAME,
        "AnnotationIP" => keys::ANNOTATION_IP,
        "AnnotationVNCPort" => keys::ANNOTATION_VNC_PORT,
        "AnnotationHibernate" => keys::ANNOTATION_HIBERNATE,
        "AnnotationRestoreFromHibernate" => keys::ANNOTATION_RESTORE_FROM_HIBERNATE,
        "AnnotationKeepSnapshotOnDelete" => keys::ANNOTATION_KEEP_SNAPSHOT_ON_DELETE,
        "AnnotationForkFrom" => keys::ANNOTATION_FORK_FROM,
        "AnnotationCloneFromDir" => keys::ANNOTATION_CLONE_FROM_DIR,
        "AnnotationConnType" => keys::ANNOTATION_CONN_TYPE,
        "AnnotationBackend" => keys::ANNOTATION_BACKEND,
        "AnnotationNoDirectIO" => keys::ANNOTATION_NO_DIRECT_IO,
        "AnnotationProbePort" => keys::ANNOTATION_PROBE_PORT,
        "AnnotationLifecycleState" => keys::ANNOTATION_LIFECYCLE_STATE,
        "AnnotationLifecycleObservedGeneration" => keys::ANNOTATION_LIFECYCLE_OBSERVED_GENERATION,
        "AnnotationLifecycleStateMessage" => keys::ANNOTATION_LIFECYCLE_STATE_MESSAGE,
        "AnnotationSnapshotAnnotations" => keys::ANNOTATION_SNAPSHOT_ANNOTATIONS,
        "AnnotationSnapshotRequest" => keys::ANNOTATION_SNAPSHOT_REQUEST,
        "AnnotationSnapshotStatus" => keys::ANNOTATION_SNAPSHOT_STATUS,
        "HibernateSnapshotTag" => keys::HIBERNATE_SNAPSHOT_TAG,
        "DefaultSnapshotTag" => keys::DEFAULT_SNAPSHOT_TAG,
        "HibernateImportSuffix" => keys::HIBERNATE_IMPORT_SUFFIX,
        "RoleMain" => Role::Main.as_str(),
        "RoleSubAgent" => Role::SubAgent.as_str(),
        "RoleToolbox" => Role::Toolbox.as_str(),
        "LifecycleStateCreating" => "creating",
        "LifecycleStateReady" => "ready",
        "LifecycleStateHibernating" => "hibernating",
        "LifecycleStateHibernated" => "hibernated",
        "LifecycleStateFailed" => "failed",
        "APIVersion" | "GroupVersion" => "cocoonset.cocoonstack.io/v1",
        _ => return None,
    })
}

// ---- names -------------------------------------------------------------------------------------

pub(crate) fn names(vector: &Vector) -> Result<Value> {
    match vector.function.as_str() {
        "vm_name_for_pod" => {
            let name = contract::vm_name_for_pod(vector.text("ns"), vector.text("pod"));
            if let Some(len) = vector.extra.get("len").and_then(Value::as_u64) {
                anyhow::ensure!(
                    name.len() as u64 == len,
                    "the name has {} characters, not {len}",
                    name.len()
                );
            }
            Ok(name.into())
        }
        "extract_agent_slot" => {
            let slot = contract::extract_agent_slot(vector.text("ns"), vector.text("set"), vector.text("vm"));
            let role = Role::from_agent_slot(slot).as_str();
            let wanted = vector.extra.get("role").and_then(Value::as_str).unwrap_or(role);
            anyhow::ensure!(role == wanted, "the role is {role}, not {wanted}");
            Ok(slot.map_or(json!(-1), |slot| json!(slot)))
        }
        _ => unknown_function(vector),
    }
}
