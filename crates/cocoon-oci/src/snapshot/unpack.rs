//! A folder as the target of a pull: sparse files, written in place, synced.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use bytes::Bytes;

use super::{PullError, plan::FilePlan, pull::Sink, sparse::Payload};

/// Creates files in an empty folder; removes them again unless [`Unpack::finish`] was reached.
#[derive(Debug)]
pub(super) struct Unpack {
    folder: PathBuf,
    made: Vec<PathBuf>,
    current: Option<(Arc<Payload>, u64)>,
    finished: bool,
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
        Ok(Self { folder: folder.to_owned(), made: Vec::new(), current: None, finished: false })
    }

    /// Syncs all files and the folder.
    pub(super) async fn finish(mut self) -> Result<(), PullError> {
        let (made, folder) = (self.made.clone(), self.folder.clone());
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

    fn path(&self) -> &Path {
        self.made.last().unwrap_or(&self.folder)
    }
}

impl Drop for Unpack {
    fn drop(&mut self) {
        if !self.finished {
            for path in &self.made {
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
        let target = path.clone();
        let create = move || {
            let new = OpenOptions::new().write(true).create_new(true).mode(mode).open(&target)?;
            new.set_len(logical)?;
            Ok(new)
        };
        let new = blocking(&path, create).await?;
        let payload = match extents {
            Some(extents) => Payload::new(new, extents),
            None => Payload::whole(new, logical),
        };
        self.made.push(path);
        self.current = Some((Arc::new(payload), 0));
        Ok(())
    }

    async fn data(&mut self, bytes: Bytes) -> Result<(), PullError> {
        let Some((payload, at)) = self.current.as_mut() else { return Ok(()) };
        let (payload, from) = (Arc::clone(payload), *at);
        *at += bytes.len() as u64;
        let path = self.path().to_owned();
        blocking(&path, move || payload.write_all_at(&bytes, from)).await
    }

    async fn end(&mut self) -> Result<(), PullError> {
        self.current = None;
        Ok(())
    }
}
