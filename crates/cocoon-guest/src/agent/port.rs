//! A virtio-serial port as an asynchronous byte stream, and the loop that serves it.
//!
//! Such a port reports a hang-up for as long as no host is connected, and recovers when one connects.
//! Tokio takes a hang-up for final, so the port sits in an edge-triggered epoll set of its own, and tokio
//! waits for *that*: no thread, no polling, no spinning while nobody is there.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use rustix::event::{Timespec, epoll};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf, unix::AsyncFd},
    time::{Sleep, sleep},
};

use super::{
    link::{self, Link},
    say,
    session::Machine,
};
use crate::{preamble::Preamble, sys};

/// Ports of one guest.
pub(crate) const PORTS: usize = 4;
/// How long a hang-up must last to be believed.
const GRACE: Duration = Duration::from_millis(200);

/// The device of a virtio-serial port by its name, once the kernel shows it.
fn find(name: &str) -> Option<PathBuf> {
    std::fs::read_dir("/sys/class/virtio-ports").ok()?.flatten().find_map(|entry| {
        let found = std::fs::read_to_string(entry.path().join("name")).ok()?;
        (found.trim() == name).then(|| Path::new("/dev").join(entry.file_name()))
    })
}

/// Serves port `index` for ever.
pub(crate) async fn serve(index: usize, machine: Arc<dyn Machine>) {
    let name = format!("cocoon.agent.{index}");
    let mut pause = Duration::from_millis(20);
    loop {
        match find(&name).map(|path| Port::open(&path)) {
            Some(Ok(port)) => {
                port.announce();
                pause = Duration::from_millis(20);
                let error = run(Link::new(port), &machine).await;
                say(&format!("port {name}: {error}"));
            }
            Some(Err(error)) => say(&format!("port {name}: {error}")),
            None => {}
        }
        // The port is not there yet, or another process (an agent before us) still has it.
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}

/// One connection after the other, until the port itself fails.
async fn run(mut link: Link<Port>, machine: &Arc<dyn Machine>) -> io::Error {
    loop {
        match link.greeted().await {
            Ok(true) => link::serve(&mut link, machine).await,
            Ok(false) => {}
            // The host hung up in the middle of the echo.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => return error,
        }
    }
}

/// One open port.
///
/// Data and news of the host travel in different queues: the first bytes of a new host may be here before
/// the kernel knows of it, and a host that came and went and came again may look gone for a moment. So a
/// hang-up counts only when it has lasted for [`GRACE`].
#[derive(Debug)]
pub(crate) struct Port {
    file: File,
    set: AsyncFd<OwnedFd>,
    readable: bool,
    writable: bool,
    /// Bytes have come since the last end of file, so the next one is news.
    connected: bool,
    /// Runs while a connected host seems to have hung up.
    grace: Option<Pin<Box<Sleep>>>,
}

impl Port {
    fn open(path: &Path) -> io::Result<Self> {
        let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(nonblock).open(path)?;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&set, file.as_fd(), epoll::EventData::new_u64(0), flags)?;
        let set = sys::watch(set)?;
        Ok(Self { file, set, readable: true, writable: true, connected: false, grace: None })
    }

    /// Tells a host that speaks with an agent before us that this one is gone. Nobody there is as good.
    fn announce(&self) {
        drop((&self.file).write(&Preamble::AGENT_STARTS.encode()));
    }

    /// Waits for news of the port; true when the host has been gone for long enough.
    fn poll_news(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<bool>> {
        loop {
            match self.set.poll_read_ready(cx)? {
                Poll::Ready(mut guard) => {
                    let mut events = Vec::with_capacity(1);
                    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
                    epoll::wait(guard.get_inner(), rustix::buffer::spare_capacity(&mut events), Some(&now))?;
                    guard.clear_ready();
                    let Some(event) = events.first() else { continue };
                    let flags = event.flags;
                    self.note(flags);
                    // The event may be for the other direction, which is polled by the same task.
                    cx.waker().wake_by_ref();
                    return Poll::Ready(Ok(false));
                }
                Poll::Pending => {
                    let Some(grace) = &mut self.grace else { return Poll::Pending };
                    ready!(grace.as_mut().poll(cx));
                    return Poll::Ready(Ok(true));
                }
            }
        }
    }

    fn note(&mut self, flags: epoll::EventFlags) {
        let gone = flags.contains(epoll::EventFlags::HUP);
        self.readable |= gone || flags.contains(epoll::EventFlags::IN);
        self.writable |= flags.contains(epoll::EventFlags::OUT);
        if gone {
            self.hung_up();
        } else {
            self.grace = None;
        }
    }

    fn hung_up(&mut self) {
        if self.connected && self.grace.is_none() {
            self.grace = Some(Box::pin(sleep(GRACE)));
        }
    }
}

impl AsyncRead for Port {
    /// Reads; an end of file is reported once per hang-up.
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.readable {
                if ready!(this.poll_news(cx))? {
                    (this.connected, this.grace) = (false, None);
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            match this.file.read(buf.initialize_unfilled()) {
                Ok(0) => {
                    this.readable = false;
                    this.hung_up();
                }
                Ok(n) => {
                    (this.connected, this.grace) = (true, None);
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => this.readable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Port {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        loop {
            if !this.writable {
                if ready!(this.poll_news(cx))? {
                    return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                }
                continue;
            }
            match this.file.write(buf) {
                Ok(n) => return Poll::Ready(Ok(n)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => this.writable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
