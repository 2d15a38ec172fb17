//! Objects as the Go components write them are read and written back unchanged, and the schema says
//! what the contract says.

// Helpers of tests are not seen as tests by the lint.
#![allow(clippy::unwrap_used)]

use cocoon_api::{
    CocoonHibernation, CocoonSet, HibernatePolicy, OSType, cocoon_hibernation_crd, cocoon_set_crd,
};
use serde_json::{Value, json};

fn schema(crd: &impl serde::Serialize) -> Value {
    serde_json::to_value(crd).unwrap()["spec"]["versions"][0]["schema"]["openAPIV3Schema"].take()
}

fn full_set() -> Value {
    json!({
        "apiVersion": "cocoonset.cocoonstack.io/v1",
        "kind": "CocoonSet",
        "metadata": { "name": "demo", "namespace": "prod" },
        "spec": {
            "suspend": true, "snapshotPolicy": "main-only", "hibernatePolicy": "retain", "nodePool": "p",
            "snapshotCompatibilityClass": "icx", "nodeName": "n1",
            "agent": {
                "replicas": 2, "image": "reg/img:1", "mode": "run", "serviceAccountName": "sa",
                "envFrom": [{ "secretRef": { "name": "s" } }],
                "os": "linux", "backend": "firecracker", "connType": "ssh", "network": "n", "forcePull": true,
                "noDirectIO": true, "probePort": 22, "storage": "40Gi",
                "resources": { "limits": { "cpu": "2", "memory": "1Gi" } },
            },
            "toolboxes": [{
                "name": "win", "mode": "static", "staticIP": "10.1.1.1", "staticVMID": "x", "vncPort": 5901,
                "os": "windows",
            }],
        },
        "status": {
            "observedGeneration": 3, "phase": "Running", "readyAgents": 3, "desiredAgents": 3,
            "readyToolboxes": 0, "desiredToolboxes": 1,
            "agents": [{ "slot": 0, "role": "main", "vmID": "i", "vmName": "v", "podName": "demo-0" }],
            "conditions": [{
                "type": "Ready", "status": "False", "reason": "AgentsNotReady", "message": "m",
                "lastTransitionTime": "2026-01-02T03:04:05Z",
            }],
        },
    })
}

#[test]
fn a_full_set_is_read_and_written_back_unchanged() {
    let set: CocoonSet = serde_json::from_value(full_set()).unwrap();
    assert_eq!(serde_json::to_value(&set).unwrap(), full_set());
}

#[test]
fn status_counts_are_written_even_when_zero() {
    let status = serde_json::to_value(cocoon_api::CocoonSetStatus::default()).unwrap();
    assert_eq!(
        status,
        json!({ "readyAgents": 0, "desiredAgents": 0, "readyToolboxes": 0, "desiredToolboxes": 0 })
    );
}

#[test]
fn quantities_may_be_numbers_and_unknown_words_are_kept() {
    let set: CocoonSet = serde_json::from_value(json!({
        "metadata": {},
        "spec": { "agent": {
            "image": "i", "os": "beos", "storage": 1_073_741_824,
            "resources": { "limits": { "cpu": 2 }, "requests": { "cpu": "500m" } },
        } },
    }))
    .unwrap();
    let vm = &set.spec.agent.vm;
    assert_eq!(vm.storage.as_ref().unwrap().as_str(), "1073741824");
    assert_eq!(vm.resources.limits.as_ref().unwrap()["cpu"].0, "2");
    assert_eq!(vm.os, Some(OSType::Other("beos".into())));
    assert_eq!(HibernatePolicy::resolve(set.spec.hibernate_policy.as_ref()), HibernatePolicy::Retain);
}

#[test]
fn a_hibernation_is_read_and_written_back_unchanged() {
    let object = json!({
        "apiVersion": "cocoonset.cocoonstack.io/v1",
        "kind": "CocoonHibernation",
        "metadata": { "name": "h" },
        "spec": { "podRef": { "name": "demo-0" }, "desire": "Hibernate" },
        "status": { "observedGeneration": 1, "phase": "Hibernated", "vmName": "v" },
    });
    let parsed: CocoonHibernation = serde_json::from_value(object.clone()).unwrap();
    assert_eq!(serde_json::to_value(&parsed).unwrap(), object);
}

#[test]
fn the_set_schema_has_the_contracts_defaults_limits_and_rules() {
    let schema = schema(&cocoon_set_crd());
    let spec = &schema["properties"]["spec"];
    let agent = &spec["properties"]["agent"];
    for (pointer, value) in [
        ("/properties/snapshotPolicy/default", json!("always")),
        ("/properties/hibernatePolicy/default", json!("retain")),
        ("/properties/nodePool/default", json!("default")),
        ("/properties/snapshotCompatibilityClass/maxLength", json!(63)),
        ("/required", json!(["agent"])),
        ("/properties/toolboxes/items/required", json!(["name"])),
        ("/properties/toolboxes/items/properties/mode/default", json!("run")),
        ("/properties/toolboxes/items/properties/vncPort/maximum", json!(65535.0)),
        ("/properties/agent/required", json!(["image"])),
        ("/properties/agent/properties/storage/x-kubernetes-int-or-string", json!(true)),
    ] {
        assert_eq!(spec.pointer(pointer), Some(&value), "{pointer}");
    }
    for (field, default) in [("mode", "clone"), ("os", "linux"), ("backend", "cloud-hypervisor")] {
        assert_eq!(agent["properties"][field]["default"], default, "{field}");
    }
    assert_eq!(agent["properties"]["connType"].get("default"), None);
    assert_eq!(agent["properties"]["replicas"]["minimum"], 0.0);
    let rules = spec["x-kubernetes-validations"].as_array().unwrap();
    assert_eq!(rules.len(), 2);
    assert!(rules.iter().any(|rule| rule["rule"].as_str().unwrap().contains("oldSelf")));
}

#[test]
fn status_lists_are_maps_by_their_keys() {
    let set = schema(&cocoon_set_crd());
    let hibernation = schema(&cocoon_hibernation_crd());
    for (schema, list, key) in [
        (&set, "agents", "slot"),
        (&set, "toolboxes", "name"),
        (&set, "conditions", "type"),
        (&hibernation, "conditions", "type"),
    ] {
        let list = &schema["properties"]["status"]["properties"][list];
        assert_eq!(list["x-kubernetes-list-type"], "map");
        assert_eq!(list["x-kubernetes-list-map-keys"], json!([key]));
    }
    let pod_ref = &hibernation["properties"]["spec"]["properties"]["podRef"];
    assert_eq!(pod_ref["x-kubernetes-validations"][0]["rule"], "self == oldSelf");
    assert_eq!(pod_ref["properties"]["name"]["minLength"], 1);
}

#[test]
fn schemas_are_structural() {
    for crd in [cocoon_set_crd(), cocoon_hibernation_crd()] {
        structural("", &schema(&crd));
    }
}

/// Each schema has a type or is an int-or-string, and nothing may be null.
fn structural(path: &str, schema: &Value) {
    let flexible = schema["x-kubernetes-int-or-string"] == true;
    assert!(schema["type"].is_string() != flexible, "{path}: {schema}");
    assert!(schema.get("nullable").is_none() && schema.get("$ref").is_none(), "{path}");
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        structural(&format!("{path}/{name}"), property);
    }
    for inner in ["items", "additionalProperties"] {
        if let Some(inner_schema) = schema.get(inner) {
            structural(&format!("{path}/{inner}"), inner_schema);
        }
    }
}

#[test]
fn names_columns_and_subresource_are_the_contracts() {
    for (crd, short, columns) in [
        (cocoon_set_crd(), "cs", ["Phase", "Ready", "Desired", "Age"]),
        (cocoon_hibernation_crd(), "ch", ["Pod", "Desire", "Phase", "Age"]),
    ] {
        let names = &crd.spec.names;
        assert_eq!(names.short_names.as_ref().unwrap(), &[short.to_owned(), names.plural.clone()]);
        assert_eq!(names.categories.as_ref().unwrap(), &["cocoon".to_owned()]);
        let version = &crd.spec.versions[0];
        let shown: Vec<&str> =
            version.additional_printer_columns.iter().flatten().map(|column| column.name.as_str()).collect();
        assert_eq!(shown, columns);
        let subresources = version.subresources.as_ref().unwrap();
        assert!(subresources.status.is_some() && subresources.scale.is_none());
        assert!(version.served && version.storage);
    }
}
