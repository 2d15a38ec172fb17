//! The port from outside: certificates, routes, and an exec with a scripted guest.

use std::{
    net::SocketAddr,
    path::PathBuf,
    pin::pin,
    sync::Arc,
    task::{Context as Waiting, Waker},
    time::Duration,
};

use async_trait::async_trait;
use cocoon_guest::host::{Exec, ExecEvent, ExecSession};
use cocoon_kit::tls::{Authority, client_config, server_config};
use futures::{SinkExt as _, StreamExt as _};
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{net::TcpStream, sync::mpsc};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest as _};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    config::NodeConfig,
    owner::{directory::Seat, stage},
    ports::{Guest, GuestSession, PortResult, fake::Fake},
};

/// Ends a test that hangs; nothing waits for it otherwise.
const HANGS: Duration = Duration::from_secs(120);

/// The clock that deadlines are counted by stands still; only the test moves it. Real connections need none,
/// so how fast the machine is has no say.
struct StillClock(#[expect(dead_code, reason = "held for its end")] std::sync::mpsc::Sender<()>);

impl StillClock {
    fn new() -> Self {
        let (held, end) = std::sync::mpsc::channel::<()>();
        // As long as something blocks, the runtime leaves a paused clock alone.
        tokio::task::spawn_blocking(move || end.recv_timeout(HANGS));
        tokio::time::pause();
        Self(held)
    }
}

/// A guest that echoes stdin, writes to stderr, and exits with the number it was given; a number with a `+` is
/// the signal that kills it.
#[derive(Debug)]
struct Script {
    console: PathBuf,
}

#[async_trait]
impl Guest for Script {
    async fn exec(&self, _vm: &str, exec: Exec) -> PortResult<GuestSession> {
        let (stdin, mut typed) = mpsc::channel::<Vec<u8>>(4);
        let (events, read) = mpsc::channel(4);
        let last = exec.argv.last().cloned().unwrap_or_default();
        let code: i32 = last.parse().unwrap_or(0);
        tokio::spawn(async move {
            let _ = events.send(Ok(ExecEvent::Started(7))).await;
            while let Some(data) = typed.recv().await {
                let _ = events.send(Ok(ExecEvent::Stdout(data))).await;
            }
            let _ = events.send(Ok(ExecEvent::Stderr(b"bye".to_vec()))).await;
            let killed = last.starts_with('+');
            if killed {
                let _ = events.send(Ok(ExecEvent::Killed(code))).await;
            }
            let _ = events.send(Ok(ExecEvent::Exit(if killed { -1 } else { code }))).await;
        });
        Ok(GuestSession { session: ExecSession { stdin, events: read }, keep: Arc::new(()) })
    }

    async fn console(&self, _vm: &str) -> PortResult<PathBuf> {
        Ok(self.console.clone())
    }
}

struct Port {
    address: SocketAddr,
    authority: Authority,
    context: Arc<Context>,
    folder: tempfile::TempDir,
}

impl Port {
    async fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::load_or_create(folder.path(), "ca").unwrap();
        let identity = authority.issue_server("node", &["localhost"], &[[127, 0, 0, 1].into()]).unwrap();
        let console = folder.path().join("console.log");
        std::fs::write(&console, "one\ntwo\nthree\n").unwrap();
        let mut config = NodeConfig::new("node");
        config.kubelet_tls = Some(server_config(&identity, authority.certificate()).unwrap());
        let mut ports = Fake::default().ports(true);
        ports.guest = Arc::new(Script { console });
        let api = Arc::new(stage::Api::default());
        let world = Arc::new(cocoon_kit::world::RealWorld);
        let context = Context::new(config, ports, world, api, CancellationToken::new());
        let table = Arc::new(PodTable::default());
        table.apply(waiting(stage::pod("refused", "u3", &[]), "VMNameMismatch", "use another"));
        for (name, uid, vm_id) in [("demo-0", "u1", "VM1"), ("asleep", "u2", "")] {
            let mut pod = stage::pod(name, uid, &[]);
            if vm_id.is_empty() {
                let asked = stage::pod(name, uid, &[("vm.cocoonstack.io/hibernate", "true")]);
                pod = waiting(asked, "Hibernated", name);
            }
            let seat = Seat {
                uid: uid.into(),
                vm_name: name.into(),
                vm_id: vm_id.into(),
                running: !vm_id.is_empty(),
            };
            context.directory.sit(&crate::wish::key(&pod), seat);
            table.apply(pod);
        }
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::new(Arc::clone(&context), table);
        tokio::spawn(server.serve(listener, context.shutdown.clone()));
        Self { address, authority, context, folder }
    }

    fn client(&self, user: &str, groups: &[&str]) -> Arc<ClientConfig> {
        let identity = self.authority.issue_client(user, groups).unwrap();
        client_config(&identity, self.authority.certificate()).unwrap()
    }

    fn nobody(&self) -> Arc<ClientConfig> {
        use rustls::pki_types::{CertificateDer, pem::PemObject as _};
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.certificate().as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        Arc::new(config.with_root_certificates(roots).with_no_client_auth())
    }

    async fn connect(&self, config: Arc<ClientConfig>) -> TlsStream<TcpStream> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        TlsConnector::from(config).connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap()
    }

    async fn get(&self, config: Arc<ClientConfig>, request: Request<Empty<Bytes>>) -> (StatusCode, String) {
        let stream = TokioIo::new(self.connect(config).await);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let response = sender.send_request(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn path(&self, path: &str) -> (StatusCode, String) {
        self.get(self.client("root", &["system:masters"]), get(path)).await
    }
}

/// The pod with a container that waits for this reason.
fn waiting(mut pod: Pod, reason: &str, message: &str) -> Pod {
    let status = serde_json::json!({"containerStatuses": [{"name": "agent", "image": "", "imageID": "",
        "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": reason, "message": message}}}]});
    pod.status = Some(serde_json::from_value(status).unwrap());
    pod
}

fn get(path: &str) -> Request<Empty<Bytes>> {
    Request::get(path).header("host", "localhost").body(Empty::new()).unwrap()
}

#[tokio::test]
async fn every_path_is_closed_to_callers_without_an_allowed_certificate() {
    let port = Port::open().await;
    for path in ["/", "/healthz", "/pods", "/exec/default/demo-0/agent?command=sh", "/nowhere", "/%2e%2e"] {
        let (status, _) = port.get(port.nobody(), get(path)).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{path}");
        let (status, text) = port.get(port.client("eve", &["system:authenticated"]), get(path)).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}");
        assert!(text.contains("eve"));
    }
}

#[tokio::test]
async fn callers_without_a_certificate_close_the_port_to_nobody() {
    let _clock = StillClock::new();
    let port = Port::open().await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(port.connect(port.nobody()).await);
    }
    let mut bare = Vec::new();
    for _ in 0..520 {
        bare.push(TcpStream::connect(port.address).await.unwrap());
    }
    assert_eq!(port.path("/healthz").await.0, StatusCode::OK);
    let mut rest = Vec::new();
    use tokio::io::AsyncReadExt as _;
    let oldest = tokio::time::timeout(HANGS, silent[0].read_to_end(&mut rest));
    assert!(oldest.await.is_ok(), "the oldest made room");
}

#[tokio::test]
async fn a_caller_who_may_do_nothing_is_not_kept() {
    let _clock = StillClock::new();
    let port = Port::open().await;
    let (mut nobody, mut eve, mut root) = (
        port.connect(port.nobody()).await,
        port.connect(port.client("eve", &[])).await,
        port.connect(port.client("root", &["system:masters"])).await,
    );
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    for stream in [&mut nobody, &mut eve, &mut root] {
        // Follows a log that never ends, or is refused; the connection itself stays open.
        let path = "/containerLogs/default/demo-0/agent?follow=true";
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await.unwrap();
        stream.read_u8().await.unwrap();
    }
    tokio::time::advance(Duration::from_secs(30)).await;
    let mut rest = Vec::new();
    assert!(tokio::time::timeout(HANGS, nobody.read_to_end(&mut rest)).await.is_ok());
    assert!(tokio::time::timeout(HANGS, eve.read_to_end(&mut rest)).await.is_ok());
    let mut waiting = Waiting::from_waker(Waker::noop());
    let stays = pin!(root.read_to_end(&mut rest)).as_mut().poll(&mut waiting).is_pending();
    assert!(stays, "a known caller stays");
}

#[tokio::test]
async fn routes_answer_or_say_that_they_do_not_exist() {
    let port = Port::open().await;
    for (path, status, part) in [
        ("/healthz", 200, "ok"),
        ("/pods", 200, "\"demo-0\""),
        ("/containerLogs/default/demo-0/agent?tailLines=2", 200, "two\nthree\n"),
        ("/containerLogs/default/demo-0/agent?tailLines=x", 400, "tailLines"),
        ("/containerLogs/default/demo-0/other", 404, "one container"),
        (
            "/containerLogs/default/asleep/agent",
            400,
            "is waiting to start: Hibernated: asleep: kubectl annotate pod",
        ),
        ("/containerLogs/default/refused/agent", 400, "is waiting to start: VMNameMismatch: use another"),
        ("/containerLogs/default/nobody/agent", 404, "no VM on this node"),
        ("/exec/default/demo-0/agent?command=sh&output=1&tty=1", 400, "without -t"),
        ("/exec/default/demo-0/agent?command=sh&output=1", 400, "WebSocket"),
        (
            "/exec/default/asleep/agent?command=sh&output=1",
            400,
            "container not running: Hibernated: asleep: kubectl annotate pod",
        ),
        ("/attach/default/demo-0/agent", 501, "not served"),
        ("/stats/summary", 501, "not served"),
        ("/nowhere", 404, "not a path"),
    ] {
        let (found, text) = port.path(path).await;
        assert_eq!(found.as_u16(), status, "{path}: {text}");
        assert!(text.contains(part), "{path}: {text}");
    }
    let (_, running) = port.path("/runningpods/").await;
    assert!(running.contains("demo-0") && !running.contains("asleep"));
}

#[tokio::test]
async fn logs_are_text_also_where_a_sequence_is_cut_by_the_end_of_a_read() {
    let port = Port::open().await;
    let console = port.folder.path().join("console.log");
    std::fs::write(&console, "\x1bc\x1b[?7l\x1b[2JSeaBIOS\r\nready\r\n\x1b[1").unwrap();
    let (_, text) = port.path("/containerLogs/default/demo-0/agent").await;
    assert_eq!(text, "SeaBIOS\nready\n");

    let stream = TokioIo::new(port.connect(port.client("root", &["system:masters"])).await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let path = "/containerLogs/default/demo-0/agent?follow=true&limitBytes=20&tailLines=1";
    let mut body = sender.send_request(get(path)).await.unwrap().into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, "ready\n");
    let mut log = std::fs::File::options().append(true).open(&console).unwrap();
    std::io::Write::write_all(&mut log, b";31mred\x1b[0m\r\nand more than the limit").unwrap();
    let rest = body.collect().await.unwrap().to_bytes();
    assert_eq!(rest, "red\nand more t", "20 bytes in all");
}

#[tokio::test]
async fn a_spdy_client_is_told_what_to_use() {
    let port = Port::open().await;
    let mut request = get("/exec/default/demo-0/agent?command=sh&output=1");
    request.headers_mut().insert("upgrade", "SPDY/3.1".parse().unwrap());
    request.headers_mut().insert("connection", "Upgrade".parse().unwrap());
    let (status, text) = port.get(port.client("root", &["system:masters"]), request).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(text.contains("SPDY is not served"));
}

async fn exec(port: &Port, protocol: &str, code: &str) -> Vec<Vec<u8>> {
    let uri = format!(
        "wss://localhost/exec/default/demo-0/agent?command=sh&command={code}&input=1&output=1&error=1"
    );
    let mut request = uri.into_client_request().unwrap();
    request.headers_mut().insert("sec-websocket-protocol", protocol.parse().unwrap());
    let stream = port.connect(port.client("root", &["system:masters"])).await;
    let (mut socket, response) = tokio_tungstenite::client_async(request, stream).await.unwrap();
    assert_eq!(response.headers()["sec-websocket-protocol"], protocol);
    socket.send(Message::Binary(b"\0hello".to_vec().into())).await.unwrap();
    socket.send(Message::Binary(vec![255, 0].into())).await.unwrap();
    let mut frames = Vec::new();
    while let Some(Ok(message)) = socket.next().await {
        if let Message::Binary(frame) = message {
            frames.push(frame.to_vec());
        }
    }
    frames
}

#[tokio::test]
async fn an_exec_carries_stdin_separate_streams_and_the_exact_exit_code() {
    let port = Port::open().await;
    for code in [0, 7, 255] {
        let frames = exec(&port, "v5.channel.k8s.io", &code.to_string()).await;
        assert_eq!(frames[0], b"\x01hello");
        assert_eq!(frames[1], b"\x02bye");
        assert_eq!(frames[2], frames::status(&Ok(code)));
    }
    for (last, told) in [("%2B9", 137), ("%2B15", 143), ("-1", 255)] {
        let frames = exec(&port, "v5.channel.k8s.io", last).await;
        assert_eq!(frames.last(), Some(&frames::status(&Ok(told))), "{last}");
    }
    port.context.shutdown.cancel();
}
