//! The host's side of one guest port.
//!
//! Entry point: [`Channel::open`] on the Unix socket of a virtio-serial port. One task of the channel owns
//! the `yamux` connection; every session is one stream of it with a task of its own, ended by dropping the
//! [`ExecSession`] or the [`Channel`]. A lost connection or a broken session is always an error, never an
//! exit code.

mod connection;
mod fallback;
mod session;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use thiserror::Error;
use tokio::{
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};

pub use self::session::{Entropy, ask, start};
use crate::{
    MAX_LARGE_FRAMES, MAX_SESSIONS,
    protocol::{Frame, Identity, Kind, LargeFrames},
};

/// Most bytes of stdout and of stderr that [`Channel::output`] collects.
pub const OUTPUT_LIMIT: usize = 1 << 20;

/// Why a session with the guest agent could not be had, or broke.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GuestError {
    /// The agent did not answer in time; it may still be starting.
    #[error("the guest agent did not answer within {0:?}")]
    Silent(Duration),
    /// The channel ended before the session did.
    #[error("the guest channel closed before the session ended")]
    Closed,
    /// The agent answered with an error frame.
    #[error("the guest agent refused: {0}")]
    Refused(String),
    /// The peer broke the protocol.
    #[error("the guest agent broke the protocol: {0}")]
    Protocol(String),
    /// The socket failed.
    #[error("guest channel")]
    Io(#[from] std::io::Error),
}

/// A command to run in the guest: no shell, as root, in a process group of its own.
#[derive(Debug, Clone, Default)]
pub struct Exec {
    /// Program and arguments; never empty.
    pub argv: Vec<String>,
    /// Merged over the agent's environment.
    pub env: BTreeMap<String, String>,
}

/// What a running command says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// The guest's process id.
    Started(u32),
    /// Bytes of standard output.
    Stdout(Vec<u8>),
    /// Bytes of standard error.
    Stderr(Vec<u8>),
    /// A signal killed the command; `Exit(-1)` follows. Agents of earlier snapshots do not say it.
    Killed(i32),
    /// The command ended; -1 when a signal killed it. Always the last event.
    Exit(i32),
}

/// A running command: feed `stdin` (dropping the sender closes it), read `events` until `Exit` or an error.
///
/// Dropping `events` before that cancels the command: the agent kills its process group. Whoever feeds
/// `stdin` from something that failed drops the whole session, lest the command takes the rest for all.
#[derive(Debug)]
pub struct ExecSession {
    /// Bytes for standard input.
    pub stdin: mpsc::Sender<Vec<u8>>,
    /// What the command says; ends after `Exit` or one error.
    pub events: mpsc::Receiver<Result<ExecEvent, GuestError>>,
}

/// What a short command left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// Exit code; -1 when a signal killed it.
    pub code: i32,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

/// One open guest port. Sessions run side by side on it; dropping it ends them.
#[derive(Debug)]
pub struct Channel {
    connection: connection::Handle,
    permits: Arc<Semaphore>,
    large: LargeFrames,
}

impl Channel {
    /// Sends the preamble with a fresh random epoch and waits until the agent echoes it. While nothing
    /// answers it is repeated: an agent that starts again loses what its predecessor had not read.
    pub async fn open(stream: UnixStream, limit: Duration) -> Result<Self, GuestError> {
        let transport = connection::greet(stream, limit).await?;
        let permits = Arc::new(Semaphore::new(MAX_SESSIONS));
        let large = LargeFrames::new(MAX_LARGE_FRAMES);
        Ok(Self { connection: connection::Handle::spawn(transport), permits, large })
    }

    /// Starts a command. Waits while 256 sessions are running.
    pub async fn exec(&self, exec: Exec) -> Result<ExecSession, GuestError> {
        let (stream, permit) = self.stream().await?;
        Ok(session::start_holding(stream, exec, self.large.clone(), permit))
    }

    /// Gives the guest its identity; falls back to the steps of `engine-cli` §9 by exec where the agent
    /// does not know the frame.
    pub async fn identity(&self, identity: Identity, limit: Duration) -> Result<(), GuestError> {
        within(limit, async {
            let (stream, _permit) = self.stream().await?;
            let frame = Frame { kind: Kind::Identity, identity: identity.clone(), ..Frame::default() };
            match session::ask_sharing(stream, &frame, self.large.clone()).await {
                Err(GuestError::Refused(why)) if !why.starts_with(IDENTITY_PREFIX) => {
                    tracing::warn!(
                        why,
                        "the guest agent knows no identity frame; running the steps one by one"
                    );
                    fallback::identity(self, &identity).await
                }
                other => other,
            }
        })
        .await
    }

    /// Gives the guest fresh entropy (the first 512 bytes are used), and a new machine id if asked.
    pub async fn reseed(&self, entropy: Entropy, limit: Duration) -> Result<(), GuestError> {
        within(limit, async {
            let (stream, _permit) = self.stream().await?;
            session::ask_sharing(stream, &entropy.frame(), self.large.clone()).await
        })
        .await
    }

    /// Runs a short command and collects its output (at most 1 MiB each of stdout and stderr; the rest is
    /// read and dropped).
    pub async fn output(&self, exec: Exec, limit: Duration) -> Result<Output, GuestError> {
        within(limit, async {
            let ExecSession { stdin, mut events } = self.exec(exec).await?;
            drop(stdin);
            let mut output = Output::default();
            while let Some(event) = events.recv().await {
                match event? {
                    ExecEvent::Started(_) | ExecEvent::Killed(_) => {}
                    ExecEvent::Stdout(data) => append(&mut output.stdout, &data),
                    ExecEvent::Stderr(data) => append(&mut output.stderr, &data),
                    ExecEvent::Exit(code) => return Ok(Output { code, ..output }),
                }
            }
            Err(GuestError::Closed)
        })
        .await
    }

    /// Ends when the connection is gone: the guest or its hypervisor ended, or another host took the port.
    pub async fn closed(&self) {
        self.connection.closed().await;
    }

    async fn stream(&self) -> Result<(connection::Stream, OwnedSemaphorePermit), GuestError> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| GuestError::Closed)?;
        Ok((self.connection.stream().await?, permit))
    }
}

/// How every error of our agent about an identity begins; others mean it does not know the frame. It is part of
/// the wire format: an error frame has nothing but its message, a foreign agent says in words alone that it does
/// not know a frame, and the agents inside stored snapshots go on saying it like this.
pub(crate) const IDENTITY_PREFIX: &str = "identity: ";

fn append(into: &mut Vec<u8>, data: &[u8]) {
    let room = OUTPUT_LIMIT - into.len();
    into.extend_from_slice(&data[..data.len().min(room)]);
}

async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, GuestError>>,
) -> Result<T, GuestError> {
    timeout(limit, work).await.unwrap_or(Err(GuestError::Silent(limit)))
}

/// Base64 as an identity frame wants it.
#[must_use]
pub fn entropy_text(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}
