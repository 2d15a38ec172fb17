//! The folder of a layout: blobs, locks and the durable steps, all blocking.
//!
//! Lock order: one lock file (`.cocoon.lock`), held shared while a blob is looked up or moved into place,
//! exclusively while `index.json` changes or blobs are collected. So a blob that was just found or stored
//! cannot be collected between that answer and its fresh time stamp, and a manifest is only accepted
//! while all that it needs is there.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use cocoon_kit::files;
use rustix::fs::{FlockOperation, flock};

use super::index::{Index, Target, read_capped};
use crate::{
    digest::{self, Hasher},
    manifest::{Descriptor, Document, MAX_MANIFEST},
    registry::{Manifest, RegistryError},
};

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

#[derive(Debug, Clone)]
pub(super) struct Store {
    pub(super) root: PathBuf,
}

/// Where a name must point for it to be moved.
#[derive(Debug)]
pub(super) enum Now {
    Any,
    /// To this manifest, or nowhere.
    At(Option<String>),
}

/// A held lock; the kernel lets go of it when the file closes.
struct Held(#[expect(dead_code, reason = "held for its lock")] File);

impl Store {
    /// Creates the folder's files if it is new; an existing layout is only checked.
    pub(super) fn open(root: &Path) -> Result<Self, RegistryError> {
        let store = Self { root: root.to_owned() };
        store.prepare().map_err(|error| {
            RegistryError::unavailable(format!("opening the OCI layout {}", root.display()), error)
        })?;
        Index::read(root)?;
        Ok(store)
    }

    fn prepare(&self) -> io::Result<()> {
        std::fs::create_dir_all(self.blobs())?;
        std::fs::create_dir_all(self.temporaries())?;
        let _held = self.lock(FlockOperation::LockExclusive)?;
        let marker = self.root.join("oci-layout");
        if marker.exists() {
            return Ok(());
        }
        // A new layout. The marker goes last: with it, a missing index.json is damage, not newness.
        let index = self.root.join("index.json");
        if !index.exists() {
            if std::fs::read_dir(self.blobs())?.next().is_some() {
                return Err(io::Error::other("there are blobs but neither oci-layout nor index.json"));
            }
            files::replace(&index, Index::empty_text().as_bytes(), 0o644)?;
        }
        files::replace(&marker, br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)
    }

    fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    fn temporaries(&self) -> PathBuf {
        self.root.join(".tmp")
    }

    fn lock(&self, operation: FlockOperation) -> io::Result<Held> {
        let path = self.root.join(".cocoon.lock");
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o644).open(path)?;
        loop {
            match flock(&file, operation) {
                Ok(()) => return Ok(Held(file)),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn locked(&self, operation: FlockOperation) -> Result<Held, RegistryError> {
        self.lock(operation).map_err(|error| {
            RegistryError::unavailable(format!("locking the OCI layout {}", self.root.display()), error)
        })
    }

    fn blob(&self, digest: &str) -> Result<PathBuf, RegistryError> {
        let hex = digest::hex_of(digest).ok_or_else(|| RegistryError::InvalidName(digest.to_owned()))?;
        Ok(self.blobs().join(hex))
    }

    /// "Not there" only counts while the layout itself is there (an unmounted folder has no blobs either).
    fn absent<T>(&self, what: &str) -> Result<Option<T>, RegistryError> {
        match std::fs::metadata(self.root.join("oci-layout")) {
            Ok(_) => Ok(None),
            Err(error) => Err(RegistryError::unavailable(
                format!("looking for {what} in {} (is it still mounted?)", self.root.display()),
                error,
            )),
        }
    }

    /// Opens a blob. Marks it as fresh when `touch`.
    pub(super) fn open_blob(&self, digest: &str, touch: bool) -> Result<Option<(File, u64)>, RegistryError> {
        let path = self.blob(digest)?;
        let failed = |error: io::Error| {
            RegistryError::unavailable(format!("reading blob {digest} in {}", self.root.display()), error)
        };
        let _held = if touch { Some(self.locked(FlockOperation::LockShared)?) } else { None };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return self.absent(digest),
            Err(error) => return Err(failed(error)),
        };
        let length = file.metadata().map_err(failed)?.len();
        if touch {
            refresh(&file).map_err(failed)?;
        }
        Ok(Some((file, length)))
    }

    /// Starts writing a blob.
    pub(super) fn begin(&self, digest: &str, size: u64) -> Result<Incoming, RegistryError> {
        // Keeps a collector out until the new file carries its writer's lock.
        let _held = self.locked(FlockOperation::LockShared)?;
        self.begin_unlocked(digest, size)
    }

    fn begin_unlocked(&self, digest: &str, size: u64) -> Result<Incoming, RegistryError> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let target = self.blob(digest)?;
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = self.temporaries().join(format!("{}-{moment}-{serial}", std::process::id()));
        let open = || -> io::Result<File> {
            let file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path)?;
            // A collector leaves a temporary file alone while its writer lives.
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            Ok(file)
        };
        let file = open().map_err(|error| self.full(digest, error))?;
        let digest = digest.to_owned();
        Ok(Incoming { store: self.clone(), file, path, target, digest, size, hasher: Hasher::default() })
    }

    fn full(&self, object: &str, error: io::Error) -> RegistryError {
        let root = self.root.display();
        let way_out = match error.raw_os_error() {
            Some(code) if rustix::io::Errno::from_raw_os_error(code) == rustix::io::Errno::NOSPC => {
                " (the disk is full: free space or collect garbage, then try again; no tag was changed)"
            }
            _ => "",
        };
        RegistryError::unavailable(format!("storing {object} in {root}{way_out}"), error)
    }

    /// Stores a whole blob.
    pub(super) fn put(&self, digest: &str, bytes: &[u8]) -> Result<(), RegistryError> {
        let size = bytes.len() as u64;
        if let Some((_, length)) = self.open_blob(digest, true)?
            && length == size
        {
            return Ok(());
        }
        let mut incoming = self.begin(digest, size)?;
        incoming.write(bytes)?;
        incoming.commit()
    }

    /// Reads a manifest's bytes by digest, verified.
    pub(super) fn document(&self, digest: &str) -> Result<Vec<u8>, RegistryError> {
        let path = self.blob(digest)?;
        let bytes = match read_capped(&path, MAX_MANIFEST) {
            Ok(bytes) => bytes,
            // The index promises this manifest: its absence is damage, not "not there".
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.absent::<()>(digest)?;
                return Err(RegistryError::Corrupt { object: format!("{digest} (missing)") });
            }
            Err(error) => {
                let what = format!("reading manifest {digest} in {}", self.root.display());
                return Err(RegistryError::unavailable(what, error));
            }
        };
        if digest::of(&bytes) == digest {
            Ok(bytes)
        } else {
            Err(RegistryError::Corrupt { object: digest.to_owned() })
        }
    }

    /// A manifest by tag, by digest, or by digest as the child of an index of this repository.
    pub(super) fn manifest(
        &self,
        repository: &str,
        reference: &str,
    ) -> Result<Option<Manifest>, RegistryError> {
        let index = Index::read(&self.root)?;
        let found = match index.find(repository, reference) {
            Some(entry) => Some((entry.digest, entry.media_type)),
            None if digest::is_valid(reference) => self.child(&index, repository, reference)?,
            None => None,
        };
        let Some((digest, media_type)) = found else { return Ok(None) };
        let bytes = self.document(&digest)?.into();
        Ok(Some(Manifest { bytes, media_type, digest }))
    }

    fn child(
        &self,
        index: &Index,
        repository: &str,
        digest: &str,
    ) -> Result<Option<(String, String)>, RegistryError> {
        for entry in index.entries().filter(|entry| entry.repository() == repository) {
            let Ok(document) = Document::parse(&self.document(&entry.digest)?) else { continue };
            if let Some(child) = document.manifests.into_iter().find(|child| child.digest == digest) {
                return Ok(Some((child.digest, child.media_type)));
            }
        }
        Ok(None)
    }

    /// Stores a manifest and points a name to it, if all that it needs is there. `None`: the name is not where
    /// it should be now, and stays; the look and the change are under one lock.
    pub(super) fn put_manifest(
        &self,
        repository: &str,
        reference: &str,
        media_type: &str,
        bytes: &[u8],
        now: &Now,
    ) -> Result<Option<String>, RegistryError> {
        let digest = digest::of(bytes);
        if digest::is_valid(reference) && reference != digest {
            return Err(RegistryError::Corrupt { object: reference.to_owned() });
        }
        let document = Document::parse(bytes).map_err(|why| {
            RegistryError::unavailable(
                format!("storing manifest {repository} {reference}: it cannot be read"),
                why,
            )
        })?;
        let _held = self.locked(FlockOperation::LockExclusive)?;
        let mut index = Index::read(&self.root)?;
        if let Now::At(expected) = now
            && index.find(repository, reference).map(|entry| entry.digest) != *expected
        {
            return Ok(None);
        }
        for needed in document.descriptors() {
            self.whole(needed).map_err(|why| {
                let root = self.root.display();
                let what = format!("storing manifest {repository} {reference} in {root}: push again");
                RegistryError::unavailable(what, why)
            })?;
        }
        self.put_unlocked(&digest, bytes)?;
        files::sync_folder(&self.blobs()).map_err(|error| self.full(&digest, error))?;
        index.point(repository, reference, &Target { digest: &digest, media_type, size: bytes.len() });
        index.write(&self.root)?;
        Ok(Some(digest))
    }

    /// Whether a blob is there with the length that its descriptor says: a crashed machine leaves files cut.
    fn whole(&self, needed: &Descriptor) -> Result<(), String> {
        let Descriptor { digest, size, .. } = needed;
        let path = self.blob(digest).map_err(|error| error.to_string())?;
        match std::fs::metadata(path) {
            Ok(found) if i64::try_from(found.len()) == Ok(*size) => Ok(()),
            Ok(found) => Err(format!("blob {digest} has {} bytes instead of {size}", found.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(format!("blob {digest} is not there"))
            }
            Err(error) => Err(format!("blob {digest} cannot be looked at: {error}")),
        }
    }

    /// Like [`Self::put`], for a caller that holds the lock.
    fn put_unlocked(&self, digest: &str, bytes: &[u8]) -> Result<(), RegistryError> {
        if std::fs::read(self.blob(digest)?).is_ok_and(|stored| stored == bytes) {
            return Ok(());
        }
        let mut incoming = self.begin_unlocked(digest, bytes.len() as u64)?;
        incoming.write(bytes)?;
        incoming.seal()?;
        incoming.place()
    }

    /// Removes a name.
    pub(super) fn delete(&self, repository: &str, reference: &str) -> Result<(), RegistryError> {
        let _held = self.locked(FlockOperation::LockExclusive)?;
        let mut index = Index::read(&self.root)?;
        if index.forget(repository, reference) { index.write(&self.root) } else { Ok(()) }
    }

    /// Removes a tag if it points to `digest`; the look and the removal are under one lock.
    pub(super) fn delete_tag_if(
        &self,
        repository: &str,
        tag: &str,
        digest: &str,
    ) -> Result<bool, RegistryError> {
        let _held = self.locked(FlockOperation::LockExclusive)?;
        let mut index = Index::read(&self.root)?;
        if index.find(repository, tag).is_none_or(|entry| entry.digest != digest) {
            return Ok(false);
        }
        index.forget(repository, tag);
        index.write(&self.root).map(|()| true)
    }

    /// Removes blobs that nothing needs and that nobody stored or looked up within `grace`.
    pub(super) fn collect(&self, grace: Duration) -> Result<Collected, RegistryError> {
        let failed = |error: io::Error| {
            RegistryError::unavailable(format!("collecting garbage in {}", self.root.display()), error)
        };
        // Manifests never change, so most of the reading needs no lock. What is damaged, or goes meanwhile, is
        // judged below.
        let mut needs = Needs::default();
        let _ = needs.read(self);
        let candidates = self.unneeded(&needs, grace).map_err(failed)?;
        let _held = self.locked(FlockOperation::LockExclusive)?;
        needs.read(self)?;
        let mut collected = Collected::default();
        self.remove(candidates, &needs, grace, &mut collected)
            .and_then(|()| self.sweep_temporaries(&mut collected))
            .map_err(failed)?;
        Ok(collected)
    }

    /// Names of blobs that are old enough and that nothing needs, as far as is known.
    fn unneeded(&self, needs: &Needs, grace: Duration) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(self.blobs())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if needs.has(&name) {
                continue;
            }
            match entry.metadata() {
                Ok(metadata) if is_old(&metadata, grace) => names.push(name),
                Ok(_) => {}
                // Another collector was here first.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(names)
    }

    /// Removes those that are still not needed and still old. The caller holds the lock.
    fn remove(
        &self,
        candidates: Vec<String>,
        needs: &Needs,
        grace: Duration,
        collected: &mut Collected,
    ) -> io::Result<()> {
        for name in candidates.into_iter().filter(|name| !needs.has(name)) {
            let path = self.blobs().join(name);
            match std::fs::metadata(&path) {
                Ok(metadata) if is_old(&metadata, grace) => {
                    std::fs::remove_file(&path)?;
                    collected.blobs += 1;
                    collected.bytes += metadata.len();
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn sweep_temporaries(&self, collected: &mut Collected) -> io::Result<()> {
        for entry in std::fs::read_dir(self.temporaries())? {
            let path = entry?.path();
            let Ok(file) = File::open(&path) else { continue };
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                std::fs::remove_file(&path)?;
                collected.temporaries += 1;
            }
        }
        Ok(())
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
        let mut open: Vec<String> = Index::read(&store.root)?.entries().map(|entry| entry.digest).collect();
        let mut seen = BTreeSet::new();
        while let Some(digest) = open.pop() {
            if !seen.insert(digest.clone()) {
                continue;
            }
            if let Some(children) = self.read.get(&digest) {
                open.extend(children.iter().cloned());
                continue;
            }
            let document = Document::parse(&store.document(&digest)?).map_err(|why| {
                let what = format!("collecting garbage: manifest {digest} cannot be read");
                RegistryError::unavailable(what, why)
            })?;
            let children: Vec<String> = document.manifests.iter().map(|child| child.digest.clone()).collect();
            open.extend(children.iter().cloned());
            self.digests.extend(document.layers.iter().map(|layer| layer.digest.clone()));
            self.digests.extend([digest.clone(), document.config.digest]);
            self.read.insert(digest, children);
        }
        Ok(())
    }

    /// Whether the blob of this name, the hex of its digest, is needed.
    fn has(&self, name: &str) -> bool {
        self.digests.contains(&format!("sha256:{name}"))
    }
}

/// Whether nobody stored or looked up a blob within `grace`.
fn is_old(metadata: &std::fs::Metadata, grace: Duration) -> bool {
    let modified = metadata.modified().unwrap_or_else(|_| SystemTime::now());
    grace.is_zero() || SystemTime::now().duration_since(modified).unwrap_or_default() >= grace
}

/// Marks a blob as just used. A layout that may only be read stays as it is.
fn refresh(file: &File) -> io::Result<()> {
    match file.set_modified(SystemTime::now()) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// A blob on its way in: a temporary file until every byte is verified and on disk.
#[derive(Debug)]
pub(super) struct Incoming {
    store: Store,
    file: File,
    path: PathBuf,
    target: PathBuf,
    digest: String,
    size: u64,
    hasher: Hasher,
}

impl Incoming {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), RegistryError> {
        if self.hasher.length() + bytes.len() as u64 > self.size {
            return Err(RegistryError::Corrupt { object: self.digest.clone() });
        }
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(|error| self.store.full(&self.digest, error))
    }

    /// Verifies, syncs and moves the blob into place, under the shared lock.
    pub(super) fn commit(self) -> Result<(), RegistryError> {
        self.seal()?;
        let _held = self.store.locked(FlockOperation::LockShared)?;
        self.place()
    }

    /// Every byte is verified and on disk.
    fn seal(&self) -> Result<(), RegistryError> {
        let hasher = self.hasher.clone();
        if hasher.length() != self.size || hasher.finish() != self.digest {
            return Err(RegistryError::Corrupt { object: self.digest.clone() });
        }
        self.file.sync_data().map_err(|error| self.store.full(&self.digest, error))
    }

    fn place(self) -> Result<(), RegistryError> {
        std::fs::rename(&self.path, &self.target).map_err(|error| self.store.full(&self.digest, error))
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // After a commit the name is gone and this finds nothing.
        let _ = std::fs::remove_file(&self.path);
    }
}
