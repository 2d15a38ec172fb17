//! Fields that do not belong: unknown to the type, or given twice.
//!
//! Entry points: [`parse`] (reads a JSON or YAML body and reports duplicates) and [`check_type`] (reads
//! the object as its type, reports and removes what the type does not know).

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::{error::ApiError, json, resources::Kind};

/// Most complaints kept of one body.
const COMPLAINTS: usize = 32;

/// What to do about fields that do not belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Strictness {
    Ignore,
    #[default]
    Warn,
    Strict,
}

/// Reads a body. The texts are complaints about fields given twice.
pub(crate) fn parse(content_type: &str, body: &[u8]) -> Result<(Value, Vec<String>), ApiError> {
    let mut complaints = Vec::new();
    let value = match content_type {
        "" | "application/json" | "*/*" => {
            let mut reader = serde_json::Deserializer::from_slice(body);
            let value = Twice { path: String::new(), found: &mut complaints }.deserialize(&mut reader);
            value.and_then(|value| reader.end().map(|()| value)).map_err(unreadable)?
        }
        "application/vnd.kubernetes.protobuf" => crate::proto::decode(body)
            .map_err(|error| ApiError::new(415, "UnsupportedMediaType", error.to_string()))?,
        "application/yaml" => serde_yaml_ng::from_slice(body).map_err(unreadable)?,
        other => {
            let message = format!(
                "the body of the request was in an unknown format ({other}) - accepted media types include: \
                 application/json, application/yaml"
            );
            return Err(ApiError::new(415, "UnsupportedMediaType", message));
        }
    };
    Ok((value, complaints))
}

fn unreadable(error: impl fmt::Display) -> ApiError {
    ApiError::bad_request(format!("the object provided is unrecognized: {error}"))
}

/// Reads a value and notes keys that stand twice in an object; the last one counts.
struct Twice<'a> {
    path: String,
    found: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for Twice<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Twice<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            let path = format!("{}[{}]", self.path, list.len());
            match items.next_element_seed(Twice { path, found: &mut *self.found })? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let path = join(&self.path, &key);
            let value = entries.next_value_seed(Twice { path: path.clone(), found: &mut *self.found })?;
            if map.insert(key, value).is_some() && self.found.len() < COMPLAINTS {
                self.found.push(format!("duplicate field \"{path}\""));
            }
        }
        Ok(Value::Object(map))
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Reads `value` as its type, removes unknown fields and returns complaints about them.
pub(crate) fn check_type(kind: &Kind, value: &mut Value) -> Result<Vec<String>, ApiError> {
    json::drop_nulls(value);
    (kind.hooks.normalize)(value);
    let known = (kind.hooks.shape)(value).map_err(|error| {
        let (version, kind) = (kind.version, kind.kind);
        let message = format!("{kind} in version \"{version}\" cannot be handled as a {kind}: {error}");
        ApiError::bad_request(message)
    })?;
    let mut complaints = Vec::new();
    drop_unknown("", value, &known, &mut complaints);
    Ok(complaints)
}

fn drop_unknown(path: &str, value: &mut Value, known: &Value, complaints: &mut Vec<String>) {
    match (value, known) {
        (Value::Object(map), Value::Object(known)) => map.retain(|key, item| {
            let path = join(path, key);
            match known.get(key) {
                Some(known) => {
                    drop_unknown(&path, item, known, complaints);
                    true
                }
                None => {
                    if complaints.len() < COMPLAINTS {
                        complaints.push(format!("unknown field \"{path}\""));
                    }
                    false
                }
            }
        }),
        (Value::Array(items), Value::Array(known)) => {
            for (at, (item, known)) in items.iter_mut().zip(known).enumerate() {
                drop_unknown(&format!("{path}[{at}]"), item, known, complaints);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::resources::by_table;

    #[test]
    fn a_field_given_twice_is_reported_and_the_last_one_counts() {
        let (value, complaints) =
            parse("application/json", br#"{"a":{"b":1,"b":2},"c":[{"d":1,"d":1}]}"#).unwrap();
        assert_eq!(value, json!({ "a": { "b": 2 }, "c": [{ "d": 1 }] }));
        assert_eq!(complaints, ["duplicate field \"a.b\"", "duplicate field \"c[0].d\""]);
    }

    #[test]
    fn fields_that_the_type_does_not_know_are_reported_and_removed() {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "a", "creationTimestamp": null, "nmae": "b" },
            "spec": { "containers": [{ "name": "c", "imagee": "x", "resources": { "limits": { "cpu": 1 } } }], "volumes": [] },
        });
        let complaints = check_type(by_table("pods").unwrap(), &mut pod).unwrap();
        assert_eq!(
            complaints,
            ["unknown field \"metadata.nmae\"", "unknown field \"spec.containers[0].imagee\""]
        );
        assert_eq!(
            pod["spec"]["containers"][0],
            json!({ "name": "c", "resources": { "limits": { "cpu": "1" } } })
        );
        assert_eq!(pod["spec"]["volumes"], json!([]));
    }

    #[test]
    fn a_value_of_the_wrong_type_is_refused() {
        let mut pod = json!({ "spec": { "containers": "x" } });
        assert_eq!(check_type(by_table("pods").unwrap(), &mut pod).unwrap_err().code, 400);
    }

    proptest! {
        #[test]
        fn every_json_text_is_read_as_the_library_reads_it(text in r#"[\[\]{}:,"a1. tnul-]{0,30}"#) {
            let ours = parse("application/json", text.as_bytes()).ok().map(|(value, _)| value);
            let theirs: Option<Value> = serde_json::from_str(&text).ok();
            prop_assert_eq!(ours, theirs);
        }
    }
}
