//! Who asks: client certificate, else bearer token.
//!
//! Entry points: [`certified`] and [`Tokens::user`]. Invariant: tokens are compared by their hashes, so
//! that how long a comparison takes tells nothing about the token.

use cocoon_kit::tls::Subject;
use http::{HeaderMap, header};
use sha2::{Digest as _, Sha256};

use crate::plane::User;

/// Group of everybody who is known.
const AUTHENTICATED: &str = "system:authenticated";

/// The user of a verified client certificate.
pub(crate) fn certified(Subject { name, groups }: Subject) -> User {
    known(User { name, groups })
}

/// `user` with the group that all known users are in.
pub(crate) fn known(mut user: User) -> User {
    if !user.groups.iter().any(|group| group == AUTHENTICATED) {
        user.groups.push(AUTHENTICATED.into());
    }
    user
}

/// Tokens, kept as hashes.
#[derive(Default)]
pub(crate) struct Tokens(Vec<([u8; 32], User)>);

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokens({})", self.0.len())
    }
}

impl Tokens {
    pub(crate) fn new<'a>(tokens: impl IntoIterator<Item = &'a (String, User)>) -> Self {
        // An empty token would let in everybody who sends an empty header.
        let usable = tokens.into_iter().filter(|(token, _)| !token.is_empty());
        Self(usable.map(|(token, user)| (hash(token), known(user.clone()))).collect())
    }

    /// Whose `token` this is.
    pub(crate) fn user(&self, token: &str) -> Option<User> {
        let asked = hash(token);
        self.0.iter().find(|(known, _)| *known == asked).map(|(_, user)| user.clone())
    }
}

fn hash(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

/// The bearer token of a request.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_known_only_in_full() {
        let user = User { name: "a".into(), groups: vec![] };
        let tokens = Tokens::new(&[("secret".into(), user.clone()), (String::new(), user)]);
        assert_eq!(tokens.user("secret").unwrap().name, "a");
        for wrong in ["", "secre", "secret ", "SECRET"] {
            assert!(tokens.user(wrong).is_none(), "{wrong}");
        }
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, "bearer secret".parse().unwrap())]);
        assert_eq!(bearer(&headers), Some("secret"));
    }
}
