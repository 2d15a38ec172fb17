//! From the initrd into the image's root, as PID 1 (ARCHITECTURE.md, "Guest as PID 1").
//!
//! Entry point: [`boot`]. The steps in order: kernel file systems, modules, disks, overlay, the agent's
//! home, names, then the switch: an image with `/sbin/init` gets it as PID 1 with the agent beside it, else
//! the agent goes on as PID 1. Without `cocoon.layers=` the agent serves in the initrd itself.

use std::{
    ffi::CString,
    fs,
    io::{self, ErrorKind},
    os::unix::{
        fs::{MetadataExt, PermissionsExt, symlink},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mount::{MountFlags, mount, mount_move},
    process::{chdir, chroot},
    system::finit_module,
};

use super::{HOME, cmdline, cmdline::Parameters, identity, machine, power, say};
use crate::sys;

const MODULES: &str = "/lib/modules/cocoon";
/// Mount points in the initrd.
const STAGE: &str = "/cocoon";
/// On the writable disk, outside the image's root: the first boot is over.
const BORN: &str = "/cocoon/cow/cocoon-born";
/// A leading `@` keeps systemd from killing the agent with everything else when it shuts down.
const AGENT_NAME: &str = "@cocoon-agent";

/// Boots; comes back only with an error, after the guest was told to power off.
pub(crate) fn boot() -> Result<(), String> {
    let why = match prepare() {
        Ok(()) => start(),
        Err(why) => why,
    };
    say(&format!("cannot boot: {why}"));
    power::end(power::End::PowerOff)
}

fn prepare() -> Result<(), String> {
    kernel_file_systems()?;
    load_modules();
    let line = fs::read_to_string("/proc/cmdline").map_err(|error| format!("/proc/cmdline: {error}"))?;
    let parameters = cmdline::parse(&line);
    if parameters.layers.is_empty() {
        say("no cocoon.layers= on the kernel command line; serving in the initrd");
        install_home("")?;
    } else {
        mount_root(&parameters)?;
        furnish(&parameters)?;
    }
    // Loopback may be missing from a strange kernel; nothing of ours needs it.
    drop(sys::set_up("lo", true));
    for nic in &parameters.fixed {
        set_fixed(nic).unwrap_or_else(|why| say(&why));
    }
    Ok(())
}

fn kernel_file_systems() -> Result<(), String> {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        make_dir(target)?;
        match mount(kind, target, kind, MountFlags::NOSUID, None) {
            // The kernel may have mounted /dev already.
            Err(rustix::io::Errno::BUSY) | Ok(()) => {}
            Err(error) => return Err(format!("mount {target}: {error}")),
        }
    }
    Ok(())
}

/// Loads the modules in name order. One that fails may not be needed: what is missed shows later.
fn load_modules() {
    let mut files: Vec<PathBuf> =
        fs::read_dir(MODULES).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.sort();
    for path in files.iter().filter(|path| path.extension().is_some_and(|ext| ext == "ko")) {
        let loaded = fs::File::open(path).and_then(|file| Ok(finit_module(file, c"", 0)?));
        match loaded {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                say(&format!("module {}: {error}", path.display()));
            }
            _ => {}
        }
    }
}

/// Mounts layers, writable disk and overlay below [`STAGE`].
fn mount_root(parameters: &Parameters) -> Result<(), String> {
    let stage = |name: &str| format!("{STAGE}/{name}");
    for (index, layer) in parameters.layers.iter().enumerate() {
        let target = stage(&index.to_string());
        mount_disk(layer, &target, "erofs", MountFlags::RDONLY, parameters.timeout)?;
    }
    let cow = stage("cow");
    mount_disk(&parameters.cow, &cow, "ext4", MountFlags::NOATIME, parameters.timeout)?;
    for name in ["cow/upper", "cow/work", "root"] {
        make_dir(&stage(name))?;
    }
    // Relative names keep the option string short, whatever the number of layers.
    chdir(STAGE).map_err(|error| format!("{STAGE}: {error}"))?;
    let lower: Vec<String> = (0..parameters.layers.len()).map(|index| index.to_string()).collect();
    // No index and no metacopy: both tie the writable disk to one build of the layers.
    let options = format!(
        "lowerdir={},upperdir=cow/upper,workdir=cow/work,redirect_dir=on,index=off,metacopy=off,xino=auto",
        lower.join(":")
    );
    let options = CString::new(options).map_err(|_| "a layer name holds a zero byte".to_owned())?;
    mount("overlay", "root", "overlay", MountFlags::empty(), &*options)
        .map_err(|error| format!("overlay of {} layers: {error}", parameters.layers.len()))
}

fn mount_disk(
    name: &str,
    target: &str,
    kind: &str,
    flags: MountFlags,
    limit: Duration,
) -> Result<(), String> {
    let device = wait_for_disk(name, limit)?;
    make_dir(target)?;
    mount(&device, target, kind, flags, None)
        .map_err(|error| format!("mount disk {name} ({}) as {kind}: {error}", device.display()))
}

/// The device of a disk by its serial; a path stands for itself.
fn wait_for_disk(name: &str, limit: Duration) -> Result<PathBuf, String> {
    let until = Instant::now() + limit;
    loop {
        let found = if name.starts_with('/') { Some(PathBuf::from(name)) } else { disk_by_serial(name) };
        match found.filter(|path| path.exists()) {
            Some(path) => return Ok(path),
            None if Instant::now() >= until => return Err(format!("no disk {name} after {limit:?}")),
            None => thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn disk_by_serial(serial: &str) -> Option<PathBuf> {
    fs::read_dir("/sys/block").ok()?.flatten().find_map(|entry| {
        // virtio keeps 20 bytes of a serial.
        let found = fs::read_to_string(entry.path().join("serial")).ok()?;
        let wanted = serial.get(..20).unwrap_or(serial);
        (found.trim_end_matches(['\n', '\0']) == wanted).then(|| Path::new("/dev").join(entry.file_name()))
    })
}

/// Makes the new root livable and moves there.
fn furnish(parameters: &Parameters) -> Result<(), String> {
    let root = format!("{STAGE}/root");
    for dir in ["proc", "sys", "dev", "run", "etc", "tmp", "var", "root"] {
        make_dir(&format!("{root}/{dir}"))?;
    }
    drop(fs::set_permissions(format!("{root}/tmp"), fs::Permissions::from_mode(0o1777)));
    for dir in ["proc", "sys", "dev"] {
        mount_move(format!("/{dir}"), format!("{root}/{dir}"))
            .map_err(|error| format!("move /{dir}: {error}"))?;
    }
    tmpfs(&format!("{root}/run"), c"mode=755")?;
    install_home(&root)?;
    if !Path::new(BORN).exists() {
        machine::set_machine_id(&root, &machine::fresh_machine_id()?)?;
        machine::remove_saved_seed(&root)?;
        // Last, so that a crash in between makes this boot the first one again.
        fs::write(BORN, "").map_err(|error| format!("{BORN}: {error}"))?;
    }
    empty_initrd();
    switch(&root).map_err(|error| format!("switch to the new root: {error}"))?;
    device_mounts();
    if identity::is_hostname(&parameters.hostname) {
        machine::set_hostname(&parameters.hostname)?;
    }
    Ok(())
}

fn device_mounts() {
    // An image that lacks one of these lives with it.
    let nothing = MountFlags::NOSUID | MountFlags::NOEXEC;
    if fs::create_dir_all("/dev/pts").is_ok() {
        let _ = mount("devpts", "/dev/pts", "devpts", nothing, c"mode=620,gid=5,ptmxmode=666");
    }
    if fs::create_dir_all("/dev/shm").is_ok() {
        let _ = mount("tmpfs", "/dev/shm", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=1777");
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        drop(symlink(target, format!("/dev/{name}")));
    }
}

/// The agent's own tmpfs: the agent, busybox, the DHCP script.
fn install_home(root: &str) -> Result<(), String> {
    let home = format!("{root}{HOME}");
    make_dir(&home)?;
    tmpfs(&home, c"mode=755,size=32m")?;
    let copy = |from: &str, to: &str| -> io::Result<()> {
        let to = format!("{home}/{to}");
        fs::copy(from, &to)?;
        fs::set_permissions(to, fs::Permissions::from_mode(0o755))
    };
    let own = if root.is_empty() { "/proc/self/exe" } else { "/init" };
    copy(own, "agent").map_err(|error| format!("{home}/agent: {error}"))?;
    // Without busybox there is no DHCP; everything else works.
    if let Err(error) = copy("/bin/busybox", "busybox") {
        say(&format!("no busybox in the initrd, so no DHCP: {error}"));
    }
    let script = format!("{home}/udhcpc.sh");
    fs::write(&script, include_str!("udhcpc.sh"))
        .and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)))
        .map_err(|error| format!("{script}: {error}"))
}

fn tmpfs(target: &str, options: &std::ffi::CStr) -> Result<(), String> {
    mount("tmpfs", target, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, options)
        .map_err(|error| format!("tmpfs at {target}: {error}"))
}

/// Gives the initrd's memory back. Other file systems mounted in it are left alone.
fn empty_initrd() {
    if let Ok(meta) = fs::symlink_metadata("/") {
        empty(Path::new("/"), meta.dev());
    }
}

fn empty(dir: &Path, device: u64) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.dev() != device => {}
            Ok(meta) if meta.is_dir() => empty(&path, device),
            Ok(_) => drop(fs::remove_file(&path)),
            Err(_) => {}
        }
    }
}

fn switch(root: &str) -> io::Result<()> {
    chdir(root)?;
    mount_move(".", "/")?;
    chroot(".")?;
    Ok(chdir("/")?)
}

fn set_fixed(nic: &cmdline::Fixed) -> Result<(), String> {
    let interface = nic.interface.as_str();
    sys::set_up(interface, true).map_err(|error| format!("{interface}: {error}"))?;
    let (address, prefix) = nic.address;
    busybox(&["ip", "addr", "add", &format!("{address}/{prefix}"), "dev", interface])?;
    if let Some(gateway) = nic.gateway {
        busybox(&["ip", "route", "add", "default", "via", &gateway.to_string(), "dev", interface])?;
    }
    if !nic.dns.is_empty() {
        let servers: String = nic.dns.iter().map(|server| format!("nameserver {server}\n")).collect();
        machine::remove("/etc/resolv.conf")?;
        fs::write("/etc/resolv.conf", servers).map_err(|error| format!("/etc/resolv.conf: {error}"))?;
    }
    Ok(())
}

fn busybox(arguments: &[&str]) -> Result<(), String> {
    let status = Command::new(format!("{HOME}/busybox")).args(arguments).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{}: {status}", arguments.join(" "))),
        Err(error) => Err(format!("{}: {error}", arguments.join(" "))),
    }
}

/// Hands PID 1 on. Comes back only when that failed.
fn start() -> String {
    if Path::new("/sbin/init").exists() {
        match agent("keep").stdin(Stdio::null()).spawn() {
            Ok(_) => {
                let error = Command::new("/sbin/init").env_clear().env("TERM", "linux").exec();
                say(&format!("/sbin/init: {error}; going on without it"));
            }
            Err(error) => say(&format!("the agent does not start beside /sbin/init: {error}")),
        }
    }
    // Needs no more than a tmpfs: systemd brings its own.
    if fs::create_dir_all("/sys/fs/cgroup").is_ok() || Path::new("/sys/fs/cgroup").is_dir() {
        let _ = mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MountFlags::NOSUID | MountFlags::NOEXEC, None);
    }
    format!("the agent: {}", agent("serve").exec())
}

/// Keeps an agent running beside the image's own PID 1.
pub(super) fn keep() -> Result<(), String> {
    loop {
        match agent("serve").status() {
            Ok(status) => say(&format!("the agent ended with {status}; starting it again")),
            Err(error) => say(&format!("the agent does not start: {error}")),
        }
        thread::sleep(Duration::from_secs(1));
    }
}

/// The agent as installed, with a clean environment.
fn agent(verb: &str) -> Command {
    let mut command = Command::new(format!("{HOME}/agent"));
    command
        .arg0(AGENT_NAME)
        .arg(verb)
        .env_clear()
        .env("PATH", super::session::PATH)
        .env("HOME", "/root")
        .env("TERM", "linux");
    command
}

fn make_dir(path: &str) -> Result<(), String> {
    fs::create_dir_all(path).map_err(|error| format!("{path}: {error}"))
}
