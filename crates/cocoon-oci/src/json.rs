//! JSON as the other side reads and writes it.
//!
//! Digests are over exact bytes, so the writer ([`Writer`]) produces the text that the contract's
//! encoder produces: fixed key order (the caller's), `<`, `>`, `&`, U+2028 and U+2029 escaped, compact or
//! two-space indent, no trailing newline. The reader ([`parse`]) accepts what its decoder accepts: keys in
//! any letter case, the last of repeated keys, `null` for "absent"; and it bounds the number of values.

use std::{cell::Cell, fmt};

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

/// Values in one document; far above any real manifest or config, far below what hurts.
const MAX_NODES: usize = 4 << 20;

/// A parsed value. Objects keep their order and repeated keys.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    Null,
    Bool(bool),
    Int(i64),
    /// A number that is no 64-bit signed integer.
    Float,
    Text(String),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

/// Parses one whole document.
pub(crate) fn parse(bytes: &[u8]) -> Result<Node, String> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let node = seed(&Cell::new(MAX_NODES)).deserialize(&mut reader).map_err(|error| error.to_string())?;
    reader.end().map_err(|error| error.to_string())?;
    Ok(node)
}

/// Parses the first document and ignores what follows (as a streaming decoder does).
pub(crate) fn parse_first(bytes: &[u8]) -> Result<Node, String> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    seed(&Cell::new(MAX_NODES)).deserialize(&mut reader).map_err(|error| error.to_string())
}

const fn seed(left: &Cell<usize>) -> Seed<'_> {
    Seed { left }
}

#[derive(Clone, Copy)]
struct Seed<'a> {
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        let Some(left) = self.left.get().checked_sub(1) else {
            return Err(D::Error::custom("too many values"));
        };
        self.left.set(left);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Node;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(i64::try_from(value).map_or(Node::Float, Node::Int))
    }

    fn visit_f64<E>(self, _value: f64) -> Result<Node, E> {
        Ok(Node::Float)
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut map = Vec::new();
        while let Some(key) = items.next_key::<String>()? {
            map.push((key, items.next_value_seed(self)?));
        }
        Ok(Node::Map(map))
    }
}

/// A field has another type than it should have.
fn wrong(name: &str, expected: &str) -> String {
    format!("field {name:?} is not {expected}")
}

impl Node {
    /// The last non-null value under `name`, whatever the key's letter case.
    pub(crate) fn field(&self, name: &str) -> Option<&Self> {
        let Self::Map(entries) = self else { return None };
        let matching = entries.iter().rev().filter(|(key, _)| key.eq_ignore_ascii_case(name));
        matching.map(|(_, value)| value).find(|value| **value != Self::Null)
    }

    /// A text field; empty when absent.
    pub(crate) fn text(&self, name: &str) -> Result<String, String> {
        match self.field(name) {
            None => Ok(String::new()),
            Some(Self::Text(text)) => Ok(text.clone()),
            Some(_) => Err(wrong(name, "a string")),
        }
    }

    /// An integer field; `None` when absent.
    pub(crate) fn int(&self, name: &str) -> Result<Option<i64>, String> {
        match self.field(name) {
            None => Ok(None),
            Some(Self::Int(value)) => Ok(Some(*value)),
            Some(_) => Err(wrong(name, "an integer")),
        }
    }

    /// A boolean field; false when absent.
    pub(crate) fn flag(&self, name: &str) -> Result<bool, String> {
        match self.field(name) {
            None => Ok(false),
            Some(Self::Bool(value)) => Ok(*value),
            Some(_) => Err(wrong(name, "a boolean")),
        }
    }

    /// A list field; empty when absent.
    pub(crate) fn list(&self, name: &str) -> Result<&[Self], String> {
        match self.field(name) {
            None => Ok(&[]),
            Some(Self::List(items)) => Ok(items),
            Some(_) => Err(wrong(name, "a list")),
        }
    }

    /// An object field's entries; empty when absent.
    pub(crate) fn map(&self, name: &str) -> Result<&[(String, Self)], String> {
        match self.field(name) {
            None => Ok(&[]),
            Some(Self::Map(entries)) => Ok(entries),
            Some(_) => Err(wrong(name, "an object")),
        }
    }

    /// An object of strings; empty when absent.
    pub(crate) fn texts(&self, name: &str) -> Result<std::collections::BTreeMap<String, String>, String> {
        let entries = self.map(name)?.iter().map(|(key, value)| match value {
            Self::Text(text) => Ok((key.clone(), text.clone())),
            Self::Null => Ok((key.clone(), String::new())),
            _ => Err(wrong(key, "a string")),
        });
        entries.collect()
    }
}

/// Writes JSON text, compact or indented by two spaces.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    out: String,
    indented: bool,
    /// One entry per open object or list: whether it has an item yet.
    open: Vec<bool>,
    after_key: bool,
}

impl Writer {
    pub(crate) fn compact() -> Self {
        Self::default()
    }

    pub(crate) fn indented() -> Self {
        Self { indented: true, ..Self::default() }
    }

    pub(crate) fn finish(self) -> String {
        self.out
    }

    fn line(&mut self) {
        if self.indented {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n("  ", self.open.len()));
        }
    }

    fn item(&mut self) {
        if std::mem::take(&mut self.after_key) {
            return;
        }
        if let Some(started) = self.open.last_mut() {
            if std::mem::replace(started, true) {
                self.out.push(',');
            }
            self.line();
        }
    }

    fn begin(&mut self, bracket: char) {
        self.item();
        self.out.push(bracket);
        self.open.push(false);
    }

    fn end(&mut self, bracket: char) {
        if self.open.pop() == Some(true) {
            self.line();
        }
        self.out.push(bracket);
    }

    pub(crate) fn begin_map(&mut self) {
        self.begin('{');
    }

    pub(crate) fn end_map(&mut self) {
        self.end('}');
    }

    pub(crate) fn begin_list(&mut self) {
        self.begin('[');
    }

    pub(crate) fn end_list(&mut self) {
        self.end(']');
    }

    pub(crate) fn key(&mut self, key: &str) {
        self.item();
        escape(&mut self.out, key);
        self.out.push_str(if self.indented { ": " } else { ":" });
        self.after_key = true;
    }

    fn word(&mut self, word: &str) {
        self.item();
        self.out.push_str(word);
    }

    pub(crate) fn null(&mut self) {
        self.word("null");
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.item();
        escape(&mut self.out, text);
    }

    /// `key: text`.
    pub(crate) fn text_field(&mut self, key: &str, text: &str) {
        self.key(key);
        self.text(text);
    }

    /// `key: text`, left out when empty.
    pub(crate) fn text_unless_empty(&mut self, key: &str, text: &str) {
        if !text.is_empty() {
            self.text_field(key, text);
        }
    }

    pub(crate) fn int_field(&mut self, key: &str, value: i64) {
        self.key(key);
        self.word(&value.to_string());
    }

    pub(crate) fn int_unless_zero(&mut self, key: &str, value: i64) {
        if value != 0 {
            self.int_field(key, value);
        }
    }

    pub(crate) fn true_unless_false(&mut self, key: &str, value: bool) {
        if value {
            self.key(key);
            self.word("true");
        }
    }

    /// An object of strings, in the map's (bytewise) order.
    pub(crate) fn texts_field(&mut self, key: &str, entries: &std::collections::BTreeMap<String, String>) {
        self.key(key);
        self.begin_map();
        for (key, value) in entries {
            self.text_field(key, value);
        }
        self.end_map();
    }
}

/// Appends `text` as a JSON string.
fn escape(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(character)));
            }
            _ => out.push(character),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_match_in_any_case_the_last_one_counts_and_null_is_absent() {
        let node = parse(br#"{"A":"x","a":"y","a":null,"n":1,"big":18446744073709551615,"f":1.0}"#).unwrap();
        assert_eq!(node.text("a").unwrap(), "y");
        assert_eq!(node.int("N").unwrap(), Some(1));
        assert!(node.int("big").is_err() && node.int("f").is_err() && node.text("n").is_err());
        assert_eq!(node.text("missing").unwrap(), "");
    }

    #[test]
    fn the_writer_escapes_like_the_contract_and_indents_by_two() {
        let mut writer = Writer::indented();
        writer.begin_map();
        writer.text_field("k<", "v>&\u{2028}\"\\\n\u{1}ü");
        writer.key("e");
        writer.begin_map();
        writer.end_map();
        writer.key("l");
        writer.begin_list();
        writer.text("a");
        writer.end_list();
        writer.end_map();
        let text = writer.finish();
        assert_eq!(
            text,
            "{\n  \"k\\u003c\": \"v\\u003e\\u0026\\u2028\\\"\\\\\\n\\u0001ü\",\n  \"e\": {},\n  \"l\": [\n    \"a\"\n  ]\n}"
        );
    }

    proptest! {
        #[test]
        fn what_the_writer_wrote_any_reader_reads(text in any::<String>()) {
            let mut writer = Writer::compact();
            writer.text(&text);
            prop_assert_eq!(serde_json::from_str::<String>(&writer.finish()).unwrap(), text);
        }

        #[test]
        fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            let _ = parse_first(&bytes);
        }
    }
}
