//! [`VmSpec`], what the operator asks of a VM, and [`VmRuntime`], what the node agent found out.
//!
//! Both are written onto a pod's annotations and read back. Writing never clears: empty texts, false
//! flags and ports that are not positive are skipped. To clear a value, patch it explicitly
//! ([`VmRuntime::cleared`]).

use cocoon_api::{
    AgentMode, AgentSpec, Backend, OSType, SnapshotPolicy, ToolboxMode, ToolboxSpec, VmOptions,
};

use crate::annotated::{Annotated, set_if, set_unless_empty};
use crate::keys;
use crate::patch::AnnotationChanges;

/// What a VM should be, as the pod's annotations say it. Texts are kept as they came; the typed readers
/// ([`VmSpec::is_run`], [`VmSpec::snapshot_policy`], …) fill in defaults.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VmSpec {
    /// Name of the VM. Required for a cocoon pod; empty means "not one of ours".
    pub vm_name: String,
    /// Image (mode run) or snapshot (mode clone) reference.
    pub image: String,
    /// `clone`, `run` or `static`.
    pub mode: String,
    /// Operating system family.
    pub os: String,
    /// Root volume size, a quantity.
    pub storage: String,
    /// Snapshot policy.
    pub snapshot_policy: String,
    /// Network to attach to.
    pub network: String,
    /// VM this one is forked from.
    pub fork_from: String,
    /// Whether the node agent owns the VM's life. False: adopt a VM that exists elsewhere.
    pub managed: bool,
    /// Pull even when a copy is here.
    pub force_pull: bool,
    /// No O_DIRECT on writable disks.
    pub no_direct_io: bool,
    /// Protocol by which a person connects; empty means inferred.
    pub conn_type: String,
    /// Hypervisor asked for.
    pub backend: String,
    /// TCP port for readiness, as text; empty means ICMP.
    pub probe_port: String,
}

impl VmSpec {
    /// Reads the spec of an object. Absent keys read as empty and false.
    pub fn parse(object: &impl Annotated) -> Self {
        let text = |key| object.annotation(key).to_owned();
        Self {
            vm_name: text(keys::ANNOTATION_VM_NAME),
            image: text(keys::ANNOTATION_IMAGE),
            mode: text(keys::ANNOTATION_MODE),
            os: text(keys::ANNOTATION_OS),
            storage: text(keys::ANNOTATION_STORAGE),
            snapshot_policy: text(keys::ANNOTATION_SNAPSHOT_POLICY),
            network: text(keys::ANNOTATION_NETWORK),
            fork_from: text(keys::ANNOTATION_FORK_FROM),
            managed: object.annotation_flag(keys::ANNOTATION_MANAGED),
            force_pull: object.annotation_flag(keys::ANNOTATION_FORCE_PULL),
            no_direct_io: object.annotation_flag(keys::ANNOTATION_NO_DIRECT_IO),
            conn_type: text(keys::ANNOTATION_CONN_TYPE),
            backend: text(keys::ANNOTATION_BACKEND),
            probe_port: text(keys::ANNOTATION_PROBE_PORT),
        }
    }

    /// Writes the spec onto an object. Skips what is empty or false; clears nothing.
    pub fn apply(&self, object: &mut impl Annotated) {
        // An object that gets a spec has an annotation map, even when nothing is written into it.
        object.annotation_map_mut();
        for (key, value) in [
            (keys::ANNOTATION_VM_NAME, &self.vm_name),
            (keys::ANNOTATION_IMAGE, &self.image),
            (keys::ANNOTATION_MODE, &self.mode),
            (keys::ANNOTATION_OS, &self.os),
            (keys::ANNOTATION_STORAGE, &self.storage),
            (keys::ANNOTATION_SNAPSHOT_POLICY, &self.snapshot_policy),
            (keys::ANNOTATION_NETWORK, &self.network),
            (keys::ANNOTATION_FORK_FROM, &self.fork_from),
            (keys::ANNOTATION_CONN_TYPE, &self.conn_type),
            (keys::ANNOTATION_BACKEND, &self.backend),
            (keys::ANNOTATION_PROBE_PORT, &self.probe_port),
        ] {
            set_unless_empty(object, key, value);
        }
        set_if(object, keys::ANNOTATION_MANAGED, self.managed);
        set_if(object, keys::ANNOTATION_FORCE_PULL, self.force_pull);
        set_if(object, keys::ANNOTATION_NO_DIRECT_IO, self.no_direct_io);
    }

    /// The spec of an agent's VM. Always managed; unset enums get their defaults, except the
    /// connection type, which has none. `fork_from` is empty for the main agent.
    pub fn from_agent_spec(
        agent: &AgentSpec,
        vm_name: &str,
        fork_from: &str,
        snapshot_policy: Option<&SnapshotPolicy>,
    ) -> Self {
        Self {
            vm_name: vm_name.to_owned(),
            image: agent.image.clone(),
            mode: AgentMode::resolve(agent.mode.as_ref()).to_string(),
            fork_from: fork_from.to_owned(),
            managed: true,
            snapshot_policy: SnapshotPolicy::resolve(snapshot_policy).to_string(),
            ..Self::from_options(&agent.vm)
        }
    }

    /// The spec of a toolbox's VM. Managed unless its mode is `static`.
    pub fn from_toolbox_spec(
        toolbox: &ToolboxSpec,
        vm_name: &str,
        snapshot_policy: Option<&SnapshotPolicy>,
    ) -> Self {
        let mode = ToolboxMode::resolve(toolbox.mode.as_ref());
        Self {
            vm_name: vm_name.to_owned(),
            image: toolbox.image.clone().unwrap_or_default(),
            managed: mode != ToolboxMode::Static,
            mode: mode.to_string(),
            snapshot_policy: SnapshotPolicy::resolve(snapshot_policy).to_string(),
            ..Self::from_options(&toolbox.vm)
        }
    }

    /// The part that agents and toolboxes share.
    fn from_options(options: &VmOptions) -> Self {
        Self {
            os: OSType::resolve(options.os.as_ref()).to_string(),
            backend: Backend::resolve(options.backend.as_ref()).to_string(),
            conn_type: options.conn_type.as_ref().map(ToString::to_string).unwrap_or_default(),
            network: options.network.clone().unwrap_or_default(),
            force_pull: options.force_pull,
            no_direct_io: options.no_direct_io,
            probe_port: options
                .probe_port
                .filter(|port| *port > 0)
                .map(|p| p.to_string())
                .unwrap_or_default(),
            storage: options.storage.as_ref().map(ToString::to_string).unwrap_or_default(),
            ..Self::default()
        }
    }

    /// Whether the VM boots from an image. Case does not matter, and anything but `run` is clone.
    pub fn is_run(&self) -> bool {
        self.mode.eq_ignore_ascii_case("run")
    }

    /// Whether a clone would take the state that some VM hibernated into: such a reference is refused,
    /// a hibernated state is for its own VM alone.
    pub fn clones_hibernated_state(&self) -> bool {
        let tag = self.image.rsplit_once(':').map(|(_, tag)| tag.split('@').next().unwrap_or(tag));
        !self.is_run() && tag == Some(keys::HIBERNATE_SNAPSHOT_TAG)
    }

    /// The snapshot policy with its default filled in; unknown texts stay as they are.
    pub fn snapshot_policy(&self) -> SnapshotPolicy {
        SnapshotPolicy::from(self.snapshot_policy.as_str()).or_default()
    }

    /// The guest's system with its default filled in.
    pub fn os(&self) -> OSType {
        OSType::from(self.os.as_str()).or_default()
    }

    /// The hypervisor asked for with its default filled in.
    pub fn backend(&self) -> Backend {
        Backend::from(self.backend.as_str()).or_default()
    }

    /// The readiness port: `None` when unset (ICMP), an error text when it is no port.
    pub fn probe_port(&self) -> Result<Option<u16>, InvalidProbePort> {
        if self.probe_port.is_empty() {
            return Ok(None);
        }
        match self.probe_port.parse::<u16>() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(InvalidProbePort { text: self.probe_port.clone() }),
        }
    }
}

/// A probe port annotation that is no TCP port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key} is {text:?}, which is no TCP port: set it to a number from 1 to 65535, or remove it to probe by ICMP", key = keys::ANNOTATION_PROBE_PORT)]
pub struct InvalidProbePort {
    /// The value that was found.
    pub text: String,
}

/// The directory a clone comes from, past the snapshot database; `None` when not asked for.
pub fn clone_from_dir(object: &impl Annotated) -> Option<&str> {
    Some(object.annotation(keys::ANNOTATION_CLONE_FROM_DIR)).filter(|path| !path.is_empty())
}

/// Id of the snapshot the running VM woke from (private key of this project); `None` when it did not.
pub fn woken_from(object: &impl Annotated) -> Option<&str> {
    Some(object.annotation(keys::ANNOTATION_WOKEN_FROM)).filter(|id| !id.is_empty())
}

/// What is known of the VM behind a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VmRuntime {
    /// Engine id; empty while there is no VM.
    pub vm_id: String,
    /// Address; empty while unknown.
    pub ip: String,
    /// VNC port; only static VMs carry one.
    pub vnc_port: i32,
}

impl VmRuntime {
    /// Reads it back. A port that does not parse reads as 0.
    pub fn parse(object: &impl Annotated) -> Self {
        Self {
            vm_id: object.annotation(keys::ANNOTATION_VM_ID).to_owned(),
            ip: object.annotation(keys::ANNOTATION_IP).to_owned(),
            vnc_port: object.annotation(keys::ANNOTATION_VNC_PORT).parse().unwrap_or(0),
        }
    }

    /// Writes it. Skips empty texts and ports that are not positive; clears nothing.
    pub fn apply(&self, object: &mut impl Annotated) {
        object.annotation_map_mut();
        set_unless_empty(object, keys::ANNOTATION_VM_ID, &self.vm_id);
        set_unless_empty(object, keys::ANNOTATION_IP, &self.ip);
        if self.vnc_port > 0 {
            object.set_annotation(keys::ANNOTATION_VNC_PORT, self.vnc_port.to_string());
        }
    }

    /// The same as changes for a patch: what [`VmRuntime::apply`] would write.
    pub fn changes(&self) -> AnnotationChanges {
        let mut written = crate::annotated::Annotations::new();
        self.apply(&mut written);
        written.into_iter().map(|(key, value)| (key, Some(value))).collect()
    }

    /// Changes that remove id and address, for a VM that is gone. The VNC port stays: only static VMs
    /// have one, and those are never removed by us.
    pub fn cleared() -> AnnotationChanges {
        [(keys::ANNOTATION_VM_ID.to_owned(), None), (keys::ANNOTATION_IP.to_owned(), None)].into()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Annotations;

    fn spec() -> impl Strategy<Value = VmSpec> {
        let text = || "[a-z0-9:/.-]{0,8}";
        let texts = (text(), text(), text(), text(), text(), text(), text(), text(), text(), text(), text());
        (texts, any::<[bool; 3]>()).prop_map(|(t, [managed, force_pull, no_direct_io])| VmSpec {
            vm_name: t.0,
            image: t.1,
            mode: t.2,
            os: t.3,
            storage: t.4,
            snapshot_policy: t.5,
            network: t.6,
            fork_from: t.7,
            conn_type: t.8,
            backend: t.9,
            probe_port: t.10,
            managed,
            force_pull,
            no_direct_io,
        })
    }

    #[test]
    fn a_mode_that_is_not_run_is_clone() {
        let mode = |mode: &str| VmSpec { mode: mode.into(), ..VmSpec::default() }.is_run();
        assert!(mode("run") && mode("RUN"));
        assert!(!mode("clone") && !mode("") && !mode("bogus"));
    }

    #[test]
    fn unset_texts_stand_for_the_defaults() {
        let spec = VmSpec::default();
        assert_eq!(spec.snapshot_policy(), SnapshotPolicy::Always);
        assert_eq!(spec.os(), OSType::Linux);
        assert_eq!(spec.backend(), Backend::CloudHypervisor);
        assert_eq!(spec.probe_port(), Ok(None));
    }

    #[test]
    fn a_probe_port_outside_the_range_is_an_error() {
        for text in ["0", "65536", "-1", "abc", " 22"] {
            let spec = VmSpec { probe_port: text.into(), ..VmSpec::default() };
            assert!(spec.probe_port().is_err(), "{text}");
        }
    }

    #[test]
    fn a_clone_of_hibernated_state_is_seen() {
        let clones = |image: &str, mode: &str| {
            VmSpec { image: image.into(), mode: mode.into(), ..VmSpec::default() }.clones_hibernated_state()
        };
        assert!(clones("vk-prod-demo-0-71ea62:hibernate", "clone"));
        assert!(!clones("vk-prod-demo-0-71ea62:hibernate", "run"));
        assert!(!clones("hibernate", "clone"));
        assert!(!clones("host:5000/hibernate", "clone"));
    }

    #[test]
    fn what_is_cleared_is_id_and_address() {
        let mut pod = Annotations::new();
        VmRuntime { vm_id: "x".into(), ip: "10.0.0.7".into(), vnc_port: 1 }.apply(&mut pod);
        for (key, value) in VmRuntime::cleared() {
            assert_eq!(value, None);
            pod.remove(&key);
        }
        assert_eq!(VmRuntime::parse(&pod), VmRuntime { vnc_port: 1, ..VmRuntime::default() });
    }

    proptest! {
        #[test]
        fn a_spec_written_onto_a_fresh_object_reads_back(spec in spec()) {
            let mut object = Annotations::new();
            spec.apply(&mut object);
            prop_assert_eq!(VmSpec::parse(&object), spec);
        }

        #[test]
        fn writing_a_spec_never_clears_a_key(first in spec(), second in spec()) {
            let mut object = Annotations::new();
            first.apply(&mut object);
            let before: Vec<String> = object.keys().cloned().collect();
            second.apply(&mut object);
            prop_assert!(before.iter().all(|key| object.contains_key(key)));
        }
    }
}
