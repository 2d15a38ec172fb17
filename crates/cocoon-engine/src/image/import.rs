//! From archive to index entry.
//!
//! Entry points: [`files`] and [`registry`]. Order: digests, then blobs that are not there yet, then the
//! index row; a crash in between leaves blobs that the next import finds or gc removes. One lock per
//! blob name (sixteen lock files) makes two imports of the same content build it once.

use std::{
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use cocoon_kit::files::Lock;
use cocoon_oci::registry::Registry;
use sha2::{Digest as _, Sha256};

use crate::{
    error::{Fault, ImportError},
    model::Image,
    room,
};

use super::{
    Folders, ImportOptions, Lease, MAX_LAYERS, Setuid, Store, blocking, boot, erofs,
    erofs::BuildError,
    index::{Blob, Entry},
    jail, prefixed, relay,
    source::{self, Archive, Source},
    tarball::{Budget, LayerError},
    tree::Tree,
    unpack::{Boot, Place, Unpacker, armed_reason},
};

/// Imports from files on disk.
pub(super) async fn files(
    store: &Store,
    name: &str,
    paths: &[PathBuf],
    how: ImportOptions,
) -> Result<Image, ImportError> {
    let (image, paths) = (name.to_owned(), paths.to_vec());
    let source = blocking("image import", move || source::open(&image, paths, how.max_bytes)).await??;
    source_into(store, name, Arc::from(source), how).await
}

/// Imports from a registry.
pub(super) async fn registry(
    store: &Store,
    name: &str,
    registry: &dyn Registry,
    (repository, reference): (&str, &str),
    how: ImportOptions,
) -> Result<Image, ImportError> {
    let (relay, questions) = relay::pair();
    let import = async {
        let found = cocoon_oci::image::from_registry(Arc::new(relay), repository, reference).await;
        let found = found.map_err(|error| source::archive_error(name, error))?;
        source_into(store, name, Arc::new(Archive::new(found)), how).await
    };
    // `serve` ends first only when the source, and the relay in it, are dropped.
    tokio::pin!(import);
    tokio::select! {
        biased;
        done = &mut import => done,
        () = relay::serve(registry, questions) => import.await,
    }
}

fn unusable(image: &str, reason: impl Into<String>) -> ImportError {
    ImportError::Unusable { image: image.to_owned(), reason: reason.into() }
}

async fn source_into(
    store: &Store,
    name: &str,
    source: Arc<dyn Source>,
    how: ImportOptions,
) -> Result<Image, ImportError> {
    check_name(name)?;
    let layers = source.layers().to_vec();
    if layers.is_empty() {
        return Err(unusable(name, "it has no layers"));
    }
    let work = Work { store, image: name, source, setuid: how.setuid, lease: store.lease().await? };
    let mut budget = Budget::new(how.max_bytes);
    let mut joined = layers.len() > MAX_LAYERS || store.index.any_joined(&layers).await?;
    let mut blobs = Vec::new();
    if !joined {
        for (at, layer) in layers.iter().enumerate() {
            match work.blob(vec![at], &mut budget).await? {
                Built::Blob { blob, .. } => blobs.push(blob),
                Built::NeedsLower => {
                    store.index.put_joined(layer.clone()).await?;
                    joined = true;
                    break;
                }
            }
        }
    }
    if joined {
        budget = Budget::new(how.max_bytes);
        match work.blob((0..layers.len()).collect(), &mut budget).await? {
            Built::Blob { blob, .. } => blobs = vec![blob],
            Built::NeedsLower => return Err(unusable(name, "a layer refers to files that no layer has")),
        }
    }
    let entry = entry(name, work.source.image(), &blobs)?;
    let image = entry.image.clone();
    store.index.put(entry, work.lease).await?;
    Ok(image)
}

fn check_name(name: &str) -> Result<(), ImportError> {
    let plain = |c: char| !c.is_control() && !c.is_whitespace();
    if name.is_empty() || name.len() > 512 || !name.chars().all(plain) {
        return Err(unusable(name, "a name has 1 to 512 characters, without spaces and control characters"));
    }
    Ok(())
}

fn entry(name: &str, digest: &str, blobs: &[Blob]) -> Result<Entry, ImportError> {
    let bringer =
        |has: fn(&Blob) -> bool| blobs.iter().rev().find(|blob| has(blob)).map(|blob| blob.hex.clone());
    let kernel = bringer(|blob| blob.kernel.is_some());
    let initrd = bringer(|blob| blob.initrd.is_some());
    match (&kernel, &initrd) {
        (Some(_), None) => return Err(unusable(name, one_missing("vmlinuz", "initrd.img"))),
        (None, Some(_)) => return Err(unusable(name, one_missing("initrd.img", "vmlinuz"))),
        _ => {}
    }
    let image = Image {
        id: prefixed(digest),
        name: name.to_owned(),
        kind: "oci".to_owned(),
        size: blobs.iter().map(|blob| blob.size).sum(),
        created_at: jiff::Timestamp::now(),
    };
    Ok(Entry { image, blobs: blobs.iter().map(|blob| blob.hex.clone()).collect(), kernel, initrd })
}

fn one_missing(has: &str, lacks: &str) -> String {
    format!(
        "it has a {has} but no {lacks} in / or /boot (links do not count); give it both, or neither to boot \
         with the boot bundle"
    )
}

enum Built {
    Blob {
        blob: Blob,
        /// Its layer removes files, so over other layers it must be merged with them.
        hides: bool,
    },
    NeedsLower,
}

/// One import.
struct Work<'a> {
    store: &'a Store,
    image: &'a str,
    source: Arc<dyn Source>,
    setuid: Setuid,
    lease: Arc<Lease>,
}

impl Work<'_> {
    /// The blob of one layer, or of several merged; built if it is not there.
    async fn blob(&self, layers: Vec<usize>, budget: &mut Budget) -> Result<Built, ImportError> {
        let (store, hex) = (self.store, blob_name(self.source.layers(), &layers));
        let path = store.folders.locks.join(format!("blob-{}", &hex[..1]));
        let lock = blocking("image lock", move || Lock::acquire(&path))
            .await?
            .map_err(|error| Fault::new("lock of an image blob", error))?;
        let known = store.index.blob(&hex).await?.filter(|known| store.folders.blob(&known.hex).is_file());
        if let Some(known) = known.clone().filter(|known| store.folders.has_boot_files_of(known)) {
            return match (&known.stripped, self.setuid) {
                (Some(entry), Setuid::Refuse) => Err(ImportError::Hostile {
                    image: self.image.to_owned(),
                    entry: entry.clone(),
                    reason: armed_reason("setuid, setgid or file capabilities"),
                }),
                _ => Ok(Built::Blob { blob: known, hides: false }),
            };
        }
        let (image, folders) = (self.image.to_owned(), Arc::clone(&store.folders));
        let job = Job { image, hex, layers, setuid: self.setuid, folders, disk: known };
        let (source, mut left, lease) = (Arc::clone(&self.source), *budget, Arc::clone(&self.lease));
        // Lock and lease end with the work: whoever waits for it may go away meanwhile.
        let work = move || (job.run(source.as_ref(), &mut left), left, lock, lease);
        let (built, left, _lock, _lease) = blocking("image import", work).await?;
        *budget = left;
        let built = built?;
        if let Built::Blob { blob, hides } = &built {
            // First, so that no blob that lost its whiteouts is ever taken for the whole layer.
            if *hides {
                store.index.put_joined(blob.hex.clone()).await?;
            }
            store.index.put_blob(blob.clone()).await?;
        }
        Ok(built)
    }
}

fn blob_name(all: &[String], layers: &[usize]) -> String {
    let chosen: Vec<&str> = layers.iter().map(|at| all[*at].as_str()).collect();
    match chosen.as_slice() {
        [one] => (*one).to_owned(),
        several => hex::encode(Sha256::digest(format!("cocoon merged layers\n{}\n", several.join("\n")))),
    }
}

/// Where the disk is built.
fn disk_in(folder: &Path) -> PathBuf {
    folder.join("erofs")
}

/// Builds one blob; blocking.
struct Job {
    image: String,
    hex: String,
    layers: Vec<usize>,
    setuid: Setuid,
    folders: Arc<Folders>,
    /// Its disk is there and only boot files are not: snapshots may rely on these very bytes, so it stays.
    disk: Option<Blob>,
}

impl Job {
    fn run(&self, source: &dyn Source, budget: &mut Budget) -> Result<Built, ImportError> {
        let folder = tempfile::Builder::new()
            .prefix("layer-")
            .tempdir_in(&self.folders.temp)
            .map_err(|error| self.fault("a folder for its layers", error))?;
        let work = || self.build(folder.path(), source, budget);
        let built = jail::inside(folder.path(), work).map_err(|error| self.fault("unpacking", error))??;
        if let Built::Blob { blob, .. } = &built
            && self.disk.is_none()
        {
            // Outside the fence: a rename does not cross from one mount to another.
            super::files::place(&disk_in(folder.path()), &self.folders.blob(&blob.hex))
                .map_err(|error| self.fault("its disk", error))?;
        }
        Ok(built)
    }

    fn build(&self, folder: &Path, source: &dyn Source, budget: &mut Budget) -> Result<Built, ImportError> {
        let root = folder.join("tree");
        // The guest's root folder, whatever the umask here: readable by all, unless the image says else.
        let made = std::fs::create_dir(&root)
            .and_then(|()| std::fs::set_permissions(&root, Permissions::from_mode(0o755)))
            .and_then(|()| Tree::open(&root));
        let mut unpacker = Unpacker::new(made.map_err(|error| self.fault("unpacking", error))?, self.setuid);
        for at in &self.layers {
            match self.unpack(&mut unpacker, source, *at, budget) {
                Ok(()) => {}
                Err(LayerError::NeedsLower) => return Ok(Built::NeedsLower),
                Err(LayerError::Hostile { entry, reason }) => {
                    return Err(ImportError::Hostile { image: self.image.clone(), entry, reason });
                }
                Err(LayerError::Io(error)) => {
                    return Err(self.fault(&format!("layer {}", source.layers()[*at]), error).into());
                }
            }
        }
        self.finish(folder, &root, unpacker)
    }

    fn unpack(
        &self,
        unpacker: &mut Unpacker,
        source: &dyn Source,
        at: usize,
        budget: &mut Budget,
    ) -> Result<(), LayerError> {
        let place = if self.layers.len() == 1 { Place::Alone { lowest: at == 0 } } else { Place::Merged };
        unpacker.layer(&mut *source.open(at)?, budget, place)
    }

    fn finish(&self, folder: &Path, root: &Path, mut unpacker: Unpacker) -> Result<Built, ImportError> {
        let kernel = self.keep(&mut unpacker, Boot::Kernel)?;
        let initrd = self.keep(&mut unpacker, Boot::Initrd)?;
        let (size, content) = match &self.disk {
            Some(disk) => (disk.size, disk.content.clone()),
            None => {
                erofs::build(root, &disk_in(folder), &self.hex).map_err(|error| self.build_error(error))?
            }
        };
        let stripped = unpacker.stripped().map(ToOwned::to_owned);
        let blob = Blob { hex: self.hex.clone(), content, size, kernel, initrd, stripped };
        Ok(Built::Blob { blob, hides: unpacker.hides() })
    }

    fn keep(&self, unpacker: &mut Unpacker, kind: Boot) -> Result<Option<String>, ImportError> {
        let found = unpacker.boot_file(kind).map_err(|error| match error {
            LayerError::Io(error) => self.fault(kind.file_name(), error).into(),
            LayerError::Hostile { entry, reason } => {
                ImportError::Hostile { image: self.image.clone(), entry, reason }
            }
            LayerError::NeedsLower => unusable(&self.image, "its boot file is a link to another layer"),
        })?;
        let Some(file) = found else { return Ok(None) };
        let kept = boot::keep(file, &self.folders.boot, &self.hex, kind);
        kept.map(Some).map_err(|error| self.fault(kind.file_name(), error).into())
    }

    fn build_error(&self, error: BuildError) -> ImportError {
        match error {
            BuildError::Missing => ImportError::HostMissing {
                what: "mkfs.erofs".to_owned(),
                remedy: "apt-get install erofs-utils".to_owned(),
            },
            BuildError::Failed(message) => self.fault("mkfs.erofs", io::Error::other(message)).into(),
            BuildError::Io(error) => self.fault("mkfs.erofs", error).into(),
        }
    }

    /// Names the image and the part; a full disk and missing rights come with the way out.
    fn fault(&self, what: &str, error: io::Error) -> Fault {
        let step = format!("image {}: {what}", self.image);
        match error.kind() {
            io::ErrorKind::StorageFull => Fault::new(step, room::full(error, &[&self.folders.temp])),
            io::ErrorKind::PermissionDenied => {
                Fault::new(step, format!("{error}; importing keeps the owners of files, so it needs root"))
            }
            _ => Fault::new(step, error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        sync::{Mutex, mpsc},
        time::Duration,
    };

    use rustix::fs::FlockOperation;

    use super::*;
    use crate::db::Db;

    #[tokio::test]
    async fn what_the_store_lets_block_for_a_vm_keeps_the_vms_lock_although_its_future_was_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.lock");
        let free = || Lock::try_acquire(&path).unwrap().is_some();
        let (begun, begins) = tokio::sync::oneshot::channel();
        let (release, released) = mpsc::channel::<()>();
        let hold = crate::hold::Hold::new(Lock::try_acquire(&path).unwrap().unwrap());
        let work = move || {
            let _ = begun.send(());
            released.recv().unwrap();
        };
        tokio::select! {
            done = hold.during(blocking("a disk", work)) => panic!("{done:?}"),
            begins = begins => begins.unwrap(),
        }
        drop(hold);
        assert!(!free(), "it still works");
        release.send(()).unwrap();
        while !free() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// One layer, whose reader says that it is asked and then waits.
    struct Blocking {
        layers: Vec<String>,
        asked: mpsc::Sender<()>,
        go_on: Mutex<mpsc::Receiver<()>>,
    }

    impl Blocking {
        fn wait(&self) {
            self.asked.send(()).unwrap();
            self.go_on.lock().unwrap().recv().unwrap();
        }
    }

    impl Source for Blocking {
        fn image(&self) -> &str {
            &self.layers[0]
        }

        fn layers(&self) -> &[String] {
            &self.layers
        }

        fn open(&self, _: usize) -> io::Result<Box<dyn Read + Send + '_>> {
            self.wait();
            Err(io::Error::other("that was all"))
        }
    }

    type Ends = (Arc<dyn Source>, mpsc::Receiver<()>, mpsc::Sender<()>);

    fn source() -> Ends {
        let ((asked, is_asked), (let_go, go_on)) = (mpsc::channel(), mpsc::channel());
        let source = Blocking { layers: vec!["ab".repeat(32)], asked, go_on: Mutex::new(go_on) };
        (Arc::new(source), is_asked, let_go)
    }

    async fn heard(asked: mpsc::Receiver<()>) -> mpsc::Receiver<()> {
        tokio::task::spawn_blocking(move || {
            asked.recv().unwrap();
            asked
        })
        .await
        .unwrap()
    }

    /// Starts an import and gives it up once its layer is read.
    async fn given_up(store: &Store) -> mpsc::Sender<()> {
        let (source, asked, let_go) = source();
        let importing = {
            let store = store.clone();
            tokio::spawn(async move { source_into(&store, "it", source, ImportOptions::default()).await })
        };
        let _asked = heard(asked).await;
        importing.abort();
        assert!(importing.await.unwrap_err().is_cancelled());
        let_go
    }

    #[tokio::test]
    async fn an_import_that_is_given_up_keeps_its_blob_and_the_store_until_its_work_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::open(&folder.path().join("engine.db")).unwrap();
        let store = Store::open(folder.path(), db.clone()).await.unwrap();
        let let_go = given_up(&store).await;
        assert!(store.lock(FlockOperation::NonBlockingLockExclusive).unwrap().is_none(), "it is not quiet");
        let temp = store.folders.temp.clone();
        assert_eq!(std::fs::read_dir(&temp).unwrap().count(), 1);
        // Neither does a second engine take what is half made away, nor does a second import build it too.
        let other = Store::open(folder.path(), db).await.unwrap();
        assert_eq!(std::fs::read_dir(&temp).unwrap().count(), 1);
        let (source, asked, second_goes_on) = source();
        let second = tokio::spawn(async move {
            source_into(&other, "it", source, ImportOptions::default()).await.unwrap_err()
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(asked.try_recv().is_err(), "the second reads the same layer beside the first");
        let_go.send(()).unwrap();
        let _asked = heard(asked).await;
        assert_eq!(std::fs::read_dir(&temp).unwrap().count(), 1, "the first took its folder away");
        second_goes_on.send(()).unwrap();
        second.await.unwrap();
        let quiet = store.quiet().await.unwrap();
        assert_eq!(std::fs::read_dir(&temp).unwrap().count(), 0);
        drop(quiet);
    }
}
