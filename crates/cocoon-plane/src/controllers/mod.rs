//! Background work that makes the API behave like a cluster of one machine.
//!
//! Entry points: [`make_namespaces`] and [`run`]. Each controller reads the store, decides in a pure
//! function and writes through [`crate::objects::Objects`]; each waits for events or a tick, never in a
//! busy loop. Times come from the plane's world.

mod collector;
mod namespaces;
mod nodes;
mod scheduler;

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    error::ApiError,
    json::text,
    objects::WriteOptions,
    plane::Inner,
    resources::{Kind, by_table},
    rules,
    store::{Notice, Subscription},
};

/// Namespaces that always exist: most cannot be deleted, and one that was is made anew.
const NAMESPACES: [&str; 4] = ["default", "kube-node-lease", "kube-public", "kube-system"];

/// Makes the namespaces that are missing.
pub(crate) async fn make_namespaces(inner: &Inner) -> Result<(), ApiError> {
    let kind = row("namespaces")?;
    for name in NAMESPACES {
        if inner.objects.find(kind, "", name).is_none() {
            let body = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
            match inner.objects.create(kind, "", body, WriteOptions::default()).await {
                // Someone else made it.
                Err(error) if error.code == 409 => {}
                other => drop(other?),
            }
        }
    }
    Ok(())
}

/// The row of a table that this plane has.
fn row(table: &str) -> Result<&'static Kind, ApiError> {
    by_table(table).ok_or_else(|| ApiError::internal(format!("no table {table}")))
}

/// Runs all controllers until `shutdown`.
pub(crate) async fn run(inner: Arc<Inner>, shutdown: CancellationToken) {
    tokio::join!(
        scheduler::run(Arc::clone(&inner), shutdown.clone()),
        shutdown.run_until_cancelled(async {
            loop {
                collector::work(&inner).await;
            }
        }),
        shutdown.run_until_cancelled(async {
            loop {
                namespaces::work(&inner).await;
            }
        }),
        nodes::run(Arc::clone(&inner), shutdown.clone()),
    );
}

/// Why a controller looks again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Woke {
    /// Something changed.
    News,
    /// Nothing changed, but it is time.
    Time,
    /// It was too slow for its queue, which ended: it has to look at everything.
    Overflow,
}

/// Waits for changes; with `patience`, no longer than that.
async fn wait(
    subscription: &mut Subscription,
    notices: &mut Vec<Notice>,
    patience: Option<Duration>,
) -> Woke {
    let receive = subscription.queue.recv_many(notices, 256);
    let count = match patience {
        Some(patience) => tokio::time::timeout(patience, receive).await.ok(),
        None => Some(receive.await),
    };
    match count {
        None => Woke::Time,
        Some(0) => Woke::Overflow,
        Some(_) => Woke::News,
    }
}

/// Writes an event about `object`. An event that cannot be written is logged: nothing depends on it.
async fn emit(inner: &Inner, object: &Value, kind: &str, reason: &str, message: &str, source: &str) {
    let world = inner.objects.world();
    let mut random = [0; 8];
    world.random(&mut random);
    let now = rules::stamp(world.now());
    let name = text(object, "/metadata/name");
    let mut about = json!({
        "apiVersion": object["apiVersion"], "kind": object["kind"], "name": name,
        "uid": object["metadata"]["uid"], "resourceVersion": object["metadata"]["resourceVersion"],
    });
    let namespace = match text(object, "/metadata/namespace") {
        "" => "default",
        namespace => {
            about["namespace"] = namespace.into();
            namespace
        }
    };
    let event = json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": { "name": format!("{name}.{}", hex::encode(random)) },
        "involvedObject": about, "type": kind, "reason": reason, "message": message, "count": 1,
        "firstTimestamp": now, "lastTimestamp": now, "source": { "component": source },
    });
    let Some(row) = by_table("events") else { return };
    if let Err(error) = inner.objects.create(row, namespace, event, WriteOptions::default()).await {
        tracing::debug!(%error, reason, "an event was not written");
    }
}

#[cfg(test)]
mod testing {
    use std::sync::Arc;

    use cocoon_kit::world::RealWorld;

    use crate::plane::{Inner, Plane, PlaneConfig};

    /// A plane in memory, without controllers.
    pub(super) async fn inner() -> Arc<Inner> {
        let config = PlaneConfig { journal: None, tokens: vec![], kubelet_client: None };
        Plane::open(config, Arc::new(RealWorld)).await.unwrap().into_inner()
    }
}
