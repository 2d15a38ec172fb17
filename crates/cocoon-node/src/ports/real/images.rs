//! Images to boot from: the engine's store, filled from the registry.

use std::sync::Arc;

use async_trait::async_trait;
use cocoon_engine::{
    engine::Engine,
    error::{ImportError, LookupError},
};
use cocoon_kit::failure;
use cocoon_oci::{
    media::{self, Kind},
    reference::Relative,
    registry::Registry,
};

use crate::{
    ports::{Images, PortError, PortResult, real::engine::lookup},
    reason::Reason,
};

/// The engine's images and where missing ones come from.
#[derive(Debug, Clone)]
pub struct ImageStore {
    engine: Engine,
    registry: Option<Arc<dyn Registry>>,
}

impl ImageStore {
    /// The images of this engine.
    #[must_use]
    pub fn new(engine: Engine, registry: Option<Arc<dyn Registry>>) -> Self {
        Self { engine, registry }
    }

    async fn is_local(&self, image: &str) -> PortResult<bool> {
        match self.engine.image(image).await {
            Ok(_) => Ok(true),
            Err(LookupError::ImageNotFound(_)) => Ok(false),
            Err(error) => Err(lookup(&format!("looking for image {image}"), error)),
        }
    }

    /// Pulls the image if the registry has it; false: it has not.
    async fn pull(&self, image: &str) -> PortResult<bool> {
        let (Some(registry), Ok(reference)) = (&self.registry, Relative::parse(image)) else {
            return Ok(false);
        };
        let manifest = registry.get_manifest(&reference.repository, &reference.tag).await;
        let manifest = manifest.map_err(|error| {
            PortError::caused(Reason::RegistryUnavailable, format!("looking for image {image}"), error)
        })?;
        let Some(manifest) = manifest else { return Ok(false) };
        match media::classify(&manifest.bytes) {
            Ok(Kind::ContainerImage | Kind::Index) => {}
            Ok(Kind::Snapshot) => return Err(is_snapshot(image)),
            Ok(other) => {
                return Err(refused(
                    image,
                    &format!("it is of kind {}, which is not booted here", other.as_str()),
                ));
            }
            Err(why) => return Err(refused(image, &why)),
        }
        let pulled =
            self.engine.image_pull(image, registry.as_ref(), &reference.repository, &reference.tag).await;
        pulled.map(|_| true).map_err(|error| import(image, error))
    }
}

#[async_trait]
impl Images for ImageStore {
    async fn ensure(&self, image: &str, force: bool) -> PortResult<String> {
        let here = (!force && self.is_local(image).await?)
            || self.pull(image).await?
            || (force && self.is_local(image).await?);
        if here {
            return Ok(image.to_owned());
        }
        let message = format!(
            "image {image:?} is neither in the engine's store nor in the node's registry; import it with \
             `cocoon image import {image} FILE`, or correct the pod's image"
        );
        Err(PortError::new(Reason::ImageNotFound, message))
    }
}

fn is_snapshot(image: &str) -> PortError {
    let message = format!("image {image:?} is a snapshot; set cocoonset.cocoonstack.io/mode to clone");
    PortError::new(Reason::ImageIsSnapshot, message)
}

fn refused(image: &str, why: &str) -> PortError {
    PortError::new(Reason::ImageRefused, format!("image {image:?} cannot be booted: {why}"))
}

fn import(image: &str, error: ImportError) -> PortError {
    let reason = match &error {
        ImportError::Hostile { .. } | ImportError::Unusable { .. } => Reason::ImageRefused,
        ImportError::HostMissing { .. } => Reason::HostMissing,
        _ if failure::is_disk_full(&error) => Reason::DiskFull,
        _ => Reason::EngineUnavailable,
    };
    PortError::caused(reason, format!("importing image {image}"), error)
}
