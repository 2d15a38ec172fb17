//! The agent's side of a session, with programs of this machine and a machine that cannot be changed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use cocoon_guest::{
    agent::session::{Machine, serve},
    protocol::{Frame, FrameReader, FrameWriter, Identity, Kind},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split},
    sync::Notify,
    time::{Instant, sleep, timeout},
};

/// Ends a test that hangs; nothing waits for it otherwise.
const HANGS: Duration = Duration::from_secs(120);

/// Notes what it was asked, and refuses a host name of "bad".
#[derive(Default)]
struct Noted(Mutex<Vec<String>>);

#[async_trait]
impl Machine for Noted {
    async fn reseed(&self, entropy: &[u8], regen_machine_id: bool) -> Result<(), String> {
        self.0.lock().unwrap().push(format!("reseed {} {regen_machine_id}", entropy.len()));
        Ok(())
    }

    async fn identity(&self, identity: &Identity) -> Result<(), String> {
        self.0.lock().unwrap().push(format!("identity {}", identity.hostname));
        if identity.hostname == "bad" { Err("hostname is bad".into()) } else { Ok(()) }
    }
}

struct Client {
    frames: FrameReader<ReadHalf<DuplexStream>>,
    writer: FrameWriter<WriteHalf<DuplexStream>>,
    machine: Arc<Noted>,
    gone: Arc<Notify>,
}

fn session() -> Client {
    let (ours, theirs) = duplex(64 << 10);
    let (machine, gone) = (Arc::new(Noted::default()), Arc::new(Notify::new()));
    let (its_machine, its_gone) = (Arc::clone(&machine), Arc::clone(&gone));
    tokio::spawn(async move { serve(theirs, &*its_machine, its_gone.notified()).await });
    let (reader, writer) = split(ours);
    Client { frames: FrameReader::new(reader), writer: FrameWriter::new(writer), machine, gone }
}

fn sh(script: &str) -> Frame {
    Frame { kind: Kind::Exec, argv: ["sh", "-c", script].map(Into::into).to_vec(), ..Frame::default() }
}

impl Client {
    async fn send(&mut self, frame: Frame) {
        self.writer.send(&frame).await.unwrap();
    }

    async fn next(&mut self) -> Option<Frame> {
        timeout(HANGS, self.frames.next()).await.expect("the session is silent").unwrap()
    }

    /// Output and the terminal frame.
    async fn rest(&mut self) -> (Vec<u8>, Frame) {
        let mut output = Vec::new();
        while let Some(frame) = self.next().await {
            match frame.kind {
                Kind::Started => {}
                Kind::Stdout | Kind::Stderr => output.extend(frame.data),
                _ => return (output, frame),
            }
        }
        panic!("no terminal frame; output was {:?}", String::from_utf8_lossy(&output));
    }
}

fn alive(marker: &str) -> bool {
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        std::fs::read(entry.path().join("cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(marker) && !line.is_empty())
    })
}

/// Waits until a command with this in its line runs, or until none does.
async fn becomes(wanted: bool, marker: &str) {
    let waiting = async {
        while alive(marker) != wanted {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(HANGS, waiting).await.unwrap_or_else(|_| panic!("{marker} runs: {}", !wanted));
}

async fn dies(marker: &str) {
    becomes(false, marker).await;
}

/// Ends the commands with this in their line.
fn end(marker: &str) {
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else { continue };
        if String::from_utf8_lossy(&line).contains(marker) {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            // Gone already is as good.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// A sleep that no other test sleeps, so that it can be found.
fn long_sleep(number: u32) -> String {
    format!("sleep 86{:05}.{number}", std::process::id() % 100_000)
}

#[tokio::test]
async fn a_command_gets_its_input_and_its_exit_code_comes_back() {
    let mut client = session();
    client.send(sh("cat; exit 7")).await;
    client.send(Frame::data(Kind::Stdin, b"hello".to_vec())).await;
    client.send(Frame::new(Kind::StdinClose)).await;
    assert_eq!(client.rest().await, (b"hello".to_vec(), Frame::exit(7)));
    assert_eq!(client.next().await, None);
}

#[tokio::test]
async fn death_by_a_signal_is_code_minus_one_with_the_signal_beside_it() {
    for signal in [9, 15, 11] {
        let mut client = session();
        client.send(sh(&format!("kill -{signal} $$"))).await;
        let last = client.rest().await.1;
        assert_eq!((last.exit_code, last.signal), (-1, signal.into()));
        assert_eq!(last, Frame::killed(signal));
    }
}

#[tokio::test]
async fn a_wrong_first_frame_is_answered_with_the_expected_types() {
    let mut client = session();
    client.send(Frame::new(Kind::from("resize"))).await;
    let error = client.rest().await.1;
    assert_eq!(error.kind, Kind::Error);
    assert!(
        ["exec", "reseed", "identity"].iter().all(|kind| error.message.contains(kind)),
        "{}",
        error.message
    );
}

#[tokio::test]
async fn a_client_that_goes_takes_the_whole_process_group_with_it() {
    let (mut client, pause) = (session(), long_sleep(1));
    client.send(sh(&format!("{pause} & {pause}"))).await;
    assert_eq!(client.next().await.map(|frame| frame.kind), Some(Kind::Started));
    becomes(true, &pause.replace(' ', "\0")).await;
    client.gone.notify_one();
    dies(&pause.replace(' ', "\0")).await;
}

#[tokio::test]
async fn a_malformed_frame_is_an_error_and_kills_the_command() {
    let (mut client, pause) = (session(), long_sleep(2));
    client.send(sh(&pause)).await;
    assert_eq!(client.next().await.map(|frame| frame.kind), Some(Kind::Started));
    client.send(Frame::new(Kind::StdinClose)).await;
    let Client { frames, writer, .. } = client;
    let mut raw = writer.into_inner();
    raw.write_all(b"garbage\n").await.unwrap();
    let mut frames = frames;
    let error = timeout(HANGS, frames.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(error.kind, Kind::Error);
    dies(&pause.replace(' ', "\0")).await;
}

#[tokio::test]
async fn the_end_of_the_stream_ends_standard_input() {
    let (ours, theirs) = duplex(64 << 10);
    tokio::spawn(async move { serve(theirs, &Noted::default(), std::future::pending()).await });
    let (mut reader, mut writer) = split(ours);
    writer.write_all(br#"{"type":"exec","argv":["cat"]}"#).await.unwrap();
    writer.shutdown().await.unwrap();
    let mut said = String::new();
    reader.read_to_string(&mut said).await.unwrap();
    assert!(said.ends_with("{\"type\":\"exit\"}\n"), "{said}");
}

#[tokio::test]
async fn pipes_left_to_others_are_waited_for_two_seconds_and_no_more() {
    let (mut client, begun, pause) = (session(), Instant::now(), long_sleep(3));
    client.send(sh(&format!("echo $$; {pause} & exit 0"))).await;
    assert_eq!(client.next().await.map(|frame| frame.kind), Some(Kind::Started));
    let said = client.next().await.unwrap().data;
    let shell = String::from_utf8(said).unwrap();
    // Only the session takes an ended shell away, and in the same step it looks at the clock.
    let ended = async {
        while std::path::Path::new("/proc").join(shell.trim()).exists() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(HANGS, ended).await.expect("the shell does not end");
    // From here on time passes only by what is waited for.
    tokio::time::pause();
    let waited = Instant::now();
    assert_eq!(client.rest().await, (Vec::new(), Frame::exit(0)));
    assert!(begun.elapsed() >= Duration::from_millis(1800), "{:?}", begun.elapsed());
    assert!(waited.elapsed() <= Duration::from_millis(2200), "{:?}", waited.elapsed());
    let pause = pause.replace(' ', "\0");
    assert!(alive(&pause), "it was not waited for to its end");
    end(&pause);
}

#[tokio::test]
async fn a_slow_client_loses_no_output_of_a_command_that_ended_long_ago() {
    let mut client = session();
    client.send(sh("head -c 3000000 /dev/zero")).await;
    sleep(Duration::from_millis(2500)).await;
    let (output, end) = client.rest().await;
    assert_eq!((output.len(), end), (3_000_000, Frame::exit(0)));
}

#[tokio::test]
async fn a_command_that_closes_its_output_is_still_waited_for() {
    let mut client = session();
    client.send(sh("exec >&- 2>&-; sleep 0.3; exit 5")).await;
    assert_eq!(client.rest().await.1, Frame::exit(5));
}

#[tokio::test]
async fn reseed_and_identity_reach_the_machine_and_are_answered() {
    let mut client = session();
    client
        .send(Frame { kind: Kind::Reseed, data: vec![1; 600], regen_machine_id: true, ..Frame::default() })
        .await;
    assert_eq!(client.rest().await.1, Frame::exit(0));
    assert_eq!(*client.machine.0.lock().unwrap(), ["reseed 512 true"]);

    for (hostname, want) in [("good", Frame::exit(0)), ("bad", Frame::error("identity: hostname is bad"))] {
        let mut client = session();
        let identity = Identity { hostname: hostname.into(), ..Identity::default() };
        client.send(Frame { kind: Kind::Identity, identity, ..Frame::default() }).await;
        assert_eq!(client.rest().await.1, want);
    }
}
