//! Named background tasks with an owner, a kind and an end.
//!
//! Entry point: [`Tasks`]. A task is spawned with a [`Kind`], which says what its end means:
//! a vital task that ends (or panics) shuts the whole group down, a helper's end is logged.
//! Invariants: no task of a group outlives [`Tasks::shutdown`]; a shutdown has a limit, after which
//! what is left is aborted and named.

use std::{error::Error, future::Future, sync::Arc, time::Duration};

use tokio::{sync::Mutex, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::failure::chain;

/// What the end of a task means for its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The group cannot go on without it: its end, before a shutdown was asked for, starts one.
    Vital,
    /// Its end is logged and changes nothing else.
    Helper,
}

/// Why a task failed: any error, its causes attached.
pub type Failure = Box<dyn Error + Send + Sync>;

/// A group of tasks that ends together. Cheap to clone; all clones are the same group.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    token: CancellationToken,
    set: Arc<Mutex<JoinSet<()>>>,
    failure: Arc<std::sync::OnceLock<String>>,
}

impl Tasks {
    /// An empty group.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The token that is cancelled when the group shuts down. Tasks must end soon after.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    /// Starts `future` as a task of this group. Errors are logged under `name`.
    pub async fn spawn<F>(&self, name: &'static str, kind: Kind, future: F)
    where
        F: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let (token, failure) = (self.token.clone(), self.failure.clone());
        let guard = EndGuard { name, kind, token: token.clone(), failure: failure.clone() };
        let mut set = self.set.lock().await;
        while set.try_join_next().is_some() {}
        set.spawn(async move {
            let guard = guard;
            match future.await {
                Ok(()) if token.is_cancelled() => {}
                Ok(()) if kind == Kind::Helper => tracing::debug!(task = name, "task ended"),
                Ok(()) => {
                    let _ = failure.set(format!("task {name} ended"));
                    tracing::error!(task = name, "a vital task ended");
                }
                Err(error) => {
                    let error = chain(error.as_ref());
                    tracing::error!(task = name, error, "task failed");
                    if kind == Kind::Vital {
                        let _ = failure.set(format!("task {name} failed: {error}"));
                    }
                }
            }
            drop(guard);
        });
    }

    /// Waits until the group is asked to end; the text says why when a vital task ended first.
    pub async fn ended(&self) -> Option<String> {
        self.token.cancelled().await;
        self.failure.get().cloned()
    }

    /// Asks every task to end, waits up to `limit`, aborts what is left. True if nothing was aborted.
    pub async fn shutdown(&self, limit: Duration) -> bool {
        self.token.cancel();
        let mut set = self.set.lock().await;
        let all = async { while set.join_next().await.is_some() {} };
        let clean = tokio::time::timeout(limit, all).await.is_ok();
        if !clean {
            tracing::warn!(left = set.len(), ?limit, "tasks did not end in time and are aborted");
            set.shutdown().await;
        }
        clean
    }
}

/// Cancels the group when a vital task ends in any way, a panic included.
struct EndGuard {
    name: &'static str,
    kind: Kind,
    token: CancellationToken,
    failure: Arc<std::sync::OnceLock<String>>,
}

impl Drop for EndGuard {
    fn drop(&mut self) {
        if self.kind == Kind::Vital && !self.token.is_cancelled() {
            let _ = self.failure.set(format!("task {} panicked", self.name));
            self.token.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_vital_task_that_fails_ends_the_group_and_is_named() {
        #[derive(Debug, thiserror::Error)]
        #[error("no luck")]
        struct NoLuck(#[source] std::fmt::Error);

        let tasks = Tasks::new();
        tasks.spawn("one", Kind::Vital, async { Err(NoLuck(std::fmt::Error).into()) }).await;
        let cause = std::fmt::Error;
        assert_eq!(tasks.ended().await, Some(format!("task one failed: no luck: {cause}")));
        assert!(tasks.shutdown(Duration::from_secs(1)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_helper_that_fails_leaves_the_group_running() {
        let tasks = Tasks::new();
        tasks.spawn("two", Kind::Helper, async { Err("no luck".into()) }).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!tasks.token().is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ignores_the_shutdown_is_aborted_after_the_limit() {
        let tasks = Tasks::new();
        tasks.spawn("deaf", Kind::Helper, std::future::pending()).await;
        assert!(!tasks.shutdown(Duration::from_secs(5)).await);
    }
}
