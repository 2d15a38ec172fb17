//! OS images (cocoon-oci).

use anyhow::Result;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cocoon_oci::cloudimg;
use cocoon_oci::manifest::OCI_MANIFEST;
use cocoon_oci::memory::Memory;
use futures::TryStreamExt as _;
use serde_json::json;

use super::checkers::{Answer, refused, unknown_function};
use super::folder::Vector;
use super::registry::{block_on, with_blobs};

const REPOSITORY: &str = "image";
const TAG: &str = "latest";

pub(crate) fn answer(vector: &Vector) -> Result<Answer> {
    if vector.function != "cloudimg_stream" {
        return unknown_function(vector);
    }
    let registry = with_blobs(vector, REPOSITORY)?;
    registry.insert_manifest(REPOSITORY, TAG, OCI_MANIFEST, vector.text("manifest").to_owned());
    let ours = match block_on(disk(&registry)) {
        Ok(bytes) => json!({ "ok": true, "stream_b64": STANDARD.encode(bytes) }),
        Err(_) => refused(),
    };
    Ok(Answer::Is(ours))
}

async fn disk(registry: &Memory) -> Result<Vec<u8>> {
    let image = cloudimg::open(registry, REPOSITORY, TAG).await?;
    let blocks: Vec<_> = cloudimg::stream(registry, REPOSITORY, &image).try_collect().await?;
    Ok(blocks.concat())
}
