//! Reads and writes of objects, for the HTTP side and the controllers alike.
//!
//! Entry point: [`Objects`]. Every write is computed outside the lock from what was read and committed
//! only if nothing changed meanwhile, else computed again; it returns once it is durable.
//! Invariants: a write that changes nothing makes no revision; no answer, refusals included, tells of a
//! write that is not durable, so that nothing told to a client is undone by a restart.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cocoon_kit::world::World;
use serde_json::Value;

use crate::{
    error::ApiError,
    fields,
    journal::{Durability, Record},
    json::{self, text},
    resources::{Kind, by_table},
    rules::{self, DeleteOptions, Deletion, Part},
    store::{Expect, Filter, Key, Object, Raced, Store},
};

/// How often a write is computed again when others came first.
const TRIES: u32 = 32;
/// How often another generated name is tried.
const NAMES: u32 = 8;
/// Namespaces that cannot be deleted. (`kube-node-lease` can, as in the API, and is made anew.)
const IMMORTAL: [&str; 3] = ["default", "kube-system", "kube-public"];

/// Options of a create or update.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WriteOptions {
    pub(crate) dry_run: bool,
}

/// What a write left.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) object: Arc<Object>,
    /// Complaints about fields that do not belong.
    pub(crate) complaints: Vec<String>,
    pub(crate) created: bool,
}

/// What a delete left.
#[derive(Debug)]
pub(crate) struct Deleted {
    pub(crate) object: Arc<Object>,
    pub(crate) removed: bool,
}

/// The objects of a plane.
#[derive(Debug)]
pub(crate) struct Objects {
    store: Mutex<Store>,
    durability: Durability,
    world: Arc<dyn World>,
}

impl Objects {
    pub(crate) fn new(store: Store, durability: Durability, world: Arc<dyn World>) -> Self {
        Self { store: Mutex::new(store), durability, world }
    }

    pub(crate) fn world(&self) -> &dyn World {
        &*self.world
    }

    pub(crate) fn durability(&self) -> &Durability {
        &self.durability
    }

    /// The store. Hold it shortly and never across an await.
    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        // A panic inside leaves at worst a missed notice; the objects themselves are swapped whole.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn find(&self, kind: &Kind, namespace: &str, name: &str) -> Option<Arc<Object>> {
        self.store().get(kind.table, namespace, name).cloned()
    }

    /// The object, once it is durable.
    pub(crate) async fn get(
        &self,
        kind: &Kind,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<Object>, ApiError> {
        let found = self.find(kind, namespace, name).ok_or_else(|| ApiError::not_found(kind, name));
        let found = self.told(found).await?;
        self.durability.wait(found.revision).await?;
        Ok(found)
    }

    /// `done`, once a refusal rests on durable writes alone: "not found" tells that a deletion happened,
    /// "already exists" and "conflict" tell of other writes.
    async fn told<T>(&self, done: Result<T, ApiError>) -> Result<T, ApiError> {
        if done.is_err() {
            let seen = self.store().revision();
            self.durability.wait(seen).await?;
        }
        done
    }

    /// Matching objects and the revision they agree with.
    pub(crate) async fn list(&self, filter: &Filter) -> Result<(Vec<Arc<Object>>, u64), ApiError> {
        let (objects, revision) = self.store().list(filter);
        self.durability.wait(revision).await?;
        Ok((objects, revision))
    }

    /// Creates an object from a body in `kind`'s form.
    pub(crate) async fn create(
        &self,
        kind: &'static Kind,
        namespace: &str,
        mut body: Value,
        options: WriteOptions,
    ) -> Result<Written, ApiError> {
        self.durability.check()?;
        let complaints = fields::check_type(kind, &mut body)?;
        if !text(&body, "/metadata/resourceVersion").is_empty() {
            return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
        }
        let generate = text(&body, "/metadata/name").is_empty();
        let base = text(&body, "/metadata/generateName").to_owned();
        let mut tries = NAMES;
        loop {
            let mut value = body.clone();
            if generate && !base.is_empty() {
                let name = self.generate_name(&base);
                json::object(&mut value, "metadata").insert("name".into(), name.into());
            }
            rules::prepare_create(kind, &mut value, namespace, self.world.uuid(), self.world.now())?;
            match self.insert(kind, namespace, value, options) {
                Err(error) if error.reason == "AlreadyExists" && generate && tries > 0 => tries -= 1,
                Err(error) => return self.told(Err(error)).await,
                Ok(object) => {
                    self.durability.wait(object.revision).await?;
                    return Ok(Written { object, complaints, created: true });
                }
            }
        }
    }

    fn insert(
        &self,
        kind: &'static Kind,
        namespace: &str,
        value: Value,
        options: WriteOptions,
    ) -> Result<Arc<Object>, ApiError> {
        let name = text(&value, "/metadata/name").to_owned();
        let (stored, value) = (stored_row(kind), kind.stored(value));
        let key = Key::new(kind.table, namespace, &name);
        let mut store = self.store();
        check_namespace(&store, kind, namespace, &name)?;
        if store.by_key(&key).is_some() {
            return Err(ApiError::already_exists(kind, &name));
        }
        if options.dry_run {
            return Ok(Arc::new(Object::new(stored, value, 0)));
        }
        let object = store
            .put(stored, &key, Expect::Absent, value)
            .map_err(|Raced| ApiError::already_exists(kind, &name))?;
        self.submit(&object, true);
        Ok(object)
    }

    /// Called under the store's lock: records keep the order of revisions.
    fn submit(&self, object: &Object, present: bool) {
        let bytes = present.then(|| object.bytes.clone());
        self.durability.submit(Record { revision: object.revision, key: object.key.clone(), bytes });
    }

    fn generate_name(&self, base: &str) -> String {
        const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
        let mut random = [0; 5];
        self.world.random(&mut random);
        let suffix = random.iter().map(|byte| char::from(LETTERS[usize::from(*byte) % LETTERS.len()]));
        let mut name: String = base.chars().take(58).collect();
        name.extend(suffix);
        name
    }

    /// Changes an object. `change` gets it in `kind`'s form and returns the wanted one.
    pub(crate) async fn update(
        &self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        part: Part,
        options: WriteOptions,
        change: impl Fn(Value) -> Result<Value, ApiError> + Send + Sync,
    ) -> Result<Written, ApiError> {
        self.durability.check()?;
        let done = self.try_update(kind, namespace, name, part, options, change);
        let done = self.told(done).await?;
        self.durability.wait(done.object.revision).await?;
        Ok(done)
    }

    fn try_update(
        &self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        part: Part,
        options: WriteOptions,
        change: impl Fn(Value) -> Result<Value, ApiError>,
    ) -> Result<Written, ApiError> {
        for _ in 0..TRIES {
            let current = self.find(kind, namespace, name).ok_or_else(|| ApiError::not_found(kind, name))?;
            let old = kind.shown(current.value());
            let mut new = change(old.clone())?;
            let complaints =
                if part == Part::Inner { Vec::new() } else { fields::check_type(kind, &mut new)? };
            let new = rules::prepare_update(kind, &old, new, part)?;
            let written = |object| Written { object, complaints, created: false };
            if new == old {
                return Ok(written(current));
            }
            if options.dry_run {
                let unsaved = Object::new(stored_row(kind), kind.stored(new), current.revision);
                return Ok(written(Arc::new(unsaved)));
            }
            if let Ok(object) = self.replace(kind, &current, new) {
                return Ok(written(object));
            }
        }
        Err(ApiError::modified(kind, name))
    }

    /// Commits `new` over `current`; an object that was only waiting for this is removed.
    fn replace(&self, kind: &'static Kind, current: &Object, new: Value) -> Result<Arc<Object>, Raced> {
        let finished = rules::is_finished(&new);
        let (stored, new) = (stored_row(kind), kind.stored(new));
        let mut store = self.store();
        let object = if finished {
            store.remove(stored, &current.key, current.revision, new)?
        } else {
            store.put(stored, &current.key, Expect::Revision(current.revision), new)?
        };
        self.submit(&object, !finished);
        Ok(object)
    }

    /// Deletes an object, or starts its deletion.
    pub(crate) async fn delete(
        &self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<Deleted, ApiError> {
        self.durability.check()?;
        if kind.table == "namespaces" && IMMORTAL.contains(&name) {
            return Err(ApiError::forbidden(kind, name, "this namespace may not be deleted"));
        }
        let deleted = self.told(self.try_delete(kind, namespace, name, options)).await?;
        self.durability.wait(deleted.object.revision).await?;
        Ok(deleted)
    }

    fn try_delete(
        &self,
        kind: &'static Kind,
        namespace: &str,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<Deleted, ApiError> {
        for _ in 0..TRIES {
            let current = self.find(kind, namespace, name).ok_or_else(|| ApiError::not_found(kind, name))?;
            if let Some(deleted) = self.delete_current(kind, &current, options)? {
                return Ok(deleted);
            }
        }
        Err(ApiError::modified(kind, name))
    }

    /// `None` when others came first.
    fn delete_current(
        &self,
        kind: &'static Kind,
        current: &Arc<Object>,
        options: &DeleteOptions,
    ) -> Result<Option<Deleted>, ApiError> {
        // Both views of a table agree in metadata, so the stored form will do.
        let old = current.value();
        let deletion = rules::plan_delete(kind, &old, options, self.world.now())?;
        if options.dry_run || deletion == Deletion::Nothing {
            let removed = deletion == Deletion::Remove;
            return Ok(Some(Deleted { object: Arc::clone(current), removed }));
        }
        let row = stored_row(kind);
        let mut store = self.store();
        let done = match deletion {
            Deletion::Mark(marked) => {
                store.put(row, &current.key, Expect::Revision(current.revision), marked).map(|o| (o, false))
            }
            Deletion::Remove | Deletion::Nothing => {
                store.remove(row, &current.key, current.revision, old).map(|o| (o, true))
            }
        };
        let Ok((object, removed)) = done else { return Ok(None) };
        self.submit(&object, !removed);
        Ok(Some(Deleted { object, removed }))
    }
}

/// The row in whose form `kind` is stored.
fn stored_row(kind: &'static Kind) -> &'static Kind {
    by_table(kind.table).unwrap_or(kind)
}

fn check_namespace(store: &Store, kind: &Kind, namespace: &str, name: &str) -> Result<(), ApiError> {
    if !kind.namespaced {
        return Ok(());
    }
    let spaces = by_table("namespaces").unwrap_or(kind);
    match store.get("namespaces", "", namespace) {
        None => Err(ApiError::not_found(spaces, namespace)),
        Some(space) if space.deleting => Err(ApiError::terminating(kind, name, namespace)),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cocoon_kit::world::RealWorld;
    use serde_json::json;

    use super::*;
    use crate::journal::fake::Fake;

    fn objects(fake: &Fake) -> Objects {
        let durability = Durability::start(Box::new(fake.clone()), 0).unwrap();
        Objects::new(Store::new(0, []), durability, Arc::new(RealWorld))
    }

    fn body(name: &str) -> Value {
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } })
    }

    async fn is_silent<T>(asked: impl Future<Output = Result<T, ApiError>>) -> bool {
        tokio::time::timeout(Duration::from_millis(50), asked).await.is_err()
    }

    #[tokio::test]
    async fn no_refusal_tells_of_a_write_that_is_not_durable() {
        let (fake, kind) = (Fake::default(), by_table("nodes").unwrap());
        let (objects, options) = (objects(&fake), WriteOptions::default());
        objects.create(kind, "", body("gone"), options).await.unwrap();
        fake.hold(true);
        let now = DeleteOptions { grace: Some(0), ..DeleteOptions::default() };
        let remove = || objects.delete(kind, "", "gone", &now);
        let update = || objects.update(kind, "", "gone", Part::Main, options, Ok);
        assert!(is_silent(remove()).await, "the delete waits for the disk");
        assert!(objects.find(kind, "", "gone").is_none());
        assert!(is_silent(objects.get(kind, "", "gone")).await, "404 before the deletion is durable");
        assert!(is_silent(remove()).await);
        assert!(is_silent(update()).await);
        assert!(is_silent(objects.create(kind, "", body("new"), options)).await);
        assert!(is_silent(objects.create(kind, "", body("new"), options)).await, "409 of what may not stay");
        fake.hold(false);
        assert_eq!(objects.get(kind, "", "gone").await.unwrap_err().code, 404);
        assert_eq!(remove().await.unwrap_err().code, 404);
        assert_eq!(update().await.unwrap_err().code, 404);
        assert_eq!(objects.create(kind, "", body("new"), options).await.unwrap_err().reason, "AlreadyExists");
    }
}
