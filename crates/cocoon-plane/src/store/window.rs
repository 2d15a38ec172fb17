//! The watch window: the most recent events, bounded in number and bytes.
//!
//! Invariant: the window holds every event after [`Window::oldest`]; a watch that starts earlier
//! is refused before it sees anything (UP-60a).

use std::{collections::VecDeque, sync::Arc};

use super::Object;

/// Bound on the number of events.
const EVENTS: usize = 16 * 1024;
/// Bound on the text that the events keep alive.
const BYTES: usize = 16 << 20;

/// What happened to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Added,
    Modified,
    Deleted,
}

impl Change {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Added => "ADDED",
            Self::Modified => "MODIFIED",
            Self::Deleted => "DELETED",
        }
    }
}

/// One write.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) change: Change,
    /// The new object; for a deletion its last state under the deletion's revision.
    pub(crate) object: Arc<Object>,
    pub(crate) previous: Option<Arc<Object>>,
}

/// A ring of events.
#[derive(Debug)]
pub(crate) struct Window {
    events: VecDeque<Event>,
    bytes: usize,
    oldest: u64,
    limits: (usize, usize),
}

impl Window {
    pub(crate) const fn starting_after(revision: u64) -> Self {
        Self { events: VecDeque::new(), bytes: 0, oldest: revision, limits: (EVENTS, BYTES) }
    }

    /// Every event after this revision is here.
    pub(crate) const fn oldest(&self) -> u64 {
        self.oldest
    }

    pub(crate) fn push(&mut self, event: Event) {
        self.bytes += event.object.bytes.len();
        self.events.push_back(event);
        while self.events.len() > self.limits.0 || self.bytes > self.limits.1 {
            let Some(event) = self.events.pop_front() else { break };
            self.bytes -= event.object.bytes.len();
            self.oldest = event.object.revision;
        }
    }

    /// Events after `revision`, or `None` if some of them are gone.
    pub(crate) fn after(&self, revision: u64) -> Option<impl Iterator<Item = &Event>> {
        if revision < self.oldest {
            return None;
        }
        let start = self.events.partition_point(|event| event.object.revision <= revision);
        Some(self.events.range(start..))
    }
}
