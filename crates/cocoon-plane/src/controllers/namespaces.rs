//! Fills new namespaces with what clients expect in them, empties and removes those that are deleted, and
//! makes those anew that always exist.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Woke, make_namespaces, row, wait};
use crate::{
    error::ApiError,
    json,
    objects::WriteOptions,
    plane::Inner,
    resources::KINDS,
    rules::{self, DeleteOptions, Part},
    store::{Change, Filter, Notice, Object},
};

/// How often a namespace that is not empty yet is looked at without an event.
const RETRY: std::time::Duration = std::time::Duration::from_secs(5);

/// Until the queue overflows; then everything is looked at anew.
pub(super) async fn work(inner: &Inner) {
    let filter = Filter { table: Some("namespaces"), ..Filter::default() };
    let mut everything = inner.objects.store().subscribe(&Filter::default());
    let mut notices = Vec::new();
    let mut look = true;
    loop {
        let mut leaving = false;
        if look {
            if let Err(error) = make_namespaces(inner).await {
                tracing::warn!(%error, "a namespace that always exists was not made anew");
                leaving = true;
            }
            let (namespaces, _) = inner.objects.store().list(&filter);
            for namespace in namespaces {
                leaving |= namespace.deleting;
                if let Err(error) = tend(inner, &namespace).await {
                    tracing::warn!(%error, namespace = &*namespace.key.name, "tending a namespace failed");
                    leaving = true;
                }
            }
        }
        // Without one that leaves, only events matter.
        look = match wait(&mut everything, &mut notices, leaving.then_some(RETRY)).await {
            Woke::Overflow => return,
            Woke::Time => true,
            Woke::News => notices.drain(..).any(|notice| matters(inner, &notice)),
        };
        notices.clear();
    }
}

/// A namespace changed, or something left a namespace that is being emptied.
fn matters(inner: &Inner, notice: &Notice) -> bool {
    let Notice::Change(change, object) = notice else { return false };
    match object.key.table {
        "namespaces" => true,
        _ if *change == Change::Deleted => {
            let store = inner.objects.store();
            let space = store.get("namespaces", "", &object.key.namespace);
            let furniture = matches!(object.key.table, "configmaps" | "serviceaccounts");
            space.is_some_and(|space| space.deleting || furniture)
        }
        _ => false,
    }
}

async fn tend(inner: &Inner, namespace: &Object) -> Result<(), ApiError> {
    if namespace.deleting { empty(inner, namespace).await } else { furnish(inner, &namespace.key.name).await }
}

/// The default service account and the root certificate.
async fn furnish(inner: &Inner, namespace: &str) -> Result<(), ApiError> {
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "default" } });
    ensure(inner, "serviceaccounts", namespace, account).await?;
    if let Some(authority) = inner.authority.get() {
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "kube-root-ca.crt" },
            "data": { "ca.crt": authority },
        });
        ensure(inner, "configmaps", namespace, map).await?;
    }
    Ok(())
}

async fn ensure(inner: &Inner, table: &str, namespace: &str, body: Value) -> Result<(), ApiError> {
    let kind = row(table)?;
    if inner.objects.find(kind, namespace, json::text(&body, "/metadata/name")).is_some() {
        return Ok(());
    }
    match inner.objects.create(kind, namespace, body, WriteOptions::default()).await {
        // Someone else made it, or the namespace is leaving.
        Err(error) if matches!(error.code, 409 | 404 | 403) => Ok(()),
        other => other.map(drop),
    }
}

/// Deletes what is inside; once nothing is, lets the namespace go.
async fn empty(inner: &Inner, namespace: &Object) -> Result<(), ApiError> {
    let mut left = 0;
    for kind in KINDS.iter().filter(|kind| kind.namespaced && kind.is_stored_form()) {
        let inside = Some(Arc::clone(&namespace.key.name));
        let filter = Filter { table: Some(kind.table), namespace: inside, ..Filter::default() };
        let objects = {
            let store = inner.objects.store();
            // Only a namespace that leaves takes nothing new: what is listed with it is its own.
            if store.by_uid(&namespace.uid).is_none() {
                return Ok(());
            }
            store.list(&filter).0
        };
        for object in objects {
            if object.deleting {
                left += 1;
                continue;
            }
            let options = DeleteOptions { uid: (*object.uid).into(), ..DeleteOptions::default() };
            match inner.objects.delete(kind, &object.key.namespace, &object.key.name, &options).await {
                Ok(deleted) => left += usize::from(!deleted.removed),
                Err(error) if error.code == 404 => {}
                Err(error) if error.code == 409 => left += 1,
                Err(error) => return Err(error),
            }
        }
    }
    if left > 0 {
        return Ok(());
    }
    let kind = row("namespaces")?;
    let release = |mut value: Value| {
        rules::check_preconditions(kind, &value, &namespace.uid, "")?;
        json::object(&mut value, "spec").insert("finalizers".into(), json!([]));
        Ok(value)
    };
    let name = &namespace.key.name;
    match inner.objects.update(kind, "", name, Part::Inner, WriteOptions::default(), release).await {
        // Gone, or made anew under the same name.
        Err(error) if matches!(error.code, 404 | 409) => Ok(()),
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::testing;

    #[tokio::test]
    async fn a_namespace_made_anew_is_not_emptied_for_the_old_one() {
        let inner = testing::inner().await;
        let kind = row("namespaces").unwrap();
        let body = || json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "n" } });
        let objects = &inner.objects;
        objects.create(kind, "", body(), WriteOptions::default()).await.unwrap();
        let old = objects.delete(kind, "", "n", &DeleteOptions::default()).await.unwrap().object;
        empty(&inner, &old).await.unwrap();
        assert!(objects.find(kind, "", "n").is_none());
        objects.create(kind, "", body(), WriteOptions::default()).await.unwrap();
        furnish(&inner, "n").await.unwrap();
        empty(&inner, &old).await.unwrap();
        let account = objects.find(row("serviceaccounts").unwrap(), "n", "default");
        assert!(account.is_some_and(|account| !account.deleting));
        let space = objects.find(kind, "", "n").unwrap();
        assert!(!json::list(&space.value(), "/spec/finalizers").is_empty());
    }
}
