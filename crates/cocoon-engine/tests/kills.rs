//! The engine's process is killed in the middle of a clone or a capture, and the next one converges.
//! Needs root, QEMU, the boot bundle and the embedded parts. `COCOON_TEST_KILLS` raises the number of
//! kills of each kind (a soak); the moments are spread over the whole operation, each a little shifted.

#![allow(clippy::unwrap_used, clippy::unwrap_in_result, clippy::panic)]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod support;

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use cocoon_engine::{
    engine::{Engine, MemoryRecipe},
    error::LookupError,
    model::{CloneIdentity, CloneSpec, Vm, VmState},
};
use cocoon_kit::world::RealWorld;
use support::{Host, MIB, chain, clone_on, on_a_fresh_host, until};

/// Numbered lines, without sync, and a counter in memory; slow enough to leave the host to the test.
const APPENDER: &str = "(i=0; while :; do i=$((i+1)); echo $i >> /root/lines; echo $i > /run/count; \
                        usleep 50000; done) >/dev/null 2>&1 &";
/// Fails unless the file holds 1, 2, 3… to its end, and goes on growing.
const COUNTS: &str = "n=$(wc -l < /root/lines); seq 1 $n > /run/want; head -n $n /root/lines | cmp /run/want - || exit 1; \
                      for try in $(seq 1 100); do usleep 100000; [ $(wc -l < /root/lines) -gt $n ] && exit 0; done; exit 2";

const WORK: &str = "COCOON_TEST_WORK";
const FOLDER: &str = "COCOON_TEST_FOLDER";
const COUNT: &str = "COCOON_TEST_KILLS";
/// What the other process says once its engine is open and its work begins.
const BEGINS: &str = "the work begins";

/// How many kills of a kind: `few`, unless the environment asks for more.
fn kills(few: u32) -> u32 {
    std::env::var(COUNT).ok().and_then(|count| count.parse().ok()).unwrap_or(few)
}

/// Moments over `whole`, the first at its beginning and the last past its end; shifted by what the clock
/// says, so that no two runs kill at the same places.
fn moments(count: u32, whole: Duration) -> impl Iterator<Item = Duration> {
    let step = whole / count.max(1);
    (0..count).map(move |index| {
        let nanos =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
        step * index + step.mul_f64(f64::from(nanos % 1000) / 1000.0)
    })
}

/// What the other process is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Clone `base` as `copy`.
    Clone,
    /// Save `source` as `saved`.
    Save,
    /// The same with all memory in the stream.
    SaveStream,
    /// Capture `source` as `saved`, leaving it paused.
    Capture,
}

impl Work {
    const ALL: [Self; 4] = [Self::Clone, Self::Save, Self::SaveStream, Self::Capture];

    fn word(self) -> String {
        format!("{self:?}")
    }

    fn memory(self) -> MemoryRecipe {
        if self == Self::SaveStream { MemoryRecipe::FullStream } else { MemoryRecipe::Auto }
    }

    /// Only a clone makes links.
    fn is_networked(self) -> bool {
        self == Self::Clone
    }

    async fn run(self, engine: &Engine) -> Result<(), String> {
        let spec = CloneSpec { name: "copy".into(), snapshot: "base".into(), identity: CloneIdentity::New };
        let done = match self {
            Self::Clone => engine.clone_vm(spec).await.map(drop).map_err(|error| chain(&error)),
            Self::Save | Self::SaveStream => {
                engine.save("source", "saved", "").await.map(drop).map_err(|error| chain(&error))
            }
            Self::Capture => engine.capture("source", "saved").await.map(drop).map_err(|error| chain(&error)),
        };
        done.map_err(|error| format!("{}: {error}", self.word()))
    }
}

/// Another process at work, with what it says (it must not meet a closed pipe).
struct Worker(Child, BufReader<ChildStdout>);

/// Starts the work in another process, which says when it begins.
fn begun(work: Work, host: &Host) -> Worker {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "works_for_another_test", "--ignored", "--nocapture", "--test-threads=1"])
        .env(WORK, work.word())
        .env(FOLDER, host.folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains(BEGINS) {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "{work:?} did not begin");
    }
    Worker(child, said)
}

/// Does the work in another process and kills that after `delay`.
async fn killed(work: Work, host: &Host, delay: Duration) {
    let mut worker = begun(work, host);
    tokio::time::sleep(delay).await;
    worker.0.kill().unwrap();
    worker.0.wait().unwrap();
    support::nothing_of_it_starts().await;
}

/// How long the work takes when nobody disturbs it, in a process of its own.
async fn undisturbed(work: Work, host: &Host) -> Duration {
    let mut worker = begun(work, host);
    let begun = Instant::now();
    let mut said = String::new();
    worker.1.read_to_string(&mut said).unwrap();
    assert!(worker.0.wait().unwrap().success(), "{work:?}: {said}");
    begun.elapsed()
}

#[test]
#[ignore = "no test: the other process of those of this file, which start it"]
fn works_for_another_test() {
    let word = std::env::var(WORK).expect("it is started by the tests of this file alone");
    let work = Work::ALL.into_iter().find(|work| work.word() == word).unwrap();
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut config = support::config(&folder);
        config.memory = work.memory();
        config.network = work.is_networked().then(|| support::network(&folder));
        let engine = Engine::open(config, Arc::new(RealWorld)).await.unwrap();
        println!("{BEGINS}");
        work.run(&engine).await.unwrap();
    });
}

/// A host with a running VM `source`, whose guest counts, and its snapshot `base`.
async fn counting(host: Host) -> Host {
    host.run("source", 256 * MIB).await;
    host.sh("source", APPENDER).await;
    host.engine.save("source", "base", "").await.unwrap();
    host
}

/// Names below `folder`.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

/// Everything on the host belongs to a VM or a snapshot that the engine lists; nothing is half made.
async fn assert_whole(host: &Host, next: &Engine, vms: &[Vm]) {
    assert!(vms.iter().all(|vm| vm.state == VmState::Running), "{vms:#?}");
    let config = host.engine.config();
    let ids: BTreeSet<String> = vms.iter().map(|vm| vm.id.clone()).collect();
    let locks = ids.iter().map(|id| format!("{id}.lock")).collect();
    for (folder, wanted) in
        [(&config.run_dir, &ids), (&config.log_dir, &ids), (&config.root_dir.join("locks"), &locks)]
    {
        assert_eq!(&names(folder), wanted, "{}", folder.display());
    }
    let snapshots: BTreeSet<String> =
        next.snapshots().await.unwrap().into_iter().map(|snapshot| snapshot.envelope.id).collect();
    assert_eq!(names(&config.root_dir.join("snapshot/localfile")), snapshots);
    assert_eq!(names(&config.root_dir.join("snapshot/staging")), BTreeSet::new());
    let taps: BTreeSet<String> =
        vms.iter().flat_map(|vm| &vm.network_configs).map(|nic| nic.tap.clone()).collect();
    let begun = Instant::now();
    while links_and_rules() != taps {
        let there = links_and_rules();
        assert!(begun.elapsed() < support::HANGS, "links and rules {there:?}, VMs {taps:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let pids: BTreeSet<u32> = vms.iter().map(|vm| vm.pid).collect();
    until("the end of the killed engine's helpers", || async { workers(host.folder.path()) == pids }).await;
}

/// The taps that exist or that a rule names.
fn links_and_rules() -> BTreeSet<String> {
    let said = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let rules = said("nft", &["list", "ruleset"]);
    // What counts packets forgets a tap by itself after a while.
    let lasting: String = rules.lines().filter(|line| !line.contains("expires")).collect();
    let text = said("ip", &["-o", "link"]) + &lasting;
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    words
        .filter(|word| word.len() == 12 && word.starts_with("bt") && word.contains('-'))
        .map(str::to_owned)
        .collect()
}

/// Processes other than this one that hold a file below `folder`: QEMUs, and tools that engines started.
fn workers(folder: &Path) -> BTreeSet<u32> {
    let holds = |pid: &u32| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|target| target.starts_with(folder))
    };
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
        .filter(|pid| *pid != std::process::id() && holds(pid))
        .collect()
}

/// The guest counts without a gap, and goes on doing so.
async fn assert_counts(host: &Host, vm: &str) {
    host.sh(vm, COUNTS).await;
}

#[test]
fn a_kill_in_the_middle_of_a_clone_leaves_a_whole_vm_or_none() {
    on_a_fresh_host("a_kill_in_the_middle_of_a_clone_leaves_a_whole_vm_or_none", || async {
        let host = counting(Host::networked().await).await;
        let whole = undisturbed(Work::Clone, &host).await;
        host.engine.remove("copy", true).await.unwrap();
        let (mut complete, count) = (0, kills(3));
        for delay in moments(count, whole + whole / 8) {
            killed(Work::Clone, &host, delay).await;
            let next = host.again(MemoryRecipe::Auto).await;
            let vms = next.list().await.unwrap();
            assert_whole(&host, &next, &vms).await;
            let made = vms.iter().any(|vm| vm.config.name == "copy");
            println!(
                "FIGURE clone of {whole:?} killed after {delay:?}: {}",
                if made { "whole" } else { "none" }
            );
            complete += u32::from(made);
            if !made {
                // The name is free again, and its snapshot is as good as before.
                clone_on(&next, "base", "copy", CloneIdentity::New).await;
            }
            assert_counts(&host, "copy").await;
            next.remove("copy", true).await.unwrap();
        }
        println!("FIGURE {complete} of {count} killed clones were whole");
        assert_counts(&host, "source").await;
        host.engine.remove("source", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

#[test]
fn a_kill_in_the_middle_of_a_capture_leaves_a_whole_snapshot_or_none_and_a_guest_that_goes_on() {
    let name = "a_kill_in_the_middle_of_a_capture_leaves_a_whole_snapshot_or_none_and_a_guest_that_goes_on";
    on_a_fresh_host(name, || async {
        let host = counting(Host::new().await).await;
        for (work, few) in [(Work::Save, 2), (Work::Capture, 1), (Work::SaveStream, 1)] {
            let whole = undisturbed(work, &host).await;
            host.engine.resume("source").await.unwrap();
            for delay in moments(kills(few), whole + whole / 8) {
                // A save refuses a name that is taken; a capture replaces the snapshot of the former round.
                if work != Work::Capture {
                    forget(&host.engine, "saved").await;
                }
                killed(work, &host, delay).await;
                converged(&host, work, delay, whole).await;
            }
            forget(&host.engine, "saved").await;
        }
        a_transfer_that_a_kill_left_is_ended(&host).await;
        // A copy of a clone is merged by a tool of its own; the source is a clone from here on.
        host.engine.remove("source", true).await.unwrap();
        clone_on(&host.engine, "base", "source", CloneIdentity::Same).await;
        let whole = undisturbed(Work::Save, &host).await;
        for delay in moments(kills(1), whole) {
            forget(&host.engine, "saved").await;
            killed(Work::Save, &host, delay).await;
            converged(&host, Work::Save, delay, whole).await;
        }
        host.engine.remove("source", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

/// A killed engine may leave QEMU at writing its state. Whoever lets the guest go on ends that first: left
/// alone it would stop the guest once more at its end.
async fn a_transfer_that_a_kill_left_is_ended(host: &Host) {
    host.engine.capture("source", "saved").await.unwrap();
    // Where QEMU's own user can reach it.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let sink = folder.path().join("sink");
    let listener = UnixListener::bind(&sink).unwrap();
    std::fs::set_permissions(&sink, PermissionsExt::from_mode(0o777)).unwrap();
    let swallowed = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::copy(&mut stream, &mut std::io::sink()).unwrap()
    });
    let capability = serde_json::json!([{"capability": "x-ignore-shared", "state": false}]);
    let mut monitor = Monitor::open(&host.engine.inspect("source").await.unwrap().socket_path);
    monitor.tell("cont", &serde_json::json!({}));
    monitor.tell("stop", &serde_json::json!({}));
    monitor.tell("migrate-set-capabilities", &serde_json::json!({"capabilities": capability}));
    monitor.tell("migrate-set-parameters", &serde_json::json!({"max-bandwidth": 16 * MIB}));
    monitor.tell("migrate", &serde_json::json!({"uri": format!("unix:{}", sink.display())}));
    drop(monitor);
    host.engine.resume("source").await.unwrap();
    assert_counts(host, "source").await;
    println!("FIGURE {} bytes of a left-over transfer", swallowed.join().unwrap());
    assert_counts(host, "source").await;
    forget(&host.engine, "saved").await;
}

/// A QEMU's monitor, past the engine.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn open(socket: &str) -> Self {
        let mut monitor = Self(BufReader::new(UnixStream::connect(socket).unwrap()));
        monitor.tell("qmp_capabilities", &serde_json::json!({}));
        monitor
    }

    fn tell(&mut self, command: &str, arguments: &serde_json::Value) {
        let request = serde_json::json!({"execute": command, "arguments": arguments});
        writeln!(self.0.get_mut(), "{request}").unwrap();
        let mut line = String::new();
        while !line.contains("\"return\"") {
            line.clear();
            assert!(
                self.0.read_line(&mut line).unwrap() > 0 && !line.contains("\"error\""),
                "{command}: {line}"
            );
        }
    }
}

async fn forget(engine: &Engine, snapshot: &str) {
    match engine.snapshot_remove(snapshot).await {
        Ok(()) | Err(LookupError::SnapshotNotFound(_)) => {}
        Err(error) => panic!("{}", chain(&error)),
    }
}

/// What must hold after a kill: the next engine finds whole things only, a paused guest goes on when it is
/// told to (the agent tells it, or `cocoon vm start`), and the same name can be used again.
async fn converged(host: &Host, work: Work, delay: Duration, whole: Duration) {
    let next = host.again(MemoryRecipe::Auto).await;
    let vms = next.list().await.unwrap();
    assert_whole(host, &next, &vms).await;
    let paused = vms.iter().find(|vm| vm.config.name == "source").unwrap().paused;
    let made = next.snapshot("saved").await.is_ok();
    println!("FIGURE {work:?} of {whole:?} killed after {delay:?}: whole {made}, paused {paused}");
    next.start("source").await.unwrap();
    assert_counts(host, "source").await;
    if made {
        clone_on(&next, "saved", "copy", CloneIdentity::New).await;
        assert_counts(host, "copy").await;
        next.remove("copy", true).await.unwrap();
        // Nothing that the killed capture left under way stops the guest later.
        assert_counts(host, "source").await;
    }
    if work == Work::Capture || !made {
        work.run(&next).await.unwrap();
        next.resume("source").await.unwrap();
    }
}
