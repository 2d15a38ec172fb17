//! Steps 1 to 3: boot, kubectl, a process that counts.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, ensure};

use super::{DEMO, DEMO_VM, Story, WAIT, annotation, is_ready};

/// The script that counts: in a shell variable, in a memory file system, and on disk without sync.
const COUNTER: &str = "setsid sh -c 'echo $$ > /run/counter.pid; i=0; while :; do i=$((i+1)); \
                       echo $i >> /root/lines; echo $i > /run/count; usleep 10000; done' \
                       >/dev/null 2>&1 </dev/null &";
/// The counter in memory. It is written in two steps (empty, then the number), so an empty read is repeated.
pub(super) const COUNT: &str = "until n=$(cat /run/count) && [ -n \"$n\" ]; do :; done; echo $n";
/// Lines numbered from 1 with none missing or repeated: prints how many.
pub(super) const NO_GAP: &str = "cp /root/lines /tmp/lines; n=$(wc -l < /tmp/lines); \
                                 seq 1 $n | cmp - /tmp/lines && echo $n";

pub(super) fn boots(story: &mut Story<'_>) -> anyhow::Result<()> {
    let pod = story.time("pod created until Ready", |story| {
        story.apply(DEMO)?;
        story.wait_ready(DEMO)
    })?;
    let vms = story.lab.vms()?;
    let id = annotation(&pod, "vm.cocoonstack.io/id");
    story.claim(
        "one VM runs, under the pod's VM name",
        vms.len() == 1 && vms[0]["config"]["name"] == DEMO_VM,
    )?;
    story.claim("annotation id is the VM's id", !id.is_empty() && vms[0]["id"] == id.as_str())?;
    let ip = annotation(&pod, "vm.cocoonstack.io/ip");
    let shown = story.sh(DEMO, "ip -4 addr show eth0")?;
    story
        .claim("annotation ip is the guest's address, got by DHCP", !ip.is_empty() && shown.contains(&ip))?;
    story.claim("pod status has the address", pod["status"]["podIP"] == ip.as_str())?;
    story.claim(
        "the lifecycle says ready",
        annotation(&pod, "vm.cocoonstack.io/lifecycle-state") == "ready",
    )?;
    let generation = annotation(&pod, "vm.cocoonstack.io/lifecycle-observed-generation");
    story.claim("the lifecycle has an observed generation", generation.parse::<u64>().is_ok())
}

pub(super) fn kubectl_works(story: &mut Story<'_>) -> anyhow::Result<()> {
    exec_is_exact(story)?;
    let log = story.lab.kubectl(&["logs", DEMO])?;
    story.claim("kubectl logs shows the console", !log.trim().is_empty())?;
    watch_sees_a_label(story)?;
    let described = story.lab.kubectl(&["describe", "pod", DEMO])?;
    story.claim(
        "kubectl describe shows conditions and events",
        described.contains("Ready") && described.contains("Events"),
    )?;
    story.lab.kubectl(&["patch", "pod", DEMO, "-p", r#"{"metadata":{"labels":{"patched":"yes"}}}"#])?;
    let again = story.lab.kubectl(&["apply", "-f", &super::example(DEMO)])?;
    let wide = story.lab.kubectl(&["get", "pods", "-o", "wide", "-l", "patched=yes"])?;
    story.claim(
        "kubectl patch, label, apply and get -o wide work",
        wide.contains(DEMO) && again.contains(DEMO),
    )?;
    story.lab.kubectl(&["wait", "--for=condition=Ready", "pod", DEMO, "--timeout=60s"])?;
    story.claim("kubectl wait works", true)
}

fn exec_is_exact(story: &mut Story<'_>) -> anyhow::Result<()> {
    let said = story.time("kubectl exec with stdin, stdout, stderr and exit code", |story| {
        let script = "cat; echo to-stderr >&2; exit 42";
        story.lab.kubectl_with(&["exec", "-i", DEMO, "--", "sh", "-c", script], b"to stdin\n")
    })?;
    story.claim("stdin came back on stdout, alone", said.stdout == "to stdin\n")?;
    story.claim("stderr came on stderr", said.stderr.contains("to-stderr"))?;
    story.claim("the exit code is exact", said.code == 42)
}

fn watch_sees_a_label(story: &mut Story<'_>) -> anyhow::Result<()> {
    // It ends by itself, should nothing be seen.
    let limit = format!("--request-timeout={}s", WAIT.as_secs());
    let mut watch = story
        .lab
        .kubectl_command()
        .args(["get", "pods", "-w", &limit, "-L", "story"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("kubectl get -w")?;
    let mut lines = BufReader::new(watch.stdout.take().context("no output")?).lines().map_while(Result::ok);
    // The list that a watch begins with, without the label.
    let listed = lines.any(|line| line.starts_with(DEMO) && !line.contains("told"));
    story.lab.kubectl(&["label", "pod", DEMO, "story=told"])?;
    let seen = listed && lines.any(|line| line.starts_with(DEMO) && line.contains("told"));
    let _ = watch.kill();
    watch.wait()?;
    story.claim("kubectl get -w sees a label change", seen)
}

pub(super) fn counts(story: &mut Story<'_>) -> anyhow::Result<()> {
    story.sh(DEMO, COUNTER)?;
    // Before the first line there is no file to look at.
    let lines = || story.number(DEMO, NO_GAP).ok().filter(|lines| *lines > 5.0);
    story.lab.wait("numbered lines, none missing or repeated", WAIT, || Ok(lines()))?;
    story.claim("numbered lines appear, without sync", true)
}

/// The guest goes on after it was asleep: lines, counter, process, uptime, clock, address.
pub(super) fn goes_on(story: &mut Story<'_>, pod: &str, before: &Before) -> anyhow::Result<()> {
    let lines = story.number(pod, NO_GAP)?;
    story.claim("no line is missing or repeated", lines >= before.lines)?;
    let count = story.number(pod, COUNT)?;
    story.claim("the counter in memory goes on", count > before.count)?;
    let up = story.number(pod, "cut -d' ' -f1 /proc/uptime")?;
    story.claim("uptime goes on", up > before.uptime && up < before.uptime + 120.0)?;
    let alive = story.sh(pod, "kill -0 $(cat /run/counter.pid) && echo alive")?;
    story.claim("the process is the same", alive == "alive")?;
    clock_is_right(story, pod)?;
    address_works(story, pod)
}

fn clock_is_right(story: &mut Story<'_>, pod: &str) -> anyhow::Result<()> {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map(|now| now.as_secs_f64());
    // The guest was asked somewhere between, however long that took.
    let (before, guest, after) = (now()?, story.number(pod, "date +%s")?, now()?);
    story.claim("the wall clock is right within 2 s", guest >= before - 2.5 && guest <= after + 2.5)
}

pub(super) fn address_works(story: &mut Story<'_>, pod: &str) -> anyhow::Result<()> {
    let object = story.the_pod(pod)?;
    let ip = annotation(&object, "vm.cocoonstack.io/ip");
    ensure!(is_ready(&object), "pod {pod} is not ready");
    let shown = story.sh(pod, "ip -4 addr show eth0")?;
    story.claim("its address is the guest's", !ip.is_empty() && shown.contains(&ip))?;
    // A machine that stands still for a while loses a ping.
    let mut pings = false;
    for _ in 0..5 {
        let ping = story.lab.command("ping".as_ref()).args(["-c1", "-W3", &ip]).output();
        pings = pings || ping.context("ping (Debian package iputils-ping)")?.status.success();
        if pings {
            break;
        }
    }
    story.claim("the host reaches it", pings)
}

/// What is remembered before a sleep.
#[derive(Debug)]
pub(super) struct Before {
    pub(super) lines: f64,
    pub(super) count: f64,
    pub(super) uptime: f64,
}

pub(super) fn before(story: &Story<'_>, pod: &str) -> anyhow::Result<Before> {
    Ok(Before {
        lines: story.number(pod, "wc -l < /root/lines")?,
        count: story.number(pod, COUNT)?,
        uptime: story.number(pod, "cut -d' ' -f1 /proc/uptime")?,
    })
}
