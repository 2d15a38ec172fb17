//! QEMU's command line as a pure function of a machine and the descriptors it is wired to.
//!
//! Entry point: [`arguments`]. Invariants: no path of the host's appears in it, files are descriptors;
//! every disk chain is given node by node, so no path inside an image is ever followed; nothing the
//! caller did not ask for is there (`-nodefaults -no-user-config`), and everything the sandbox can deny
//! is denied.

use std::os::fd::RawFd;

use serde_json::{Value, json};

use super::machine::{Accelerator, Address, Device, Kind, Machine};

/// How many guest ports a machine has.
pub(crate) const GUEST_PORTS: usize = 4;
/// The name that guest ports share; the number follows.
pub(crate) const GUEST_PORT_NAME: &str = "cocoon.agent.";

/// A disk: its files from the guest's side down. Only the first may be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskWiring {
    /// Top file first; the ones below are backing files.
    pub(crate) chain: Vec<RawFd>,
    /// qcow2 or raw.
    pub qcow2: bool,
    /// Whether the guest may only read.
    pub(crate) read_only: bool,
}

/// A NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NicWiring {
    /// Open tap; without one the NIC has no cable.
    pub(crate) tap: Option<RawFd>,
    /// The VM's own MAC: QEMU announces the one on its command line after a load.
    pub(crate) mac: String,
}

/// A kernel to boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BootWiring {
    /// Kernel image.
    pub(crate) kernel: RawFd,
    /// Initrd.
    pub(crate) initrd: RawFd,
    /// Kernel command line.
    pub(crate) cmdline: String,
}

/// What connects the machine to this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wiring {
    /// Shown by `ps`.
    pub(crate) name: String,
    /// RAM file, of exactly the machine's memory size.
    pub(crate) ram: RawFd,
    /// What to boot; without it QEMU waits for device state.
    pub(crate) boot: Option<BootWiring>,
    /// Console log, open for appending.
    pub(crate) console: RawFd,
    /// Listening sockets of the two monitors: for commands, and for one who only watches.
    pub(crate) monitors: [RawFd; 2],
    /// Listening sockets of the guest ports.
    pub(crate) ports: [RawFd; GUEST_PORTS],
    /// Layers, lowest first.
    pub(crate) layers: Vec<DiskWiring>,
    /// The writable disk.
    pub(crate) cow: DiskWiring,
    /// By NIC index.
    pub(crate) nics: Vec<NicWiring>,
}

const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The arguments after the program's name.
#[must_use]
pub(crate) fn arguments(machine: &Machine, wiring: &Wiring) -> Vec<String> {
    let mut line = Line::default();
    line.flag("-nodefaults").flag("-no-user-config");
    line.pair("-display", "none").pair("-sandbox", SANDBOX);
    // A comma is QEMU's separator; doubled, it stands for itself.
    line.pair("-name", wiring.name.replace(',', ",,"));
    base(&mut line, machine, wiring);
    match &wiring.boot {
        Some(boot) => kernel(&mut line, boot),
        None => incoming(&mut line),
    }
    console(&mut line, wiring.console);
    sockets(&mut line, wiring);
    for device in &machine.devices {
        place(&mut line, device, wiring);
    }
    line.0
}

#[derive(Default)]
struct Line(Vec<String>);

impl Line {
    fn flag(&mut self, flag: &str) -> &mut Self {
        self.0.push(flag.to_owned());
        self
    }

    fn pair(&mut self, option: &str, value: impl Into<String>) -> &mut Self {
        self.0.push(option.to_owned());
        self.0.push(value.into());
        self
    }

    fn object(&mut self, option: &str, value: &Value) -> &mut Self {
        self.pair(option, value.to_string())
    }
}

/// There is no `graphics=off` here: with it, firmware and boot loader draw on the serial port, and a console
/// log begins with their terminal codes. Without a display device they are silent.
fn base(line: &mut Line, machine: &Machine, wiring: &Wiring) {
    line.pair(
        "-machine",
        format!(
            "{},memory-backend=ram0,mem-merge=off,dump-guest-core=off,\
             usb=off,vmport=off,smbus=off,sata=off,i8042=off",
            machine.machine_type
        ),
    );
    line.pair("-accel", accelerator(machine)).pair("-cpu", &machine.cpu_model);
    line.pair("-smp", machine.cpus.to_string());
    line.pair("-m", format!("{}B", machine.memory));
    line.pair(
        "-object",
        format!(
            "memory-backend-file,id=ram0,size={}B,mem-path=/proc/self/fd/{},share=on",
            machine.memory, wiring.ram
        ),
    );
}

fn kernel(line: &mut Line, boot: &BootWiring) {
    line.pair("-kernel", format!("/proc/self/fd/{}", boot.kernel));
    line.pair("-initrd", format!("/proc/self/fd/{}", boot.initrd));
    line.pair("-append", &boot.cmdline);
}

/// A guest that goes on needs no kernel file, and QEMU would keep a copy of it per clone. The boot ROM
/// that came with the kernel must be there again, because it is part of the state. Without a kernel the
/// guest cannot reboot in place: the reboot ends QEMU, and the VM is started anew from its disk.
fn incoming(line: &mut Line) {
    line.pair("-option-rom", "linuxboot_dma.bin").pair("-action", "reboot=shutdown");
    line.pair("-incoming", "defer");
}

fn console(line: &mut Line, fd: RawFd) {
    line.pair("-add-fd", format!("fd={fd},set={fd}"));
    line.pair("-chardev", format!("file,id=console,path=/dev/fdset/{fd},append=on"));
    line.pair("-serial", "chardev:console");
}

/// Software emulation keeps translated code; left alone, up to a GiB of it a clone. Measured with boots
/// and shell work, 12 MiB are as fast as 24, 8 are not; larger guests run more code.
fn accelerator(machine: &Machine) -> String {
    match machine.accelerator {
        Accelerator::Kvm => "kvm".to_owned(),
        Accelerator::Tcg => {
            let mib = (machine.memory >> 26).clamp(12, 512);
            format!("tcg,tb-size={mib}")
        }
    }
}

fn sockets(line: &mut Line, wiring: &Wiring) {
    for (name, fd) in ["ctl", "events"].iter().zip(wiring.monitors) {
        line.pair("-chardev", format!("socket,id={name},fd={fd},server=on,wait=off"));
        line.pair("-mon", format!("chardev={name},mode=control"));
    }
}

fn place(line: &mut Line, device: &Device, wiring: &Wiring) {
    let id = device.id();
    let at = location(device.address);
    match device.kind {
        Kind::Rng => {
            line.pair("-object", "rng-random,id=random,filename=/dev/urandom");
            line.pair("-device", format!("virtio-rng-pci,rng=random,id={id},{at}"));
        }
        Kind::Serial => ports(line, &id, &at, &wiring.ports),
        Kind::Layer { index } => {
            if let Some(disk) = wiring.layers.get(usize::from(index)) {
                block(line, &id, &format!("cocoon-layer{index}"), &at, disk);
            }
        }
        Kind::Cow => block(line, &id, "cocoon-cow", &at, &wiring.cow),
        Kind::Nic { index } => {
            if let Some(nic) = wiring.nics.get(usize::from(index)) {
                let mut peer = String::new();
                if let Some(tap) = nic.tap {
                    line.pair("-netdev", format!("tap,id=net{index},fd={tap}"));
                    peer = format!("netdev=net{index},");
                }
                line.pair("-device", format!("virtio-net-pci,{peer}id={id},mac={},romfile=,{at}", nic.mac));
            }
        }
    }
}

fn ports(line: &mut Line, bus: &str, at: &str, ports: &[RawFd]) {
    line.pair("-device", format!("virtio-serial-pci,id={bus},max_ports=8,{at}"));
    for (index, fd) in ports.iter().enumerate() {
        line.pair("-chardev", format!("socket,id=agent{index},fd={fd},server=on,wait=off"));
        line.pair(
            "-device",
            format!(
                "virtserialport,bus={bus}.0,nr={},id=port{index},chardev=agent{index},\
                 name={GUEST_PORT_NAME}{index}",
                index + 1
            ),
        );
    }
}

fn location(address: Address) -> String {
    format!("bus=pcie.0,addr=0x{:x}.{},multifunction=on", address.slot, address.function)
}

/// Nodes from the bottom up, each naming the one below, then the disk.
fn block(line: &mut Line, id: &str, serial: &str, at: &str, disk: &DiskWiring) {
    let mut below: Option<String> = None;
    for (level, fd) in disk.chain.iter().enumerate().rev() {
        let read_only = disk.read_only || level > 0;
        let node = if level == 0 { format!("{id}-disk") } else { format!("{id}-base{level}") };
        line.pair("-add-fd", format!("fd={fd},set={fd}"));
        line.object(
            "-blockdev",
            &json!({
                "driver": "file", "node-name": format!("{node}-file"),
                "filename": format!("/dev/fdset/{fd}"), "read-only": read_only,
            }),
        );
        let mut format = json!({
            "driver": if disk.qcow2 { "qcow2" } else { "raw" },
            "node-name": &node, "file": format!("{node}-file"), "read-only": read_only,
        });
        if disk.qcow2 {
            format["backing"] = below.map_or(Value::Null, Value::String);
        }
        if !read_only {
            format["discard"] = "unmap".into();
        }
        line.object("-blockdev", &format);
        below = Some(node);
    }
    line.pair("-device", format!("virtio-blk-pci,drive={id}-disk,id={id},serial={serial},{at}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wiring() -> Wiring {
        Wiring {
            name: "vk-a,b".into(),
            ram: 10,
            boot: Some(BootWiring { kernel: 11, initrd: 12, cmdline: "console=ttyS0".into() }),
            console: 13,
            monitors: [14, 15],
            ports: [16, 17, 18, 19],
            layers: vec![DiskWiring { chain: vec![20], qcow2: false, read_only: true }],
            cow: DiskWiring { chain: vec![21, 22], qcow2: true, read_only: false },
            nics: vec![NicWiring { tap: Some(23), mac: "02:00:00:00:00:01".into() }],
        }
    }

    fn machine() -> Machine {
        Machine::new("pc-q35-7.2", Accelerator::Tcg, (2, 256 << 20), 1, 1)
    }

    #[test]
    fn the_whole_command_line_is_as_recorded() {
        insta::assert_snapshot!(arguments(&machine(), &wiring()).join("\n"));
    }

    #[test]
    fn a_backing_file_is_read_only_and_explicit_and_the_lowest_has_none() {
        let line = arguments(&machine(), &wiring()).join("\n");
        assert!(line.contains(r#""backing":"cow-base1""#));
        assert!(line.contains(r#""backing":null"#));
        assert_eq!(line.matches(r#""read-only":false"#).count(), 2, "the overlay and its file: {line}");
    }

    #[test]
    fn a_machine_either_boots_a_kernel_or_waits_for_a_state() {
        let line = arguments(&machine(), &wiring());
        assert!(line.iter().any(|word| word == "-kernel") && !line.iter().any(|word| word == "-incoming"));
        let line = arguments(&machine(), &Wiring { boot: None, ..wiring() });
        assert!(!line.iter().any(|word| word == "-kernel") && line.iter().any(|word| word == "-incoming"));
    }
}
