//! Paths inside an archive. Pure.
//!
//! Entry points: [`Inside::parse`] and [`link_stays_inside`]. Invariant: an [`Inside`] has no `..`, no
//! leading slash, no NUL, and is short enough for every kernel; bytes need not be UTF-8.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::PathBuf,
};

/// Longest path, in bytes (`PATH_MAX`).
pub(super) const MAX_PATH: usize = 4095;
/// Longest component, in bytes (`NAME_MAX`).
const MAX_NAME: usize = 255;
/// Deepest nesting of folders.
const MAX_DEPTH: usize = 128;
const ABSOLUTE: &str =
    "absolute path; pack the archive from inside its root, such as with `tar -C ROOTFS -cf FILE .`";
const PARENT: &str =
    "the path has a `..`; pack the archive from inside its root, such as with `tar -C ROOTFS -cf FILE .`";

/// A path below the root of the tree; no component means the root itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Inside(PathBuf);

impl Inside {
    /// Takes a member's name as it stands in an archive; the error is the rule that it breaks.
    pub(super) fn parse(raw: &[u8]) -> Result<Self, &'static str> {
        if raw.len() > MAX_PATH {
            return Err("the path is longer than 4095 bytes");
        }
        if raw.contains(&0) {
            return Err("the path has a NUL byte");
        }
        if raw.first() == Some(&b'/') {
            return Err(ABSOLUTE);
        }
        let mut path = PathBuf::new();
        let mut depth = 0;
        for part in raw.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".") {
            if part == b".." {
                return Err(PARENT);
            }
            if part.len() > MAX_NAME {
                return Err("a part of the path is longer than 255 bytes");
            }
            depth += 1;
            path.push(OsStr::from_bytes(part));
        }
        if depth > MAX_DEPTH {
            return Err("more than 128 folders deep");
        }
        Ok(Self(path))
    }

    /// The folder and the name in it; `None` for the root.
    pub(super) fn split(&self) -> Option<(Self, &OsStr)> {
        let name = self.0.file_name()?;
        Some((Self(self.0.parent().map(ToOwned::to_owned).unwrap_or_default()), name))
    }

    /// `self/name`; `name` must be one plain component.
    pub(super) fn child(&self, name: &[u8]) -> Result<Self, &'static str> {
        if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') {
            return Err("not the name of a file");
        }
        let mut raw = self.0.as_os_str().as_bytes().to_vec();
        raw.push(b'/');
        raw.extend_from_slice(name);
        Self::parse(raw.strip_prefix(b"/").unwrap_or(&raw))
    }

    /// The path, relative; empty for the root.
    pub(super) fn as_path(&self) -> &std::path::Path {
        &self.0
    }

    /// Number of components.
    pub(super) fn depth(&self) -> usize {
        self.0.components().count()
    }
}

impl std::fmt::Display for Inside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.display().fmt(f)
    }
}

/// Whether a symbolic link at `at` with this target stays below the root when resolved by text. An
/// absolute target is resolved from the guest's own root, so it cannot leave it.
pub(super) fn link_stays_inside(at: &Inside, target: &[u8]) -> bool {
    if target.first() == Some(&b'/') {
        return true;
    }
    let mut depth = at.depth().saturating_sub(1);
    for part in target.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".") {
        if part == b".." {
            let Some(up) = depth.checked_sub(1) else { return false };
            depth = up;
        } else {
            depth += 1;
        }
    }
    true
}

/// Bytes of an archive as a name.
pub(super) fn os_string(raw: &[u8]) -> OsString {
    OsString::from_vec(raw.to_vec())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hostile_paths_are_refused_and_plain_ones_are_cleaned() {
        for hostile in ["/etc/passwd", "..", "a/../b", "../x", "a/..", "x\0y"] {
            assert!(Inside::parse(hostile.as_bytes()).is_err(), "{hostile:?}");
        }
        for (raw, clean) in [("./a//b/./c/", "a/b/c"), ("", ""), ("./", ""), ("a..b", "a..b"), ("...", "...")]
        {
            assert_eq!(Inside::parse(raw.as_bytes()).unwrap().as_path().to_str(), Some(clean), "{raw:?}");
        }
        assert!(Inside::parse(&b"a/".repeat(129)).is_err());
        assert!(Inside::parse(&[b'a'; 256]).is_err());
        assert!(Inside::parse(&b"abc/".repeat(1100)).is_err());
    }

    #[test]
    fn names_that_are_not_utf_8_keep_their_bytes() {
        let path = Inside::parse(b"a/\xff\xfe").unwrap();
        assert_eq!(path.as_path().as_os_str().as_bytes(), b"a/\xff\xfe");
    }

    #[test]
    fn links_may_be_absolute_but_not_climb_over_the_root() {
        let at = Inside::parse(b"etc/alternatives/vi").unwrap();
        for (target, inside) in [
            ("/usr/bin/vim", true),
            ("../../usr", true),
            ("../../../usr", false),
            ("../x/../../../y", false),
            ("nano", true),
            ("/../../x", true),
        ] {
            assert_eq!(link_stays_inside(&at, target.as_bytes()), inside, "{target}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_never_leaves_the_root(raw in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(path) = Inside::parse(&raw) {
                prop_assert!(path.as_path().components().all(|c| matches!(c, std::path::Component::Normal(_))));
            }
        }
    }
}
