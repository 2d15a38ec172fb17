//! Exec over WebSocket: one guest session a connection.

use std::{sync::Arc, time::Duration};

use cocoon_guest::host::{Exec, ExecEvent};
use futures::{
    SinkExt as _, StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::{body::Incoming, upgrade::Upgraded};
use hyper_util::rt::TokioIo;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::derive_accept_key,
        protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode},
    },
};

use super::{
    Body, Found,
    frames::{self, Said},
    query::Query,
    text, waiting,
};
use crate::{
    owner::{Context, directory::Seat},
    ports::GuestSession,
};

type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// How long an upgraded connection may take to appear.
const UPGRADE: Duration = Duration::from_secs(10);
/// Quiet connections are kept alive through proxies.
const PING: Duration = Duration::from_secs(30);
/// The longest message taken from a client.
const LONGEST: usize = 4 << 20;
/// Pieces in which standard input is handed on.
const STDIN_PIECE: usize = cocoon_guest::protocol::STDIN_CHUNK;

/// What is to be run, and with which streams.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Order {
    argv: Vec<String>,
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

impl Order {
    fn read(query: &Query) -> Result<Self, String> {
        let argv = query.all("command");
        if argv.first().is_none_or(String::is_empty) {
            return Err("command is missing".into());
        }
        if query.flag(&["tty"]) {
            return Err("tty: guests have no terminal in this release; run the command without -t".into());
        }
        let order = Self {
            argv,
            stdin: query.flag(&["input", "stdin"]),
            stdout: query.flag(&["output", "stdout"]),
            stderr: query.flag(&["error", "stderr"]),
        };
        if !(order.stdin || order.stdout || order.stderr) {
            return Err("ask for at least one of stdin, stdout and stderr".into());
        }
        Ok(order)
    }
}

pub(super) fn serve(
    context: &Arc<Context>,
    Found { seat, pod }: Found,
    request: Request<Incoming>,
    permit: OwnedSemaphorePermit,
) -> Response<Body> {
    let order = match Order::read(&Query::parse(request.uri().query().unwrap_or_default())) {
        Ok(order) => order,
        Err(why) => return text(StatusCode::BAD_REQUEST, why),
    };
    if !seat.running {
        return text(StatusCode::BAD_REQUEST, waiting::for_exec(&pod));
    }
    match handshake(&request) {
        Ok(response) => {
            let context = Arc::clone(context);
            let (task, shutdown) =
                (run(Arc::clone(&context), seat, order, request), context.shutdown.clone());
            context.spawn(async move {
                tokio::select! {
                    biased;
                    () = shutdown.cancelled() => {}
                    () = task => {}
                }
                drop(permit);
            });
            *response
        }
        Err(refusal) => *refusal,
    }
}

/// The answer that switches protocols, or the refusal.
fn handshake(request: &Request<Incoming>) -> Result<Box<Response<Body>>, Box<Response<Body>>> {
    let refuse = |why: &str| Err(Box::new(text(StatusCode::BAD_REQUEST, why)));
    let get = |name| request.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let upgrade = get(header::UPGRADE).unwrap_or_default();
    if upgrade.to_ascii_lowercase().starts_with("spdy") {
        return refuse("SPDY is not served; use a client that speaks WebSocket (kubectl 1.31 or newer)");
    }
    if !upgrade.eq_ignore_ascii_case("websocket") {
        return refuse("exec needs a WebSocket upgrade");
    }
    let Some(protocol) = get(header::SEC_WEBSOCKET_PROTOCOL).and_then(frames::choose) else {
        return refuse("exec needs the WebSocket sub-protocol v5.channel.k8s.io or v4.channel.k8s.io");
    };
    let Some(key) = request.headers().get(header::SEC_WEBSOCKET_KEY) else {
        return refuse("Sec-WebSocket-Key is missing");
    };
    let accept = derive_accept_key(key.as_bytes());
    let mut response = Response::new(Empty::new().boxed_unsync());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
    if let Ok(accept) = HeaderValue::from_str(&accept) {
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    }
    Ok(Box::new(response))
}

async fn run(context: Arc<Context>, seat: Seat, order: Order, request: Request<Incoming>) {
    let Ok(Ok(upgraded)) = tokio::time::timeout(UPGRADE, hyper::upgrade::on(request)).await else { return };
    let limits = WebSocketConfig::default().max_message_size(Some(LONGEST)).max_frame_size(Some(LONGEST));
    let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, Some(limits)).await;
    let exec = Exec { argv: order.argv.clone(), ..Exec::default() };
    let (mut sink, stream) = socket.split();
    let outcome = match context.ports.guest.exec(&seat.vm_id, exec).await {
        Ok(session) => talk(&mut sink, stream, session, &order).await,
        Err(error) => Some(Err(error.trouble().message)),
    };
    // `None`: the client left; there is nobody to tell.
    if let Some(outcome) = outcome {
        finish(&mut sink, &outcome).await;
    }
}

async fn finish(sink: &mut SplitSink<Socket, Message>, outcome: &Result<u8, String>) {
    let _ = sink.send(Message::Binary(frames::status(outcome).into())).await;
    let normal = CloseFrame { code: CloseCode::Normal, reason: "".into() };
    let _ = sink.send(Message::Close(Some(normal))).await;
    let _ = sink.flush().await;
}

/// Carries bytes both ways until the command ends (its outcome) or the client leaves (`None`).
async fn talk(
    sink: &mut SplitSink<Socket, Message>,
    stream: SplitStream<Socket>,
    session: GuestSession,
    order: &Order,
) -> Option<Result<u8, String>> {
    let GuestSession { session, keep } = session;
    let (stdin, mut events) = (session.stdin, session.events);
    let mut listening = std::pin::pin!(listen(stream, order.stdin.then_some(stdin)));
    let mut ping = tokio::time::interval(PING);
    let mut killed = None;
    let outcome = loop {
        tokio::select! {
            biased;
            event = events.recv() => match event {
                Some(Ok(ExecEvent::Exit(code))) => break Some(Ok(frames::exit_code(code, killed))),
                Some(Ok(ExecEvent::Killed(signal))) => killed = Some(signal),
                Some(Ok(event)) => {
                    if let Some(frame) = output(event, order)
                        && sink.send(Message::Binary(frame.into())).await.is_err()
                    {
                        break None;
                    }
                }
                Some(Err(error)) => break Some(Err(error.to_string())),
                None => break Some(Err("the guest ended the session without an exit code".to_owned())),
            },
            left = &mut listening => break left.map(Err),
            _ = ping.tick() => {
                if sink.send(Message::Ping(Vec::new().into())).await.is_err() {
                    break None;
                }
            }
        }
    };
    drop(keep);
    outcome
}

fn output(event: ExecEvent, order: &Order) -> Option<Vec<u8>> {
    match event {
        ExecEvent::Stdout(data) if order.stdout => Some(frames::stdout(&data)),
        ExecEvent::Stderr(data) if order.stderr => Some(frames::stderr(&data)),
        _ => None,
    }
}

/// Reads the client until it leaves (`None`) or breaks the protocol (the words for it).
async fn listen(mut stream: SplitStream<Socket>, mut stdin: Option<mpsc::Sender<Vec<u8>>>) -> Option<String> {
    while let Some(message) = stream.next().await {
        let data = match message {
            Ok(Message::Binary(data)) => data,
            Ok(Message::Text(text)) => text.into(),
            Ok(Message::Close(_)) | Err(_) => return None,
            Ok(_) => continue,
        };
        match frames::read(&data) {
            Said::Stdin(data) => {
                for piece in data.chunks(STDIN_PIECE) {
                    // A guest that reads no more is no error: the exit code will come.
                    if let Some(open) = &stdin
                        && open.send(piece.to_vec()).await.is_err()
                    {
                        stdin = None;
                    }
                }
            }
            Said::StdinClosed => stdin = None,
            Said::Resize | Said::Nothing => {}
            Said::Wrong(why) => return Some(format!("the client broke the protocol: {why}")),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_needs_a_command_and_a_stream_and_takes_no_terminal() {
        let read = |query: &str| Order::read(&Query::parse(query));
        let order = read("command=sh&command=-c&command=exit%207&input=1&output=1&error=1").unwrap();
        assert_eq!(order.argv, ["sh", "-c", "exit 7"]);
        assert!(order.stdin && order.stdout && order.stderr);
        assert!(read("command=sh&stdout=true&tty=true").unwrap_err().contains("without -t"));
        assert!(read("output=1").is_err() && read("command=sh").is_err());
    }
}
