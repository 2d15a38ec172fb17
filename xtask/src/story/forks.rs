//! Steps 6, 7, 9 and 10: forks, a killed agent, an image without a kernel, the end.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;

use super::{DEMO, DEMO_VM, FORKS, PLAIN, Story, annotation, life};

pub(super) fn forks(story: &mut Story<'_>) -> anyhow::Result<()> {
    story.sh(DEMO, "echo before the fork > /run/marker")?;
    story.time("two forks created until both Ready", |story| {
        for fork in FORKS {
            story.apply(fork)?;
        }
        for fork in FORKS {
            story.wait_ready(fork)?;
        }
        Ok(())
    })?;
    let vms = story.lab.vms()?;
    story.claim("three VMs run at once", vms.len() == 3 && vms.iter().all(|vm| vm["state"] == "running"))?;
    let baseline = story.lab.cocoon(&["snapshot", "inspect", &format!("fork-{DEMO_VM}")])?;
    story.claim("both were cloned from one baseline", baseline.contains(&format!("fork-{DEMO_VM}")))?;
    let pods: Vec<&str> = std::iter::once(DEMO).chain(FORKS).collect();
    for (what, script) in [
        ("MAC", "cat /sys/class/net/eth0/address"),
        ("network address", "ip -4 addr show eth0 | grep -o 'inet [0-9.]*'"),
        ("host name", "hostname"),
        ("machine id", "cat /etc/machine-id"),
        ("kernel random UUID", "cat /proc/sys/kernel/random/uuid"),
    ] {
        let mut values = BTreeSet::new();
        for pod in &pods {
            values.insert(story.sh(pod, script)?);
        }
        story.claim(
            &format!("each has a {what} of its own"),
            values.len() == pods.len() && !values.contains(""),
        )?;
    }
    for fork in FORKS {
        let marker = story.sh(fork, "cat /run/marker")?;
        let count = story.number(fork, life::COUNT)?;
        story.claim(
            &format!("{fork} has the source's memory content"),
            marker == "before the fork" && count > 1.0,
        )?;
        life::address_works(story, fork)?;
    }
    Ok(())
}

fn running(story: &Story<'_>) -> anyhow::Result<BTreeMap<String, u64>> {
    let vms = story.lab.vms()?;
    vms.iter()
        .map(|vm| {
            let id = vm["id"].as_str().context("a VM without id")?.to_owned();
            Ok((id, vm["pid"].as_u64().context("a VM without pid")?))
        })
        .collect()
}

pub(super) fn survives_a_kill(story: &mut Story<'_>) -> anyhow::Result<()> {
    let pods: Vec<&str> = std::iter::once(DEMO).chain(FORKS).collect();
    let before = running(story)?;
    let uptime = story.number(DEMO, "cut -d' ' -f1 /proc/uptime")?;
    story.lab.kill()?;
    let alive = before.values().all(|pid| std::path::Path::new(&format!("/proc/{pid}")).exists());
    story.claim("SIGKILL for the agent leaves the VMs running", alive)?;
    // Ready alone says little here: the API's journal kept it from before the kill.
    story.time("cocoon up started again until all Ready and entered by exec", |story| {
        story.lab.up()?;
        for pod in &pods {
            story.wait_ready(pod)?;
            story.sh(pod, "true")?;
        }
        Ok(())
    })?;
    let after = running(story)?;
    story.claim("same VM ids, same hypervisor processes", before == after)?;
    let now = story.number(DEMO, "cut -d' ' -f1 /proc/uptime")?;
    story.claim("guest uptime goes on", now > uptime)
}

pub(super) fn plain_image(story: &mut Story<'_>) -> anyhow::Result<()> {
    story.time("pod of an image without a kernel, created until Ready", |story| {
        story.apply(PLAIN)?;
        story.wait_ready(PLAIN)
    })?;
    let said = story.sh(PLAIN, "echo hello from $(uname -s)")?;
    story.claim("it runs under a Linux kernel of its own", said == "hello from Linux")
}

pub(super) fn ends(story: &mut Story<'_>) -> anyhow::Result<()> {
    let pods: Vec<&str> = [DEMO].into_iter().chain(FORKS).chain([PLAIN]).collect();
    let mut names = Vec::new();
    for pod in &pods {
        names.push(annotation(&story.the_pod(pod)?, "vm.cocoonstack.io/name"));
    }
    story.time("all pods deleted", |story| story.delete(&pods))?;
    for name in &names {
        let pushed = story.tagged(name, "latest")?;
        story.claim(&format!("{name}:latest was pushed"), pushed)?;
    }
    let vms = story.lab.vms()?;
    story.claim("no VM is left", vms.is_empty())?;
    let left = story.time("cocoon up ended", |story| story.lab.stop())?;
    story.claim(&format!("nothing is left on the host {}", left.join("; ")), left.is_empty())?;
    let folders = folders_left(story)?;
    story.claim(
        &format!("the data folder holds snapshots and images only {}", folders.join("; ")),
        folders.is_empty(),
    )
}

/// Files of VMs that should have gone with them: anything below the run and log folders but locks.
fn folders_left(story: &Story<'_>) -> anyhow::Result<Vec<String>> {
    let mut left = Vec::new();
    for folder in ["run", "log"] {
        collect(&story.lab.data().join(folder), &mut left)?;
    }
    Ok(left)
}

fn collect(folder: &std::path::Path, left: &mut Vec<String>) -> anyhow::Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).context(folder.display().to_string()),
    };
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, left)?;
        } else if path.extension().is_none_or(|extension| extension != "lock") {
            left.push(path.display().to_string());
        }
    }
    Ok(())
}
