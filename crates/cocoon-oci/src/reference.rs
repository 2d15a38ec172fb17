//! References (`spec/snapshot-wire-format.md` §12).
//!
//! Entry points: [`Relative::parse`] for what a pod may name, [`split`] for the contract's bare rule,
//! [`join`] for a full name under a registry's base.

use std::fmt;

use thiserror::Error;

use crate::digest;

/// The tag that a reference without one has.
pub const DEFAULT_TAG: &str = "latest";

/// A reference that cannot name anything under a registry's base.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not a reference of the form repository[:tag], relative to the registry's base")]
pub struct ReferenceError(String);

/// Splits at the first colon; without one (or with an empty repository) the tag is `latest`. No checks.
#[must_use]
pub fn split(reference: &str) -> (&str, &str) {
    match reference.split_once(':') {
        Some((repository, tag)) if !repository.is_empty() => (repository, tag),
        _ => (reference, DEFAULT_TAG),
    }
}

/// Whether this is a repository name: lower-case alphanumeric components joined by `.`, `_`, `__` or
/// dashes, separated by `/`.
#[must_use]
pub fn is_repository(name: &str) -> bool {
    !name.is_empty() && name.split('/').all(is_component)
}

fn is_component(component: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = component.as_bytes();
    if !bytes.first().is_some_and(|first| plain(*first)) || !bytes.last().is_some_and(|last| plain(*last)) {
        return false;
    }
    let mut separators = component.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    separators.all(|run| matches!(run, "" | "." | "_" | "__") || run.bytes().all(|byte| byte == b'-'))
}

/// Whether this is a tag: `[A-Za-z0-9_]` and up to 127 of `[A-Za-z0-9._-]`.
#[must_use]
pub fn is_tag(tag: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let bytes = tag.as_bytes();
    (1..=128).contains(&bytes.len())
        && word(bytes[0])
        && bytes.iter().all(|byte| word(*byte) || matches!(byte, b'.' | b'-'))
}

/// A repository and tag relative to a registry's base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relative {
    /// Repository.
    pub repository: String,
    /// Tag.
    pub tag: String,
}

impl Relative {
    /// Parses `repository[:tag]`; hosts with ports, digests, URLs and upper-case names are refused.
    pub fn parse(reference: &str) -> Result<Self, ReferenceError> {
        let (repository, tag) = split(reference);
        if is_repository(repository) && is_tag(tag) {
            return Ok(Self { repository: repository.to_owned(), tag: tag.to_owned() });
        }
        Err(ReferenceError(reference.to_owned()))
    }
}

impl fmt::Display for Relative {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.repository, self.tag)
    }
}

/// `repository:tag`, or `repository@digest` when the reference has a colon.
#[must_use]
pub fn local(repository: &str, reference: &str) -> String {
    let joint = if reference.contains(':') { '@' } else { ':' };
    format!("{repository}{joint}{reference}")
}

/// The full name of `repository` and `reference` (a tag or digest) under `base`
/// (`host[:port][/prefix]`), checked as loosely as the contract's client does.
pub fn join(base: &str, repository: &str, reference: &str) -> Result<String, ReferenceError> {
    let name = format!("{base}/{repository}");
    let full = local(&name, reference);
    let path = match name.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => path,
        _ => name.as_str(),
    };
    let path_fits = (2..=255).contains(&path.len())
        && path.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'/'));
    let reference_fits = if reference.contains(':') {
        digest::is_valid(reference)
    } else {
        (1..=128).contains(&reference.len())
            && reference
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
    };
    if path_fits && reference_fits { Ok(full) } else { Err(ReferenceError(full)) }
}

/// The local name of a pulled snapshot: the bare repository for `latest`, else `repository:tag`, so two
/// tags of one repository never share a name.
#[must_use]
pub fn local_name(repository: &str, tag: &str) -> String {
    if tag == DEFAULT_TAG { repository.to_owned() } else { local(repository, tag) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn two_tags_of_one_repository_have_two_local_names() {
        assert_eq!(local_name("myvm", "latest"), "myvm");
        assert_eq!(local_name("myvm", "v1"), "myvm:v1");
    }

    proptest! {
        #[test]
        fn what_parses_prints_back(text in "[a-z0-9._/:A-Z@-]{0,20}") {
            if let Ok(parsed) = Relative::parse(&text) {
                prop_assert_eq!(Relative::parse(&parsed.to_string()), Ok(parsed));
            }
        }

        #[test]
        fn nothing_panics(text in any::<String>(), other in any::<String>()) {
            let _ = Relative::parse(&text);
            let _ = join(&text, &other, &text);
        }
    }
}
