//! A door over real sockets of this machine's loopback.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::{net::SocketAddr, sync::Arc, time::Duration};

use cocoon_kit::{
    door::{Door, Entered, Limits, Refused},
    tls::{self, Authority},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

const SOON: Duration = Duration::from_secs(5);

struct Port {
    authority: Authority,
    address: SocketAddr,
    refused: Refused,
}

/// A port that greets whoever enters with his name; one who says `x` is known.
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
    tokio::time::timeout(SOON, stream.read_to_end(&mut rest)).await.is_ok()
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
    strangers[5].write_all(b"x").await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let _more = (port.greeted(None).await.unwrap(), port.greeted(None).await.unwrap());
    assert!(is_closed(&mut strangers[4]).await);
    let mut rest = [0; 1];
    let stays = tokio::time::timeout(Duration::from_millis(100), strangers[5].read(&mut rest)).await;
    assert!(stays.is_err());
    assert!(port.greeted(Some("b")).await.is_none(), "two are known, more there may not be");
}

#[tokio::test]
async fn who_is_not_known_in_time_must_go() {
    let short = Duration::from_millis(300);
    let port = port(Limits { patience: short, certified: short, ..limits() }).await;
    let mut known = port.greeted(Some("known")).await.unwrap();
    known.write_all(b"x").await.unwrap();
    assert!(is_closed(&mut port.silent().await).await);
    assert!(is_closed(&mut port.greeted(None).await.unwrap()).await);
    assert!(is_closed(&mut port.greeted(Some("a")).await.unwrap()).await);
    let mut rest = [0; 1];
    assert!(tokio::time::timeout(short, known.read(&mut rest)).await.is_err(), "who is known stays");
}
