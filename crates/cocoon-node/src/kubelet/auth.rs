//! Who calls, and whether they may. Pure.
//!
//! A client certificate's common name is the user, its organisations are the groups (Kubernetes' own
//! reading). TLS has checked the chain before any of this runs.

use x509_parser::{certificate::X509Certificate, prelude::FromDer as _};

use crate::config::NodeConfig;

/// Who calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Common name.
    pub user: String,
    /// Organisations.
    pub groups: Vec<String>,
}

impl Caller {
    /// The subject of a certificate; `None` when it has no common name.
    #[must_use]
    pub fn of(certificate: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let subject = certificate.subject();
        let user = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
        let groups =
            subject.iter_organization().filter_map(|name| Some(name.as_str().ok()?.to_owned())).collect();
        Some(Self { user, groups })
    }
}

/// What follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Allowed,
    /// 401.
    Unknown,
    /// 403, for this user.
    Forbidden(String),
}

/// Whether this caller may use the port at all. Deny by default.
#[must_use]
pub fn judge(caller: Option<&Caller>, config: &NodeConfig) -> Verdict {
    let Some(caller) = caller else { return Verdict::Unknown };
    let allowed = config.kubelet_users.contains(&caller.user)
        || caller.groups.iter().any(|group| config.kubelet_groups.contains(group));
    if allowed { Verdict::Allowed } else { Verdict::Forbidden(caller.user.clone()) }
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
            let caller = Caller::of(&der).unwrap();
            assert_eq!(caller.user, name);
            assert_eq!(judge(Some(&caller), &config), expected, "{name}");
        }
        assert_eq!(judge(None, &config), Verdict::Unknown);
        assert_eq!(Caller::of(b"no certificate"), None);
    }
}
