//! The host's side of one guest port.
//!
//! Entry point: [`Channel::open`] on the Unix socket of a virtio-serial port.

use std::{collections::BTreeMap, time::Duration};

use thiserror::Error;
use tokio::{net::UnixStream, sync::mpsc};

use crate::protocol::Identity;

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
    /// The command ended; -1 when a signal killed it. Always the last event.
    Exit(i32),
}

/// A running command: feed `stdin` (dropping the sender closes it), read `events` until `Exit` or an error.
#[derive(Debug)]
pub struct ExecSession {
    /// Bytes for standard input.
    pub stdin: mpsc::Sender<Vec<u8>>,
    /// What the command says; ends after `Exit` or one error.
    pub events: mpsc::Receiver<Result<ExecEvent, GuestError>>,
}

/// One open guest port. Sessions run side by side on it; dropping it ends them.
#[derive(Debug)]
pub struct Channel {}

impl Channel {
    /// Sends the preamble with a fresh random epoch and waits until the agent echoes it.
    pub async fn open(stream: UnixStream, limit: Duration) -> Result<Self, GuestError> {
        let _ = (stream, limit);
        Err(GuestError::Closed)
    }

    /// Starts a command.
    pub async fn exec(&self, exec: Exec) -> Result<ExecSession, GuestError> {
        let _ = exec;
        Err(GuestError::Closed)
    }

    /// Gives the guest its identity; falls back to the steps of `engine-cli` §9 by exec where the agent
    /// does not know the frame.
    pub async fn identity(&self, identity: Identity, limit: Duration) -> Result<(), GuestError> {
        let _ = (identity, limit);
        Err(GuestError::Closed)
    }

    /// Runs a short command and collects its output (at most 1 MiB each of stdout and stderr).
    pub async fn output(&self, exec: Exec, limit: Duration) -> Result<Output, GuestError> {
        let _ = (exec, limit);
        Err(GuestError::Closed)
    }
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
