//! Rules for names, labels, annotations and other metadata.
//!
//! The messages are the API's, so that `kubectl` users recognise them.

use serde_json::Value;

use crate::{
    error::Causes,
    json::{list, text},
};

const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and \
    must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation \
    is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or \
    '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const QUALIFIED: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end \
    with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
    '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', \
    and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used \
    for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
/// All annotations of an object together.
const ANNOTATIONS: usize = 256 << 10;

fn is_label(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = name.as_bytes();
    bytes.first().copied().is_some_and(inner)
        && bytes.last().copied().is_some_and(inner)
        && bytes.iter().all(|c| inner(*c) || *c == b'-')
}

/// A DNS label: one word of a host name.
pub(crate) fn dns_label(name: &str) -> Result<(), String> {
    match name {
        name if name.len() > 63 => Err("must be no more than 63 characters".into()),
        name if is_label(name) => Ok(()),
        _ => Err(LABEL.into()),
    }
}

/// A DNS subdomain: words joined by dots.
pub(crate) fn dns_subdomain(name: &str) -> Result<(), String> {
    match name {
        name if name.len() > 253 => Err("must be no more than 253 characters".into()),
        name if name.split('.').all(is_label) => Ok(()),
        _ => Err(SUBDOMAIN.into()),
    }
}

fn is_word(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.iter().all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(c))
}

/// A label key: an optional DNS prefix and a word.
pub(crate) fn qualified_name(key: &str) -> Result<(), String> {
    let name = match key.split_once('/') {
        Some((prefix, name)) => {
            dns_subdomain(prefix).map_err(|why| format!("prefix part {why}"))?;
            name
        }
        None => key,
    };
    match name {
        "" => Err("name part must be non-empty".into()),
        name if name.len() > 63 => Err("name part must be no more than 63 characters".into()),
        name if is_word(name) => Ok(()),
        _ => Err(QUALIFIED.into()),
    }
}

/// A label's value.
pub(crate) fn label_value(value: &str) -> Result<(), String> {
    match value {
        "" => Ok(()),
        value if value.len() > 63 => Err("must be no more than 63 characters".into()),
        value if is_word(value) => Ok(()),
        _ => Err(VALUE.into()),
    }
}

/// Labels of any place, such as a node selector.
pub(crate) fn labels(object: &Value, path: &str, field: &str, causes: &mut Causes) {
    for (key, value) in object.pointer(path).and_then(Value::as_object).into_iter().flatten() {
        if let Err(why) = qualified_name(key) {
            causes.invalid(field, &key.as_str().into(), &why);
        }
        if let Err(why) = label_value(value.as_str().unwrap_or_default()) {
            causes.invalid(field, value, &why);
        }
    }
}

/// What every object's metadata must satisfy, apart from its name.
pub(crate) fn metadata(object: &Value, causes: &mut Causes) {
    labels(object, "/metadata/labels", "metadata.labels", causes);
    annotations(object, causes);
    for (at, owner) in list(object, "/metadata/ownerReferences").iter().enumerate() {
        for field in ["apiVersion", "kind", "name", "uid"] {
            if text(owner, &format!("/{field}")).is_empty() {
                causes.required(format!("metadata.ownerReferences[{at}].{field}"), "must not be empty");
            }
        }
    }
    for (at, finalizer) in list(object, "/metadata/finalizers").iter().enumerate() {
        if let Err(why) = qualified_name(finalizer.as_str().unwrap_or_default()) {
            causes.invalid(format!("metadata.finalizers[{at}]"), finalizer, &why);
        }
    }
}

fn annotations(object: &Value, causes: &mut Causes) {
    let mut size = 0;
    for (key, value) in
        object.pointer("/metadata/annotations").and_then(Value::as_object).into_iter().flatten()
    {
        size += key.len() + value.as_str().map_or(0, str::len);
        if let Err(why) = qualified_name(&key.to_lowercase()) {
            causes.invalid("metadata.annotations", &key.as_str().into(), &why);
        }
    }
    if size > ANNOTATIONS {
        let message = format!("Too long: may not be more than {ANNOTATIONS} bytes");
        causes.0.push(crate::error::Cause {
            reason: "FieldValueTooLong",
            field: "metadata.annotations".into(),
            message,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rules_of_dns_and_labels() {
        for (name, label, subdomain, qualified) in [
            ("a", true, true, true),
            ("a-b", true, true, true),
            ("a.b", false, true, true),
            ("A", false, false, true),
            ("-a", false, false, false),
            ("a_b", false, false, true),
            ("", false, false, false),
            ("a..b", false, false, true),
            ("x.io/a_B", false, false, true),
            ("X/a", false, false, false),
            ("x/", false, false, false),
            ("a/b/c", false, false, false),
        ] {
            assert_eq!(dns_label(name).is_ok(), label, "label {name}");
            assert_eq!(dns_subdomain(name).is_ok(), subdomain, "subdomain {name}");
            assert_eq!(qualified_name(name).is_ok(), qualified, "qualified {name}");
        }
        assert!(dns_label(&"a".repeat(64)).is_err() && dns_label(&"a".repeat(63)).is_ok());
        assert!(label_value("").is_ok() && label_value("a.b").is_ok() && label_value("a b").is_err());
    }
}
