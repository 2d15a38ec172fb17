//! A host that gets in the way of a whole `cocoon up`: a disk that is full, a registry folder that is full,
//! read-only or does not get done. Guests go on, pods say why, and nothing is lost. The tests that take minutes are
//! run by `cargo xtask soak hardship`.

#![allow(clippy::unwrap_used, reason = "a helper of a test fails the test")]

use std::{
    fs::File,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use rustix::fs::{FlockOperation, flock, statvfs};
use serde_json::json;
use xtask::{
    lab::Lab,
    story::{self, annotation, condition},
};

use crate::common::{HANGS, built, create, has_event, pod, wait_failed, wait_pod};

const A: (&str, &str) = ("a", "vk-default-a-9efb36");
const HIBERNATE: &str = "vm.cocoonstack.io/hibernate";
const LIFECYCLE: &str = "vm.cocoonstack.io/lifecycle-state";
const MIB: u64 = 1 << 20;

/// Appends numbered lines, without sync, and has memory that cannot be made smaller.
const COUNTER: &str = "dd if=/dev/urandom of=/run/bulk bs=1M count=40 2>/dev/null; \
                       setsid sh -c 'i=0; while :; do i=$((i+1)); echo $i >> /root/lines; usleep 10000; done' \
                       >/dev/null 2>&1 </dev/null &";
/// How many lines there are, if none is missing or repeated.
const LINES: &str =
    "cp /root/lines /tmp/lines; n=$(wc -l < /tmp/lines); seq 1 $n | cmp - /tmp/lines && echo $n";
/// Numbered pieces, more than the host's disk will take, and then what came of it.
const WRITER: &str = "(seq 1 150000 > /run/piece; for i in $(seq 1 24); do echo $i; cat /run/piece; done \
                      > /root/pieces && sync && echo well > /root/done) >/dev/null 2>&1 &";
const ALL_THERE: &str = "echo 3 > /proc/sys/vm/drop_caches; \
                         for i in $(seq 1 24); do echo $i; cat /run/piece; done | cmp - /root/pieces && echo whole";

/// A lab with a small file system of its own at one of its folders; that goes after the lab's processes.
struct Small {
    lab: Option<Lab>,
    scratch: PathBuf,
    at: PathBuf,
}

impl Small {
    /// Mounts `mib` at `part` of the data folder (empty: at all of it), then starts `cocoon up`.
    fn start(part: &str, mib: u64) -> Self {
        let lab = Lab::prepare(built(), &[]).expect("a namespace");
        let (scratch, at) = (lab.scratch().to_owned(), lab.data().join(part));
        std::fs::create_dir_all(&at).unwrap();
        let mut small = Self { lab: Some(lab), scratch, at };
        small.mount(&["-t", "tmpfs", "-o", &format!("size={mib}m,mode=0700"), "tmpfs"]);
        small.up().expect("cocoon up starts");
        small
    }

    fn mount(&self, arguments: &[&str]) {
        assert!(Command::new("mount").args(arguments).arg(&self.at).status().unwrap().success());
    }

    /// A file that takes all space but `left` bytes; a guest that writes beside it may take some of that first.
    fn fill(&self, left: u64) -> PathBuf {
        let facts = statvfs(&self.at).unwrap();
        let size = (facts.f_bavail * facts.f_frsize).saturating_sub(left);
        let filler = self.at.join("filler");
        let written = std::fs::write(&filler, vec![1; usize::try_from(size).unwrap()]);
        assert!(written.is_ok() || left == 0, "{written:?}");
        filler
    }
}

impl Deref for Small {
    type Target = Lab;
    fn deref(&self) -> &Lab {
        self.lab.as_ref().expect("it goes with this")
    }
}

impl DerefMut for Small {
    fn deref_mut(&mut self) -> &mut Lab {
        self.lab.as_mut().expect("it goes with this")
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        self.lab = None;
        let _ = Command::new("umount").args(["-l".as_ref(), self.at.as_os_str()]).status();
        let _ = std::fs::remove_dir_all(&self.scratch);
    }
}

/// Somebody else has the lock of a registry folder: a push waits and gets nowhere, and nothing else is wrong.
struct Held(File);

impl Held {
    fn take(registry: &Path) -> Self {
        let lock = File::options().read(true).write(true).open(registry.join(".cocoon.lock")).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        Self(lock)
    }

    fn give(self) {
        flock(&self.0, FlockOperation::Unlock).unwrap();
    }
}

fn sh(lab: &Lab, script: &str) -> String {
    lab.kubectl(&["exec", A.0, "--", "sh", "-c", script]).unwrap().trim_end().to_owned()
}

fn lines(lab: &Lab) -> u64 {
    sh(lab, LINES).parse().unwrap()
}

/// The guest answers, and counts.
fn counts_on(lab: &Lab) -> u64 {
    let before = lines(lab);
    lab.wait("more lines", HANGS, || Ok(Some(lines(lab)).filter(|now| *now > before))).unwrap()
}

/// Pod `a`, ready and counting.
fn counting(lab: &Lab) {
    story::import_images(lab).unwrap();
    create(lab, &pod(A.0, A.1, json!({})));
    wait_pod(lab, A.0, "ready", story::is_ready);
    sh(lab, COUNTER);
    lab.wait("lines", HANGS, || Ok((sh(lab, "wc -l < /root/lines || echo 0") != "0").then_some(()))).unwrap();
}

fn hibernate(lab: &Lab) {
    lab.kubectl(&["annotate", "pod", A.0, &format!("{HIBERNATE}=true")]).unwrap();
}

/// Waits for the end of a hibernation that nobody helps, wakes the pod, and counts its lines.
fn hibernated_and_woken(lab: &Lab) -> u64 {
    wait_pod(lab, A.0, "hibernated", |pod| annotation(pod, LIFECYCLE) == "hibernated");
    assert!(lab.vms().unwrap().is_empty());
    lab.kubectl(&["annotate", "pod", A.0, &format!("{HIBERNATE}-")]).unwrap();
    wait_pod(lab, A.0, "ready", |pod| story::is_ready(pod) && annotation(pod, LIFECYCLE) == "ready");
    lines(lab)
}

fn ends(lab: &Lab) {
    lab.kubectl(&["delete", "pod", A.0, "--timeout=60s"]).expect("delete ends");
    assert!(lab.vms().unwrap().is_empty());
}

/// The number after `key=` in a line of the log.
fn figure(line: &str, key: &str) -> u64 {
    let (_, rest) = line.split_once(&format!("{key}=")).unwrap_or_else(|| panic!("no {key} in {line}"));
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
}

/// Whether the log of `cocoon up` has it by now.
fn logged(lab: &Lab, what: &str) -> bool {
    std::fs::read_to_string(lab.log()).unwrap().contains(what)
}

/// What the last hibernation sent while its guest was paused, and what its snapshot takes in all.
fn last_push(lab: &Lab) -> (u64, u64) {
    let text = std::fs::read_to_string(lab.log()).unwrap();
    let pushed = text.lines().rfind(|line| line.contains("tag=\"hibernate\"")).expect("a push");
    (figure(pushed, "sent"), figure(pushed, "total"))
}

/// Waits for a line of the log, sees the guest go on while the push of its live capture does not, and lets it.
fn goes_ahead_live(lab: &Lab, held: Held) -> u64 {
    lab.wait("a live capture", HANGS, || Ok(logged(lab, "snapshot=live-").then_some(()))).unwrap();
    // The capture's own short pause may still be shown.
    let answers = || Ok((lab.kubectl_with(&["exec", A.0, "--", "true"], b"")?.code == 0).then_some(()));
    lab.wait("the guest's answer", HANGS, answers).unwrap();
    let before = counts_on(lab);
    assert!(!logged(lab, "blobs went ahead"), "it is still under way");
    held.give();
    before
}

fn most_went_ahead(lab: &Lab) {
    assert!(logged(lab, "blobs went ahead"));
    let (sent, total) = last_push(lab);
    println!("FIGURE sent while the guest was paused: {sent} of {total} bytes");
    assert!(sent * 3 < total * 2, "{sent} of {total} bytes were sent while the guest was paused");
    assert!(!lab.cocoon(&["snapshot", "list"]).unwrap().contains("live-"), "the live capture's copy went");
}

#[test]
fn a_push_that_is_expected_to_be_long_goes_ahead_while_the_guest_runs() {
    // Longer than half of the longest pause is long; the other half is for a machine that is slow.
    let lab = Lab::start(built(), &["--pause-limit", "60"]).expect("cocoon up starts");
    counting(&lab);
    let registry = lab.data().join("registry");
    let held = Held::take(&registry);
    hibernate(&lab);
    lab.wait("a capture", HANGS, || Ok(logged(&lab, "snapshot taken").then_some(()))).unwrap();
    std::thread::sleep(Duration::from_secs(31));
    held.give();
    let before = hibernated_and_woken(&lab);
    assert!(!logged(&lab, "snapshot=live-"), "nobody knew how long the first push would take");
    let held = Held::take(&registry);
    hibernate(&lab);
    let before = goes_ahead_live(&lab, held).max(before);
    let after = hibernated_and_woken(&lab);
    assert!(after >= before, "{after} lines, {before} before");
    most_went_ahead(&lab);
    ends(&lab);
}

#[test]
#[ignore = "takes minutes, since a failing pod waits: cargo xtask soak hardship"]
fn a_push_that_does_not_end_lets_the_guest_go_on_and_the_next_one_goes_ahead_while_it_runs() {
    let lab = Lab::start(built(), &["--pause-limit", "10"]).expect("cocoon up starts");
    counting(&lab);
    let held = Held::take(&lab.data().join("registry"));
    hibernate(&lab);
    let message = wait_failed(&lab, A.0);
    assert!(message.contains("10 s") && message.contains("goes on"), "{message}");
    assert!(has_event(&lab, A.0, "HibernatePauseLimit"));
    counts_on(&lab);
    let before = goes_ahead_live(&lab, held);
    let after = hibernated_and_woken(&lab);
    assert!(after >= before, "{after} lines, {before} before");
    most_went_ahead(&lab);
    ends(&lab);
}

#[test]
fn a_pod_whose_guest_fills_the_hosts_disk_says_so_and_goes_on_when_there_is_space() {
    let lab = Small::start("", 420);
    counting(&lab);
    let filler = lab.fill(12 * MIB);
    sh(&lab, WRITER);
    let says_so = |lab: &Lab| {
        let full =
            |pod: &serde_json::Value| condition(pod, "Ready").is_some_and(|c| c["reason"] == "DiskFull");
        let pod = wait_pod(lab, A.0, "DiskFull", full);
        let message = condition(&pod, "Ready").unwrap()["message"].as_str().unwrap().to_owned();
        for part in [A.1, "is full", "free at least 64 MiB", "goes on by itself"] {
            assert!(message.contains(part), "{part}: {message}");
        }
    };
    says_so(&lab);
    lab.wait("an event", HANGS, || Ok(has_event(&lab, A.0, "DiskFull").then_some(()))).unwrap();
    let asked = lab.kubectl_with(&["exec", A.0, "--", "true"], b"").unwrap();
    assert!(asked.code != 0 && asked.stderr.contains("disk full"), "{}", asked.stderr);
    std::fs::remove_file(filler).unwrap();
    wait_pod(&lab, A.0, "ready", story::is_ready);
    lab.wait("the writer's end", HANGS, || Ok((sh(&lab, "cat /root/done || true") == "well").then_some(())))
        .unwrap();
    assert_eq!(sh(&lab, ALL_THERE), "whole");
    counts_on(&lab);
    ends(&lab);
}

#[test]
fn cocoon_up_starts_on_a_disk_with_nothing_left_after_a_kill_and_after_an_orderly_end() {
    let mut lab = Small::start("", 420);
    let set_aside = |lab: &Small| {
        let spare = lab.data().join("spare");
        lab.wait("space set aside", HANGS, || Ok(spare.exists().then_some(()))).unwrap();
    };
    let starts_full = |lab: &mut Small, written: &str| {
        let filler = lab.fill(0);
        lab.up().expect("cocoon up starts");
        lab.kubectl(&["create", "configmap", written]).unwrap();
        filler
    };
    counting(&lab);
    let before = lines(&lab);
    set_aside(&lab);
    lab.kill().unwrap();
    std::fs::remove_file(starts_full(&mut lab, "after-a-kill")).unwrap();
    wait_pod(&lab, A.0, "ready", story::is_ready);
    assert!(counts_on(&lab) > before);
    ends(&lab);
    set_aside(&lab);
    lab.stop().unwrap();
    starts_full(&mut lab, "after-an-end");
}

#[test]
fn cocoon_up_on_a_full_disk_with_nothing_set_aside_ends_soon_and_names_folder_and_way_out() {
    let mut lab = Small::start("", 80);
    assert!(!lab.data().join("spare").exists());
    lab.kill().unwrap();
    let filler = lab.fill(0);
    let said = format!("{:#}", lab.up().expect_err("a full disk"));
    let wanted = format!("the disk of data folder {} is full; free some MiB", lab.data().display());
    assert!(said.contains(&wanted), "{said}");
    std::fs::remove_file(filler).unwrap();
    lab.up().expect("cocoon up starts");
}

#[test]
#[ignore = "takes minutes, since a failing pod waits: cargo xtask soak hardship"]
fn a_pod_whose_registry_folder_is_full_or_read_only_goes_on_and_hibernates_once_it_is_writable() {
    let lab = Small::start("registry", 24);
    counting(&lab);
    hibernate(&lab);
    let message = wait_failed(&lab, A.0);
    assert!(message.starts_with("DiskFull") && message.contains("free space"), "{message}");
    let before = counts_on(&lab);
    lab.mount(&["-o", "remount,size=300m,ro"]);
    let read_only = |pod: &serde_json::Value| {
        annotation(pod, "vm.cocoonstack.io/lifecycle-state-message")
            .contains("make the folder writable again")
    };
    wait_pod(&lab, A.0, "what is wrong now", read_only);
    assert!(has_event(&lab, A.0, "DiskFull") && has_event(&lab, A.0, "HibernatePushFailed"));
    assert!(counts_on(&lab) > before);
    let index = std::fs::read_to_string(lab.at.join("index.json")).unwrap();
    assert!(!index.contains("hibernate"), "no tag without what it names: {index}");
    lab.mount(&["-o", "remount,rw"]);
    assert!(hibernated_and_woken(&lab) > before);
    ends(&lab);
}
