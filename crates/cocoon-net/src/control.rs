//! The daemon's control socket: one JSON object a line, one answer a line.
//!
//! Requests: `{"release":"52:54:00:ab:cd:01"}`, `{"ping":true}`, `{"status":true}`. Answers: `{"ok":true,…}`
//! or `{"error":"…"}`. Entry points: [`ask`] (client), [`listen`] and [`serve`] (daemon). Invariants: the
//! socket is 0600 from the moment it can be found; a line is at most [`MAX_LINE`] bytes; a client is
//! dropped after [`PATIENCE`]; at most [`MAX_CLIENTS`] are served at once.

use std::{io, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc, time::Duration};

use cocoon_kit::files;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc, oneshot},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{config::NetworkConfig, dhcp::Counters};

/// Two paths of a network's settings fit.
const MAX_LINE: u64 = 16 * 1024;
const MAX_CLIENTS: usize = 16;
const PATIENCE: Duration = Duration::from_secs(30);

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Request {
    /// Forget the lease of a MAC.
    Release {
        /// Whose.
        release: String,
    },
    /// Who are you?
    Ping {
        /// Always true.
        ping: bool,
    },
    /// How is it going?
    Status {
        /// Always true.
        status: bool,
    },
}

/// The answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// It was done.
    #[serde(default)]
    pub ok: bool,
    /// Why it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The daemon's version (ping).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The daemon's process id (ping).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The network that it serves (ping).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkConfig>,
    /// Figures (status).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<serde_json::Value>,
}

/// Figures of a running daemon.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// Leases in force.
    pub lease_active: usize,
    /// Addresses that could be offered.
    pub pool_available: usize,
    /// What was answered and what was not, since the start.
    #[serde(flatten)]
    pub counters: Counters,
}

impl Answer {
    /// It was done.
    #[must_use]
    pub fn done() -> Self {
        Self { ok: true, ..Self::default() }
    }

    /// It was not.
    #[must_use]
    pub fn failed(message: impl Into<String>) -> Self {
        Self { error: Some(message.into()), ..Self::default() }
    }
}

/// A request with the place for its answer.
pub(crate) type Call = (Request, oneshot::Sender<Answer>);

/// Asks the daemon behind `socket`.
pub async fn ask(socket: &Path, request: &Request) -> io::Result<Answer> {
    let exchange = async {
        let mut stream = UnixStream::connect(socket).await?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line).await?;
        let mut answer = String::new();
        BufReader::new(stream).take(MAX_LINE).read_line(&mut answer).await?;
        serde_json::from_str(&answer).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    };
    timeout(PATIENCE, exchange).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Binds the socket. What is left of an earlier daemon under that name is replaced.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    files::private_folder(folder)?;
    // Bound under another name first, so that nobody finds it before its mode is set.
    let temporary = folder.join(format!(".control.{}", std::process::id()));
    let _ = std::fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary)?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&temporary, path)?;
    Ok(listener)
}

/// Takes requests and hands them to `calls` until `shutdown`.
pub(crate) async fn serve(listener: UnixListener, calls: mpsc::Sender<Call>, shutdown: CancellationToken) {
    let places = Arc::new(Semaphore::new(MAX_CLIENTS));
    let mut clients = tokio::task::JoinSet::new();
    loop {
        while clients.try_join_next().is_some() {}
        let stream = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "control socket");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        // A client beyond the limit is dropped at once; it may try again.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let calls = calls.clone();
        clients.spawn(async move {
            let _place = place;
            let _ = timeout(PATIENCE, converse(stream, &calls)).await;
        });
    }
    clients.shutdown().await;
}

async fn converse(stream: UnixStream, calls: &mpsc::Sender<Call>) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    loop {
        let mut line = Vec::new();
        (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Ok(());
        }
        let whole = line.ends_with(b"\n");
        let answer = match serde_json::from_slice(&line) {
            Ok(request) if whole => call(calls, request).await,
            _ => Answer::failed(
                "not a request of this socket; ask {\"release\":MAC}, {\"ping\":true} or {\"status\":true}",
            ),
        };
        let mut text = serde_json::to_vec(&answer)?;
        text.push(b'\n');
        writer.write_all(&text).await?;
        if !whole {
            return Ok(());
        }
    }
}

async fn call(calls: &mpsc::Sender<Call>, request: Request) -> Answer {
    let (sender, receiver) = oneshot::channel();
    let ending = || Answer::failed("the network daemon is shutting down; try again");
    if calls.send((request, sender)).await.is_err() {
        return ending();
    }
    receiver.await.unwrap_or_else(|_| ending())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_is_private_and_answers_line_by_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let listener = listen(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let (sender, mut calls) = mpsc::channel::<Call>(1);
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, sender, stop.clone()));
        let echo = tokio::spawn(async move {
            while let Some((request, answer)) = calls.recv().await {
                let _ = answer.send(Answer { error: Some(format!("{request:?}")), ..Answer::default() });
            }
        });
        let answer = ask(&path, &Request::Ping { ping: true }).await.unwrap();
        assert_eq!(answer.error.as_deref(), Some("Ping { ping: true }"));
        let mut stream = UnixStream::connect(&path).await.unwrap();
        stream.write_all(b"{\"release\":\"x\"}\nnonsense\n").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("Release") && text.contains("not a request"), "{text}");
        stop.cancel();
        server.await.unwrap();
        echo.await.unwrap();
    }
}
