//! A folder of files as the source of a push.

use std::{collections::VecDeque, fs::File, io, os::unix::fs::MetadataExt as _, sync::Arc};

use async_trait::async_trait;

use super::{
    PushError, SourceFile,
    config::Config,
    push::{Block, Cut, Entries, Head},
    sparse::{Extent, Payload, Range, map_text, scan, widen},
};

/// Files that are opened, scanned for holes and handed out as ranges.
#[derive(Debug)]
pub(super) struct Folder {
    waiting: VecDeque<SourceFile>,
    current: Option<(Arc<Payload>, u64)>,
    seen: Vec<(String, Arc<Payload>, Stamp)>,
    facts: Config,
}

/// What must not change while a file is pushed.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    length: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { length: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) })
    }
}

impl Folder {
    pub(super) fn new(files: &[SourceFile], facts: Config) -> Self {
        Self { waiting: files.iter().cloned().collect(), current: None, seen: Vec::new(), facts }
    }
}

/// Opens a regular file and finds its data, in whole windows where it is cut into them.
fn open(source: &SourceFile, cut: Cut) -> io::Result<(Head, Payload, Stamp)> {
    let file = File::open(&source.path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let stamp = Stamp::of(&file)?;
    let mut extents = scan(&file, stamp.length)?;
    let payload = extents.iter().map(|extent| extent.length).sum();
    let stride = cut.windows(stamp.length, payload);
    if let Some(stride) = stride {
        extents = widen(&extents, stride, stamp.length);
    }
    let ordinary = stamp.length == 0 || extents == [Extent { offset: 0, length: stamp.length }];
    let logical = i64::try_from(stamp.length).map_err(|_| io::ErrorKind::FileTooLarge)?;
    let sparse = (!ordinary).then(|| (map_text(&extents), logical));
    let payload = Payload::new(file, extents);
    let head = Head {
        name: source.name.clone(),
        mode: i64::from(source.mode & 0o777),
        size: payload.length(),
        sparse,
        stride,
    };
    Ok((head, payload, stamp))
}

fn failed(path: &std::path::Path, source: io::Error) -> PushError {
    PushError::File { path: path.display().to_string(), source }
}

#[async_trait]
impl Entries for Folder {
    async fn next(&mut self, cut: Cut) -> Result<Option<Head>, PushError> {
        let Some(source) = self.waiting.pop_front() else { return Ok(None) };
        let path = source.path.clone();
        let opened = tokio::task::spawn_blocking(move || open(&source, cut)).await;
        let opened = opened.unwrap_or_else(|error| Err(io::Error::other(error)));
        let (head, payload, stamp) = opened.map_err(|error| failed(&path, error))?;
        let payload = Arc::new(payload);
        self.seen.push((path.display().to_string(), Arc::clone(&payload), stamp));
        self.current = Some((payload, 0));
        Ok(Some(head))
    }

    async fn take(&mut self, length: u64) -> Result<Block, PushError> {
        let Some((payload, at)) = self.current.as_mut() else {
            return Err(PushError::Invalid("bytes of no file were asked for".to_owned()));
        };
        let range = Range { payload: Arc::clone(payload), at: *at, length };
        *at += length;
        Ok(Block::Range(range))
    }

    async fn take_large(&mut self, length: u64) -> Result<Block, PushError> {
        self.take(length).await
    }

    fn snapshot_id(&self) -> Option<&str> {
        Some(&self.facts.snapshot_id)
    }

    async fn facts(&mut self) -> Result<Config, PushError> {
        for (path, payload, stamp) in &self.seen {
            let now = Stamp::of(payload.file()).map_err(|error| failed(std::path::Path::new(path), error))?;
            if now != *stamp {
                return Err(PushError::Invalid(format!("{path} changed while it was pushed; push again")));
            }
        }
        Ok(self.facts.clone())
    }
}
