//! `qemu.json`: what a snapshot's device state fits. Written at capture, checked before anything of a
//! clone is started. Pure.
//!
//! Entry points: [`Description::parse`], [`Description::check`]. It may come from a registry, so
//! everything in it is typed, bounded and compared with what this release would build itself.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    image::RecordedBoot,
    qemu::{
        machine::{Accelerator, MAX_CPUS, MAX_MEMORY, Machine, devices},
        version::Facts,
    },
};

/// The file's name.
pub(crate) const QEMU_JSON: &str = "qemu.json";
/// Device state, or the full stream.
pub(crate) const QEMU_STATE: &str = "qemu-state";
/// Guest memory, flat and sparse.
pub(crate) const MEMORY_RANGES: &str = "memory-ranges";
/// The writable disk, standalone.
pub(crate) const COW: &str = "cow.qcow2";
/// The sidecar of `engine-cli` §3.
pub(crate) const COCOON_JSON: &str = "cocoon.json";

/// The format that this release writes and reads.
pub(crate) const FORMAT: u32 = 1;
/// Longest `qemu.json` that is read.
pub(crate) const MAX_BYTES: u64 = 1 << 20;

/// Where guest memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum MemoryMode {
    /// In `memory-ranges`; the state holds devices only.
    Ranges,
    /// Inside the state: the full stream.
    Stream,
}

/// All of `qemu.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Description {
    /// [`FORMAT`].
    pub(crate) format: u32,
    /// Version of the QEMU that wrote the state, as its own monitor says it.
    pub(crate) qemu_version: String,
    /// The machine.
    pub(crate) machine: Machine,
    /// Where guest memory is.
    pub(crate) memory_mode: MemoryMode,
    /// Layers, kernel and initrd by digest.
    pub(crate) boot: RecordedBoot,
    /// Names of the image store for them.
    pub(crate) image_blob_ids: Vec<String>,
    /// Bytes of the writable disk.
    pub(crate) storage: u64,
}

/// Why a description is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum DescriptionError {
    /// Not JSON of this shape.
    #[error("qemu.json cannot be read")]
    Json(#[from] serde_json::Error),
    /// A machine that this release never makes.
    #[error("qemu.json describes a machine that is refused: {0}")]
    Refused(String),
}

/// What does not fit: the snapshot's side and this host's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// The snapshot's side.
    pub(crate) theirs: String,
    /// This host's side.
    pub(crate) ours: String,
}

impl Description {
    /// Reads and bounds a description. Whether it fits this host is [`Description::check`]'s question.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, DescriptionError> {
        let this: Self = serde_json::from_slice(bytes)?;
        let machine = &this.machine;
        let refused = |what: &str| Err(DescriptionError::Refused(what.to_owned()));
        let plain = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
        if !plain(&machine.machine_type) || !plain(&machine.cpu_model) || !plain(&this.qemu_version) {
            return refused("odd characters in a name");
        }
        if !(1..=MAX_CPUS).contains(&machine.cpus) {
            return refused(&format!("{} CPUs; it can have 1 to {MAX_CPUS}", machine.cpus));
        }
        if !(1 << 20..=MAX_MEMORY).contains(&machine.memory) || !machine.memory.is_multiple_of(1 << 20) {
            let (bytes, most) = (machine.memory, MAX_MEMORY >> 20);
            return refused(&format!("{bytes} bytes of memory; it can have whole MiB, 1 to {most} of them"));
        }
        if machine.devices != devices(machine.layers(), machine.nics()) {
            return refused("a device list that is not this release's");
        }
        if machine.layers() != this.boot.layers.len() {
            return refused("layers and disks that differ in number");
        }
        Ok(this)
    }

    /// What a state of this description finds on this host. Every QEMU emulates, also where KVM runs guests, so
    /// a state that was written before KVM could be had goes on as it was.
    const fn accelerator_on(&self, facts: &Facts) -> Accelerator {
        match self.machine.accelerator {
            Accelerator::Tcg => Accelerator::Tcg,
            Accelerator::Kvm => facts.accelerator,
        }
    }

    /// Whether any host at all loads a state of this description: one with the very QEMU that wrote it.
    pub(crate) fn is_loadable(&self) -> Result<(), Mismatch> {
        let writer = Facts { version: self.qemu_version.clone(), accelerator: self.machine.accelerator };
        self.check(&writer)
    }

    /// Whether a state of this description loads on this host: format, QEMU release, machine type,
    /// accelerator, CPU model.
    pub(crate) fn check(&self, facts: &Facts) -> Result<(), Mismatch> {
        let release = |version: &str| version.split('.').take(2).collect::<Vec<_>>().join(".");
        let rows = [
            (format!("format {}", self.format), format!("format {FORMAT}")),
            (format!("QEMU {}", release(&self.qemu_version)), format!("QEMU {}", release(&facts.version))),
            (format!("machine {}", self.machine.machine_type), format!("machine {}", facts.machine_type())),
            (
                format!("accelerator {}", name(self.machine.accelerator)),
                format!("accelerator {}", name(self.accelerator_on(facts))),
            ),
            (
                format!("CPU model {}", self.machine.cpu_model),
                format!("CPU model {}", crate::qemu::machine::CPU_MODEL),
            ),
        ];
        match rows.into_iter().find(|(theirs, ours)| theirs != ours) {
            Some((theirs, ours)) => Err(Mismatch { theirs, ours }),
            None => Ok(()),
        }
    }
}

const fn name(accelerator: Accelerator) -> &'static str {
    accelerator.name()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::image::RecordedLayer;

    fn facts() -> Facts {
        Facts { version: "7.2.22".into(), accelerator: Accelerator::Tcg }
    }

    fn sample() -> Description {
        let digest = "sha256:aa".to_owned();
        Description {
            format: FORMAT,
            qemu_version: "7.2.22".into(),
            machine: Machine::new("pc-q35-7.2", Accelerator::Tcg, (1, 256 << 20), 1, 1),
            memory_mode: MemoryMode::Ranges,
            boot: RecordedBoot {
                image: "demo".into(),
                image_digest: digest.clone(),
                layers: vec![RecordedLayer { digest: digest.clone(), content: digest.clone() }],
                kernel: digest.clone(),
                initrd: digest,
            },
            image_blob_ids: vec!["aa".into()],
            storage: 10 << 30,
        }
    }

    fn edited(edit: impl FnOnce(&mut serde_json::Value)) -> Result<Description, DescriptionError> {
        let mut value = serde_json::to_value(sample())?;
        edit(&mut value);
        Description::parse(value.to_string().as_bytes())
    }

    #[test]
    fn a_description_survives_its_file() {
        assert_eq!(edited(|_| ()).unwrap(), sample());
    }

    #[test]
    fn a_machine_that_we_never_build_is_refused() {
        let refused = |edit: fn(&mut serde_json::Value)| assert!(edited(edit).is_err());
        refused(|v| v["machine"]["machine_type"] = "q35,accel=kvm".into());
        refused(|v| v["machine"]["cpu_model"] = "host,+x".into());
        refused(|v| v["machine"]["memory"] = 1.into());
        refused(|v| v["machine"]["cpus"] = 0.into());
        refused(|v| v["machine"]["devices"][0]["slot"] = 9.into());
        refused(|v| v["machine"]["devices"][0]["kind"] = "vfio-pci".into());
        refused(|v| v["boot"]["layers"] = serde_json::json!([]));
    }

    #[test]
    fn a_machine_larger_than_qemu_makes_is_refused_with_what_is_possible() {
        for (field, most, too_much, said) in [
            ("cpus", MAX_CPUS, 1024, "1024 CPUs; it can have 1 to 255"),
            (
                "memory",
                MAX_MEMORY,
                4_u64 << 40,
                "4398046511104 bytes of memory; it can have whole MiB, 1 to 983040",
            ),
        ] {
            assert!(edited(|v| v["machine"][field] = most.into()).is_ok(), "{field}");
            let refused = edited(|v| v["machine"][field] = (most + 1).into());
            assert!(refused.is_err(), "{field}");
            let error = edited(|v| v["machine"][field] = too_much.into()).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn each_difference_names_both_sides() {
        type Edit = fn(&mut Description);
        let table: [(Edit, &str, &str); 5] = [
            (|d| d.format = 9, "format 9", "format 1"),
            (|d| d.qemu_version = "9.1.0".into(), "QEMU 9.1", "QEMU 7.2"),
            (|d| d.machine.machine_type = "pc-q35-9.1".into(), "machine pc-q35-9.1", "machine pc-q35-7.2"),
            (|d| d.machine.accelerator = Accelerator::Kvm, "accelerator kvm", "accelerator tcg"),
            (|d| d.machine.cpu_model = "EPYC".into(), "CPU model EPYC", "CPU model Nehalem-v1"),
        ];
        for (edit, theirs, ours) in table {
            let mut description = sample();
            edit(&mut description);
            let mismatch = description.check(&facts()).unwrap_err();
            assert_eq!((mismatch.theirs.as_str(), mismatch.ours.as_str()), (theirs, ours));
        }
        assert_eq!(sample().check(&facts()), Ok(()));
        assert_eq!(
            sample().check(&Facts { version: "7.2.9".into(), ..facts() }),
            Ok(()),
            "a bug-fix release fits"
        );
        assert_eq!(
            sample().check(&Facts { accelerator: Accelerator::Kvm, ..facts() }),
            Ok(()),
            "emulation is had everywhere"
        );
    }

    #[test]
    fn a_state_is_loadable_where_its_writer_is_unless_the_machine_is_of_another_release() {
        for (version, machine_type, loadable) in [
            ("7.2.22", "pc-q35-7.2", true),
            ("8.2.0", "pc-q35-8.2", true),
            ("10.0.2", "pc-q35-10.0", true),
            ("8.2.0", "pc-q35-7.2", false),
            ("7.2.22", "pc-q35-7.1", false),
        ] {
            let mut description = sample();
            description.qemu_version = version.into();
            description.machine.machine_type = machine_type.into();
            assert_eq!(description.is_loadable().is_ok(), loadable, "{machine_type} on {version}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Description::parse(&bytes);
        }

        #[test]
        fn a_cut_description_is_refused(part in 0_usize..400) {
            let whole = serde_json::to_vec(&sample()).unwrap();
            prop_assert!(Description::parse(&whole[..part.min(whole.len() - 1)]).is_err());
        }
    }
}
