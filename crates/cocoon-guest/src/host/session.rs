//! One session of `engine-cli` §8 from the client's side, over any byte stream.

use tokio::{
    io::{AsyncRead, AsyncWrite, split},
    sync::mpsc,
};

use super::{Exec, ExecEvent, ExecSession, GuestError};
use crate::protocol::{Frame, FrameError, FrameReader, FrameWriter, Kind, LargeFrames, STDIN_CHUNK};

/// Largest piece of output in one event, so that a full queue stays below 1 MiB.
const EVENT_CHUNK: usize = 64 << 10;
const QUEUE: usize = 8;
/// Most characters of a guest's words that go into an error or the log.
const QUOTED: usize = 200;

/// Entropy for [`super::Channel::reseed`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Entropy {
    /// Fresh random bytes.
    pub bytes: Vec<u8>,
    /// Also give the guest a new machine id.
    pub regen_machine_id: bool,
}

impl Entropy {
    /// The frame that asks for it.
    #[must_use]
    pub fn frame(&self) -> Frame {
        Frame {
            kind: Kind::Reseed,
            data: self.bytes.clone(),
            regen_machine_id: self.regen_machine_id,
            ..Frame::default()
        }
    }
}

/// Starts a command over `io`.
pub fn start<T>(io: T, exec: Exec) -> ExecSession
where
    T: AsyncRead + AsyncWrite + Send + 'static,
{
    start_holding(io, exec, LargeFrames::new(1), ())
}

/// Starts a command over `io`, keeping `held` until the session is over.
pub(crate) fn start_holding<T, H>(io: T, exec: Exec, room: LargeFrames, held: H) -> ExecSession
where
    T: AsyncRead + AsyncWrite + Send + 'static,
    H: Send + 'static,
{
    let (stdin, input) = mpsc::channel(QUEUE);
    let (events, output) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        run(io, exec, room, input, events).await;
        drop(held);
    });
    ExecSession { stdin, events: output }
}

async fn run<T: AsyncRead + AsyncWrite>(
    io: T,
    exec: Exec,
    room: LargeFrames,
    input: mpsc::Receiver<Vec<u8>>,
    events: mpsc::Sender<Result<ExecEvent, GuestError>>,
) {
    let (reader, writer) = split(io);
    let writing = async {
        // A failed write shows up as the end of reading, which knows more about the cause.
        if let Err(error) = feed(FrameWriter::new(writer), exec, input).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "standard input of a guest command");
        }
        std::future::pending::<()>().await;
    };
    let reading = async {
        if let Err(error) = listen(FrameReader::sharing(reader, room), &events).await {
            // Nobody listening any more is no news.
            drop(events.send(Err(error)).await);
        }
    };
    tokio::select! {
        biased;
        () = writing => {}
        () = reading => {}
        () = events.closed() => {}
    }
}

/// Sends the command, then standard input until the sender is dropped.
async fn feed<W: AsyncWrite + Unpin>(
    mut frames: FrameWriter<W>,
    exec: Exec,
    mut input: mpsc::Receiver<Vec<u8>>,
) -> Result<(), FrameError> {
    frames.send(&Frame { kind: Kind::Exec, argv: exec.argv, env: exec.env, ..Frame::default() }).await?;
    while let Some(bytes) = input.recv().await {
        for chunk in bytes.chunks(STDIN_CHUNK) {
            frames.send(&Frame::data(Kind::Stdin, chunk.to_vec())).await?;
        }
    }
    frames.send(&Frame::new(Kind::StdinClose)).await?;
    // The writing side stays open: its end would tell the agent that the client is gone.
    std::future::pending().await
}

/// Reads what the agent says up to the terminal frame.
async fn listen<R: AsyncRead + Unpin>(
    mut frames: FrameReader<R>,
    events: &mpsc::Sender<Result<ExecEvent, GuestError>>,
) -> Result<(), GuestError> {
    let mut unknown = false;
    loop {
        let frame = frames.next().await.map_err(broken)?.ok_or(GuestError::Closed)?;
        let sent = match frame.kind {
            Kind::Started => {
                let pid = u32::try_from(frame.pid)
                    .map_err(|_| GuestError::Protocol(format!("process id {} is none", frame.pid)))?;
                events.send(Ok(ExecEvent::Started(pid))).await
            }
            Kind::Stdout => output(events, frame.data, ExecEvent::Stdout).await,
            Kind::Stderr => output(events, frame.data, ExecEvent::Stderr).await,
            Kind::Exit => {
                let code = exit_code(&frame)?;
                if let Some(signal) = signal(&frame) {
                    drop(events.send(Ok(ExecEvent::Killed(signal))).await);
                }
                drop(events.send(Ok(ExecEvent::Exit(code))).await);
                return Ok(());
            }
            Kind::Error => return Err(refused(&frame.message)),
            other => {
                // Once a session: how much lands in the host's log is not for the guest to say.
                if !std::mem::replace(&mut unknown, true) {
                    let kind = quoted(other.as_str());
                    tracing::warn!(kind, "the guest agent sent a frame of unknown type");
                }
                Ok(())
            }
        };
        if sent.is_err() {
            return Ok(());
        }
    }
}

type Sent = Result<(), mpsc::error::SendError<Result<ExecEvent, GuestError>>>;

async fn output(
    events: &mpsc::Sender<Result<ExecEvent, GuestError>>,
    data: Vec<u8>,
    event: fn(Vec<u8>) -> ExecEvent,
) -> Sent {
    if data.len() <= EVENT_CHUNK {
        return events.send(Ok(event(data))).await;
    }
    for chunk in data.chunks(EVENT_CHUNK) {
        events.send(Ok(event(chunk.to_vec()))).await?;
    }
    Ok(())
}

/// Sends one frame that needs no more than a terminal answer (`reseed`, `identity`), and waits for it.
pub async fn ask<T: AsyncRead + AsyncWrite>(io: T, frame: &Frame) -> Result<(), GuestError> {
    ask_sharing(io, frame, LargeFrames::new(1)).await
}

/// [`ask`], with room for a large answer only while there is.
pub(crate) async fn ask_sharing<T>(io: T, frame: &Frame, room: LargeFrames) -> Result<(), GuestError>
where
    T: AsyncRead + AsyncWrite,
{
    let (reader, writer) = split(io);
    let mut writer = FrameWriter::new(writer);
    writer.send(frame).await.map_err(broken)?;
    let mut frames = FrameReader::sharing(reader, room);
    loop {
        let frame = frames.next().await.map_err(broken)?.ok_or(GuestError::Closed)?;
        match frame.kind {
            Kind::Exit => {
                return match exit_code(&frame)? {
                    0 => Ok(()),
                    code => Err(GuestError::Protocol(format!("exit code {code} where only 0 makes sense"))),
                };
            }
            Kind::Error => return Err(refused(&frame.message)),
            _ => {}
        }
    }
}

/// The signal that killed the command, if the guest says one that there is: 1 to 64 on Linux.
fn signal(frame: &Frame) -> Option<i32> {
    let killed = frame.exit_code == -1 && (1..=64).contains(&frame.signal);
    killed.then(|| i32::try_from(frame.signal).ok()).flatten()
}

fn exit_code(frame: &Frame) -> Result<i32, GuestError> {
    i32::try_from(frame.exit_code)
        .map_err(|_| GuestError::Protocol(format!("exit code {} is none", frame.exit_code)))
}

/// What the guest says for a refusal, bounded.
pub(crate) fn refused(message: &str) -> GuestError {
    GuestError::Refused(quoted(message))
}

/// The beginning of a guest's words, on one line and without control characters: they end up in logs and on
/// terminals of the host.
fn quoted(text: &str) -> String {
    let mut rest = text.chars();
    let tame = |c: char| if c.is_control() { ' ' } else { c };
    let mut quoted: String = rest.by_ref().take(QUOTED).map(tame).collect();
    if rest.next().is_some() {
        quoted.push('…');
    }
    quoted
}

/// A reset stream reads as an error of the connection; everything else is the peer's fault.
fn broken(error: FrameError) -> GuestError {
    match error {
        FrameError::Truncated => GuestError::Closed,
        FrameError::Io(e) if e.kind() == std::io::ErrorKind::WriteZero => GuestError::Closed,
        FrameError::Io(e) => GuestError::Io(e),
        other => GuestError::Protocol(quoted(&other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use tokio::io::{AsyncWriteExt as _, duplex};
    use tracing::instrument::WithSubscriber as _;

    use super::*;

    #[test]
    fn a_guests_words_are_cut_and_kept_on_one_line() {
        assert_eq!(quoted("exec: no such file"), "exec: no such file");
        assert_eq!(quoted("a\nb\u{1b}[2J"), "a b [2J");
        let long = quoted(&"ü".repeat(8 << 20));
        assert_eq!(long.chars().count(), QUOTED + 1);
        assert!(long.ends_with("ü…"));
    }

    #[tokio::test]
    async fn an_endless_refusal_becomes_a_short_error() {
        let (ours, theirs) = duplex(64 << 10);
        let guest = async {
            let (_reader, writer) = split(theirs);
            FrameWriter::new(writer).send(&Frame::error("x".repeat(1 << 20))).await.unwrap();
        };
        let frame = Entropy::default().frame();
        let (answer, ()) = tokio::join!(ask(ours, &frame), guest);
        let text = answer.unwrap_err().to_string();
        assert!(text.len() < 300, "{} bytes", text.len());
    }

    /// A log in memory.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut log = self.0.lock().map_err(|error| io::Error::other(error.to_string()))?;
            io::Write::write(&mut *log, bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_signal_is_told_before_the_exit_and_one_that_there_is_not_is_none() {
        for (frame, told) in [
            (r#"{"type":"exit","exit_code":-1,"signal":15}"#, Some(15)),
            (r#"{"type":"exit","exit_code":-1}"#, None),
            (r#"{"type":"exit","exit_code":-1,"signal":65}"#, None),
            (r#"{"type":"exit","exit_code":-1,"signal":-9}"#, None),
            (r#"{"type":"exit","exit_code":3,"signal":9}"#, None),
        ] {
            let (ours, mut theirs) = duplex(64 << 10);
            theirs.write_all(format!("{frame}\n").as_bytes()).await.unwrap();
            let (events, mut heard) = mpsc::channel(QUEUE);
            listen(FrameReader::new(ours), &events).await.unwrap();
            if let Some(signal) = told {
                assert_eq!(heard.recv().await.unwrap().unwrap(), ExecEvent::Killed(signal), "{frame}");
            }
            assert!(matches!(heard.recv().await, Some(Ok(ExecEvent::Exit(_)))), "{frame}");
        }
    }

    #[tokio::test]
    async fn unknown_frames_fill_no_log() {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        let (ours, mut theirs) = duplex(64 << 10);
        let word = "x".repeat(10_000);
        let frames = format!("{{\"type\":\"{word}\"}}\n").repeat(50) + "{\"type\":\"exit\"}\n";
        let (events, mut heard) = mpsc::channel(QUEUE);
        let listening = listen(FrameReader::new(ours), &events).with_subscriber(subscriber);
        let (done, sent) = tokio::join!(listening, theirs.write_all(frames.as_bytes()));
        done.unwrap();
        sent.unwrap();
        assert!(matches!(heard.recv().await, Some(Ok(ExecEvent::Exit(0)))), "they are passed over");
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        assert_eq!(log.lines().count(), 1);
        assert!(log.contains("unknown type") && log.len() < 600, "{log}");
    }
}
