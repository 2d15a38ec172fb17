//! Events for people: bounded, and the same words about the same pod only once in a while.
//!
//! Entry point: [`Events`]. Posting never waits; what does not fit into the queue is counted and dropped.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cocoon_kit::world::World;
use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use kube::{Api, Client, api::PostParams};
use tokio::{sync::mpsc, time::Instant};

use crate::{cluster::Tone, planner::observation::PodKey, reason::Trouble};

const QUEUE: usize = 256;
const REMEMBERED: usize = 2048;
const SAME_AGAIN: Duration = Duration::from_secs(600);
const TRIES: u32 = 3;

/// The way in.
#[derive(Debug)]
pub(crate) struct Events {
    node: String,
    queue: mpsc::Sender<Event>,
    told: Mutex<BTreeMap<(String, String), Instant>>,
    dropped: AtomicU64,
}

/// The way out, to be run as a task.
#[derive(Debug)]
pub(crate) struct EventSink {
    queue: mpsc::Receiver<Event>,
}

impl Events {
    /// A queue and its sink.
    #[must_use]
    pub(crate) fn new(node: &str) -> (Self, EventSink) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let events =
            Self { node: node.to_owned(), queue: sender, told: Mutex::default(), dropped: AtomicU64::new(0) };
        (events, EventSink { queue: receiver })
    }

    /// Tells people, unless they were told the same a short while ago.
    pub(crate) fn tell(&self, world: &dyn World, key: &PodKey, uid: &str, tone: Tone, what: &Trouble) {
        if !self.is_new(world.instant(), uid, what) {
            return;
        }
        if self.queue.try_send(self.event(world, key, uid, tone, what)).is_err() {
            let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
            tracing::warn!(dropped, "event queue is full; events are dropped");
        }
    }

    fn is_new(&self, now: Instant, uid: &str, what: &Trouble) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|_, at| now.duration_since(*at) < SAME_AGAIN);
        if told.len() >= REMEMBERED {
            let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
            tracing::warn!(dropped, "too many different events within a short while; events are dropped");
            return false;
        }
        // Not `insert`: words that are repeated all the time must be told again some day.
        match told.entry((uid.to_owned(), what.to_string())) {
            Entry::Vacant(place) => {
                place.insert(now);
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    fn event(&self, world: &dyn World, key: &PodKey, uid: &str, tone: Tone, what: &Trouble) -> Event {
        let now = Time(world.now());
        let mut nonce = [0_u8; 8];
        world.random(&mut nonce);
        let kind = match tone {
            Tone::Normal => "Normal",
            Tone::Warning => "Warning",
        };
        let message: String = what.message.chars().take(1000).collect();
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{}.{}", key.name, hex::encode(nonce))),
                namespace: Some(key.namespace.clone()),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(key.name.clone()),
                namespace: Some(key.namespace.clone()),
                uid: Some(uid.to_owned()),
                ..ObjectReference::default()
            },
            type_: Some(kind.to_owned()),
            reason: Some(what.reason.to_string()),
            message: Some(message),
            source: Some(EventSource {
                component: Some("cocoon-node".to_owned()),
                host: Some(self.node.clone()),
            }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            reporting_component: Some("cocoon-node".to_owned()),
            reporting_instance: Some(self.node.clone()),
            ..Event::default()
        }
    }
}

impl EventSink {
    /// Posts until all senders are gone.
    pub(crate) async fn run(mut self, client: Client) {
        while let Some(event) = self.queue.recv().await {
            let namespace = event.metadata.namespace.clone().unwrap_or_default();
            let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
            post(&api, &event).await;
        }
    }
}

async fn post(api: &Api<Event>, event: &Event) {
    for attempt in 1..=TRIES {
        match api.create(&PostParams::default(), event).await {
            Ok(_) => return,
            // A namespace on its way out takes no events; a repeated name was stored the first time.
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404 | 409) => return,
            Err(error) => tracing::debug!(error = %error, attempt, "event not posted"),
        }
        tokio::time::sleep(Duration::from_secs(u64::from(attempt))).await;
    }
}

#[cfg(test)]
mod tests {
    use cocoon_kit::world::RealWorld;

    use super::*;
    use crate::reason::Reason;

    #[tokio::test(start_paused = true)]
    async fn the_same_words_about_the_same_pod_are_told_once_in_ten_minutes() {
        let (events, mut sink) = Events::new("node");
        let key = PodKey { namespace: "default".into(), name: "demo-0".into() };
        let what = Trouble::new(Reason::ImageNotFound, "image x is nowhere");
        for uid in ["u1", "u1", "u2"] {
            events.tell(&RealWorld, &key, uid, Tone::Warning, &what);
        }
        tokio::time::advance(SAME_AGAIN).await;
        events.tell(&RealWorld, &key, "u1", Tone::Warning, &what);
        drop(events);
        let mut uids = Vec::new();
        while let Some(event) = sink.queue.recv().await {
            assert_eq!(event.reason.as_deref(), Some("ImageNotFound"));
            uids.push(event.involved_object.uid.unwrap());
        }
        assert_eq!(uids, ["u1", "u2", "u1"]);
    }

    #[tokio::test(start_paused = true)]
    async fn words_repeated_all_the_time_are_told_again_every_ten_minutes() {
        let (events, mut sink) = Events::new("node");
        let key = PodKey { namespace: "default".into(), name: "demo-0".into() };
        let what = Trouble::new(Reason::ImageNotFound, "image x is nowhere");
        for _ in 0..6 {
            events.tell(&RealWorld, &key, "u1", Tone::Warning, &what);
            tokio::time::advance(SAME_AGAIN / 2).await;
        }
        drop(events);
        let mut told = 0;
        while sink.queue.recv().await.is_some() {
            told += 1;
        }
        assert_eq!(told, 3);
    }
}
