//! Bodies of the patches that write annotations.
//!
//! The body is a JSON merge patch and, with the same meaning, a strategic one. A pod deleted and made
//! again under the same name must never be hit by a write meant for the old one, so node agent and
//! operator give the UID they saw ([`annotations_merge_patch_for`]).

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Annotation changes: `Some` writes, `None` removes.
pub type AnnotationChanges = BTreeMap<String, Option<String>>;

/// `{"metadata":{"annotations":{…}}}`.
pub fn annotations_merge_patch(changes: &AnnotationChanges) -> Value {
    json!({ "metadata": { "annotations": changes } })
}

/// The same, bound to one incarnation of the object: with another UID the API server answers 409.
/// A resource version, when given, binds it to one version as well.
pub fn annotations_merge_patch_for(
    changes: &AnnotationChanges,
    uid: &str,
    resource_version: Option<&str>,
) -> Value {
    let mut metadata = json!({ "annotations": changes, "uid": uid });
    if let Some(version) = resource_version {
        metadata["resourceVersion"] = version.into();
    }
    json!({ "metadata": metadata })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_writes_removes_and_names_the_incarnation() {
        let changes: AnnotationChanges =
            [("a".to_owned(), Some("1".to_owned())), ("b".to_owned(), None)].into();
        let annotations = json!({ "a": "1", "b": null });
        assert_eq!(annotations_merge_patch(&changes), json!({ "metadata": { "annotations": annotations } }));
        assert_eq!(
            annotations_merge_patch_for(&changes, "u-1", Some("7")),
            json!({ "metadata": { "annotations": annotations, "uid": "u-1", "resourceVersion": "7" } })
        );
        assert_eq!(
            annotations_merge_patch_for(&changes, "u-1", None)["metadata"].get("resourceVersion"),
            None
        );
    }
}
