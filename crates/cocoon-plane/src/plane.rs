//! The plane's one entry point.

use std::{
    convert::Infallible,
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use cocoon_kit::{door::Refused, world::World};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower::util::BoxCloneSyncService;

use crate::{
    auth::{self, Tokens},
    controllers,
    http::{self as routes, Bodies, Pages},
    journal::{Durability, Journal as _, Loaded, SqliteJournal},
    objects::Objects,
    proxy::Proxy,
    resources::by_table,
    server,
    store::{Object, Store},
};

/// Who asks. Made from a client certificate (common name, organisations), a token, or by the caller of
/// [`Plane::service`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Name.
    pub name: String,
    /// Groups.
    pub groups: Vec<String>,
}

/// How a plane is set up.
#[derive(Clone)]
pub struct PlaneConfig {
    /// SQLite file; `None` keeps nothing.
    pub journal: Option<PathBuf>,
    /// Bearer tokens that are accepted, with their users.
    pub tokens: Vec<(String, User)>,
    /// How logs and exec reach a node's kubelet port.
    pub kubelet_client: Option<Arc<rustls::ClientConfig>>,
}

impl std::fmt::Debug for PlaneConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the tokens: they are secrets.
        f.debug_struct("PlaneConfig").field("journal", &self.journal).finish_non_exhaustive()
    }
}

/// The embedded API. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Plane {
    inner: Arc<Inner>,
}

/// What all parts of a plane share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: PlaneConfig,
    pub(crate) objects: Objects,
    pub(crate) pages: Pages,
    pub(crate) bodies: Bodies,
    pub(crate) proxy: Proxy,
    pub(crate) authority: OnceLock<String>,
    /// Connections that found no place.
    pub(crate) refused: Refused,
    tokens: Tokens,
}

impl Inner {
    /// Whose bearer token this is.
    pub(crate) fn token_user(&self, token: &str) -> Option<User> {
        self.tokens.user(token)
    }
}

/// Why a plane could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The journal file is of another version.
    #[error(
        "journal {path} has version {found}, this program writes {ours}; move the data folder away or use the matching release"
    )]
    Version {
        /// Which file.
        path: String,
        /// Its version.
        found: i64,
        /// Ours.
        ours: i64,
    },
    /// The journal could not be read.
    #[error("journal {path}")]
    Journal {
        /// Which file.
        path: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The first namespaces could not be made.
    #[error("the first namespaces could not be made")]
    Namespaces {
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A request as the plane takes it.
pub type Request = http::Request<axum::body::Body>;
/// A response as the plane gives it.
pub type Response = http::Response<axum::body::Body>;

impl Plane {
    /// Loads the journal; makes the namespaces `default`, `kube-system`, `kube-public`, `kube-node-lease`.
    pub async fn open(config: PlaneConfig, world: Arc<dyn World>) -> Result<Self, OpenError> {
        let (loaded, durability) = match &config.journal {
            None => (Loaded::default(), Durability::none()),
            Some(path) => {
                let on_error = |source| OpenError::Journal { path: path.display().to_string(), source };
                let mut journal = SqliteJournal::open(path)?;
                let loaded = journal.load().map_err(on_error)?;
                let revision = loaded.revision;
                let durability = Durability::start(Box::new(journal), revision);
                (loaded, durability.map_err(|error| on_error(error.into()))?)
            }
        };
        let store = restore(loaded, &config)?;
        let mut start = [0; 8];
        world.random(&mut start);
        let inner = Inner {
            tokens: Tokens::new(&config.tokens),
            objects: Objects::new(store, durability, world),
            pages: Pages::starting_at(u64::from_le_bytes(start)),
            bodies: Bodies::default(),
            proxy: Proxy::default(),
            authority: OnceLock::new(),
            refused: Refused::default(),
            config,
        };
        controllers::make_namespaces(&inner)
            .await
            .map_err(|error| OpenError::Namespaces { source: error.into() })?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The API as a service of this process, for a `kube::Client` that acts as `user`. It passes by TLS, not
    /// by authorisation: `user` may do what its name and groups may do.
    #[must_use]
    pub fn service(&self, user: User) -> BoxCloneSyncService<Request, Response, Infallible> {
        let (inner, user) = (Arc::clone(&self.inner), auth::known(user));
        BoxCloneSyncService::new(tower::service_fn(move |request: Request| {
            let (inner, user) = (Arc::clone(&inner), user.clone());
            async move { Ok(routes::handle(inner, user, request).await) }
        }))
    }

    /// Serves the API over TLS until `shutdown`; each connection's user comes from its client certificate,
    /// each request's from its token. No identity: 401 before the path is looked at.
    pub async fn serve(
        &self,
        listener: TcpListener,
        tls: Arc<rustls::ServerConfig>,
        shutdown: CancellationToken,
    ) -> std::io::Result<()> {
        server::serve(Arc::clone(&self.inner), listener, tls, shutdown).await
    }

    /// Runs scheduler, collector, namespace and node controllers until `shutdown`.
    pub async fn run_controllers(&self, shutdown: CancellationToken) {
        controllers::run(Arc::clone(&self.inner), shutdown).await;
    }

    /// Gives the certificate authority (PEM) that the controllers publish as `kube-root-ca.crt` in each
    /// namespace. Only the first call counts; without one nothing is published.
    pub fn publish_authority(&self, pem: &str) {
        let _ = self.inner.authority.set(pem.to_owned());
    }

    /// For the tests of parts that work on it.
    #[cfg(test)]
    pub(crate) fn into_inner(self) -> Arc<Inner> {
        self.inner
    }
}

/// The store as the journal knew it. Watches from before are told to start again.
fn restore(loaded: Loaded, config: &PlaneConfig) -> Result<Store, OpenError> {
    let path = config.journal.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let mut objects = Vec::with_capacity(loaded.objects.len());
    for (table, revision, body) in loaded.objects {
        let broken = |why: String| OpenError::Journal { path: path.clone(), source: why.into() };
        let kind = by_table(&table).ok_or_else(|| broken(format!("objects of an unknown table {table}")))?;
        let value =
            serde_json::from_slice(&body).map_err(|error| broken(format!("unreadable object: {error}")))?;
        objects.push(Object::with_bytes(kind, &value, revision, Bytes::from(body)));
    }
    Ok(Store::new(loaded.revision, objects))
}
