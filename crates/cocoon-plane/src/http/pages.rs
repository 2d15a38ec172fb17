//! Lists in pieces (`limit` and `continue`).
//!
//! A list that is longer than its limit keeps its snapshot, so that all pieces agree with one revision.
//! Bounds: [`SNAPSHOTS`] snapshots, each at most [`LIFE`] old (looked at with each long list); an older token
//! is told 410. The numbers of snapshots start anywhere, so that a token of another run of the server is told
//! so, too, instead of meeting somebody else's snapshot.

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

#[derive(Debug)]
struct Kept {
    next: u64,
    snapshots: VecDeque<Snapshot>,
}

impl Kept {
    fn forget(&mut self, now: Instant) {
        self.snapshots.retain(|snapshot| now.duration_since(snapshot.made) < LIFE);
    }
}

/// Snapshots of unfinished lists.
#[derive(Debug)]
pub(crate) struct Pages(Mutex<Kept>);

/// A piece of a list.
pub(crate) struct Page {
    pub(crate) objects: Vec<Arc<Object>>,
    pub(crate) revision: u64,
    /// Token of the next piece, and how many objects are left.
    pub(crate) next: Option<(String, usize)>,
}

impl Pages {
    /// No snapshots yet; they are numbered from `start`.
    pub(crate) fn starting_at(start: u64) -> Self {
        Self(Mutex::new(Kept { next: start, snapshots: VecDeque::new() }))
    }

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
        kept.forget(now);
        let id = kept.next;
        kept.next = id.wrapping_add(1);
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
        kept.forget(now);
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::by_table;

    fn objects() -> Vec<Arc<Object>> {
        let object = |name: &str| json!({ "metadata": { "name": name } });
        let kind = by_table("configmaps").unwrap();
        ["a", "b", "c"].iter().map(|name| Arc::new(Object::new(kind, object(name), 1))).collect()
    }

    #[test]
    fn a_token_of_another_run_meets_no_snapshot_of_this_one() {
        let now = Instant::now();
        let (before, after) = (Pages::starting_at(7), Pages::starting_at(u64::MAX));
        let (token, _) = before.first(now, "s", objects(), 1, 1).next.unwrap();
        for _ in 0..3 {
            let (own, left) = after.first(now, "s", objects(), 1, 1).next.unwrap();
            assert_eq!(left, 2);
            assert_eq!(after.next(now, "s", &own, 0).unwrap().objects.len(), 2);
            assert_eq!(after.next(now, "s", &token, 1).err().unwrap().code, 410);
        }
    }

    #[test]
    fn old_snapshots_go_even_if_nobody_asks_for_the_next_piece() {
        let (pages, start) = (Pages::starting_at(0), Instant::now());
        let (old, _) = pages.first(start, "s", objects(), 1, 1).next.unwrap();
        let later = start + LIFE;
        pages.first(later, "s", objects(), 1, 1);
        assert_eq!(pages.0.lock().unwrap().snapshots.len(), 1);
        assert_eq!(pages.next(later, "s", &old, 1).err().unwrap().code, 410);
    }
}
