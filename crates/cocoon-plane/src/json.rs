//! Small reading and writing helpers for JSON values.
//!
//! Paths are JSON pointers; a missing or differently typed place reads as empty.

use serde_json::{Map, Value};

/// The text at `path`, or `""`.
pub(crate) fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

/// The list at `path`, or an empty one.
pub(crate) fn list<'a>(value: &'a Value, path: &str) -> &'a [Value] {
    value.pointer(path).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The flag at `path`, or false.
pub(crate) fn flag(value: &Value, path: &str) -> bool {
    value.pointer(path).and_then(Value::as_bool).unwrap_or_default()
}

/// The whole number at `path`.
pub(crate) fn int(value: &Value, path: &str) -> Option<i64> {
    value.pointer(path).and_then(Value::as_i64)
}

/// The text pairs of the object at `path`.
pub(crate) fn pairs<'a>(value: &'a Value, path: &str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let map = value.pointer(path).and_then(Value::as_object);
    map.into_iter().flatten().filter_map(|(k, v)| Some((k.as_str(), v.as_str()?)))
}

/// The object `key` of `value`, made empty when it is missing or something else.
pub(crate) fn object<'a>(value: &'a mut Value, key: &str) -> &'a mut Map<String, Value> {
    let slot = map(value).entry(key).or_insert_with(empty);
    map(slot)
}

/// `value` as an object, made empty when it is something else.
pub(crate) fn map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = empty();
    }
    match value {
        Value::Object(map) => map,
        // The assignment above left an object.
        _ => unreachable!("an object was just put there"),
    }
}

/// The list `key` of `value`, made empty when it is missing or something else.
pub(crate) fn array<'a>(value: &'a mut Value, key: &str) -> &'a mut Vec<Value> {
    let slot = map(value).entry(key).or_insert(Value::Null);
    if !slot.is_array() {
        *slot = Value::Array(Vec::new());
    }
    match slot {
        Value::Array(items) => items,
        _ => unreachable!("a list was just put there"),
    }
}

/// Sets `key` of `map` when it is missing or null.
pub(crate) fn default(map: &mut Map<String, Value>, key: &str, value: impl Into<Value>) {
    let slot = map.entry(key).or_insert(Value::Null);
    if slot.is_null() {
        *slot = value.into();
    }
}

/// Puts `value` at `key`, or removes the key when there is none.
pub(crate) fn put(map: &mut Map<String, Value>, key: &str, value: Option<Value>) {
    match value {
        Some(value) => map.insert(key.to_owned(), value),
        None => map.remove(key),
    };
}

/// Removes nulls at every depth of objects; list items stay.
pub(crate) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, item| !item.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn empty() -> Value {
    Value::Object(Map::new())
}
