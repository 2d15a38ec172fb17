//! Host and agent on one byte pipe that has no beginning and no end, as a virtio-serial port is.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests are tests")]

use std::{collections::BTreeMap, os::unix::net::UnixStream as StdStream, sync::Arc, time::Duration};

use async_trait::async_trait;
use cocoon_guest::{
    agent::{
        link::{Link, serve},
        session::Machine,
    },
    host::{Channel, Exec, ExecEvent, ExecSession, GuestError},
    preamble::{MAGIC, Preamble, Role},
    protocol::{Frame, FrameReader, FrameWriter, Identity, Kind, encode},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::compat::{FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

/// Ends a test that hangs; nothing waits for it otherwise.
const LIMIT: Duration = Duration::from_secs(120);

struct Still;

#[async_trait]
impl Machine for Still {
    async fn reseed(&self, _: &[u8], _: bool) -> Result<(), String> {
        Ok(())
    }

    async fn identity(&self, identity: &Identity) -> Result<(), String> {
        if identity.hostname.is_empty() { Ok(()) } else { Err("not this machine".into()) }
    }
}

/// A port with an agent at its far end; the near end can be taken by one host after the other.
struct Port(StdStream);

impl Port {
    fn new() -> Self {
        let (port, far) = Self::without_agent();
        let mut link = Link::new(stream(far));
        let machine: Arc<dyn Machine> = Arc::new(Still);
        tokio::spawn(async move {
            while link.greeted().await.is_ok_and(|greeted| greeted) {
                serve(&mut link, &machine).await;
            }
        });
        port
    }

    fn without_agent() -> (Self, StdStream) {
        let (near, far) = StdStream::pair().unwrap();
        (Self(near), far)
    }

    /// The near end for one host; closing it does not close the port.
    fn host(&self) -> UnixStream {
        stream(self.0.try_clone().unwrap())
    }
}

fn stream(std: StdStream) -> UnixStream {
    std.set_nonblocking(true).unwrap();
    UnixStream::from_std(std).unwrap()
}

fn sh(script: &str) -> Exec {
    Exec { argv: ["sh", "-c", script].map(Into::into).to_vec(), env: BTreeMap::new() }
}

/// Whether a process runs this command: a program and its only argument.
fn alive(command: &str) -> bool {
    let line = format!("{}\0", command.replace(' ', "\0"));
    let found = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline"));
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .any(|entry| found(entry).is_ok_and(|l| l == line.as_bytes()))
}

async fn becomes(wanted: bool, command: &str) {
    let waiting = async {
        while alive(command) != wanted {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(LIMIT, waiting).await.unwrap_or_else(|_| panic!("`{command}` runs: {}", !wanted));
}

#[tokio::test]
async fn a_command_runs_and_its_output_and_code_come_back() {
    let channel = Channel::open(Port::new().host(), LIMIT).await.unwrap();
    let exec = Exec { env: BTreeMap::from([("X".into(), "y".into())]), ..sh("echo $X; echo e >&2; exit 3") };
    let output = channel.output(exec, LIMIT).await.unwrap();
    assert_eq!((output.code, &*output.stdout, &*output.stderr), (3, &b"y\n"[..], &b"e\n"[..]));
}

#[tokio::test]
async fn sessions_run_side_by_side_and_large_data_passes_whole() {
    let channel = Arc::new(Channel::open(Port::new().host(), LIMIT).await.unwrap());
    let mut all = JoinSet::new();
    for index in 0..12_u8 {
        let channel = Arc::clone(&channel);
        all.spawn(async move {
            let ExecSession { stdin, mut events } =
                channel.exec(sh(&format!("cat; exit {index}"))).await.unwrap();
            let data = vec![index; 300_000];
            let sent = data.clone();
            tokio::spawn(async move { stdin.send(sent).await });
            let mut got = Vec::new();
            loop {
                match events.recv().await.unwrap().unwrap() {
                    ExecEvent::Stdout(bytes) => got.extend(bytes),
                    ExecEvent::Exit(code) => return assert_eq!((code, got == data), (index.into(), true)),
                    _ => {}
                }
            }
        });
    }
    while let Some(done) = all.join_next().await {
        done.unwrap();
    }
}

#[tokio::test]
async fn what_older_connections_left_in_the_port_is_skipped_on_both_sides() {
    let (port, far) = Port::without_agent();
    let stale = Preamble { role: Role::Host, epoch: [9; 16] }.encode();
    let mut near = port.host();
    near.write_all(b"half a frame {\"type\":").await.unwrap();
    near.write_all(&stale).await.unwrap();
    near.write_all(&[0, 0, 0, 1, 0, 0]).await.unwrap();
    near.write_all(&MAGIC).await.unwrap();
    let mut far = stream(far);
    far.write_all(b"old output").await.unwrap();
    far.write_all(&Preamble { role: Role::Agent, epoch: [9; 16] }.encode()).await.unwrap();
    far.write_all(&MAGIC[..5]).await.unwrap();
    let mut link = Link::new(far);
    tokio::spawn(async move {
        let machine: Arc<dyn Machine> = Arc::new(Still);
        while link.greeted().await.is_ok_and(|greeted| greeted) {
            serve(&mut link, &machine).await;
        }
    });
    let channel = Channel::open(port.host(), LIMIT).await.unwrap();
    assert_eq!(channel.output(sh("exit 4"), LIMIT).await.unwrap().code, 4);
}

#[tokio::test]
async fn a_new_host_ends_the_sessions_of_the_old_one_and_works_at_once() {
    let port = Port::new();
    let marker = format!("sleep 87{:05}", std::process::id() % 100_000);
    for _ in 0..3 {
        let old = Channel::open(port.host(), LIMIT).await.unwrap();
        let mut session = old.exec(sh(&format!("{marker} & {marker}"))).await.unwrap();
        assert!(matches!(session.events.recv().await, Some(Ok(ExecEvent::Started(_)))));
        becomes(true, &marker).await;
        // The old host does not even hang up.
        let new = Channel::open(port.host(), LIMIT).await.unwrap();
        drop(old);
        assert!(matches!(timeout(LIMIT, session.events.recv()).await.unwrap(), Some(Err(_))));
        assert_eq!(new.output(sh("exit 4"), LIMIT).await.unwrap().code, 4);
        becomes(false, &marker).await;
    }
}

#[tokio::test]
async fn an_agent_that_starts_late_is_greeted_again() {
    let (port, far) = Port::without_agent();
    let opening = tokio::spawn(Channel::open(port.host(), LIMIT));
    sleep(Duration::from_millis(500)).await;
    let mut far = stream(far);
    // What came before the agent's start is lost.
    let mut lost = [0; 32];
    far.read_exact(&mut lost).await.unwrap();
    let mut link = Link::new(far);
    let agent = tokio::spawn(async move {
        assert!(link.greeted().await.unwrap());
        let machine: Arc<dyn Machine> = Arc::new(Still);
        serve(&mut link, &machine).await;
    });
    let channel = opening.await.unwrap().unwrap();
    assert_eq!(channel.output(sh("exit 0"), LIMIT).await.unwrap().code, 0);
    drop(channel);
    drop(port);
    timeout(LIMIT, agent).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_silent_agent_is_an_error_in_time_even_if_it_babbles() {
    let limit = Duration::from_millis(300);
    let (port, far) = Port::without_agent();
    assert!(matches!(Channel::open(port.host(), limit).await, Err(GuestError::Silent(_))));
    tokio::spawn(async move {
        let mut far = stream(far);
        while far.write_all(&[MAGIC[0]; 4096]).await.is_ok() {}
    });
    assert!(matches!(Channel::open(port.host(), limit).await, Err(GuestError::Silent(_))));
}

/// A channel and a session whose agent was lost while its command ran.
async fn lost_at_work(port: &Port, far: StdStream) -> (Channel, ExecSession) {
    let mut link = Link::new(stream(far));
    let agent = tokio::spawn(async move {
        let machine: Arc<dyn Machine> = Arc::new(Still);
        link.greeted().await.unwrap();
        serve(&mut link, &machine).await;
    });
    let channel = Channel::open(port.host(), LIMIT).await.unwrap();
    let mut session = channel.exec(sh("sleep 600")).await.unwrap();
    assert!(matches!(session.events.recv().await, Some(Ok(ExecEvent::Started(_)))));
    agent.abort();
    (channel, session)
}

#[tokio::test]
async fn a_lost_connection_is_an_error_and_never_an_exit_code() {
    let (port, far) = Port::without_agent();
    let (channel, mut session) = lost_at_work(&port, far).await;
    assert!(matches!(timeout(LIMIT, session.events.recv()).await.unwrap(), Some(Err(_))));
    assert!(session.events.recv().await.is_none());
    timeout(LIMIT, channel.closed()).await.unwrap();
    assert!(matches!(channel.exec(sh("true")).await, Err(GuestError::Closed)));
}

#[tokio::test]
async fn an_agent_that_starts_anew_ends_the_sessions_of_its_predecessor() {
    let (port, far) = Port::without_agent();
    let successor = far.try_clone().unwrap();
    let (channel, mut session) = lost_at_work(&port, far).await;
    let mut successor = stream(successor);
    successor.write_all(&Preamble::AGENT_STARTS.encode()).await.unwrap();
    assert!(matches!(timeout(LIMIT, session.events.recv()).await.unwrap(), Some(Err(GuestError::Closed))));
    timeout(LIMIT, channel.closed()).await.unwrap();
}

#[tokio::test]
async fn dropping_a_session_kills_its_command_and_leaves_the_others() {
    let channel = Channel::open(Port::new().host(), LIMIT).await.unwrap();
    let marker = format!("sleep 88{:05}", std::process::id() % 100_000);
    let mut doomed = channel.exec(sh(&marker)).await.unwrap();
    assert!(matches!(doomed.events.recv().await, Some(Ok(ExecEvent::Started(_)))));
    let other = format!("sleep 89{:05}", std::process::id() % 100_000);
    let _other = channel.exec(sh(&other)).await.unwrap();
    becomes(true, &marker).await;
    becomes(true, &other).await;
    drop(doomed);
    becomes(false, &marker).await;
    assert_eq!(channel.output(sh("exit 4"), LIMIT).await.unwrap().code, 4);
    assert!(alive(&other));
}

/// One frame of `yamux`, as a host sends it.
fn yamux_frame(kind: u8, stream: u32, length: usize, body: &[u8]) -> Vec<u8> {
    // The first frame of a stream, and a ping, carry SYN; on later frames of a stream it would be an error.
    let flags = u16::from(kind == PING || body.starts_with(b"{\"type\":\"exec\""));
    let length = u32::try_from(length).unwrap().to_be_bytes();
    [&[0, kind], &flags.to_be_bytes()[..], &stream.to_be_bytes(), &length, body].concat()
}

const PING: u8 = 2;

/// Both ends of a connection ping every ten seconds, also while both have more to say than the port holds.
#[tokio::test]
async fn an_agent_whose_output_nobody_takes_still_reads_and_answers_pings() {
    let port = Port::new();
    let mut near = port.host();
    near.write_all(&Preamble { role: Role::Host, epoch: [3; 16] }.encode()).await.unwrap();
    near.read_exact(&mut [0; 32]).await.unwrap();
    // Together they say more than the port holds.
    let data = |stream, frame: Frame| {
        let line = encode(&frame).unwrap();
        yamux_frame(0, stream, line.len(), &line)
    };
    let argv = ["sh", "-c", "cat /dev/zero & exec cat > /dev/null"].map(Into::into).to_vec();
    let exec = Frame { kind: Kind::Exec, argv, ..Frame::default() };
    let sessions = [1, 3, 5, 7];
    let sending = async {
        for stream in sessions {
            near.write_all(&data(stream, exec.clone())).await.unwrap();
        }
        // More than the port holds, and less than a stream may send without being asked.
        for number in 0..64 {
            for stream in sessions {
                near.write_all(&data(stream, Frame::data(Kind::Stdin, vec![b'x'; 2048]))).await.unwrap();
            }
            near.write_all(&yamux_frame(PING, 0, number, b"")).await.unwrap();
        }
    };
    timeout(LIMIT, sending).await.expect("it reads no more");
    let answered = async {
        let mut head = [0; 12];
        loop {
            near.read_exact(&mut head).await.unwrap();
            let length = u32::from_be_bytes(head[8..].try_into().unwrap());
            match head[1] {
                0 => drop(near.read_exact(&mut vec![0; length as usize]).await.unwrap()),
                PING if length == 63 => return,
                _ => {}
            }
        }
    };
    timeout(LIMIT, answered).await.expect("it answers no more");
}

#[tokio::test]
async fn a_refused_identity_is_refused_and_not_tried_in_another_way() {
    let channel = Channel::open(Port::new().host(), LIMIT).await.unwrap();
    channel.identity(Identity::default(), LIMIT).await.unwrap();
    let identity = Identity { hostname: "other".into(), ..Identity::default() };
    let refused = channel.identity(identity, LIMIT).await;
    assert!(
        matches!(&refused, Err(GuestError::Refused(why)) if why == "identity: not this machine"),
        "{refused:?}"
    );
}

/// An agent of the time before `identity`: says so, takes a reseed, and tells what it was made to run.
async fn old_agent(far: StdStream) {
    let mut link = Link::new(stream(far));
    link.greeted().await.unwrap();
    let mut connection = yamux::Connection::new(link.compat(), yamux::Config::default(), yamux::Mode::Server);
    while let Some(Ok(inbound)) = std::future::poll_fn(|cx| connection.poll_next_inbound(cx)).await {
        tokio::spawn(async move {
            let (reader, writer) = tokio::io::split(inbound.compat());
            let (mut frames, mut writer) = (FrameReader::new(reader), FrameWriter::new(writer));
            let first = frames.next().await.unwrap().unwrap();
            let last = match first.kind {
                Kind::Identity => Frame::error("unexpected first frame, want exec or reseed"),
                Kind::Exec => {
                    let said = format!("{} {:?}", first.argv[0], first.env);
                    writer.send(&Frame::data(Kind::Stderr, said.into_bytes())).await.unwrap();
                    Frame::exit(9)
                }
                _ => Frame::exit(0),
            };
            writer.send(&last).await.unwrap();
            writer.close().await.unwrap();
        });
    }
}

#[tokio::test]
async fn an_agent_that_knows_no_identity_gets_the_steps_by_exec() {
    let (port, far) = Port::without_agent();
    tokio::spawn(old_agent(far));
    let channel = Channel::open(port.host(), LIMIT).await.unwrap();
    let identity = Identity {
        macs: vec!["52:54:00:00:00:01".into()],
        hostname: "web-0".into(),
        unix_time_ns: 1_700_000_000_500_000_000,
        renew_dhcp: true,
        ..Identity::default()
    };
    let refused = channel.identity(identity, LIMIT).await.unwrap_err().to_string();
    for part in [
        "ended with 9",
        "sh ",
        r#""CLOCK": "1700000000""#,
        r#""MACS": "52:54:00:00:00:01""#,
        r#""NAME": "web-0""#,
    ] {
        assert!(refused.contains(part), "{part} in {refused}");
    }
}
