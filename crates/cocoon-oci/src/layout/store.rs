//! The folder of a layout: blobs, locks and the durable steps, all blocking.
//!
//! Lock order: one lock file (`.cocoon.lock`), held shared while a blob is looked up or moved into place,
//! exclusively while `index.json` changes or blobs are collected. So a blob that was just found or stored
//! cannot be collected between that answer and its fresh time stamp, and a manifest is only accepted
//! while all that it needs is there. A stored blob is trusted once its content was verified (`trust`); what
//! fails that counts as absent for a push, which then replaces it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use cocoon_kit::files;
use rustix::fs::{FlockOperation, flock};

use super::{
    index::{Index, Target, read_capped},
    trust::{Stamp, Verified},
};
use crate::{
    digest::{self, Hasher},
    manifest::{Descriptor, Document, MAX_MANIFEST},
    registry::{Manifest, RegistryError},
};

/// How long somebody else may have the folder's lock, and how often it is asked for meanwhile.
const LOCK_LIMIT: Duration = Duration::from_secs(60);
const LOCK_LOOK: Duration = Duration::from_millis(5);

#[derive(Debug, Clone)]
pub(super) struct Store {
    pub(super) root: PathBuf,
    pub(super) verified: Arc<Verified>,
}

/// Where a name must point for it to be moved.
#[derive(Debug)]
pub(super) enum Now {
    Any,
    /// To this manifest, or nowhere.
    At(Option<String>),
}

/// A blob's file, and what it was when it was opened.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: File,
    pub(super) stamp: Stamp,
}

/// A held lock; the kernel lets go of it when the file closes.
#[derive(Debug)]
pub(super) struct Held(#[expect(dead_code, reason = "held for its lock")] File);

impl Store {
    /// Creates the folder's files if it is new; an existing layout is only checked.
    pub(super) fn open(root: &Path) -> Result<Self, RegistryError> {
        let store = Self { root: root.to_owned(), verified: Arc::default() };
        store.prepare().map_err(|error| {
            RegistryError::unavailable(format!("opening the OCI layout {}", root.display()), error)
        })?;
        Index::read(root)?;
        Ok(store)
    }

    fn prepare(&self) -> io::Result<()> {
        std::fs::create_dir_all(self.blobs())?;
        std::fs::create_dir_all(self.temporaries())?;
        let _held = self.lock(FlockOperation::NonBlockingLockExclusive)?;
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

    pub(super) fn blobs(&self) -> PathBuf {
        self.root.join("blobs/sha256")
    }

    pub(super) fn temporaries(&self) -> PathBuf {
        self.root.join(".tmp")
    }

    fn lock(&self, operation: FlockOperation) -> io::Result<Held> {
        self.lock_within(operation, LOCK_LIMIT)
    }

    fn lock_within(&self, operation: FlockOperation, limit: Duration) -> io::Result<Held> {
        let path = self.root.join(".cocoon.lock");
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o644).open(path)?;
        // Not waited for in the kernel: a holder that never lets go would keep the thread of everybody who asks.
        let end = Instant::now() + limit;
        loop {
            match flock(&file, operation) {
                Ok(()) => return Ok(Held(file)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(LOCK_LOOK),
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "another process holds it"));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(super) fn locked(&self, operation: FlockOperation) -> Result<Held, RegistryError> {
        self.lock(operation).map_err(|error| {
            let way_out = match error.kind() {
                io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                    " (make the folder writable again, then try again; no tag was changed)"
                }
                io::ErrorKind::TimedOut => {
                    " (let the process that holds it go on, or end it, then try again)"
                }
                _ => "",
            };
            RegistryError::unavailable(
                format!("locking the OCI layout {}{way_out}", self.root.display()),
                error,
            )
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

    /// Opens a blob.
    pub(super) fn open_blob(&self, digest: &str) -> Result<Option<Opened>, RegistryError> {
        let file = match File::open(self.blob(digest)?) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return self.absent(digest),
            Err(error) => return Err(self.unread(digest, error)),
        };
        let stamp = Stamp::of(&file.metadata().map_err(|error| self.unread(digest, error))?);
        Ok(Some(Opened { file, stamp }))
    }

    fn unread(&self, digest: &str, error: io::Error) -> RegistryError {
        RegistryError::unavailable(format!("reading blob {digest} in {}", self.root.display()), error)
    }

    /// Whether a blob is there with its content, and with this length if one is given; marks it as just used.
    /// What cannot be read to its end, or is something else, is not there: a push then replaces it.
    pub(super) fn reuse(&self, digest: &str, size: Option<u64>) -> Result<bool, RegistryError> {
        let _turn = self.verified.turn(digest);
        let (opened, known) = {
            let _held = self.locked(FlockOperation::NonBlockingLockShared)?;
            let Some(mut opened) = self.open_blob(digest)? else { return Ok(false) };
            if size.is_some_and(|size| size != opened.stamp.length()) {
                return Ok(false);
            }
            let known = self.verified.knows(digest, opened.stamp);
            let refreshed = refresh(&opened.file).and_then(|()| opened.file.metadata());
            opened.stamp = Stamp::of(&refreshed.map_err(|error| self.unread(digest, error))?);
            (opened, known)
        };
        if known {
            self.verified.record(digest, opened.stamp);
            return Ok(true);
        }
        Ok(self.verified.read(digest, &opened.file, opened.stamp).unwrap_or(false))
    }

    /// Starts writing a blob.
    pub(super) fn begin(&self, digest: &str, size: u64) -> Result<Incoming, RegistryError> {
        // Keeps a collector out until the new file carries its writer's lock.
        let _held = self.locked(FlockOperation::NonBlockingLockShared)?;
        self.begin_unlocked(digest, size)
    }

    fn begin_unlocked(&self, digest: &str, size: u64) -> Result<Incoming, RegistryError> {
        let target = self.blob(digest)?;
        let (file, path) = self.temporary("").map_err(|error| self.full(digest, error))?;
        let digest = digest.to_owned();
        Ok(Incoming { store: self.clone(), file, path, target, digest, size, hasher: Hasher::default() })
    }

    /// A new temporary file. A collector leaves it alone while its maker lives.
    pub(super) fn temporary(&self, kind: &str) -> io::Result<(File, PathBuf)> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = self.temporaries().join(format!("{kind}{}-{moment}-{serial}", std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok((file, path))
    }

    pub(super) fn full(&self, object: &str, error: io::Error) -> RegistryError {
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
        if self.reuse(digest, Some(size))? {
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
        // What has to be read is read without the lock; what fails here is judged below.
        for needed in document.descriptors() {
            let _ = self.whole(needed);
        }
        let _held = self.locked(FlockOperation::NonBlockingLockExclusive)?;
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

    /// Whether a blob is there with the length and content that its descriptor says: a crashed machine leaves
    /// files cut or full of zeros. One that this process verified, and that did not change since, is not read.
    fn whole(&self, needed: &Descriptor) -> Result<(), String> {
        let Descriptor { digest, size, .. } = needed;
        let path = self.blob(digest).map_err(|error| error.to_string())?;
        let looked = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => format!("blob {digest} is not there"),
            _ => format!("blob {digest} cannot be looked at: {error}"),
        };
        let found = Stamp::of(&std::fs::metadata(&path).map_err(looked)?);
        if i64::try_from(found.length()) != Ok(*size) {
            return Err(format!("blob {digest} has {} bytes instead of {size}", found.length()));
        }
        if self.verified.knows(digest, found) {
            return Ok(());
        }
        let file = File::open(&path).map_err(looked)?;
        let stamp = Stamp::of(&file.metadata().map_err(looked)?);
        match self.verified.read(digest, &file, stamp) {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("the content of blob {digest} is not what its digest says")),
            Err(error) => Err(format!("blob {digest} cannot be read: {error}")),
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
        let _held = self.locked(FlockOperation::NonBlockingLockExclusive)?;
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
        let _held = self.locked(FlockOperation::NonBlockingLockExclusive)?;
        let mut index = Index::read(&self.root)?;
        if index.find(repository, tag).is_none_or(|entry| entry.digest != digest) {
            return Ok(false);
        }
        index.forget(repository, tag);
        index.write(&self.root).map(|()| true)
    }
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
        let _held = self.store.locked(FlockOperation::NonBlockingLockShared)?;
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
        // Its last write may be long past: grace counts from here.
        refresh(&self.file)
            .and_then(|()| std::fs::rename(&self.path, &self.target))
            .map_err(|error| self.store.full(&self.digest, error))?;
        // It was hashed on its way in, and renaming changed its stamp for the last time.
        if let Ok(metadata) = self.file.metadata() {
            self.store.verified.record(&self.digest, Stamp::of(&metadata));
        }
        Ok(())
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        // After a commit the name is gone and this finds nothing.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_somebody_never_gives_back_is_an_error_and_one_that_was_given_back_is_had() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store { root: folder.path().to_owned(), verified: Arc::default() };
        let limit = Duration::from_millis(20);
        let held = store.lock(FlockOperation::NonBlockingLockExclusive).unwrap();
        for operation in [FlockOperation::NonBlockingLockShared, FlockOperation::NonBlockingLockExclusive] {
            let refused = store.lock_within(operation, limit).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
        }
        drop(held);
        store.lock_within(FlockOperation::NonBlockingLockExclusive, limit).unwrap();
    }
}
