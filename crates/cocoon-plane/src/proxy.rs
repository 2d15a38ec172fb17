//! Logs and exec, passed on to the node's kubelet port.
//!
//! Entry points: [`logs`] and [`exec`]. A WebSocket upgrade is forwarded as it is and then bytes are
//! copied both ways, so the sub-protocol (`v5.channel.k8s.io`) is a matter of client and node. SPDY is
//! refused: but `kubectl` tries it second whenever a WebSocket was refused, so the reason of that first refusal
//! is kept for a moment and told again.
//! Bounds: [`STREAMS`] streams at once, [`REFUSALS`] kept refusals, a deadline for connecting.

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use cocoon_kit::failure;
use futures::{StreamExt as _, stream};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::sync::CancellationToken;

use crate::{
    error::{ApiError, respond},
    http::{Call, Closing, path::Address},
    json::{int, list, text},
    plane::{Inner, Response},
    resources::{Kind, by_table},
};

const STREAMS: usize = 256;
const REFUSALS: usize = 32;
/// How long a refusal is remembered.
const MEMORY: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(10);
/// Longest time that a node may take to answer the head of a request.
const ANSWER: Duration = Duration::from_secs(60);
/// Largest error text taken from a node.
const TEXT: usize = 4096;

/// State shared by all proxied streams.
#[derive(Debug)]
pub(crate) struct Proxy {
    slots: Arc<Semaphore>,
    refusals: Mutex<VecDeque<(Instant, String, ApiError)>>,
}

impl Default for Proxy {
    fn default() -> Self {
        Self { slots: Arc::new(Semaphore::new(STREAMS)), refusals: Mutex::default() }
    }
}

impl Proxy {
    fn remember(&self, now: Instant, path: &str, error: &ApiError) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.push_back((now, path.to_owned(), error.clone()));
        if refusals.len() > REFUSALS {
            refusals.pop_front();
        }
    }

    /// Takes the latest refusal of `path`, if it is recent.
    fn recall(&self, now: Instant, path: &str) -> Option<ApiError> {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.retain(|(when, ..)| now.duration_since(*when) < MEMORY);
        let at = refusals.iter().rposition(|(_, known, _)| known == path)?;
        refusals.remove(at).map(|(.., error)| error)
    }
}

/// Where a container's kubelet listens.
struct Place {
    node: String,
    address: String,
    port: u16,
    container: String,
}

/// Finds a pod's container and its node.
async fn locate(inner: &Inner, kind: &Kind, address: &Address, container: &str) -> Result<Place, ApiError> {
    let (namespace, name) = (&address.namespace, &address.name);
    let pod = inner.objects.get(kind, namespace, name).await?.value();
    let container = pick_container(&pod, name, container)?;
    let node = text(&pod, "/spec/nodeName");
    if node.is_empty() {
        return Err(ApiError::bad_request(format!("pod {name} does not have a host assigned")));
    }
    let nodes = by_table("nodes").unwrap_or(kind);
    let object = inner.objects.get(nodes, "", node).await?.value();
    let addresses = list(&object, "/status/addresses");
    let of = |kind: &str| {
        addresses.iter().find(|a| text(a, "/type") == kind).map(|a| text(a, "/address").to_owned())
    };
    let port = int(&object, "/status/daemonEndpoints/kubeletEndpoint/Port")
        .and_then(|port| u16::try_from(port).ok());
    match (of("InternalIP").or_else(|| of("Hostname")), port) {
        (Some(address), Some(port)) if port > 0 => Ok(Place { node: node.into(), address, port, container }),
        _ => Err(ApiError::internal(format!("node {node} publishes no address or no kubelet port"))),
    }
}

fn pick_container(pod: &serde_json::Value, name: &str, asked: &str) -> Result<String, ApiError> {
    let names = |group: &str| {
        list(pod, &format!("/spec/{group}")).iter().map(|c| text(c, "/name")).collect::<Vec<_>>()
    };
    let (main, init) = (names("containers"), names("initContainers"));
    if asked.is_empty() {
        return match main.as_slice() {
            [only] => Ok((*only).to_owned()),
            _ => {
                let (main, init) = (main.join(" "), init.join(" "));
                let mut message =
                    format!("a container name must be specified for pod {name}, choose one of: [{main}]");
                if !init.is_empty() {
                    message.push_str(&format!(" or one of the init containers: [{init}]"));
                }
                Err(ApiError::bad_request(message))
            }
        };
    }
    if main.iter().chain(&init).any(|known| *known == asked) {
        Ok(asked.to_owned())
    } else {
        Err(ApiError::bad_request(format!("container {asked} is not valid for pod {name}")))
    }
}

/// Why a node could not be reached.
#[derive(Debug, thiserror::Error)]
enum ReachError {
    #[error("this plane has no client certificate for kubelets")]
    NoClient,
    #[error("no answer within {0:?}")]
    Slow(Duration),
    #[error("the address is not one that a certificate can name")]
    Name,
    #[error(transparent)]
    Connect(#[from] std::io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error(transparent)]
    Request(#[from] http::Error),
}

impl ReachError {
    fn told(&self, place: &Place) -> ApiError {
        let Place { node, address, port, .. } = place;
        let why = failure::chain(self);
        let text = format!("error dialing backend: node {node} at {address}:{port}: {why}");
        ApiError::new(502, "InternalError", text)
    }
}

async fn connect(inner: &Inner, place: &Place) -> Result<TlsStream<TcpStream>, ReachError> {
    let config = inner.config.kubelet_client.clone().ok_or(ReachError::NoClient)?;
    let name = match place.address.parse::<IpAddr>() {
        Ok(ip) => ServerName::IpAddress(ip.into()),
        Err(_) => ServerName::try_from(place.address.clone()).map_err(|_| ReachError::Name)?,
    };
    let reach = async {
        let stream = TcpStream::connect((place.address.as_str(), place.port)).await?;
        let _ = stream.set_nodelay(true);
        TlsConnector::from(config).connect(name, stream).await
    };
    Ok(tokio::time::timeout(CONNECT, reach).await.map_err(|_| ReachError::Slow(CONNECT))??)
}

/// Sends one request to a kubelet over a connection of its own.
async fn ask(
    inner: &Inner,
    place: &Place,
    method: Method,
    path: &str,
    headers: HeaderMap,
) -> Result<http::Response<hyper::body::Incoming>, ReachError> {
    let stream = connect(inner, place).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // Ends with the stream: the connection has no other user.
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "connection to a kubelet ended");
        }
    });
    let mut request = http::Request::builder().method(method).uri(path).body(axum::body::Body::empty())?;
    *request.headers_mut() = headers;
    if let Ok(host) = HeaderValue::from_str(&format!("{}:{}", place.address, place.port)) {
        request.headers_mut().insert(header::HOST, host);
    }
    let answer = tokio::time::timeout(ANSWER, sender.send_request(request)).await;
    Ok(answer.map_err(|_| ReachError::Slow(ANSWER))??)
}

/// A kubelet path with the parameters of `renames` (theirs, ours) taken from the request.
fn kubelet_path(
    call: &Call,
    verb: &str,
    address: &Address,
    place: &Place,
    renames: &[(&str, &str)],
) -> String {
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    for (theirs, ours) in renames {
        for value in call.params.all(theirs) {
            // A kubelet takes 1 and 0 for flags of streams.
            let value = match value {
                "true" if verb == "exec" && *ours != "command" => "1",
                "false" if verb == "exec" && *ours != "command" => continue,
                other => other,
            };
            query.append_pair(ours, value);
        }
    }
    let query = query.finish();
    let path = format!("/{verb}/{}/{}/{}", address.namespace, address.name, place.container);
    if query.is_empty() { path } else { format!("{path}?{query}") }
}

/// An error answer of a kubelet in the API's words.
async fn refusal(place: &Place, response: http::Response<hyper::body::Incoming>) -> ApiError {
    let code = response.status().as_u16();
    let body = http_body_util::Limited::new(response.into_body(), TEXT).collect().await;
    let text =
        body.map(|body| String::from_utf8_lossy(&body.to_bytes()).trim().to_owned()).unwrap_or_default();
    if let Ok(status) = serde_json::from_str::<serde_json::Value>(&text)
        && !crate::json::text(&status, "/message").is_empty()
    {
        return told(code, crate::json::text(&status, "/message"));
    }
    let text = if text.is_empty() { format!("node {} answered {code}", place.node) } else { text };
    told(code, &text)
}

fn told(code: u16, text: &str) -> ApiError {
    match code {
        400 => ApiError::bad_request(text),
        404 => ApiError::new(404, "NotFound", text),
        // The plane's own certificate was refused: not the user's fault.
        401 | 403 => ApiError::internal(format!("the node does not accept this plane: {text}")),
        code if code >= 500 => ApiError::new(code, "InternalError", text),
        _ => ApiError::internal(text),
    }
}

/// `pods/NAME/log`.
pub(crate) async fn logs(call: &Call, kind: &Kind, address: &Address) -> Result<Response, ApiError> {
    let place = locate(&call.inner, kind, address, call.params.get("container")).await?;
    let names = ["follow", "previous", "sinceSeconds", "sinceTime", "timestamps", "tailLines", "limitBytes"];
    let renames: Vec<_> = names.iter().map(|name| (*name, *name)).collect();
    let path = kubelet_path(call, "containerLogs", address, &place, &renames);
    let slot = slot(&call.inner)?;
    let answer = ask(&call.inner, &place, Method::GET, &path, HeaderMap::new()).await;
    let answer = answer.map_err(|error| error.told(&place))?;
    if answer.status() != StatusCode::OK {
        return Err(refusal(&place, answer).await);
    }
    let closing = closing(&call.parts.extensions);
    // The slot lives as long as the stream.
    let chunks = stream::unfold((answer.into_body(), slot), |(mut body, slot)| async {
        loop {
            match body.frame().await? {
                Ok(frame) => match frame.into_data() {
                    Ok(data) => return Some((Ok(data), (body, slot))),
                    Err(_trailers) => {}
                },
                Err(error) => return Some((Err(error), (body, slot))),
            }
        }
    });
    let chunks = chunks.take_until(async move { closing.cancelled().await });
    Ok(respond(200, "text/plain", axum::body::Body::from_stream(chunks)))
}

fn slot(inner: &Inner) -> Result<OwnedSemaphorePermit, ApiError> {
    Arc::clone(&inner.proxy.slots).try_acquire_owned().map_err(|_| {
        ApiError::new(
            429,
            "TooManyRequests",
            format!("more than {STREAMS} streams to nodes are open; end some"),
        )
    })
}

fn closing(extensions: &http::Extensions) -> CancellationToken {
    extensions.get::<Closing>().map(|closing| closing.0.clone()).unwrap_or_default()
}

fn has_token(headers: &HeaderMap, name: HeaderName, token: &str) -> bool {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|word| word.trim().eq_ignore_ascii_case(token))
}

/// `pods/NAME/exec`.
pub(crate) async fn exec(call: &Call, kind: &Kind, address: &Address) -> Result<Response, ApiError> {
    let place = locate(&call.inner, kind, address, call.params.get("container")).await?;
    let names = [
        ("command", "command"),
        ("stdin", "input"),
        ("stdout", "output"),
        ("stderr", "error"),
        ("tty", "tty"),
    ];
    let path = kubelet_path(call, "exec", address, &place, &names);
    let now = call.inner.objects.world().instant();
    if has_token(&call.parts.headers, header::UPGRADE, "websocket") {
        let answer = web_socket(call, &place, &path).await;
        return answer.inspect_err(|error| call.inner.proxy.remember(now, &path, error));
    }
    if let Some(error) = call.inner.proxy.recall(now, &path) {
        return Err(error);
    }
    let why = if call.parts.headers.keys().any(|name| name.as_str().starts_with("x-stream-protocol"))
        || call.parts.headers.contains_key(header::UPGRADE)
    {
        "SPDY streams are not served"
    } else {
        "exec needs an upgrade to WebSocket"
    };
    Err(ApiError::bad_request(format!(
        "{why}: use kubectl 1.31 or newer (not with KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false), or a client that speaks \
         WebSocket with the sub-protocol v5.channel.k8s.io"
    )))
}

async fn web_socket(call: &Call, place: &Place, path: &str) -> Result<Response, ApiError> {
    let Some(ours) = call.parts.extensions.get::<hyper::upgrade::OnUpgrade>().cloned() else {
        return Err(ApiError::bad_request("this connection cannot be upgraded: use HTTP/1.1 for exec"));
    };
    let slot = slot(&call.inner)?;
    let mut headers = HeaderMap::new();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    for (name, value) in
        call.parts.headers.iter().filter(|(name, _)| name.as_str().starts_with("sec-websocket-"))
    {
        headers.append(name.clone(), value.clone());
    }
    let answer =
        ask(&call.inner, place, Method::GET, path, headers).await.map_err(|error| error.told(place))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(refusal(place, answer).await);
    }
    let mut response = respond(101, "text/plain", axum::body::Body::empty());
    *response.headers_mut() = HeaderMap::new();
    for (name, value) in answer.headers() {
        let kept = name.as_str().starts_with("sec-websocket-")
            || [header::CONNECTION, header::UPGRADE].contains(name);
        if kept {
            response.headers_mut().append(name.clone(), value.clone());
        }
    }
    let closing = closing(&call.parts.extensions);
    // Ends when either side closes, or with the server.
    tokio::spawn(async move {
        let _ = closing.run_until_cancelled(copy(ours, answer)).await;
        drop(slot);
    });
    Ok(response)
}

async fn copy(ours: hyper::upgrade::OnUpgrade, answer: http::Response<hyper::body::Incoming>) {
    let theirs = hyper::upgrade::on(answer);
    let (Ok(ours), Ok(theirs)) = (ours.await, theirs.await) else { return };
    let (mut ours, mut theirs) = (TokioIo::new(ours), TokioIo::new(theirs));
    if let Err(error) = tokio::io::copy_bidirectional(&mut ours, &mut theirs).await {
        tracing::debug!(%error, "an exec stream broke off");
    }
}
