//! Garbage of a layout: what may go, and the marks of pushes that keep it.
//!
//! Entry points: [`Store::collect`] and [`Store::mark_push`]. Invariants: nothing goes that a manifest of
//! `index.json` needs, that was used within the grace, or that was used since the oldest push in flight began;
//! a manifest that cannot be read stops the collection of blobs, by name.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, Metadata},
    io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::fs::{FlockOperation, flock};

use super::{index::Index, store::Store};
use crate::{manifest::Document, registry::RegistryError};

/// Beginning of the names of pushes' files among the temporary ones.
const PUSH: &str = "push-";

/// What a collection removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Blobs that no manifest needed.
    pub blobs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Left-overs of interrupted writers.
    pub temporaries: u64,
}

/// A push in flight: a file whose lock the kernel lets go of when this process ends. Its time stamp is the
/// push's begin.
#[derive(Debug)]
pub(super) struct PushMark {
    path: PathBuf,
    _locked: File,
}

impl Drop for PushMark {
    fn drop(&mut self) {
        // One that stays is swept as soon as its lock is gone.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Store {
    /// Says that a push began.
    pub(super) fn mark_push(&self) -> Result<PushMark, RegistryError> {
        // Keeps a collector out until the file carries its lock.
        let _held = self.locked(FlockOperation::NonBlockingLockShared)?;
        let (file, path) = self.temporary(PUSH).map_err(|error| self.full("a push's mark", error))?;
        Ok(PushMark { path, _locked: file })
    }

    /// Removes blobs that nothing needs and that are past their [`Keep`], and left-overs.
    pub(super) fn collect(&self, grace: Duration) -> Result<Collected, RegistryError> {
        let failed = |error: io::Error| {
            RegistryError::unavailable(format!("collecting garbage in {}", self.root.display()), error)
        };
        // Manifests never change, so most of the reading needs no lock. What is damaged, or goes meanwhile, is
        // judged below.
        let mut needs = Needs::default();
        let _ = needs.read(self);
        let candidates = self.unneeded(&needs, Keep { grace, since: None }).map_err(failed)?;
        let _held = self.locked(FlockOperation::NonBlockingLockExclusive)?;
        let mut collected = Collected::default();
        let since = self.sweep_temporaries(&mut collected).map_err(failed)?;
        needs.read(self)?;
        self.remove(candidates, &needs, Keep { grace, since }, &mut collected).map_err(failed)?;
        Ok(collected)
    }

    /// Names of blobs that are old enough and that nothing needs, as far as is known.
    fn unneeded(&self, needs: &Needs, keep: Keep) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(self.blobs())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !needs.has(&name) && found(entry.metadata())?.is_some_and(|blob| !keep.keeps(&blob)) {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Removes those that are still not needed and still old. The caller holds the lock.
    fn remove(
        &self,
        candidates: Vec<String>,
        needs: &Needs,
        keep: Keep,
        collected: &mut Collected,
    ) -> io::Result<()> {
        for name in candidates.into_iter().filter(|name| !needs.has(name)) {
            let path = self.blobs().join(name);
            let Some(blob) = found(std::fs::metadata(&path))? else { continue };
            if !keep.keeps(&blob) && found(std::fs::remove_file(&path))?.is_some() {
                collected.blobs += 1;
                collected.bytes += blob.len();
            }
        }
        Ok(())
    }

    /// Removes what dead writers left; when the oldest push that lives began. The caller holds the lock.
    fn sweep_temporaries(&self, collected: &mut Collected) -> io::Result<Option<SystemTime>> {
        let mut oldest = None;
        for entry in std::fs::read_dir(self.temporaries())? {
            let path = entry?.path();
            let Some(file) = found(File::open(&path))? else { continue };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => collected.temporaries += u64::from(found(std::fs::remove_file(&path))?.is_some()),
                Err(rustix::io::Errno::WOULDBLOCK) if is_push(&path) => {
                    let began = file.metadata()?.modified()?;
                    oldest = Some(oldest.map_or(began, |oldest: SystemTime| oldest.min(began)));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(oldest)
    }
}

fn is_push(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PUSH))
}

/// `None`: somebody else removed it first.
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Which blobs stay although nothing needs them.
#[derive(Debug, Clone, Copy)]
struct Keep {
    /// Those used within this time,
    grace: Duration,
    /// and those used since this moment: the begin of the oldest push in flight.
    since: Option<SystemTime>,
}

impl Keep {
    fn keeps(&self, blob: &Metadata) -> bool {
        let used = blob.modified().unwrap_or_else(|_| SystemTime::now());
        let age = SystemTime::now().duration_since(used).unwrap_or_default();
        age < self.grace || self.since.is_some_and(|since| used >= since)
    }
}

/// What manifests need, read so far.
#[derive(Debug, Default)]
struct Needs {
    /// Manifests that were read, with their children.
    read: BTreeMap<String, Vec<String>>,
    /// Everything that they need, themselves included.
    digests: BTreeSet<String>,
}

impl Needs {
    /// Reads every manifest that `index.json` needs now, however deep, and that was not read before.
    fn read(&mut self, store: &Store) -> Result<(), RegistryError> {
        let index = Index::read(&store.root)?;
        let mut open: Vec<_> = index.entries().map(|entry| (entry.digest, entry.name)).collect();
        let mut seen = BTreeSet::new();
        while let Some((digest, name)) = open.pop() {
            if !seen.insert(digest.clone()) {
                continue;
            }
            if !self.read.contains_key(&digest) {
                self.add(store, &digest, &name)?;
            }
            let children = self.read.get(&digest).into_iter().flatten();
            open.extend(children.map(|child| (child.clone(), name.clone())));
        }
        Ok(())
    }

    fn add(&mut self, store: &Store, digest: &str, name: &str) -> Result<(), RegistryError> {
        let unreadable = |why: Box<dyn std::error::Error + Send + Sync>| {
            let root = store.root.display();
            let what = format!(
                "collecting garbage in {root}: manifest {digest} of {name:?} cannot be read, and what it needs \
                 is unknown, so no blob goes; restore its file in blobs/sha256, or give {name:?} up by removing \
                 its entry from index.json"
            );
            RegistryError::unavailable(what, why)
        };
        let bytes = store.document(digest).map_err(|error| unreadable(error.into()))?;
        let document = Document::parse(&bytes).map_err(|why| unreadable(why.into()))?;
        self.digests.insert(digest.to_owned());
        self.digests.extend(document.references().map(str::to_owned));
        let children = document.manifests.into_iter().map(|child| child.digest);
        self.read.insert(digest.to_owned(), children.collect());
        Ok(())
    }

    /// Whether the blob of this name, the hex of its digest, is needed.
    fn has(&self, name: &str) -> bool {
        self.digests.contains(&format!("sha256:{name}"))
    }
}
