//! Whether a caller may use the port. Pure.
//!
//! The caller is the subject of a client certificate. TLS has checked the chain before any of this runs.

use cocoon_kit::tls::Subject;

use crate::config::NodeConfig;

/// What follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Go on.
    Allowed,
    /// 401.
    Unknown,
    /// 403, for this user.
    Forbidden(String),
}

/// Whether this caller may use the port at all. Deny by default.
#[must_use]
pub(crate) fn judge(caller: Option<&Subject>, config: &NodeConfig) -> Verdict {
    let Some(caller) = caller else { return Verdict::Unknown };
    let allowed = config.kubelet_users.contains(&caller.name)
        || caller.groups.iter().any(|group| config.kubelet_groups.contains(group));
    if allowed { Verdict::Allowed } else { Verdict::Forbidden(caller.name.clone()) }
}

#[cfg(test)]
mod tests {
    use cocoon_kit::tls::Authority;
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};

    use super::*;

    #[test]
    fn only_named_users_and_groups_may_use_the_port() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::load_or_create(folder.path(), "ca").unwrap();
        let config = NodeConfig { kubelet_users: vec!["apiserver".into()], ..NodeConfig::new("n") };
        for (name, groups, expected) in [
            ("apiserver", &[][..], Verdict::Allowed),
            ("root", &["system:masters"], Verdict::Allowed),
            ("system:node:n", &["system:nodes"], Verdict::Forbidden("system:node:n".into())),
        ] {
            let identity = authority.issue_client(name, groups).unwrap();
            let der = CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap();
            let caller = Subject::of(&der).unwrap();
            assert_eq!(caller.name, name);
            assert_eq!(judge(Some(&caller), &config), expected, "{name}");
        }
        assert_eq!(judge(None, &config), Verdict::Unknown);
    }
}
