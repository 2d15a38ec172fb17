//! How long a registry may say nothing: a folder on a server that went away neither answers nor fails.
//!
//! Entry points: [`answered`] for one call, [`lively`] for a body. Any byte counts as progress, so a slow registry
//! is waited for; how much comes in all is bounded by the sizes that the manifest states.
//!
//! Looks are counted, not time: after a machine that stood still, the registry gets its whole patience again.

use std::{
    future::Future,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, ReadBuf},
    time::Sleep,
};

use crate::registry::{Body, RegistryError};

/// Pause between two looks at something that does not come.
const LOOK: Duration = Duration::from_secs(1);
/// Looks without any progress after which a pull fails. 60 seconds: longer than a disk that writes back, or a server
/// that restarts, is silent, and a third of the 180 s that the operator gives a wake, so that a second try fits.
const STALL_LOOKS: u32 = 60;

/// The looks at something that does not come.
#[derive(Debug, Default)]
struct Looks {
    made: u32,
    next: Option<Pin<Box<Sleep>>>,
}

impl Looks {
    /// Ready when the patience is over.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let next = self.next.get_or_insert_with(|| Box::pin(tokio::time::sleep(LOOK)));
            ready!(next.as_mut().poll(context));
            self.next = None;
            self.made += 1;
            if self.made >= STALL_LOOKS {
                return Poll::Ready(());
            }
        }
    }
}

fn silent(what: &str) -> io::Error {
    let seconds = LOOK.as_secs() * u64::from(STALL_LOOKS);
    let message = format!(
        "{what}: the registry gave nothing for {seconds} seconds; see that its folder or server answers, then try again"
    );
    io::Error::new(io::ErrorKind::TimedOut, message)
}

/// What a call to a registry gives, or a failure when it stays silent. `what` names the object.
pub(crate) async fn answered<T>(
    what: &str,
    call: impl Future<Output = Result<T, RegistryError>>,
) -> Result<T, RegistryError> {
    let mut call = std::pin::pin!(call);
    let mut looks = Looks::default();
    std::future::poll_fn(|context| {
        if let Poll::Ready(answer) = call.as_mut().poll(context) {
            return Poll::Ready(answer);
        }
        ready!(looks.poll_over(context));
        Poll::Ready(Err(RegistryError::unavailable(format!("asking for {what}"), silent(what))))
    })
    .await
}

/// A body that fails with `TimedOut` when it stays silent. `what` names the object.
pub(crate) fn lively(inner: Body, what: &str) -> Body {
    Box::pin(Lively { inner, what: what.to_owned(), looks: Looks::default() })
}

struct Lively {
    inner: Body,
    what: String,
    looks: Looks,
}

impl AsyncRead for Lively {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = self.inner.as_mut().poll_read(context, buffer) {
            self.looks = Looks::default();
            return Poll::Ready(read);
        }
        ready!(self.looks.poll_over(context));
        Poll::Ready(Err(silent(&self.what)))
    }
}
