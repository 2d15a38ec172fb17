//! Fields that do not belong: unknown to the type, or given twice.
//!
//! Entry points: [`parse`] (reads a JSON or YAML body and reports duplicates), [`parse_json`] and
//! [`check_type`] (reads the object as its type, reports and removes what the type does not know).
//! Invariants: a body is an object; whatever it says, reading it makes at most [`VALUES`] values and
//! [`TEXT`] bytes of text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::{error::ApiError, json, resources::Kind};

/// Most complaints kept of one body.
const COMPLAINTS: usize = 32;
/// Most values of one body. A small object takes hundreds of bytes here and a few on the wire.
const VALUES: usize = 100_000;
/// Most bytes of text of one body: what aliases in YAML repeat counts each time.
const TEXT: usize = 6 << 20;
/// Largest YAML body: its reader keeps all of a document's events at once, some hundred bytes each.
const YAML: usize = 1 << 20;

/// What to do about fields that do not belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Strictness {
    Ignore,
    #[default]
    Warn,
    Strict,
}

/// Reads a body, which must be an object. The texts are complaints about fields given twice.
pub(crate) fn parse(content_type: &str, body: &[u8]) -> Result<(Value, Vec<String>), ApiError> {
    let (value, complaints) = match content_type {
        "" | "application/json" | "*/*" => parse_json(body).map_err(unreadable)?,
        "application/vnd.kubernetes.protobuf" => {
            let value = crate::proto::decode(body)
                .map_err(|error| ApiError::new(415, "UnsupportedMediaType", error.to_string()))?;
            (value, Vec::new())
        }
        "application/yaml" => parse_yaml(body)?,
        other => {
            let message = format!(
                "the body of the request was in an unknown format ({other}) - accepted media types include: \
                 application/json, application/yaml"
            );
            return Err(ApiError::new(415, "UnsupportedMediaType", message));
        }
    };
    if !value.is_object() {
        return Err(ApiError::bad_request("the body of the request must be an object"));
    }
    Ok((value, complaints))
}

/// Reads any JSON value within the bounds of a body.
pub(crate) fn parse_json(body: &[u8]) -> Result<(Value, Vec<String>), serde_json::Error> {
    let mut notes = Notes::default();
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = Twice { path: &Path::Root, notes: &mut notes }.deserialize(&mut reader)?;
    reader.end()?;
    Ok((value, notes.complaints))
}

fn parse_yaml(body: &[u8]) -> Result<(Value, Vec<String>), ApiError> {
    if body.len() > YAML {
        let message = format!("Request entity too large: limit of YAML is {YAML}, send it as JSON");
        return Err(ApiError::new(413, "RequestEntityTooLarge", message));
    }
    let mut notes = Notes::default();
    let reader = serde_yaml_ng::Deserializer::from_slice(body);
    let value = Twice { path: &Path::Root, notes: &mut notes }.deserialize(reader).map_err(unreadable)?;
    Ok((value, notes.complaints))
}

fn unreadable(error: impl fmt::Display) -> ApiError {
    ApiError::bad_request(format!("the object provided is unrecognized: {error}"))
}

/// Where a value stands. It becomes text only for a complaint: below a long key, a text for each value
/// would cost the square of the body.
#[derive(Clone, Copy)]
enum Path<'a> {
    Root,
    Field(&'a Path<'a>, &'a str),
    Item(&'a Path<'a>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Field(Self::Root, key) => f.write_str(key),
            Self::Field(path, key) => write!(f, "{path}.{key}"),
            Self::Item(path, at) => write!(f, "{path}[{at}]"),
        }
    }
}

/// What was seen of a body so far.
#[derive(Default)]
struct Notes {
    complaints: Vec<String>,
    values: usize,
    text: usize,
}

impl Notes {
    fn count_value<E: serde::de::Error>(&mut self) -> Result<(), E> {
        self.values += 1;
        if self.values > VALUES {
            return Err(E::custom(format_args!("it holds more than {VALUES} values")));
        }
        Ok(())
    }

    fn count_text<E: serde::de::Error>(&mut self, text: &str) -> Result<(), E> {
        self.text += text.len();
        if self.text > TEXT {
            return Err(E::custom(format_args!("it holds more than {TEXT} bytes of text")));
        }
        Ok(())
    }
}

/// Reads a value and notes keys that stand twice in an object; the last one counts.
struct Twice<'a> {
    path: &'a Path<'a>,
    notes: &'a mut Notes,
}

impl<'de> DeserializeSeed<'de> for Twice<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.notes.count_value::<D::Error>()?;
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

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        self.notes.count_text::<E>(value)?;
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            let path = Path::Item(self.path, list.len());
            match items.next_element_seed(Twice { path: &path, notes: &mut *self.notes })? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            self.notes.count_text::<A::Error>(&key)?;
            let path = Path::Field(self.path, &key);
            let value = entries.next_value_seed(Twice { path: &path, notes: &mut *self.notes })?;
            if map.contains_key(&key) && self.notes.complaints.len() < COMPLAINTS {
                self.notes.complaints.push(format!("duplicate field \"{path}\""));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
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
    drop_unknown(&Path::Root, value, &known, &mut complaints);
    Ok(complaints)
}

fn drop_unknown(path: &Path<'_>, value: &mut Value, known: &Value, complaints: &mut Vec<String>) {
    match (value, known) {
        (Value::Object(map), Value::Object(known)) => map.retain(|key, item| {
            let path = Path::Field(path, key);
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
                drop_unknown(&Path::Item(path, at), item, known, complaints);
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

    #[test]
    fn a_body_that_is_not_an_object_is_refused_in_every_format() {
        for content_type in ["", "application/json", "application/yaml"] {
            for body in ["[]", "\"x\"", "1", "null", "true"] {
                let error = parse(content_type, body.as_bytes()).unwrap_err();
                assert_eq!(error.code, 400, "{content_type} {body}");
            }
        }
    }

    #[test]
    fn aliases_repeat_little_and_never_blow_a_body_up() {
        let yaml = |body: String| parse("application/yaml", body.as_bytes());
        let (value, complaints) = yaml("a: &x { b: 1 }\nc: [*x, *x]\na: 2".into()).unwrap();
        assert_eq!(value, json!({ "a": 2, "c": [{ "b": 1 }, { "b": 1 }] }));
        assert_eq!(complaints, ["duplicate field \"a\""]);
        let many = |item: &str, count| vec![item; count].join(",");
        let values = format!("a: &x [{}]\nb: [{}]", many("1", 1000), many("*x", 1000));
        let error = yaml(values).unwrap_err();
        assert!(error.code == 400 && error.message.contains("more than 100000 values"), "{error}");
        let text = format!("a: &x {}\nb: [{}]", "y".repeat(64 << 10), many("*x", 1000));
        let error = yaml(text).unwrap_err();
        assert!(error.code == 400 && error.message.contains("bytes of text"), "{error}");
        assert_eq!(yaml("a: ".repeat(1 << 20)).unwrap_err().code, 413);
    }

    #[test]
    fn a_body_of_many_small_values_is_refused_and_a_long_key_costs_no_square() {
        let many = vec!["{\"a\":0}"; 200_000].join(",");
        let error = parse("application/json", format!("{{\"a\":[{many}]}}").as_bytes()).unwrap_err();
        assert!(error.message.contains("more than 100000 values"), "{error}");
        // With a text for each place this would copy a hundred billion bytes.
        let body = format!("{{\"{}\":[{}]}}", "k".repeat(2 << 20), vec!["0"; 50_000].join(","));
        assert!(parse("application/json", body.as_bytes()).is_ok());
    }

    proptest! {
        #[test]
        fn every_json_text_is_read_as_the_library_reads_it(text in r#"[\[\]{}:,"a1. tnul-]{0,30}"#) {
            let ours = parse_json(text.as_bytes()).ok().map(|(value, _)| value);
            let theirs: Option<Value> = serde_json::from_str(&text).ok();
            prop_assert_eq!(ours, theirs);
        }
    }
}
