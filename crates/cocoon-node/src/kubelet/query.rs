//! Query strings of the kubelet API. Pure.

use percent_encoding::percent_decode_str;

/// Names and values in order, decoded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    /// Reads `a=1&b=2`; what is not UTF-8 after decoding is replaced.
    #[must_use]
    pub(crate) fn parse(text: &str) -> Self {
        let decode =
            |text: &str| percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned();
        let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        });
        Self(pairs.collect())
    }

    /// The first value of a name; empty ones do not count.
    #[must_use]
    pub(crate) fn first(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    /// All values of a name.
    #[must_use]
    pub(crate) fn all(&self, name: &str) -> Vec<String> {
        self.0.iter().filter(|(key, _)| key == name).map(|(_, value)| value.clone()).collect()
    }

    /// Whether one of the names is set to `1` or `true`.
    #[must_use]
    pub(crate) fn flag(&self, names: &[&str]) -> bool {
        names.iter().any(|name| matches!(self.first(name), Some("1" | "true")))
    }

    /// A number, or why it is none.
    pub(crate) fn number(&self, name: &str) -> Result<Option<u64>, String> {
        let Some(text) = self.first(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| format!("{name}={text:?} is not a whole number from 0 up"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_names_keep_their_order_and_escapes_are_undone() {
        let query = Query::parse("command=sh&command=-c&command=echo%20a%26b+c&input=1&tty=0&tailLines=x");
        assert_eq!(query.all("command"), ["sh", "-c", "echo a&b c"]);
        assert!(query.flag(&["input", "stdin"]) && !query.flag(&["tty"]));
        assert!(query.number("tailLines").unwrap_err().contains("tailLines"));
        assert_eq!(query.number("limitBytes"), Ok(None));
    }

    proptest::proptest! {
        #[test]
        fn no_query_makes_the_reader_panic(text in "\\PC{0,60}") {
            let _ = Query::parse(&text);
        }
    }
}
