//! The machine as the guest sees it: what a snapshot and its clones must agree on. Pure values.
//!
//! Entry point: [`Machine::new`]. Every device has a fixed id and a fixed PCI address, so a clone's
//! QEMU is built from the recorded list and nothing else.

use serde::{Deserialize, Serialize};

/// How guest code is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Accelerator {
    /// The kernel's virtualisation.
    Kvm,
    /// Software emulation.
    Tcg,
}

impl Accelerator {
    /// As on QEMU's command line.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// A place on the root bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Address {
    /// 1 to 30 (31 is the chipset's).
    pub(crate) slot: u8,
    /// 0 to 7.
    pub(crate) function: u8,
}

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub(crate) enum Kind {
    /// Randomness from the host.
    Rng,
    /// The bus of the guest ports.
    Serial,
    /// Image layer `index`, 0 = lowest.
    Layer {
        /// Which.
        index: u8,
    },
    /// The writable disk.
    Cow,
    /// NIC `index`.
    Nic {
        /// Which.
        index: u8,
    },
}

/// One device on the root bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    /// What it is.
    #[serde(flatten)]
    pub(crate) kind: Kind,
    /// Where it is.
    #[serde(flatten)]
    pub(crate) address: Address,
}

impl Device {
    /// QEMU's id of the device; unique in a machine.
    #[must_use]
    pub(crate) fn id(&self) -> String {
        match self.kind {
            Kind::Rng => "rng0".to_owned(),
            Kind::Serial => "serial0".to_owned(),
            Kind::Layer { index } => format!("layer{index}"),
            Kind::Cow => "cow".to_owned(),
            Kind::Nic { index } => format!("nic{index}"),
        }
    }
}

/// The CPU that every guest sees. All of it is emulated in software and had by every x86 server CPU
/// since 2008 (level x86-64-v2), so a snapshot moves between hosts of one accelerator.
pub(crate) const CPU_MODEL: &str = "Nehalem-v1";

/// Most layers of a guest: 16 slots of 8 functions, one for the writable disk.
pub(crate) const MAX_LAYERS: usize = 127;
/// Most CPUs of a guest: the machine's interrupt controller has a byte for their numbers.
pub(crate) const MAX_CPUS: u64 = 255;
/// Most memory of a guest: [`CPU_MODEL`] has addresses of 40 bits, and the machine keeps a part of them for devices.
pub(crate) const MAX_MEMORY: u64 = 960 << 30;
/// Most NICs of a guest.
pub(crate) const MAX_NICS: usize = 8;

const FIRST_NIC_SLOT: u8 = 3;
const FIRST_DISK_SLOT: u8 = 12;

/// The machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// Versioned machine type, such as `pc-q35-7.2`.
    pub(crate) machine_type: String,
    /// Explicit CPU model, never `max` or `host`.
    pub(crate) cpu_model: String,
    /// Device state of one accelerator does not load on another.
    pub(crate) accelerator: Accelerator,
    /// vCPUs.
    pub(crate) cpus: u64,
    /// Bytes.
    pub(crate) memory: u64,
    /// In the order of the command line.
    pub(crate) devices: Vec<Device>,
}

impl Machine {
    /// A machine with `layers` read-only disks, one writable disk and `nics` NICs. The caller keeps to
    /// [`MAX_LAYERS`] and [`MAX_NICS`].
    #[must_use]
    pub(crate) fn new(
        machine_type: &str,
        accelerator: Accelerator,
        (cpus, memory): (u64, u64),
        layers: usize,
        nics: usize,
    ) -> Self {
        Self {
            machine_type: machine_type.to_owned(),
            cpu_model: CPU_MODEL.to_owned(),
            accelerator,
            cpus,
            memory,
            devices: devices(layers, nics),
        }
    }

    /// The same machine for a boot on another QEMU or host than it was made for: every device keeps its
    /// place. A machine that is older than the QEMU under it could be saved, but loaded nowhere.
    #[must_use]
    pub(crate) fn booted_on(self, machine_type: &str, accelerator: Accelerator) -> Self {
        Self { machine_type: machine_type.to_owned(), cpu_model: CPU_MODEL.to_owned(), accelerator, ..self }
    }

    /// How many layers the machine has.
    #[must_use]
    pub(crate) fn layers(&self) -> usize {
        self.devices.iter().filter(|device| matches!(device.kind, Kind::Layer { .. })).count()
    }

    /// How many NICs the machine has.
    #[must_use]
    pub(crate) fn nics(&self) -> usize {
        self.devices.iter().filter(|device| matches!(device.kind, Kind::Nic { .. })).count()
    }
}

/// The devices of a machine of this release.
#[must_use]
pub(crate) fn devices(layers: usize, nics: usize) -> Vec<Device> {
    let (layers, nics) = (byte(layers.min(MAX_LAYERS)), byte(nics.min(MAX_NICS)));
    let at = |slot, function| Address { slot, function };
    let disk = |index: u8| at(FIRST_DISK_SLOT + index / 8, index % 8);
    let mut all =
        vec![Device { kind: Kind::Rng, address: at(1, 0) }, Device { kind: Kind::Serial, address: at(2, 0) }];
    all.extend((0..layers).map(|index| Device { kind: Kind::Layer { index }, address: disk(index) }));
    all.push(Device { kind: Kind::Cow, address: disk(layers) });
    all.extend(
        (0..nics).map(|index| Device { kind: Kind::Nic { index }, address: at(FIRST_NIC_SLOT + index, 0) }),
    );
    all
}

fn byte(value: usize) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_devices_share_an_id_or_an_address_and_none_leaves_the_bus() {
        for (layers, nics) in [(0, 0), (1, 1), (8, 2), (MAX_LAYERS, MAX_NICS), (500, 500)] {
            let all = devices(layers, nics);
            let ids: BTreeSet<String> = all.iter().map(Device::id).collect();
            let places: BTreeSet<Address> = all.iter().map(|device| device.address).collect();
            assert_eq!((ids.len(), places.len()), (all.len(), all.len()), "{layers} layers, {nics} NICs");
            assert!(places.iter().all(|place| (1..=30).contains(&place.slot) && place.function < 8));
        }
    }

    #[test]
    fn every_used_slot_has_its_function_zero() {
        for layers in 0..=MAX_LAYERS {
            let places: BTreeSet<Address> = devices(layers, 1).iter().map(|device| device.address).collect();
            for place in &places {
                assert!(places.contains(&Address { slot: place.slot, function: 0 }), "{place:?}");
            }
        }
    }
}
