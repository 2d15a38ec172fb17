//! VM names, roles and the limits of names.
//!
//! `vk-<ns>-<pod>-<hash>`: dots of the pod name become dashes, because the name is also the guest's
//! hostname and cloud-init keeps only what stands before the first dot. The hash covers
//! `<ns>/<pod>` as it was, so that no two pods share a name, and the name can be found again when the
//! pod is gone.

use std::fmt;

use k8s_openapi::api::core::v1::Pod;
use sha2::{Digest, Sha256};

use crate::keys;
use crate::pods;

/// First part of every VM name.
const PREFIX: &str = "vk-";
/// First part of a fork baseline.
const FORK_PREFIX: &str = "fork-";
/// Hex digits of the hash.
const HASH_LEN: usize = 6;

/// Longest VM name the engine takes.
pub const MAX_VM_NAME: usize = 63;
/// Longest name of a managed VM that can be hibernated: its import name must fit the engine too.
pub const MAX_HIBERNATABLE_VM_NAME: usize = MAX_VM_NAME - keys::HIBERNATE_IMPORT_SUFFIX.len();

/// VM name of a pod.
pub fn vm_name_for_pod(namespace: &str, pod: &str) -> String {
    format!("{PREFIX}{namespace}-{}-{}", pod.replace('.', "-"), hash(namespace, pod))
}

/// VM name of an agent: slot 0 is the main agent.
pub fn vm_name_for_deployment(namespace: &str, set: &str, slot: u32) -> String {
    vm_name_for_pod(namespace, &agent_pod_name(set, slot))
}

/// Pod name of an agent.
pub fn agent_pod_name(set: &str, slot: u32) -> String {
    format!("{set}-{slot}")
}

/// Pod name of a toolbox.
pub fn toolbox_pod_name(set: &str, toolbox: &str) -> String {
    format!("{set}-{toolbox}")
}

/// What the names of a set's agents begin with. Toolboxes of this set, and VMs of a set whose name
/// extends this one, begin with it too: it narrows a search and proves nothing.
pub fn agent_vm_name_prefix(namespace: &str, set: &str) -> String {
    format!("{PREFIX}{namespace}-{}-", set.replace('.', "-"))
}

/// The name the older contract gave a pod: no hash, dots kept. Only to find VMs that were made then.
pub fn unhashed_vm_name_for_pod(namespace: &str, pod: &str) -> String {
    format!("{PREFIX}{namespace}-{pod}")
}

/// Whether a text has the form of a VM name (`vk-…`). Says nothing about whose it is.
pub fn has_vm_name_form(text: &str) -> bool {
    text.starts_with(PREFIX)
}

fn hash(namespace: &str, pod: &str) -> String {
    let digest = Sha256::digest(format!("{namespace}/{pod}").as_bytes());
    let mut text = hex::encode(digest);
    text.truncate(HASH_LEN);
    text
}

/// Slot of the agent that owns a VM name, or `None` for everything else (toolboxes, foreign names). A
/// name counts only when building the slot's name gives exactly it.
pub fn extract_agent_slot(namespace: &str, set: &str, vm_name: &str) -> Option<u32> {
    let rest = vm_name.strip_prefix(agent_vm_name_prefix(namespace, set).as_str())?;
    let (slot, _hash) = rest.split_once('-')?;
    let slot = slot.parse().ok()?;
    (vm_name_for_deployment(namespace, set, slot) == vm_name).then_some(slot)
}

/// Part a pod plays in its set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Slot 0.
    Main,
    /// Slots 1 and up, forked from the main agent.
    SubAgent,
    /// Everything else, also a pod that no set owns.
    Toolbox,
}

impl Role {
    /// The text in the role label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::SubAgent => "sub-agent",
            Self::Toolbox => "toolbox",
        }
    }

    /// Reads the role label; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Main, Self::SubAgent, Self::Toolbox].into_iter().find(|role| role.as_str() == text)
    }

    /// Role of a slot; no slot is a toolbox.
    pub fn from_agent_slot(slot: Option<u32>) -> Self {
        match slot {
            Some(0) => Self::Main,
            Some(_) => Self::SubAgent,
            None => Self::Toolbox,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Role of a pod, from the set that owns it and its VM name; without an owning set it is a toolbox. The
/// form of the name alone decides nothing.
pub fn role_for_pod(pod: &Pod, vm_name: &str) -> Role {
    let Some(set) = pods::cocoon_set_owner_name(&pod.metadata) else { return Role::Toolbox };
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    Role::from_agent_slot(extract_agent_slot(namespace, set, vm_name))
}

/// Local name of the snapshot that all forks of a VM are cloned from.
pub fn fork_baseline_name(vm_name: &str) -> String {
    format!("{FORK_PREFIX}{vm_name}")
}

/// Local name a pulled hibernation snapshot is imported under. It ends in
/// [`keys::HIBERNATE_IMPORT_SUFFIX`]; a VM name too long for that (only one that was adopted can be) is
/// shortened and told apart by a hash.
pub fn hibernate_import_name(vm_name: &str) -> String {
    if vm_name.len() <= MAX_HIBERNATABLE_VM_NAME {
        return format!("{vm_name}{}", keys::HIBERNATE_IMPORT_SUFFIX);
    }
    let mut digest = hex::encode(Sha256::digest(vm_name.as_bytes()));
    digest.truncate(HASH_LEN * 2);
    let mut cut = MAX_HIBERNATABLE_VM_NAME - digest.len() - 1;
    while !vm_name.is_char_boundary(cut) {
        cut -= 1;
    }
    format!("{}-{digest}{}", &vm_name[..cut], keys::HIBERNATE_IMPORT_SUFFIX)
}

/// Why a VM name is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VmNameError {
    /// The pod has no VM name.
    #[error("pod {pod} has no annotation {key}: set it to {expected:?}", key = keys::ANNOTATION_VM_NAME)]
    Missing {
        /// `namespace/name` of the pod.
        pod: String,
        /// The name it must have.
        expected: String,
    },
    /// The name is another pod's, or nobody's.
    #[error("pod {pod} asks for the VM name {found:?}, which is not its own: annotation {key} must be {expected:?}", key = keys::ANNOTATION_VM_NAME)]
    Foreign {
        /// `namespace/name` of the pod.
        pod: String,
        /// The name it asks for.
        found: String,
        /// The name it must have.
        expected: String,
    },
    /// The name is longer than the engine, or the import name of a hibernation, can take.
    #[error("VM name {name:?} of pod {pod} has {len} characters, at most {limit} fit: use a shorter namespace or pod name", len = name.len())]
    TooLong {
        /// `namespace/name` of the pod.
        pod: String,
        /// The name.
        name: String,
        /// The limit that was passed.
        limit: usize,
    },
}

impl VmNameError {
    /// Stable reason word for status and events.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "MissingVMName",
            Self::Foreign { .. } => "VMNameMismatch",
            Self::TooLong { .. } => "VMNameTooLong",
        }
    }
}

/// Longest VM name a guest of this system may have: macOS is never hibernated, all others may be.
pub fn max_vm_name(os: &cocoon_api::OSType) -> usize {
    if *os == cocoon_api::OSType::MacOS { MAX_VM_NAME } else { MAX_HIBERNATABLE_VM_NAME }
}

/// Checks the VM name a managed pod asks for: its own, and short enough. `adopted` says that a VM of
/// this name exists already and its owner record names the pod's namespace; then the older unhashed
/// name and one that is too long are taken as well.
pub fn check_vm_name(
    namespace: &str,
    pod: &str,
    vm_name: &str,
    os: &cocoon_api::OSType,
    adopted: bool,
) -> Result<(), VmNameError> {
    let expected = vm_name_for_pod(namespace, pod);
    let key = pods::pod_key(namespace, pod);
    if vm_name.is_empty() {
        return Err(VmNameError::Missing { pod: key, expected });
    }
    let own = vm_name == expected || (adopted && vm_name == unhashed_vm_name_for_pod(namespace, pod));
    if !own {
        return Err(VmNameError::Foreign { pod: key, found: vm_name.to_owned(), expected });
    }
    let limit = max_vm_name(os);
    if vm_name.len() > limit && !adopted {
        return Err(VmNameError::TooLong { pod: key, name: vm_name.to_owned(), limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use cocoon_api::OSType;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pods_whose_dashed_forms_match_have_different_names() {
        assert_eq!(vm_name_for_pod("team-a", "dev-0"), "vk-team-a-dev-0-cc642f");
        assert_eq!(vm_name_for_pod("team", "a-dev-0"), "vk-team-a-dev-0-7ab660");
    }

    #[test]
    fn a_toolbox_that_looks_like_an_agent_is_none() {
        let toolbox = vm_name_for_pod("prod", &toolbox_pod_name("app", "app-0"));
        assert_eq!(extract_agent_slot("prod", "app", &toolbox), None);
        assert_eq!(extract_agent_slot("prod", "app", "vk-prod-app-+1-ce2a6d"), None);
    }

    #[test]
    fn a_pod_no_set_owns_is_a_toolbox_whatever_its_name() {
        assert_eq!(role_for_pod(&Pod::default(), "vk-prod-demo-0-71ea62"), Role::Toolbox);
    }

    #[test]
    fn an_import_name_fits_the_engine_and_tells_long_names_apart() {
        let name = "v".repeat(MAX_HIBERNATABLE_VM_NAME);
        assert_eq!(hibernate_import_name(&name), format!("{name}-hibernate-import"));
        let (one, two) = (format!("{name}a"), format!("{name}b"));
        let imports = [hibernate_import_name(&one), hibernate_import_name(&two)];
        assert_ne!(imports[0], imports[1]);
        for import in imports {
            assert!(
                import.len() <= MAX_VM_NAME && import.ends_with(keys::HIBERNATE_IMPORT_SUFFIX),
                "{import}"
            );
        }
    }

    #[test]
    fn a_managed_pod_may_have_its_own_name_alone() {
        let own = vm_name_for_pod("prod", "demo-0");
        assert_eq!(check_vm_name("prod", "demo-0", &own, &OSType::Linux, false), Ok(()));
        let reason = |name: &str, adopted| {
            check_vm_name("prod", "demo-0", name, &OSType::Linux, adopted).map_err(|e| e.reason())
        };
        assert_eq!(reason("", false), Err("MissingVMName"));
        assert_eq!(reason("vk-prod-demo-1-99494c", true), Err("VMNameMismatch"));
        assert_eq!(reason("vk-prod-demo-0", false), Err("VMNameMismatch"));
        assert_eq!(reason("vk-prod-demo-0", true), Ok(()));
    }

    #[test]
    fn a_name_is_46_characters_at_most_and_63_for_macos() {
        assert_eq!((MAX_HIBERNATABLE_VM_NAME, MAX_VM_NAME), (46, 63));
        for (pod_len, os, adopted, fits) in [
            (31, OSType::Linux, false, true),
            (32, OSType::Linux, false, false),
            (32, OSType::Linux, true, true),
            (48, OSType::MacOS, false, true),
            (49, OSType::MacOS, false, false),
        ] {
            let pod = "p".repeat(pod_len);
            let name = vm_name_for_pod("prod", &pod);
            let checked = check_vm_name("prod", &pod, &name, &os, adopted).map_err(|e| e.reason());
            assert_eq!(checked, if fits { Ok(()) } else { Err("VMNameTooLong") }, "{pod_len} {os}");
        }
    }

    #[test]
    fn an_error_names_the_pod_the_problem_and_the_way_out() {
        let error = check_vm_name("prod", "demo-0", "vk-x", &OSType::Linux, false).unwrap_err().to_string();
        assert_eq!(
            error,
            "pod prod/demo-0 asks for the VM name \"vk-x\", which is not its own: annotation \
             vm.cocoonstack.io/name must be \"vk-prod-demo-0-71ea62\""
        );
    }

    proptest! {
        #[test]
        fn every_slot_is_found_again(ns in "[a-z][a-z0-9-]{0,10}", set in "[a-z][a-z0-9.-]{0,10}", slot: u32) {
            let name = vm_name_for_deployment(&ns, &set, slot);
            prop_assert!(!name.contains('.'));
            prop_assert_eq!(extract_agent_slot(&ns, &set, &name), Some(slot));
        }

        #[test]
        fn any_text_is_a_slot_only_when_the_slot_builds_it(text in "\\PC{0,40}", set in "[a-z.-]{1,6}") {
            if let Some(slot) = extract_agent_slot("prod", &set, &text) {
                prop_assert_eq!(vm_name_for_deployment("prod", &set, slot), text.as_str());
            }
            let _ = hibernate_import_name(&text);
        }

        #[test]
        fn import_names_always_fit(name in "\\PC{0,200}") {
            prop_assert!(hibernate_import_name(&name).len() <= MAX_VM_NAME);
        }
    }
}
