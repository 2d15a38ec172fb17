//! Real QEMU guests: boot, capture, clone, remove. Needs root, QEMU, the boot bundle and the embedded
//! parts (`cargo xtask bundle`, `cargo xtask embed`).

#![allow(clippy::unwrap_used, clippy::unwrap_in_result, clippy::panic)]

#[path = "guests/hypervisor.rs"]
mod hypervisor;
#[allow(dead_code, reason = "each test program uses a part of it")]
mod support;

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use cocoon_engine::{
    engine::MemoryRecipe,
    error::{BringUpError, ChangeError, LookupError},
    model::{CloneIdentity, CloneSpec, RunSpec, VmState},
};
use support::{
    Host, MIB, chain, clone_on,
    confinement::{confined, without_network},
    on_a_fresh_host, until,
};

/// Numbered lines every 10 ms, without sync, and a counter in memory.
const APPENDER: &str = "(i=0; while :; do i=$((i+1)); echo $i >> /root/lines; echo $i > /run/count; \
                        usleep 10000; done) >/dev/null 2>&1 &";
/// Fails unless the file holds 1, 2, 3… to its end.
const NO_GAP: &str =
    "n=$(wc -l < /root/lines); seq 1 $n > /run/want; head -n $n /root/lines | cmp /run/want - && echo $n";

#[test]
fn a_guest_is_captured_and_its_clone_goes_on_where_it_was() {
    on_a_fresh_host("a_guest_is_captured_and_its_clone_goes_on_where_it_was", || async {
        let host = Host::new().await;
        let begun = Instant::now();
        let vm = host.run("vm-a", 256 * MIB).await;
        println!("FIGURE boot {:?}", begun.elapsed());
        assert_eq!((vm.state, vm.pid > 0, vm.first_booted), (VmState::Running, true, true));
        confined(vm.pid);
        host.sh("vm-a", "echo in-memory > /run/mark; echo on-disk > /root/mark").await;
        host.sh("vm-a", "dd if=/dev/urandom of=/run/blob bs=1M count=20 2>/dev/null").await;
        let sum = host.sh("vm-a", "md5sum /run/blob").await;
        host.sh("vm-a", APPENDER).await;
        let mut seen = 0;
        for round in 0..4 {
            let begun = Instant::now();
            let snapshot = host.engine.capture("vm-a", "vm-a").await.unwrap();
            println!("FIGURE capture {round} {:?}", begun.elapsed());
            assert!(host.engine.inspect("vm-a").await.unwrap().paused);
            host.engine.remove("vm-a", true).await.unwrap();
            host.leaves_nothing().await;
            let begun = Instant::now();
            let vm = host.clone_of("vm-a", "vm-a", CloneIdentity::Same).await;
            println!("FIGURE clone {round} {:?}", begun.elapsed());
            assert_eq!(vm.cloned_from, snapshot.envelope.id);
            assert_eq!(host.sh("vm-a", "cat /run/mark /root/mark").await, "in-memory\non-disk");
            assert_eq!(host.sh("vm-a", "md5sum /run/blob").await, sum);
            let lines: u64 = host.sh("vm-a", NO_GAP).await.parse().unwrap();
            assert!(lines > seen, "{lines} lines after {seen}");
            seen = lines;
        }
        host.engine.remove("vm-a", true).await.unwrap();
        assert_eq!(host.engine.snapshots().await.unwrap().len(), 1, "each capture replaced the one before");
        host.leaves_nothing().await;
    });
}

#[test]
fn saving_pauses_for_the_capture_only_and_loses_nothing() {
    on_a_fresh_host("saving_pauses_for_the_capture_only_and_loses_nothing", || async {
        let host = Host::new().await;
        host.run("vm-a", 256 * MIB).await;
        host.sh("vm-a", APPENDER).await;
        let begun = Instant::now();
        let saved = host.engine.save("vm-a", "repo/base:tag", "first").await.unwrap();
        println!("FIGURE save {:?}", begun.elapsed());
        assert!(!host.engine.inspect("vm-a").await.unwrap().paused);
        let error = host.engine.save("vm-a", "repo/base:tag", "").await.unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("snapshot \"repo/base:tag\" already exists, held by {}", saved.envelope.id)
        );
        // A snapshot of a clone, saved while it goes on, and a clone of that.
        host.clone_of("repo/base:tag", "vm-b", CloneIdentity::New).await;
        host.sh("vm-b", "echo from-b > /root/b; echo in-b > /run/b").await;
        host.engine.save("vm-b", "second", "").await.unwrap();
        // Its base removed, a clone goes on, and can be saved again.
        host.engine.snapshot_remove("repo/base:tag").await.unwrap();
        host.engine.snapshot_remove("second").await.unwrap();
        host.sh("vm-b", "cat /root/b").await;
        host.engine.save("vm-b", "second", "").await.unwrap();
        host.clone_of("second", "vm-c", CloneIdentity::New).await;
        assert_eq!(host.sh("vm-c", "cat /root/b /run/b").await, "from-b\nin-b");
        for vm in ["vm-a", "vm-b", "vm-c"] {
            let lines: u64 = host.sh(vm, NO_GAP).await.parse().unwrap();
            println!("{vm}: {lines} lines");
        }
        let ids =
            |vm: &'static str| host.sh(vm, "cat /etc/machine-id /proc/sys/kernel/random/uuid; hostname");
        let all: BTreeSet<String> = [ids("vm-a").await, ids("vm-b").await, ids("vm-c").await]
            .iter()
            .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
            .collect();
        assert_eq!(all.len(), 9, "machine ids, random ids and host names all differ: {all:?}");
        for vm in ["vm-a", "vm-b", "vm-c"] {
            assert!(matches!(host.engine.remove(vm, false).await, Err(ChangeError::ForceRequired(_))));
            host.engine.remove(vm, true).await.unwrap();
            let again = host.engine.remove(vm, true).await.unwrap_err();
            assert_eq!(again.to_string(), format!("VM not found: {vm}"));
        }
        host.leaves_nothing().await;
    });
}

#[test]
fn without_private_memory_every_way_around_it_gives_the_same_guest() {
    on_a_fresh_host("without_private_memory_every_way_around_it_gives_the_same_guest", || async {
        let host = Host::new().await;
        let stream = host.again(MemoryRecipe::FullStream).await;
        host.run("vm-a", 256 * MIB).await;
        host.sh("vm-a", "echo kept > /run/mark").await;
        host.engine.save("vm-a", "ranges", "").await.unwrap();
        stream.save("vm-a", "stream", "").await.unwrap();
        let folder = |snapshot: cocoon_engine::model::Snapshot| snapshot.folder;
        assert!(folder(host.engine.snapshot("ranges").await.unwrap()).join("memory-ranges").exists());
        assert!(!folder(host.engine.snapshot("stream").await.unwrap()).join("memory-ranges").exists());
        host.engine.remove("vm-a", true).await.unwrap();
        let ways =
            [("ranges", &stream), ("stream", &stream), ("stream", &host.engine), ("ranges", &host.engine)];
        for (index, (snapshot, engine)) in ways.into_iter().enumerate() {
            let begun = Instant::now();
            clone_on(engine, snapshot, "vm-b", CloneIdentity::New).await;
            println!("FIGURE way {index} ({snapshot}) {:?}", begun.elapsed());
            assert_eq!(host.sh("vm-b", "cat /run/mark").await, "kept");
            // Each can be saved again, both ways.
            let name = format!("again-{index}");
            engine.save("vm-b", &name, "").await.unwrap();
            host.engine.remove("vm-b", true).await.unwrap();
            host.clone_of(&name, "vm-c", CloneIdentity::New).await;
            assert_eq!(host.sh("vm-c", "cat /run/mark").await, "kept");
            host.engine.remove("vm-c", true).await.unwrap();
        }
    });
}

#[test]
fn clones_have_an_address_each_and_no_frame_of_their_source() {
    on_a_fresh_host("clones_have_an_address_each_and_no_frame_of_their_source", || async {
        let host = Host::networked().await;
        let begun = Instant::now();
        let source = host.run("vm-a", 256 * MIB).await;
        println!("FIGURE boot with network {:?}", begun.elapsed());
        without_network(source.pid);
        let old = address(&host, "vm-a").await;
        host.engine.save("vm-a", "base", "").await.unwrap();
        host.engine.remove("vm-a", true).await.unwrap();
        let watch = Frames::watch(&source.network_configs[0].mac);
        let mut addresses = BTreeSet::from([old]);
        let mut macs = BTreeSet::from([source.network_configs[0].mac.clone()]);
        for name in ["vm-b", "vm-c", "vm-d"] {
            let begun = Instant::now();
            let vm = host.clone_of("base", name, CloneIdentity::New).await;
            println!("FIGURE clone with network {:?}", begun.elapsed());
            without_network(vm.pid);
            let mac = &vm.network_configs[0].mac;
            assert_eq!(host.sh(name, "cat /sys/class/net/eth0/address").await, *mac);
            addresses.insert(address(&host, name).await);
            macs.insert(mac.clone());
        }
        assert_eq!((addresses.len(), macs.len()), (4, 4), "{addresses:?} {macs:?}");
        for (index, address) in addresses.iter().skip(1).enumerate() {
            ping(address, index).await;
        }
        assert_eq!(watch.stop(), 0, "frames with the source's MAC left a clone");
        for name in ["vm-b", "vm-c", "vm-d"] {
            host.engine.remove(name, true).await.unwrap();
        }
        let links = std::process::Command::new("ip").args(["-o", "link"]).output().unwrap();
        assert!(!String::from_utf8_lossy(&links.stdout).contains("bt"), "a tap is left");
        host.leaves_nothing().await;
    });
}

async fn address(host: &Host, vm: &str) -> String {
    let begun = Instant::now();
    loop {
        let line = "ip -4 -o addr show dev eth0 scope global | sed -n 's/.*inet \\([0-9.]*\\).*/\\1/p'";
        let address = host.sh(vm, line).await;
        if !address.is_empty() {
            println!("FIGURE address of {vm} after {:?}", begun.elapsed());
            return address;
        }
        assert!(begun.elapsed() < support::HANGS, "{vm} got no address");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn ping(address: &str, index: usize) {
    let mut command = tokio::process::Command::new("busybox");
    let done = command.args(["ping", "-c", "3", "-W", "10", address]).output().await.unwrap();
    assert!(done.status.success(), "address {index}, {address}: {}", String::from_utf8_lossy(&done.stdout));
}

/// Counts frames from one MAC on the bridge and its ports.
struct Frames(std::process::Child);

impl Frames {
    fn watch(mac: &str) -> Self {
        let script = include_str!("support/frames.py");
        let child = std::process::Command::new("python3")
            .args(["-c", script, mac])
            .stdout(std::process::Stdio::piped())
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("python3 is missing: apt-get install python3");
        Self(child)
    }

    fn stop(mut self) -> u64 {
        drop(self.0.stdin.take());
        let output = self.0.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        println!("{text}");
        text.lines().last().unwrap().trim().parse().unwrap()
    }
}

#[test]
fn sixteen_clones_at_once_all_answer() {
    on_a_fresh_host("sixteen_clones_at_once_all_answer", || async {
        let host = Host::networked().await;
        host.run("source", 256 * MIB).await;
        host.engine.save("source", "base", "").await.unwrap();
        let begun = Instant::now();
        let clones = (0..16).map(|index| {
            let (engine, name) = (host.engine.clone(), format!("vm-{index}"));
            tokio::spawn(async move { clone_on(&engine, "base", &name, CloneIdentity::New).await })
        });
        let mut vms = Vec::new();
        for clone in clones.collect::<Vec<_>>() {
            vms.push(clone.await.unwrap());
        }
        println!("FIGURE sixteen clones {:?}", begun.elapsed());
        let pids: BTreeSet<u32> = vms.iter().map(|vm| vm.pid).collect();
        let macs: BTreeSet<&str> = vms.iter().map(|vm| vm.network_configs[0].mac.as_str()).collect();
        assert_eq!((pids.len(), macs.len()), (16, 16));
        let mut memory = Memory::default();
        for vm in &vms {
            host.sh(&vm.config.name, "true").await;
            memory.add(vm.pid, 256 * MIB);
        }
        println!("FIGURE memory of sixteen clones {memory:?}");
        let budget = memory.changed * 3 / 2 + memory.base + 16 * 30 * MIB;
        assert!(memory.pss <= budget, "{} MiB, budget {} MiB", memory.pss / MIB, budget / MIB);
        for vm in &vms {
            host.engine.remove(&vm.id, true).await.unwrap();
        }
        host.engine.remove("source", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

/// Bytes of memory of several clones of one base.
#[derive(Debug, Default)]
struct Memory {
    pss: u64,
    changed: u64,
    base: u64,
}

impl Memory {
    /// `smaps` of a process; its guest memory is the one mapping of `size`.
    fn add(&mut self, pid: u32, size: u64) {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let (mut ram, mut base) = (false, 0);
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let (name, value) = (words.next().unwrap(), words.next().unwrap_or_default());
            let bytes = value.parse::<u64>().unwrap_or(0) * 1024;
            match name {
                "Size:" => ram = bytes == size,
                "Pss:" => self.pss += bytes,
                "Private_Dirty:" if ram => self.changed += bytes,
                "Rss:" if ram => base += bytes,
                _ => {}
            }
        }
        self.base = self.base.max(base);
    }
}

#[test]
fn a_vm_stops_starts_and_is_seen_when_it_dies() {
    on_a_fresh_host("a_vm_stops_starts_and_is_seen_when_it_dies", || async {
        let host = Host::networked().await;
        let vm = host.run("vm-a", 256 * MIB).await;
        host.sh("vm-a", "echo kept > /root/mark; echo lost > /run/mark").await;
        let begun = Instant::now();
        host.engine.stop("vm-a", false, 2 * support::HANGS).await.unwrap();
        println!("FIGURE stop {:?}", begun.elapsed());
        assert!(begun.elapsed() < support::HANGS, "the guest ends by itself");
        let stopped = host.engine.inspect("vm-a").await.unwrap();
        assert_eq!((stopped.state, stopped.pid, stopped.socket_path.as_str()), (VmState::Stopped, 0, ""));
        host.engine.stop("vm-a", false, Duration::from_secs(1)).await.unwrap();
        assert!(matches!(host.engine.save("vm-a", "s", "").await, Err(ChangeError::NotRunning(_))));
        let started = host.engine.start("vm-a").await.unwrap();
        assert_eq!((&started.id, &started.network_configs), (&vm.id, &vm.network_configs));
        assert_eq!(host.sh("vm-a", "cat /root/mark; cat /run/mark || true").await, "kept");
        address(&host, "vm-a").await;
        assert_eq!(host.engine.start("vm-a").await.unwrap().pid, started.pid, "running already is success");
        // Killed from outside: seen at once, never taken for running, and started again.
        assert!(
            std::process::Command::new("kill")
                .args(["-9", &started.pid.to_string()])
                .status()
                .unwrap()
                .success()
        );
        until("the death", || async { host.engine.inspect("vm-a").await.unwrap().state == VmState::Stale })
            .await;
        assert_eq!(host.engine.list().await.unwrap()[0].state, VmState::Stale);
        assert!(matches!(
            host.engine.guest("vm-a", false, Duration::from_secs(1)).await,
            Err(ChangeError::NotRunning(_))
        ));
        host.engine.start("vm-a").await.unwrap();
        assert_eq!(host.sh("vm-a", "cat /root/mark").await, "kept");
        let console = std::fs::read_to_string(host.engine.console("vm-a").await.unwrap()).unwrap();
        assert!(!console.is_empty());
        // A clone has a disk of its own too.
        host.engine.save("vm-a", "base", "").await.unwrap();
        host.engine.remove("vm-a", true).await.unwrap();
        host.clone_of("base", "vm-b", CloneIdentity::New).await;
        host.engine.snapshot_remove("base").await.unwrap();
        host.sh("vm-b", "echo more >> /root/mark").await;
        host.engine.stop("vm-b", false, support::HANGS).await.unwrap();
        host.engine.start("vm-b").await.unwrap();
        assert_eq!(host.sh("vm-b", "cat /root/mark").await, "kept\nmore");
        host.engine.remove("vm-b", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

#[test]
fn a_frozen_guest_is_resumed_and_a_failed_capture_resumes_it() {
    on_a_fresh_host("a_frozen_guest_is_resumed_and_a_failed_capture_resumes_it", || async {
        let host = Host::new().await;
        host.run("vm-a", 256 * MIB).await;
        host.engine.resume("vm-a").await.unwrap();
        host.engine.capture("vm-a", "s").await.unwrap();
        host.engine.capture("vm-a", "s").await.unwrap();
        let captured = host.engine.snapshot("s").await.unwrap().envelope.id;
        // A copy leaves it paused; what was captured before is then not all that it ever did.
        host.engine.save("vm-a", "copy", "").await.unwrap();
        assert!(host.engine.inspect("vm-a").await.unwrap().paused);
        let refused = host.engine.remove_captured("vm-a", &captured).await.unwrap_err();
        assert!(matches!(refused, ChangeError::WentOn(_)), "{}", chain(&refused));
        host.engine.capture("vm-a", "s").await.unwrap();
        let captured = host.engine.snapshot("s").await.unwrap().envelope.id;
        // Another process finds it paused, and lets it go on.
        let other = host.again(MemoryRecipe::Auto).await;
        assert!(other.inspect("vm-a").await.unwrap().paused);
        other.resume("vm-a").await.unwrap();
        assert!(!host.engine.inspect("vm-a").await.unwrap().paused);
        host.sh("vm-a", "true").await;
        let refused = host.engine.remove_captured("vm-a", &captured).await.unwrap_err();
        assert!(matches!(refused, ChangeError::WentOn(_)), "{}", chain(&refused));
        // The store's disk is full: refused before the guest stops.
        let staging = host.engine.config().root_dir.join("snapshot");
        mount_small(&staging);
        let full = host.engine.capture("vm-a", "t").await.unwrap_err();
        assert!(matches!(full, ChangeError::DiskFull { .. }), "{}", chain(&full));
        assert!(full.to_string().contains("free space"), "{full}");
        assert!(!host.engine.inspect("vm-a").await.unwrap().paused);
        host.sh("vm-a", "true").await;
        unmount(&staging);
        // A capture that fails half way (its folder vanished): the guest goes on, the old one is kept.
        let gone = host.engine.config().root_dir.join("snapshot/localfile");
        std::fs::rename(&gone, gone.with_extension("away")).unwrap();
        host.engine.capture("vm-a", "s").await.unwrap_err();
        assert!(!host.engine.inspect("vm-a").await.unwrap().paused);
        host.sh("vm-a", "true").await;
        std::fs::rename(gone.with_extension("away"), &gone).unwrap();
        let captured = host.engine.capture("vm-a", "s").await.unwrap().envelope.id;
        host.engine.remove_captured("vm-a", &captured).await.unwrap();
        host.clone_of("s", "vm-b", CloneIdentity::Same).await;
        host.engine.remove("vm-b", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

fn mount_small(at: &std::path::Path) {
    let done =
        std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=20m", "tmpfs"]).arg(at).status();
    assert!(done.unwrap().success());
    for folder in ["staging", "localfile"] {
        std::fs::create_dir(at.join(folder)).unwrap();
    }
}

fn unmount(at: &std::path::Path) {
    assert!(std::process::Command::new("umount").arg(at).status().unwrap().success());
}

#[test]
fn what_a_kill_leaves_is_taken_down_by_the_next_engine() {
    on_a_fresh_host("what_a_kill_leaves_is_taken_down_by_the_next_engine", || async {
        let host = Host::new().await;
        // The run is dropped at several moments; each time all of it goes and the name is free again.
        for delay in [5, 60, 200, 800, 2000] {
            let run = host.engine.run(support::tiny("vm-a"));
            let dropped = tokio::time::timeout(Duration::from_millis(delay), run).await;
            if let Ok(made) = dropped {
                println!("FIGURE a boot was done before it was dropped after {delay} ms");
                host.engine.remove(&made.unwrap().id, true).await.unwrap();
            }
            until("the end of a dropped run", || async {
                host.engine.list().await.unwrap().is_empty() && host.remains().is_empty()
            })
            .await;
        }
        // A whole process is killed while it boots a VM: the next engine on the folders takes it down.
        for delay in [300, 1500] {
            support::killed_while_running(&host, Duration::from_millis(delay)).await;
            let next = host.again(MemoryRecipe::Auto).await;
            for whole in next.list().await.unwrap() {
                assert_eq!(whole.state, VmState::Running, "half made");
                println!("FIGURE a boot was done before its process was killed after {delay} ms");
                next.remove(&whole.id, true).await.unwrap();
            }
            host.leaves_nothing().await;
        }
        assert!(host.engine.gc().await.unwrap().iter().all(|line| line.contains("blob")));
    });
}

#[test]
#[ignore = "no test: the other process of the one above, which starts it"]
fn runs_a_vm_for_another_test() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(support::run_for_another_test());
}

#[test]
fn bad_requests_get_one_clear_error_and_leave_nothing() {
    on_a_fresh_host("bad_requests_get_one_clear_error_and_leave_nothing", || async {
        let host = Host::new().await;
        let spec = |name: &str, image: &str, memory: u64| RunSpec {
            image: image.into(),
            memory,
            ..support::tiny(name)
        };
        let error = host.engine.run(spec("vm-a", "nope", 256 * MIB)).await.unwrap_err();
        assert!(matches!(&error, BringUpError::ImageNotResolved(image) if image == "nope"), "{error}");
        for name in ["", "-a", "a/b", "a b", &"x".repeat(64)] {
            let error = host.engine.run(spec(name, "tiny", 256 * MIB)).await.unwrap_err();
            assert!(matches!(error, BringUpError::Invalid(_)), "{name:?}: {error}");
        }
        for memory in [64 * MIB, 1 << 44] {
            assert!(host.engine.run(spec("vm-a", "tiny", memory)).await.is_err());
        }
        let clone = CloneSpec { name: "vm-a".into(), snapshot: "nope".into(), identity: CloneIdentity::New };
        let error = host.engine.clone_vm(clone).await.unwrap_err();
        assert!(matches!(error, BringUpError::Lookup(LookupError::SnapshotNotFound(_))), "{error}");
        host.run("vm-a", 256 * MIB).await;
        let taken = host.engine.run(spec("vm-a", "tiny", 256 * MIB)).await.unwrap_err();
        assert!(taken.to_string().starts_with("vm name \"vm-a\" already exists (id: "), "{taken}");
        host.engine.remove("vm-a", true).await.unwrap();
        host.leaves_nothing().await;
        assert_eq!(host.engine.inspect("vm-a").await.unwrap_err().to_string(), "VM not found: vm-a");
    });
}

#[test]
fn a_clone_of_a_silent_guest_comes_up_with_its_links_down() {
    on_a_fresh_host("a_clone_of_a_silent_guest_comes_up_with_its_links_down", || async {
        let host = Host::networked().await;
        host.run_with_stopped_agent("vm-a").await;
        host.engine.save("vm-a", "silent", "").await.unwrap();
        let begun = Instant::now();
        let vm = host.clone_of("silent", "vm-b", CloneIdentity::New).await;
        let took = begun.elapsed();
        println!("FIGURE clone of a silent guest {took:?}");
        assert!(
            took < host.engine.config().boot_timeout * 2 / 3,
            "{took:?}: it is not waited for as at a boot"
        );
        assert_eq!(vm.state, VmState::Running);
        assert!(vm.warnings.iter().any(|warning| warning.contains("links stay down")), "{:?}", vm.warnings);
        let again = host.engine.start("vm-b").await.unwrap_err();
        assert!(matches!(again, BringUpError::GuestSilent { .. }), "{again}");
        host.engine.remove("vm-b", true).await.unwrap();
        host.engine.remove("vm-a", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

#[test]
fn an_adopted_snapshot_is_checked_file_by_file() {
    on_a_fresh_host("an_adopted_snapshot_is_checked_file_by_file", || async {
        let host = Host::new().await;
        host.run("vm-a", 256 * MIB).await;
        host.sh("vm-a", "echo kept > /run/mark").await;
        let saved = host.engine.save("vm-a", "base", "").await.unwrap();
        host.engine.remove("vm-a", true).await.unwrap();
        type Spoil = fn(&std::path::Path);
        let table: [(&str, Spoil); 9] = [
            ("qemu.json is missing", |folder| std::fs::remove_file(folder.join("qemu.json")).unwrap()),
            ("qemu.json cannot be read", |folder| std::fs::write(folder.join("qemu.json"), "{").unwrap()),
            ("qemu-state is missing, empty", |folder| std::fs::write(folder.join("qemu-state"), "").unwrap()),
            ("memory-ranges is not", |folder| truncate(&folder.join("memory-ranges"), 4096)),
            ("cow.qcow2 is missing", |folder| std::fs::remove_file(folder.join("cow.qcow2")).unwrap()),
            ("names a backing file", |folder| patch(&folder.join("cow.qcow2"), 8, &[0, 0, 0, 0, 0, 0, 2, 0])),
            ("keeps its data in another file", |folder| patch(&folder.join("cow.qcow2"), 79, &[4])),
            ("is no file of such a snapshot", |folder| std::fs::write(folder.join("extra"), "").unwrap()),
            ("is not a regular file", |folder| {
                std::os::unix::fs::symlink("/etc/passwd", folder.join("link")).unwrap()
            }),
        ];
        for (expected, spoil) in table {
            let staging = host.engine.snapshot_staging().await.unwrap();
            copy_files(&saved.folder, staging.folder());
            spoil(staging.folder());
            let error =
                host.engine.snapshot_adopt(staging, "pulled", saved.envelope.clone()).await.unwrap_err();
            assert!(
                matches!(&error, ChangeError::Invalid(text) if text.contains(expected)),
                "{expected}: {error}"
            );
        }
        host.leaves_nothing().await;
        // Of another machine: refused when it is to be cloned, naming both sides, before anything starts.
        let staging = host.engine.snapshot_staging().await.unwrap();
        copy_files(&saved.folder, staging.folder());
        let text = std::fs::read_to_string(staging.folder().join("qemu.json")).unwrap();
        std::fs::write(staging.folder().join("qemu.json"), text.replace("Nehalem-v1", "EPYC-v1")).unwrap();
        let foreign = host.engine.snapshot_adopt(staging, "foreign", saved.envelope.clone()).await.unwrap();
        assert_ne!(foreign.envelope.id, saved.envelope.id, "another snapshot has the id");
        let clone =
            CloneSpec { name: "vm-b".into(), snapshot: "foreign".into(), identity: CloneIdentity::Same };
        let error = host.engine.clone_vm(clone).await.unwrap_err().to_string();
        assert!(
            error.contains("foreign") && error.contains("EPYC-v1") && error.contains("Nehalem-v1"),
            "{error}"
        );
        // Sound, it keeps its id once the original is gone, and wakes.
        host.engine.snapshot_remove("foreign").await.unwrap();
        let staging = host.engine.snapshot_staging().await.unwrap();
        copy_files(&saved.folder, staging.folder());
        host.engine.snapshot_remove("base").await.unwrap();
        let adopted = host.engine.snapshot_adopt(staging, "pulled", saved.envelope.clone()).await.unwrap();
        assert_eq!(adopted.envelope.id, saved.envelope.id);
        let files = host.engine.snapshot_files("pulled").await.unwrap();
        let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["cocoon.json", "cow.qcow2", "memory-ranges", "qemu-state", "qemu.json"]);
        host.clone_of("pulled", "vm-b", CloneIdentity::Same).await;
        assert_eq!(host.sh("vm-b", "cat /run/mark").await, "kept");
        host.engine.remove("vm-b", true).await.unwrap();
        // What the snapshot needs of its image stays until it is gone.
        host.engine.image_remove("tiny").await.unwrap();
        assert_eq!(host.engine.gc().await.unwrap(), Vec::<String>::new());
        host.clone_of("pulled", "vm-b", CloneIdentity::Same).await;
        host.engine.remove("vm-b", true).await.unwrap();
        host.engine.snapshot_remove("pulled").await.unwrap();
        assert!(!host.engine.gc().await.unwrap().is_empty());
        host.leaves_nothing().await;
    });
}

fn copy_files(from: &std::path::Path, to: &std::path::Path) {
    let done =
        std::process::Command::new("cp").args(["--sparse=always", "-r"]).arg(from.join(".")).arg(to).status();
    assert!(done.unwrap().success());
}

fn truncate(path: &std::path::Path, length: u64) {
    std::fs::File::options().write(true).open(path).unwrap().set_len(length).unwrap();
}

fn patch(path: &std::path::Path, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}
