//! The API over TLS.
//!
//! Entry point: [`serve`]. Bounds: [`CONNECTIONS`] connections, of these [`STRANGERS`] that have shown
//! neither a certificate nor a valid token; a deadline for handshake, first identified request and request
//! head; a limited wait at shutdown. Invariant: a request without an identity is answered 401 before
//! anything else of it is read.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, SemaphorePermit},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    auth,
    error::ApiError,
    http::{self, Closing},
    plane::{Inner, Response, User},
};

const CONNECTIONS: usize = 1024;
/// Connections without a certificate that have yet to show a valid token. Those above are closed: people who
/// may come in always find room.
const STRANGERS: usize = 128;
/// For the TLS handshake, and for a stranger to show a valid token.
const PATIENCE: Duration = Duration::from_secs(10);
/// For the head of a request, and the first request behind a certificate. It also closes idle connections, so it must be longer than the pauses of periodic
/// clients: a lease is renewed each 10 s, a status each 60 s, on a kept connection.
const HEAD: Duration = Duration::from_secs(90);
/// How long a shutdown waits for answers under way.
const FAREWELL: Duration = Duration::from_secs(5);

/// Accepts connections until `shutdown`, then lets answers under way end.
pub(crate) async fn serve(
    inner: Arc<Inner>,
    listener: TcpListener,
    tls: Arc<rustls::ServerConfig>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let acceptor = TlsAcceptor::from(tls);
    let (slots, strangers) = (Arc::new(Semaphore::new(CONNECTIONS)), Arc::new(Semaphore::new(STRANGERS)));
    let tasks = TaskTracker::new();
    loop {
        // Waiting for a slot before accepting leaves the rest in the kernel's queue.
        let Some(slot) = until(&shutdown, Arc::clone(&slots).acquire_owned()).await else { break };
        let Ok(slot) = slot else { break };
        let Some(accepted) = until(&shutdown, listener.accept()).await else { break };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, or a client that left: neither ends the server.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (inner, acceptor, shutdown) = (Arc::clone(&inner), acceptor.clone(), shutdown.clone());
        let strangers = Arc::clone(&strangers);
        tasks.spawn(async move {
            connection(inner, acceptor, &strangers, stream, shutdown).await;
            drop(slot);
        });
    }
    tasks.close();
    if tokio::time::timeout(FAREWELL, tasks.wait()).await.is_err() {
        tracing::warn!(left = tasks.len(), "connections did not end in time");
    }
    Ok(())
}

async fn until<T>(shutdown: &CancellationToken, future: impl Future<Output = T>) -> Option<T> {
    shutdown.run_until_cancelled(future).await
}

async fn connection(
    inner: Arc<Inner>,
    acceptor: TlsAcceptor,
    strangers: &Semaphore,
    stream: TcpStream,
    shutdown: CancellationToken,
) {
    let _ = stream.set_nodelay(true);
    let Ok(Ok(stream)) = tokio::time::timeout(PATIENCE, acceptor.accept(stream)).await else { return };
    let certificates = stream.get_ref().1.peer_certificates();
    // The handshake verified the chain; without a certificate the token decides.
    let user = certificates.and_then(|chain| chain.first()).and_then(auth::certificate_user);
    let stranger = match user {
        Some(_) => None,
        None => match strangers.try_acquire() {
            Ok(place) => Some(place),
            Err(_) => return tracing::debug!("closed: too many connections without an identity"),
        },
    };
    let patience = if stranger.is_some() { PATIENCE } else { HEAD };
    let (known, closing) = (CancellationToken::new(), shutdown.clone());
    let seen = known.clone();
    let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let (inner, user, closing, seen) = (Arc::clone(&inner), user.clone(), closing.clone(), seen.clone());
        async move { Ok::<_, Infallible>(identified(inner, user, request, closing, &seen).await) }
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(250)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(20));
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        biased;
        ended = &mut connection => return log(ended),
        () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
        // Neither an open preface nor answered pings nor requests that are refused keep a place.
        () = overdue(patience, &known, stranger) => return tracing::debug!("closed: no identity in time"),
    }
    if let Ok(ended) = tokio::time::timeout(FAREWELL, connection).await {
        log(ended);
    }
}

/// Ends when nobody is known after `patience`; gives the stranger's place back once somebody is.
async fn overdue(patience: Duration, known: &CancellationToken, stranger: Option<SemaphorePermit<'_>>) {
    if tokio::time::timeout(patience, known.cancelled()).await.is_ok() {
        drop(stranger);
        std::future::pending().await
    }
}

fn log(ended: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended");
    }
}

async fn identified(
    inner: Arc<Inner>,
    user: Option<User>,
    request: hyper::Request<hyper::body::Incoming>,
    closing: CancellationToken,
    seen: &CancellationToken,
) -> Response {
    let user = user.or_else(|| inner.token_user(auth::bearer(request.headers())?));
    let Some(user) = user else { return ApiError::unauthorized().into_response() };
    seen.cancel();
    let mut request = request.map(axum::body::Body::new);
    request.extensions_mut().insert(Closing(closing));
    http::handle(inner, user, request).await
}
