//! Guests and the QEMU under them: another one on the host than under the guest, and starts that are given up.

use std::{
    fs::File,
    io::Read as _,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use cocoon_engine::{
    engine::{Engine, EngineConfig},
    error::{BringUpError, ChangeError},
    model::{CloneIdentity, CloneSpec, RunSpec},
};
use cocoon_kit::world::{RealWorld, World};

use crate::support::{self, Host, MIB, chain, on_a_fresh_host, until};

/// A program that is the host's QEMU in all but the version that it tells.
fn qemu_that_says(version: &str, folder: &Path) -> EngineConfig {
    let path = folder.join("qemu");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo 'QEMU emulator version {version} (another)'\n\
         exec /usr/bin/qemu-system-x86_64 \"$@\"\n"
    );
    std::fs::write(&path, script).unwrap();
    // Guests' users start it, too.
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
    EngineConfig { qemu: path, ..support::config(folder) }
}

/// An engine on the host's folders for which the host's QEMU was replaced.
async fn replaced(host: &Host, version: &str, folder: &Path) -> Engine {
    let config = EngineConfig { qemu: qemu_that_says(version, folder).qemu, ..host.engine.config().clone() };
    Engine::open(config, Arc::new(RealWorld)).await.unwrap()
}

fn description(snapshot: &cocoon_engine::model::Snapshot) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(snapshot.folder.join("qemu.json")).unwrap()).unwrap()
}

#[test]
fn a_state_carries_the_version_of_the_qemu_that_wrote_it() {
    on_a_fresh_host("hypervisor::a_state_carries_the_version_of_the_qemu_that_wrote_it", || async {
        let (host, folder) = (Host::new().await, tempfile::tempdir().unwrap());
        host.run("vm-a", 256 * MIB).await;
        host.sh("vm-a", "echo kept > /run/mark").await;
        // The package is upgraded under the running guest, and the engine's process is another one.
        let upgraded = replaced(&host, "8.2.0", folder.path()).await;
        let captured =
            upgraded.capture("vm-a", "vm-a").await.unwrap_or_else(|error| panic!("{}", chain(&error)));
        let said = description(&captured);
        let version = said["qemu_version"].as_str().unwrap().to_owned();
        assert!(version.starts_with("7.2."), "{said}");
        assert_eq!(
            (&said["machine"]["machine_type"], &said["memory_mode"]),
            (&"pc-q35-7.2".into(), &"ranges".into())
        );
        upgraded.remove_captured("vm-a", &captured.envelope.id).await.unwrap();
        // Here it does not wake, which is said before anything is made, and it stays.
        let spec =
            || CloneSpec { name: "vm-a".into(), snapshot: "vm-a".into(), identity: CloneIdentity::Same };
        let refused = upgraded.clone_vm(spec()).await.unwrap_err();
        assert!(matches!(refused, BringUpError::SnapshotIncompatible { .. }), "{refused}");
        for part in ["snapshot vm-a", "QEMU 7.2", "QEMU 8.2"] {
            assert!(refused.to_string().contains(part), "{part}: {refused}");
        }
        assert!(upgraded.list().await.unwrap().is_empty());
        // Wherever its QEMU is, it does.
        host.clone_of("vm-a", "vm-a", CloneIdentity::Same).await;
        assert_eq!(host.sh("vm-a", "cat /run/mark").await, "kept");
        host.engine.remove("vm-a", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

#[test]
fn what_no_host_could_load_is_not_saved_and_a_cold_start_mends_it() {
    on_a_fresh_host("hypervisor::what_no_host_could_load_is_not_saved_and_a_cold_start_mends_it", || async {
        let folder = tempfile::tempdir().unwrap();
        // Its machine is that of 7.1, but 7.2 runs it: the program was replaced in between.
        let host = Host::with(|config| config.qemu = qemu_that_says("7.1.0", folder.path()).qemu).await;
        host.run("vm-a", 256 * MIB).await;
        host.sh("vm-a", "echo kept > /root/mark").await;
        for refused in [host.engine.capture("vm-a", "s").await, host.engine.save("vm-a", "s", "").await] {
            let refused = refused.unwrap_err();
            assert!(matches!(refused, ChangeError::Unloadable { .. }), "{}", chain(&refused));
            for part in ["VM vm-a", "QEMU 7.2.", "pc-q35-7.1", "pc-q35-7.2", "cocoon vm stop vm-a"] {
                assert!(refused.to_string().contains(part), "{part}: {refused}");
            }
            assert!(!host.engine.inspect("vm-a").await.unwrap().paused);
            host.sh("vm-a", "true").await;
        }
        // As the error says.
        let config =
            EngineConfig { qemu: "/usr/bin/qemu-system-x86_64".into(), ..host.engine.config().clone() };
        let next = Engine::open(config, Arc::new(RealWorld)).await.unwrap();
        next.stop("vm-a", false, support::HANGS).await.unwrap();
        next.start("vm-a").await.unwrap_or_else(|error| panic!("{}", chain(&error)));
        let saved = next.capture("vm-a", "s").await.unwrap_or_else(|error| panic!("{}", chain(&error)));
        assert_eq!(description(&saved)["machine"]["machine_type"], "pc-q35-7.2");
        next.remove_captured("vm-a", &saved.envelope.id).await.unwrap();
        support::clone_on(&next, "s", "vm-b", CloneIdentity::Same).await;
        assert_eq!(host.sh("vm-b", "cat /root/mark").await, "kept");
        next.remove("vm-b", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

#[test]
fn a_guest_is_saved_while_its_hosts_qemu_is_being_replaced() {
    on_a_fresh_host("hypervisor::a_guest_is_saved_while_its_hosts_qemu_is_being_replaced", || async {
        let host = Host::with(|_| {}).await;
        host.run("vm-a", 256 * MIB).await;
        let config = EngineConfig { qemu: "/not/there/now".into(), ..host.engine.config().clone() };
        let without = Engine::open(config, Arc::new(RealWorld)).await.unwrap();
        let saved = without.capture("vm-a", "s").await.unwrap_or_else(|error| panic!("{}", chain(&error)));
        without.remove_captured("vm-a", &saved.envelope.id).await.unwrap();
        support::clone_on(&host.engine, "s", "vm-a", CloneIdentity::Same).await;
        host.engine.remove("vm-a", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

/// The real world, but for the id of one VM.
#[derive(Debug)]
struct OneId(Mutex<Option<&'static str>>);

impl World for OneId {
    fn now(&self) -> jiff::Timestamp {
        RealWorld.now()
    }

    fn instant(&self) -> tokio::time::Instant {
        RealWorld.instant()
    }

    fn random(&self, out: &mut [u8]) {
        RealWorld.random(out);
    }

    fn engine_id(&self) -> String {
        self.0.lock().unwrap().take().map_or_else(|| RealWorld.engine_id(), str::to_owned)
    }
}

/// Holds up whoever starts the QEMU of one VM at its last step before that: where it opens the VM's control
/// group stands a pipe that nobody reads yet.
struct Gate {
    pipe: PathBuf,
    pid_file: PathBuf,
}

impl Gate {
    const ID: &str = "GATEGATEGATEGATEGATEGATEGA";

    /// For the next VM of the engine, which is opened with it on the folders of `host`.
    async fn of(host: &Host) -> (Self, Engine) {
        let groups = Path::new("/sys/fs/cgroup");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(groups).status();
        assert!(mounted.unwrap().success());
        let group = groups.join("cocoon").join(Self::ID);
        std::fs::create_dir_all(&group).unwrap();
        std::fs::write(groups.join("cgroup.procs"), "").unwrap();
        let pipe = group.join("cgroup.procs");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let config = host.engine.config().clone();
        let pid_file = config.run_dir.join(Self::ID).join("qemu.pid");
        let engine = Engine::open(config, Arc::new(OneId(Mutex::new(Some(Self::ID))))).await.unwrap();
        (Self { pipe, pid_file }, engine)
    }

    /// Waits until somebody stands there.
    async fn reached(&self) {
        until("the start of QEMU", || async { self.pid_file.exists() }).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    /// Lets go on, and waits until the new process has passed: it writes into the pipe on its way.
    async fn passed(self) {
        let pipe = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&self.pipe).unwrap();
        until("the new process", || async { (&pipe).read(&mut [0]).is_ok_and(|bytes| bytes == 1) }).await;
    }
}

async fn nothing_is_left(host: &Host) {
    until("the end of what was given up", || async {
        host.engine.list().await.unwrap().is_empty() && host.remains().is_empty()
    })
    .await;
    let links = Command::new("ip").args(["-o", "link"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&links.stdout).contains("btgate"), "a tap is left");
}

fn spec(nics: usize) -> RunSpec {
    RunSpec { nics, ..support::tiny("vm-a") }
}

#[test]
fn a_run_that_is_given_up_while_its_qemu_is_being_started_leaves_nothing() {
    let name = "hypervisor::a_run_that_is_given_up_while_its_qemu_is_being_started_leaves_nothing";
    on_a_fresh_host(name, || async {
        // Without a NIC as well: a QEMU whose tap was taken away would end by itself.
        for nics in [0, 1] {
            let host = if nics == 0 { Host::new().await } else { Host::networked().await };
            let (gate, engine) = Gate::of(&host).await;
            let running = tokio::spawn(async move { engine.run(spec(nics)).await });
            gate.reached().await;
            running.abort();
            assert!(running.await.unwrap_err().is_cancelled());
            // Whatever is done about that has its time, then QEMU is started all the same.
            tokio::time::sleep(Duration::from_millis(500)).await;
            gate.passed().await;
            nothing_is_left(&host).await;
        }
    });
}

#[test]
fn a_qemu_that_nobody_could_find_again_does_not_run() {
    on_a_fresh_host("hypervisor::a_qemu_that_nobody_could_find_again_does_not_run", || async {
        let host = Host::new().await;
        let (gate, engine) = Gate::of(&host).await;
        let running = tokio::spawn(async move { engine.run(spec(0)).await });
        gate.reached().await;
        std::fs::remove_file(&gate.pid_file).unwrap();
        gate.passed().await;
        let error = running.await.unwrap().unwrap_err();
        assert!(chain(&error).contains("no note of itself"), "{}", chain(&error));
        nothing_is_left(&host).await;
    });
}
