//! Informative vectors of the older components, where our rules are the same (cocoon-meta, cocoon-api,
//! cocoon-oci).

use anyhow::Result;
use cocoon_api::Quantity;
use cocoon_meta::{self as contract, Role};
use cocoon_oci::reference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde_json::{Value, json};

use super::checkers::Answer;
use super::folder::Vector;

/// The older naming is no rule of ours; what does not depend on it is.
pub(crate) fn names(vector: &Vector) -> Result<Answer> {
    let answer = match vector.function.as_str() {
        "pod_key" => contract::pod_key(vector.text("ns"), vector.text("pod")).into(),
        "infer_role_from_agent_slot" => {
            let slot = vector.input["slot"].as_u64().map(u32::try_from).transpose()?;
            Role::from_agent_slot(slot).as_str().into()
        }
        "owner" => {
            let owners: Vec<Value> = vector.parse("owners")?;
            let owners = owners.into_iter().map(|owner| OwnerReference {
                kind: owner["kind"].as_str().unwrap_or_default().to_owned(),
                name: owner["name"].as_str().unwrap_or_default().to_owned(),
                ..OwnerReference::default()
            });
            let metadata = ObjectMeta { owner_references: Some(owners.collect()), ..ObjectMeta::default() };
            let name = contract::cocoon_set_owner_name(&metadata);
            json!({
                "name": name.unwrap_or_default(),
                "owned": contract::is_owned_by_cocoon_set(&metadata),
            })
        }
        _ => return Ok(Answer::NotApplicable),
    };
    Ok(Answer::Is(answer))
}

/// Names and sizes of the older node agent; its steps are no rule of ours.
pub(crate) fn agent(vector: &Vector) -> Result<Answer> {
    let answer = match vector.function.as_str() {
        "local_snapshot_name" => {
            let tag =
                Some(vector.text("tag")).filter(|tag| !tag.is_empty()).unwrap_or(reference::DEFAULT_TAG);
            reference::local_name(vector.text("repo"), tag).into()
        }
        "fork_snapshot_name" => contract::fork_baseline_name(vector.text("vm")).into(),
        "cpu_round_up" => units(vector.text("cpu"))?.into(),
        "quantity_bytes" => match units(vector.text("mem"))? {
            0 => "".into(),
            bytes => bytes.to_string().into(),
        },
        _ => return Ok(Answer::NotApplicable),
    };
    Ok(Answer::Is(answer))
}

/// Whole units, rounded up; what is below nothing is nothing.
fn units(text: &str) -> Result<i64> {
    Ok(text.parse::<Quantity>()?.value().unwrap_or(i64::MAX).max(0))
}
