//! One `yamux` connection to a guest port: the greeting, and the task that drives it.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use rustix::rand::{GetRandomFlags, getrandom};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, timeout_at},
};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

use super::GuestError;
use crate::{
    preamble::{Matcher, Preamble, Role},
    yamux_config,
};

/// First pause before the preamble is repeated; doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// A session's byte stream.
pub(crate) type Stream = Compat<yamux::Stream>;

/// Greets the agent; what comes back reads from just behind the echo.
pub(crate) async fn greet<T>(mut io: T, limit: Duration) -> Result<Behind<T>, GuestError>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let deadline = Instant::now() + limit;
    let preamble = Preamble { role: Role::Host, epoch: fresh_epoch()? };
    let mut echo = Echo { want: Preamble { role: Role::Agent, ..preamble }, matcher: Matcher::default() };
    let mut pause = RETRY_MIN;
    loop {
        timeout_at(deadline, io.write_all(&preamble.encode()))
            .await
            .map_err(|_| GuestError::Silent(limit))??;
        let until = deadline.min(Instant::now() + pause);
        match timeout_at(until, echo.wait(&mut io)).await {
            Ok(rest) => return Ok(Behind { rest: rest?, io, matcher: Matcher::default(), over: false }),
            Err(_) if Instant::now() >= deadline => return Err(GuestError::Silent(limit)),
            Err(_) => pause = (pause * 2).min(RETRY_MAX),
        }
    }
}

fn fresh_epoch() -> io::Result<[u8; 16]> {
    let mut epoch = [0; 16];
    getrandom(&mut epoch, GetRandomFlags::empty())?;
    Ok(epoch)
}

/// Skips whatever older connections left in the port.
struct Echo {
    want: Preamble,
    matcher: Matcher,
}

impl Echo {
    /// Waits for the echo; returns the bytes read behind it. May be dropped and called again.
    async fn wait<T: AsyncRead + Unpin>(&mut self, io: &mut T) -> Result<Vec<u8>, GuestError> {
        let mut buffer = vec![0; 16 << 10];
        loop {
            let n = io.read(&mut buffer).await?;
            if n == 0 {
                return Err(GuestError::Closed);
            }
            let mut at = 0;
            while at < n {
                let (used, found) = self.matcher.find(&buffer[at..n]);
                at += used;
                if found == Some(self.want) {
                    return Ok(buffer[at..n].to_vec());
                }
            }
        }
    }
}

/// What comes behind the echo; ends where another preamble does.
#[derive(Debug)]
pub(crate) struct Behind<T> {
    /// Bytes read together with the echo.
    rest: Vec<u8>,
    io: T,
    matcher: Matcher,
    over: bool,
}

impl<T: AsyncRead + Unpin> AsyncRead for Behind<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over {
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        if self.rest.is_empty() {
            ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        } else {
            let n = self.rest.len().min(buf.remaining());
            buf.put_slice(&self.rest[..n]);
            self.rest.drain(..n);
        }
        // The bytes up to there are of no use to anybody; `yamux` may have them.
        self.over = self.matcher.find(&buf.filled()[before..]).1.is_some();
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Behind<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

type Request = oneshot::Sender<Result<yamux::Stream, yamux::ConnectionError>>;

/// The way to the task that owns the connection; dropping it ends the connection.
#[derive(Debug)]
pub(crate) struct Handle {
    requests: mpsc::Sender<Request>,
    task: JoinHandle<()>,
}

impl Handle {
    /// Starts the task.
    pub(crate) fn spawn<T>(io: T) -> Self
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (requests, inbox) = mpsc::channel(16);
        let connection = yamux::Connection::new(io.compat(), yamux_config(), yamux::Mode::Client);
        let driver = Driver { connection, inbox, waiting: VecDeque::new() };
        Self { requests, task: tokio::spawn(driver) }
    }

    /// A new stream.
    pub(crate) async fn stream(&self) -> Result<Stream, GuestError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(reply).await.map_err(|_| GuestError::Closed)?;
        let stream = answer.await.map_err(|_| GuestError::Closed)?;
        stream.map(FuturesAsyncReadCompatExt::compat).map_err(|e| GuestError::Protocol(e.to_string()))
    }

    /// Waits for the end of the connection.
    pub(crate) async fn closed(&self) {
        self.requests.closed().await;
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Drives the connection: requests for streams out, everything else inside `yamux`.
struct Driver<T> {
    connection: yamux::Connection<Compat<T>>,
    inbox: mpsc::Receiver<Request>,
    waiting: VecDeque<Request>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Future for Driver<T> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        while let Poll::Ready(Some(request)) = this.inbox.poll_recv(cx) {
            this.waiting.push_back(request);
        }
        while let Some(request) = this.waiting.pop_front() {
            match this.connection.poll_new_outbound(cx) {
                Poll::Ready(stream) => drop(request.send(stream)),
                Poll::Pending => {
                    this.waiting.push_front(request);
                    break;
                }
            }
        }
        loop {
            match this.connection.poll_next_inbound(cx) {
                // A guest has no business opening streams; dropping one resets it.
                Poll::Ready(Some(Ok(stream))) => drop(stream),
                Poll::Ready(Some(Err(error))) => {
                    tracing::debug!(%error, "guest channel ended");
                    return Poll::Ready(());
                }
                Poll::Ready(None) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}
