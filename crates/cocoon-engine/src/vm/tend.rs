//! Upkeep of VMs whose guests run: their logs are cut, and a guest that QEMU stopped because the file
//! system of its disk was full goes on once there is space again.
//!
//! Entry points: [`all`] (whoever keeps the host: the node agent, `gc`), [`glance`] (whoever only looks).
//! What a guest does is QEMU's to say; [`Watch`] is a memory of its last answer. A question costs QEMU a
//! connection, so a VM is asked only when there is a reason ([`is_due`]). Invariants: only a guest that
//! QEMU itself stopped (`io-error`) is let go on here, never one that a capture paused; a VM that
//! somebody works on is left alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use serde_json::json;
use tokio::{task::JoinSet, time::timeout};

use super::{MONITOR_LIMIT, Shared, blocking, guest, unreached};
use crate::{
    error::{ChangeError, Fault, LookupError},
    model::VmState,
    paths::{LogFolder, RunFolder},
    process::Process,
    qemu::qmp::{Qmp, QmpError},
    records::Record,
    room::Left,
};

/// Free bytes from which on a stopped guest goes on.
const ROOM: u64 = 64 << 20;
/// Free bytes below which a guest may soon be stopped, so that it is looked at each time.
const LOW: u64 = 512 << 20;
/// A guest without any reason to worry is looked at this often.
const CALM: Duration = Duration::from_secs(30);
/// How long QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// Questions at a time; each needs some descriptors.
const AT_ONCE: usize = 32;
/// The longest pause between two tries of a guest that is stopped again and again.
const LONGEST: Duration = Duration::from_secs(64);
/// What QEMU calls a guest that it stopped for want of space (`werror=enospc`, its default).
const STOPPED: &str = "io-error";

/// What is known of the guests of running VMs, by VM id. As many entries as VMs run.
#[derive(Debug, Default)]
pub(crate) struct Watch(Mutex<BTreeMap<String, Seen>>);

/// What one guest did when it was last looked at.
#[derive(Debug, Clone, Copy)]
struct Seen {
    process: Process,
    at: Instant,
    starved: bool,
    /// There is a reason to look again at once.
    uneasy: bool,
    /// Its QEMU gave no answer.
    silent: bool,
    tries: Tries,
}

/// How often and when a guest was last let go on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Tries {
    count: u32,
    last: Option<Instant>,
}

impl Tries {
    /// How long after the last try the next one is due: at once for the first, then 2, 4… seconds.
    fn pause(self) -> Duration {
        match self.count {
            0 => Duration::ZERO,
            count => Duration::from_secs(1 << count.min(6)).min(LONGEST),
        }
    }

    fn since(self, now: Instant) -> Option<Duration> {
        self.last.map(|last| now.saturating_duration_since(last))
    }
}

impl Watch {
    fn seen(&self) -> MutexGuard<'_, BTreeMap<String, Seen>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, id: &str, process: Process) -> Option<Seen> {
        self.seen().get(id).copied().filter(|seen| seen.process == process)
    }

    /// QEMU gave no answer: what was seen before stands, and it is not asked again at once.
    fn silent(&self, id: &str, process: Process) {
        let before = self.of(id, process);
        let starved = before.is_some_and(|seen| seen.starved);
        let tries = before.map(|seen| seen.tries).unwrap_or_default();
        let seen = Seen { process, at: Instant::now(), starved, uneasy: false, silent: true, tries };
        self.seen().insert(id.to_owned(), seen);
    }

    /// Whether the guest in this process was last seen stopped for want of space.
    #[must_use]
    pub(crate) fn starved(&self, id: &str, process: Process) -> bool {
        self.of(id, process).is_some_and(|seen| seen.starved)
    }
}

/// The error of whoever needs a guest that stands still for want of space.
pub(crate) async fn no_space(shared: &Arc<Shared>, record: &Record) -> Result<(), ChangeError> {
    glance(shared, std::slice::from_ref(record)).await?;
    let process = shared.process_of(record)?;
    if !process.is_some_and(|process| shared.watch.starved(&record.vm.id, process)) || record.vm.paused {
        return Ok(());
    }
    let folder = shared.run_folder(&record.vm.id).0;
    let at = folder.clone();
    let free = blocking("file system of a VM", move || free(&at)).await?;
    Err(ChangeError::DiskFull { folder: folder.display().to_string(), needed: ROOM, free })
}

/// What a guest needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// Nothing: it runs, or somebody else stopped it and will let it go on.
    Nothing,
    /// Space, or time: it was let go on a short while ago and stopped again.
    Space,
    /// To go on.
    GoOn,
}

/// What a guest needs whose QEMU says `status`; `paused`: by a capture, as the record says.
fn need(status: &str, paused: bool, free: u64, tries: Tries, now: Instant) -> Need {
    if status != STOPPED || paused {
        return Need::Nothing;
    }
    let rested = tries.since(now).is_none_or(|since| since >= tries.pause());
    if free >= ROOM && rested { Need::GoOn } else { Need::Space }
}

/// Whether a guest is to be looked at now.
fn is_due(seen: Option<Seen>, free: u64, now: Instant) -> bool {
    let recent = |seen: &Seen| now.saturating_duration_since(seen.at) < CALM;
    let Some(seen) = seen.filter(recent) else { return true };
    !seen.silent && (free < LOW || seen.uneasy)
}

/// A VM whose hypervisor runs, with what its folder's file system has left.
#[derive(Debug)]
struct Running {
    record: Record,
    process: Process,
    free: u64,
}

/// Cuts logs, looks at guests for which that is due, and lets those go on for which there is space
/// again. Returns a line for each guest that goes on.
pub(crate) async fn all(shared: &Arc<Shared>) -> Result<Vec<String>, Fault> {
    let running = running(shared, shared.records.list().await?).await?;
    let live: BTreeSet<String> = running.iter().map(|vm| vm.record.vm.id.clone()).collect();
    shared.watch.seen().retain(|id, _| live.contains(id));
    cut_logs(shared, &running).await?;
    let now = Instant::now();
    let due = |vm: &Running| is_due(shared.watch.of(&vm.record.vm.id, vm.process), vm.free, now);
    Ok(ask(shared, running.into_iter().filter(due).collect(), true).await)
}

/// Looks at guests that nobody looked at yet, so that a single command tells the truth, too. Where the
/// host is kept by an agent's process, that has seen them all and this does nothing.
pub(crate) async fn glance(shared: &Arc<Shared>, records: &[Record]) -> Result<(), Fault> {
    let mut unseen = Vec::new();
    for record in records {
        let process = shared.process_of(record)?;
        if process.is_some_and(|process| shared.watch.of(&record.vm.id, process).is_none()) {
            unseen.push(record.clone());
        }
    }
    if unseen.is_empty() {
        return Ok(());
    }
    let running = running(shared, unseen).await?;
    cut_logs(shared, &running).await?;
    ask(shared, running, false).await;
    Ok(())
}

async fn running(shared: &Shared, records: Vec<Record>) -> Result<Vec<Running>, Fault> {
    let mut alive = Vec::new();
    for record in records.into_iter().filter(|record| record.vm.state == VmState::Running) {
        if let Some(process) = shared.process_of(&record)? {
            alive.push((shared.run_folder(&record.vm.id), record, process));
        }
    }
    blocking("file systems of VMs", move || {
        // Without an answer there is no reason to think that space is short.
        let with_space = |(run, record, process): (RunFolder, Record, Process)| {
            let free = free(&run.0).unwrap_or(u64::MAX);
            Running { record, process, free }
        };
        Ok::<_, io::Error>(alive.into_iter().map(with_space).collect())
    })
    .await
}

async fn cut_logs(shared: &Shared, running: &[Running]) -> Result<(), Fault> {
    let logs: Vec<LogFolder> = running.iter().map(|vm| shared.log_folder(&vm.record.vm.id)).collect();
    blocking("logs of VMs", move || {
        logs.iter().for_each(guest::trim_logs);
        Ok::<_, io::Error>(())
    })
    .await
}

/// Asks some VMs, a bounded number at a time.
async fn ask(shared: &Arc<Shared>, due: Vec<Running>, may_go_on: bool) -> Vec<String> {
    let (mut lines, mut asking) = (Vec::new(), JoinSet::new());
    for vm in due {
        if asking.len() >= AT_ONCE
            && let Some(done) = asking.join_next().await
        {
            lines.extend(done.ok().flatten());
        }
        let shared = Arc::clone(shared);
        asking.spawn(async move { look(&shared, vm, may_go_on).await });
    }
    while let Some(done) = asking.join_next().await {
        lines.extend(done.ok().flatten());
    }
    lines
}

/// Looks at one guest under its VM's lock; whoever has that knows better what the guest does.
async fn look(shared: &Shared, vm: Running, may_go_on: bool) -> Option<String> {
    let id = vm.record.vm.id.as_str();
    let lock = shared.try_lock(id).ok().flatten()?;
    let record = match shared.records.find(id).await {
        Ok(record) if record.process == Some(vm.process) => record,
        Err(LookupError::VmNotFound(_)) => {
            // Removed since it was listed: the lock file is ours to take away again.
            let _ = fs::remove_file(lock.path());
            return None;
        }
        _ => return None,
    };
    let run = shared.run_folder(id);
    let asked = timeout(ANSWER, question(shared, &run, &record, vm.free, may_go_on)).await;
    if let Ok(Ok(line)) = asked {
        return line;
    }
    tracing::debug!(vm = %record.vm.config.name, answer = ?asked, "QEMU did not say what its guest does");
    shared.watch.silent(id, vm.process);
    None
}

/// Asks one QEMU, notes the answer, and acts on it. The caller has the VM's lock, and waits as long as it likes.
async fn question(
    shared: &Shared,
    run: &RunFolder,
    record: &Record,
    free: u64,
    may_go_on: bool,
) -> Result<Option<String>, QmpError> {
    let Some(process) = record.process else { return Ok(None) };
    let mut qmp = Qmp::connect(&run.ctl(), MONITOR_LIMIT).await?;
    let status = qmp.status().await?;
    let (now, name) = (Instant::now(), &record.vm.config.name);
    let before = shared.watch.of(&record.vm.id, process);
    let mut tries = before.map(|seen| seen.tries).unwrap_or_default();
    let need = need(&status, record.vm.paused, free, tries, now);
    let goes_on = need == Need::GoOn && may_go_on;
    if goes_on {
        qmp.execute("cont", json!({})).await?;
        tries = Tries { count: tries.count.saturating_add(1), last: Some(now) };
        tracing::info!(vm = %name, "there is space again; the guest goes on");
    } else if need == Need::Nothing && tries.since(now).is_some_and(|since| since > LONGEST) {
        tries = Tries::default();
    }
    let starved = need != Need::Nothing && !goes_on;
    if starved && !before.is_some_and(|seen| seen.starved) {
        tracing::warn!(vm = %name, "{}", sentence(name, &run.0));
    }
    let uneasy = need != Need::Nothing;
    shared
        .watch
        .seen()
        .insert(record.vm.id.clone(), Seen { process, at: now, starved, uneasy, silent: false, tries });
    Ok(goes_on.then(|| format!("VM {name} goes on: there is space again")))
}

/// Whether the guest stands still for want of space, asked now. A QEMU that does not say is an error: then nobody
/// knows that its guest runs. The caller has the VM's lock.
pub(crate) async fn is_starved(shared: &Shared, record: &Record) -> Result<bool, Fault> {
    let (run, name) = (shared.run_folder(&record.vm.id), &record.vm.config.name);
    // Nothing is done about it here, so what is free does not matter.
    let asked = timeout(MONITOR_LIMIT, question(shared, &run, record, 0, false)).await;
    let answer = asked.unwrap_or_else(|_| Err(QmpError::Silent("query-status".into())));
    answer.map_err(|error| {
        let step = format!(
            "asking QEMU of VM {name} whether its guest runs; try again, or end it with `cocoon vm stop --force \
             {name}` and start it anew from its disk"
        );
        Fault::new(step, unreached::explained(&run, name, error))
    })?;
    Ok(record.process.is_some_and(|process| shared.watch.starved(&record.vm.id, process)))
}

/// What a VM says of itself while its guest stands still.
#[must_use]
pub(crate) fn sentence(name: &str, folder: &Path) -> String {
    format!(
        "the guest of VM {name} stands still: the file system at {} is full ({} lies there); free at least {} \
         MiB, then the guest goes on by itself, or at once with `cocoon vm start {name}`; nothing is lost",
        file_system(folder).display(),
        folder.display(),
        ROOM >> 20
    )
}

/// Bytes that an ordinary user, such as a VM's QEMU, may still write below `folder`.
pub(super) fn free(folder: &Path) -> io::Result<u64> {
    Left::at(folder).map(|left| left.bytes)
}

/// Where the file system of `folder` is mounted, as far as can be told from the folders above it.
fn file_system(folder: &Path) -> PathBuf {
    let device = |path: &Path| fs::metadata(path).ok().map(|facts| facts.dev());
    let here = device(folder);
    folder.ancestors().take_while(|above| device(above) == here).last().unwrap_or(folder).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROCESS: Process = Process { boot: 1, pid: 2, start: 3 };

    fn tried(count: u32, ago: Duration, now: Instant) -> Tries {
        Tries { count, last: now.checked_sub(ago) }
    }

    #[test]
    fn only_a_guest_that_qemu_stopped_is_let_go_on_and_never_one_that_a_capture_paused() {
        let now = Instant::now();
        let (none, lots) = (Tries::default(), 10 * ROOM);
        for status in
            ["running", "paused", "postmigrate", "finish-migrate", "inmigrate", "internal-error", ""]
        {
            for paused in [false, true] {
                assert_eq!(need(status, paused, lots, none, now), Need::Nothing, "{status}, {paused}");
            }
        }
        assert_eq!(need(STOPPED, true, lots, none, now), Need::Nothing, "a capture has it");
        for (free, wanted) in
            [(0, Need::Space), (ROOM - 1, Need::Space), (ROOM, Need::GoOn), (u64::MAX, Need::GoOn)]
        {
            assert_eq!(need(STOPPED, false, free, none, now), wanted, "{free} bytes free");
        }
    }

    #[test]
    fn a_guest_that_stops_again_and_again_is_tried_less_and_less_often() {
        let now = Instant::now() + Duration::from_secs(1000);
        let pauses: Vec<u64> = (0..9).map(|count| Tries { count, last: None }.pause().as_secs()).collect();
        assert_eq!(pauses, [0, 2, 4, 8, 16, 32, 64, 64, 64]);
        for (count, ago, wanted) in
            [(1, 1, Need::Space), (1, 2, Need::GoOn), (5, 31, Need::Space), (50, 64, Need::GoOn)]
        {
            let tries = tried(count, Duration::from_secs(ago), now);
            assert_eq!(need(STOPPED, false, ROOM, tries, now), wanted, "try {count}, {ago} s ago");
        }
    }

    #[test]
    fn a_guest_is_looked_at_when_it_is_new_short_of_space_uneasy_or_not_seen_for_long() {
        let now = Instant::now() + Duration::from_secs(1000);
        let seen = |ago: Duration, uneasy: bool| {
            let at = now.checked_sub(ago).unwrap();
            Some(Seen {
                process: PROCESS,
                at,
                starved: false,
                uneasy,
                silent: false,
                tries: Tries::default(),
            })
        };
        let second = Duration::from_secs(1);
        for (what, seen, free, wanted) in [
            ("new", None, LOW, true),
            ("calm", seen(second, false), LOW, false),
            ("little space", seen(second, false), LOW - 1, true),
            ("uneasy", seen(second, true), LOW, true),
            ("long ago", seen(CALM, false), LOW, true),
        ] {
            assert_eq!(is_due(seen, free, now), wanted, "{what}");
        }
    }

    #[test]
    fn what_was_seen_of_a_process_says_nothing_about_the_next_one() {
        let watch = Watch::default();
        let seen = Seen {
            process: PROCESS,
            at: Instant::now(),
            starved: true,
            uneasy: true,
            silent: false,
            tries: Tries::default(),
        };
        watch.seen().insert("A".into(), seen);
        assert!(watch.starved("A", PROCESS));
        assert!(!watch.starved("A", Process { start: 4, ..PROCESS }) && !watch.starved("B", PROCESS));
        watch.silent("A", PROCESS);
        watch.silent("B", PROCESS);
        assert!(watch.starved("A", PROCESS) && !watch.starved("B", PROCESS), "no answer says nothing new");
        let later = Instant::now() + CALM / 2;
        assert!(
            !is_due(watch.of("B", PROCESS), 0, later),
            "who does not answer is left in peace for a while"
        );
    }

    #[test]
    fn the_sentence_names_the_vm_the_file_system_and_the_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let text = sentence("vm-a", folder.path());
        for part in
            ["vm-a", &folder.path().display().to_string(), "is full", "free at least 64 MiB", "vm start vm-a"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(file_system(Path::new("/proc/self/fd")), Path::new("/proc"));
    }
}
