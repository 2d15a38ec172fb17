//! From a pod to what it asks for. Pure.
//!
//! Entry point: [`read`]. What makes a pod *not ours to serve* is an `Err`; what makes it impossible to
//! serve *as it is*, while its VM may already exist, is [`Wish::problem`].

use std::net::Ipv4Addr;

use cocoon_api::OSType;
use cocoon_meta::{
    Annotated as _, HibernateState, KeepSnapshotOnDelete, LifecycleState, LifecycleStatus,
    RestoreFromHibernate, SnapshotStatus, VmNameError, VmRuntime, VmSpec, check_vm_name, clone_from_dir,
    has_vm_name_form, keys, read_cocoon_set_generation, read_snapshot_annotations, role_for_pod,
    should_snapshot_vm, vm_name_for_pod, woken_from,
};
use cocoon_oci::reference;
use k8s_openapi::api::core::v1::Pod;

use crate::{
    config::NodeConfig,
    oddities::container_image,
    planner::observation::{How, PodKey, SourceRef, Wish},
    reason::{Reason, Trouble},
    record::{OwnerRecord, Phase},
    sizes,
};

/// Namespace and name of a pod.
#[must_use]
pub(crate) fn key(pod: &Pod) -> PodKey {
    PodKey {
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: pod.metadata.name.clone().unwrap_or_default(),
    }
}

/// What the pod asks for. `adopted`: an owner record of this VM name names the pod's namespace.
/// An error: the pod is not ours to serve.
pub(crate) fn read(pod: &Pod, config: &NodeConfig, adopted: bool) -> Result<Wish, Trouble> {
    let spec = VmSpec::parse(pod);
    check_name(pod, &spec, adopted)?;
    let mut wish = asked(pod, &spec, config);
    wish.problem =
        if wish.managed { managed_problem(pod, &spec, config) } else { unmanaged_problem(pod, &spec, &wish) };
    Ok(wish)
}

/// What stands on the pod, unjudged; what cannot be read is as if it were not there.
fn asked(pod: &Pod, spec: &VmSpec, config: &NodeConfig) -> Wish {
    let runtime = VmRuntime::parse(pod);
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    Wish {
        uid: pod.metadata.uid.clone().unwrap_or_default(),
        vm_name: spec.vm_name.clone(),
        managed: spec.managed,
        macos: spec.os() == OSType::MacOS,
        image: spec.image.clone(),
        how: how(pod, spec),
        restore_marked: RestoreFromHibernate::read(pod).0,
        hibernate: HibernateState::read(pod).0,
        deleting: pod.metadata.deletion_timestamp.is_some(),
        gone: false,
        terminal: matches!(phase, "Failed" | "Succeeded"),
        snapshot_on_delete: spec.managed && should_snapshot_vm(spec, role_for_pod(pod, &spec.vm_name)),
        keep_snapshot: KeepSnapshotOnDelete::read(pod).0,
        sizes: sizes::sizes(pod, &spec.storage, config.defaults).unwrap_or(config.defaults),
        hypervisor: config.backends.get(spec.backend().as_str()).cloned().unwrap_or_default(),
        force_pull: spec.force_pull,
        probe_port: spec.probe_port().unwrap_or_default(),
        generation: read_cocoon_set_generation(pod),
        annotations: read_snapshot_annotations(pod).unwrap_or_default(),
        live_request: live_request(pod),
        id: runtime.vm_id,
        ip: runtime.ip,
        woken_from: woken_from(pod).unwrap_or_default().to_owned(),
        said_ready: LifecycleStatus::read(pod).state == LifecycleState::Ready,
        problem: None,
        key: key(pod),
    }
}

/// Why a managed pod cannot be served as it is.
fn managed_problem(pod: &Pod, spec: &VmSpec, config: &NodeConfig) -> Option<Trouble> {
    let invalid = |error: String| Trouble::new(Reason::InvalidAnnotation, error);
    read_snapshot_annotations(pod)
        .err()
        .map(|error| invalid(cocoon_kit::failure::chain(&error)))
        .or_else(|| spec.probe_port().err().map(|error| invalid(error.to_string())))
        .or_else(|| sizes::sizes(pod, &spec.storage, config.defaults).err())
        .or_else(|| class_problem(pod, config))
        .or_else(|| backend_problem(spec, config))
        .or_else(|| guest_problem(spec))
}

fn check_name(pod: &Pod, spec: &VmSpec, adopted: bool) -> Result<(), Trouble> {
    if !spec.managed && !spec.vm_name.is_empty() {
        return Ok(());
    }
    let key = key(pod);
    let checked = check_vm_name(&key.namespace, &key.name, &spec.vm_name, &spec.os(), adopted);
    checked.map_err(|error| {
        let reason = match &error {
            VmNameError::Missing { .. } => Reason::MissingVMName,
            VmNameError::Foreign { .. } => Reason::VMNameMismatch,
            VmNameError::TooLong { .. } => Reason::VMNameTooLong,
        };
        let message = match &error {
            VmNameError::Missing { pod: name, .. } if !spec.managed => {
                format!("pod {name} names no VM: {}; {}", lacking(pod, spec), elsewhere())
            }
            VmNameError::Missing { pod: name, .. } => {
                format!("pod {name} names no VM: {}", lacking(pod, spec))
            }
            _ => error.to_string(),
        };
        Trouble::new(reason, message)
    })
}

/// What to write into a pod so that this node makes its VM: all that is missing at once, with the values.
fn lacking(pod: &Pod, spec: &VmSpec) -> String {
    let PodKey { namespace, name } = key(pod);
    let mut wanted = Vec::new();
    if spec.vm_name.is_empty() {
        wanted.push(format!("{}: {:?}", keys::ANNOTATION_VM_NAME, vm_name_for_pod(&namespace, &name)));
    }
    if !spec.managed {
        wanted.push(format!("{}: {:?}", keys::ANNOTATION_MANAGED, keys::TRUE));
    }
    if spec.image.is_empty() && spec.fork_from.is_empty() && clone_from_dir(pod).is_none() {
        wanted.push(match container_image(pod) {
            "" => format!("{}: the image's name", keys::ANNOTATION_IMAGE),
            image => {
                let image: String = image.chars().take(200).collect();
                format!("{}: {image:?} (what the container names is not read)", keys::ANNOTATION_IMAGE)
            }
        });
        if spec.mode.is_empty() {
            wanted.push(format!(
                "{}: \"run\" to boot it (else it is a snapshot to clone)",
                keys::ANNOTATION_MODE
            ));
        }
    }
    format!("for a VM that this node makes set the annotations {}", wanted.join(", "))
}

/// What to write into a pod that stands for a VM of somebody else.
fn elsewhere() -> String {
    format!(
        "for one that runs elsewhere set {}, {} and {} (its IPv4 address) instead",
        keys::ANNOTATION_VM_NAME,
        keys::ANNOTATION_VM_ID,
        keys::ANNOTATION_IP
    )
}

fn how(pod: &Pod, spec: &VmSpec) -> How {
    if let Some(folder) = clone_from_dir(pod) {
        let (reason, why) = if spec.is_run() || !spec.fork_from.is_empty() {
            (Reason::SourceConflict, "excludes mode=run and fork-from; keep one of them")
        } else {
            (
                Reason::NotSupported,
                "is not served by this release; import the folder and name the snapshot as image",
            )
        };
        return How::Refused(Trouble::new(
            reason,
            format!("annotation {} ({folder:?}) {why}", keys::ANNOTATION_CLONE_FROM_DIR),
        ));
    }
    if !spec.fork_from.is_empty() {
        return fork(spec);
    }
    if spec.image.is_empty() {
        let message = format!("the pod names no image: {}", lacking(pod, spec));
        return How::Refused(Trouble::new(Reason::ImageNotFound, message));
    }
    if spec.is_run() { How::Run } else { clone_source(&spec.image) }
}

fn fork(spec: &VmSpec) -> How {
    if spec.fork_from == spec.vm_name {
        let message = format!("VM {} cannot be forked from itself; name another VM", spec.vm_name);
        return How::Refused(Trouble::new(Reason::SourceConflict, message));
    }
    How::Fork(spec.fork_from.clone())
}

fn clone_source(image: &str) -> How {
    let Ok(found) = reference::Relative::parse(image) else {
        let message = format!(
            "image {image:?} is not a snapshot reference (repository[:tag] in the node's registry); set \
             annotation {} to run to boot an image",
            keys::ANNOTATION_MODE
        );
        return How::Refused(Trouble::new(Reason::InvalidAnnotation, message));
    };
    if found.tag == keys::HIBERNATE_SNAPSHOT_TAG {
        let message = format!("image {image:?} is a VM's hibernated state, which only its own pod may wake");
        return How::Refused(Trouble::new(Reason::SourceConflict, message));
    }
    // A VM's own local snapshot bears its bare name; a copy of its `latest` must not take that place.
    let local = if has_vm_name_form(&found.repository) {
        found.to_string()
    } else {
        reference::local_name(&found.repository, &found.tag)
    };
    How::Clone(SourceRef { repository: found.repository, reference: found.tag, local: fit(local) })
}

/// Local names have at most 63 characters; longer ones are cut and told apart by a hash.
fn fit(name: String) -> String {
    use sha2::Digest as _;
    const LONGEST: usize = 63;
    if name.len() <= LONGEST {
        return name;
    }
    let hash = hex::encode(sha2::Sha256::digest(name.as_bytes()));
    format!("{}-{}", &name[..LONGEST - 13], &hash[..12])
}

fn backend_problem(spec: &VmSpec, config: &NodeConfig) -> Option<Trouble> {
    if config.backends.contains_key(spec.backend().as_str()) {
        return None;
    }
    let known: Vec<_> = config.backends.keys().map(String::as_str).collect();
    let message = format!(
        "backend {:?} is not on this node, which has {}; set annotation {} to one of them",
        spec.backend().as_str(),
        known.join(", "),
        keys::ANNOTATION_BACKEND
    );
    Some(Trouble::new(Reason::NotSupported, message))
}

fn guest_problem(spec: &VmSpec) -> Option<Trouble> {
    let os = spec.os();
    matches!(os, OSType::MacOS | OSType::Windows).then(|| {
        let message = format!("guests of type {os} are not served by this release; use a node that does");
        Trouble::new(Reason::NotSupported, message)
    })
}

fn class_problem(pod: &Pod, config: &NodeConfig) -> Option<Trouble> {
    let selector = pod.spec.as_ref()?.node_selector.as_ref()?;
    let wanted = selector.get(keys::LABEL_SNAPSHOT_COMPATIBILITY_CLASS)?;
    if config.snapshot_class.as_ref() == Some(wanted) {
        return None;
    }
    let ours = config.snapshot_class.as_deref().unwrap_or("none");
    let message =
        format!("the pod wants snapshot class {wanted:?}, this node has {ours:?}; use a node of that class");
    Some(Trouble::new(Reason::SnapshotClassMismatch, message))
}

fn unmanaged_problem(pod: &Pod, spec: &VmSpec, wish: &Wish) -> Option<Trouble> {
    if wish.id.is_empty() || wish.ip.parse::<Ipv4Addr>().is_err() {
        let message = format!(
            "the pod asks for no VM of this node and names none elsewhere: {}; {}",
            lacking(pod, spec),
            elsewhere()
        );
        return Some(Trouble::new(Reason::UnmanagedIncomplete, message));
    }
    if external(wish).is_none() {
        return Some(not_a_vms(
            wish,
            "which is no address of a VM of its own (this host, one link, a group or nobody)",
        ));
    }
    wish.hibernate.then(|| {
        let message = format!(
            "VM {} is not managed by this node ({} is not \"true\"), so it cannot be hibernated; remove {}",
            wish.vm_name,
            keys::ANNOTATION_MANAGED,
            keys::ANNOTATION_HIBERNATE
        );
        Trouble::new(Reason::HibernateUnsupported, message)
    })
}

/// The address that an unmanaged pod names is one of this node itself.
#[must_use]
pub(crate) fn own_address(wish: &Wish) -> Trouble {
    not_a_vms(wish, "an address of this node itself")
}

fn not_a_vms(wish: &Wish, what: &str) -> Trouble {
    let message = format!(
        "annotation {} is {}, {what}, and is not probed; set it to the address of the VM that the pod stands for",
        keys::ANNOTATION_IP,
        wish.ip
    );
    Trouble::new(Reason::InvalidAnnotation, message)
}

/// The address of the VM that an unmanaged pod stands for, which may be anywhere; `None`: the pod names none
/// that a VM could have. What the pod's author writes must not make this host ask itself.
#[must_use]
pub(crate) fn external(wish: &Wish) -> Option<Ipv4Addr> {
    let ip: Ipv4Addr = wish.ip.parse().ok()?;
    let first = ip.octets()[0];
    // 0.0.0.0/8 is this host, 240.0.0.0/4 is reserved and has the broadcast address.
    let nobody = first == 0 || first >= 240 || ip.is_loopback() || ip.is_link_local() || ip.is_multicast();
    (!nobody && !wish.id.is_empty()).then_some(ip)
}

/// A live snapshot request that the pod has no answer to.
fn live_request(pod: &Pod) -> Option<String> {
    let text = pod.annotation(keys::ANNOTATION_SNAPSHOT_REQUEST);
    if text.is_empty() || SnapshotStatus::read(pod).is_some_and(|status| status.reference == text) {
        return None;
    }
    Some(text.to_owned())
}

/// What an incarnation that is not in the API any more asked for, as far as its owner record knows.
#[must_use]
pub(crate) fn of_record(record: &OwnerRecord, config: &NodeConfig) -> Wish {
    Wish {
        key: PodKey { namespace: record.namespace.clone(), name: record.pod.clone() },
        uid: record.uid.clone(),
        vm_name: record.vm_name.clone(),
        managed: true,
        macos: false,
        image: record.image.clone(),
        how: How::Run,
        restore_marked: false,
        hibernate: matches!(record.phase, Phase::Hibernated { .. }),
        deleting: true,
        gone: true,
        terminal: false,
        snapshot_on_delete: record.snapshot_on_delete,
        keep_snapshot: record.keep_snapshot,
        sizes: config.defaults,
        hypervisor: String::new(),
        force_pull: false,
        probe_port: None,
        generation: 0,
        annotations: record.annotations.clone(),
        live_request: None,
        id: record.vm_id.clone(),
        ip: String::new(),
        woken_from: String::new(),
        said_ready: false,
        problem: None,
    }
}
