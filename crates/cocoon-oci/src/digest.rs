//! Content digests: `sha256:` and 64 lower-case hex digits, nothing else.
//!
//! Entry points: [`of`], [`is_valid`] and [`Hasher`], which checks a body while it passes.

use sha2::{Digest as _, Sha256};

/// The digest of `bytes`.
#[must_use]
pub fn of(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// The hex part of a well-formed digest.
#[must_use]
pub fn hex_of(digest: &str) -> Option<&str> {
    let hex = digest.strip_prefix("sha256:")?;
    let plain = hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    plain.then_some(hex)
}

/// Whether this is a digest that content can have here.
#[must_use]
pub fn is_valid(digest: &str) -> bool {
    hex_of(digest).is_some()
}

/// Counts and hashes bytes as they pass.
#[derive(Debug, Clone, Default)]
pub struct Hasher {
    inner: Sha256,
    length: u64,
}

impl Hasher {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.inner.update(bytes);
        self.length += bytes.len() as u64;
    }

    /// How many bytes passed so far.
    #[must_use]
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// The digest of all that passed.
    #[must_use]
    pub fn finish(self) -> String {
        format!("sha256:{}", hex::encode(self.inner.finalize()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sha256_in_lower_case_hex_is_a_digest() {
        assert!(is_valid(&of(b"")));
        for bad in
            ["", "sha256:", "sha256:child", "sha512:00", &of(b"x").to_uppercase(), &format!("{}0", of(b""))]
        {
            assert!(!is_valid(bad), "{bad}");
        }
    }

    #[test]
    fn a_hasher_agrees_with_the_one_shot() {
        let mut hasher = Hasher::default();
        hasher.update(b"ab");
        hasher.update(b"c");
        assert_eq!((hasher.length(), hasher.finish()), (3, of(b"abc")));
    }
}
