//! Live snapshot requests, their answers, and the caller's own annotations on snapshots.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::annotated::Annotated;
use crate::keys;

/// A request for a live snapshot: `repo[:tag]`, relative to the registry's base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// The text as it was asked, which the answer echoes.
    pub reference: String,
    /// Repository.
    pub repository: String,
    /// Tag; `latest` when the request names none.
    pub tag: String,
}

/// Why a snapshot request, or the caller's snapshot annotations, cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotMetaError {
    /// The reference does not have the form `repo[:tag]`.
    #[error("annotation {key} is {text:?}, which is no repo[:tag]: {what}", key = keys::ANNOTATION_SNAPSHOT_REQUEST)]
    Reference {
        /// The value.
        text: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The target belongs to the machinery and would overwrite saved state.
    #[error("annotation {key} asks for {text:?}, which {what}: choose another repository or tag", key = keys::ANNOTATION_SNAPSHOT_REQUEST)]
    Protected {
        /// The value.
        text: String,
        /// Why it is refused.
        what: &'static str,
    },
    /// The annotations are no JSON object of texts.
    #[error("annotation {key} must be a JSON object whose values are strings", key = keys::ANNOTATION_SNAPSHOT_ANNOTATIONS)]
    Malformed(#[source] serde_json::Error),
    /// A key belongs to the wire format.
    #[error("annotation {key} sets {reserved:?}: keys beginning with {prefix:?} are reserved, use another", key = keys::ANNOTATION_SNAPSHOT_ANNOTATIONS, prefix = keys::RESERVED_SNAPSHOT_ANNOTATION_PREFIX)]
    ReservedKey {
        /// The key.
        reserved: String,
    },
}

impl SnapshotMetaError {
    /// Stable reason word for status and events.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Reference { .. } => "SnapshotRequestInvalid",
            Self::Protected { .. } => "SnapshotRequestRefused",
            Self::Malformed(_) | Self::ReservedKey { .. } => "SnapshotAnnotationsInvalid",
        }
    }
}

impl SnapshotRequest {
    /// Reads the request; `None` when there is none. The error names what is wrong with it.
    pub fn read(object: &impl Annotated) -> Option<Result<Self, SnapshotMetaError>> {
        let text = object.annotation(keys::ANNOTATION_SNAPSHOT_REQUEST);
        (!text.is_empty()).then(|| Self::parse(text))
    }

    /// Parses `repo[:tag]`.
    pub fn parse(text: &str) -> Result<Self, SnapshotMetaError> {
        let wrong = |what| SnapshotMetaError::Reference { text: text.to_owned(), what };
        if text.contains('@') {
            return Err(wrong("a digest cannot be asked for"));
        }
        let (repository, tag) = match text.rsplit_once(':') {
            Some((repository, tag)) => (repository, tag),
            None => (text, keys::DEFAULT_SNAPSHOT_TAG),
        };
        if !is_repository(repository) {
            return Err(wrong("the repository takes lower-case letters, digits, '.', '_', '-' and '/'"));
        }
        if !is_tag(tag) {
            return Err(wrong("the tag takes letters, digits, '.', '_' and '-', at most 128"));
        }
        Ok(Self { reference: text.to_owned(), repository: repository.to_owned(), tag: tag.to_owned() })
    }

    /// Refuses targets that hold saved state: the tag `hibernate`, and a repository that has the form
    /// of a VM name but is not this pod's own.
    pub fn check_target(&self, own_vm_name: &str) -> Result<(), SnapshotMetaError> {
        let refused = |what| Err(SnapshotMetaError::Protected { text: self.reference.clone(), what });
        if self.tag == keys::HIBERNATE_SNAPSHOT_TAG {
            return refused("is the tag of hibernated state");
        }
        if crate::names::has_vm_name_form(&self.repository) && self.repository != own_vm_name {
            return refused("is the repository of another VM");
        }
        Ok(())
    }
}

/// Components of letters and digits, joined by one dot, one or two underscores or any number of dashes;
/// the rule of the distribution specification.
fn is_repository(text: &str) -> bool {
    text.len() <= 255 && text.split('/').all(is_component)
}

fn is_component(text: &str) -> bool {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    if !text.starts_with(word) || !text.ends_with(word) {
        return false;
    }
    let joint = |joint: &str| matches!(joint, "" | "." | "_" | "__") || joint.chars().all(|c| c == '-');
    text.split(word).all(joint)
}

fn is_tag(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.len() <= 128
        && text.chars().next().is_some_and(word)
        && text.chars().all(|c| word(c) || c == '.' || c == '-')
}

/// Outcome of a live snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotState {
    /// The manifest is readable under the reference.
    Pushed,
    /// It did not work; the message says why.
    Failed,
}

/// Answer to a [`SnapshotRequest`]. A reference is answered once; a retry uses a new tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotStatus {
    /// The request this answers, as it was asked.
    #[serde(rename = "ref")]
    pub reference: String,
    /// Outcome.
    pub state: SnapshotState,
    /// Why it failed; absent when it did not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl SnapshotStatus {
    /// The answer for a snapshot that is readable.
    pub fn pushed(reference: impl Into<String>) -> Self {
        Self { reference: reference.into(), state: SnapshotState::Pushed, message: String::new() }
    }

    /// The answer for one that did not work.
    pub fn failed(reference: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reference: reference.into(), state: SnapshotState::Failed, message: message.into() }
    }

    /// Reads the last answer; absent or unreadable is `None`.
    pub fn read(object: &impl Annotated) -> Option<Self> {
        serde_json::from_str(object.annotation(keys::ANNOTATION_SNAPSHOT_STATUS)).ok()
    }

    /// Writes the answer.
    pub fn apply(&self, object: &mut impl Annotated) {
        object.set_annotation(keys::ANNOTATION_SNAPSHOT_STATUS, self.to_json());
    }

    /// The annotation's value.
    pub fn to_json(&self) -> String {
        // Two texts and a plain enum always serialise.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Whether `request` has its answer already, so that asking again does nothing.
    pub fn answers(&self, request: &SnapshotRequest) -> bool {
        self.reference == request.reference
    }
}

/// The caller's annotations for every snapshot pushed for this pod; empty when there are none. A value
/// that is no JSON object of texts is refused, and so is any key of the wire format's own.
pub fn read_snapshot_annotations(
    object: &impl Annotated,
) -> Result<BTreeMap<String, String>, SnapshotMetaError> {
    let text = object.annotation(keys::ANNOTATION_SNAPSHOT_ANNOTATIONS);
    if text.is_empty() {
        return Ok(BTreeMap::new());
    }
    let annotations: BTreeMap<String, String> =
        serde_json::from_str(text).map_err(SnapshotMetaError::Malformed)?;
    let reserved = annotations.keys().find(|key| key.starts_with(keys::RESERVED_SNAPSHOT_ANNOTATION_PREFIX));
    match reserved {
        Some(key) => Err(SnapshotMetaError::ReservedKey { reserved: key.clone() }),
        None => Ok(annotations),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Annotations;

    fn object(key: &str, value: &str) -> Annotations {
        [(key.to_owned(), value.to_owned())].into()
    }

    #[test]
    fn a_request_without_a_tag_asks_for_latest() {
        let request = SnapshotRequest::parse("golden/base").unwrap();
        assert_eq!((request.repository.as_str(), request.tag.as_str()), ("golden/base", "latest"));
        assert_eq!(request.reference, "golden/base");
    }

    #[test]
    fn a_request_that_is_no_relative_reference_is_refused() {
        for text in [
            ":",
            "a:",
            ":x",
            "a b",
            "A",
            "a..b",
            "a___b",
            "-a",
            "a-",
            "a/",
            "/a",
            "a@sha256:00",
            "host:5000/a",
            "a:.x",
            "https://x/y",
        ] {
            assert_eq!(
                SnapshotRequest::parse(text).unwrap_err().reason(),
                "SnapshotRequestInvalid",
                "{text}"
            );
        }
    }

    #[test]
    fn no_request_is_no_error() {
        assert!(SnapshotRequest::read(&Annotations::new()).is_none());
        assert!(SnapshotRequest::read(&object(keys::ANNOTATION_SNAPSHOT_REQUEST, "")).is_none());
    }

    #[test]
    fn a_request_cannot_reach_saved_state() {
        let own = "vk-prod-demo-0-71ea62";
        let check = |text: &str| SnapshotRequest::parse(text).unwrap().check_target(own).is_ok();
        assert!(check("golden:v1"));
        assert!(check("vk-prod-demo-0-71ea62:v1"));
        assert!(!check("golden:hibernate"));
        assert!(!check("vk-prod-demo-1-99494c:v1"));
    }

    #[test]
    fn an_answer_echoes_the_request_and_names_a_message_only_when_it_failed() {
        let pushed = SnapshotStatus::pushed("golden:v1");
        assert_eq!(pushed.to_json(), r#"{"ref":"golden:v1","state":"pushed"}"#);
        let failed = SnapshotStatus::failed("golden:v1", "disk full");
        assert_eq!(failed.to_json(), r#"{"ref":"golden:v1","state":"failed","message":"disk full"}"#);
        let mut annotations = Annotations::new();
        failed.apply(&mut annotations);
        assert_eq!(SnapshotStatus::read(&annotations), Some(failed.clone()));
        assert!(failed.answers(&SnapshotRequest::parse("golden:v1").unwrap()));
        assert!(!failed.answers(&SnapshotRequest::parse("golden:v2").unwrap()));
    }

    #[test]
    fn an_unreadable_answer_is_none() {
        for text in ["", "x", "{}", r#"{"ref":"a","state":"maybe"}"#] {
            assert_eq!(SnapshotStatus::read(&object(keys::ANNOTATION_SNAPSHOT_STATUS, text)), None);
        }
    }

    #[test]
    fn snapshot_annotations_are_a_json_object_of_texts_without_reserved_keys() {
        let read =
            |text: &str| read_snapshot_annotations(&object(keys::ANNOTATION_SNAPSHOT_ANNOTATIONS, text));
        assert_eq!(read("").unwrap(), BTreeMap::new());
        assert_eq!(read(r#"{"team":"a"}"#).unwrap()["team"], "a");
        for text in ["[]", "{", r#"{"a":1}"#, "\"x\""] {
            assert!(matches!(read(text), Err(SnapshotMetaError::Malformed(_))), "{text}");
        }
        assert!(matches!(
            read(r#"{"cocoonstack.snapshot.id":"x"}"#),
            Err(SnapshotMetaError::ReservedKey { reserved }) if reserved == "cocoonstack.snapshot.id"
        ));
    }

    proptest! {
        #[test]
        fn reading_any_text_never_panics(text in "\\PC{0,60}") {
            let _ = SnapshotRequest::parse(&text);
            let _ = read_snapshot_annotations(&object(keys::ANNOTATION_SNAPSHOT_ANNOTATIONS, &text));
            let _ = SnapshotStatus::read(&object(keys::ANNOTATION_SNAPSHOT_STATUS, &text));
        }

        #[test]
        fn a_request_that_parses_names_what_was_asked(text in "[a-z0-9._/-]{1,12}(:[A-Za-z0-9._-]{1,8})?") {
            if let Ok(request) = SnapshotRequest::parse(&text) {
                let whole = format!("{}:{}", request.repository, request.tag);
                let with_default = format!("{text}:latest");
                prop_assert!(whole == text || whole == with_default);
            }
        }
    }
}
