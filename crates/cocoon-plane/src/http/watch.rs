//! Watches.
//!
//! Entry point: [`answer`]. Flow: current objects first if the client asked for them (no revision, revision
//! 0, or `sendInitialEvents`), then a bookmark that ends them, then events in order of revision, with
//! a bookmark each minute. Whatever fails after the request was understood is told as an ERROR event, as the
//! API does. Guarantee: an event is sent only once it is durable.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use futures::stream;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{
    Call,
    path::Address,
    verbs::{filter, revision},
    view::{Presenter, View},
};
use crate::{
    error::{ApiError, respond},
    plane::{Inner, Response},
    resources::Kind,
    store::{Change, Filter, Notice, Subscription},
};

/// Time between bookmarks.
const BOOKMARKS: Duration = Duration::from_secs(60);
/// A watch without a limit of its own ends after half an hour to an hour.
const LONGEST: Duration = Duration::from_secs(1800);
/// Most events joined in one chunk.
const JOINED: usize = 64;

/// Ends the watches of a server that shuts down; in the request's extensions.
#[derive(Debug, Clone)]
pub(crate) struct Closing(pub(crate) CancellationToken);

struct Watch {
    inner: Arc<Inner>,
    presenter: Presenter,
    subscription: Subscription,
    /// What to send before the queue, and the revision to reach before it is sent.
    first: Vec<Notice>,
    initial_end: Option<u64>,
    headed: bool,
    bookmarks: bool,
    next_bookmark: Instant,
    deadline: Instant,
    closing: CancellationToken,
}

pub(super) fn answer(call: &Call, kind: &'static Kind, address: &Address) -> Result<Response, ApiError> {
    let filter = filter(call, kind, address)?;
    let presenter = Presenter {
        kind,
        view: View::of(&call.parts.headers, &call.params)?,
        now: call.inner.objects.world().now(),
    };
    let initial = call.params.flag("sendInitialEvents")?;
    if initial && call.params.get("resourceVersionMatch") != "NotOlderThan" {
        let message = "sendInitialEvents is forbidden without resourceVersionMatch=NotOlderThan";
        return Err(ApiError::bad_request(message));
    }
    let start = if initial { None } else { revision(call)?.filter(|revision| *revision > 0) };
    let Some((subscription, first, initial_end)) = subscribe(&call.inner, &filter, start, initial) else {
        return Ok(expired(&call.inner, start.unwrap_or_default()));
    };
    let world = call.inner.objects.world();
    let timeout = match call.params.number("timeoutSeconds")? {
        Some(seconds) if seconds > 0 => Duration::from_secs(seconds.min(86_400)),
        _ => LONGEST.mul_f64(1.0 + world.fraction()),
    };
    let now = world.instant();
    let closing = call.parts.extensions.get::<Closing>().map(|closing| closing.0.clone());
    let watch = Watch {
        inner: Arc::clone(&call.inner),
        presenter,
        subscription,
        first,
        initial_end,
        headed: true,
        bookmarks: call.params.flag("allowWatchBookmarks")?,
        next_bookmark: now + BOOKMARKS,
        deadline: now + timeout,
        closing: closing.unwrap_or_default(),
    };
    let chunks = stream::unfold(watch, |mut watch| async {
        let chunk = watch.next().await?;
        Some((Ok::<_, std::convert::Infallible>(chunk), watch))
    });
    Ok(respond(200, "application/json", axum::body::Body::from_stream(chunks)))
}

type Start = (Subscription, Vec<Notice>, Option<u64>);

/// `None` when the window does not reach back to `start`.
fn subscribe(inner: &Inner, filter: &Filter, start: Option<u64>, initial: bool) -> Option<Start> {
    let mut store = inner.objects.store();
    if let Some(start) = start {
        let (backlog, subscription) = store.subscribe_after(filter, start)?;
        return Some((subscription, backlog, None));
    }
    let (objects, revision) = store.list(filter);
    let subscription = store.subscribe(filter);
    let first = objects.into_iter().map(|object| Notice::Change(Change::Added, object)).collect();
    Some((subscription, first, initial.then_some(revision)))
}

fn expired(inner: &Inner, start: u64) -> Response {
    let oldest = inner.objects.store().oldest();
    let error = ApiError::expired(format!("too old resource version: {start} ({oldest})"));
    let frame = event("ERROR", error.status().to_string().as_bytes());
    respond(200, "application/json", frame.freeze())
}

fn event(word: &str, object: &[u8]) -> BytesMut {
    let mut frame = BytesMut::with_capacity(object.len() + 40);
    frame.extend_from_slice(b"{\"type\":\"");
    frame.extend_from_slice(word.as_bytes());
    frame.extend_from_slice(b"\",\"object\":");
    frame.extend_from_slice(object);
    frame.extend_from_slice(b"}\n");
    frame
}

impl Watch {
    /// The next chunk; `None` ends the watch.
    async fn next(&mut self) -> Option<Bytes> {
        if !self.first.is_empty() || self.initial_end.is_some() {
            return self.send_first().await;
        }
        let mut notices = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = self.closing.cancelled() => return None,
                count = self.subscription.queue.recv_many(&mut notices, JOINED) => {
                    if count == 0 {
                        return None;
                    }
                    return self.send(&notices).await;
                }
                () = sleep_until(self.deadline.min(self.next_bookmark)) => {
                    let now = self.inner.objects.world().instant();
                    if now >= self.deadline {
                        return None;
                    }
                    self.next_bookmark = now + BOOKMARKS;
                    if self.bookmarks {
                        self.inner.objects.store().bookmark(self.subscription.id);
                    }
                }
            }
        }
    }

    async fn send_first(&mut self) -> Option<Bytes> {
        if !self.first.is_empty() {
            let rest = self.first.split_off(self.first.len().min(JOINED * 4));
            let notices = std::mem::replace(&mut self.first, rest);
            return self.send(&notices).await;
        }
        let revision = self.initial_end.take()?;
        self.inner.objects.durability().wait(revision).await.ok()?;
        let bookmark = self.presenter.bookmark(revision, true);
        Some(event("BOOKMARK", bookmark.to_string().as_bytes()).freeze())
    }

    /// Waits until all of `notices` are durable; a watch that cannot know ends, and the client starts again.
    async fn send(&mut self, notices: &[Notice]) -> Option<Bytes> {
        let newest = notices.iter().map(Notice::revision).max()?;
        self.inner.objects.durability().wait(newest).await.ok()?;
        self.presenter.now = self.inner.objects.world().now();
        let mut chunk = BytesMut::new();
        for notice in notices {
            chunk.unsplit(self.frame(notice));
        }
        Some(chunk.freeze())
    }

    fn frame(&mut self, notice: &Notice) -> BytesMut {
        match notice {
            Notice::Change(change, object) => {
                // Only the first table brings its columns, as the API does.
                let headed = std::mem::take(&mut self.headed);
                event(change.word(), &self.presenter.one(object, headed))
            }
            Notice::Bookmark(revision) => {
                let bookmark: Value = self.presenter.bookmark(*revision, false);
                event("BOOKMARK", json!(bookmark).to_string().as_bytes())
            }
        }
    }
}
