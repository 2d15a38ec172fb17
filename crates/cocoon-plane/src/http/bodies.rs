//! Bodies of requests, read within bounds.
//!
//! Entry point: [`Bodies::read`]. A body has at most [`LARGEST`] bytes and is read within [`PATIENCE`]; all that
//! are being read have at most [`TOGETHER`], counted by what their buffers take. When that is not enough, the one
//! that began first gives way: a client that goes on sending is done within milliseconds, so it is hardly ever that
//! one. So bodies that are sent half neither fill the memory nor keep anybody else from writing; and since an
//! allocator may keep what it once had, that is bounded, too. Invariant: `total` is the sum over `by`.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;

/// Largest body that is read.
pub(crate) const LARGEST: usize = 3 << 20;
/// Bytes of all bodies that are being read; several of the largest.
const TOGETHER: usize = 32 << 20;
/// How long a body may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// All bodies that are being read.
#[derive(Debug, Default)]
pub(crate) struct Bodies(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    total: usize,
    /// Bodies that gave way.
    refused: u64,
    next: u64,
    /// In the order in which they began.
    by: BTreeMap<u64, Reading>,
}

#[derive(Debug)]
struct Reading {
    bytes: usize,
    give_way: CancellationToken,
}

impl State {
    /// What `own` took more is counted, and others give way for it, the oldest first.
    fn grow(&mut self, own: u64, more: usize) {
        // Who gave way already counts no more; its reader is about to see that.
        let Some(reading) = self.by.get_mut(&own) else { return };
        reading.bytes += more;
        self.total += more;
        while self.total > TOGETHER {
            let oldest = self.by.iter().find(|(other, reading)| **other != own && reading.bytes > 0);
            let Some(oldest) = oldest.map(|(oldest, _)| *oldest) else { return };
            self.refused += 1;
            self.end(oldest);
        }
    }

    fn end(&mut self, own: u64) {
        if let Some(reading) = self.by.remove(&own) {
            self.total -= reading.bytes;
            reading.give_way.cancel();
        }
    }
}

impl Bodies {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are being read now, and how many bodies gave way so far.
    pub(crate) fn figures(&self) -> (usize, u64) {
        let state = self.state();
        (state.total, state.refused)
    }

    /// The whole body.
    pub(crate) async fn read(&self, body: Body) -> Result<Bytes, ApiError> {
        let (place, give_way) = self.enter();
        tokio::select! {
            biased;
            () = give_way.cancelled() => Err(gave_way()),
            read = timeout(PATIENCE, place.fill(body)) => read.unwrap_or_else(|_| Err(too_slow())),
        }
    }

    fn enter(&self) -> (Place<'_>, CancellationToken) {
        let mut state = self.state();
        let (own, give_way) = (state.next, CancellationToken::new());
        state.next += 1;
        state.by.insert(own, Reading { bytes: 0, give_way: give_way.clone() });
        drop(state);
        (Place { bodies: self, own }, give_way)
    }
}

/// One body's part; given back when dropped.
struct Place<'a> {
    bodies: &'a Bodies,
    own: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.bodies.state().end(self.own);
    }
}

impl Place<'_> {
    /// Copied together: a client that sends byte by byte must not get a buffer for each.
    async fn fill(&self, mut body: Body) -> Result<Bytes, ApiError> {
        let mut whole = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame
                .map_err(|error| ApiError::bad_request(format!("the body could not be read: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if whole.len() + data.len() > LARGEST {
                return Err(too_large());
            }
            let before = whole.capacity();
            whole.reserve(data.len());
            self.bodies.state().grow(self.own, whole.capacity() - before);
            whole.extend_from_slice(&data);
        }
        Ok(whole.into())
    }
}

fn too_large() -> ApiError {
    let message = format!("Request entity too large: limit is {LARGEST}");
    ApiError::new(413, "RequestEntityTooLarge", message)
}

fn too_slow() -> ApiError {
    let message = format!("the body was not sent within {} s; send it again", PATIENCE.as_secs());
    ApiError::new(408, "Timeout", message)
}

fn gave_way() -> ApiError {
    let message = format!(
        "the body was still being sent while others wanted its place ({} MiB for all that are being sent); send it \
         again",
        TOGETHER >> 20
    );
    ApiError::new(429, "TooManyRequests", message)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::{StreamExt as _, stream};
    use proptest::prelude::*;
    use tokio::task::JoinHandle;

    use super::*;

    /// A body of `size` bytes in pieces, whose end comes (`whole`) or never does.
    fn body(size: usize, piece: usize, whole: bool) -> Body {
        let pieces = (0..size.div_ceil(piece)).map(move |index| piece.min(size - index * piece));
        let pieces =
            stream::iter(pieces.map(|length| Ok::<_, std::io::Error>(Bytes::from(vec![b'x'; length]))));
        if whole { Body::from_stream(pieces) } else { Body::from_stream(pieces.chain(stream::pending())) }
    }

    fn start(bodies: &Arc<Bodies>, body: Body) -> JoinHandle<Result<Bytes, ApiError>> {
        let bodies = Arc::clone(bodies);
        tokio::spawn(async move { bodies.read(body).await })
    }

    fn code(read: Result<Bytes, ApiError>) -> u16 {
        read.map_or_else(|error| error.status()["code"].as_u64().unwrap().try_into().unwrap(), |_| 200)
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_read_whole_up_to_its_limit() {
        let bodies = Bodies::default();
        for (size, piece, expected) in [
            (0, 1, 200),
            (1, 1, 200),
            (LARGEST, 1000, 200),
            (LARGEST, LARGEST, 200),
            (LARGEST + 1, 1000, 413),
        ] {
            let read = bodies.read(body(size, piece, true)).await;
            assert!(read.as_ref().map_or(true, |bytes| bytes.len() == size), "{size}");
            assert_eq!(code(read), expected, "{size} in {piece}");
        }
        assert_eq!(bodies.figures(), (0, 0), "all is given back");
    }

    #[tokio::test(start_paused = true)]
    async fn half_sent_bodies_stay_within_the_bound_and_nobody_else_waits_for_them() {
        let bodies = Arc::new(Bodies::default());
        let mut half = Vec::new();
        for _ in 0..100 {
            half.push(start(&bodies, body(LARGEST - 1, 64 << 10, false)));
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert!(bodies.figures().0 <= TOGETHER, "{:?}", bodies.figures());
        }
        assert_eq!(code(bodies.read(body(LARGEST, 64 << 10, true)).await), 200, "one that goes on is read");
        assert_eq!(code(bodies.read(body(100, 10, true)).await), 200);
        let last = half.pop().unwrap();
        assert!(!last.is_finished(), "the oldest give way, not the newest");
        for first in half.drain(..80) {
            assert_eq!(code(first.await.unwrap()), 429);
        }
        drop((half, last));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_ends_is_answered_in_time_and_gives_back_its_place() {
        let bodies = Arc::new(Bodies::default());
        let (slow, begun) = (start(&bodies, body(10, 1, false)), tokio::time::Instant::now());
        assert_eq!(code(slow.await.unwrap()), 408);
        assert_eq!(begun.elapsed(), PATIENCE);
        let abandoned = start(&bodies, body(1000, 10, false));
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(bodies.figures().0 >= 1000);
        abandoned.abort();
        assert!(abandoned.await.is_err());
        assert_eq!(bodies.figures(), (0, 0), "of a client that went, too");
    }

    proptest! {
        #[test]
        fn whatever_grows_and_ends_the_sum_is_right_and_within_the_bound(
            steps in proptest::collection::vec((0..12_u64, 0..LARGEST, any::<bool>()), 0..200)
        ) {
            let mut state = State::default();
            for (own, more, ends) in steps {
                if ends {
                    state.end(own);
                } else {
                    let give_way = CancellationToken::new();
                    state.by.entry(own).or_insert(Reading { bytes: 0, give_way });
                    // A body's own limit.
                    let room = 2 * LARGEST - state.by[&own].bytes.min(2 * LARGEST);
                    state.grow(own, more.min(room));
                }
                prop_assert!(state.total <= TOGETHER);
                prop_assert_eq!(state.total, state.by.values().map(|reading| reading.bytes).sum::<usize>());
            }
        }
    }
}
