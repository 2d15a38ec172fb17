//! The API over TLS.
//!
//! Entry point: [`serve`]. Bounds: those of [`LIMITS`]; a deadline for the request head; [`BUFFER`] a connection;
//! those of `http::bodies`; a limited wait at shutdown. Invariant: a request without an identity is answered 401 before anything else of it is read.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use cocoon_kit::{
    door::{Arrival, Door, Entered, Known, Limits},
    head,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    auth,
    error::ApiError,
    http::{self, Closing},
    plane::{Inner, Response, User},
};

/// Neither handshakes nor strangers (without a certificate, and yet to show a valid token) take the places of
/// people who may come in.
const LIMITS: Limits =
    Limits { arrivals: 512, strangers: 128, known: 1024, patience: Duration::from_secs(10), certified: HEAD };
/// For the head of a request, and the first request behind a certificate. It also closes idle connections, so
/// it must be longer than the pauses of periodic clients: a lease is renewed each 10 s, a status each 60 s,
/// on a kept connection.
const HEAD: Duration = Duration::from_secs(90);
/// What is read of a connection at a time, and the longest head of a request.
const BUFFER: usize = 64 << 10;
/// How long a shutdown waits for answers under way.
const FAREWELL: Duration = Duration::from_secs(5);

/// Accepts connections until `shutdown`, then lets answers under way end.
pub(crate) async fn serve(
    inner: Arc<Inner>,
    listener: TcpListener,
    tls: Arc<rustls::ServerConfig>,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let door = Door::new(tls, LIMITS, inner.refused.clone());
    let tasks = TaskTracker::new();
    while let Some(arrival) = shutdown.run_until_cancelled(door.next(&listener)).await {
        tasks.spawn(connection(Arc::clone(&inner), arrival, shutdown.clone()));
    }
    tasks.close();
    if tokio::time::timeout(FAREWELL, tasks.wait()).await.is_err() {
        tracing::warn!(left = tasks.len(), "connections did not end in time");
    }
    Ok(())
}

async fn connection(inner: Arc<Inner>, arrival: Arrival, shutdown: CancellationToken) {
    let entered = shutdown.run_until_cancelled(arrival.enter()).await.flatten();
    let Some(Entered { stream, subject, stay }) = entered else { return };
    let (user, known, closing) = (subject.map(auth::certified), stay.known(), shutdown.clone());
    let service = hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let (inner, user, closing, known) =
            (Arc::clone(&inner), user.clone(), closing.clone(), known.clone());
        async move {
            let method = request.method().clone();
            let answer = identified(inner, user, request, closing, &known).await;
            Ok::<_, Infallible>(head::answer(&method, answer))
        }
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(BUFFER);
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
        () = stay.over() => return tracing::debug!("closed: no identity in time"),
    }
    if let Ok(ended) = tokio::time::timeout(FAREWELL, connection).await {
        log(ended);
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
    known: &Known,
) -> Response {
    let user = user.or_else(|| inner.token_user(auth::bearer(request.headers())?));
    let Some(user) = user else { return ApiError::unauthorized().into_response() };
    known.tell();
    let mut request = request.map(axum::body::Body::new);
    request.extensions_mut().insert(Closing(closing));
    http::handle(inner, user, request).await
}
