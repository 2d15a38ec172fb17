//! The story of the README in ten steps, each with its checks.
//!
//! Entry point: [`run`]. Objects go in and out by the Kubernetes API only; the engine's command line
//! is used to look, never to help. A claim that does not hold ends the story with an error that names
//! it. [`Story::time`] and [`Story::claim`] fill the table that the demo prints.

mod forks;
mod life;
mod sleep;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::{lab::Lab, root};

/// The main pod.
pub const DEMO: &str = "demo-0";
/// Its VM: `VMNameForPod("default", "demo-0")`.
pub const DEMO_VM: &str = "vk-default-demo-0-8aaf2c";
/// The two forks.
pub const FORKS: [&str; 2] = ["demo-1", "demo-2"];
/// The pod whose image has no kernel.
pub const PLAIN: &str = "plain-0";

/// Ends a story that hangs; none of its steps comes near it.
pub(crate) const WAIT: Duration = Duration::from_secs(180);

/// One row of the table.
#[derive(Debug, Clone)]
pub struct Row {
    /// Which step, from 1.
    pub step: usize,
    /// What happened, or what was found to hold.
    pub what: String,
    /// How long it took; `None` for a claim.
    pub took: Option<Duration>,
}

/// A story under way.
#[derive(Debug)]
pub struct Story<'a> {
    lab: &'a mut Lab,
    step: usize,
    rows: Vec<Row>,
    show: bool,
    asleep: Option<life::Before>,
}

type Step = fn(&mut Story<'_>) -> anyhow::Result<()>;

/// The steps in order, with what they tell.
pub const STEPS: [(&str, Step); 10] = [
    ("a pod becomes a virtual machine", life::boots),
    ("kubectl works as on any node", life::kubectl_works),
    ("a process counts in memory and on disk", life::counts),
    ("hibernate: the VM becomes an OCI artifact", sleep::hibernates),
    ("wake: everything goes on, from the local copy and from the artifact alone", sleep::wakes),
    ("fork: two clones with identities of their own", forks::forks),
    ("the agent is killed and adopts its VMs", forks::survives_a_kill),
    ("a hibernated pod that is recreated restores; a woken one starts fresh", sleep::restores_once),
    ("an image without a kernel runs too", forks::plain_image),
    ("all pods are deleted and nothing is left", forks::ends),
];

/// Imports the images and runs all steps on `lab`; the rows tell what happened. `show` prints them as
/// they come, to stderr.
pub fn run(lab: &mut Lab, show: bool) -> anyhow::Result<Vec<Row>> {
    import_images(lab)?;
    let mut story = Story { lab, step: 0, rows: Vec::new(), show, asleep: None };
    for (index, (title, step)) in STEPS.iter().enumerate() {
        story.step = index + 1;
        if show {
            eprintln!("{:>2}. {title}", story.step);
        }
        step(&mut story).with_context(|| format!("step {}, {title}", index + 1))?;
    }
    Ok(story.rows)
}

/// Imports the demo's two images.
pub fn import_images(lab: &Lab) -> anyhow::Result<()> {
    let built = lab.built().clone();
    for (name, file) in [("cocoon-demo:1", &built.demo_image), ("cocoon-plain:1", &built.plain_image)] {
        lab.cocoon(&["image", "import", name, &file.display().to_string()])?;
    }
    Ok(())
}

/// The file of an example.
#[must_use]
pub fn example(pod: &str) -> String {
    root().join("examples").join(format!("{pod}.yaml")).display().to_string()
}

impl Story<'_> {
    fn row(&mut self, what: &str, took: Option<Duration>) {
        if self.show {
            let took =
                took.map_or_else(|| "      ok".to_owned(), |took| format!("{:6.2} s", took.as_secs_f64()));
            eprintln!("    {took}  {what}");
        }
        self.rows.push(Row { step: self.step, what: what.to_owned(), took });
    }

    /// Runs `work` and notes how long it took.
    fn time<T>(
        &mut self,
        what: &str,
        work: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let begun = Instant::now();
        let value = work(self).with_context(|| what.to_owned())?;
        self.row(what, Some(begun.elapsed()));
        Ok(value)
    }

    /// Notes that `what` holds, or ends the story.
    fn claim(&mut self, what: &str, holds: bool) -> anyhow::Result<()> {
        ensure!(holds, "claim does not hold: {what}\n{}", self.lab.log_tail(15));
        self.row(what, None);
        Ok(())
    }

    fn apply(&self, pod: &str) -> anyhow::Result<()> {
        self.lab.kubectl(&["apply", "-f", &example(pod)]).map(drop)
    }

    /// Runs a shell script in the guest; its standard output.
    fn sh(&self, pod: &str, script: &str) -> anyhow::Result<String> {
        let text = self.lab.kubectl(&["exec", pod, "--", "sh", "-c", script])?;
        Ok(text.trim_end().to_owned())
    }

    fn number(&self, pod: &str, script: &str) -> anyhow::Result<f64> {
        let text = self.sh(pod, script)?;
        text.trim().parse().with_context(|| format!("{script:?} in {pod} printed {text:?}"))
    }

    fn the_pod(&self, name: &str) -> anyhow::Result<Value> {
        self.lab.pod(name)?.with_context(|| format!("pod {name} is gone"))
    }

    fn wait_ready(&self, name: &str) -> anyhow::Result<Value> {
        self.wait_for(name, "ready", is_ready)
    }

    fn wait_lifecycle(&self, name: &str, state: &str) -> anyhow::Result<Value> {
        self.wait_for(name, state, |_| true)
    }

    /// Waits for a lifecycle state and `also`; a failed lifecycle ends the wait with its message.
    fn wait_for(&self, name: &str, state: &str, also: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        self.lab.wait(&format!("pod {name} {state}"), WAIT, || {
            let pod = self.the_pod(name)?;
            let lifecycle = annotation(&pod, "vm.cocoonstack.io/lifecycle-state");
            ensure!(
                lifecycle != "failed",
                "pod {name} failed: {}",
                annotation(&pod, "vm.cocoonstack.io/lifecycle-state-message")
            );
            Ok((lifecycle == state && also(&pod)).then_some(pod))
        })
    }

    fn delete(&self, pods: &[&str]) -> anyhow::Result<()> {
        let mut arguments = vec!["delete", "pod", "--timeout=180s"];
        arguments.extend(pods);
        self.lab.kubectl(&arguments).map(drop)
    }

    /// Whether the registry has `repository:tag`, asked with skopeo.
    fn tagged(&self, repository: &str, tag: &str) -> anyhow::Result<bool> {
        let said = self.skopeo(&["inspect", "--raw", &self.reference(repository, tag)])?;
        let absent = said.stderr.contains("no descriptor found for reference");
        ensure!(
            said.code == 0 || absent,
            "skopeo cannot tell whether {repository}:{tag} is there: {}",
            said.stderr
        );
        Ok(said.code == 0)
    }

    fn reference(&self, repository: &str, tag: &str) -> String {
        format!("oci:{}:{repository}:{tag}", self.lab.data().join("registry").display())
    }

    fn skopeo(&self, arguments: &[&str]) -> anyhow::Result<crate::lab::Said> {
        let output = self.lab.command(Path::new("skopeo")).args(arguments).output().context("skopeo")?;
        Ok(output.into())
    }
}

/// An annotation's value, empty when it is not there.
#[must_use]
pub fn annotation(pod: &Value, key: &str) -> String {
    pod["metadata"]["annotations"][key].as_str().unwrap_or_default().to_owned()
}

/// Whether the condition `Ready` is true.
#[must_use]
pub fn is_ready(pod: &Value) -> bool {
    condition(pod, "Ready").is_some_and(|ready| ready["status"] == "True")
}

/// A condition by type.
#[must_use]
pub fn condition<'a>(pod: &'a Value, kind: &str) -> Option<&'a Value> {
    pod["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}

/// The rows as a table, with the steps' titles.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    for (index, (title, _)) in STEPS.iter().enumerate() {
        text.push_str(&format!("{:>2}. {title}\n", index + 1));
        for row in rows.iter().filter(|row| row.step == index + 1) {
            let took =
                row.took.map_or_else(|| "ok".to_owned(), |took| format!("{:.2} s", took.as_secs_f64()));
            text.push_str(&format!("    {took:>8}  {}\n", row.what));
        }
    }
    text
}
