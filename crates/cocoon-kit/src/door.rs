//! Who gets a place at a TLS port.
//!
//! Entry points: [`Door::next`] takes a connection off a listener, [`Arrival::enter`] does its handshake,
//! [`Stay::over`] says when it must end. Invariants: connections on which nobody is known (those in the
//! handshake, and strangers that have shown no certificate) never take the places of those who are; both have
//! a deadline, and where they are too many the one that waited longest gives way to the newest, so that a
//! crowd that only connects locks nobody out. Whoever is turned away is counted.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::sync::CancellationToken;

use crate::tls::Subject;

/// Pause after a failed accept.
const AGAIN: Duration = Duration::from_millis(50);

/// How many may be inside, and for how long without being known.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections in the handshake.
    pub arrivals: usize,
    /// Connections without a certificate on which nobody is known yet.
    pub strangers: usize,
    /// Connections with a certificate, or on which somebody is known.
    pub known: usize,
    /// For the handshake, and for a stranger to become known.
    pub patience: Duration,
    /// For the holder of a certificate to become known.
    pub certified: Duration,
}

/// How many connections were turned away for want of a place. Clones count together.
#[derive(Debug, Clone, Default)]
pub struct Refused(Arc<AtomicU64>);

impl Refused {
    /// The number so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn note(&self, why: &str) {
        self.0.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(why, "a connection was closed");
    }
}

/// Places of which the one held longest is given to whoever comes when all are taken.
#[derive(Debug, Clone)]
struct Places {
    limit: usize,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    by: BTreeMap<u64, CancellationToken>,
}

impl Taken {
    /// Takes the place that was held longest away from its holder; false when there is none.
    fn evict(&mut self) -> bool {
        let oldest = self.by.pop_first();
        if let Some((_, lost)) = &oldest {
            lost.cancel();
        }
        oldest.is_some()
    }
}

impl Places {
    fn new(limit: usize) -> Self {
        Self { limit, taken: Arc::default() }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place; true when somebody else lost his for it.
    fn take(&self) -> (Place, bool) {
        let lost = CancellationToken::new();
        let mut taken = self.taken();
        let evicted = taken.by.len() >= self.limit && taken.evict();
        let id = taken.next;
        taken.next += 1;
        taken.by.insert(id, lost.clone());
        (Place { id, places: self.clone(), lost }, evicted)
    }

    /// Takes the place that was held longest away from its holder; false when there is none.
    fn evict(&self) -> bool {
        self.taken().evict()
    }
}

#[derive(Debug)]
struct Place {
    id: u64,
    places: Places,
    /// Cancelled when somebody else got it.
    lost: CancellationToken,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().by.remove(&self.id);
    }
}

/// The bounds of one port.
pub struct Door {
    tls: TlsAcceptor,
    limits: Limits,
    arrivals: Places,
    strangers: Places,
    known: Arc<Semaphore>,
    refused: Refused,
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Door").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Door {
    /// A door with this identity and these limits, which counts in `refused`.
    #[must_use]
    pub fn new(tls: Arc<rustls::ServerConfig>, limits: Limits, refused: Refused) -> Arc<Self> {
        Arc::new(Self {
            tls: TlsAcceptor::from(tls),
            arrivals: Places::new(limits.arrivals),
            strangers: Places::new(limits.strangers),
            known: Arc::new(Semaphore::new(limits.known)),
            limits,
            refused,
        })
    }

    /// The next connection. A failed accept is logged and tried again. May be dropped and called again.
    pub async fn next(self: &Arc<Self>, listener: &TcpListener) -> Arrival {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (place, lost) = self.arrivals.take();
                    if lost {
                        self.refused.note("too many handshakes at once");
                    }
                    return Arrival { stream, place, door: Arc::clone(self) };
                }
                Err(error) => {
                    // A client that left, or out of descriptors: those who only wait hold some.
                    tracing::warn!(%error, "accept failed");
                    if self.arrivals.evict() {
                        self.refused.note("out of descriptors");
                    }
                    sleep(AGAIN).await;
                }
            }
        }
    }
}

/// A connection before its handshake.
#[derive(Debug)]
pub struct Arrival {
    stream: TcpStream,
    place: Place,
    door: Arc<Door>,
}

/// A connection after its handshake.
#[derive(Debug)]
pub struct Entered {
    /// The connection.
    pub stream: TlsStream<TcpStream>,
    /// Whose certificate was shown; its chain is verified. `None`: a stranger.
    pub subject: Option<Subject>,
    /// How long the connection may stay.
    pub stay: Stay,
}

impl Arrival {
    /// Does the handshake; `None` when it failed, took too long or lost its place.
    pub async fn enter(self) -> Option<Entered> {
        let Self { stream, place, door } = self;
        let _ = stream.set_nodelay(true);
        let stream = tokio::select! {
            biased;
            () = place.lost.cancelled() => return None,
            done = timeout(door.limits.patience, door.tls.accept(stream)) => done.ok()?.ok()?,
        };
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let subject = certificate.and_then(|certificate| Subject::of(certificate));
        drop(place);
        let (holds, patience) = if subject.is_some() {
            (Holds::Known(door.place_of_known()?), door.limits.certified)
        } else {
            let (place, lost) = door.strangers.take();
            if lost {
                door.refused.note("too many connections without an identity");
            }
            (Holds::Stranger(place), door.limits.patience)
        };
        let stay = Stay { known: Known::default(), patience, holds, door };
        Some(Entered { stream, subject, stay })
    }
}

impl Door {
    fn place_of_known(&self) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.known).try_acquire_owned().ok();
        if place.is_none() {
            self.refused.note("too many connections");
        }
        place
    }
}

/// Tells a [`Stay`] that somebody is known on its connection. Clones tell the same one.
#[derive(Debug, Clone, Default)]
pub struct Known(CancellationToken);

impl Known {
    /// Somebody is known from now on.
    pub fn tell(&self) {
        self.0.cancel();
    }
}

#[derive(Debug)]
enum Holds {
    Stranger(Place),
    Known(OwnedSemaphorePermit),
}

/// A connection's place inside, for as long as this lives.
#[derive(Debug)]
pub struct Stay {
    known: Known,
    patience: Duration,
    holds: Holds,
    door: Arc<Door>,
}

impl Stay {
    /// For whoever finds out who it is.
    #[must_use]
    pub fn known(&self) -> Known {
        self.known.clone()
    }

    /// Ends when the connection must: nobody became known in time, or the place was lost before. Holds the
    /// place until it is dropped.
    pub async fn over(self) {
        let Self { known, patience, holds, door } = self;
        let in_time = timeout(patience, known.0.cancelled());
        let _place = match holds {
            Holds::Known(place) => match in_time.await {
                Ok(()) => place,
                Err(_) => return,
            },
            Holds::Stranger(stranger) => {
                tokio::select! {
                    biased;
                    seen = in_time => if seen.is_err() { return },
                    () = stranger.lost.cancelled() => return,
                }
                match door.place_of_known() {
                    Some(place) => place,
                    None => return,
                }
            }
        };
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_that_was_held_longest_goes_to_the_newest() {
        let places = Places::new(2);
        let (first, lost) = places.take();
        let (second, also) = places.take();
        assert!(!lost && !also);
        let (third, lost) = places.take();
        assert!(lost && first.lost.is_cancelled() && !second.lost.is_cancelled());
        drop(first);
        assert_eq!(places.taken().by.len(), 2, "who lost a place gives none back");
        drop(second);
        let (_fourth, lost) = places.take();
        assert!(!lost && !third.lost.is_cancelled());
    }

    #[test]
    fn without_anybody_there_is_nobody_to_evict() {
        assert!(!Places::new(1).evict());
    }
}
