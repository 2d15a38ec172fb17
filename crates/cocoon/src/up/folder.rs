//! The data folder of `cocoon up`: one holder at a time, one version, everything in its place.
//!
//! Entry point: [`DataFolder::open`].

use std::{
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use cocoon_kit::files::{self, Lock};
use thiserror::Error;

use super::spare;
use crate::version::{self, VersionError};

/// Names the registry folders that were used, one a line.
const REGISTRIES: &str = "registries";

/// Why the data folder cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum FolderError {
    /// It cannot be read or written.
    #[error("data folder {folder}")]
    Io {
        /// Which.
        folder: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another release wrote it.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The saved states are not where they were.
    #[error(
        "registry folder {registry} was used by this data folder and is not an OCI layout any more; mount or move it back, or take its line out of {marker} to begin with an empty one"
    )]
    RegistryGone {
        /// Which.
        registry: String,
        /// The file that remembers it.
        marker: String,
    },
    /// Another `cocoon up` has it.
    #[error("data folder {folder} is in use by process {holder}; end that one, or use another --data-dir")]
    InUse {
        /// Which.
        folder: String,
        /// Its process id, as far as known.
        holder: String,
    },
}

/// An open data folder, ours until dropped.
#[derive(Debug)]
pub(super) struct DataFolder {
    path: PathBuf,
    _lock: Lock,
}

impl DataFolder {
    /// Creates or opens `path` (0700) and takes its lock; one of another version stays as it is.
    pub(super) fn open(path: &Path) -> Result<Self, FolderError> {
        let folder = || path.display().to_string();
        let on_io = |source| FolderError::Io { folder: folder(), source };
        version::check(path)?;
        files::private_folder(path).and_then(|()| close(path)).map_err(on_io)?;
        let path = &path.canonicalize().map_err(on_io)?;
        let lock_path = path.join("up.lock");
        let Some(lock) = Lock::try_acquire(&lock_path).map_err(on_io)? else {
            let holder = std::fs::read_to_string(&lock_path).unwrap_or_default();
            let holder = if holder.is_empty() { "unknown".to_owned() } else { holder };
            return Err(FolderError::InUse { folder: folder(), holder });
        };
        spare::give(path).map_err(on_io)?;
        version::note(path)?;
        lock.file()
            .set_len(0)
            .and_then(|()| io::Write::write_all(&mut lock.file(), std::process::id().to_string().as_bytes()))
            .map_err(on_io)?;
        for part in ["run", "log", "net"] {
            files::private_folder(&path.join(part)).map_err(on_io)?;
        }
        Ok(Self { path: path.clone(), _lock: lock })
    }

    /// Refuses a registry folder that was used before and is empty now: not mounted, or moved away. Taking
    /// it as empty would boot hibernated pods afresh (I2, I5).
    pub(super) fn expect_registry(&self, path: &Path) -> Result<(), FolderError> {
        if self.registries()?.iter().any(|known| known == path) && !path.join("oci-layout").exists() {
            return Err(FolderError::RegistryGone {
                registry: path.display().to_string(),
                marker: self.join(REGISTRIES).display().to_string(),
            });
        }
        Ok(())
    }

    /// Remembers that the registry folder is in use, besides all that were before.
    pub(super) fn remember_registry(&self, path: &Path) -> Result<(), FolderError> {
        let mut known = self.registries()?;
        if known.iter().any(|known| known == path) {
            return Ok(());
        }
        known.push(path.to_owned());
        let text: String = known.iter().map(|path| format!("{}\n", path.display())).collect();
        files::replace(&self.join(REGISTRIES), text.as_bytes(), 0o600).map_err(|source| self.io(source))
    }

    fn registries(&self) -> Result<Vec<PathBuf>, FolderError> {
        match std::fs::read_to_string(self.join(REGISTRIES)) {
            Ok(text) => Ok(text.lines().map(PathBuf::from).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(self.io(source)),
        }
    }

    fn io(&self, source: io::Error) -> FolderError {
        FolderError::Io { folder: self.path.display().to_string(), source }
    }

    /// The folder itself, which is the engine's root folder too.
    #[must_use]
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A file or folder in it.
    #[must_use]
    pub(super) fn join(&self, part: &str) -> PathBuf {
        self.path.join(part)
    }
}

/// Takes from others what they may do in a folder that was there before us.
fn close(path: &Path) -> io::Result<()> {
    const SHARED: u32 = 0o1000;
    let mode = std::fs::metadata(path)?.permissions().mode();
    if mode & SHARED != 0 {
        return Err(io::Error::other("everybody may write there; name a folder of its own with --data-dir"));
    }
    if mode & 0o077 != 0 {
        tracing::info!(folder = %path.display(), "the data folder is for its owner only from now on (0700)");
        std::fs::set_permissions(path, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_holder_and_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let held = DataFolder::open(folder.path()).unwrap();
        let refused = DataFolder::open(folder.path()).unwrap_err().to_string();
        assert!(refused.contains(&std::process::id().to_string()), "{refused}");
        drop(held);
        DataFolder::open(folder.path()).unwrap();
    }

    #[test]
    fn a_registry_folder_that_is_not_there_any_more_is_not_taken_as_empty() {
        let folder = tempfile::tempdir().unwrap();
        let data = DataFolder::open(folder.path()).unwrap();
        let (registry, other) = (data.join("registry"), data.join("other"));
        data.expect_registry(&registry).unwrap();
        data.remember_registry(&registry).unwrap();
        std::fs::create_dir(&registry).unwrap();
        let refused = data.expect_registry(&registry).unwrap_err().to_string();
        assert!(refused.contains("registries"), "{refused}");
        data.expect_registry(&other).unwrap();
        data.remember_registry(&other).unwrap();
        data.expect_registry(&registry).unwrap_err();
        std::fs::write(registry.join("oci-layout"), "{}").unwrap();
        data.expect_registry(&registry).unwrap();
    }

    #[test]
    fn an_existing_folder_is_closed_to_others_and_a_shared_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let set = |mode| std::fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
        set(0o1777);
        let FolderError::Io { source, .. } = DataFolder::open(folder.path()).unwrap_err() else { panic!() };
        assert!(source.to_string().contains("--data-dir"), "{source}");
        set(0o755);
        DataFolder::open(folder.path()).unwrap();
        assert_eq!(folder.path().metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_folder_of_another_version_is_refused_and_untouched() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("version"), "7\n").unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let refused = DataFolder::open(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("version 7"), "{refused}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "the version and nothing more");
        assert_eq!(folder.path().metadata().unwrap().permissions().mode() & 0o777, 0o755);
    }
}
