//! Bodies in Kubernetes' protobuf encoding, of the few small kinds that stock clients send that way.
//!
//! Entry point: [`decode`]. `kubectl create namespace`, `create configmap`, `auth can-i` and others send
//! protobuf without asking first. A message is a table of fields; what is not in a table is refused by
//! name, never dropped. Answers are JSON.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Map, Value, json};

use crate::json;

/// Deepest nesting of messages.
const DEPTH: usize = 16;
/// First bytes of every protobuf body.
const MAGIC: &[u8] = b"k8s\0";

/// A message: number, JSON name and type of each field.
type Message = &'static [(u64, &'static str, Type)];

#[derive(Clone, Copy)]
enum Type {
    Text,
    Bytes,
    Int,
    Bool,
    Time,
    One(Message),
    /// A map with text values, or with bytes.
    TextMap,
    BytesMap,
    Texts,
    Many(Message),
}

use Type::{Bool, Bytes, BytesMap, Int, Many, One, Text, TextMap, Texts, Time};

const UNKNOWN: Message =
    &[(1, "typeMeta", One(TYPE)), (2, "raw", Bytes), (3, "contentEncoding", Text), (4, "contentType", Text)];
const TYPE: Message = &[(1, "apiVersion", Text), (2, "kind", Text)];
const META: Message = &[
    (1, "name", Text),
    (2, "generateName", Text),
    (3, "namespace", Text),
    (4, "selfLink", Text),
    (5, "uid", Text),
    (6, "resourceVersion", Text),
    (7, "generation", Int),
    (8, "creationTimestamp", Time),
    (9, "deletionTimestamp", Time),
    (10, "deletionGracePeriodSeconds", Int),
    (11, "labels", TextMap),
    (12, "annotations", TextMap),
    (13, "ownerReferences", Many(OWNER)),
    (14, "finalizers", Texts),
];
const OWNER: Message = &[
    (1, "kind", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "controller", Bool),
    (7, "blockOwnerDeletion", Bool),
];
const NAMESPACE: Message = &[
    (1, "metadata", One(META)),
    (2, "spec", One(&[(1, "finalizers", Texts)])),
    (3, "status", One(&[(1, "phase", Text)])),
];
const CONFIG_MAP: Message =
    &[(1, "metadata", One(META)), (2, "data", TextMap), (3, "binaryData", BytesMap), (4, "immutable", Bool)];
const SECRET: Message = &[
    (1, "metadata", One(META)),
    (2, "data", BytesMap),
    (3, "type", Text),
    (4, "stringData", TextMap),
    (5, "immutable", Bool),
];
const REFERENCE: Message = &[
    (1, "kind", Text),
    (2, "namespace", Text),
    (3, "name", Text),
    (4, "uid", Text),
    (5, "apiVersion", Text),
    (6, "resourceVersion", Text),
    (7, "fieldPath", Text),
];
const SERVICE_ACCOUNT: Message = &[
    (1, "metadata", One(META)),
    (2, "secrets", Many(REFERENCE)),
    (3, "imagePullSecrets", Many(&[(1, "name", Text)])),
    (4, "automountServiceAccountToken", Bool),
];
const BINDING: Message = &[(1, "metadata", One(META)), (2, "target", One(REFERENCE))];
const DELETE: Message = &[
    (1, "gracePeriodSeconds", Int),
    (2, "preconditions", One(&[(1, "uid", Text), (2, "resourceVersion", Text)])),
    (3, "orphanDependents", Bool),
    (4, "propagationPolicy", Text),
    (5, "dryRun", Texts),
];
const EVICTION: Message = &[(1, "metadata", One(META)), (2, "deleteOptions", One(DELETE))];
const LEASE: Message = &[
    (1, "metadata", One(META)),
    (
        2,
        "spec",
        One(&[
            (1, "holderIdentity", Text),
            (2, "leaseDurationSeconds", Int),
            (3, "acquireTime", Time),
            (4, "renewTime", Time),
            (5, "leaseTransitions", Int),
        ]),
    ),
];
const MYSELF: Message = &[
    (1, "metadata", One(META)),
    (
        2,
        "status",
        One(&[(1, "userInfo", One(&[(1, "username", Text), (2, "uid", Text), (3, "groups", Texts)]))]),
    ),
];
const RESOURCE: Message = &[
    (1, "namespace", Text),
    (2, "verb", Text),
    (3, "group", Text),
    (4, "version", Text),
    (5, "resource", Text),
    (6, "subresource", Text),
    (7, "name", Text),
];
const NON_RESOURCE: Message = &[(1, "path", Text), (2, "verb", Text)];
const ANSWER: Message =
    &[(1, "allowed", Bool), (2, "reason", Text), (3, "evaluationError", Text), (4, "denied", Bool)];
const MY_RULES: Message = &[
    (1, "metadata", One(META)),
    (2, "spec", One(&[(1, "namespace", Text)])),
    (
        3,
        "status",
        One(&[
            (1, "resourceRules", Many(RULE)),
            (2, "nonResourceRules", Many(&[(1, "verbs", Texts), (2, "nonResourceURLs", Texts)])),
            (3, "incomplete", Bool),
            (4, "evaluationError", Text),
        ]),
    ),
];
const RULE: Message =
    &[(1, "verbs", Texts), (2, "apiGroups", Texts), (3, "resources", Texts), (4, "resourceNames", Texts)];
const MY_ACCESS: Message = &[
    (1, "metadata", One(META)),
    (
        2,
        "spec",
        One(&[(1, "resourceAttributes", One(RESOURCE)), (2, "nonResourceAttributes", One(NON_RESOURCE))]),
    ),
    (3, "status", One(ANSWER)),
];

fn message(kind: &str) -> Option<Message> {
    Some(match kind {
        "Namespace" => NAMESPACE,
        "ConfigMap" => CONFIG_MAP,
        "Secret" => SECRET,
        "ServiceAccount" => SERVICE_ACCOUNT,
        "Binding" => BINDING,
        "DeleteOptions" => DELETE,
        "Eviction" => EVICTION,
        "Lease" => LEASE,
        "SelfSubjectReview" => MYSELF,
        "SelfSubjectAccessReview" => MY_ACCESS,
        "SelfSubjectRulesReview" => MY_RULES,
        _ => return None,
    })
}

/// Why a body was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProtoError {
    #[error("the body is not in Kubernetes' protobuf encoding")]
    Broken,
    #[error("the protobuf form of {0} is not served: send JSON")]
    Kind(String),
    #[error("field {number} of the protobuf form of {of} is not served: send JSON")]
    Field {
        /// The message's name.
        of: String,
        /// The field's number.
        number: u64,
    },
}

/// Reads a body as the object that its JSON form would give.
pub(crate) fn decode(body: &[u8]) -> Result<Value, ProtoError> {
    let body = body.strip_prefix(MAGIC).ok_or(ProtoError::Broken)?;
    let envelope = read(UNKNOWN, "the envelope", body, DEPTH)?;
    let word = |path| json::text(&envelope, path).to_owned();
    let (version, kind) = (word("/typeMeta/apiVersion"), word("/typeMeta/kind"));
    let message = message(&kind).ok_or_else(|| ProtoError::Kind(format!("{version} {kind}")))?;
    let raw = BASE64_STANDARD.decode(word("/raw")).map_err(|_| ProtoError::Broken)?;
    let mut value = read(message, &kind, &raw, DEPTH)?;
    let map = json::map(&mut value);
    map.insert("apiVersion".into(), version.into());
    map.insert("kind".into(), kind.into());
    Ok(value)
}

/// One field as it stands on the wire.
enum Wire<'a> {
    Number(u64),
    Slice(&'a [u8]),
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn varint(&mut self) -> Result<u64, ProtoError> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first().ok_or(ProtoError::Broken)?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(ProtoError::Broken)
    }

    /// Number and content of the next field.
    fn field(&mut self) -> Result<Option<(u64, Wire<'a>)>, ProtoError> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let wire = match tag & 7 {
            0 => Wire::Number(self.varint()?),
            2 => {
                let length = usize::try_from(self.varint()?).map_err(|_| ProtoError::Broken)?;
                let (slice, rest) = self.0.split_at_checked(length).ok_or(ProtoError::Broken)?;
                self.0 = rest;
                Wire::Slice(slice)
            }
            _ => return Err(ProtoError::Broken),
        };
        Ok(Some((tag >> 3, wire)))
    }
}

fn read(message: Message, of: &str, bytes: &[u8], depth: usize) -> Result<Value, ProtoError> {
    let depth = depth.checked_sub(1).ok_or(ProtoError::Broken)?;
    let (mut reader, mut map) = (Reader(bytes), Map::new());
    while let Some((number, wire)) = reader.field()? {
        let Some((_, name, kind)) = message.iter().find(|(known, ..)| *known == number) else {
            return Err(ProtoError::Field { of: of.to_owned(), number });
        };
        match (kind, wire) {
            (Int, Wire::Number(number)) => put(&mut map, name, number.cast_signed().into()),
            (Bool, Wire::Number(number)) => put(&mut map, name, (number != 0).into()),
            (kind, Wire::Slice(bytes)) => slice(&mut map, name, *kind, bytes, depth)?,
            _ => return Err(ProtoError::Broken),
        }
    }
    Ok(Value::Object(map))
}

fn put(map: &mut Map<String, Value>, name: &str, value: Value) {
    map.insert(name.to_owned(), value);
}

fn slice(
    map: &mut Map<String, Value>,
    name: &str,
    kind: Type,
    bytes: &[u8],
    depth: usize,
) -> Result<(), ProtoError> {
    match kind {
        // The encoder writes empty texts for fields that JSON leaves out.
        Text if bytes.is_empty() => {}
        Text => put(map, name, text(bytes)?),
        Bytes => put(map, name, BASE64_STANDARD.encode(bytes).into()),
        Time => {
            if let Some(stamp) = time(bytes, depth)? {
                put(map, name, stamp);
            }
        }
        One(message) => put(map, name, read(message, name, bytes, depth)?),
        Texts => append(map, name, text(bytes)?),
        Many(message) => append(map, name, read(message, name, bytes, depth)?),
        TextMap => entry(map, name, &[(1, "key", Text), (2, "value", Text)], bytes, depth)?,
        BytesMap => entry(map, name, &[(1, "key", Text), (2, "value", Bytes)], bytes, depth)?,
        Int | Bool => return Err(ProtoError::Broken),
    }
    Ok(())
}

fn text(bytes: &[u8]) -> Result<Value, ProtoError> {
    std::str::from_utf8(bytes).map(Into::into).map_err(|_| ProtoError::Broken)
}

fn append(map: &mut Map<String, Value>, name: &str, value: Value) {
    if let Value::Array(items) = map.entry(name).or_insert_with(|| json!([])) {
        items.push(value);
    }
}

fn entry(
    map: &mut Map<String, Value>,
    name: &str,
    pair: Message,
    bytes: &[u8],
    depth: usize,
) -> Result<(), ProtoError> {
    let mut pair = read(pair, name, bytes, depth)?;
    let key = json::text(&pair, "/key").to_owned();
    let value = json::map(&mut pair).remove("value").unwrap_or_else(|| "".into());
    if let Value::Object(entries) = map.entry(name).or_insert_with(|| json!({})) {
        entries.insert(key, value);
    }
    Ok(())
}

/// Seconds and nanoseconds; all zero stands for no time.
fn time(bytes: &[u8], depth: usize) -> Result<Option<Value>, ProtoError> {
    let parts = read(&[(1, "seconds", Int), (2, "nanos", Int)], "a time", bytes, depth)?;
    let (seconds, nanos) = (json::int(&parts, "/seconds"), json::int(&parts, "/nanos").unwrap_or_default());
    let Some(seconds) = seconds.filter(|seconds| *seconds != 0 || nanos != 0) else { return Ok(None) };
    let nanos = i32::try_from(nanos).map_err(|_| ProtoError::Broken)?;
    let stamp = jiff::Timestamp::new(seconds, nanos).map_err(|_| ProtoError::Broken)?;
    Ok(Some(stamp.to_string().into()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![number << 3 | 2, u8::try_from(bytes.len()).unwrap()];
        out.extend_from_slice(bytes);
        out
    }

    fn envelope(version: &str, kind: &str, raw: &[u8]) -> Vec<u8> {
        let meta = [field(1, version.as_bytes()), field(2, kind.as_bytes())].concat();
        [MAGIC.to_vec(), field(1, &meta), field(2, raw), field(3, b""), field(4, b"")].concat()
    }

    #[test]
    fn what_kubectl_auth_asks_is_read() {
        for kind in ["SelfSubjectReview", "SelfSubjectAccessReview", "SelfSubjectRulesReview"] {
            assert!(message(kind).is_some(), "{kind}");
        }
        // As `kubectl auth can-i --list` sends it: an empty answer goes along.
        let raw = [field(1, b""), field(2, &field(1, b"default")), field(3, &[3 << 3, 0])].concat();
        let value = decode(&envelope("authorization.k8s.io/v1", "SelfSubjectRulesReview", &raw)).unwrap();
        assert_eq!(value["spec"], json!({ "namespace": "default" }));
    }

    #[test]
    fn a_config_map_is_read_as_its_json_form() {
        let entry = [field(1, b"k"), field(2, b"v")].concat();
        let raw =
            [field(1, &field(1, b"name")), field(2, &entry), field(3, &entry), vec![4 << 3, 1]].concat();
        assert_eq!(
            decode(&envelope("v1", "ConfigMap", &raw)).unwrap(),
            json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "name" },
                "data": { "k": "v" }, "binaryData": { "k": "dg==" }, "immutable": true,
            })
        );
    }

    #[test]
    fn what_is_not_in_a_table_is_refused_by_name() {
        assert_eq!(decode(&envelope("v1", "Pod", b"")), Err(ProtoError::Kind("v1 Pod".into())));
        let unknown = decode(&envelope("v1", "ConfigMap", &field(9, b"x")));
        assert_eq!(unknown, Err(ProtoError::Field { of: "ConfigMap".into(), number: 9 }));
        assert_eq!(decode(b"{}"), Err(ProtoError::Broken));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100), kind in "(ConfigMap|Namespace|Lease|DeleteOptions)") {
            let _ = decode(&bytes);
            if bytes.len() < 100 {
                let _ = decode(&envelope("v1", &kind, &bytes));
            }
        }
    }
}
