//! Events for people: bounded; the same words about the same pod are one event that counts.
//!
//! Entry point: [`Events`]. Posting never waits; what does not fit into the queue is counted and dropped. Words that
//! are repeated raise the event's count and time; so many writes a pod costs that at most (I9): one in [`REPEAT`].

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cocoon_kit::world::World;
use k8s_openapi::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::{sync::mpsc, time::Instant};

use crate::{cluster::Tone, planner::observation::PodKey, reason::Trouble};

const QUEUE: usize = 256;
const REMEMBERED: usize = 2048;
/// Words that were not said for so long make a new event.
const SAME_AGAIN: Duration = Duration::from_secs(600);
/// One pod's events are counted up at most this often, all of them together.
const REPEAT: Duration = Duration::from_secs(30);
/// How often is looked for events to count up.
const LOOK: Duration = Duration::from_secs(5);
const TRIES: u32 = 3;

/// The way in.
#[derive(Debug)]
pub(crate) struct Events {
    node: String,
    queue: mpsc::Sender<Event>,
    told: Arc<Told>,
    dropped: AtomicU64,
}

/// The way out, to be run as a task.
#[derive(Debug)]
pub(crate) struct EventSink {
    queue: mpsc::Receiver<Event>,
    told: Arc<Told>,
}

/// What was told, by the pod's UID and words.
#[derive(Debug, Default)]
struct Told(Mutex<BTreeMap<(String, String), Telling>>);

/// One event as it should be.
#[derive(Debug)]
struct Telling {
    event: Event,
    /// When it was told last.
    at: Instant,
    /// When it was written last, or was to be.
    written: Instant,
    /// It was told again since.
    dirty: bool,
}

impl Told {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, String), Telling>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The events to be counted up now: one a pod, the one that waits longest, and none of a pod of which another
    /// was written a short while ago.
    fn due(&self, now: Instant) -> Vec<Event> {
        let mut told = self.lock();
        let mut last: BTreeMap<String, Instant> = BTreeMap::new();
        for ((uid, _), telling) in told.iter() {
            let newest = last.entry(uid.clone()).or_insert(telling.written);
            *newest = telling.written.max(*newest);
        }
        let mut waiting: Vec<_> = told.iter_mut().filter(|(_, telling)| telling.dirty).collect();
        waiting.sort_by_key(|(_, telling)| telling.written);
        let mut due = Vec::new();
        for ((uid, _), telling) in waiting {
            if last.get(uid).is_none_or(|last| now.duration_since(*last) >= REPEAT) {
                last.insert(uid.clone(), now);
                (telling.dirty, telling.written) = (false, now);
                due.push(telling.event.clone());
            }
        }
        due
    }
}

impl Events {
    /// A queue and its sink.
    #[must_use]
    pub(crate) fn new(node: &str) -> (Self, EventSink) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let told = Arc::new(Told::default());
        let (queue, dropped) = (sender, AtomicU64::new(0));
        let events = Self { node: node.to_owned(), queue, told: Arc::clone(&told), dropped };
        (events, EventSink { queue: receiver, told })
    }

    /// Tells people: a new event, or one more of the same.
    pub(crate) fn tell(&self, world: &dyn World, key: &PodKey, uid: &str, tone: Tone, what: &Trouble) {
        let Some(event) = self.note(world, key, uid, tone, what) else { return };
        if self.queue.try_send(event).is_err() {
            let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
            tracing::warn!(dropped, "event queue is full; events are dropped");
        }
    }

    /// Remembers that this was told; the event if it is a new one.
    fn note(&self, world: &dyn World, key: &PodKey, uid: &str, tone: Tone, what: &Trouble) -> Option<Event> {
        let now = world.instant();
        let mut told = self.told.lock();
        told.retain(|_, telling| now.duration_since(telling.at) < SAME_AGAIN);
        let full = told.len() >= REMEMBERED;
        match told.entry((uid.to_owned(), what.to_string())) {
            Entry::Occupied(mut place) => {
                let telling = place.get_mut();
                (telling.at, telling.dirty) = (now, true);
                telling.event.count = telling.event.count.map(|count| count.saturating_add(1));
                telling.event.last_timestamp = Some(Time(world.now()));
                None
            }
            Entry::Vacant(_) if full => {
                let dropped = self.dropped.fetch_add(1, Ordering::Relaxed) + 1;
                tracing::warn!(dropped, "too many different events within a short while; events are dropped");
                None
            }
            Entry::Vacant(place) => {
                let event = self.event(world, key, uid, tone, what);
                place.insert(Telling { event: event.clone(), at: now, written: now, dirty: false });
                Some(event)
            }
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
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let api = |event: &Event| -> Api<Event> {
            let namespace = event.metadata.namespace.clone().unwrap_or_default();
            Api::namespaced(client.clone(), &namespace)
        };
        loop {
            tokio::select! {
                // An event is made before it is counted up.
                biased;
                event = self.queue.recv() => match event {
                    Some(event) => post(&api(&event), &event).await,
                    None => return,
                },
                now = look.tick() => {
                    for event in self.told.due(now) {
                        count_up(&api(&event), &event).await;
                    }
                }
            }
        }
    }
}

/// Once: what could not be written is written with the next count.
async fn count_up(api: &Api<Event>, event: &Event) {
    let name = event.metadata.name.clone().unwrap_or_default();
    let patch = Patch::Merge(json!({"count": event.count, "lastTimestamp": event.last_timestamp}));
    match api.patch(&name, &PatchParams::default(), &patch).await {
        Ok(_) => {}
        // API servers forget events after an hour or so.
        Err(kube::Error::Api(status)) if status.code == 404 => post(api, event).await,
        Err(error) => tracing::debug!(error = %error, "event not counted up"),
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
    use std::convert::Infallible;

    use bytes::Bytes;
    use cocoon_kit::world::RealWorld;
    use http::{Method, Request, Response};
    use http_body_util::{BodyExt as _, Full};
    use kube::client::Body;
    use serde_json::Value;

    use super::*;
    use crate::reason::Reason;

    fn tell(events: &Events, uid: &str, words: &str) {
        let key = PodKey { namespace: "default".into(), name: "demo-0".into() };
        let what = Trouble::new(Reason::ImageNotFound, words);
        events.tell(&RealWorld, &key, uid, Tone::Warning, &what);
    }

    /// An API server with nothing but events, and when each write came.
    #[derive(Debug, Default)]
    struct Server {
        events: BTreeMap<String, Value>,
        writes: Vec<(Method, Instant)>,
    }

    impl Server {
        fn answer(&mut self, method: &Method, path: &str, body: &[u8]) -> (u16, Value) {
            self.writes.push((method.clone(), Instant::now()));
            let body: Value = serde_json::from_slice(body).unwrap();
            if *method == Method::POST {
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                self.events.insert(name, body.clone());
                return (201, body);
            }
            let Some(event) = self.events.get_mut(path.rsplit('/').next().unwrap()) else {
                let gone = json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": "no"});
                return (404, gone);
            };
            json_patch::merge(event, &body);
            (200, event.clone())
        }

        fn counts(&self) -> Vec<i64> {
            self.events.values().map(|event| event["count"].as_i64().unwrap()).collect()
        }
    }

    /// Events on their way to a server.
    fn serve() -> (Events, Arc<Mutex<Server>>) {
        let server = Arc::new(Mutex::new(Server::default()));
        let answering = Arc::clone(&server);
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = Arc::clone(&answering);
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let (code, value) = server.lock().unwrap().answer(&parts.method, parts.uri.path(), &body);
                let response = Response::builder().status(code).header("content-type", "application/json");
                Ok::<_, Infallible>(response.body(Full::new(Bytes::from(value.to_string()))).unwrap())
            }
        });
        let (events, sink) = Events::new("node");
        tokio::spawn(sink.run(Client::new(service, "default")));
        (events, server)
    }

    async fn pass(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn words_told_again_raise_the_count_and_the_time_of_one_event() {
        let (events, server) = serve();
        tell(&events, "u1", "image x is nowhere");
        pass(1).await;
        let first = server.lock().unwrap().events.values().next().unwrap().clone();
        assert_eq!(first["count"], 1);
        tell(&events, "u1", "image x is nowhere");
        tell(&events, "u1", "image x is nowhere");
        tell(&events, "u2", "image x is nowhere");
        pass(45).await;
        let server = server.lock().unwrap();
        assert_eq!(server.events.len(), 2, "one a pod");
        let again = &server.events[first["metadata"]["name"].as_str().unwrap()];
        assert_eq!(again["count"], 3);
        assert_eq!(again["firstTimestamp"], first["firstTimestamp"]);
        assert!(again["lastTimestamp"].as_str() >= first["lastTimestamp"].as_str());
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_whose_words_never_end_costs_two_writes_a_minute_and_each_of_them_is_counted() {
        let (events, server) = serve();
        for _ in 0..1200 {
            for words in ["a", "b", "c"] {
                tell(&events, "u1", words);
            }
            pass(1).await;
        }
        pass(120).await;
        let server = server.lock().unwrap();
        assert_eq!(server.counts(), [1200; 3], "and no new event every ten minutes");
        for (_, at) in &server.writes {
            let minute = server.writes.iter().filter(|(method, other)| {
                *method != Method::POST && other >= at && other.duration_since(*at) < Duration::from_secs(60)
            });
            assert!(minute.count() <= 2);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn words_that_were_not_said_for_ten_minutes_make_a_new_event() {
        let (events, server) = serve();
        tell(&events, "u1", "image x is nowhere");
        pass(SAME_AGAIN.as_secs()).await;
        tell(&events, "u1", "image x is nowhere");
        pass(60).await;
        assert_eq!(server.lock().unwrap().counts(), [1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_the_api_server_forgot_is_made_again_with_its_count() {
        let (events, server) = serve();
        tell(&events, "u1", "image x is nowhere");
        pass(1).await;
        server.lock().unwrap().events.clear();
        tell(&events, "u1", "image x is nowhere");
        pass(60).await;
        assert_eq!(server.lock().unwrap().counts(), [2]);
    }
}
