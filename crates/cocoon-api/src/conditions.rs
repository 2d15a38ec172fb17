//! Building conditions.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Type of the condition both kinds carry.
pub const CONDITION_READY: &str = "Ready";
/// Type of the CocoonSet condition that is true while pods are made or changed.
pub const CONDITION_PROGRESSING: &str = "Progressing";

/// A `Ready` condition that begins at `since`. `status` is `True`, `False` or `Unknown`; generation 0
/// is left out.
pub fn ready_condition(generation: i64, status: &str, reason: &str, message: &str, since: Time) -> Condition {
    Condition {
        type_: CONDITION_READY.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: Some(generation).filter(|generation| *generation != 0),
        last_transition_time: since,
    }
}
