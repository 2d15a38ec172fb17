//! A lab: `cocoon up` on a fresh data folder, in a network namespace of its own.
//!
//! Entry point: [`Lab::start`]. Nothing in it touches the host's network. A dropped lab ends every
//! process of its namespace and every hypervisor on its folder (all of them are its own), removes the
//! namespace and the data folder; [`Lab::stop`] ends it in order and says what was left behind.

mod processes;

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use crate::{build::Built, host, root};

/// How often a dropped lab looks for processes to end.
const END_ROUNDS: usize = 100;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A running `cocoon up`, and what belongs to it.
#[derive(Debug)]
pub struct Lab {
    built: Built,
    kubectl: PathBuf,
    namespace: String,
    folder: PathBuf,
    up: Option<Child>,
    arguments: Vec<String>,
    keep: bool,
}

/// What a command said.
#[derive(Debug, Clone)]
pub struct Said {
    /// Exit code; -1 for a signal.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Said {
    /// Standard output, if the command succeeded.
    pub fn ok(self) -> anyhow::Result<String> {
        ensure!(self.code == 0, "exit code {}: {}{}", self.code, self.stderr.trim(), self.stdout.trim());
        Ok(self.stdout)
    }
}

impl Lab {
    /// Starts `cocoon up` with `arguments` besides the lab's own, and waits until it says that it is ready.
    pub fn start(built: &Built, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut lab = Self::prepare(built, arguments)?;
        lab.up()?;
        Ok(lab)
    }

    /// Namespace and data folder, and nothing running in them yet.
    pub fn prepare(built: &Built, arguments: &[&str]) -> anyhow::Result<Self> {
        ensure!(
            host::is_root(),
            "virtual machines with network need root; type: sudo env \"PATH=$PATH\" cargo xtask demo"
        );
        let kubectl = host::kubectl()?;
        let name = format!("cocoon-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // Short: Unix socket paths end at 107 bytes.
        let folder = root().join("target/lab").join(name.trim_start_matches("cocoon-"));
        std::fs::create_dir_all(&folder)?;
        host::quiet(Command::new("ip").args(["netns", "add", &name]))?;
        host::quiet(Command::new("ip").args(["-n", &name, "link", "set", "lo", "up"]))?;
        Ok(Self {
            built: built.clone(),
            kubectl,
            namespace: name,
            folder,
            up: None,
            arguments: arguments.iter().map(|&argument| argument.to_owned()).collect(),
            keep: false,
        })
    }

    /// Starts `cocoon up` (again) and waits until it is ready.
    pub fn up(&mut self) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        let log = std::fs::File::options().create(true).append(true).open(self.log())?;
        let mut child = self
            .command(&self.built.cocoon)
            .arg("up")
            .arg("--data-dir")
            .arg(self.data())
            .arg("--boot-bundle")
            .arg(&self.built.bundle)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("starting cocoon up")?;
        let lines = BufReader::new(child.stdout.take().context("no output of cocoon up")?).lines();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        self.up = Some(child);
        let deadline = Instant::now() + Duration::from_secs(180);
        loop {
            match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.starts_with("ready") => return Ok(begun.elapsed()),
                Ok(_) => {}
                Err(_) => bail!("cocoon up did not get ready; its log:\n{}", self.log_tail(30)),
            }
        }
    }

    /// The data folder of `cocoon up`.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// The log of `cocoon up`.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.folder.join("up.log")
    }

    /// The network namespace's name.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The parts it runs.
    #[must_use]
    pub const fn built(&self) -> &Built {
        &self.built
    }

    /// The kubeconfig that `cocoon up` wrote.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.data().join("kubeconfig")
    }

    /// A scratch folder that goes with the lab.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        &self.folder
    }

    /// The last lines of the log.
    #[must_use]
    pub fn log_tail(&self, lines: usize) -> String {
        let text = std::fs::read_to_string(self.log()).unwrap_or_default();
        let all: Vec<_> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// The process id of `cocoon up`.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.up.as_ref().map(Child::id)
    }

    /// A command that runs inside the lab's network namespace.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace]).arg(program);
        command
    }

    /// Which kubectl the lab uses.
    #[must_use]
    pub fn kubectl_program(&self) -> &Path {
        &self.kubectl
    }

    /// kubectl with the lab's kubeconfig.
    #[must_use]
    pub fn kubectl_command(&self) -> Command {
        let mut command = self.command(&self.kubectl);
        command.arg("--kubeconfig").arg(self.kubeconfig());
        command
    }

    /// Runs kubectl with `input` on its standard input.
    pub fn kubectl_with(&self, arguments: &[&str], input: &[u8]) -> anyhow::Result<Said> {
        let mut child = self
            .kubectl_command()
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting kubectl")?;
        let mut stdin = child.stdin.take().context("no standard input")?;
        let input = input.to_owned();
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output()?;
        let _ = writer.join();
        Ok(output.into())
    }

    /// Runs kubectl; its standard output, if it succeeded.
    pub fn kubectl(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let said = self.kubectl_with(arguments, b"")?;
        said.ok().with_context(|| format!("kubectl {}", arguments.join(" ")))
    }

    /// Runs the engine's command line on the lab's folders.
    pub fn cocoon_said(&self, arguments: &[&str]) -> anyhow::Result<Said> {
        let data = self.data();
        let output = self
            .command(&self.built.cocoon)
            .arg("--root-dir")
            .arg(&data)
            .arg("--boot-bundle")
            .arg(&self.built.bundle)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .context("starting cocoon")?;
        Ok(output.into())
    }

    /// Runs the engine's command line; its standard output, if it succeeded.
    pub fn cocoon(&self, arguments: &[&str]) -> anyhow::Result<String> {
        self.cocoon_said(arguments)?.ok().with_context(|| format!("cocoon {}", arguments.join(" ")))
    }

    /// All VM objects.
    pub fn vms(&self) -> anyhow::Result<Vec<Value>> {
        let text = self.cocoon(&["vm", "list", "-o", "json"])?;
        if text.starts_with("No VMs") {
            Ok(Vec::new())
        } else {
            serde_json::from_str(&text).context("vm list")
        }
    }

    /// One pod, or `None` when the API says that there is none.
    pub fn pod(&self, name: &str) -> anyhow::Result<Option<Value>> {
        let text = self.kubectl(&["get", "pod", name, "-o", "json", "--ignore-not-found"])?;
        if text.trim().is_empty() { Ok(None) } else { Ok(Some(serde_json::from_str(&text)?)) }
    }

    /// Polls until `done` gives a value; an error names `what` and shows the end of the log.
    pub fn wait<T>(
        &self,
        what: &str,
        limit: Duration,
        mut done: impl FnMut() -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(value) = done()? {
                return Ok(value);
            }
            if Instant::now() > deadline {
                bail!("{what}: not within {} s; the log's end:\n{}", limit.as_secs(), self.log_tail(15));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// SIGKILL for `cocoon up` alone; guests and network daemon go on.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.up.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Ends `cocoon up` with SIGTERM and names everything that it left behind.
    pub fn stop(&mut self) -> anyhow::Result<Vec<String>> {
        if let Some(mut child) = self.up.take() {
            host::quiet(Command::new("kill").args(["-TERM", &child.id().to_string()]))?;
            let deadline = Instant::now() + Duration::from_secs(120);
            while child.try_wait()?.is_none() {
                ensure!(Instant::now() < deadline, "cocoon up did not end; its log:\n{}", self.log_tail(20));
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        self.leftovers()
    }

    /// Processes, interfaces, rules, mounts and changed sysctls of the lab's namespace and folder.
    /// Hypervisors are outside the namespace, so processes are looked for in both.
    pub fn leftovers(&self) -> anyhow::Result<Vec<String>> {
        let ns = self.namespace.as_str();
        let mut left = Vec::new();
        for pid in self.pids() {
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            left.push(format!("process {pid} {}", String::from_utf8_lossy(&command).replace('\0', " ")));
        }
        let links = run(Command::new("ip").args(["-n", ns, "-o", "link"]))?;
        left.extend(
            links.lines().filter(|line| !line.contains(": lo:")).map(|line| format!("interface {line}")),
        );
        let rules = run(Command::new("ip").args(["netns", "exec", ns, "nft", "list", "ruleset"]))?;
        left.extend(rules.lines().take(3).map(|line| format!("rule {line}")));
        let forward =
            run(Command::new("ip").args(["netns", "exec", ns, "cat", "/proc/sys/net/ipv4/ip_forward"]))?;
        if forward.trim() != "0" {
            left.push("sysctl net.ipv4.ip_forward is still 1".into());
        }
        let folder = self.folder.display().to_string();
        let mounts = std::fs::read_to_string("/proc/mounts")?;
        left.extend(mounts.lines().filter(|line| line.contains(&folder)).map(|line| format!("mount {line}")));
        Ok(left)
    }

    /// Processes in the lab's namespace, and others that hold anything of its folder: hypervisors, whose
    /// network namespaces are their own.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let mut pids = processes::in_namespace(&self.namespace);
        pids.extend(processes::holders(&self.folder));
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Those of [`Lab::pids`] that are the lab's own: somebody may be looking at a file of it.
    fn own_pids(&self) -> Vec<u32> {
        let inside = processes::in_namespace(&self.namespace);
        let own = |pid: &u32| inside.contains(pid) || processes::is_guest(*pid);
        self.pids().into_iter().filter(own).collect()
    }

    /// Leaves everything running when the lab is dropped.
    pub const fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        let _ = self.kill();
        // One that was just being started when its parent went may show up a moment later.
        for _ in 0..END_ROUNDS {
            let pids = self.own_pids();
            if pids.is_empty() {
                break;
            }
            for pid in pids {
                let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).stderr(Stdio::null()).status();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = host::quiet(Command::new("ip").args(["netns", "del", &self.namespace]));
        if std::env::var_os("COCOON_LAB_KEEP").is_none() {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}

fn run(command: &mut Command) -> anyhow::Result<String> {
    Said::from(command.stdin(Stdio::null()).output()?).ok()
}
