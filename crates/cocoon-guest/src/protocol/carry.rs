//! Frames over any byte stream.
//!
//! Entry points: [`FrameReader`] and [`FrameWriter`]. Invariant: a reader holds 64 KiB and what it reads at a
//! time (32 KiB), unless it has room for a large frame; then it holds one frame of at most [`MAX_FRAME`].

use std::sync::Arc;

use bytes::BufMut as _;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use super::{Frame, FrameError, MAX_FRAME, decode, encode};

/// How much is read at a time.
const READ_CHUNK: usize = 32 << 10;
/// Longest frame that a reader reads without asking for room. Agents send output in pieces of 32 KiB, 43 in
/// base64.
const SMALL_FRAME: usize = 64 << 10;

/// Room for large frames that several readers share: whoever gets none reads no further, until another reader
/// is done with its frame.
#[derive(Debug, Clone)]
pub struct LargeFrames(Arc<Semaphore>);

impl LargeFrames {
    /// Room for `frames` of up to 8 MiB at a time.
    #[must_use]
    pub fn new(frames: usize) -> Self {
        Self(Arc::new(Semaphore::new(frames)))
    }
}

/// Reads frames off a byte stream. [`FrameReader::next`] may be dropped and called again.
#[derive(Debug)]
pub struct FrameReader<R> {
    inner: R,
    buffer: Vec<u8>,
    /// Bytes of `buffer` already searched for a newline.
    searched: usize,
    room: LargeFrames,
    /// Held from when a frame turns out to be large until the one after it is asked for.
    large: Option<OwnedSemaphorePermit>,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// Reads from `inner`.
    pub fn new(inner: R) -> Self {
        Self::sharing(inner, LargeFrames::new(1))
    }

    /// Reads from `inner`; frames above 64 KiB only while there is `room`.
    pub fn sharing(inner: R, room: LargeFrames) -> Self {
        Self { inner, buffer: Vec::new(), searched: 0, room, large: None }
    }

    /// The next frame; `None` when the stream has ended. A last line without newline counts.
    pub async fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        if self.buffer.len() < SMALL_FRAME {
            self.large = None;
        }
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|&b| b == b'\n') {
                let end = self.searched + at;
                let frame = decode(&self.buffer[..end]);
                self.consume(end + 1);
                return frame.map(Some);
            }
            self.searched = self.buffer.len();
            if self.searched > MAX_FRAME {
                return Err(FrameError::TooLong);
            }
            if self.searched >= SMALL_FRAME && self.large.is_none() {
                // Nobody closes the semaphore, so this ends with a place.
                self.large = Arc::clone(&self.room.0).acquire_owned().await.ok();
            }
            self.buffer.reserve(READ_CHUNK);
            let mut room = (&mut self.buffer).limit(READ_CHUNK);
            if self.inner.read_buf(&mut room).await? == 0 {
                self.searched = 0;
                return match std::mem::take(&mut self.buffer) {
                    rest if rest.is_empty() => Ok(None),
                    rest => decode(&rest).map(Some).map_err(|_| FrameError::Truncated),
                };
            }
        }
    }

    fn consume(&mut self, n: usize) {
        self.buffer.drain(..n);
        self.searched = 0;
        // One huge frame must not keep its memory for the rest of a long session.
        if self.buffer.capacity() > 4 * SMALL_FRAME && self.buffer.len() < SMALL_FRAME {
            self.buffer.shrink_to(SMALL_FRAME);
        }
    }
}

/// Writes frames to a byte stream.
#[derive(Debug)]
pub struct FrameWriter<W> {
    inner: W,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// Writes to `inner`.
    pub fn new(inner: W) -> Self {
        Self { inner }
    }

    /// Writes one frame and flushes it.
    pub async fn send(&mut self, frame: &Frame) -> Result<(), FrameError> {
        self.inner.write_all(&encode(frame)?).await?;
        Ok(self.inner.flush().await?)
    }

    /// The stream itself.
    pub fn into_inner(self) -> W {
        self.inner
    }

    /// Ends the writing side, so that the peer sees the end of the stream.
    pub async fn close(&mut self) -> Result<(), FrameError> {
        Ok(self.inner.shutdown().await?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*};

    use super::{
        super::{Kind, tests::frame},
        *,
    };

    #[tokio::test]
    async fn only_so_many_large_frames_are_in_memory_at_a_time() {
        use tokio::time::{Duration, timeout};
        let room = LargeFrames::new(1);
        let reader = |bytes: Vec<u8>| {
            let (ours, mut theirs) = tokio::io::duplex(16 << 20);
            let sent = tokio::spawn(async move {
                theirs.write_all(&bytes).await.unwrap();
                theirs
            });
            (FrameReader::sharing(ours, room.clone()), sent)
        };
        let frame = |size| encode(&Frame::data(Kind::Stdout, vec![7; size])).unwrap();
        let soon = Duration::from_millis(200);
        let (mut open, sent) = reader(frame(1 << 20)[..1 << 20].to_vec());
        let mut rest = sent.await.unwrap();
        assert!(timeout(soon, open.next()).await.is_err(), "it is not complete");
        let (mut large, _sent) = reader([frame(10), frame(1 << 20)].concat());
        let (mut small, _sent) = reader(frame(32 << 10));
        assert_eq!(large.next().await.unwrap().unwrap().data.len(), 10);
        assert!(timeout(soon, large.next()).await.is_err(), "another large one is being read");
        assert!(large.buffer.capacity() < 256 << 10, "{}", large.buffer.capacity());
        assert_eq!(small.next().await.unwrap().unwrap().data.len(), 32 << 10);
        rest.write_all(&[&frame(1 << 20)[1 << 20..], &frame(1)].concat()).await.unwrap();
        assert_eq!(open.next().await.unwrap().unwrap().data.len(), 1 << 20);
        assert!(timeout(soon, large.next()).await.is_err(), "the first may still be worked on");
        assert_eq!(open.next().await.unwrap().unwrap().data.len(), 1);
        assert_eq!(large.next().await.unwrap().unwrap().data.len(), 1 << 20);
    }

    #[tokio::test]
    async fn an_endless_line_is_refused_before_it_fills_the_memory() {
        let mut frames = FrameReader::new(tokio::io::repeat(b' '));
        assert!(matches!(frames.next().await, Err(FrameError::TooLong)));
        assert!(frames.buffer.len() < MAX_FRAME + (1 << 20));
    }

    #[tokio::test]
    async fn a_last_line_without_newline_counts_and_then_the_stream_is_over() {
        let mut frames = FrameReader::new(&b"{\"type\":\"exit\"}\n{\"type\":\"stdin\"}"[..]);
        for want in [Some(Kind::Exit), Some(Kind::Stdin), None, None] {
            assert_eq!(frames.next().await.unwrap().map(|frame| frame.kind), want);
        }
        let mut cut = FrameReader::new(&b"{\"type\":\"ex"[..]);
        assert!(matches!(cut.next().await, Err(FrameError::Truncated)));
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_give_the_same_frames(
            frames in collection::vec(frame(), 0..5),
            sizes in collection::vec(1_usize..50, 1..20),
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|frame| encode(frame).unwrap()).collect();
            let mut builder = tokio_test_io(&bytes, &sizes);
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let got = runtime.block_on(async {
                let mut reader = FrameReader::new(&mut builder);
                let mut got = Vec::new();
                while let Some(frame) = reader.next().await.unwrap() {
                    got.push(frame);
                }
                got
            });
            prop_assert_eq!(got, frames);
        }
    }

    /// A reader that gives `bytes` in pieces of the sizes, over and over.
    fn tokio_test_io(bytes: &[u8], sizes: &[usize]) -> impl AsyncRead + Unpin {
        let mut pieces: Vec<std::io::Result<Vec<u8>>> = Vec::new();
        let (mut rest, mut sizes) = (bytes, sizes.iter().cycle());
        while !rest.is_empty() {
            let n = sizes.next().map_or(1, |&n| n.min(rest.len()));
            pieces.push(Ok(rest[..n].to_vec()));
            rest = &rest[n..];
        }
        tokio_util::io::StreamReader::new(futures::stream::iter(
            pieces.into_iter().map(|piece| piece.map(bytes::Bytes::from)),
        ))
    }
}
