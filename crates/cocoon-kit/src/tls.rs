//! A small certificate authority and TLS configurations.
//!
//! Entry points: [`Authority::load_or_create`], [`server_config`] and [`Subject::of`]. Keys are P-256, files
//! are 0600 in a 0700 folder. Invariants: an authority's key never leaves its folder; a server with a client
//! authority asks for a client certificate but lets a caller without one connect, because tokens are checked
//! later, above TLS.

use std::{io, net::IpAddr, path::Path, sync::Arc};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use thiserror::Error;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::files;

/// Why certificates could not be made or read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file of the folder could not be read or written.
    #[error("certificate files in {folder}")]
    Files {
        /// The folder.
        folder: String,
        /// What the file system said.
        #[source]
        source: io::Error,
    },
    /// A certificate could not be made.
    #[error("making a certificate for {name}")]
    Make {
        /// The common name.
        name: String,
        /// What the library said.
        #[source]
        source: rcgen::Error,
    },
    /// Of several groups the library would write the last alone.
    #[error("a certificate for {name} with {groups} groups cannot be made; give it one")]
    Groups {
        /// The common name.
        name: String,
        /// How many were wanted.
        groups: usize,
    },
    /// A PEM text is not a usable certificate or key.
    #[error("unusable certificate or key for {name}")]
    Pem {
        /// Whose it is.
        name: String,
        /// What the parser said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A certificate and its private key, both PEM. The key is a secret: keep it out of logs.
#[derive(Clone)]
pub struct Identity {
    /// Certificate, PEM.
    pub certificate: String,
    /// Private key (PKCS#8), PEM.
    pub key: String,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identity(..)")
    }
}

/// A certificate authority kept in a folder as `ca.crt` and `ca.key`.
pub struct Authority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority(..)")
    }
}

impl Authority {
    /// Reads the authority of `folder`, or makes one named `name` there if it is clear that there is none. What
    /// is there is never overwritten: everything trusts it.
    pub fn load_or_create(folder: &Path, name: &str) -> Result<Self, TlsError> {
        let on_files = |source| TlsError::Files { folder: folder.display().to_string(), source };
        let make = |source| TlsError::Make { name: name.to_owned(), source };
        files::private_folder(folder).map_err(on_files)?;
        let (certificate_path, key_path) = (folder.join("ca.crt"), folder.join("ca.key"));
        let (certificate, key) = (found(&certificate_path), found(&key_path));
        let (certificate, key) = (certificate.map_err(on_files)?, key.map_err(on_files)?);
        // The key comes first into the folder, so one alone is the begin of an authority, and is kept.
        let key = match (key, &certificate) {
            (Some(key), _) => key,
            (None, None) => {
                made(&key_path, &KeyPair::generate().map_err(make)?.serialize_pem()).map_err(on_files)?
            }
            (None, Some(_)) => return Err(on_files(key_is_lost())),
        };
        let key = KeyPair::from_pem(&key).map_err(make)?;
        let certificate = match certificate {
            Some(certificate) => certificate,
            None => made(&certificate_path, &authority_of(name, &key)?).map_err(on_files)?,
        };
        let issuer = Issuer::from_ca_cert_pem(&certificate, key).map_err(make)?;
        Ok(Self { certificate, issuer })
    }

    /// The authority's certificate, PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// A server certificate for the given DNS names and addresses.
    pub fn issue_server(&self, name: &str, dns: &[&str], addresses: &[IpAddr]) -> Result<Identity, TlsError> {
        let mut params = leaf(name, &[], ExtendedKeyUsagePurpose::ServerAuth);
        for dns in dns {
            let dns = (*dns).try_into().map_err(|source| TlsError::Make { name: name.to_owned(), source })?;
            params.subject_alt_names.push(SanType::DnsName(dns));
        }
        params.subject_alt_names.extend(addresses.iter().copied().map(SanType::IpAddress));
        self.issue(name, params)
    }

    /// A client certificate: `name` is the user, `groups` (one at most) are its organisations (Kubernetes'
    /// reading).
    pub fn issue_client(&self, name: &str, groups: &[&str]) -> Result<Identity, TlsError> {
        if groups.len() > 1 {
            return Err(TlsError::Groups { name: name.to_owned(), groups: groups.len() });
        }
        self.issue(name, leaf(name, groups, ExtendedKeyUsagePurpose::ClientAuth))
    }

    fn issue(&self, name: &str, params: CertificateParams) -> Result<Identity, TlsError> {
        let make = |source| TlsError::Make { name: name.to_owned(), source };
        let key = KeyPair::generate().map_err(make)?;
        let certificate: Certificate = params.signed_by(&key, &self.issuer).map_err(make)?;
        Ok(Identity { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// Who a certificate is of, in Kubernetes' reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// The user: the common name, never empty.
    pub name: String,
    /// The user's groups: the organisations.
    pub groups: Vec<String>,
}

impl Subject {
    /// The subject of a certificate (DER); `None` when it has no common name. Checks no chain: TLS does.
    #[must_use]
    pub fn of(certificate: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
        let subject = certificate.subject();
        let name = subject.iter_common_name().next()?.as_str().ok().filter(|name| !name.is_empty())?;
        let groups = subject.iter_organization().filter_map(|group| group.as_str().ok()).map(Into::into);
        Some(Self { name: name.to_owned(), groups: groups.collect() })
    }
}

/// A file's text; `None` only where there clearly is no such file.
fn found(path: &Path) -> io::Result<Option<String>> {
    let read = match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => Err(error),
        Ok(_) => std::fs::read_to_string(path),
    };
    read.map(Some).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Creates a file; says what it has if somebody else was first.
fn made(path: &Path, text: &str) -> io::Result<String> {
    match files::create(path, text.as_bytes(), 0o600) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        done => done?,
    }
    found(path)?.ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn key_is_lost() -> io::Error {
    let message = "ca.crt is there, its ca.key is not; put the key back, or remove ca.crt so that a new authority \
                   is made (what trusts the old one must then be given the new one)";
    io::Error::new(io::ErrorKind::NotFound, message)
}

/// The certificate of an authority that has this key.
fn authority_of(name: &str, key: &KeyPair) -> Result<String, TlsError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = distinguished(name, &[]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let certificate = params.self_signed(key);
    certificate.map(|made| made.pem()).map_err(|source| TlsError::Make { name: name.to_owned(), source })
}

fn distinguished(name: &str, groups: &[&str]) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    for group in groups {
        distinguished.push(DnType::OrganizationName, *group);
    }
    distinguished
}

fn leaf(name: &str, groups: &[&str], usage: ExtendedKeyUsagePurpose) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = distinguished(name, groups);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    params.extended_key_usages = vec![usage];
    params
}

/// A server that shows `identity` and asks for client certificates of `client_authority` (PEM).
/// ALPN offers HTTP/2 and HTTP/1.1.
pub fn server_config(identity: &Identity, client_authority: &str) -> Result<Arc<ServerConfig>, TlsError> {
    let pem =
        |source: Box<dyn std::error::Error + Send + Sync>| TlsError::Pem { name: "server".into(), source };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots(client_authority)?),
        Arc::clone(&provider),
    )
    .allow_unauthenticated()
    .build()
    .map_err(|error| pem(error.into()))?;
    let (chain, key) = pair(identity)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| pem(error.into()))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|error| pem(error.into()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A client that trusts `authority` (PEM) alone and shows `identity`. HTTP/1.1 only, because its
/// users upgrade connections.
pub fn client_config(identity: &Identity, authority: &str) -> Result<Arc<rustls::ClientConfig>, TlsError> {
    let pem =
        |source: Box<dyn std::error::Error + Send + Sync>| TlsError::Pem { name: "client".into(), source };
    let (chain, key) = pair(identity)?;
    let config =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| pem(error.into()))?
            .with_root_certificates(roots(authority)?)
            .with_client_auth_cert(chain, key)
            .map_err(|error| pem(error.into()))?;
    Ok(Arc::new(config))
}

fn roots(authority: &str) -> Result<RootCertStore, TlsError> {
    let pem =
        |source: Box<dyn std::error::Error + Send + Sync>| TlsError::Pem { name: "authority".into(), source };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        roots.add(certificate.map_err(|error| pem(error.into()))?).map_err(|error| pem(error.into()))?;
    }
    Ok(roots)
}

fn pair(identity: &Identity) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
    let pem = |source: rustls::pki_types::pem::Error| TlsError::Pem {
        name: "identity".into(),
        source: source.into(),
    };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(identity.certificate.as_bytes()).collect();
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).map_err(pem)?;
    Ok((chain.map_err(pem)?, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_is_made_once_and_its_identities_are_usable() {
        let folder = tempfile::tempdir().unwrap();
        let first = Authority::load_or_create(folder.path(), "test-ca").unwrap();
        let second = Authority::load_or_create(folder.path(), "test-ca").unwrap();
        assert_eq!(first.certificate(), second.certificate());
        let server = second.issue_server("node", &["localhost"], &[[127, 0, 0, 1].into()]).unwrap();
        let client = second.issue_client("admin", &["system:masters"]).unwrap();
        server_config(&server, first.certificate()).unwrap();
        client_config(&client, first.certificate()).unwrap();
    }

    #[test]
    fn an_authority_that_cannot_be_read_or_is_half_lost_is_never_made_anew_over_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let load = || Authority::load_or_create(folder.path(), "test-ca");
        let first = load().unwrap().certificate().to_owned();
        let [certificate, key] = ["ca.crt", "ca.key"].map(|name| folder.path().join(name));
        let secret = std::fs::read(&key).unwrap();
        for path in [&certificate, &key] {
            let kept = std::fs::read(path).unwrap();
            // What lies behind a loop, or a link to a disk that is not mounted, cannot be read.
            for target in [path.clone(), folder.path().join("not-mounted")] {
                std::fs::remove_file(path).unwrap();
                std::os::unix::fs::symlink(target, path).unwrap();
                let error = load().unwrap_err();
                assert!(crate::failure::chain(&error).contains(&path.display().to_string()), "{error}");
            }
            std::fs::remove_file(path).unwrap();
            std::fs::write(path, kept).unwrap();
        }
        assert_eq!(load().unwrap().certificate(), first);
        std::fs::remove_file(&key).unwrap();
        let said = crate::failure::chain(&load().unwrap_err());
        assert!(said.contains("put the key back"), "{said}");
        assert!(!key.exists());
        // A key alone, as a crash leaves it, becomes the authority's.
        std::fs::write(&key, &secret).unwrap();
        std::fs::remove_file(&certificate).unwrap();
        load().unwrap().issue_client("admin", &[]).unwrap();
        assert_eq!(std::fs::read(&key).unwrap(), secret);
    }

    #[test]
    fn a_certificate_says_who_and_in_which_groups_one_is() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::load_or_create(folder.path(), "ca").unwrap();
        let subject = |name: &str, groups: &[&str]| {
            let identity = authority.issue_client(name, groups).unwrap();
            Subject::of(&CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap())
        };
        let found = subject("system:node:n", &["system:nodes"]).unwrap();
        assert_eq!((&*found.name, &*found.groups), ("system:node:n", &["system:nodes".into()][..]));
        assert_eq!(subject("", &["system:masters"]), None);
        assert_eq!(Subject::of(b"no certificate"), None);
        assert!(matches!(authority.issue_client("a", &["b", "c"]), Err(TlsError::Groups { groups: 2, .. })));
    }
}
