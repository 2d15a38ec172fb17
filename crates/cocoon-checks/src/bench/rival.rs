//! The rival: QEMU itself restoring the same state, from exec to the answer to `cont`, with none of our
//! engine around it.
//!
//! Entry points: [`Recipe::of`] takes the command line of a clone that runs, [`Recipe::race`] runs it
//! again on fresh descriptors: same machine, same memory file mapped by the same shim, same device
//! state, same disks under a fresh overlay, same kind of tap. The clock starts before the process does
//! and stops when QEMU has answered `cont`; the socket is polled each millisecond.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead as _, BufReader, IoSlice, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::{
            fs::MetadataExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use cocoon_engine::{
    embed,
    model::{Snapshot, Vm},
};
use cocoon_kit::world::{RealWorld, World as _};
use rustix::{
    fs::{MemfdFlags, memfd_create},
    io::{FdFlags, fcntl_setfd},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use serde_json::{Value, json};

use super::lab::Lab;

/// What an inherited descriptor is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Role {
    Ram,
    /// Kernel or initrd: the same open file.
    Boot,
    Console,
    /// A disk's node.
    Disk(String),
    /// A socket's name.
    Socket(String),
    Tap,
}

/// A QEMU that can be started again and again.
#[derive(Debug)]
pub(super) struct Recipe {
    program: PathBuf,
    line: Vec<String>,
    /// By the number that the recorded command line has for them.
    roles: BTreeMap<i32, Role>,
    boot: BTreeMap<i32, File>,
    disks: BTreeMap<String, PathBuf>,
    snapshot: PathBuf,
    storage: u64,
    memory: u64,
}

/// Which descriptors a command line names, and what each is.
fn roles(line: &[String]) -> BTreeMap<i32, Role> {
    let mut roles = BTreeMap::new();
    for pair in line.windows(2) {
        let [option, value] = pair else { continue };
        let of = |key: &str| value.split(',').find_map(|part| part.strip_prefix(key));
        let fd = |text: &str| text.parse::<i32>().ok();
        let found = match option.as_str() {
            "-object" => of("mem-path=/proc/self/fd/").and_then(fd).map(|fd| (fd, Role::Ram)),
            "-kernel" | "-initrd" => of("/proc/self/fd/").and_then(fd).map(|fd| (fd, Role::Boot)),
            "-netdev" => of("fd=").and_then(fd).map(|fd| (fd, Role::Tap)),
            "-chardev" => match (of("fd=").and_then(fd), of("path=/dev/fdset/").and_then(fd)) {
                (Some(fd), _) => Some((fd, Role::Socket(of("id=").unwrap_or_default().to_owned()))),
                (None, set) => set.map(|set| (set, Role::Console)),
            },
            "-blockdev" => disk(value),
            _ => None,
        };
        roles.extend(found);
    }
    roles
}

/// Descriptor set and node of a file node. The engine gives a set its descriptor's number.
fn disk(value: &str) -> Option<(i32, Role)> {
    let node: Value = serde_json::from_str(value).ok()?;
    let set = node["filename"].as_str()?.strip_prefix("/dev/fdset/")?.parse().ok()?;
    Some((set, Role::Disk(node["node-name"].as_str()?.to_owned())))
}

/// The same line with other descriptors; the numbers of descriptor sets stay.
fn rewired(line: &[String], new: &BTreeMap<i32, i32>) -> Vec<String> {
    let part = |part: &str| {
        for key in ["mem-path=/proc/self/fd/", "/proc/self/fd/", "fd="] {
            let old = part.strip_prefix(key).and_then(|fd| fd.parse().ok());
            if let Some(new) = old.and_then(|old: i32| new.get(&old)) {
                return format!("{key}{new}");
            }
        }
        part.to_owned()
    };
    line.iter().map(|word| word.split(',').map(part).collect::<Vec<_>>().join(",")).collect()
}

impl Recipe {
    /// Records the clone `vm`, which must run.
    pub(super) fn of(vm: &Vm, snapshot: &Snapshot) -> anyhow::Result<Self> {
        let process = PathBuf::from(format!("/proc/{}", vm.pid));
        let text = String::from_utf8(std::fs::read(process.join("cmdline"))?).context("command line")?;
        let line: Vec<String> = text.trim_end_matches('\0').split('\0').skip(1).map(str::to_owned).collect();
        let roles = roles(&line);
        let boot = roles
            .iter()
            .filter(|(_, role)| **role == Role::Boot)
            .map(|(fd, _)| Ok((*fd, File::open(process.join(format!("fd/{fd}")))?)))
            .collect::<std::io::Result<_>>()?;
        ensure!(roles.values().any(|role| *role == Role::Ram), "the clone's command line names no RAM file");
        let mut disks: BTreeMap<_, _> = vm
            .storage_configs
            .iter()
            .filter_map(|disk| {
                Some((
                    format!("{}-disk-file", disk.serial.strip_prefix("cocoon-")?),
                    disk.path.clone().into(),
                ))
            })
            .collect();
        disks.insert("cow-base1-file".to_owned(), snapshot.folder.join("cow.qcow2"));
        Ok(Self {
            program: std::fs::read_link(process.join("exe"))?,
            line,
            roles,
            boot,
            disks,
            snapshot: snapshot.folder.clone(),
            storage: vm.config.storage,
            memory: vm.config.memory,
        })
    }

    /// One run, in seconds.
    pub(super) async fn race(&self, lab: &Lab) -> anyhow::Result<f64> {
        let folder = tempfile::tempdir_in(lab.folder.path())?;
        let id = RealWorld.engine_id();
        let tap = cocoon_net::links::attach(&lab.network, &id, 0, "02:00:00:00:00:01").await?;
        let prepared = self.prepare(folder.path(), tap.fd)?;
        let state = File::open(self.snapshot.join("qemu-state"))?;
        let raced = tokio::task::spawn_blocking(move || prepared.run(&state)).await?;
        cocoon_net::links::detach(&lab.network, &id).await?;
        raced
    }

    /// All that is not QEMU's own work is done before the clock starts.
    fn prepare(&self, folder: &Path, tap: OwnedFd) -> anyhow::Result<Prepared> {
        let overlay = folder.join("overlay.qcow2");
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2"])
            .arg(&overlay)
            .arg(self.storage.to_string())
            .status()
            .context("starting qemu-img")?;
        ensure!(made.success(), "qemu-img create: {made}");
        let (mut kept, mut new, mut tap) = (Vec::<OwnedFd>::new(), BTreeMap::new(), Some(tap));
        let ram = File::from(memfd_create("bench-ram", MemfdFlags::CLOEXEC)?);
        ram.set_len(self.memory)?;
        let (device, inode) = (ram.metadata()?.dev(), ram.metadata()?.ino());
        for (old, role) in &self.roles {
            let fd: OwnedFd = match role {
                Role::Ram => ram.try_clone()?.into(),
                Role::Boot => self.boot.get(old).context("a boot file is missing")?.try_clone()?.into(),
                Role::Console => {
                    File::options().create(true).append(true).open(folder.join("console"))?.into()
                }
                Role::Socket(name) => UnixListener::bind(folder.join(name))?.into(),
                Role::Tap => tap.take().context("the clone has more than one NIC")?,
                Role::Disk(node) if node == "cow-disk-file" => {
                    File::options().read(true).write(true).open(&overlay)?.into()
                }
                Role::Disk(node) => {
                    let path = self.disks.get(node).with_context(|| format!("disk {node} is unknown"))?;
                    File::open(path).with_context(|| path.display().to_string())?.into()
                }
            };
            new.insert(*old, fd.as_raw_fd());
            kept.push(fd);
        }
        let mut library = File::from(memfd_create("bench-shim", MemfdFlags::CLOEXEC)?);
        library.write_all(embed::shim().context(embed::REMEDY)?)?;
        let base = File::open(self.snapshot.join("memory-ranges"))?;
        let mut command = Command::new(&self.program);
        command
            .args(rewired(&self.line, &new))
            .env_clear()
            .env("LD_PRELOAD", format!("/proc/self/fd/{}", library.as_raw_fd()))
            .env("COCOON_SHIM_RAM_DEV", device.to_string())
            .env("COCOON_SHIM_RAM_INO", inode.to_string())
            .env("COCOON_SHIM_BASE_FD", base.as_raw_fd().to_string())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("qemu.log"))?);
        kept.push(library.into());
        kept.push(base.into());
        Ok(Prepared { command, kept, folder: folder.to_owned() })
    }
}

struct Prepared {
    command: Command,
    kept: Vec<OwnedFd>,
    folder: PathBuf,
}

impl Prepared {
    fn run(mut self, state: &File) -> anyhow::Result<f64> {
        // The numbers on the command line are ours: QEMU inherits exactly these.
        for fd in &self.kept {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        let begun = Instant::now();
        let mut child = self.command.spawn().context("starting QEMU")?;
        drop(self.kept);
        let done = restore(&self.folder.join("ctl"), state).map(|()| begun.elapsed().as_secs_f64());
        let mapped = done.is_ok() && maps_privately(&child);
        child.kill()?;
        child.wait()?;
        let log = || std::fs::read_to_string(self.folder.join("qemu.log")).unwrap_or_default();
        let seconds = done.with_context(log)?;
        ensure!(mapped, "the rival did not map the snapshot's memory privately: {}", log());
        Ok(seconds)
    }
}

/// The rival does what the engine's clone does, not something cheaper or dearer.
fn maps_privately(child: &Child) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap_or_default();
    maps.lines().any(|line| line.contains(" rw-p ") && line.ends_with("/memory-ranges"))
}

fn restore(socket: &Path, state: &File) -> anyhow::Result<()> {
    let mut qmp = Qmp::connect(socket)?;
    qmp.ask("qmp_capabilities", &json!({}))?;
    let capability = json!([{ "capability": "x-ignore-shared", "state": true }]);
    qmp.ask("migrate-set-capabilities", &json!({ "capabilities": capability }))?;
    qmp.ask("migrate-set-parameters", &json!({ "announce-rounds": 0, "max-bandwidth": 1_u64 << 40 }))?;
    qmp.ask_with("getfd", &json!({ "fdname": "state" }), Some(state))?;
    qmp.ask("migrate-incoming", &json!({ "uri": "fd:state" }))?;
    loop {
        let now = qmp.ask("query-migrate", &json!({}))?;
        match now["status"].as_str() {
            Some("completed") => break,
            Some("failed") => bail!("QEMU could not load the state: {now}"),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    qmp.ask("cont", &json!({})).map(drop)
}

/// The least that speaks to QEMU.
struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    fn connect(socket: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut qmp = Self { reader: BufReader::new(stream) };
        qmp.line()?;
        Ok(qmp)
    }

    fn line(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        ensure!(self.reader.read_line(&mut line)? > 0, "QEMU closed its monitor");
        Ok(serde_json::from_str(&line)?)
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        self.ask_with(command, arguments, None)
    }

    fn ask_with(&mut self, command: &str, arguments: &Value, fd: Option<&File>) -> anyhow::Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        let fds: Vec<_> = fd.iter().map(|file| file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ensure!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)), "no room for a descriptor");
        }
        let slices = [IoSlice::new(request.as_bytes())];
        let sent = sendmsg(self.reader.get_ref(), &slices, &mut ancillary, SendFlags::NOSIGNAL)?;
        self.reader.get_mut().write_all(request.as_bytes().get(sent..).unwrap_or_default())?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Vec<String> {
        [
            "-object",
            "memory-backend-file,id=ram0,size=268435456B,mem-path=/proc/self/fd/23,share=on",
            "-kernel",
            "/proc/self/fd/26",
            "-add-fd",
            "fd=28,set=28",
            "-chardev",
            "file,id=console,path=/dev/fdset/28,append=on",
            "-chardev",
            "socket,id=ctl,fd=30,server=on,wait=off",
            "-add-fd",
            "fd=29,set=29",
            "-blockdev",
            r#"{"driver":"file","filename":"/dev/fdset/29","node-name":"layer0-disk-file","read-only":true}"#,
            "-netdev",
            "tap,id=net0,fd=22",
        ]
        .map(str::to_owned)
        .to_vec()
    }

    #[test]
    fn every_descriptor_of_a_command_line_has_its_role() {
        let expected = BTreeMap::from([
            (22, Role::Tap),
            (23, Role::Ram),
            (26, Role::Boot),
            (28, Role::Console),
            (29, Role::Disk("layer0-disk-file".into())),
            (30, Role::Socket("ctl".into())),
        ]);
        assert_eq!(roles(&line()), expected);
    }

    #[test]
    fn other_descriptors_take_their_places_and_sets_keep_their_numbers() {
        let new = BTreeMap::from([(22, 1), (23, 2), (26, 3), (28, 29), (29, 28), (30, 6)]);
        let text = rewired(&line(), &new).join(" ");
        for part in [
            "mem-path=/proc/self/fd/2,share=on",
            "-kernel /proc/self/fd/3",
            "-add-fd fd=29,set=28",
            "path=/dev/fdset/28",
            "-add-fd fd=28,set=29",
            "id=ctl,fd=6,server=on",
            "id=net0,fd=1",
            r#""filename":"/dev/fdset/29""#,
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
