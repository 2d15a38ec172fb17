//! The version of a data folder's layout, which `cocoon up` notes in the folder and every role looks at.
//!
//! Entry points: [`check`] and [`note`]. Invariant: a folder of another version is not touched.

use std::{io, path::Path};

use cocoon_kit::files;
use thiserror::Error;

/// The layout that this program reads and writes.
const VERSION: &str = "1";
const FILE: &str = "version";

/// Why the folder cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum VersionError {
    /// Its version cannot be read or written.
    #[error("version of data folder {folder}")]
    Io {
        /// Which.
        folder: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another release wrote it.
    #[error(
        "data folder {folder} has version {found}, this program reads version {VERSION}; use the matching release, or name another folder (--data-dir of `cocoon up`, --root-dir of all other commands)"
    )]
    Other {
        /// Which.
        folder: String,
        /// What its version file says.
        found: String,
    },
}

/// Whether the folder notes a version; another one than ours is an error.
pub(crate) fn check(folder: &Path) -> Result<bool, VersionError> {
    let name = || folder.display().to_string();
    match std::fs::read_to_string(folder.join(FILE)) {
        Ok(found) if found.trim() == VERSION => Ok(true),
        Ok(found) => Err(VersionError::Other { folder: name(), found: found.trim().to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(VersionError::Io { folder: name(), source }),
    }
}

/// Notes our version where there is none.
pub(crate) fn note(folder: &Path) -> Result<(), VersionError> {
    if check(folder)? {
        return Ok(());
    }
    files::replace(&folder.join(FILE), format!("{VERSION}\n").as_bytes(), 0o600)
        .map_err(|source| VersionError::Io { folder: folder.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_a_version_gets_ours_and_one_with_another_is_refused_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!check(&folder.path().join("not there")).unwrap());
        assert!(!check(folder.path()).unwrap());
        note(folder.path()).unwrap();
        assert!(check(folder.path()).unwrap());
        for other in ["2\n", "", "1.5"] {
            std::fs::write(folder.path().join(FILE), other).unwrap();
            assert!(matches!(check(folder.path()), Err(VersionError::Other { .. })), "{other:?}");
            note(folder.path()).unwrap_err();
            assert_eq!(std::fs::read_to_string(folder.path().join(FILE)).unwrap(), other);
        }
    }
}
