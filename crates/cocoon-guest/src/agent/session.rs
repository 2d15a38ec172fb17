//! One session of `engine-cli` §8 from the agent's side, over any byte stream.
//!
//! Entry point: [`serve`]. A session is one future: dropping it kills the command's process group, and so
//! does `gone`, a malformed frame, or output that nobody takes any more.

use std::{
    future::pending,
    os::unix::process::ExitStatusExt as _,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use async_trait::async_trait;
use rustix::process::{Signal, kill_process_group};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split},
    process::{Child, ChildStdin, Command},
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::{Instant, timeout},
};

use super::reap::Claim;
use crate::protocol::{Frame, FrameError, FrameReader, FrameWriter, Identity, Kind};

/// How long pipes that a finished command left to others are waited for.
const INHERITED_PIPES: Duration = Duration::from_secs(2);
/// How much more they may say in that time; the largest pipe buffer Linux gives.
const INHERITED_BYTES: usize = 1 << 20;
/// Size of the pieces in which output travels.
const OUTPUT_CHUNK: usize = 32 << 10;
/// Entropy that a reseed uses.
pub const ENTROPY_MAX: usize = 512;
/// Where programs are looked for when neither the agent nor the client says so.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const EXPECTED: &str = "the first frame must be one of exec, reseed, identity";

/// What a session may do to the machine besides running commands. Errors are sentences for the host.
#[async_trait]
pub trait Machine: Send + Sync {
    /// Mixes entropy in; perhaps makes a new machine id.
    async fn reseed(&self, entropy: &[u8], regen_machine_id: bool) -> Result<(), String>;
    /// Becomes another machine.
    async fn identity(&self, identity: &Identity) -> Result<(), String>;
}

/// Serves one session and ends the stream. `gone` completes when the client cannot hear us any more.
pub async fn serve<T, G>(io: T, machine: &dyn Machine, gone: G)
where
    T: AsyncRead + AsyncWrite + Send + 'static,
    G: Future<Output = ()>,
{
    let (reader, writer) = split(io);
    let mut frames = FrameReader::new(reader);
    let mut writer = FrameWriter::new(writer);
    tokio::select! {
        biased;
        () = gone => {}
        () = async {
            // What cannot even be read as a first frame is closed without a word, as the original does.
            let Ok(Some(first)) = frames.next().await else { return };
            if let Some(last) = answer(first, frames, &mut writer, machine).await {
                drop(writer.send(&last).await);
            }
        } => {
            drop(writer.close().await);
        }
    }
}

/// The terminal frame, or none when nobody is there to read it.
async fn answer<R, W>(
    first: Frame,
    frames: FrameReader<R>,
    writer: &mut FrameWriter<W>,
    machine: &dyn Machine,
) -> Option<Frame>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Unpin,
{
    let done = match first.kind {
        Kind::Exec => return exec(first, frames, writer).await,
        Kind::Reseed => {
            let entropy = &first.data[..first.data.len().min(ENTROPY_MAX)];
            machine.reseed(entropy, first.regen_machine_id).await.map_err(|why| format!("reseed: {why}"))
        }
        Kind::Identity => machine.identity(&first.identity).await.map_err(|why| format!("identity: {why}")),
        other => Err(format!("unknown frame {:?}: {EXPECTED}", other.as_str())),
    };
    Some(done.map_or_else(Frame::error, |()| Frame::exit(0)))
}

/// How the client's side of a command came to an end.
enum Input {
    /// The client broke the protocol.
    Malformed(FrameError),
    /// The client reset the stream.
    Gone,
}

impl Input {
    /// The frame that ends the session, if somebody is there to read it.
    fn last_word(self) -> Option<Frame> {
        match self {
            Self::Malformed(error) => Some(Frame::error(format!("exec: {}", describe(&error)))),
            Self::Gone => None,
        }
    }
}

/// Runs a command to its end.
async fn exec<R, W>(first: Frame, frames: FrameReader<R>, writer: &mut FrameWriter<W>) -> Option<Frame>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Unpin,
{
    let mut child = match spawn(&first) {
        Ok(child) => child,
        Err(why) => return Some(Frame::error(why)),
    };
    let group = Group::of(&child);
    // The agent is spared when memory runs out, its commands are not. Gone already is as good.
    drop(std::fs::write(format!("/proc/{}/oom_score_adj", group.pid()), "0"));
    let (output, mut queue) = mpsc::channel(4);
    let (exited, ended) = watch::channel(None);
    let mut tasks = JoinSet::new();
    pump(&mut tasks, child.stdout.take(), Kind::Stdout, &output, &ended);
    pump(&mut tasks, child.stderr.take(), Kind::Stderr, &output, &ended);
    drop(output);
    let mut input = Abort(tokio::spawn(feed(frames, child.stdin.take())));

    let started = Frame { kind: Kind::Started, pid: group.pid(), ..Frame::default() };
    writer.send(&started).await.ok()?;
    let (mut status, mut open) = (None, true);
    // The queue ends when both pumps have: at the pipes' end, or some time after the command's.
    while open || status.is_none() {
        tokio::select! {
            frame = queue.recv(), if open => match frame {
                Some(frame) => writer.send(&frame).await.ok()?,
                None => open = false,
            },
            end = child.wait(), if status.is_none() => {
                status = Some(end.map_err(|error| format!("exec: wait: {error}")));
                exited.send_replace(Some(Instant::now()));
            }
            end = &mut input.0 => return end.ok().and_then(Input::last_word),
        }
    }
    group.forget();
    Some(status?.map_or_else(Frame::error, ended_by))
}

fn spawn(frame: &Frame) -> Result<Child, String> {
    let Some((program, arguments)) = frame.argv.split_first() else {
        return Err("exec: argv is empty; name a program".into());
    };
    let mut command = Command::new(program);
    command.args(arguments).envs(&frame.env).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if !frame.env.contains_key("PATH") && std::env::var_os("PATH").is_none() {
        command.env("PATH", PATH);
    }
    command.current_dir("/").spawn().map_err(|error| format!("exec: start {program}: {error}"))
}

/// How a command ended: with a code of its own, or by a signal.
fn ended_by(status: ExitStatus) -> Frame {
    status.signal().map_or_else(|| Frame::exit(status.code().unwrap_or(-1)), Frame::killed)
}

fn describe(error: &FrameError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The process group of a command, killed unless it ended by itself.
struct Group {
    claim: Option<Claim>,
    killed: bool,
}

impl Group {
    fn of(child: &Child) -> Self {
        Self { claim: child.id().and_then(Claim::new), killed: true }
    }

    fn pid(&self) -> i64 {
        self.claim.as_ref().map_or(0, |claim| claim.pid().as_raw_nonzero().get().into())
    }

    /// The command ended; what it left running in its group stays.
    fn forget(mut self) {
        self.killed = false;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let (Some(claim), true) = (&self.claim, self.killed) {
            // Gone already is as good.
            let _ = kill_process_group(claim.pid(), Signal::KILL);
        }
    }
}

/// A task that ends with its owner.
struct Abort<T>(JoinHandle<T>);

impl<T> Drop for Abort<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Carries the client's frames to standard input. Ends only when the session must.
async fn feed<R: AsyncRead + Unpin>(mut frames: FrameReader<R>, mut stdin: Option<ChildStdin>) -> Input {
    loop {
        match frames.next().await {
            Ok(Some(Frame { kind: Kind::Stdin, data, .. })) => {
                // A command that reads no more is no failure; the rest of its input goes nowhere.
                if let Some(pipe) = &mut stdin
                    && pipe.write_all(&data).await.is_err()
                {
                    stdin = None;
                }
            }
            Ok(Some(Frame { kind: Kind::StdinClose, .. })) => stdin = None,
            Ok(Some(_)) => {}
            Ok(None) => {
                drop(stdin);
                return pending().await;
            }
            Err(FrameError::Io(_)) => return Input::Gone,
            Err(error) => return Input::Malformed(error),
        }
    }
}

/// Carries one output pipe into the queue.
fn pump<P>(
    tasks: &mut JoinSet<()>,
    pipe: Option<P>,
    kind: Kind,
    queue: &mpsc::Sender<Frame>,
    ended: &watch::Receiver<Option<Instant>>,
) where
    P: AsyncRead + Send + Unpin + 'static,
{
    let Some(pipe) = pipe else { return };
    let (queue, ended) = (queue.clone(), ended.clone());
    tasks.spawn(async move { drain(pipe, kind, queue, ended).await });
}

/// Reads to the pipe's end. Once the command has ended, others who hold the pipe get two seconds of
/// waiting; time in which the *client* is slow does not count, so nothing that was said is lost.
async fn drain<P: AsyncRead + Unpin>(
    mut pipe: P,
    kind: Kind,
    queue: mpsc::Sender<Frame>,
    mut ended: watch::Receiver<Option<Instant>>,
) {
    let (mut patience, mut room) = (INHERITED_PIPES, INHERITED_BYTES);
    let mut buffer = vec![0; OUTPUT_CHUNK];
    loop {
        let over = ended.borrow_and_update().is_some();
        let n = if over {
            let from = Instant::now();
            let read = timeout(patience, pipe.read(&mut buffer)).await;
            patience = patience.saturating_sub(from.elapsed());
            read.unwrap_or(Ok(0)).unwrap_or(0)
        } else {
            tokio::select! {
                biased;
                n = pipe.read(&mut buffer) => n.unwrap_or(0),
                changed = ended.changed() => match changed {
                    Ok(()) => continue,
                    Err(_) => return,
                },
            }
        };
        if over {
            room = room.saturating_sub(n);
        }
        if n == 0 || room == 0 || queue.send(Frame::data(kind.clone(), buffer[..n].to_vec())).await.is_err() {
            return;
        }
    }
}
