//! DHCP, leases and subnets (cocoon-net).

use anyhow::Result;

use super::checkers::Answer;
use super::folder::Vector;

pub(crate) fn answer(_vector: &Vector) -> Result<Answer> {
    Ok(Answer::NotBuilt)
}
