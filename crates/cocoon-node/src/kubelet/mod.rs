//! The kubelet port: pods, logs and exec for the API server, for nobody else.
//!
//! Entry point: [`Server::serve`]. A caller without an allowed client certificate gets 401 or 403 before
//! the path is looked at. Invariants: connections, handshakes and log buffers are bounded (I9); an exec
//! ends with its connection, and its exit code is never made up (I4).

mod auth;
pub mod console;
mod exec;
mod frames;
mod logs;
mod query;
#[cfg(test)]
mod tests;
mod waiting;

use std::{convert::Infallible, io, net, sync::Arc, time::Duration};

use bytes::Bytes;
use cocoon_kit::{
    door::{Arrival, Door, Entered, Known, Limits, Refused},
    head,
    tls::Subject,
};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
};
use k8s_openapi::api::core::v1::Pod;
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet};
use tokio_util::sync::CancellationToken;

use self::auth::Verdict;
use crate::{
    owner::{Context, directory::Seat},
    planner::observation::PodKey,
    pods::table::PodTable,
};

/// Neither handshakes nor callers without an allowed certificate take the places of those who have one.
const LIMITS: Limits =
    Limits { arrivals: 512, strangers: 128, known: 512, patience: HANDSHAKE, certified: HANDSHAKE };
const EXECS: usize = 512;
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A body of this server.
pub(crate) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The kubelet port of one agent. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Server {
    context: Arc<Context>,
    table: Arc<PodTable>,
    /// Execs outlive their connection's request, so they are counted apart.
    execs: Arc<Semaphore>,
}

/// A pod of this node and where its VM is.
#[derive(Debug, Clone)]
struct Found {
    seat: Seat,
    pod: Arc<Pod>,
}

/// A plain text answer.
pub(crate) fn text(status: StatusCode, text: impl Into<String>) -> Response<Body> {
    let mut text = text.into();
    text.push('\n');
    let body = Full::new(Bytes::from(text)).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let plain = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

impl Server {
    /// A server that answers for these owners and pods.
    #[must_use]
    pub fn new(context: Arc<Context>, table: Arc<PodTable>) -> Self {
        Self { context, table, execs: Arc::new(Semaphore::new(EXECS)) }
    }

    /// Serves until `shutdown`. An error: the port cannot be used.
    pub async fn serve(self, listener: net::TcpListener, shutdown: CancellationToken) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let Some(tls) = self.context.config.kubelet_tls.clone() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the kubelet port has no certificate"));
        };
        let door = Door::new(tls, LIMITS, Refused::default());
        let mut connections = JoinSet::new();
        while let Some(arrival) = shutdown.run_until_cancelled(door.next(&listener)).await {
            while connections.try_join_next().is_some() {}
            connections.spawn(self.clone().connection(arrival));
        }
        connections.shutdown().await;
        Ok(())
    }

    async fn connection(self, arrival: Arrival) {
        let Some(Entered { stream, subject, stay }) = arrival.enter().await else { return };
        let (caller, known) = (Arc::new(subject), stay.known());
        let service = hyper::service::service_fn(move |request: Request<Incoming>| {
            let (server, caller, known) = (self.clone(), Arc::clone(&caller), known.clone());
            async move {
                let method = request.method().clone();
                let answer = server.answer(Option::as_ref(&caller), &known, request).await;
                Ok::<_, Infallible>(head::answer(&method, answer))
            }
        });
        let mut http = Builder::new(TokioExecutor::new());
        http.http1().timer(hyper_util::rt::TokioTimer::new()).header_read_timeout(HANDSHAKE);
        tokio::select! {
            biased;
            ended = http.serve_connection_with_upgrades(TokioIo::new(stream), service) => {
                if let Err(error) = ended {
                    tracing::debug!(error, "kubelet connection ended");
                }
            }
            () = stay.over() => tracing::debug!("kubelet connection closed: no allowed caller in time"),
        }
    }

    async fn answer(
        &self,
        caller: Option<&Subject>,
        known: &Known,
        request: Request<Incoming>,
    ) -> Response<Body> {
        match auth::judge(caller, &self.context.config) {
            Verdict::Allowed => {
                known.tell();
                self.route(request).await
            }
            Verdict::Unknown => text(
                StatusCode::UNAUTHORIZED,
                "Unauthorized: show a client certificate of the cluster's authority",
            ),
            Verdict::Forbidden(name) => {
                text(StatusCode::FORBIDDEN, format!("Forbidden: user {name:?} may not use the kubelet port"))
            }
        }
    }

    async fn route(&self, request: Request<Incoming>) -> Response<Body> {
        let path = request.uri().path().to_owned();
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        let reading = request.method() == Method::GET;
        match parts.as_slice() {
            ["healthz"] if reading => text(StatusCode::OK, "ok"),
            ["pods"] if reading => self.pods(false),
            ["runningpods" | "runningpods/"] | ["runningpods", ""] if reading => self.pods(true),
            ["containerLogs", namespace, pod, container] if reading => {
                match self.seat(namespace, pod, container) {
                    Ok(found) => {
                        logs::serve(&self.context, &found, request.uri().query().unwrap_or_default()).await
                    }
                    Err(refusal) => *refusal,
                }
            }
            ["exec", namespace, pod, container] | ["exec", namespace, pod, _, container]
                if reading || request.method() == Method::POST =>
            {
                match self.seat(namespace, pod, container) {
                    Ok(found) => self.exec(found, request),
                    Err(refusal) => *refusal,
                }
            }
            parts => not_served(request.method(), &path, parts),
        }
    }

    fn exec(&self, found: Found, request: Request<Incoming>) -> Response<Body> {
        match Arc::clone(&self.execs).try_acquire_owned() {
            Ok(permit) => exec::serve(&self.context, found, request, permit),
            Err(_) => text(StatusCode::SERVICE_UNAVAILABLE, "too many commands run at once; try again later"),
        }
    }

    fn pods(&self, running: bool) -> Response<Body> {
        let seated =
            |pod: &Pod| self.context.directory.seat(&crate::wish::key(pod)).is_some_and(|seat| seat.running);
        let mut pods = self.table.all();
        pods.retain(|pod| !running || seated(pod));
        let list = serde_json::json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods});
        let body = Full::new(Bytes::from(list.to_string())).boxed_unsync();
        let mut response = Response::new(body);
        let json = header::HeaderValue::from_static("application/json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        response
    }

    /// The pod with its only container, and where its VM is.
    fn seat(&self, namespace: &str, pod: &str, container: &str) -> Result<Found, Box<Response<Body>>> {
        let key = PodKey { namespace: namespace.to_owned(), name: pod.to_owned() };
        let refuse = |status, what: String| Err(Box::new(text(status, what)));
        let Some(seat) = self.context.directory.seat(&key) else {
            // A pod without a seat is one that was refused, or not taken up yet; it says which.
            let pods = self.table.all();
            return match pods.iter().find(|pod| crate::wish::key(pod) == key) {
                Some(pod) => refuse(StatusCode::BAD_REQUEST, waiting::for_logs(pod)),
                None => refuse(StatusCode::NOT_FOUND, format!("pod {key} has no VM on this node")),
            };
        };
        let found = self.table.get(&seat.uid);
        let only = found.as_deref().map(waiting::container);
        match found {
            Some(ref pod) if only == Some(container) => Ok(Found { seat, pod: Arc::clone(pod) }),
            _ => {
                let name = only.unwrap_or_default();
                let what = format!("pod {key} has one container, {name:?}, and none named {container:?}");
                refuse(StatusCode::NOT_FOUND, what)
            }
        }
    }
}

/// Why a path is not served: not by this release, not in this way, or not at all.
fn not_served(method: &Method, path: &str, parts: &[&str]) -> Response<Body> {
    match parts {
        [
            "attach" | "portForward" | "run" | "stats" | "metrics" | "logs" | "configz" | "debug"
            | "checkpoint",
            ..,
        ] => {
            text(StatusCode::NOT_IMPLEMENTED, format!("{path} is not served by this release of cocoon node"))
        }
        ["healthz" | "pods" | "runningpods" | "containerLogs" | "exec", ..] if *method != Method::GET => {
            text(StatusCode::METHOD_NOT_ALLOWED, format!("{method} is not allowed on {path}"))
        }
        _ => text(StatusCode::NOT_FOUND, format!("{path} is not a path of the kubelet port")),
    }
}
