//! References, media types and the classification of manifests (cocoon-oci).

use anyhow::Result;

use super::checkers::Answer;
use super::folder::Vector;

pub(crate) fn references(_vector: &Vector) -> Result<Answer> {
    Ok(Answer::NotBuilt)
}

pub(crate) fn types(_vector: &Vector) -> Result<Answer> {
    Ok(Answer::NotBuilt)
}
