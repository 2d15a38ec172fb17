//! Steps 4, 5 and 8: hibernate, wake, restore once.

use anyhow::Context as _;
use serde_json::Value;

use super::{DEMO, DEMO_VM, Story, WAIT, annotation, condition, life};

const HIBERNATE: &str = "vm.cocoonstack.io/hibernate";

fn hibernate(story: &mut Story<'_>, what: &str) -> anyhow::Result<Value> {
    story.time(what, |story| {
        story.lab.kubectl(&["annotate", "pod", DEMO, &format!("{HIBERNATE}=true")])?;
        story.wait_lifecycle(DEMO, "hibernated")
    })
}

fn wake(story: &mut Story<'_>, what: &str) -> anyhow::Result<Value> {
    story.time(what, |story| {
        story.lab.kubectl(&["annotate", "pod", DEMO, &format!("{HIBERNATE}-")])?;
        story.wait_ready(DEMO)
    })
}

pub(super) fn hibernates(story: &mut Story<'_>) -> anyhow::Result<()> {
    story.asleep = Some(life::before(story, DEMO)?);
    let pod = hibernate(story, "hibernate asked until hibernated")?;
    let (id, ip) = (annotation(&pod, "vm.cocoonstack.io/id"), annotation(&pod, "vm.cocoonstack.io/ip"));
    story.claim("annotations id and ip are gone", id.is_empty() && ip.is_empty())?;
    let vms = story.lab.vms()?;
    story.claim("the VM is gone", vms.is_empty())?;
    let ready = condition(&pod, "Ready").context("no Ready condition")?.clone();
    story.claim(
        "Ready is False, reason Hibernated",
        ready["status"] == "False" && ready["reason"] == "Hibernated",
    )?;
    let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"];
    story.claim(
        "the pod is Running, its container waits",
        pod["status"]["phase"] == "Running" && waiting == "Hibernated",
    )?;
    story.claim("it has no address", pod["status"]["podIP"].as_str().unwrap_or_default().is_empty())?;
    skopeo_reads_it(story)
}

fn skopeo_reads_it(story: &mut Story<'_>) -> anyhow::Result<()> {
    let source = story.reference(DEMO_VM, "hibernate");
    let raw = story.skopeo(&["inspect", "--raw", &source])?.ok()?;
    let manifest: Value = serde_json::from_str(&raw)?;
    let kind = manifest["artifactType"].as_str().unwrap_or_default();
    story.claim(
        "skopeo inspect --raw shows a snapshot artifact",
        kind.starts_with("application/vnd.cocoonstack.snapshot."),
    )?;
    let copy = story.lab.scratch().join("copy");
    story.skopeo(&["copy", "--quiet", &source, &format!("oci:{}:copy", copy.display())])?.ok()?;
    std::fs::remove_dir_all(&copy)?;
    story.claim("skopeo copy reads every byte of it", true)
}

pub(super) fn wakes(story: &mut Story<'_>) -> anyhow::Result<()> {
    let asleep = story.asleep.take().context("step 4 comes first")?;
    wake(story, "wake asked until Ready, from the local copy")?;
    life::goes_on(story, DEMO, &asleep)?;
    tag_goes(story)?;

    let before = life::before(story, DEMO)?;
    hibernate(story, "second hibernate")?;
    // Its pod needs it, so nothing less than --force takes it away.
    story.lab.cocoon(&["snapshot", "rm", "--force", DEMO_VM])?;
    wake(story, "wake asked until Ready, from the artifact alone")?;
    life::goes_on(story, DEMO, &before)?;
    tag_goes(story)
}

fn tag_goes(story: &mut Story<'_>) -> anyhow::Result<()> {
    story.time("the consumed hibernate tag goes", |story| {
        story.lab.wait(
            "hibernate tag gone",
            WAIT,
            || Ok((!story.tagged(DEMO_VM, "hibernate")?).then_some(())),
        )
    })
}

pub(super) fn restores_once(story: &mut Story<'_>) -> anyhow::Result<()> {
    let before = life::before(story, DEMO)?;
    hibernate(story, "hibernate before the pod is deleted")?;
    story.delete(&[DEMO])?;
    let kept = story.tagged(DEMO_VM, "hibernate")?;
    story.claim("deleting a hibernated pod keeps its state", kept)?;
    story.time("pod created again until Ready: it restores", |story| {
        story.apply(DEMO)?;
        story.wait_ready(DEMO)
    })?;
    life::goes_on(story, DEMO, &before)?;
    tag_goes(story)?;
    story.sh(DEMO, "echo written after the wake > /root/marker")?;
    story.time("the woken pod is deleted (and pushed as latest)", |story| story.delete(&[DEMO]))?;
    let pushed = story.tagged(DEMO_VM, "latest")?;
    story.claim("its state was pushed as latest", pushed)?;
    story.time("pod created again until Ready: it starts fresh", |story| {
        story.apply(DEMO)?;
        story.wait_ready(DEMO)
    })?;
    let old = story.sh(DEMO, "ls /root/marker /root/lines 2>/dev/null; true")?;
    story.claim("nothing of the old state is back", old.is_empty())
}
