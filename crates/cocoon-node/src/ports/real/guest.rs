//! The way into guests: one channel a VM, shared by all sessions, opened on demand.
//!
//! A channel is kept only while a session uses it, so an idle guest's port is free.

use std::{
    any::Any,
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use cocoon_engine::engine::{Engine, GuestPort};
use cocoon_guest::host::Exec;

use crate::{
    ports::{
        Guest, GuestSession, PortError, PortResult,
        real::engine::{change, lookup},
    },
    reason::Reason,
};

/// How long a guest may take to accept a channel.
const OPEN_LIMIT: Duration = Duration::from_secs(10);

type Slot = Arc<tokio::sync::Mutex<Weak<GuestPort>>>;

/// Channels to the guests of one engine.
#[derive(Debug)]
pub struct GuestAgents {
    engine: Engine,
    slots: Mutex<BTreeMap<String, Slot>>,
}

impl GuestAgents {
    /// The guests of this engine.
    #[must_use]
    pub fn new(engine: Engine) -> Self {
        Self { engine, slots: Mutex::default() }
    }

    fn slot(&self, vm: &str) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // Only slots in use are kept, so the map is as large as the number of busy guests.
        slots.retain(|name, slot| {
            name == vm || Arc::strong_count(slot) > 1 || slot.try_lock().is_ok_and(|s| s.strong_count() > 0)
        });
        Arc::clone(slots.entry(vm.to_owned()).or_default())
    }

    async fn channel(&self, vm: &str, fresh: bool) -> PortResult<Arc<GuestPort>> {
        let slot = self.slot(vm);
        let mut open = slot.lock().await;
        if let Some(channel) = open.upgrade().filter(|_| !fresh) {
            return Ok(channel);
        }
        let port = match self.engine.guest(vm, true, OPEN_LIMIT).await {
            Ok(port) => port,
            // Port 0 may still be held by a channel that is ending.
            Err(_) => {
                let port = self.engine.guest(vm, false, OPEN_LIMIT).await;
                port.map_err(|error| change(format!("reaching the guest of VM {vm}"), error))?
            }
        };
        let channel = Arc::new(port);
        *open = Arc::downgrade(&channel);
        Ok(channel)
    }
}

#[async_trait]
impl Guest for GuestAgents {
    async fn exec(&self, vm: &str, exec: Exec) -> PortResult<GuestSession> {
        let mut last = None;
        // A channel that somebody else still holds may be dead: the second try opens a fresh one.
        for fresh in [false, true] {
            let channel = self.channel(vm, fresh).await?;
            match channel.exec(exec.clone()).await {
                Ok(session) => {
                    let keep: Arc<dyn Any + Send + Sync> = channel;
                    return Ok(GuestSession { session, keep });
                }
                Err(error) => last = Some(error),
            }
        }
        let what = format!("starting a command in the guest of VM {vm}");
        Err(match last {
            Some(error) => PortError::caused(Reason::GuestSilent, what, error),
            None => PortError::new(Reason::GuestSilent, what),
        })
    }

    async fn console(&self, vm: &str) -> PortResult<PathBuf> {
        self.engine.console(vm).await.map_err(|error| lookup(&format!("the console of VM {vm}"), error))
    }
}
