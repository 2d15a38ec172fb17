//! What this host's QEMU is and how it executes guests, found once and remembered.
//!
//! Entry point: [`Known::facts`]. What a VM runs on may be another QEMU, which only its own monitor tells:
//! packages are upgraded under running guests. `/dev/kvm` may open and still run nothing, so KVM counts only after a boot
//! sector ran on it within [`PROBE_LIMIT`], confined as guests are. The verdict is kept in the records,
//! per QEMU binary, kernel and rights on the device, and found anew when one of these is another. A probe that
//! did not end by itself is no verdict: guests are emulated meanwhile, and it is made again.

use std::{
    io::{self, Write as _},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use rusqlite::{OptionalExtension as _, params};
use serde::{Deserialize, Serialize};
use tokio::{sync::Mutex, time::Instant};

use super::{
    limit::Stop,
    machine::{Accelerator, CPU_MODEL},
    tool::Tool,
};
use crate::{
    db::Db,
    error::{BringUpError, Fault},
    records::FIRST_UID,
};

/// The device.
const KVM: &str = "/dev/kvm";
/// The user that the probe runs as, below those of VMs: as unprivileged as they are.
const PROBE_UID: u32 = FIRST_UID - 1;
/// How long a boot sector may take under KVM.
const PROBE_LIMIT: Duration = Duration::from_secs(2);
/// How long QEMU may take to say its version; the first time, it comes from a cold disk.
const VERSION_LIMIT: Duration = Duration::from_secs(30);
/// QEMU releases with which the private mapping was tested, by `major.minor`.
const TESTED_FOR_PRIVATE_MEMORY: [&str; 1] = ["7.2"];
/// The probe's answer at the debug port, and the exit status that QEMU makes of it.
const PROBE_ANSWER: u8 = 0x2a;
const PROBE_STATUS: i32 = ((PROBE_ANSWER as i32) << 1) | 1;

/// What this host's QEMU is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Facts {
    /// Such as `7.2.22`.
    pub(crate) version: String,
    /// How guests run here.
    pub(crate) accelerator: Accelerator,
}

impl Facts {
    /// The versioned machine type that fresh VMs get.
    #[must_use]
    pub(crate) fn machine_type(&self) -> String {
        machine_type(&self.version)
    }

    /// Whether this release was tested with private memory.
    #[must_use]
    pub(crate) fn private_memory_tested(&self) -> bool {
        private_memory_tested(&self.version)
    }
}

/// The newest machine type of a QEMU of this version.
#[must_use]
pub(crate) fn machine_type(version: &str) -> String {
    format!("pc-q35-{}", release(version))
}

/// Whether a QEMU of this version was tested with private memory.
#[must_use]
pub(crate) fn private_memory_tested(version: &str) -> bool {
    TESTED_FOR_PRIVATE_MEMORY.contains(&release(version))
}

/// `major.minor` of a version.
#[must_use]
pub(crate) fn release(version: &str) -> &str {
    let end = version.match_indices('.').nth(1).map_or(version.len(), |(at, _)| at);
    version.get(..end).unwrap_or(version)
}

/// Creates the module's table.
pub(crate) async fn migrate(db: &Db) -> Result<(), Fault> {
    db.call("engine records: host facts", |connection| {
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS host_facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
        )
    })
    .await
}

/// What looking at a QEMU found.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    facts: Facts,
    /// Nothing of it is a guess.
    sure: bool,
}

/// What is known of one QEMU.
#[derive(Debug)]
struct Entry {
    /// Of which.
    key: String,
    facts: Facts,
    /// A guess, which is tried again.
    guess: Option<Guess>,
}

/// How often in a row nothing was found out, and when last.
#[derive(Debug, Clone, Copy)]
struct Guess {
    count: u32,
    last: Instant,
}

impl Guess {
    /// Each try costs up to [`PROBE_LIMIT`] while a VM waits, so they get rarer: after 1, 2, 4… minutes, 64 at most.
    fn pause(self) -> Duration {
        Duration::from_secs(60 << self.count.saturating_sub(1).min(6))
    }

    fn is_over(self, now: Instant) -> bool {
        now.saturating_duration_since(self.last) >= self.pause()
    }
}

/// What this process knows of the host's QEMU.
#[derive(Debug, Default)]
pub(crate) struct Known(Mutex<Option<Entry>>);

impl Known {
    /// Facts about `qemu` on this host: known, from the records, or found now. They are asked for anew when
    /// the program is another one than it was, and after a while if they are a guess.
    pub(crate) async fn facts(&self, db: &Db, qemu: &Path) -> Result<Facts, BringUpError> {
        self.facts_by(db, qemu, find).await
    }

    async fn facts_by(&self, db: &Db, qemu: &Path, find: Finder) -> Result<Facts, BringUpError> {
        let key = cache_key(qemu)?;
        // Held meanwhile: nobody else has to look at the same time.
        let mut known = self.0.lock().await;
        let before = known.take_if(|entry| entry.key == key);
        let guess = before.as_ref().and_then(|entry| entry.guess);
        if let Some(entry) = before
            && entry.guess.is_none_or(|guess| !guess.is_over(Instant::now()))
        {
            return Ok(known.insert(entry).facts.clone());
        }
        if let Some(facts) = kept(db, &key).await? {
            *known = Some(Entry { key, facts: facts.clone(), guess: None });
            return Ok(facts);
        }
        let path = qemu.to_owned();
        let found = tokio::task::spawn_blocking(move || find(&path))
            .await
            .map_err(|error| Fault::new("looking at QEMU", error))??;
        // Replaced while it was looked at: good for this once, and nobody knows of which it is true.
        if cache_key(qemu)? == key {
            let count = guess.map_or(0, |guess| guess.count).saturating_add(1);
            let guess = (!found.sure).then(|| Guess { count, last: Instant::now() });
            if found.sure {
                keep(db, &key, &found.facts).await?;
            }
            *known = Some(Entry { key, facts: found.facts.clone(), guess });
        }
        Ok(found.facts)
    }
}

/// Looks at a QEMU. Blocks.
type Finder = fn(&Path) -> Result<Found, BringUpError>;

async fn kept(db: &Db, key: &str) -> Result<Option<Facts>, Fault> {
    let wanted = key.to_owned();
    let text: Option<String> = db
        .call("engine records: host facts", move |connection| {
            let sql = "SELECT value FROM host_facts WHERE key = ?1";
            connection.query_row(sql, params![wanted], |row| row.get(0)).optional()
        })
        .await?;
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
}

async fn keep(db: &Db, key: &str, facts: &Facts) -> Result<(), Fault> {
    let text = serde_json::to_string(facts).map_err(|error| Fault::new("host facts", error))?;
    let key = key.to_owned();
    db.call("engine records: host facts", move |connection| {
        connection.execute("INSERT OR REPLACE INTO host_facts VALUES (?1, ?2)", params![key, text])
    })
    .await
    .map(drop)
}

/// Which program, kernel and device; what is known of one says nothing about another.
fn cache_key(qemu: &Path) -> Result<String, BringUpError> {
    let meta = std::fs::metadata(qemu).map_err(|_| missing(qemu))?;
    let kernel = rustix::system::uname();
    Ok(format!(
        "{}:{}:{}:{}.{:09}:{}:kvm={}",
        qemu.display(),
        meta.ino(),
        meta.len(),
        meta.mtime(),
        meta.mtime_nsec(),
        kernel.release().to_string_lossy(),
        std::fs::metadata(KVM)
            .map_or_else(|_| "none".to_owned(), |kvm| format!("{}:{:o}", kvm.gid(), kvm.mode()))
    ))
}

/// The group that lets QEMU open `/dev/kvm`, which distributions give to `root:kvm` with mode 0660.
pub(crate) fn kvm_group() -> Option<u32> {
    let meta = std::fs::metadata(KVM).ok()?;
    group_of(meta.mode(), meta.gid())
}

/// Never root's group: that would open much more than one device.
fn group_of(mode: u32, gid: u32) -> Option<u32> {
    (gid != 0 && mode & 0o060 == 0o060 && mode & 0o006 != 0o006).then_some(gid)
}

fn missing(qemu: &Path) -> BringUpError {
    BringUpError::HostMissing {
        what: format!("QEMU ({})", qemu.display()),
        remedy: "install it with `apt-get install qemu-system-x86 qemu-utils`".into(),
    }
}

fn find(qemu: &Path) -> Result<Found, BringUpError> {
    let said =
        ask_version(qemu).map_err(|error| Fault::new(format!("{} --version", qemu.display()), error))?;
    let version = parse_version(&said)
        .ok_or_else(|| Fault::new(format!("{} --version", qemu.display()), "no version in its answer"))?;
    let machine = machine_type(&version);
    let verdict = if Path::new(KVM).exists() { kvm_boots(qemu, &machine) } else { Verdict::Fails };
    let accelerator = if verdict == Verdict::Boots { Accelerator::Kvm } else { Accelerator::Tcg };
    tracing::info!(qemu = %version, accelerator = accelerator.name(), "looked at this host's QEMU");
    Ok(Found { facts: Facts { version, accelerator }, sure: verdict != Verdict::Unknown })
}

/// What QEMU says of itself, asked as confined as guests are.
fn ask_version(qemu: &Path) -> io::Result<String> {
    let mut command = Command::new(qemu);
    command.arg("--version").env_clear().current_dir("/").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut tool = Tool::start(command, PROBE_UID, None, Vec::new())?;
    tool.wait(&Stop::after(VERSION_LIMIT))?;
    tool.said()
}

fn parse_version(text: &str) -> Option<String> {
    let rest = text.split("version ").nth(1)?;
    let version: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    let version = version.trim_end_matches('.');
    (version.split('.').count() >= 2).then(|| version.to_owned())
}

/// `mov al, ANSWER; out 0xf4, al; hlt`, as a boot sector.
fn boot_sector() -> [u8; 512] {
    let mut sector = [0; 512];
    let code = [0xb0, PROBE_ANSWER, 0xe6, 0xf4, 0xf4];
    sector[..code.len()].copy_from_slice(&code);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// What a probe of KVM says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The boot sector ran.
    Boots,
    /// QEMU ended by itself without it.
    Fails,
    /// Neither: KVM may hang, or the host may only be busy.
    Unknown,
}

/// Only an exit says something for good. No process, no end in time or a kill are the host's, now.
fn verdict(ended: &io::Result<ExitStatus>) -> Verdict {
    match ended.as_ref().ok().and_then(ExitStatus::code) {
        Some(PROBE_STATUS) => Verdict::Boots,
        Some(_) => Verdict::Fails,
        None => Verdict::Unknown,
    }
}

fn kvm_boots(qemu: &Path, machine: &str) -> Verdict {
    let ended = probe(qemu, machine);
    let verdict = verdict(&ended);
    if verdict == Verdict::Unknown {
        tracing::warn!(
            ?ended,
            "KVM could not be probed; guests run in software emulation until it is tried again"
        );
    }
    verdict
}

fn probe(qemu: &Path, machine: &str) -> io::Result<ExitStatus> {
    let disk = rustix::fs::memfd_create("cocoon-probe", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut disk = std::fs::File::from(disk);
    disk.write_all(&boot_sector())?;
    let mut command = Command::new(qemu);
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "16"]);
    command.args(["-machine", &format!("{machine},accel=kvm"), "-cpu", &format!("{CPU_MODEL},enforce")]);
    command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=0x01", "-drive"]);
    command.arg(format!("if=ide,format=raw,read-only=on,file=/proc/self/fd/{}", disk.as_raw_fd()));
    command.env_clear().current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
    let mut tool = Tool::start(command, PROBE_UID, kvm_group(), vec![disk.into()])?;
    tool.wait(&Stop::after(PROBE_LIMIT))
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::process::ExitStatusExt as _,
        sync::atomic::{AtomicU32, Ordering},
    };

    use super::*;

    #[test]
    fn versions_of_distributions_are_understood() {
        for (text, expected) in [
            ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright", Some("7.2.22")),
            ("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)", Some("10.0.2")),
            ("QEMU emulator version 9.1", Some("9.1")),
            ("QEMU emulator version 9", None),
            ("something else", None),
        ] {
            assert_eq!(parse_version(text).as_deref(), expected, "{text}");
        }
        assert_eq!(release("10.0.2"), "10.0");
        assert_eq!(release("9.1"), "9.1");
    }

    /// How often [`read_version`] looked; one test uses it.
    static LOOKED: AtomicU32 = AtomicU32::new(0);

    /// Takes a program's text for its version.
    fn read_version(qemu: &Path) -> Result<Found, BringUpError> {
        LOOKED.fetch_add(1, Ordering::Relaxed);
        let version = std::fs::read_to_string(qemu).map_err(|error| Fault::new("reading", error))?;
        Ok(Found { facts: Facts { version, accelerator: Accelerator::Tcg }, sure: true })
    }

    #[tokio::test]
    async fn another_program_is_looked_at_again_and_the_same_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::open(&folder.path().join("engine.db")).unwrap();
        migrate(&db).await.unwrap();
        let (qemu, new) = (folder.path().join("qemu"), folder.path().join("new"));
        let known = Known::default();
        for (version, looks) in [("7.2.22", 1), ("7.2.22", 1), ("8.2.0", 2), ("8.2.0", 2)] {
            if std::fs::read_to_string(&qemu).ok().as_deref() != Some(version) {
                // As packages do it.
                std::fs::write(&new, version).unwrap();
                std::fs::rename(&new, &qemu).unwrap();
            }
            assert_eq!(known.facts_by(&db, &qemu, read_version).await.unwrap().version, version);
            assert_eq!(LOOKED.load(Ordering::Relaxed), looks, "{version}");
        }
        let next = Known::default().facts_by(&db, &qemu, read_version).await.unwrap();
        assert_eq!((next.version.as_str(), LOOKED.load(Ordering::Relaxed)), ("8.2.0", 2), "the records know");
        std::fs::remove_file(&qemu).unwrap();
        let gone = known.facts_by(&db, &qemu, read_version).await.unwrap_err();
        assert!(matches!(gone, BringUpError::HostMissing { .. }), "{gone}");
    }

    #[test]
    fn only_an_exit_of_the_probe_is_a_verdict_on_kvm() {
        let exited = |code: i32| Ok(ExitStatus::from_raw(code << 8));
        for (what, ended, expected) in [
            ("the boot sector's own word", exited(PROBE_STATUS), Verdict::Boots),
            ("refused by QEMU", exited(1), Verdict::Fails),
            ("halted", exited(0), Verdict::Fails),
            ("killed, as for want of memory", Ok(ExitStatus::from_raw(libc::SIGKILL)), Verdict::Unknown),
            ("no end in time", Err(io::ErrorKind::TimedOut.into()), Verdict::Unknown),
            ("no process", Err(io::Error::from_raw_os_error(libc::EAGAIN)), Verdict::Unknown),
            ("no descriptor", Err(io::Error::from_raw_os_error(libc::EMFILE)), Verdict::Unknown),
        ] {
            assert_eq!(verdict(&ended), expected, "{what}");
        }
    }

    #[test]
    fn a_guess_is_tried_again_less_and_less_often() {
        let pauses = [1, 2, 3, 7, 8, u32::MAX].map(|count| Guess { count, last: Instant::now() }.pause());
        assert_eq!(pauses.map(|pause| pause.as_secs() / 60), [1, 2, 4, 64, 64, 64]);
    }

    /// A "QEMU" that takes a second the first time, asked for its verdict within a shorter time. Not confined:
    /// that needs root.
    fn slow_at_first(qemu: &Path) -> Result<Found, BringUpError> {
        let mut shell = Command::new("/bin/sh");
        shell.arg(qemu);
        let fault = |error| Fault::new("the slow one", error);
        let mut tool = Tool::unconfined(shell).map_err(fault)?;
        let again = qemu.with_extension("again").exists();
        let limit = if again { Duration::from_secs(120) } else { Duration::from_millis(50) };
        let verdict = verdict(&tool.wait(&Stop::after(limit)));
        std::fs::write(qemu.with_extension("again"), "").map_err(fault)?;
        let accelerator = if verdict == Verdict::Boots { Accelerator::Kvm } else { Accelerator::Tcg };
        let facts = Facts { version: "7.2.22".into(), accelerator };
        Ok(Found { facts, sure: verdict != Verdict::Unknown })
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_was_too_slow_is_made_again_and_a_verdict_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let qemu = folder.path().join("qemu");
        let script = format!("#!/bin/sh\n[ -e \"$0.again\" ] || exec sleep 600\nexit {PROBE_STATUS}\n");
        std::fs::write(&qemu, script).unwrap();
        let db = Db::open(&folder.path().join("engine.db")).unwrap();
        migrate(&db).await.unwrap();
        let known = Known::default();
        let accelerator =
            async || known.facts_by(&db, &qemu, slow_at_first).await.map(|facts| facts.accelerator).unwrap();
        assert_eq!(accelerator().await, Accelerator::Tcg);
        tokio::time::advance(Duration::from_secs(50)).await;
        assert_eq!(accelerator().await, Accelerator::Tcg, "not at once: each VM would wait for it");
        assert_eq!(
            kept(&db, &cache_key(&qemu).unwrap()).await.unwrap(),
            None,
            "another process asks for itself"
        );
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(accelerator().await, Accelerator::Kvm);
        let kept = kept(&db, &cache_key(&qemu).unwrap()).await.unwrap();
        assert_eq!(kept.map(|facts| facts.accelerator), Some(Accelerator::Kvm));
    }

    #[test]
    fn a_guest_keeps_the_group_of_the_device_only_where_that_opens_it() {
        for (mode, gid, kept) in [
            (0o020_660, 104, Some(104)),
            (0o020_666, 104, None),
            (0o020_600, 104, None),
            (0o020_640, 104, None),
            (0o020_660, 0, None),
        ] {
            assert_eq!(group_of(mode, gid), kept, "{mode:o} {gid}");
        }
    }

    #[test]
    fn a_boot_sector_ends_with_its_signature() {
        assert_eq!(&boot_sector()[510..], &[0x55, 0xaa]);
    }
}
