//! The watch window: the most recent events, bounded in number and bytes.
//!
//! Invariant: the window holds every event after [`Window::oldest`]; a watch that starts earlier
//! is refused before it sees anything (UP-60a).

use std::{collections::VecDeque, sync::Arc};

use super::Object;

/// Bound on the number of events.
const EVENTS: usize = 16 * 1024;
/// Bound on the text that the events keep alive: new objects and what they replaced.
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

impl Event {
    fn bytes(&self) -> usize {
        self.object.bytes.len() + self.previous.as_ref().map_or(0, |previous| previous.bytes.len())
    }
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
        self.bytes += event.bytes();
        self.events.push_back(event);
        while self.events.len() > self.limits.0 || self.bytes > self.limits.1 {
            let Some(event) = self.events.pop_front() else { break };
            self.bytes -= event.bytes();
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::resources::by_table;

    fn event(revision: u64) -> Event {
        let object =
            Object::new(by_table("configmaps").unwrap(), json!({ "metadata": { "name": "a" } }), revision);
        Event { change: Change::Added, object: Arc::new(object), previous: None }
    }

    proptest! {
        #[test]
        fn a_watch_gets_every_later_event_or_is_refused(start in 0_u64..20, count in 0_u64..40, limit in 1_usize..20, from in 0_u64..70) {
            let mut window = Window::starting_after(start);
            window.limits.0 = limit;
            for revision in 1..=count {
                window.push(event(start + revision));
            }
            let found = window.after(from).map(|events| events.map(|e| e.object.revision).collect::<Vec<_>>());
            match found {
                Some(found) => prop_assert_eq!(found, (from.max(start) + 1..=start + count).collect::<Vec<_>>()),
                None => prop_assert!(from < window.oldest()),
            }
            prop_assert!(window.events.len() <= limit);
        }
    }

    #[test]
    fn the_bytes_that_events_keep_alive_are_bounded() {
        let mut window = Window::starting_after(0);
        let size = event(1).object.bytes.len();
        window.limits.1 = size * 3;
        (1..=9).for_each(|revision| window.push(event(revision)));
        assert_eq!((window.oldest(), window.events.len()), (6, 3));
        let changed = |revision| Event { previous: Some(event(revision - 1).object), ..event(revision) };
        (10..=13).for_each(|revision| window.push(changed(revision)));
        assert_eq!((window.oldest(), window.events.len()), (12, 1), "what was replaced is alive, too");
        assert_eq!(window.bytes, changed(13).bytes());
    }
}
