//! A real guest on a host whose disk fills up, or whose power may be cut. Needs root, QEMU, strace, the boot
//! bundle and the embedded parts.

#![allow(clippy::unwrap_used, clippy::unwrap_in_result, clippy::panic)]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod support;

use std::{
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use cocoon_engine::{
    engine::MemoryRecipe,
    error::ChangeError,
    model::{CloneIdentity, Vm, VmState},
};
use support::{Host, MIB, on_a_fresh_host, until};

/// Numbered pieces, more than the host's disk will take, and then what came of it.
const WRITER: &str = "(seq 1 150000 > /run/piece; for i in $(seq 1 24); do echo $i; cat /run/piece; done \
                      > /root/pieces && sync && echo well > /root/done) >/dev/null 2>&1 &";
/// Fails unless every piece arrived, as the disk has it.
const ALL_THERE: &str = "echo 3 > /proc/sys/vm/drop_caches; \
                         for i in $(seq 1 24); do echo $i; cat /run/piece; done | cmp - /root/pieces && echo whole";

/// A small file system of its own for the VMs' folders.
struct Small(PathBuf);

impl Small {
    fn mounted(at: &Path) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=224m,mode=0700", "tmpfs"]).arg(at);
        assert!(mount.status().unwrap().success());
        Self(at.to_owned())
    }

    /// One with room for bytes, but for `files` files only.
    fn of_few_files(at: &Path, files: u32) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o"]).arg(format!("size=600m,mode=0700,nr_inodes={files}"));
        done(mount.arg("tmpfs").arg(at));
        Self(at.to_owned())
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    fn free(&self) -> u64 {
        let facts = rustix::fs::statvfs(&self.0).unwrap();
        facts.f_bavail * facts.f_frsize
    }

    /// Takes all space but `left` bytes.
    fn fill(&self, left: u64) {
        std::fs::write(self.filler(), vec![1; usize::try_from(self.free() - left).unwrap()]).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l"]).arg(&self.0).status();
    }
}

#[test]
fn a_guest_whose_disk_found_no_space_says_so_and_goes_on_when_there_is_space() {
    on_a_fresh_host("a_guest_whose_disk_found_no_space_says_so_and_goes_on_when_there_is_space", || async {
        let mut small = None;
        let host = Host::with(|config| small = Some(Small::mounted(&config.run_dir))).await;
        let small = small.unwrap();
        host.run("vm-a", 256 * MIB).await;
        a_console_is_cut(&host).await;
        small.fill(4 * MIB);
        host.sh("vm-a", WRITER).await;
        until("the end of the space", || async {
            assert!(host.engine.tend().await.unwrap().is_empty(), "no space, no going on");
            host.engine.inspect("vm-a").await.unwrap().disk_full
        })
        .await;
        stopped_and_said_so(&host, &small).await;
        // Another process sees it at its first look, without any upkeep.
        let other = host.again(MemoryRecipe::Auto).await;
        assert!(other.list().await.unwrap()[0].disk_full);
        // A little space is not enough, and trying all the same loses nothing.
        std::fs::File::options().write(true).open(small.filler()).unwrap().set_len(160 * MIB).unwrap();
        assert!(small.free() < 64 * MIB);
        assert!(host.engine.tend().await.unwrap().is_empty());
        std::fs::remove_file(small.filler()).unwrap();
        let begun = Instant::now();
        let lines = host.engine.tend().await.unwrap();
        assert!(matches!(lines.as_slice(), [line] if line.contains("vm-a goes on")), "{lines:?}");
        assert!(!host.engine.inspect("vm-a").await.unwrap().disk_full);
        while host.sh("vm-a", "cat /root/done || true").await != "well" {
            assert!(begun.elapsed() < support::HANGS, "the writer does not come to its end");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        println!("FIGURE from space to the end of the write {:?}", begun.elapsed());
        assert_eq!(host.sh("vm-a", ALL_THERE).await, "whole");
        a_capture_is_not_resumed(&host).await;
        host.engine.remove("vm-a", true).await.unwrap();
    });
}

/// A console that has grown long is cut by the upkeep, and the guest goes on writing at its end.
async fn a_console_is_cut(host: &Host) {
    let vm = host.engine.inspect("vm-a").await.unwrap();
    let console = host.engine.config().log_dir.join(&vm.id).join("console.log");
    let mut log = std::fs::File::options().append(true).open(&console).unwrap();
    std::io::Write::write_all(&mut log, "a line of a console\n".repeat(300_000).as_bytes()).unwrap();
    assert!(host.engine.tend().await.unwrap().is_empty());
    assert!(std::fs::metadata(&console).unwrap().len() <= MIB);
    host.sh("vm-a", "echo the-last-word > /dev/console").await;
    until("the guest's word", || async {
        let text = std::fs::read_to_string(&console).unwrap();
        text.starts_with("a line of a console\n") && text.trim_end().ends_with("the-last-word")
    })
    .await;
}

async fn stopped_and_said_so(host: &Host, small: &Small) {
    let vm = host.engine.inspect("vm-a").await.unwrap();
    assert_eq!((vm.state, vm.paused), (VmState::Running, false));
    let [warning] = vm.warnings.as_slice() else { panic!("{:?}", vm.warnings) };
    for part in ["vm-a", &small.0.display().to_string(), "is full", "free at least 64 MiB"] {
        assert!(warning.contains(part), "{part}: {warning}");
    }
    assert_eq!(host.engine.list().await.unwrap()[0].warnings, vm.warnings);
    let shown = serde_json::to_value(&vm).unwrap();
    assert_eq!((&shown["state"], &shown["disk_full"]), (&"running".into(), &true.into()));
    // Who wants something of the guest is told why it does not answer, and need not wait for that.
    let asked = host.engine.guest("vm-a", false, Duration::from_secs(30)).await.map(drop).unwrap_err();
    assert!(matches!(asked, ChangeError::DiskFull { .. }), "{}", support::chain(&asked));
    // Asked to, it tries again at once, and the truth stays the truth.
    host.engine.start("vm-a").await.unwrap();
    until("the next stop", || async {
        host.engine.tend().await.unwrap();
        host.engine.inspect("vm-a").await.unwrap().disk_full
    })
    .await;
}

/// A guest that a capture paused stays paused, whatever space there is.
async fn a_capture_is_not_resumed(host: &Host) {
    host.engine.capture("vm-a", "s").await.unwrap();
    for _ in 0..3 {
        assert!(host.engine.tend().await.unwrap().is_empty());
        let vm = host.engine.inspect("vm-a").await.unwrap();
        assert_eq!((vm.paused, vm.disk_full), (true, false));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    host.engine.resume("vm-a").await.unwrap();
    host.sh("vm-a", "true").await;
}

/// What this process and those it starts sync, in their order.
struct Synced {
    tracer: Child,
    log: PathBuf,
}

impl Synced {
    async fn watched(log: PathBuf) -> Self {
        let mut strace = Command::new("strace");
        strace.args(["-q", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o"]).arg(&log);
        let tracer = strace.args(["-p", &std::process::id().to_string()]).spawn();
        let tracer = tracer.expect("strace is missing: apt-get install strace");
        until("the tracer", || async {
            let mut tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            tasks.all(|task| {
                let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
                !status.contains("TracerPid:\t0\n")
            })
        })
        .await;
        Self { tracer, log }
    }

    fn lines(mut self) -> Vec<String> {
        done(Command::new("kill").args(["-TERM", &self.tracer.id().to_string()]));
        self.tracer.wait().unwrap();
        std::fs::read_to_string(&self.log).unwrap().lines().map(str::to_owned).collect()
    }
}

fn done(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

#[test]
fn a_file_system_without_inodes_is_told_as_that_and_not_as_one_without_bytes() {
    on_a_fresh_host("a_file_system_without_inodes_is_told_as_that_and_not_as_one_without_bytes", || async {
        let mut small = None;
        let host = Host::with(|config| small = Some(Small::of_few_files(&config.root_dir, 200))).await;
        let small = small.unwrap();
        let folder = small.filler();
        std::fs::create_dir(&folder).unwrap();
        let made =
            (0..1000).take_while(|file| std::fs::write(folder.join(file.to_string()), "").is_ok()).count();
        assert!(made < 200, "{made} files on a file system of 200");
        let staged = host.engine.snapshot_staging().await.map(drop).unwrap_err();
        let booted = host.engine.run(support::tiny("vm-a")).await.map(drop).unwrap_err();
        for error in [&booted as &(dyn std::error::Error + 'static), &staged] {
            let text = support::chain(error);
            assert!(text.contains("has no inodes for more files ("), "{text}");
            assert!(
                text.contains(" of 200 are free")
                    && text.contains("--root-dir")
                    && cocoon_kit::failure::is_disk_full(error),
                "{text}"
            );
        }
        std::fs::remove_dir_all(&folder).unwrap();
        host.leaves_nothing().await;
        host.run("vm-a", 256 * MIB).await;
        host.engine.remove("vm-a", true).await.unwrap();
    });
}

/// Once a record says that a VM runs, the saved state that it woke from may go: after a power cut its disk must
/// not be what is missing.
#[test]
fn the_disk_of_a_vm_is_durable_before_the_record_that_says_it_runs() {
    on_a_fresh_host("the_disk_of_a_vm_is_durable_before_the_record_that_says_it_runs", || async {
        let host = Host::new().await;
        let synced = Synced::watched(host.folder.path().join("fresh")).await;
        let vm = host.run("vm-a", 256 * MIB).await;
        assert_order(&synced.lines(), &host.engine.config().run_dir, &vm, &["cow.qcow2"]);
        host.engine.save("vm-a", "base", "").await.unwrap();
        host.engine.remove("vm-a", true).await.unwrap();
        let synced = Synced::watched(host.folder.path().join("clone")).await;
        let vm = host.clone_of("base", "vm-b", CloneIdentity::New).await;
        let files = ["cow.qcow2", "cow-base.qcow2"];
        assert_order(&synced.lines(), &host.engine.config().run_dir, &vm, &files);
        host.engine.remove("vm-b", true).await.unwrap();
    });
}

fn assert_order(synced: &[String], folder: &Path, vm: &Vm, files: &[&str]) {
    let record =
        synced.iter().rposition(|line| line.contains("engine.db-wal>")).expect("the record is synced");
    let own = folder.join(&vm.id);
    let names = [folder.to_owned(), own.clone()];
    for path in files.iter().map(|file| own.join(file)).chain(names) {
        // QEMU itself syncs by another call.
        let call = format!("<{}>", path.display());
        let at = synced.iter().position(|line| line.contains(" fsync(") && line.contains(&call));
        assert!(at.is_some_and(|at| at < record), "{}: {synced:#?}", path.display());
    }
}
