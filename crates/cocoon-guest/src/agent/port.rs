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
    time::sleep,
};

use super::{
    link::{self, Link},
    say,
    session::Machine,
};
use crate::sys;

/// Ports of one guest.
pub(crate) const PORTS: usize = 4;

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
#[derive(Debug)]
pub(crate) struct Port {
    file: File,
    set: AsyncFd<OwnedFd>,
    readable: bool,
    writable: bool,
    /// The last event said that no host is connected.
    hung_up: bool,
    /// Bytes have come since the last end of file, so the next one is news.
    connected: bool,
}

impl Port {
    fn open(path: &Path) -> io::Result<Self> {
        let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).write(true).custom_flags(nonblock).open(path)?;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&set, file.as_fd(), epoll::EventData::new_u64(0), flags)?;
        let set = sys::watch(set)?;
        Ok(Self { file, set, readable: true, writable: true, hung_up: false, connected: false })
    }

    /// Waits for news of the port.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.set.poll_read_ready(cx))?;
            let mut events = Vec::with_capacity(1);
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            epoll::wait(guard.get_inner(), rustix::buffer::spare_capacity(&mut events), Some(&now))?;
            guard.clear_ready();
            let Some(event) = events.first() else { continue };
            let flags = event.flags;
            self.hung_up = flags.contains(epoll::EventFlags::HUP);
            self.readable |= flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP);
            self.writable |= flags.contains(epoll::EventFlags::OUT);
            // The event may be for the other direction, which is polled by the same task.
            cx.waker().wake_by_ref();
            return Poll::Ready(Ok(()));
        }
    }
}

impl AsyncRead for Port {
    /// Reads; an end of file is reported once per hang-up.
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.readable {
                ready!(this.poll_event(cx))?;
                continue;
            }
            match this.file.read(buf.initialize_unfilled()) {
                Ok(0) => {
                    this.readable = false;
                    if std::mem::take(&mut this.connected) {
                        return Poll::Ready(Ok(()));
                    }
                }
                Ok(n) => {
                    this.connected = true;
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
            if this.hung_up {
                // What we know may be older than the host that is there now.
                return match this.poll_event(cx) {
                    Poll::Ready(Ok(())) => continue,
                    Poll::Ready(error) => Poll::Ready(error.map(|()| 0)),
                    Poll::Pending => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                };
            }
            if !this.writable {
                ready!(this.poll_event(cx))?;
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
