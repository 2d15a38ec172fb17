//! The ports over our own engine, an OCI registry, the lease file, SQLite and the host.
//!
//! Entry point: [`ports`].

mod engine;
mod guest;
mod host;
mod images;
mod leases;
mod prober;
mod records;
mod registry;
mod taps;

use std::{path::Path, sync::Arc};

use cocoon_engine::engine::Engine;
use cocoon_kit::world::World;
use cocoon_net::config::NetworkConfig;
use cocoon_oci::{layout::OciLayout, registry::Registry};

pub use self::{
    engine::EnginePort, guest::GuestAgents, host::ThisHost, images::ImageStore, leases::LeaseFile,
    prober::NetProber, records::SqliteRecords, registry::ArtifactRegistry,
};
use crate::ports::{PortError, Ports};

/// All ports of `cocoon up` and of `cocoon node` with the embedded engine. `records` is the SQLite file
/// of the owner records.
pub fn ports(
    engine: Engine,
    registry: Arc<dyn Registry>,
    network: &NetworkConfig,
    records: &Path,
    world: Arc<dyn World>,
) -> Result<Ports, PortError> {
    assemble(engine, Some(registry), network, records, world)
}

/// Like [`ports`], with a registry in this folder, where what comes is noticed at once.
pub fn in_folder(
    engine: Engine,
    folder: &Arc<OciLayout>,
    network: &NetworkConfig,
    records: &Path,
    world: Arc<dyn World>,
) -> Result<Ports, PortError> {
    let ports = assemble(engine.clone(), Some(Arc::clone(folder) as _), network, records, world)?;
    Ok(Ports { images: Arc::new(ImageStore::in_folder(engine, Arc::clone(folder))), ..ports })
}

/// Like [`ports`], for a node without a registry when `registry` is `None`.
pub fn assemble(
    engine: Engine,
    registry: Option<Arc<dyn Registry>>,
    network: &NetworkConfig,
    records: &Path,
    world: Arc<dyn World>,
) -> Result<Ports, PortError> {
    let machines = Arc::new(EnginePort::new(engine.clone()));
    let artifacts = registry.clone().map(|registry| ArtifactRegistry::new(engine.clone(), registry));
    Ok(Ports {
        vms: Arc::clone(&machines) as _,
        upkeep: Arc::clone(&machines) as _,
        snapshots: machines,
        images: Arc::new(ImageStore::new(engine.clone(), registry)),
        guest: Arc::new(GuestAgents::new(engine.clone())),
        registry: artifacts.map(|registry| Arc::new(registry) as _),
        leases: Arc::new(LeaseFile::new(network, world)),
        prober: Arc::new(NetProber::default()),
        records: Arc::new(SqliteRecords::open(records)?),
        host: Arc::new(ThisHost::new(engine.config().root_dir.clone())),
    })
}
