//! The triple in which the node agent reports a VM's life: state, observed generation, message.
//!
//! A client that asked for something (a generation) waits for a terminal state whose observed
//! generation has caught up; so an older completion is never mistaken for its own, and no clock matters.

use std::fmt;

use crate::annotated::Annotated;
use crate::keys;
use crate::patch::{AnnotationChanges, annotations_merge_patch};

/// Where a VM's life stands.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LifecycleState {
    /// Being made or woken.
    Creating,
    /// Up, and its probe has answered.
    Ready,
    /// Being saved.
    Hibernating,
    /// Saved; no VM runs.
    Hibernated,
    /// The last operation failed; the message says why.
    Failed,
    /// A text of some other writer, kept as it came; the empty one means "never reported".
    Other(Box<str>),
}

impl LifecycleState {
    /// The text in the annotation.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Creating => "creating",
            Self::Ready => "ready",
            Self::Hibernating => "hibernating",
            Self::Hibernated => "hibernated",
            Self::Failed => "failed",
            Self::Other(text) => text,
        }
    }

    /// Whether a client may wait for this state: ready, hibernated or failed.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Ready | Self::Hibernated | Self::Failed)
    }

    /// Whether nobody has reported a state yet.
    pub fn is_unset(&self) -> bool {
        matches!(self, Self::Other(text) if text.is_empty())
    }
}

impl Default for LifecycleState {
    fn default() -> Self {
        Self::Other("".into())
    }
}

impl From<&str> for LifecycleState {
    fn from(text: &str) -> Self {
        match text {
            "creating" => Self::Creating,
            "ready" => Self::Ready,
            "hibernating" => Self::Hibernating,
            "hibernated" => Self::Hibernated,
            "failed" => Self::Failed,
            other => Self::Other(other.into()),
        }
    }
}

impl fmt::Display for LifecycleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One report of the node agent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LifecycleStatus {
    /// The state.
    pub state: LifecycleState,
    /// The CocoonSet generation the report belongs to.
    pub observed_generation: i64,
    /// Why; empty when there is nothing to say.
    pub message: String,
}

impl LifecycleStatus {
    /// Reads the triple. A generation that does not parse reads as 0.
    pub fn read(object: &impl Annotated) -> Self {
        Self {
            state: object.annotation(keys::ANNOTATION_LIFECYCLE_STATE).into(),
            observed_generation: generation(
                object.annotation(keys::ANNOTATION_LIFECYCLE_OBSERVED_GENERATION),
            ),
            message: object.annotation(keys::ANNOTATION_LIFECYCLE_STATE_MESSAGE).to_owned(),
        }
    }

    /// Writes the triple: state and generation always, and an empty message removes its key, so that an
    /// old failure never trails into the next life.
    pub fn apply(&self, object: &mut impl Annotated) {
        for (key, value) in self.changes() {
            match value {
                Some(value) => object.set_annotation(&key, value),
                None => object.remove_annotation(&key),
            }
        }
    }

    /// The triple as changes for a patch.
    pub fn changes(&self) -> AnnotationChanges {
        let message = Some(self.message.clone()).filter(|message| !message.is_empty());
        [
            (keys::ANNOTATION_LIFECYCLE_STATE.to_owned(), Some(self.state.to_string())),
            (
                keys::ANNOTATION_LIFECYCLE_OBSERVED_GENERATION.to_owned(),
                Some(self.observed_generation.to_string()),
            ),
            (keys::ANNOTATION_LIFECYCLE_STATE_MESSAGE.to_owned(), message),
        ]
        .into()
    }

    /// The body of the patch that writes the triple.
    pub fn merge_patch(&self) -> serde_json::Value {
        annotations_merge_patch(&self.changes())
    }

    /// State, generation and message joined by NUL: equal exactly when the report is.
    pub fn comparison_key(&self) -> String {
        format!("{}\0{}\0{}", self.state, self.observed_generation, self.message)
    }
}

/// Stamps the owning set's generation on a pod, for the node agent to echo.
pub fn stamp_cocoon_set_generation(object: &mut impl Annotated, generation: i64) {
    object.set_annotation(keys::ANNOTATION_COCOON_SET_GENERATION, generation.to_string());
}

/// The stamped generation; absent or unreadable is 0.
pub fn read_cocoon_set_generation(object: &impl Annotated) -> i64 {
    generation(object.annotation(keys::ANNOTATION_COCOON_SET_GENERATION))
}

fn generation(text: &str) -> i64 {
    text.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Annotations;

    #[test]
    fn an_empty_message_clears_the_reason_of_an_older_failure() {
        let mut pod = Annotations::new();
        let failed =
            LifecycleStatus { state: LifecycleState::Failed, observed_generation: 2, message: "why".into() };
        failed.apply(&mut pod);
        assert_eq!(LifecycleStatus::read(&pod), failed);
        LifecycleStatus { state: LifecycleState::Ready, observed_generation: 3, message: String::new() }
            .apply(&mut pod);
        assert!(!pod.contains_key(keys::ANNOTATION_LIFECYCLE_STATE_MESSAGE));
    }

    #[test]
    fn the_comparison_key_changes_with_each_part() {
        let status =
            LifecycleStatus { state: LifecycleState::Ready, observed_generation: 3, message: "m".into() };
        assert_eq!(status.comparison_key(), "ready\u{0}3\u{0}m");
    }

    #[test]
    fn an_unreadable_generation_is_zero() {
        for text in ["", "abc", " 1", "1.0", "9223372036854775808"] {
            let pod: Annotations =
                [(keys::ANNOTATION_COCOON_SET_GENERATION.to_owned(), text.to_owned())].into();
            assert_eq!(read_cocoon_set_generation(&pod), 0, "{text}");
        }
    }

    #[test]
    fn nobody_has_reported_is_told_from_an_unknown_state() {
        assert!(LifecycleState::default().is_unset());
        assert!(!LifecycleState::from("bogus").is_unset());
    }
}
