//! Images to boot from: the engine's store, filled from the registry.

use std::{collections::BTreeSet, sync::Arc};

use async_trait::async_trait;
use cocoon_engine::{
    engine::Engine,
    error::{ImportError, LookupError},
};
use cocoon_kit::failure;
use cocoon_oci::{
    layout::OciLayout,
    media::{self, Kind},
    reference::Relative,
    registry::Registry,
};

use crate::{
    ports::{Awaited, Images, PortError, PortResult, real::engine::lookup},
    reason::Reason,
};

/// The engine's images and where missing ones come from.
#[derive(Debug, Clone)]
pub struct ImageStore {
    engine: Engine,
    registry: Option<Arc<dyn Registry>>,
    /// The registry, if its tags can be listed by reading one file.
    folder: Option<Arc<OciLayout>>,
}

impl ImageStore {
    /// The images of this engine.
    #[must_use]
    pub fn new(engine: Engine, registry: Option<Arc<dyn Registry>>) -> Self {
        Self { engine, registry, folder: None }
    }

    /// The same, whose registry is this folder: what comes into it is noticed.
    #[must_use]
    pub fn in_folder(engine: Engine, folder: Arc<OciLayout>) -> Self {
        Self { engine, registry: Some(Arc::clone(&folder) as _), folder: Some(folder) }
    }

    async fn tags(&self) -> PortResult<Tags> {
        let Some(folder) = &self.folder else { return Ok(Tags::new()) };
        let tags = folder.tags().await.map_err(|error| {
            PortError::caused(Reason::RegistryUnavailable, "listing the registry folder's tags", error)
        })?;
        Ok(tags.into_iter().collect())
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

    async fn here(&self, wanted: &BTreeSet<Awaited>) -> PortResult<BTreeSet<Awaited>> {
        let images = self.engine.images().await.map_err(|error| lookup("listing images", error))?;
        let images: Vec<(String, String)> = images.into_iter().map(|image| (image.name, image.id)).collect();
        let tags = self.tags().await?;
        Ok(wanted.iter().filter(|what| is_here(what, &images, &tags)).cloned().collect())
    }
}

/// (repository, tag) of all tags.
type Tags = BTreeSet<(String, String)>;

/// Whether the store's images (name and digest) or the registry's tags have it.
fn is_here(what: &Awaited, images: &[(String, String)], tags: &Tags) -> bool {
    match what {
        Awaited::Image(wanted) => {
            let tagged =
                Relative::parse(wanted).is_ok_and(|found| tags.contains(&(found.repository, found.tag)));
            let by_digest = |id: &String| wanted.len() > "sha256:".len() && id.starts_with(wanted);
            let is_local = |(name, id): &(String, String)| name == wanted || by_digest(id);
            tagged || images.iter().any(is_local)
        }
        Awaited::Snapshot(repository, tag) => tags.contains(&(repository.clone(), tag.clone())),
        Awaited::Vm(_) => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_here_is_what_ensure_or_a_pull_would_find() {
        let (name, id) = ("demo:1".to_owned(), format!("sha256:{}", "a".repeat(64)));
        let images = [(name, id.clone())];
        let tags = Tags::from([("golden".into(), "v1".into()), ("golden".into(), "latest".into())]);
        let image = |name: &str| Awaited::Image(name.to_owned());
        let snapshot = |repository: &str, tag: &str| Awaited::Snapshot(repository.into(), tag.into());
        for (what, expected) in [
            (image("demo:1"), true),
            (image("demo"), false),
            (image("demo:2"), false),
            (image(&id), true),
            (image(&id[..12]), true),
            (image("sha256:"), false),
            (image("sha256:b"), false),
            (image("golden:v1"), true),
            (image("golden"), true),
            (image("golden:v2"), false),
            (image(""), false),
            (snapshot("golden", "v1"), true),
            (snapshot("golden", "v2"), false),
            (snapshot("demo", "1"), false),
            (Awaited::Vm("demo:1".into()), false),
        ] {
            assert_eq!(is_here(&what, &images, &tags), expected, "{what}");
        }
    }
}
