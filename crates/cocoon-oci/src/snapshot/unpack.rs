//! A folder as the target of a pull: sparse files, written in place, synced.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use bytes::Bytes;

use super::{PullError, plan::FilePlan, pull::Sink, sparse::Payload};

/// Creates files in an empty folder; removes them again unless [`Unpack::finish`] was reached.
#[derive(Debug)]
pub(super) struct Unpack {
    folder: PathBuf,
    made: Arc<Mutex<Made>>,
    current: Option<(Arc<Payload>, PathBuf, u64)>,
    finished: bool,
}

/// What a pull made so far. A blocking thread may still be about to make a file when the pull is given up, so
/// making, noting and giving up are under one lock.
#[derive(Debug, Default)]
struct Made {
    paths: Vec<PathBuf>,
    given_up: bool,
}

fn held(made: &Mutex<Made>) -> MutexGuard<'_, Made> {
    made.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a file and notes it, unless the pull was given up meanwhile.
fn create(made: &Mutex<Made>, path: &Path, mode: u32, logical: u64) -> io::Result<File> {
    let mut made = held(made);
    if made.given_up {
        return Err(io::Error::new(io::ErrorKind::Interrupted, "the pull was given up; pull again"));
    }
    let new = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    made.paths.push(path.to_owned());
    new.set_len(logical)?;
    Ok(new)
}

fn failed(path: &Path, source: io::Error) -> PullError {
    PullError::File { path: path.display().to_string(), source }
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PullError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| failed(path, error))
}

impl Unpack {
    /// The folder must exist and be empty.
    pub(super) async fn into_empty(folder: &Path) -> Result<Self, PullError> {
        let path = folder.to_owned();
        let empty = blocking(folder, move || Ok(std::fs::read_dir(path)?.next().is_none())).await?;
        if !empty {
            return Err(failed(
                folder,
                io::Error::new(io::ErrorKind::DirectoryNotEmpty, "the folder is not empty"),
            ));
        }
        Ok(Self { folder: folder.to_owned(), made: Arc::default(), current: None, finished: false })
    }

    /// Syncs all files and the folder.
    pub(super) async fn finish(mut self) -> Result<(), PullError> {
        let (made, folder) = (held(&self.made).paths.clone(), self.folder.clone());
        let sync = move || {
            for path in &made {
                File::open(path)?.sync_all()?;
            }
            File::open(&folder)?.sync_all()
        };
        blocking(&self.folder.clone(), sync).await?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Unpack {
    fn drop(&mut self) {
        if !self.finished {
            let mut made = held(&self.made);
            made.given_up = true;
            for path in &made.paths {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

#[async_trait]
impl Sink for Unpack {
    async fn begin(&mut self, file: &FilePlan) -> Result<(), PullError> {
        let path = self.folder.join(&file.name);
        let mode = u32::try_from(file.mode & 0o777).unwrap_or(0o640);
        let (logical, extents) = match &file.sparse {
            Some(sparse) => (sparse.logical, Some(sparse.extents.clone())),
            None => (file.payload, None),
        };
        let (made, target) = (Arc::clone(&self.made), path.clone());
        let new = blocking(&path, move || create(&made, &target, mode, logical)).await?;
        let payload = match extents {
            Some(extents) => Payload::new(new, extents),
            None => Payload::whole(new, logical),
        };
        self.current = Some((Arc::new(payload), path, 0));
        Ok(())
    }

    async fn data(&mut self, bytes: Bytes) -> Result<(), PullError> {
        let Some((payload, path, at)) = self.current.as_mut() else { return Ok(()) };
        let (payload, path, from) = (Arc::clone(payload), path.clone(), *at);
        *at += bytes.len() as u64;
        blocking(&path, move || payload.write_all_at(&bytes, from)).await
    }

    async fn end(&mut self) -> Result<(), PullError> {
        self.current = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_pull_that_is_given_up_while_a_file_is_about_to_be_made_leaves_none() {
        let folder = tempfile::tempdir().unwrap();
        // One blocking thread, so that what is to be made waits behind something else.
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        let (release, busy) = mpsc::channel::<()>();
        let made = runtime.block_on(async {
            let mut unpack = Unpack::into_empty(folder.path()).await.unwrap();
            let _first = tokio::task::spawn_blocking(move || busy.recv());
            let file = FilePlan {
                name: "memory-ranges".to_owned(),
                mode: 0o600,
                payload: 7,
                sparse: None,
                pieces: Vec::new(),
                zstd: false,
                ceiling: 7,
            };
            {
                let mut begun = unpack.begin(&file);
                let waits = futures::poll!(begun.as_mut());
                assert!(waits.is_pending(), "it waits for the thread");
            }
            drop(unpack);
            release.send(()).unwrap();
            // The thread works in order: what follows finds what came before done.
            let path = folder.path().to_owned();
            let left = tokio::task::spawn_blocking(move || std::fs::read_dir(path).map(Iterator::count));
            left.await.unwrap().unwrap()
        });
        assert_eq!(made, 0, "a file of nobody's");
    }
}
