//! Certificates of `cocoon up`: one authority in the data folder, and what it signs.
//!
//! Entry point: [`Credentials::load`]. The authority is kept; everything that it signs is made anew at
//! each start. The kubeconfig (0600) carries the administrator's certificate; those of earlier starts
//! stay valid as long as the authority.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
};

use anyhow::Context as _;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use cocoon_kit::{
    files,
    tls::{self, Authority, Identity},
};
use rustls::{ClientConfig, ServerConfig};

/// The user that the plane shows to the kubelet port.
pub(super) const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";

/// TLS configurations of all parts.
#[derive(Debug)]
pub(super) struct Credentials {
    /// The API's port.
    pub(super) api: Arc<ServerConfig>,
    /// The kubelet port.
    pub(super) kubelet: Arc<ServerConfig>,
    /// How the API reaches the kubelet port.
    pub(super) kubelet_client: Arc<ClientConfig>,
    admin: Identity,
    authority: String,
}

impl Credentials {
    /// Loads or makes the authority of `folder` and signs everything for `node`, whose ports are on
    /// `addresses`.
    pub(super) fn load(folder: &Path, node: &str, addresses: &[IpAddr]) -> anyhow::Result<Self> {
        let authority = Authority::load_or_create(folder, "cocoon-up")?;
        let trusted = authority.certificate().to_owned();
        let mut named = vec![IpAddr::from([127, 0, 0, 1])];
        named.extend(addresses.iter().filter(|address| !address.is_loopback()));
        let names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"];
        let api = authority.issue_server("kube-apiserver", &names, &named)?;
        let kubelet = authority.issue_server(&format!("system:node:{node}"), &["localhost"], &named)?;
        let client = authority.issue_client(KUBELET_CLIENT, &["system:masters"])?;
        Ok(Self {
            api: tls::server_config(&api, &trusted)?,
            kubelet: tls::server_config(&kubelet, &trusted)?,
            kubelet_client: tls::client_config(&client, &trusted)?,
            admin: authority.issue_client("admin", &["system:masters"])?,
            authority: trusted,
        })
    }

    /// The authority's certificate, PEM.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    /// Writes a kubeconfig for the administrator, 0600.
    pub(super) fn write_kubeconfig(&self, path: &Path, api: SocketAddr) -> anyhow::Result<()> {
        let encoded = |text: &str| STANDARD.encode(text);
        let config = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "cocoon",
            "clusters": [{"name": "cocoon", "cluster": {
                "server": format!("https://{api}"),
                "certificate-authority-data": encoded(&self.authority),
            }}],
            "users": [{"name": "admin", "user": {
                "client-certificate-data": encoded(&self.admin.certificate),
                "client-key-data": encoded(&self.admin.key),
            }}],
            "contexts": [{"name": "cocoon", "context": {"cluster": "cocoon", "user": "admin", "namespace": "default"}}],
        });
        let text = serde_yaml_ng::to_string(&config).context("kubeconfig")?;
        match files::replace(path, text.as_bytes(), 0o600) {
            // That of an earlier start works too, and through it pods say that the disk is full.
            Err(error) if error.kind() == ErrorKind::StorageFull && self.is_ours(path, api) => {
                tracing::warn!(path = %path.display(), "the disk is full: the kubeconfig of an earlier start stays");
                Ok(())
            }
            written => written.with_context(|| format!("writing {}", path.display())),
        }
    }

    /// Whether an earlier start wrote a kubeconfig for this address and authority.
    fn is_ours(&self, path: &Path, api: SocketAddr) -> bool {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        [format!("https://{api}"), STANDARD.encode(&self.authority)].iter().all(|part| text.contains(part))
    }
}
