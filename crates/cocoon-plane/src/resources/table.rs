//! The rows.

use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Event, Namespace, Node, Pod, Secret, ServiceAccount},
    events::v1::Event as NewEvent,
};
use serde_json::Value;

use super::{Hooks, Kind, columns, events, pods, rows, shape};
use crate::{error::Causes, patch::strategic::Merge, validate};

const OWNERS: (&str, Merge) = ("metadata.ownerReferences", Merge::ByKey("uid"));
const FINALIZERS: (&str, Merge) = ("metadata.finalizers", Merge::Set);
const CONDITIONS: (&str, Merge) = ("status.conditions", Merge::ByKey("type"));

fn nothing(_: &mut Value) {}
fn accept(_: &Value, _: &mut Causes) {}
fn any_change(_: &Value, _: &Value, _: &mut Causes) {}

const PLAIN: Hooks = Hooks {
    name: validate::dns_subdomain,
    shape: |value| Ok(value.clone()),
    normalize: nothing,
    default: nothing,
    create: nothing,
    validate: accept,
    update: any_change,
    row: columns::name_and_age,
};

const BASE: Kind = Kind {
    group: "",
    version: "v1",
    plural: "",
    singular: "",
    kind: "",
    namespaced: true,
    short_names: &[],
    categories: &[],
    status: false,
    table: "",
    renames: &[],
    selectable: &[],
    merge: &[OWNERS, FINALIZERS],
    create_on_update: false,
    keeps_status: false,
    generation: false,
    returns_deleted: false,
    hooks: PLAIN,
    columns: columns::NAME_AND_AGE,
};

/// Every kind that is served, in the order of discovery.
pub(crate) static KINDS: [Kind; 9] = [
    Kind {
        plural: "configmaps",
        singular: "configmap",
        kind: "ConfigMap",
        short_names: &["cm"],
        table: "configmaps",
        hooks: Hooks {
            shape: shape::<ConfigMap>,
            validate: rows::validate_config_map,
            update: rows::update_config_map,
            row: columns::config_map,
            ..PLAIN
        },
        columns: columns::CONFIG_MAP,
        ..BASE
    },
    Kind {
        plural: "events",
        singular: "event",
        kind: "Event",
        short_names: &["ev"],
        table: "events",
        selectable: events::SELECTABLE,
        create_on_update: true,
        hooks: Hooks {
            shape: shape::<Event>,
            default: events::default,
            validate: events::validate,
            row: columns::event,
            ..PLAIN
        },
        columns: columns::EVENT,
        ..BASE
    },
    Kind {
        plural: "namespaces",
        singular: "namespace",
        kind: "Namespace",
        namespaced: false,
        short_names: &["ns"],
        status: true,
        table: "namespaces",
        selectable: &["status.phase"],
        merge: &[OWNERS, FINALIZERS, CONDITIONS],
        returns_deleted: true,
        hooks: Hooks {
            name: validate::dns_label,
            shape: shape::<Namespace>,
            default: rows::default_namespace,
            create: rows::create_namespace,
            row: columns::namespace,
            ..PLAIN
        },
        columns: columns::NAMESPACE,
        ..BASE
    },
    Kind {
        plural: "nodes",
        singular: "node",
        kind: "Node",
        namespaced: false,
        short_names: &["no"],
        status: true,
        table: "nodes",
        selectable: &["spec.unschedulable"],
        merge: &[
            OWNERS,
            FINALIZERS,
            CONDITIONS,
            ("status.addresses", Merge::ByKey("type")),
            ("spec.podCIDRs", Merge::Set),
        ],
        keeps_status: true,
        hooks: Hooks {
            shape: shape::<Node>,
            normalize: rows::normalize_node,
            validate: rows::validate_node,
            row: columns::node,
            ..PLAIN
        },
        columns: columns::NODE,
        ..BASE
    },
    Kind {
        plural: "pods",
        singular: "pod",
        kind: "Pod",
        short_names: &["po"],
        categories: &["all"],
        status: true,
        table: "pods",
        selectable: pods::SELECTABLE,
        merge: pods::MERGE,
        generation: true,
        returns_deleted: true,
        hooks: Hooks {
            shape: shape::<Pod>,
            normalize: pods::normalize,
            default: pods::default,
            create: pods::create,
            validate: pods::validate,
            update: pods::update,
            row: columns::pod,
            ..PLAIN
        },
        columns: columns::POD,
        ..BASE
    },
    Kind {
        plural: "secrets",
        singular: "secret",
        kind: "Secret",
        table: "secrets",
        selectable: &["type"],
        hooks: Hooks {
            shape: shape::<Secret>,
            default: rows::default_secret,
            validate: rows::validate_secret,
            update: rows::update_secret,
            row: columns::secret,
            ..PLAIN
        },
        columns: columns::SECRET,
        ..BASE
    },
    Kind {
        plural: "serviceaccounts",
        singular: "serviceaccount",
        kind: "ServiceAccount",
        short_names: &["sa"],
        table: "serviceaccounts",
        merge: &[OWNERS, FINALIZERS, ("secrets", Merge::ByKey("name"))],
        returns_deleted: true,
        hooks: Hooks { shape: shape::<ServiceAccount>, row: columns::service_account, ..PLAIN },
        columns: columns::SERVICE_ACCOUNT,
        ..BASE
    },
    Kind {
        group: "coordination.k8s.io",
        plural: "leases",
        singular: "lease",
        kind: "Lease",
        table: "leases.coordination.k8s.io",
        create_on_update: true,
        hooks: Hooks { shape: shape::<Lease>, row: columns::lease, ..PLAIN },
        columns: columns::LEASE,
        ..BASE
    },
    // The newer form of the same events: one storage, so that both kinds of client see all of them.
    Kind {
        group: "events.k8s.io",
        plural: "events",
        singular: "event",
        kind: "Event",
        short_names: &["ev"],
        table: "events",
        renames: events::RENAMES,
        selectable: events::SELECTABLE,
        create_on_update: true,
        hooks: Hooks {
            shape: shape::<NewEvent>,
            validate: events::validate_new,
            row: columns::event,
            ..PLAIN
        },
        columns: columns::EVENT,
        ..BASE
    },
];
