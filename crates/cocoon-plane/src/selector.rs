//! Label and field selectors.
//!
//! Entry points: [`parse_labels`], [`parse_fields`], [`Selection::matches`]. The grammar is that of the
//! API: `a`, `!a`, `a=b`, `a==b`, `a!=b`, `a in (x,y)`, `a notin (x,y)`, `a>1`, `a<1` joined by commas
//! for labels; `a=b`, `a==b`, `a!=b` joined by commas, with `\` escaping, for fields.

use std::collections::BTreeSet;

use crate::{resources::Kind, store::Object, validate};

/// One demand on labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Demand {
    Exists(Box<str>),
    Missing(Box<str>),
    In(Box<str>, BTreeSet<Box<str>>),
    /// Holds for an object without the key, too.
    NotIn(Box<str>, BTreeSet<Box<str>>),
    Greater(Box<str>, i64),
    Less(Box<str>, i64),
}

impl Demand {
    /// Whether a value looked up by key satisfies the demand.
    pub(crate) fn holds<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        let number = |key: &str| label(key).and_then(|value| value.parse::<i64>().ok());
        match self {
            Self::Exists(key) => label(key).is_some(),
            Self::Missing(key) => label(key).is_none(),
            Self::In(key, values) => label(key).is_some_and(|value| values.contains(value)),
            Self::NotIn(key, values) => label(key).is_none_or(|value| !values.contains(value)),
            Self::Greater(key, bound) => number(key).is_some_and(|value| value > *bound),
            Self::Less(key, bound) => number(key).is_some_and(|value| value < *bound),
        }
    }
}

/// Where a demand on a field looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Name,
    Namespace,
    /// Position among the kind's selectable fields.
    Field(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct FieldDemand {
    place: Place,
    equal: bool,
    value: Box<str>,
    /// The place is `spec.nodeName` of a pod.
    node: bool,
}

/// What a list or watch asks for. The default selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    labels: Vec<Demand>,
    fields: Vec<FieldDemand>,
}

impl Selection {
    pub(crate) fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Self, String> {
        Ok(Self { labels: parse_labels(labels)?, fields: parse_fields(kind, fields)? })
    }

    /// Only the object of this name.
    pub(crate) fn and_name(mut self, name: &str) -> Self {
        self.fields.push(FieldDemand { place: Place::Name, equal: true, value: name.into(), node: false });
        self
    }

    pub(crate) fn matches(&self, object: &Object) -> bool {
        self.fields.iter().all(|demand| {
            let found = match demand.place {
                Place::Name => &*object.key.name,
                Place::Namespace => &*object.key.namespace,
                Place::Field(at) => object.fields.get(at).map_or("", |text| text),
            };
            (found == &*demand.value) == demand.equal
        }) && self.labels.iter().all(|demand| demand.holds(|key| object.label(key)))
    }

    fn equal(&self, wanted: impl Fn(&FieldDemand) -> bool) -> Option<&str> {
        self.fields.iter().find(|demand| demand.equal && wanted(demand)).map(|demand| &*demand.value)
    }

    /// The one node that pods are asked for.
    pub(crate) fn node(&self) -> Option<&str> {
        self.equal(|demand| demand.node)
    }

    /// The one name that is asked for.
    pub(crate) fn name(&self) -> Option<&str> {
        self.equal(|demand| demand.place == Place::Name)
    }
}

/// Parses a field selector for `kind`.
fn parse_fields(kind: &Kind, text: &str) -> Result<Vec<FieldDemand>, String> {
    let mut demands = Vec::new();
    for term in split_unescaped(text).into_iter().filter(|term| !term.is_empty()) {
        let (field, equal, value) = split_term(&term)
            .ok_or_else(|| format!("invalid field selector: '{text}'; can't understand '{term}'"))?;
        let place = match field {
            "metadata.name" => Place::Name,
            "metadata.namespace" => Place::Namespace,
            _ => Place::Field(kind.selectable.iter().position(|known| *known == field).ok_or_else(|| {
                format!(
                    "Unable to find \"{}/{}, Resource={}\" that match label selector \"\", field selector \
                     \"{text}\": field label not supported: {field}",
                    kind.group, kind.version, kind.plural
                )
            })?),
        };
        let node = kind.table == "pods" && field == "spec.nodeName";
        demands.push(FieldDemand { place, equal, value: unescape(value)?.into(), node });
    }
    Ok(demands)
}

fn split_unescaped(text: &str) -> Vec<String> {
    let (mut terms, mut term, mut escaped) = (Vec::new(), String::new(), false);
    for c in text.chars() {
        match c {
            ',' if !escaped => terms.push(std::mem::take(&mut term)),
            _ => term.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    terms.push(term);
    terms
}

fn split_term(term: &str) -> Option<(&str, bool, &str)> {
    let at = term.find(['=', '!'])?;
    let (field, rest) = (term[..at].trim(), &term[at..]);
    if let Some(value) = rest.strip_prefix("!=") {
        return Some((field, false, value));
    }
    let value = rest.strip_prefix("==").or_else(|| rest.strip_prefix('='))?;
    Some((field, true, value))
}

fn unescape(value: &str) -> Result<String, String> {
    let (mut out, mut escaped) = (String::new(), false);
    for c in value.chars() {
        match (escaped, c) {
            (false, '\\') => escaped = true,
            (true, '\\' | ',' | '=') | (false, _) => {
                out.push(c);
                escaped = false;
            }
            (true, _) => {
                return Err(format!("invalid field selector: invalid escape sequence in value: {value}"));
            }
        }
    }
    if escaped {
        Err(format!("invalid field selector: unfinished escape in value: {value}"))
    } else {
        Ok(out)
    }
}

/// Parses a label selector.
pub(crate) fn parse_labels(text: &str) -> Result<Vec<Demand>, String> {
    let mut parser = Parser { rest: text.trim() };
    let mut demands = Vec::new();
    while !parser.rest.is_empty() {
        let demand = parser.demand().map_err(|why| format!("unable to parse requirement: {why}"))?;
        demands.push(demand);
        parser.skip();
        if parser.rest.is_empty() {
            break;
        }
        parser.expect(',').map_err(|why| format!("unable to parse requirement: {why}"))?;
        parser.skip();
        if parser.rest.is_empty() {
            return Err("unable to parse requirement: found '', expected: identifier after ','".into());
        }
    }
    Ok(demands)
}

struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn expect(&mut self, wanted: char) -> Result<(), String> {
        self.skip();
        self.rest = self
            .rest
            .strip_prefix(wanted)
            .ok_or_else(|| format!("found '{}', expected: '{wanted}'", self.rest))?;
        Ok(())
    }

    /// Characters up to the next one with a meaning.
    fn word(&mut self) -> &'a str {
        self.skip();
        let end = self.rest.find(|c: char| c.is_whitespace() || "!=<>(),".contains(c));
        let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        word
    }

    fn key(&mut self) -> Result<Box<str>, String> {
        let key = self.word();
        validate::qualified_name(key).map_err(|why| format!("key: Invalid value: \"{key}\": {why}"))?;
        Ok(key.into())
    }

    fn value(&mut self) -> Result<Box<str>, String> {
        let value = self.word();
        validate::label_value(value).map_err(|why| format!("values: Invalid value: \"{value}\": {why}"))?;
        Ok(value.into())
    }

    fn number(&mut self) -> Result<i64, String> {
        let word = self.word();
        word.parse().map_err(|_| {
            format!(
                "values: Invalid value: \"{word}\": for 'Gt', 'Lt' operators, the value must be an integer"
            )
        })
    }

    fn demand(&mut self) -> Result<Demand, String> {
        self.skip();
        if let Some(rest) = self.rest.strip_prefix('!') {
            self.rest = rest;
            return Ok(Demand::Missing(self.key()?));
        }
        let key = self.key()?;
        self.skip();
        for (sign, equal) in [("!=", false), ("==", true), ("=", true)] {
            if let Some(rest) = self.rest.strip_prefix(sign) {
                self.rest = rest;
                let values = BTreeSet::from([self.value()?]);
                return Ok(if equal { Demand::In(key, values) } else { Demand::NotIn(key, values) });
            }
        }
        if let Some(rest) = self.rest.strip_prefix('>') {
            self.rest = rest;
            return Ok(Demand::Greater(key, self.number()?));
        }
        if let Some(rest) = self.rest.strip_prefix('<') {
            self.rest = rest;
            return Ok(Demand::Less(key, self.number()?));
        }
        self.set_demand(key)
    }

    fn set_demand(&mut self, key: Box<str>) -> Result<Demand, String> {
        if self.rest.is_empty() || self.rest.starts_with(',') {
            return Ok(Demand::Exists(key));
        }
        let operator = self.word();
        match operator {
            "in" => Ok(Demand::In(key, self.set()?)),
            "notin" => Ok(Demand::NotIn(key, self.set()?)),
            _ => Err(format!("found '{operator}{}', expected: in, notin, =, ==, !=, gt, lt", self.rest)),
        }
    }

    fn set(&mut self) -> Result<BTreeSet<Box<str>>, String> {
        self.expect('(')?;
        let mut values = BTreeSet::new();
        loop {
            values.insert(self.value()?);
            self.skip();
            if self.rest.starts_with(')') {
                self.expect(')')?;
                return Ok(values);
            }
            self.expect(',')?;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::resources::by_table;

    fn holds(selector: &str, labels: &[(&str, &str)]) -> bool {
        let demands = parse_labels(selector).unwrap();
        let find = |key: &str| labels.iter().find(|(k, _)| *k == key).map(|(_, v)| *v);
        demands.iter().all(|demand| demand.holds(find))
    }

    #[test]
    fn label_selectors_mean_what_the_api_says() {
        let labels =
            &[("app", "web"), ("tier", "front"), ("n", "5"), ("cocoonstack.io/pool", "a"), ("empty", "")];
        for (selector, wanted) in [
            ("", true),
            ("app=web", true),
            ("app==web,tier!=back", true),
            ("app!=web", false),
            ("missing!=x", true),
            ("app", true),
            ("!app", false),
            ("! missing", true),
            ("app in (web, db)", true),
            ("app in(db)", false),
            ("missing notin (a)", true),
            ("app notin (web)", false),
            ("n>4,n<6", true),
            ("n>5", false),
            ("missing>1", false),
            ("cocoonstack.io/pool=a", true),
            ("empty=", true),
            ("empty in ()", true),
            (" app = web , tier ", true),
        ] {
            assert_eq!(holds(selector, labels), wanted, "{selector}");
        }
    }

    #[test]
    fn broken_label_selectors_are_refused() {
        for selector in [
            "=", "a=b=c", "a in", "a in (", "a in (x", "a,", ",a", "a b", "a>x", "!", "-a=b", "a=b!",
            "a/b/c=d",
        ] {
            assert!(parse_labels(selector).is_err(), "{selector}");
        }
    }

    #[test]
    fn field_selectors_know_the_fields_of_their_kind() {
        let pods = by_table("pods").unwrap();
        for selector in
            ["metadata.name=a", "spec.nodeName=,status.phase!=Failed", r"metadata.name=a\,b\=c", ""]
        {
            assert!(Selection::parse(pods, "", selector).is_ok(), "{selector}");
        }
        for selector in ["spec.hostname=a", "metadata.name", r"metadata.name=a\b", "=a"] {
            assert!(Selection::parse(pods, "", selector).is_err(), "{selector}");
        }
        assert_eq!(Selection::parse(pods, "", "spec.nodeName=n1").unwrap().node(), Some("n1"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parsers_fail_otherwise_than_by_an_error(text in ".{0,40}") {
            let _ = parse_labels(&text);
            let _ = parse_fields(by_table("pods").unwrap(), &text);
        }

        #[test]
        fn a_set_and_its_complement_never_both_hold(
            key in "[a-z]{1,3}", values in proptest::collection::vec("[a-z]{0,2}", 1..4), own in proptest::option::of("[a-z]{0,2}")
        ) {
            let set = values.join(",");
            let find = |asked: &str| (asked == key).then_some(own.as_deref()).flatten();
            let inside = parse_labels(&format!("{key} in ({set})")).unwrap()[0].holds(find);
            let outside = parse_labels(&format!("{key} notin ({set})")).unwrap()[0].holds(find);
            prop_assert_ne!(inside, outside);
        }
    }
}
