//! Lists in pieces (`limit` and `continue`).
//!
//! A list that is longer than its limit keeps its snapshot, so that all pieces agree with one revision.
//! Bounds: [`SNAPSHOTS`] snapshots, each at most [`LIFE`] old; an older token is told 410.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{error::ApiError, store::Object};

const SNAPSHOTS: usize = 16;
const LIFE: Duration = Duration::from_secs(300);

#[derive(Debug)]
struct Snapshot {
    id: u64,
    made: Instant,
    /// Path and selectors: a token serves the question that it answered before, and no other.
    scope: String,
    revision: u64,
    objects: Arc<[Arc<Object>]>,
}

#[derive(Debug, Default)]
struct Kept {
    next: u64,
    snapshots: VecDeque<Snapshot>,
}

/// Snapshots of unfinished lists.
#[derive(Debug, Default)]
pub(crate) struct Pages(Mutex<Kept>);

/// A piece of a list.
pub(crate) struct Page {
    pub(crate) objects: Vec<Arc<Object>>,
    pub(crate) revision: u64,
    /// Token of the next piece, and how many objects are left.
    pub(crate) next: Option<(String, usize)>,
}

impl Pages {
    /// The first `limit` of `objects`.
    pub(crate) fn first(
        &self,
        now: Instant,
        scope: &str,
        objects: Vec<Arc<Object>>,
        revision: u64,
        limit: usize,
    ) -> Page {
        if limit == 0 || objects.len() <= limit {
            return Page { objects, revision, next: None };
        }
        let objects: Arc<[Arc<Object>]> = objects.into();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = kept.next;
        kept.next += 1;
        let snapshot =
            Snapshot { id, made: now, scope: scope.to_owned(), revision, objects: Arc::clone(&objects) };
        kept.snapshots.push_back(snapshot);
        if kept.snapshots.len() > SNAPSHOTS {
            kept.snapshots.pop_front();
        }
        piece(id, &objects, revision, 0, limit)
    }

    /// The piece that `token` stands for.
    pub(crate) fn next(
        &self,
        now: Instant,
        scope: &str,
        token: &str,
        limit: usize,
    ) -> Result<Page, ApiError> {
        let bad =
            || ApiError::bad_request("continue key is not valid: it is not one that this server gave out");
        let (id, at) = token.split_once('.').ok_or_else(bad)?;
        let (id, at): (u64, usize) = (id.parse().map_err(|_| bad())?, at.parse().map_err(|_| bad())?);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.snapshots.retain(|snapshot| now.duration_since(snapshot.made) < LIFE);
        let Some(snapshot) = kept.snapshots.iter().find(|snapshot| snapshot.id == id) else {
            let message = "The provided continue parameter is too old to display a consistent list result. You must \
                           start a new list without the continue parameter.";
            return Err(ApiError::expired(message));
        };
        if snapshot.scope != scope || at > snapshot.objects.len() {
            return Err(bad());
        }
        Ok(piece(id, &snapshot.objects, snapshot.revision, at, limit))
    }
}

fn piece(id: u64, objects: &[Arc<Object>], revision: u64, at: usize, limit: usize) -> Page {
    let end = if limit == 0 { objects.len() } else { objects.len().min(at.saturating_add(limit)) };
    let left = objects.len() - end;
    let next = (left > 0).then(|| (format!("{id}.{end}"), left));
    Page { objects: objects[at..end].to_vec(), revision, next }
}
