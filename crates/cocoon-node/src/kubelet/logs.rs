//! Container logs: the guest's console.

use std::{
    convert::Infallible,
    io::{self, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{Response, StatusCode};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use jiff::Timestamp;
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncSeekExt as _},
};

use super::{Body, Found, console::Plain, query::Query, text, waiting};
use crate::{
    owner::{Context, directory::Seat},
    reason::Reason,
};

/// The engine keeps a console of at most 4 MiB; twice that is read at once.
const MOST: u64 = 8 << 20;
const PIECE: usize = 64 << 10;
const FOLLOW: Duration = Duration::from_millis(250);

/// What of the log is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Want {
    tail: Option<u64>,
    limit: Option<u64>,
    follow: bool,
    since: Option<Timestamp>,
}

impl Want {
    fn read(query: &Query, now: Timestamp) -> Result<Self, String> {
        if query.flag(&["previous"]) {
            return Err(
                "previous: a VM has one console, which goes on over restarts; leave previous out".into()
            );
        }
        if query.flag(&["timestamps"]) {
            return Err("timestamps: a guest's console has no times; leave timestamps out".into());
        }
        let seconds = query.number("sinceSeconds")?;
        let time = query.first("sinceTime");
        let since = match (seconds, time) {
            (Some(_), Some(_)) => return Err("sinceSeconds and sinceTime exclude one another".into()),
            (Some(seconds), None) => {
                let seconds = i64::try_from(seconds).unwrap_or(i64::MAX / 2_000_000_000);
                Some(now.checked_sub(jiff::SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN))
            }
            (None, Some(text)) => {
                Some(text.parse().map_err(|_| format!("sinceTime={text:?} is not an RFC 3339 time"))?)
            }
            (None, None) => None,
        };
        let (tail, limit) = (query.number("tailLines")?, query.number("limitBytes")?);
        Ok(Self { tail, limit, follow: query.flag(&["follow"]), since })
    }
}

pub(super) async fn serve(context: &Arc<Context>, found: &Found, query: &str) -> Response<Body> {
    let seat = &found.seat;
    let want = match Want::read(&Query::parse(query), context.world.now()) {
        Ok(want) => want,
        Err(why) => return text(StatusCode::BAD_REQUEST, why),
    };
    if seat.vm_id.is_empty() {
        return text(StatusCode::BAD_REQUEST, waiting::for_logs(&found.pod));
    }
    let path = match context.ports.guest.console(&seat.vm_id).await {
        Ok(path) => path,
        Err(error) if error.reason == Reason::VMGone => {
            return text(StatusCode::NOT_FOUND, error.trouble().message);
        }
        Err(error) => return text(StatusCode::INTERNAL_SERVER_ERROR, error.trouble().message),
    };
    match start(&path, &want).await {
        Ok(begun) if !want.follow => Response::new(Full::new(begun.first).boxed_unsync()),
        Ok(begun) => follow(Arc::clone(context), seat.clone(), path, begun, want.limit),
        Err(error) => {
            text(StatusCode::INTERNAL_SERVER_ERROR, format!("console of VM {}: {error}", seat.vm_name))
        }
    }
}

/// A log that was begun.
struct Begun {
    /// What of it there is now.
    first: Bytes,
    /// Where the file goes on.
    position: u64,
    /// The filter at that point.
    plain: Plain,
}

async fn start(path: &Path, want: &Want) -> io::Result<Begun> {
    let mut begun = Begun { first: Bytes::new(), position: 0, plain: Plain::default() };
    let mut file = match File::open(path).await {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(begun),
        Err(error) => return Err(error),
    };
    let facts = file.metadata().await?;
    begun.position = facts.len();
    if want.since.is_some_and(|since| older(facts.modified().ok(), since)) {
        return Ok(begun);
    }
    begun.position = file.seek(SeekFrom::Start(begun.position.saturating_sub(MOST))).await?;
    let mut content = Vec::new();
    // It may have grown meanwhile; what was read is not read again.
    begun.position += file.take(MOST).read_to_end(&mut content).await? as u64;
    begun.first = cut(begun.plain.pass(&content), want);
    Ok(begun)
}

/// Nothing was written since: there is no line that could be newer.
fn older(modified: Option<SystemTime>, since: Timestamp) -> bool {
    modified.and_then(|time| Timestamp::try_from(time).ok()).is_some_and(|modified| modified < since)
}

/// The last `tail` lines, of them the first `limit` bytes.
fn cut(content: Vec<u8>, want: &Want) -> Bytes {
    let start = want.tail.map_or(0, |tail| tail_start(&content, tail));
    let end = want.limit.map_or(content.len(), |limit| {
        start.saturating_add(usize::try_from(limit).unwrap_or(usize::MAX)).min(content.len())
    });
    Bytes::from(content).slice(start..end)
}

/// Where the last `lines` lines begin.
fn tail_start(content: &[u8], lines: u64) -> usize {
    let Ok(lines) = usize::try_from(lines) else { return 0 };
    if lines == 0 {
        return content.len();
    }
    // A newline at the very end closes the last line; it does not begin another.
    let body = content.strip_suffix(b"\n").unwrap_or(content);
    let newlines = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at);
    newlines.skip(lines - 1).map(|at| at + 1).next().unwrap_or(0)
}

/// A log that is being followed.
struct Following {
    context: Arc<Context>,
    seat: Seat,
    path: PathBuf,
    first: Option<Bytes>,
    position: u64,
    plain: Plain,
    left: u64,
}

fn follow(
    context: Arc<Context>,
    seat: Seat,
    path: PathBuf,
    begun: Begun,
    limit: Option<u64>,
) -> Response<Body> {
    let left = limit.unwrap_or(u64::MAX);
    let Begun { first, position, plain } = begun;
    let state = Following { context, seat, path, first: Some(first), position, plain, left };
    let pieces =
        stream::unfold(state, |mut state| async move { state.next().await.map(|piece| (piece, state)) });
    let frames = pieces.map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
    Response::new(StreamBody::new(frames).boxed_unsync())
}

impl Following {
    /// The next piece; `None` ends the log: enough was sent, or the VM is another one or gone.
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            self.left = self.left.saturating_sub(first.len() as u64);
            return Some(first);
        }
        loop {
            if self.left == 0 || self.context.shutdown.is_cancelled() {
                return None;
            }
            let read = self.read().await.ok()?;
            let mut piece = self.plain.pass(&read);
            piece.truncate(usize::try_from(self.left).unwrap_or(usize::MAX));
            if !piece.is_empty() {
                self.left -= piece.len() as u64;
                return Some(piece.into());
            }
            if !read.is_empty() {
                continue;
            }
            if !self.context.directory.has_vm(&self.seat.vm_id) {
                return None;
            }
            tokio::time::sleep(FOLLOW).await;
        }
    }

    async fn read(&mut self) -> io::Result<Vec<u8>> {
        let mut file = File::open(&self.path).await?;
        if file.metadata().await?.len() < self.position {
            // The engine cut it.
            self.position = 0;
            self.plain = Plain::default();
        }
        file.seek(SeekFrom::Start(self.position)).await?;
        let mut piece = vec![0; PIECE];
        let count = file.read(&mut piece).await?;
        piece.truncate(count);
        self.position += count as u64;
        Ok(piece)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn want(query: &str) -> Result<Want, String> {
        Want::read(&Query::parse(query), Timestamp::UNIX_EPOCH)
    }

    #[test]
    fn tail_counts_lines_and_limit_counts_bytes_of_them() {
        let log = || b"one\ntwo\nthree\n".to_vec();
        for (query, expected) in [
            ("", "one\ntwo\nthree\n"),
            ("tailLines=2", "two\nthree\n"),
            ("tailLines=0", ""),
            ("tailLines=99", "one\ntwo\nthree\n"),
            ("tailLines=2&limitBytes=5", "two\nt"),
        ] {
            assert_eq!(cut(log(), &want(query).unwrap()), expected, "{query}");
        }
    }

    #[test]
    fn what_a_console_cannot_answer_is_refused_in_words() {
        for query in [
            "tailLines=-1",
            "limitBytes=x",
            "previous=true",
            "timestamps=true",
            "sinceTime=x",
            "sinceTime=2020-01-01T00:00:00Z&sinceSeconds=1",
        ] {
            assert!(!want(query).unwrap_err().is_empty(), "{query}");
        }
        assert_eq!(want("sinceSeconds=10").unwrap().since, Some(Timestamp::from_second(-10).unwrap()));
    }

    proptest! {
        #[test]
        fn a_tail_never_has_more_lines_than_were_asked_for(text in "[a\n]{0,40}", lines in 0_u64..6) {
            let start = tail_start(text.as_bytes(), lines);
            let rest = &text[start..];
            prop_assert!(rest.lines().count() as u64 <= lines);
            prop_assert!(start == 0 || lines == 0 || text.as_bytes()[start - 1] == b'\n');
        }
    }
}
