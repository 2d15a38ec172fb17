//! Images: layers become read-only erofs disks, boot files come out of them or from the boot bundle.
//!
//! Entry point: [`Store`]. Folders below the root: `oci/blobs/<hex>.erofs` (read-only, never changed),
//! `oci/boot/<hex>/` and `oci/boot/bundle-<hex>/` (kernel and initrd), `oci/disks` (templates of the
//! writable disk), `oci/temp` (half-made things; emptied when nobody works), `oci/locks`.
//!
//! Invariants: a file appears under its final name complete and synced; whoever adds or uses blobs
//! holds a shared [`Lease`] until that work has ended, also when nobody waits for it any more, and
//! [`Store::quiet`] takes it exclusively, so nothing is removed that is about to be named; an archive is hostile (see `unpack`).

use std::{
    collections::BTreeSet,
    fs::File,
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use cocoon_oci::registry::Registry;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::{
    db::Db,
    embed,
    error::{BringUpError, Fault, ImportError, LookupError},
    model::Image,
};

mod boot;
mod cpio;
mod disk;
mod erofs;
mod files;
mod import;
mod index;
mod jail;
mod path;
mod relay;
mod source;
mod sys;
mod tarball;
mod tree;
mod unpack;

use index::{Bundle, Entry, Index};
use unpack::Boot;
pub use unpack::Setuid;

/// How long [`Store::collect`] waits for imports and starts to end.
const COLLECT_WAIT: Duration = Duration::from_secs(10);

/// Choices of an import.
#[derive(Debug, Clone, Copy)]
pub struct ImportOptions {
    /// Files with setuid, setgid or capabilities.
    pub setuid: Setuid,
    /// Most bytes that an image's layers may have unpacked.
    pub max_bytes: u64,
}

impl Default for ImportOptions {
    fn default() -> Self {
        Self { setuid: Setuid::Refuse, max_bytes: 32 << 30 }
    }
}

/// One read-only disk of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// `sha256:<hex>` of the layer (or of the layers merged into this disk).
    pub digest: String,
    /// `sha256:<hex>` of the erofs file: a guest that was captured on it needs these very bytes.
    pub content: String,
    /// The file, read-only.
    pub path: PathBuf,
}

/// What a snapshot writes down about its image (for instance inside `qemu.json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedBoot {
    /// Image ref as typed.
    pub image: String,
    /// `sha256:<hex>` of the image.
    pub image_digest: String,
    /// Disks, lowest first.
    pub layers: Vec<RecordedLayer>,
    /// `sha256:<hex>` of the kernel.
    pub kernel: String,
    /// `sha256:<hex>` of the initrd.
    pub initrd: String,
}

/// A disk in a [`RecordedBoot`]; the fields are those of [`Layer`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedLayer {
    /// See [`Layer::digest`].
    pub digest: String,
    /// See [`Layer::content`].
    pub content: String,
}

/// All that a VM boots from. Keep it until the VM's record, with `blob_ids`, is written: it holds a
/// lease that keeps [`Store::collect`] away.
#[derive(Debug, Clone)]
pub struct BootSet {
    /// The image.
    pub image: Image,
    /// Read-only disks, lowest first; at most [`MAX_LAYERS`].
    pub layers: Vec<Layer>,
    /// Kernel file.
    pub kernel: PathBuf,
    /// Initrd file, with a guest agent as `/init` unless the image brought its own.
    pub initrd: PathBuf,
    /// `sha256:<hex>` of the kernel.
    pub kernel_digest: String,
    /// `sha256:<hex>` of the initrd.
    pub initrd_digest: String,
    /// Names to record with the VM or snapshot, for [`Store::collect`].
    pub blob_ids: BTreeSet<String>,
    _lease: Arc<Lease>,
}

/// Most disks of an image; one with more layers is merged into one disk.
pub const MAX_LAYERS: usize = 12;

impl BootSet {
    /// What a snapshot must record in order to find the same files again.
    #[must_use]
    pub fn recorded(&self) -> RecordedBoot {
        let layer =
            |layer: &Layer| RecordedLayer { digest: layer.digest.clone(), content: layer.content.clone() };
        RecordedBoot {
            image: self.image.name.clone(),
            image_digest: self.image.id.clone(),
            layers: self.layers.iter().map(layer).collect(),
            kernel: self.kernel_digest.clone(),
            initrd: self.initrd_digest.clone(),
        }
    }
}

/// Keeps [`Store::collect`] away while it lives.
#[derive(Debug)]
struct Lease {
    _file: File,
}

/// The image store of one root folder. Cheap to clone; several processes may use one.
#[derive(Debug, Clone)]
pub struct Store {
    folders: Arc<Folders>,
    index: Index,
}

#[derive(Debug)]
struct Folders {
    blobs: PathBuf,
    boot: PathBuf,
    disks: PathBuf,
    temp: PathBuf,
    locks: PathBuf,
}

impl Folders {
    fn blob(&self, hex: &str) -> PathBuf {
        self.blobs.join(format!("{hex}.erofs"))
    }

    fn boot_file(&self, owner: &str, kind: Boot) -> PathBuf {
        self.boot.join(owner).join(kind.file_name())
    }

    /// Whether each boot file that the row names is there: a row says what was made, not what is left.
    fn has_boot_files_of(&self, blob: &index::Blob) -> bool {
        let named = [(&blob.kernel, Boot::Kernel), (&blob.initrd, Boot::Initrd)];
        named.iter().all(|(digest, kind)| digest.is_none() || self.boot_file(&blob.hex, *kind).is_file())
    }

    fn has_bundle(&self, hex: &str) -> bool {
        let folder = boot::bundle_folder(hex);
        [Boot::Kernel, Boot::Initrd].iter().all(|kind| self.boot_file(&folder, *kind).is_file())
    }
}

impl Store {
    /// Opens or makes the folders and tables; empties `temp` if nobody works.
    pub async fn open(root: &Path, db: Db) -> Result<Self, Fault> {
        let at = |name: &str| root.join("oci").join(name);
        let folders = Folders {
            blobs: at("blobs"),
            boot: at("boot"),
            disks: at("disks"),
            temp: at("temp"),
            locks: at("locks"),
        };
        for folder in [&folders.blobs, &folders.boot, &folders.disks, &folders.temp, &folders.locks] {
            cocoon_kit::files::private_folder(folder)
                .map_err(|error| Fault::new(format!("image folder {}", folder.display()), error))?;
        }
        let store = Self { folders: Arc::new(folders), index: Index::open(db).await? };
        if let Ok(Some(_alone)) = store.lock(FlockOperation::NonBlockingLockExclusive) {
            let _ = empty(&store.folders.temp);
        }
        Ok(store)
    }

    /// Imports an image from archive files: an OCI or docker archive, or root file system layers (tar,
    /// lowest first). The same name is replaced. Setuid programs are refused.
    pub async fn import(&self, name: &str, files: &[PathBuf]) -> Result<Image, ImportError> {
        self.import_with(name, files, ImportOptions::default()).await
    }

    /// [`Store::import`] with choices.
    pub async fn import_with(
        &self,
        name: &str,
        files: &[PathBuf],
        how: ImportOptions,
    ) -> Result<Image, ImportError> {
        import::files(self, name, files, how).await
    }

    /// Imports a container image that a registry holds. Setuid programs are refused.
    pub async fn pull(
        &self,
        name: &str,
        registry: &dyn Registry,
        repository: &str,
        reference: &str,
    ) -> Result<Image, ImportError> {
        self.pull_with(name, registry, repository, reference, ImportOptions::default()).await
    }

    /// [`Store::pull`] with choices.
    pub async fn pull_with(
        &self,
        name: &str,
        registry: &dyn Registry,
        repository: &str,
        reference: &str,
        how: ImportOptions,
    ) -> Result<Image, ImportError> {
        import::registry(self, name, registry, (repository, reference), how).await
    }

    /// All images, by name.
    pub async fn list(&self) -> Result<Vec<Image>, LookupError> {
        Ok(self.index.all().await?.into_iter().map(|entry| entry.image).collect())
    }

    /// One image by exact name, or by `sha256:` and at least three digits.
    pub async fn get(&self, image: &str) -> Result<Image, LookupError> {
        Ok(self.index.find(image).await?.image)
    }

    /// Forgets an image; its blobs go at gc. By digest, all its names go.
    pub async fn remove(&self, image: &str) -> Result<(), LookupError> {
        let found = self.index.find(image).await?.image;
        if found.name == image {
            return Ok(self.index.remove(found.name).await?);
        }
        for entry in self.index.all().await?.into_iter().filter(|entry| entry.image.id == found.id) {
            self.index.remove(entry.image.name).await?;
        }
        Ok(())
    }

    /// What a VM of this image boots from. `bundle` is the boot bundle's folder, used for an image
    /// without a kernel.
    pub async fn boot_set(&self, image: &str, bundle: &Path) -> Result<BootSet, BringUpError> {
        let lease = self.lease().await?;
        let entry = match self.index.find(image).await {
            Ok(entry) => entry,
            Err(LookupError::ImageNotFound(image)) => return Err(BringUpError::ImageNotResolved(image)),
            Err(other) => return Err(other.into()),
        };
        let layers = self.layers(&entry).await?;
        let mut blob_ids: BTreeSet<String> = entry.blobs.iter().cloned().collect();
        let (kernel, initrd) = if let (Some(kernel), Some(initrd)) = (&entry.kernel, &entry.initrd) {
            (self.own(&entry, kernel, Boot::Kernel).await?, self.own(&entry, initrd, Boot::Initrd).await?)
        } else {
            let made = self.bundle(bundle, embed::guest_agent(), &lease).await?;
            blob_ids.insert(made.hex.clone());
            self.bundle_files(&made)
        };
        Ok(BootSet {
            image: entry.image,
            layers,
            kernel: kernel.1,
            initrd: initrd.1,
            kernel_digest: prefixed(&kernel.0),
            initrd_digest: prefixed(&initrd.0),
            blob_ids,
            _lease: lease,
        })
    }

    /// The same for a snapshot: exactly the recorded files, whatever the image's name means today.
    pub async fn boot_set_by_digests(
        &self,
        recorded: &RecordedBoot,
        bundle: &Path,
    ) -> Result<BootSet, BringUpError> {
        let lease = self.lease().await?;
        let mut blob_ids = BTreeSet::new();
        let mut layers = Vec::new();
        for layer in &recorded.layers {
            let found = self.index.blob(bare(&layer.digest)).await?;
            let found = found.filter(|blob| self.folders.blob(&blob.hex).is_file());
            let found = found.ok_or_else(|| missing(recorded, "layer", &layer.digest))?;
            if found.content != bare(&layer.content) {
                let (theirs, ours) = (layer.content.clone(), prefixed(&found.content));
                let snapshot = format!("of image {} (disk of layer {})", recorded.image, layer.digest);
                return Err(BringUpError::SnapshotIncompatible { snapshot, theirs, ours });
            }
            blob_ids.insert(found.hex.clone());
            layers.push(self.layer(&found));
        }
        let (kernel, initrd) = self.recorded_boot_files(recorded, bundle, &mut blob_ids, &lease).await?;
        Ok(BootSet {
            image: self.recorded_image(recorded).await?,
            layers,
            kernel,
            initrd,
            kernel_digest: recorded.kernel.clone(),
            initrd_digest: recorded.initrd.clone(),
            blob_ids,
            _lease: lease,
        })
    }

    /// Puts a fresh ext4 of `size` bytes, in a standalone qcow2, at `dest`, which must not exist.
    pub async fn writable_disk(&self, size: u64, dest: &Path) -> Result<(), Fault> {
        let (folders, dest) = (Arc::clone(&self.folders), dest.to_owned());
        let lease = self.lease().await?;
        blocking("writable disk", move || {
            let made = disk::create(&folders.disks, &folders.temp, size, &dest);
            drop(lease);
            made
        })
        .await?
    }

    /// [`Quiet::collect`] for a caller whose `needed` cannot change meanwhile.
    pub async fn collect(&self, needed: &BTreeSet<String>) -> Result<Vec<String>, Fault> {
        self.quiet().await?.collect(needed).await
    }

    /// Waits until nobody imports or starts, at most ten seconds, and keeps it so. Whoever collects takes
    /// this first and then finds out what is needed: a VM that starts in between would be missed.
    pub async fn quiet(&self) -> Result<Quiet, Fault> {
        let alone = self.take(FlockOperation::NonBlockingLockExclusive, COLLECT_WAIT).await?;
        Ok(Quiet { store: self.clone(), alone: Arc::new(alone) })
    }

    async fn layers(&self, entry: &Entry) -> Result<Vec<Layer>, BringUpError> {
        let mut layers = Vec::new();
        for hex in &entry.blobs {
            let found = self.index.blob(hex).await?.filter(|blob| self.folders.blob(&blob.hex).is_file());
            layers.push(self.layer(&found.ok_or_else(|| lost(&entry.image.name, hex))?));
        }
        Ok(layers)
    }

    fn layer(&self, blob: &index::Blob) -> Layer {
        Layer {
            digest: prefixed(&blob.hex),
            content: prefixed(&blob.content),
            path: self.folders.blob(&blob.hex),
        }
    }

    /// A boot file that the image itself brought: its hex digest and path.
    async fn own(&self, entry: &Entry, owner: &str, kind: Boot) -> Result<(String, PathBuf), BringUpError> {
        let blob = self.index.blob(owner).await?;
        let path = self.folders.boot_file(owner, kind);
        let digest = blob.and_then(|blob| match kind {
            Boot::Kernel => blob.kernel,
            Boot::Initrd => blob.initrd,
        });
        match digest.filter(|_| path.is_file()) {
            Some(digest) => Ok((digest, path)),
            None => Err(lost(&entry.image.name, owner)),
        }
    }

    async fn bundle(
        &self,
        folder: &Path,
        agent: Option<&'static [u8]>,
        lease: &Arc<Lease>,
    ) -> Result<Bundle, BringUpError> {
        let missing =
            |what: String, remedy: &str| BringUpError::HostMissing { what, remedy: remedy.to_owned() };
        let agent =
            agent.ok_or_else(|| missing("the guest agent inside this program".to_owned(), embed::REMEDY))?;
        let parts = boot::Parts::of(folder).ok_or_else(|| {
            let remedy = "make it with `cargo xtask bundle`, or name another with --boot-bundle";
            missing(format!("the boot bundle in {} (for images without a kernel)", folder.display()), remedy)
        })?;
        let fault = |error: io::Error| Fault::new(format!("boot bundle {}", folder.display()), error);
        let (of, folders) = (parts.clone(), Arc::clone(&self.folders));
        let stamp = blocking("boot bundle", move || of.stamp(agent)).await?.map_err(fault)?;
        if let Some(known) = self.index.bundle_by_stamp(stamp.clone()).await?
            && self.folders.has_bundle(&known.hex)
        {
            return Ok(known);
        }
        let lease = Arc::clone(lease);
        let making = move || (boot::make_bundle(&parts, agent, &folders.boot, &folders.temp), lease);
        let (made, _lease) = blocking("boot bundle", making).await?;
        let made = made.map_err(fault)?;
        self.index.put_bundle(made.clone(), stamp).await?;
        Ok(made)
    }

    fn bundle_files(&self, made: &Bundle) -> ((String, PathBuf), (String, PathBuf)) {
        let file = |kind| self.folders.boot_file(&boot::bundle_folder(&made.hex), kind);
        ((made.kernel.clone(), file(Boot::Kernel)), (made.initrd.clone(), file(Boot::Initrd)))
    }

    /// Boot files with the recorded digests: of an image, of a bundle made before, of today's bundle.
    async fn recorded_boot_files(
        &self,
        recorded: &RecordedBoot,
        bundle: &Path,
        blob_ids: &mut BTreeSet<String>,
        lease: &Arc<Lease>,
    ) -> Result<(PathBuf, PathBuf), BringUpError> {
        let (kernel, initrd) = (bare(&recorded.kernel), bare(&recorded.initrd));
        let known = self.index.bundle_by_files(kernel, initrd).await?;
        let mut found = known.clone().filter(|made| self.folders.has_bundle(&made.hex));
        if found.is_none() {
            let owners = (
                self.index.bringer(Boot::Kernel, kernel).await?,
                self.index.bringer(Boot::Initrd, initrd).await?,
            );
            if let (Some(of_kernel), Some(of_initrd)) = owners {
                let files = (
                    self.folders.boot_file(&of_kernel, Boot::Kernel),
                    self.folders.boot_file(&of_initrd, Boot::Initrd),
                );
                blob_ids.extend([of_kernel, of_initrd]);
                return Ok(files);
            }
            let today = self.bundle(bundle, embed::guest_agent(), lease).await.ok();
            // A guest that goes on needs no kernel file: one that is lost does not keep it from waking.
            found = today.filter(|made| made.kernel == kernel && made.initrd == initrd).or(known);
        }
        let made = found.ok_or_else(|| missing(recorded, "kernel and initrd", &recorded.kernel))?;
        let (kernel, initrd) = self.bundle_files(&made);
        blob_ids.insert(made.hex);
        Ok((kernel.1, initrd.1))
    }

    async fn recorded_image(&self, recorded: &RecordedBoot) -> Result<Image, Fault> {
        let known = self.index.all().await?.into_iter().map(|entry| entry.image);
        Ok(known
            .into_iter()
            .find(|image| image.id == recorded.image_digest && image.name == recorded.image)
            .unwrap_or(Image {
                id: recorded.image_digest.clone(),
                name: recorded.image.clone(),
                kind: "oci".to_owned(),
                size: 0,
                created_at: jiff::Timestamp::UNIX_EPOCH,
            }))
    }

    fn lock(&self, how: FlockOperation) -> io::Result<Option<Lease>> {
        let path = self.folders.locks.join("lease");
        let file =
            File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match flock(&file, how) {
            Ok(()) => Ok(Some(Lease { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// A shared lease; waits for a running [`Store::collect`], which is short.
    async fn lease(&self) -> Result<Arc<Lease>, Fault> {
        self.take(FlockOperation::NonBlockingLockShared, Duration::from_secs(60)).await.map(Arc::new)
    }

    async fn take(&self, how: FlockOperation, limit: Duration) -> Result<Lease, Fault> {
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            match self.lock(how) {
                Ok(Some(lease)) => return Ok(lease),
                Ok(None) if tokio::time::Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Ok(None) => {
                    let folder = self.folders.blobs.display();
                    return Err(Fault::new(
                        format!("image store {folder}"),
                        "busy with another command; try again",
                    ));
                }
                Err(error) => return Err(Fault::new("lock of the image store", error)),
            }
        }
    }
}

/// The store, with nobody importing and no VM starting while this lives.
#[derive(Debug)]
pub struct Quiet {
    store: Store,
    alone: Arc<Lease>,
}

impl Quiet {
    /// Removes blobs and boot files that neither an image nor `needed` names; returns what went.
    pub async fn collect(&self, needed: &BTreeSet<String>) -> Result<Vec<String>, Fault> {
        let mut keep = needed.clone();
        for entry in self.store.index.all().await? {
            keep.extend(entry.blobs.into_iter().chain(entry.kernel).chain(entry.initrd));
        }
        let (folders, alone) = (Arc::clone(&self.store.folders), Arc::clone(&self.alone));
        let gone = blocking("image gc", move || -> io::Result<Vec<String>> {
            // Ends with the work, whether or not somebody still waits for it.
            let _alone = alone;
            empty(&folders.temp)?;
            let mut gone = sweep(&folders.blobs, &keep, |name| name.strip_suffix(".erofs"))?;
            gone.extend(sweep(&folders.boot, &keep, |name| {
                Some(name.strip_prefix("bundle-").unwrap_or(name))
            })?);
            Ok(gone)
        })
        .await?
        .map_err(|error| Fault::new("image gc", error))?;
        self.store.index.prune(&self.store.folders.blobs, &self.store.folders.boot).await?;
        Ok(gone)
    }
}

/// Runs blocking work off the runtime's threads; begun under a VM's lock, it keeps that until it ends.
async fn blocking<T: Send + 'static>(
    step: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Fault> {
    tokio::task::spawn_blocking(crate::hold::kept(work)).await.map_err(|error| Fault::new(step, error))
}

fn lost(image: &str, hex: &str) -> BringUpError {
    Fault::new(format!("image {image}"), format!("its blob {hex} is gone; import the image again")).into()
}

fn missing(recorded: &RecordedBoot, what: &str, digest: &str) -> BringUpError {
    let RecordedBoot { image, image_digest, .. } = recorded;
    BringUpError::Invalid(format!(
        "{what} {digest} of image {image} is not on this host; import that image ({image_digest}) with \
         `cocoon image import {image} FILE`"
    ))
}

fn prefixed(hex: &str) -> String {
    format!("sha256:{hex}")
}

fn bare(digest: &str) -> &str {
    digest.strip_prefix("sha256:").unwrap_or(digest)
}

fn empty(folder: &Path) -> io::Result<()> {
    sweep(folder, &BTreeSet::new(), |name| Some(name)).map(drop)
}

/// Removes entries whose id is not in `keep`; `id` says `None` for what is not ours to judge.
fn sweep(
    folder: &Path,
    keep: &BTreeSet<String>,
    id: impl for<'a> Fn(&'a str) -> Option<&'a str>,
) -> io::Result<Vec<String>> {
    let mut gone = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(unneeded) = name.to_str().and_then(&id).filter(|id| !keep.contains(*id)) else { continue };
        if entry.file_type()?.is_dir() {
            std::fs::remove_dir_all(entry.path())?;
        } else {
            std::fs::remove_file(entry.path())?;
        }
        gone.push(unneeded.to_owned());
    }
    Ok(gone)
}
