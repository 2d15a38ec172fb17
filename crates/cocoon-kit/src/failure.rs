//! An error and its causes as one sentence.
//!
//! Entry point: [`chain`]. For logs, statuses and answers, which are text; inside of the program an error
//! keeps its source attached.

use std::error::Error;

/// The error and all its causes, joined by colons. A cause that the text before it ends with is not repeated:
/// some libraries put their source into their own message.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Step(&'static str, #[source] Option<Box<Step>>);

    fn error(texts: &[&'static str]) -> Step {
        let (first, rest) = texts.split_first().unwrap();
        Step(first, (!rest.is_empty()).then(|| Box::new(error(rest))))
    }

    #[test]
    fn every_cause_is_told_once() {
        for (texts, told) in [
            (&["a"][..], "a"),
            (&["a", "b", "c"], "a: b: c"),
            (&["reading: refused", "refused", "os error 1"], "reading: refused: os error 1"),
        ] {
            assert_eq!(chain(&error(texts)), told);
        }
    }
}
