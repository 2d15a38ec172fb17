//! Removes objects whose owners are gone.
//!
//! Entry points: [`work`] and the pure [`judge`]. An owner of a kind that this plane does not serve counts
//! as present, and so does an owner in a namespace of an object that has none, which no reference can name:
//! nothing is removed on a guess. Foreground and orphaning deletes end here, too.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use serde_json::Value;

use super::{Woke, wait};
use crate::{
    error::ApiError,
    json::{self, flag, list, text},
    objects::WriteOptions,
    plane::Inner,
    resources::{by_kind, by_table},
    rules::{DeleteOptions, FOREGROUND, ORPHAN, Part, Propagation},
    store::{Change, Filter, Key, Notice, Object, Store},
};

/// How often an object whose collection failed is looked at without an event.
const RETRY: Duration = Duration::from_secs(1);

/// How an owner stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Present,
    /// Being deleted in the foreground: it waits for its dependents.
    Leaving,
    Gone,
}

/// What to do with a dependent.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Keep,
    /// Drop the references at these places, the others hold it.
    Unlink(Vec<usize>),
    Delete,
}

/// Decides by the owners of an object.
fn judge(owners: &[Owner]) -> Verdict {
    let lost: Vec<_> = (0..owners.len()).filter(|at| owners[*at] != Owner::Present).collect();
    if lost.is_empty() {
        Verdict::Keep
    } else if lost.len() == owners.len() {
        Verdict::Delete
    } else {
        Verdict::Unlink(lost)
    }
}

/// How the owner of one reference stands.
fn owner(store: &Store, namespace: &str, reference: &Value) -> Owner {
    let Some(kind) = by_kind(text(reference, "/apiVersion"), text(reference, "/kind")) else {
        return Owner::Present;
    };
    if kind.namespaced && namespace.is_empty() {
        return Owner::Present;
    }
    let found = store.by_uid(text(reference, "/uid")).filter(|owner| {
        owner.key.table == kind.table
            && &*owner.key.name == text(reference, "/name")
            && (!kind.namespaced || &*owner.key.namespace == namespace)
    });
    match found {
        None => Owner::Gone,
        Some(owner) if owner.deleting && has_finalizer(&owner.value(), FOREGROUND) => Owner::Leaving,
        Some(_) => Owner::Present,
    }
}

fn has_finalizer(value: &Value, name: &str) -> bool {
    list(value, "/metadata/finalizers").iter().any(|finalizer| finalizer == name)
}

/// Until the queue overflows; then everything is looked at anew.
pub(super) async fn work(inner: &Inner) {
    let (mut subscription, mut due) = {
        let mut store = inner.objects.store();
        let subscription = store.subscribe(&Filter::default());
        let (all, _) = store.list(&Filter::default());
        let concerned = all.iter().filter(|object| !object.owners.is_empty() || object.deleting);
        (subscription, concerned.map(|object| object.key.clone()).collect::<BTreeSet<_>>())
    };
    let mut notices = Vec::new();
    loop {
        for key in std::mem::take(&mut due) {
            if let Err(error) = examine(inner, &key).await {
                tracing::warn!(%error, ?key, "collecting failed, trying again");
                due.insert(key);
            }
        }
        // What failed is tried again even if nothing happens.
        let patience = (!due.is_empty()).then_some(RETRY);
        if wait(&mut subscription, &mut notices, patience).await == Woke::Overflow {
            return;
        }
        for notice in notices.drain(..) {
            if let Notice::Change(change, object) = notice {
                concern(inner, change, &object, &mut due);
            }
        }
    }
}

/// Adds what an event makes worth a look.
fn concern(inner: &Inner, change: Change, object: &Object, due: &mut BTreeSet<Key>) {
    let store = inner.objects.store();
    if change == Change::Deleted {
        due.extend(store.dependents(&object.uid).iter().map(|dependent| dependent.key.clone()));
        // An owner may have waited for this one.
        let owners = object.owners.iter().filter_map(|uid| store.by_uid(uid));
        due.extend(owners.filter(|owner| owner.deleting).map(|owner| owner.key.clone()));
    } else if !object.owners.is_empty() || object.deleting {
        due.insert(object.key.clone());
        if object.deleting {
            due.extend(store.dependents(&object.uid).iter().map(|dependent| dependent.key.clone()));
        }
    }
}

async fn examine(inner: &Inner, key: &Key) -> Result<(), ApiError> {
    let Some(object) = inner.objects.store().by_key(key).cloned() else { return Ok(()) };
    let value = object.value();
    if object.deleting {
        release(inner, &object, &value).await?;
    }
    if object.owners.is_empty() || object.deleting {
        return Ok(());
    }
    let references = list(&value, "/metadata/ownerReferences");
    let owners: Vec<_> = {
        let store = inner.objects.store();
        references.iter().map(|reference| owner(&store, &key.namespace, reference)).collect()
    };
    match judge(&owners) {
        Verdict::Keep => Ok(()),
        Verdict::Unlink(lost) => {
            let lost: Vec<_> = lost.iter().map(|at| text(&references[*at], "/uid").to_owned()).collect();
            unlink(inner, &object, &lost).await
        }
        Verdict::Delete => delete(inner, &object).await,
    }
}

/// Deletes what was examined and nothing newer: a reference may have been removed or added meanwhile, and
/// then the change itself brings the object up again.
async fn delete(inner: &Inner, object: &Object) -> Result<(), ApiError> {
    let Some(kind) = by_table(object.key.table) else { return Ok(()) };
    let has_dependents = !inner.objects.store().dependents(&object.uid).is_empty();
    let propagation = if has_dependents { Propagation::Foreground } else { Propagation::Background };
    let (uid, revision) = ((*object.uid).into(), object.revision.to_string());
    let options = DeleteOptions { uid, revision, propagation, ..DeleteOptions::default() };
    settled(inner.objects.delete(kind, &object.key.namespace, &object.key.name, &options).await.map(drop))
}

/// Gone or replaced meanwhile is as good as done.
fn settled(result: Result<(), ApiError>) -> Result<(), ApiError> {
    match result {
        Err(error) if matches!(error.code, 404 | 409) => Ok(()),
        other => other,
    }
}

async fn unlink(inner: &Inner, object: &Object, lost: &[String]) -> Result<(), ApiError> {
    change(inner, object, |value| {
        if let Some(metadata) = value.get_mut("metadata") {
            json::array(metadata, "ownerReferences")
                .retain(|r| !lost.iter().any(|uid| uid == text(r, "/uid")));
        }
    })
    .await
}

async fn change(
    inner: &Inner,
    object: &Object,
    edit: impl Fn(&mut Value) + Send + Sync,
) -> Result<(), ApiError> {
    let Some(kind) = by_table(object.key.table) else { return Ok(()) };
    let uid = &object.uid;
    let edit = |mut value: Value| {
        crate::rules::check_preconditions(kind, &value, uid, "")?;
        edit(&mut value);
        Ok(value)
    };
    let (namespace, name) = (&object.key.namespace, &object.key.name);
    let done = inner.objects.update(kind, namespace, name, Part::Inner, WriteOptions::default(), edit).await;
    settled(done.map(drop))
}

/// Lets an object go that is deleted in the foreground or orphans its dependents.
async fn release(inner: &Inner, object: &Object, value: &Value) -> Result<(), ApiError> {
    let dependents = inner.objects.store().dependents(&object.uid);
    if has_finalizer(value, ORPHAN) {
        for dependent in &dependents {
            unlink(inner, dependent, &[(*object.uid).to_owned()]).await?;
        }
        return drop_finalizer(inner, object, ORPHAN).await;
    }
    if has_finalizer(value, FOREGROUND) {
        let blocks = |dependent: &&Arc<Object>| {
            // One that cannot be this object's dependent never goes with it, so it is not waited for.
            let (here, there) = (&object.key.namespace, &dependent.key.namespace);
            if !here.is_empty() && here != there {
                return false;
            }
            let value = dependent.value();
            let own = |r: &&Value| text(r, "/uid") == &*object.uid;
            list(&value, "/metadata/ownerReferences")
                .iter()
                .filter(own)
                .any(|r| flag(r, "/blockOwnerDeletion"))
        };
        if !dependents.iter().any(|dependent| blocks(&dependent)) {
            return drop_finalizer(inner, object, FOREGROUND).await;
        }
    }
    Ok(())
}

async fn drop_finalizer(inner: &Inner, object: &Object, name: &str) -> Result<(), ApiError> {
    change(inner, object, |value| {
        if let Some(metadata) = value.get_mut("metadata") {
            json::array(metadata, "finalizers").retain(|finalizer| finalizer != name);
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::controllers::testing;

    #[tokio::test]
    async fn an_object_whose_references_changed_since_it_was_examined_is_kept() {
        let inner = testing::inner().await;
        let kind = by_table("configmaps").unwrap();
        let gone = json!([{ "apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "gone" }]);
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a", "ownerReferences": gone },
        });
        let examined =
            inner.objects.create(kind, "default", map, WriteOptions::default()).await.unwrap().object;
        unlink(&inner, &examined, &["gone".to_owned()]).await.unwrap();
        delete(&inner, &examined).await.unwrap();
        let kept = inner.objects.find(kind, "default", "a").unwrap();
        delete(&inner, &kept).await.unwrap();
        assert!(inner.objects.find(kind, "default", "a").is_none());
    }

    #[tokio::test]
    async fn an_object_of_the_cluster_outlives_whatever_in_a_namespace_it_names_as_owner() {
        let inner = testing::inner().await;
        let (maps, spaces) = (by_table("configmaps").unwrap(), by_table("namespaces").unwrap());
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "o" } });
        let options = WriteOptions::default();
        let owner = inner.objects.create(maps, "default", map, options).await.unwrap().object;
        let key = |name: &str| Key::new(spaces.table, "", name);
        for (name, uid) in [("living", &*owner.uid), ("gone", "nobody")] {
            let named = json!([{
                "apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": uid, "blockOwnerDeletion": true,
            }]);
            let space = json!({
                "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "ownerReferences": named },
            });
            inner.objects.create(spaces, "", space, options).await.unwrap();
            examine(&inner, &key(name)).await.unwrap();
            assert!(inner.objects.find(spaces, "", name).is_some_and(|space| !space.deleting), "{name}");
        }
        let foreground = DeleteOptions { propagation: Propagation::Foreground, ..DeleteOptions::default() };
        inner.objects.delete(maps, "default", "o", &foreground).await.unwrap();
        examine(&inner, &owner.key).await.unwrap();
        assert!(inner.objects.find(maps, "default", "o").is_none(), "it waits for no such dependent");
        examine(&inner, &key("living")).await.unwrap();
        assert!(inner.objects.find(spaces, "", "living").is_some_and(|space| !space.deleting));
    }

    #[test]
    fn an_object_lives_as_long_as_one_owner_is_present() {
        use Owner::{Gone, Leaving, Present};
        for (owners, wanted) in [
            (vec![], Verdict::Keep),
            (vec![Present], Verdict::Keep),
            (vec![Gone], Verdict::Delete),
            (vec![Leaving, Gone], Verdict::Delete),
            (vec![Gone, Present, Leaving], Verdict::Unlink(vec![0, 2])),
        ] {
            assert_eq!(judge(&owners), wanted, "{owners:?}");
        }
    }
}
