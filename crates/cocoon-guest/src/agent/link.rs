//! The agent's end of one port: preambles found in what arrives, the rest handed to `yamux`.
//!
//! Entry points: [`Link::greeted`] waits for a host, [`serve`] serves one. A preamble may come at any
//! time (a restored guest learns of its new host in no other way), so everything read is searched. The
//! bytes of a beginning preamble are passed on all the same: `yamux` chokes on them at worst, on a
//! connection that is over anyway; and nothing is ever held back from a live one.
//!
//! What `yamux` writes is always taken, whether or not the port takes it. `yamux` reads no further while it owes
//! an answer to a ping that it cannot write; were that so at both ends, with a full port in between, neither
//! would ever read again. What waits here is no more than the host made room for: 256 KiB a session.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, BytesMut};
use futures::io::{AsyncRead as FuturesRead, AsyncWrite as FuturesWrite};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    sync::Semaphore,
    task::JoinSet,
    time::sleep,
};
use tokio_util::compat::{FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

use super::session::{self, Machine};
use crate::{
    MAX_SESSIONS,
    preamble::{Epoch, MAGIC, Matcher, Preamble, Role},
    protocol::{Frame, FrameWriter},
    yamux_config,
};

const READ_CHUNK: usize = 32 << 10;
/// How often a session looks whether its client reset the stream while nothing else would tell.
const GONE_POLL: Duration = Duration::from_secs(1);

/// A port with its search for preambles.
#[derive(Debug)]
pub struct Link<T> {
    io: T,
    /// Taken from `yamux`, and not yet by the port.
    out: BytesMut,
    /// Read, and not searched yet from `at` on.
    buffer: Vec<u8>,
    at: usize,
    matcher: Matcher,
    epoch: Option<Epoch>,
    /// No byte of `yamux` has come since the last preamble, so repeated preambles may.
    fresh: bool,
    /// The preamble of the next connection, found in the present one.
    next: Option<Preamble>,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Link<T> {
    /// Serves `io`.
    pub fn new(io: T) -> Self {
        Self {
            io,
            out: BytesMut::new(),
            buffer: Vec::new(),
            at: 0,
            matcher: Matcher::default(),
            epoch: None,
            fresh: false,
            next: None,
        }
    }

    /// Drops everything up to the next preamble of a host, and echoes that. False when the port ended.
    pub async fn greeted(&mut self) -> io::Result<bool> {
        loop {
            if let Some(preamble) = self.next.take() {
                self.epoch = Some(preamble.epoch);
                self.fresh = true;
                // Nobody listens to the older connection any more.
                self.out = BytesMut::new();
                let echo = Preamble { role: Role::Agent, ..preamble };
                self.io.write_all(&echo.encode()).await?;
                self.io.flush().await?;
                return Ok(true);
            }
            if self.at == self.buffer.len() && !self.fill().await? {
                return Ok(false);
            }
            let (used, found) = self.matcher.find(&self.buffer[self.at..]);
            self.at += used;
            self.next = found.filter(|preamble| preamble.role == Role::Host);
        }
    }

    async fn fill(&mut self) -> io::Result<bool> {
        self.at = 0;
        self.buffer.clear();
        self.buffer.reserve(READ_CHUNK);
        Ok(self.io.read_buf(&mut self.buffer).await? > 0)
    }

    /// Takes bytes for `yamux` from what was read; none when all of it was preamble.
    fn take(&mut self, room: usize) -> &[u8] {
        if self.fresh && self.skip_repeats() {
            return &[];
        }
        let end = self.buffer.len().min(self.at + room);
        let (used, found) = self.matcher.find(&self.buffer[self.at..end]);
        self.next = found.filter(|preamble| preamble.role == Role::Host);
        let begin = self.at;
        self.at += used;
        &self.buffer[begin..self.at]
    }

    /// Skips repetitions of this connection's preamble. True when all bytes at hand went into that.
    fn skip_repeats(&mut self) -> bool {
        while self.matcher.pending() || self.buffer.get(self.at) == Some(&MAGIC[0]) {
            let (used, found) = self.matcher.find(&self.buffer[self.at..]);
            self.at += used;
            match found {
                Some(preamble) if Some(preamble.epoch) == self.epoch => {}
                Some(preamble) => {
                    self.next = Some(preamble);
                    return true;
                }
                None => return true,
            }
        }
        if self.at == self.buffer.len() {
            return true;
        }
        self.fresh = false;
        false
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Link<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.next.is_some() {
                return Poll::Ready(Ok(()));
            }
            if this.at == this.buffer.len() {
                this.at = 0;
                this.buffer.resize(READ_CHUNK, 0);
                let mut read = ReadBuf::new(&mut this.buffer);
                let polled = Pin::new(&mut this.io).poll_read(cx, &mut read);
                let n = read.filled().len();
                this.buffer.truncate(if polled.is_ready() { n } else { 0 });
                ready!(polled)?;
                if n == 0 {
                    return Poll::Ready(Ok(()));
                }
            }
            let bytes = this.take(buf.remaining());
            if !bytes.is_empty() {
                buf.put_slice(bytes);
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> Link<T> {
    /// Gives the port what waits for it. `yamux` flushes whenever it is polled, so this goes on by itself.
    fn drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            match ready!(Pin::new(&mut self.io).poll_write(cx, &self.out))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n => self.out.advance(n),
            }
        }
        // Not kept for the rest of a long connection.
        self.out = BytesMut::new();
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Link<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.drain(cx)?.is_ready()
            && let Poll::Ready(written) = Pin::new(&mut self.io).poll_write(cx, buf)
        {
            return Poll::Ready(written);
        }
        self.out.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.drain(cx))?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The port outlives every connection on it.
        Poll::Ready(Ok(()))
    }
}

/// Serves one greeted connection until the host hangs up or another one begins. Its sessions end with it.
pub async fn serve<T>(link: &mut Link<T>, machine: &Arc<dyn Machine>)
where
    T: AsyncRead + AsyncWrite + Send + Unpin,
{
    let mut connection = yamux::Connection::new(link.compat(), yamux_config(), yamux::Mode::Server);
    let permits = Arc::new(Semaphore::new(MAX_SESSIONS));
    let mut sessions = JoinSet::new();
    loop {
        let inbound = std::future::poll_fn(|cx| connection.poll_next_inbound(cx));
        tokio::select! {
            biased;
            inbound = inbound => {
                let Some(Ok(stream)) = inbound else { break };
                let (machine, permits) = (Arc::clone(machine), Arc::clone(&permits));
                sessions.spawn(async move { one(stream, &*machine, &permits).await });
            }
            Some(_) = sessions.join_next() => {}
        }
    }
    sessions.shutdown().await;
}

async fn one(stream: yamux::Stream, machine: &dyn Machine, permits: &Semaphore) {
    let stream = Shared(Arc::new(std::sync::Mutex::new(stream)));
    let Ok(_permit) = permits.try_acquire() else {
        let mut writer = FrameWriter::new(stream.compat());
        drop(writer.send(&Frame::error(format!("{MAX_SESSIONS} sessions are running; end one first"))).await);
        drop(writer.close().await);
        return;
    };
    let watched = stream.clone();
    session::serve(stream.compat(), machine, async move {
        while !watched.is_closed() {
            sleep(GONE_POLL).await;
        }
    })
    .await;
}

/// A stream that can be asked whether it is gone while halves of it are in use, and whose reset reads as
/// an error rather than as the end of input.
#[derive(Debug, Clone)]
struct Shared(Arc<std::sync::Mutex<yamux::Stream>>);

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, yamux::Stream> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn is_closed(&self) -> bool {
        self.lock().is_closed()
    }
}

impl FuturesRead for Shared {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut stream = self.lock();
        match ready!(Pin::new(&mut *stream).poll_read(cx, buf))? {
            0 if stream.is_closed() => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            n => Poll::Ready(Ok(n)),
        }
    }
}

impl FuturesWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.lock()).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.lock()).poll_flush(cx)
    }

    fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.lock()).poll_close(cx)
    }
}
