//! Strategic merge: a merge patch that knows which lists are keyed.
//!
//! Entry point: [`merge`]. Maps merge by key, `null` removes. A list whose path is in the kind's table is
//! merged by its key, or as a set; every other list is replaced. Directives: `$patch` (`merge`,
//! `replace`, `delete`), `$deleteFromPrimitiveList/F`, `$setElementOrder/F`, `$retainKeys`.

use serde_json::{Map, Value};

/// How the items of a list are matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Merge {
    /// By the value of this field.
    ByKey(&'static str),
    /// As a set of plain values.
    Set,
}

/// A kind's keyed lists: dotted path, without list positions.
type Rules = [(&'static str, Merge)];

const DIRECTIVE: &str = "$patch";
const RETAIN: &str = "$retainKeys";
const DELETE_FROM: &str = "$deleteFromPrimitiveList/";
const ORDER: &str = "$setElementOrder/";
/// Deeper patches are refused; the parser's own limit is lower still.
const DEPTH: usize = 256;

/// Why a patch makes no sense.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MergeError {
    #[error("unknown $patch directive {0}")]
    Directive(String),
    #[error("an item of {path} lacks its merge key {key}")]
    NoKey { path: String, key: &'static str },
    #[error("{0} must be a list")]
    NotAList(String),
    #[error("the patch is nested too deeply")]
    Depth,
}

/// Applies `patch` to `target`.
pub(crate) fn merge(rules: &Rules, target: &mut Value, patch: &Value) -> Result<(), MergeError> {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return Ok(());
    };
    merge_map(rules, "", crate::json::map(target), patch, DEPTH)
}

fn merge_map(
    rules: &Rules,
    path: &str,
    target: &mut Map<String, Value>,
    patch: &Map<String, Value>,
    depth: usize,
) -> Result<(), MergeError> {
    let depth = depth.checked_sub(1).ok_or(MergeError::Depth)?;
    match patch.get(DIRECTIVE).map(directive).transpose()? {
        Some(Directive::Delete) => {
            target.clear();
            return Ok(());
        }
        Some(Directive::Replace) => {
            *target = plain(patch);
            return Ok(());
        }
        Some(Directive::Merge) | None => {}
    }
    if let Some(keep) = patch.get(RETAIN) {
        let keep = keep.as_array().ok_or_else(|| MergeError::NotAList(RETAIN.into()))?;
        target.retain(|key, _| keep.iter().any(|kept| kept == key));
    }
    for (key, value) in patch {
        let inner = |field: &str| if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
        if let Some(field) = key.strip_prefix(DELETE_FROM) {
            delete_from(target, field, value)?;
        } else if !key.starts_with('$') {
            merge_field(rules, &inner(key), target, key, value, depth)?;
        }
    }
    for (key, order) in patch {
        if let Some(field) = key.strip_prefix(ORDER) {
            let inner = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
            reorder(rule(rules, &inner), target.get_mut(field), order);
        }
    }
    Ok(())
}

fn merge_field(
    rules: &Rules,
    path: &str,
    target: &mut Map<String, Value>,
    key: &str,
    value: &Value,
    depth: usize,
) -> Result<(), MergeError> {
    match value {
        Value::Null => {
            target.remove(key);
        }
        Value::Object(patch) => {
            let slot = target.entry(key).or_insert(Value::Null);
            merge_map(rules, path, crate::json::map(slot), patch, depth)?;
            let gone = patch.get(DIRECTIVE).and_then(Value::as_str) == Some("delete");
            if gone {
                target.remove(key);
            }
        }
        Value::Array(items) => {
            let slot = target.entry(key).or_insert_with(|| Value::Array(Vec::new()));
            merge_list(rules, path, slot, items, depth)?;
        }
        plain => {
            target.insert(key.to_owned(), plain.clone());
        }
    }
    Ok(())
}

fn merge_list(
    rules: &Rules,
    path: &str,
    target: &mut Value,
    patch: &[Value],
    depth: usize,
) -> Result<(), MergeError> {
    let replace = patch
        .iter()
        .any(|item| item.get(DIRECTIVE).and_then(Value::as_str) == Some("replace") && only_directive(item));
    let (Some(rule), Value::Array(current), false) = (rule(rules, path), &mut *target, replace) else {
        *target = patch.iter().filter(|item| !only_directive(item)).map(plain_value).collect();
        return Ok(());
    };
    for item in patch {
        match rule {
            Merge::Set if current.contains(item) => {}
            Merge::Set => current.push(item.clone()),
            Merge::ByKey(key) => merge_item(rules, path, key, current, item, depth)?,
        }
    }
    Ok(())
}

fn merge_item(
    rules: &Rules,
    path: &str,
    key: &'static str,
    current: &mut Vec<Value>,
    item: &Value,
    depth: usize,
) -> Result<(), MergeError> {
    let no_key = || MergeError::NoKey { path: path.to_owned(), key };
    let patch = item.as_object().ok_or_else(no_key)?;
    let name = patch.get(key).filter(|name| !name.is_null()).ok_or_else(no_key)?;
    let place = current.iter().position(|old| old.get(key) == Some(name));
    let directive = patch.get(DIRECTIVE).map(directive).transpose()?;
    match (place, directive) {
        (_, Some(Directive::Delete)) => current.retain(|old| old.get(key) != Some(name)),
        (Some(at), Some(Directive::Replace)) => current[at] = Value::Object(plain(patch)),
        (Some(at), _) => merge_map(rules, path, crate::json::map(&mut current[at]), patch, depth)?,
        (None, _) => {
            let mut fresh = Map::new();
            merge_map(rules, path, &mut fresh, patch, depth)?;
            current.push(Value::Object(fresh));
        }
    }
    Ok(())
}

enum Directive {
    Merge,
    Replace,
    Delete,
}

fn directive(value: &Value) -> Result<Directive, MergeError> {
    match value.as_str() {
        Some("merge") => Ok(Directive::Merge),
        Some("replace") => Ok(Directive::Replace),
        Some("delete") => Ok(Directive::Delete),
        _ => Err(MergeError::Directive(value.to_string())),
    }
}

fn only_directive(item: &Value) -> bool {
    item.as_object().is_some_and(|map| map.len() == 1 && map.contains_key(DIRECTIVE))
}

fn rule(rules: &Rules, path: &str) -> Option<Merge> {
    rules.iter().find(|(known, _)| *known == path).map(|(_, merge)| *merge)
}

/// A patch without its directives and nulls.
fn plain(patch: &Map<String, Value>) -> Map<String, Value> {
    let kept = patch.iter().filter(|(key, value)| !is_directive(key) && !value.is_null());
    kept.map(|(key, value)| (key.clone(), plain_value(value))).collect()
}

fn is_directive(key: &str) -> bool {
    key == DIRECTIVE || key == RETAIN || key.starts_with(DELETE_FROM) || key.starts_with(ORDER)
}

fn plain_value(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(plain(map)),
        Value::Array(items) => items.iter().map(plain_value).collect(),
        other => other.clone(),
    }
}

fn delete_from(target: &mut Map<String, Value>, field: &str, gone: &Value) -> Result<(), MergeError> {
    let gone = gone.as_array().ok_or_else(|| MergeError::NotAList(format!("{DELETE_FROM}{field}")))?;
    if let Some(Value::Array(items)) = target.get_mut(field) {
        items.retain(|item| !gone.contains(item));
    }
    Ok(())
}

/// Sorts the items that `order` names; the others keep their place behind their neighbour.
fn reorder(rule: Option<Merge>, target: Option<&mut Value>, order: &Value) {
    let (Some(rule), Some(Value::Array(items)), Some(order)) = (rule, target, order.as_array()) else {
        return;
    };
    let rank = |item: &Value| match rule {
        Merge::Set => order.iter().position(|wanted| wanted == item),
        Merge::ByKey(key) => order.iter().position(|wanted| wanted.get(key) == item.get(key)),
    };
    let mut last = None;
    let mut ranked: Vec<(Option<usize>, Value)> = std::mem::take(items)
        .into_iter()
        .map(|item| {
            last = rank(&item).or(last);
            (last, item)
        })
        .collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    *items = ranked.into_iter().map(|(_, item)| item).collect();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::resources::by_table;

    fn patched(target: Value, patch: &Value) -> Result<Value, MergeError> {
        let mut target = target;
        merge(by_table("pods").unwrap().merge, &mut target, patch)?;
        Ok(target)
    }

    #[test]
    fn keyed_lists_merge_and_other_lists_are_replaced() {
        let pod = json!({
            "metadata": { "finalizers": ["a"], "labels": { "x": "1", "y": "2" } },
            "spec": {
                "containers": [{ "name": "c", "image": "one", "env": [{ "name": "A", "value": "1" }], "args": ["x"] }],
                "tolerations": [{ "key": "a" }]
            }
        });
        let patch = json!({
            "metadata": { "finalizers": ["b"], "labels": { "x": null } },
            "spec": {
                "containers": [
                    { "name": "c", "env": [{ "name": "B", "value": "2" }], "args": ["y"] },
                    { "name": "d", "image": "two" }
                ],
                "tolerations": [{ "key": "b" }]
            }
        });
        assert_eq!(
            patched(pod, &patch).unwrap(),
            json!({
                "metadata": { "finalizers": ["a", "b"], "labels": { "y": "2" } },
                "spec": {
                    "containers": [
                        { "name": "c", "image": "one", "args": ["y"],
                          "env": [{ "name": "A", "value": "1" }, { "name": "B", "value": "2" }] },
                        { "name": "d", "image": "two" }
                    ],
                    "tolerations": [{ "key": "b" }]
                }
            })
        );
    }

    #[test]
    fn directives_delete_replace_and_order() {
        let pod = json!({ "metadata": { "finalizers": ["a", "b"] }, "spec": {
            "containers": [{ "name": "a", "image": "1" }, { "name": "b", "image": "2" }],
            "volumes": [{ "name": "v", "emptyDir": {} }], "securityContext": { "runAsUser": 1 }
        } });
        for (patch, path, wanted) in [
            (
                json!({ "spec": { "containers": [{ "$patch": "delete", "name": "a" }] } }),
                "/spec/containers",
                json!([{ "name": "b", "image": "2" }]),
            ),
            (
                json!({ "spec": { "containers": [{ "$patch": "replace" }, { "name": "z" }] } }),
                "/spec/containers",
                json!([{ "name": "z" }]),
            ),
            (
                json!({ "spec": { "securityContext": { "$patch": "replace", "fsGroup": 2 } } }),
                "/spec/securityContext",
                json!({ "fsGroup": 2 }),
            ),
            (
                json!({ "metadata": { "$deleteFromPrimitiveList/finalizers": ["a"] } }),
                "/metadata/finalizers",
                json!(["b"]),
            ),
            (
                json!({ "spec": { "$setElementOrder/containers": [{ "name": "c" }, { "name": "b" }, { "name": "a" }],
                     "containers": [{ "name": "c", "image": "3" }] } }),
                "/spec/containers",
                json!([{ "name": "c", "image": "3" }, { "name": "b", "image": "2" }, { "name": "a", "image": "1" }]),
            ),
            (
                json!({ "spec": { "volumes": [{ "name": "v", "$retainKeys": ["name", "secret"],
                     "secret": { "secretName": "s" } }] } }),
                "/spec/volumes",
                json!([{ "name": "v", "secret": { "secretName": "s" } }]),
            ),
        ] {
            assert_eq!(patched(pod.clone(), &patch).unwrap().pointer(path), Some(&wanted), "{patch}");
        }
        let deleted =
            patched(pod, &json!({ "spec": { "securityContext": { "$patch": "delete" } } })).unwrap();
        assert_eq!(deleted.pointer("/spec/securityContext"), None);
    }

    #[test]
    fn a_patch_that_makes_no_sense_is_refused() {
        let pod = json!({ "spec": { "containers": [] } });
        for patch in [
            json!({ "spec": { "containers": [{ "image": "x" }] } }),
            json!({ "spec": { "containers": ["x"] } }),
            json!({ "spec": { "$patch": "maybe" } }),
            json!({ "metadata": { "$deleteFromPrimitiveList/finalizers": 1 } }),
        ] {
            assert!(patched(pod.clone(), &patch).is_err(), "{patch}");
        }
    }

    /// Small pods, and patches without directives.
    fn small() -> impl Strategy<Value = Value> {
        let container =
            ("[ab]", proptest::option::of("[xy]"), proptest::collection::btree_map("[AB]", "[12]", 0..3));
        let containers = proptest::collection::vec(container, 0..3).prop_map(|items| {
            let mut seen = std::collections::BTreeSet::new();
            let items = items.into_iter().filter(|(name, ..)| seen.insert(name.clone()));
            let items = items.map(|(name, image, env)| {
                let env: Vec<_> =
                    env.iter().map(|(name, value)| json!({ "name": name, "value": value })).collect();
                json!({ "name": name, "image": image, "env": env })
            });
            Value::Array(items.collect())
        });
        let labels = proptest::collection::btree_map("[kl]", proptest::option::of("[12]"), 0..3);
        (containers, labels, proptest::collection::vec("[fg]", 0..3)).prop_map(|(containers, labels, finalizers)| {
            json!({ "metadata": { "labels": labels, "finalizers": finalizers }, "spec": { "containers": containers } })
        })
    }

    proptest! {
        #[test]
        fn a_patch_applied_twice_is_a_patch_applied_once(target in small(), patch in small()) {
            let mut target = target;
            crate::json::drop_nulls(&mut target);
            let once = patched(target, &patch).unwrap();
            prop_assert_eq!(patched(once.clone(), &patch).unwrap(), once.clone());
            let mut merged = once;
            json_patch::merge(&mut merged, &patch);
            let again = merged.clone();
            json_patch::merge(&mut merged, &patch);
            prop_assert_eq!(merged, again);
        }

        #[test]
        fn an_object_patched_with_itself_does_not_change(target in small()) {
            let mut target = target;
            crate::json::drop_nulls(&mut target);
            let finalizers: std::collections::BTreeSet<_> = target["metadata"]["finalizers"].as_array().unwrap().iter().map(ToString::to_string).collect();
            prop_assume!(finalizers.len() == target["metadata"]["finalizers"].as_array().unwrap().len());
            prop_assert_eq!(patched(target.clone(), &target).unwrap(), target);
        }
    }
}
