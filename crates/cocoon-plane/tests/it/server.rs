//! Over TLS: who is let in, restarts, and streams to a node.

use std::{
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use cocoon_kit::tls::{self, Authority};
use cocoon_plane::plane::{Plane, PlaneConfig, User};
use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
};
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest as _};
use tokio_util::sync::CancellationToken;

use crate::support::{Client, HANGS, PODS, StillClock, TestWorld, admin, config_map, node, pod};

struct Site {
    authority: Authority,
    address: SocketAddr,
    client: Client,
    shutdown: CancellationToken,
    served: tokio::task::JoinHandle<std::io::Result<()>>,
}

async fn site() -> Site {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::load_or_create(folder.path(), "test").unwrap();
    let kubelet = authority.issue_client("plane", &["system:masters"]).unwrap();
    let config = PlaneConfig {
        journal: None,
        tokens: vec![("secret".into(), User { name: "bob".into(), groups: vec![] })],
        kubelet_client: Some(tls::client_config(&kubelet, authority.certificate()).unwrap()),
    };
    let plane = Plane::open(config, TestWorld::new()).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = authority.issue_server("plane", &["localhost"], &[[127, 0, 0, 1].into()]).unwrap();
    let config = tls::server_config(&server, authority.certificate()).unwrap();
    let (shutdown, serving) = (CancellationToken::new(), plane.clone());
    let token = shutdown.clone();
    let served = tokio::spawn(async move { serving.serve(listener, config, token).await });
    Site { authority, address, client: Client { plane, user: admin() }, shutdown, served }
}

impl Site {
    async fn connect(&self, identity: Option<(&str, &[&str])>) -> tokio_rustls::client::TlsStream<TcpStream> {
        let config = match identity {
            Some((name, groups)) => {
                let identity = self.authority.issue_client(name, groups).unwrap();
                tls::client_config(&identity, self.authority.certificate()).unwrap()
            }
            None => {
                let mut roots = rustls::RootCertStore::empty();
                let pem = self.authority.certificate().as_bytes();
                for certificate in rustls::pki_types::pem::PemObject::pem_slice_iter(pem) {
                    roots.add(certificate.unwrap()).unwrap();
                }
                let provider = Arc::new(rustls::crypto::ring::default_provider());
                let builder = rustls::ClientConfig::builder_with_provider(provider);
                Arc::new(
                    builder
                        .with_safe_default_protocol_versions()
                        .unwrap()
                        .with_root_certificates(roots)
                        .with_no_client_auth(),
                )
            }
        };
        let stream = TcpStream::connect(self.address).await.unwrap();
        tokio_rustls::TlsConnector::from(config)
            .connect("localhost".try_into().unwrap(), stream)
            .await
            .unwrap()
    }

    /// Status code and body of one plain HTTP/1.1 request.
    async fn ask(&self, identity: Option<(&str, &[&str])>, path: &str, headers: &str) -> (u16, Value) {
        let mut stream = self.connect(identity).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text).await;
        let text = String::from_utf8_lossy(&text).into_owned();
        let code = text.split(' ').nth(1).unwrap().parse().unwrap();
        let start = text.find('{').unwrap_or(text.len());
        let end = text.rfind('}').map_or(start, |end| end + 1);
        (code, serde_json::from_str(&text[start..end]).unwrap_or(Value::Null))
    }
}

#[tokio::test]
async fn without_an_identity_every_path_answers_401() {
    let site = site().await;
    for path in
        ["/", "/healthz", "/version", "/api/v1/secrets", "/nothing", "/api/v1/namespaces/default/pods/x/exec"]
    {
        let (code, body) = site.ask(None, path, "").await;
        assert_eq!((code, body["reason"].as_str()), (401, Some("Unauthorized")), "{path}");
    }
    assert_eq!(site.ask(None, "/version", "Authorization: Bearer wrong\r\n").await.0, 401);
    assert_eq!(site.ask(None, "/version", "Authorization: Bearer secret\r\n").await.0, 200);
    assert_eq!(site.ask(None, "/api/v1/secrets", "Authorization: Bearer secret\r\n").await.0, 403);
    assert_eq!(site.ask(Some(("eve", &["nobody"])), "/api/v1/secrets", "").await.0, 403);
    assert_eq!(site.ask(Some(("root", &["system:masters"])), "/api/v1/secrets", "").await.0, 200);
    let impersonate = "Impersonate-User: root\r\n";
    assert_eq!(site.ask(Some(("root", &["system:masters"])), "/api/v1/secrets", impersonate).await.0, 403);
}

const ROOT: Option<(&str, &[&str])> = Some(("root", &["system:masters"]));
const WATCH: &str = "GET /api/v1/pods?watch=true HTTP/1.1\r\nHost: x\r\n";

/// The server closes `stream`.
async fn ends(mut stream: tokio_rustls::client::TlsStream<TcpStream>) -> bool {
    let mut rest = Vec::new();
    tokio::time::timeout(HANGS, stream.read_to_end(&mut rest)).await.is_ok()
}

/// Asked after what would have closed it was seen to happen.
fn is_open(stream: &mut tokio_rustls::client::TlsStream<TcpStream>) -> bool {
    let (mut rest, mut waiting) = (Vec::new(), Context::from_waker(Waker::noop()));
    pin!(stream.read_to_end(&mut rest)).as_mut().poll(&mut waiting).is_pending()
}

#[tokio::test]
async fn a_connection_that_shows_no_identity_is_closed_whatever_it_says() {
    let _clock = StillClock::new();
    let site = site().await;
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let refused: &[u8] = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut streams = Vec::new();
    for said in [b"".as_slice(), b"PRI", preface, refused] {
        let mut stream = site.connect(None).await;
        stream.write_all(said).await.unwrap();
        streams.push((said, stream));
    }
    let mut silent = site.connect(ROOT).await;
    silent.write_all(b"PRI").await.unwrap();
    let mut token = site.connect(None).await;
    token.write_all(format!("{WATCH}Authorization: Bearer secret\r\n\r\n").as_bytes()).await.unwrap();
    let mut watch = site.connect(ROOT).await;
    watch.write_all(format!("{WATCH}\r\n").as_bytes()).await.unwrap();
    let mut head = [0; 15];
    watch.read_exact(&mut head).await.unwrap();
    token.read_exact(&mut head).await.unwrap();
    tokio::time::advance(Duration::from_secs(15)).await;
    for (said, stream) in streams {
        assert!(ends(stream).await, "{:?}", String::from_utf8_lossy(said));
    }
    assert!(is_open(&mut token), "who has shown a token may stay");
    tokio::time::advance(Duration::from_secs(120)).await;
    assert!(ends(silent).await, "a certificate alone holds no place");
    assert!(is_open(&mut watch), "who is known stays");
}

#[tokio::test]
async fn strangers_leave_room_for_those_who_have_an_identity() {
    let _clock = StillClock::new();
    let site = site().await;
    let mut strangers = Vec::new();
    for _ in 0..128 {
        strangers.push(site.connect(None).await);
    }
    assert_eq!(site.ask(ROOT, "/version", "").await.0, 200);
    // With all places taken, the oldest makes room for whoever may have a token.
    assert_eq!(site.ask(None, "/version", "Authorization: Bearer secret\r\n").await.0, 200);
    assert!(ends(strangers.remove(0)).await);
    assert_eq!(site.client.metric("cocoon_plane_connections_refused_total").await, 1);
}

#[tokio::test]
async fn connections_that_never_speak_lock_nobody_out() {
    let _clock = StillClock::new();
    let site = site().await;
    let mut silent = Vec::new();
    for _ in 0..600 {
        silent.push(TcpStream::connect(site.address).await.unwrap());
    }
    assert_eq!(site.ask(ROOT, "/version", "").await.0, 200);
    assert_eq!(site.ask(None, "/version", "Authorization: Bearer secret\r\n").await.0, 200);
    assert!(site.client.metric("cocoon_plane_connections_refused_total").await >= 88);
}

#[tokio::test]
async fn a_shutdown_ends_watches_and_the_server() {
    let site = site().await;
    let mut stream = site.connect(Some(("root", &["system:masters"]))).await;
    stream.write_all(b"GET /api/v1/pods?watch=true HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut buffer = [0; 64];
    assert!(stream.read(&mut buffer).await.unwrap() > 0);
    site.shutdown.cancel();
    tokio::time::timeout(HANGS, site.served).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_restart_keeps_objects_and_revision_and_ends_old_watches() {
    let folder = tempfile::tempdir().unwrap();
    let config = || PlaneConfig {
        journal: Some(folder.path().join("plane.db")),
        tokens: vec![],
        kubelet_client: None,
    };
    let open =
        || async { Client { plane: Plane::open(config(), TestWorld::new()).await.unwrap(), user: admin() } };
    let first = open().await;
    let maps = "/api/v1/namespaces/default/configmaps";
    let made = first.post(maps, &config_map("a")).await;
    first.post(maps, &config_map("b")).await;
    first.delete(&format!("{maps}/b"), &json!({})).await;
    let before = first.get(maps).await;
    drop(first);
    let second = open().await;
    let after = second.get(maps).await;
    assert_eq!(after.body, before.body);
    assert_eq!(after.body["items"][0], made.body);
    let mut watch = second.watch(&format!("{maps}?watch=true&resourceVersion=2")).await;
    assert_eq!(watch.next().await.unwrap()["object"]["code"], 410);
    let next = second.post(maps, &config_map("c")).await;
    let number =
        |answer: &crate::support::Answer| answer.text("/metadata/resourceVersion").parse::<u64>().unwrap();
    assert!(number(&next) > number(&after));
}

/// A kubelet that echoes frames of an exec and serves one log.
async fn kubelet(authority: &Authority) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let identity = authority.issue_server("n1", &[], &[[127, 0, 0, 1].into()]).unwrap();
    let acceptor =
        tokio_rustls::TlsAcceptor::from(tls::server_config(&identity, authority.certificate()).unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await.unwrap();
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap();
                if head.starts_with("GET /containerLogs/default/a/agent?tailLines=5 ") {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello\n").await;
                } else if head
                    .starts_with("GET /exec/default/a/agent?command=ls&command=-l&input=1&output=1 ")
                {
                    echo(stream, &head).await;
                } else {
                    let _ =
                        stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nno such").await;
                }
            });
        }
    });
    address
}

async fn echo(mut stream: tokio_rustls::server::TlsStream<TcpStream>, head: &str) {
    let find = |name: &str| {
        let line = head.lines().find(|line| line.to_lowercase().starts_with(name)).unwrap();
        line.split_once(": ").unwrap().1.to_owned()
    };
    let accept =
        tokio_tungstenite::tungstenite::handshake::derive_accept_key(find("sec-websocket-key").as_bytes());
    assert_eq!(find("sec-websocket-protocol"), "v5.channel.k8s.io");
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: \
         {accept}\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n"
    );
    stream.write_all(answer.as_bytes()).await.unwrap();
    let role = tokio_tungstenite::tungstenite::protocol::Role::Server;
    let mut socket = tokio_tungstenite::WebSocketStream::from_raw_socket(stream, role, None).await;
    while let Some(Ok(message)) = socket.next().await {
        if message.is_close() || socket.send(message).await.is_err() {
            return;
        }
    }
}

async fn with_bound_pod(site: &Site, port: u16) {
    let mut body = node("n1");
    body["status"]["addresses"] = json!([{ "type": "InternalIP", "address": "127.0.0.1" }]);
    body["status"]["daemonEndpoints"] = json!({ "kubeletEndpoint": { "Port": port } });
    assert_eq!(site.client.post("/api/v1/nodes", &body).await.code, 201);
    let mut body = pod("a");
    body["spec"]["nodeName"] = "n1".into();
    assert_eq!(site.client.post(PODS, &body).await.code, 201);
}

#[tokio::test]
async fn exec_and_logs_reach_the_node_and_come_back() {
    let site = site().await;
    let address = kubelet(&site.authority).await;
    with_bound_pod(&site, address.port()).await;
    let request =
        http::Request::get(format!("{PODS}/a/log?tailLines=5&pretty=1")).body(axum::body::Body::empty());
    let logs = site.client.send(request.unwrap()).await;
    let logs = http_body_util::BodyExt::collect(logs.into_body()).await.unwrap().to_bytes();
    assert_eq!(&logs[..], b"hello\n");

    let stream = site.connect(Some(("root", &["system:masters"]))).await;
    let query = "command=ls&command=-l&stdin=true&stdout=true&stderr=false";
    let mut request = format!("wss://localhost{PODS}/a/exec?{query}").into_client_request().unwrap();
    request.headers_mut().insert("sec-websocket-protocol", "v5.channel.k8s.io".parse().unwrap());
    let (mut socket, response) = tokio_tungstenite::client_async(request, stream).await.unwrap();
    assert_eq!(response.headers()["sec-websocket-protocol"], "v5.channel.k8s.io");
    for frame in [vec![0, b'x'], vec![4; 70_000]] {
        socket.send(Message::binary(frame.clone())).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap().into_data(), frame);
    }
}

#[tokio::test]
async fn spdy_is_told_what_is_needed_and_a_nodes_refusal_is_told_again() {
    let site = site().await;
    let address = kubelet(&site.authority).await;
    with_bound_pod(&site, address.port()).await;
    let root: Option<(&str, &[&str])> = Some(("root", &["system:masters"]));
    let spdy = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n";
    let path = format!("{PODS}/a/exec?command=nope");
    let (code, body) = site.ask(root, &path, spdy).await;
    assert_eq!(code, 400);
    let message = body["message"].as_str().unwrap();
    assert!(message.contains("SPDY") && message.contains("v5.channel.k8s.io"), "{message}");
    let socket = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: \
                  dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n";
    for headers in [socket, spdy] {
        let (code, body) = site.ask(root, &path, headers).await;
        assert_eq!((code, body["message"].as_str()), (404, Some("no such")));
    }
}

#[tokio::test]
async fn a_node_that_cannot_be_reached_is_named() {
    let site = site().await;
    // Bound and deaf: refused, and nobody else's meanwhile.
    let deaf = TcpSocket::new_v4().unwrap();
    deaf.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    with_bound_pod(&site, deaf.local_addr().unwrap().port()).await;
    let answer = site.client.get(&format!("{PODS}/a/log")).await;
    assert_eq!(answer.code, 502);
    assert!(answer.text("/message").contains("node n1") && answer.text("/message").contains("refused"));
    let wrong = site.client.get(&format!("{PODS}/a/log?container=other")).await;
    assert_eq!((wrong.code, wrong.text("/message")), (400, "container other is not valid for pod a"));
}
