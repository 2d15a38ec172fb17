//! A door over real sockets of this machine's loopback.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::{
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use cocoon_kit::{
    door::{Door, Entered, Limits, Refused},
    tls::{self, Authority},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

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

struct Port {
    authority: Authority,
    address: SocketAddr,
    refused: Refused,
}

/// A port that greets whoever enters with his name; one who says `x` is known, and told so.
async fn port(limits: Limits) -> Port {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::load_or_create(folder.path(), "ca").unwrap();
    let identity = authority.issue_server("port", &["localhost"], &[]).unwrap();
    let config = tls::server_config(&identity, authority.certificate()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let refused = Refused::default();
    let door = Door::new(config, limits, refused.clone());
    tokio::spawn(async move {
        loop {
            let arrival = door.next(&listener).await;
            tokio::spawn(async move {
                let Some(Entered { mut stream, subject, stay }) = arrival.enter().await else { return };
                let name = subject.map_or_else(|| "nobody".to_owned(), |subject| subject.name);
                stream.write_all(name.as_bytes()).await.unwrap();
                let known = stay.known();
                let talk = async {
                    if stream.read_u8().await.is_ok_and(|said| said == b'x') {
                        known.tell();
                        stream.write_all(b"y").await.unwrap();
                    }
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    () = talk => {}
                    () = stay.over() => {}
                }
            });
        }
    });
    Port { authority, address, refused }
}

impl Port {
    async fn silent(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A connection that was greeted with this name; `None`: it was closed before that.
    async fn greeted(&self, name: Option<&str>) -> Option<TlsStream<TcpStream>> {
        let config = match name {
            Some(name) => {
                let identity = self.authority.issue_client(name, &[]).unwrap();
                tls::client_config(&identity, self.authority.certificate()).unwrap()
            }
            None => self.no_certificate(),
        };
        let stream = TlsConnector::from(config).connect("localhost".try_into().unwrap(), self.silent().await);
        let mut stream = stream.await.ok()?;
        let wanted = name.unwrap_or("nobody");
        let mut heard = vec![0; wanted.len()];
        stream.read_exact(&mut heard).await.ok()?;
        assert_eq!(heard, wanted.as_bytes());
        Some(stream)
    }

    fn no_certificate(&self) -> Arc<rustls::ClientConfig> {
        use rustls::pki_types::{CertificateDer, pem::PemObject as _};
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.certificate().as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider);
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        Arc::new(builder.with_root_certificates(roots).with_no_client_auth())
    }
}

async fn is_closed(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> bool {
    let mut rest = Vec::new();
    tokio::time::timeout(HANGS, stream.read_to_end(&mut rest)).await.is_ok()
}

async fn becomes_known(stream: &mut TlsStream<TcpStream>) {
    stream.write_all(b"x").await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'y');
}

/// Asked after what would have closed it was seen to happen.
fn is_open(stream: &mut TlsStream<TcpStream>) -> bool {
    let mut byte = pin!(stream.read_u8());
    byte.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

fn limits() -> Limits {
    let long = Duration::from_secs(3600);
    Limits { arrivals: 4, strangers: 2, known: 2, patience: long, certified: long }
}

#[tokio::test]
async fn connections_that_never_speak_lock_nobody_out() {
    let port = port(limits()).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(port.silent().await);
    }
    assert!(port.greeted(Some("a")).await.is_some());
    assert!(is_closed(&mut silent[0]).await, "the oldest made room");
    assert!(port.refused.count() >= 16);
}

#[tokio::test]
async fn strangers_take_no_place_of_those_who_show_a_certificate_and_make_room_for_each_other() {
    let port = port(limits()).await;
    let mut strangers = Vec::new();
    for _ in 0..6 {
        strangers.push(port.greeted(None).await.unwrap());
    }
    let known = port.greeted(Some("a")).await;
    assert!(known.is_some());
    for stranger in &mut strangers[..4] {
        assert!(is_closed(stranger).await);
    }
    assert_eq!(port.refused.count(), 4);
    // A stranger that becomes known leaves the strangers' places, and loses his own no more.
    becomes_known(&mut strangers[5]).await;
    let _more = (port.greeted(None).await.unwrap(), port.greeted(None).await.unwrap());
    assert!(is_closed(&mut strangers[4]).await);
    assert!(port.greeted(Some("b")).await.is_none(), "two are known, more there may not be");
    assert!(is_open(&mut strangers[5]));
}

#[tokio::test]
async fn who_is_not_known_in_time_must_go() {
    let _clock = StillClock::new();
    let [patience, certified, moment] = [10, 20, 1].map(Duration::from_secs);
    let port = port(Limits { patience, certified, ..limits() }).await;
    let mut known = port.greeted(Some("known")).await.unwrap();
    becomes_known(&mut known).await;
    let (mut silent, mut nobody) = (port.silent().await, port.greeted(None).await.unwrap());
    // Taken off the listener after the silent one, so that one is inside, too.
    let mut certificate = port.greeted(Some("a")).await.unwrap();
    tokio::time::advance(patience + moment).await;
    assert!(is_closed(&mut silent).await);
    assert!(is_closed(&mut nobody).await);
    assert!(is_open(&mut certificate), "a certificate is worth more patience");
    tokio::time::advance(certified - patience).await;
    assert!(is_closed(&mut certificate).await);
    assert!(is_open(&mut known), "who is known stays");
}
