//! A client of QEMU's machine protocol, for connect, use, close.
//!
//! Entry point: [`Qmp::connect`]. Everything is bounded: an answer has at most [`MAX_LINE`] bytes, a
//! command at most [`COMMAND_LIMIT`]. QEMU talks to a hostile guest, so its answers are not trusted.
//! Which QEMU it is, only the greeting says ([`Qmp::version`]): the host's may be another one by now.
//! Invariant: an answer belongs to the command that it is taken for. QEMU still sends what an earlier
//! connection asked, and events, to the next one, even before the greeting; so each command carries an
//! id of its own (QMP's `id` member, <https://www.qemu.org/docs/master/interop/qmp-spec.html>), and every
//! other line is passed over.

use std::{io, os::fd::BorrowedFd, path::Path, time::Duration};

use serde_json::{Value, json};
use thiserror::Error;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, Interest},
    net::UnixStream,
    time::{Instant, sleep, timeout, timeout_at},
};
use uuid::Uuid;

use crate::paths::connect;

/// Longest answer that is read, and the most that is passed over before a greeting.
const MAX_LINE: usize = 1 << 20;
/// Longest wait for one command's answer.
const COMMAND_LIMIT: Duration = Duration::from_secs(20);

/// Why QEMU did not do what was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum QmpError {
    /// The socket failed or closed.
    #[error("QEMU's monitor socket")]
    Io(#[from] io::Error),
    /// No answer in time.
    #[error("QEMU did not answer {0} in time")]
    Silent(String),
    /// QEMU said no.
    #[error("QEMU refused {command}: {message}")]
    Refused {
        /// Which command.
        command: String,
        /// Its words.
        message: String,
    },
    /// Not the protocol.
    #[error("QEMU's answer to {0} is not QMP")]
    Protocol(String),
}

/// A connection with the greeting and the capabilities done.
#[derive(Debug)]
pub(crate) struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    version: Option<String>,
    /// Tells this connection's commands from those of all others. Nothing is decided by it, so it does not come
    /// from the world.
    session: Uuid,
    commands: u64,
}

impl Qmp {
    /// Connects to the socket and waits until QEMU takes commands.
    pub(crate) async fn connect(socket: &Path, limit: Duration) -> Result<Self, QmpError> {
        let deadline = Instant::now() + limit;
        let opening = async {
            let stream = connect(socket).await?;
            let mut qmp =
                Self { stream, buffer: Vec::new(), version: None, session: Uuid::new_v4(), commands: 0 };
            qmp.version = version(&qmp.greeting().await?);
            qmp.execute("qmp_capabilities", json!({})).await?;
            Ok(qmp)
        };
        timeout_at(deadline, opening).await.unwrap_or_else(|_| Err(QmpError::Silent("greeting".into())))
    }

    /// The version of this very QEMU, such as `7.2.22`.
    pub(crate) fn version(&self) -> Result<&str, QmpError> {
        self.version.as_deref().ok_or_else(|| QmpError::Protocol("greeting (its version)".into()))
    }

    /// Sends one command and waits for its answer; events in between are dropped.
    pub(crate) async fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let (request, id) = self.request(command, &arguments);
        let exchange = async {
            self.stream.write_all(&request).await?;
            self.answer(command, &id).await
        };
        timeout(COMMAND_LIMIT, exchange).await.unwrap_or_else(|_| Err(QmpError::Silent(command.into())))
    }

    /// Gives QEMU a descriptor under `name`, for `fd:name`.
    pub(crate) async fn pass_fd(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), QmpError> {
        let (request, id) = self.request("getfd", &json!({ "fdname": name }));
        let exchange = async {
            let sent = self
                .stream
                .async_io(Interest::WRITABLE, || crate::sys::send_with_fd(&self.stream, &request, fd))
                .await?;
            let rest = request.get(sent..).unwrap_or_default();
            self.stream.write_all(rest).await?;
            self.answer("getfd", &id).await
        };
        let done = timeout(COMMAND_LIMIT, exchange).await;
        done.unwrap_or_else(|_| Err(QmpError::Silent("getfd".into()))).map(drop)
    }

    /// Waits until a migration, out or in, is complete.
    pub(crate) async fn migrated(&mut self, limit: Duration) -> Result<(), QmpError> {
        let deadline = Instant::now() + limit;
        let mut pause = Duration::from_millis(1);
        loop {
            let state = self.execute("query-migrate", json!({})).await?;
            match state.get("status").and_then(Value::as_str) {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => {
                    let message =
                        state.get("error-desc").and_then(Value::as_str).unwrap_or("migration failed");
                    return Err(QmpError::Refused { command: "migrate".into(), message: message.to_owned() });
                }
                _ if Instant::now() >= deadline => return Err(QmpError::Silent("migrate".into())),
                _ => sleep(pause).await,
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    /// Ends a transfer of state that is still under way. One that a killed operation left would stop the
    /// guest once more when it is complete, whoever let it go on meanwhile.
    pub(crate) async fn settle(&mut self, limit: Duration) -> Result<(), QmpError> {
        let deadline = Instant::now() + limit;
        let mut cancelled = false;
        loop {
            let state = self.execute("query-migrate", json!({})).await?;
            match state.get("status").and_then(Value::as_str) {
                Some("setup" | "active" | "device" | "pre-switchover" | "wait-unplug" | "cancelling") => {}
                _ => return Ok(()),
            }
            if Instant::now() >= deadline {
                return Err(QmpError::Silent("migrate_cancel".into()));
            }
            if !std::mem::replace(&mut cancelled, true) {
                self.execute("migrate_cancel", json!({})).await?;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// `query-status`: `running`, `paused`, `postmigrate`, `inmigrate`…
    pub(crate) async fn status(&mut self) -> Result<String, QmpError> {
        let state = self.execute("query-status", json!({})).await?;
        let status = state.get("status").and_then(Value::as_str);
        status.map(str::to_owned).ok_or_else(|| QmpError::Protocol("query-status".into()))
    }

    /// The line of a command, and its id.
    fn request(&mut self, command: &str, arguments: &Value) -> (Vec<u8>, String) {
        self.commands += 1;
        let id = format!("{}-{}", self.session.simple(), self.commands);
        let request = json!({ "execute": command, "arguments": arguments, "id": id });
        (format!("{request}\n").into_bytes(), id)
    }

    /// What QEMU says of itself, behind whatever is left of earlier connections.
    async fn greeting(&mut self) -> Result<Value, QmpError> {
        let mut passed_over = 0;
        while passed_over <= MAX_LINE {
            let line = self.line("greeting").await?;
            passed_over += line.len();
            let said = serde_json::from_slice(&line).unwrap_or(Value::Null);
            if let Some(greeting) = said.get("QMP") {
                return Ok(greeting.clone());
            }
        }
        Err(QmpError::Protocol("greeting".into()))
    }

    /// The answer to the command with this id.
    async fn answer(&mut self, command: &str, id: &str) -> Result<Value, QmpError> {
        let rubbish = || QmpError::Protocol(command.into());
        loop {
            let line = self.line(command).await?;
            let mut said: Value = serde_json::from_slice(&line).map_err(|_| rubbish())?;
            if !["return", "error", "event"].iter().any(|kind| said.get(kind).is_some()) {
                return Err(rubbish());
            }
            if said.get("id").and_then(Value::as_str) != Some(id) {
                continue;
            }
            if let Some(error) = said.get("error") {
                let message = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
                return Err(QmpError::Refused { command: command.into(), message: message.to_owned() });
            }
            return said.get_mut("return").map(Value::take).ok_or_else(rubbish);
        }
    }

    async fn line(&mut self, command: &str) -> Result<Vec<u8>, QmpError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                return Ok(self.buffer.drain(..=end).collect());
            }
            if self.buffer.len() > MAX_LINE {
                return Err(QmpError::Protocol(command.into()));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
    }
}

/// `major.minor.micro` of a greeting.
fn version(greeting: &Value) -> Option<String> {
    let numbers = greeting.get("version")?.get("qemu")?;
    let number = |name: &str| numbers.get(name).and_then(Value::as_u64);
    Some(format!("{}.{}.{}", number("major")?, number("minor")?, number("micro")?))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tokio::{
        io::{AsyncBufReadExt as _, BufReader},
        net::UnixListener,
    };

    use super::*;

    /// Ends a test that hangs; nothing waits for it otherwise.
    const HANGS: Duration = Duration::from_secs(120);
    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;

    /// A monitor that says `lines`, one after each request but the first, which is the greeting. Where `@`
    /// stands in it, it names the request.
    async fn monitor(lines: Vec<String>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl.sock");
        let listener = UnixListener::bind(&path).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (reader, mut writer) = stream.split();
            let mut requests = BufReader::new(reader).lines();
            let mut id = Value::Null;
            for line in lines {
                let line = line.replace('@', &format!(r#""id": {id}"#)) + "\n";
                writer.write_all(line.as_bytes()).await.unwrap();
                let Ok(Some(request)) = requests.next_line().await else { return };
                let request: Value = serde_json::from_str(&request).unwrap();
                id = request["id"].clone();
            }
        });
        (folder, path)
    }

    async fn answer_to(line: &str) -> Result<Value, QmpError> {
        let lines = [GREETING, r#"{"return": {}, @}"#, line].map(str::to_owned).to_vec();
        let (_folder, path) = monitor(lines).await;
        let mut qmp = Qmp::connect(&path, HANGS).await?;
        qmp.execute("query-status", json!({})).await
    }

    #[tokio::test]
    async fn events_are_dropped_and_answers_are_found_behind_them() {
        let line =
            "{\"event\": \"STOP\"}\n{\"event\": \"RESUME\"}\n{\"return\": {\"status\": \"running\"}, @}";
        assert_eq!(answer_to(line).await.unwrap()["status"], "running");
    }

    #[tokio::test]
    async fn what_an_earlier_connection_asked_is_nobodys_answer_and_no_greeting() {
        let left = concat!(
            r#"{"timestamp": {"seconds": 1}, "event": "STOP"}"#,
            "\n",
            r#"{"return": {"status": "completed"}, "id": "another-2"}"#,
            "\n",
            r#"{"return": {"status": "completed"}}"#,
            "\n",
            r#"{"error": {"class": "GenericError", "desc": "of another"}, "id": "another-3"}"#,
        );
        let torn = "completed\"}}";
        let lines = [
            format!("{torn}\n{left}\n{GREETING}\n{left}"),
            format!("{left}\n{{\"return\": {{}}, @}}"),
            format!("{left}\n{{\"return\": {{\"status\": \"active\"}}, @}}"),
        ];
        let (_folder, path) = monitor(lines.to_vec()).await;
        let mut qmp = Qmp::connect(&path, HANGS).await.unwrap();
        assert_eq!(qmp.status().await.unwrap(), "active");
        let (_folder, path) = monitor(vec![format!("{left}\n").repeat(MAX_LINE / left.len() + 1)]).await;
        assert!(matches!(Qmp::connect(&path, HANGS).await.unwrap_err(), QmpError::Protocol(_)));
    }

    #[tokio::test]
    async fn the_greeting_says_which_qemu_this_is_and_one_that_does_not_can_still_be_told_what_to_do() {
        let qemu =
            |numbers: &str| format!(r#"{{"QMP": {{"version": {{"qemu": {numbers}, "package": "x"}}}}}}"#);
        for (greeting, version) in [
            (qemu(r#"{"micro": 22, "minor": 2, "major": 7}"#), Some("7.2.22")),
            (qemu(r#"{"micro": 0, "minor": 0, "major": 10}"#), Some("10.0.0")),
            (qemu(r#"{"minor": 2, "major": 7}"#), None),
            (qemu(r#"{"micro": "22; x", "minor": 2, "major": 7}"#), None),
            (qemu(r#"{"micro": -1, "minor": 2, "major": 7}"#), None),
            (qemu("7"), None),
            (GREETING.to_owned(), None),
        ] {
            let answers = [
                greeting.clone(),
                r#"{"return": {}, @}"#.into(),
                r#"{"return": {"status": "paused"}, @}"#.into(),
            ];
            let (_folder, path) = monitor(answers.to_vec()).await;
            let mut qmp = Qmp::connect(&path, HANGS).await.unwrap();
            assert_eq!(qmp.version().ok(), version, "{greeting}");
            assert_eq!(qmp.status().await.unwrap(), "paused");
        }
    }

    #[tokio::test]
    async fn a_refusal_has_qemus_words_and_rubbish_is_an_error() {
        let refused = answer_to(r#"{"error": {"class": "GenericError", "desc": "no such thing"}, @}"#)
            .await
            .unwrap_err();
        assert_eq!(refused.to_string(), "QEMU refused query-status: no such thing");
        for rubbish in ["nonsense", "{}", "[]", &"x".repeat(MAX_LINE + 2)] {
            let error = answer_to(rubbish).await.unwrap_err();
            assert!(matches!(error, QmpError::Protocol(_)), "{error}");
        }
    }

    #[tokio::test]
    async fn a_transfer_that_somebody_left_is_ended_and_one_that_is_over_is_left_alone() {
        let status = |word: &str| format!(r#"{{"return": {{"status": "{word}"}}, @}}"#);
        for (answers, well) in [
            (vec![r#"{"return": {}, @}"#.to_owned()], true),
            (vec![status("completed")], true),
            (
                vec![
                    status("active"),
                    r#"{"return": {}, @}"#.into(),
                    status("cancelling"),
                    status("cancelled"),
                ],
                true,
            ),
            (vec![status("active"), "nonsense".into()], false),
        ] {
            let lines =
                [GREETING, r#"{"return": {}, @}"#].map(str::to_owned).into_iter().chain(answers.clone());
            let (_folder, path) = monitor(lines.collect()).await;
            let mut qmp = Qmp::connect(&path, HANGS).await.unwrap();
            assert_eq!(qmp.settle(HANGS).await.is_ok(), well, "{answers:?}");
        }
    }

    #[tokio::test]
    async fn a_monitor_that_says_nothing_or_goes_away_is_an_error() {
        let limit = Duration::from_millis(100);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ctl.sock");
        let _silent = UnixListener::bind(&path).unwrap();
        assert!(matches!(Qmp::connect(&path, limit).await.unwrap_err(), QmpError::Silent(_)));
        let (_folder, path) = monitor(Vec::new()).await;
        assert!(matches!(Qmp::connect(&path, HANGS).await.unwrap_err(), QmpError::Io(_)));
    }
}
