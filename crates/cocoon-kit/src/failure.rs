//! What an error and its causes say.
//!
//! Entry points: [`chain`], all of it as one sentence, [`causes`] and [`is_disk_full`]. The sentence is for logs, statuses
//! and answers, which are text; inside of the program an error keeps its source attached.

use std::{error::Error, io};

/// The error and all its causes, joined by colons. A cause that the text before it ends with is not repeated:
/// some libraries put their source into their own message.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in causes(error).skip(1) {
        let said = cause.to_string();
        if !text.ends_with(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
    }
    text
}

/// The error and its causes, outermost first.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| (*error).source())
}

/// Whether the error, or a cause of it, is a full disk.
#[must_use]
pub fn is_disk_full(error: &(dyn Error + 'static)) -> bool {
    let full = |io: &io::Error| io.kind() == io::ErrorKind::StorageFull;
    causes(error).any(|cause| cause.downcast_ref().is_some_and(full))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_found_wherever_it_is_in_the_chain() {
        #[derive(Debug, thiserror::Error)]
        #[error("writing")]
        struct Writing(#[source] io::Error);

        for (kind, full) in [(io::ErrorKind::StorageFull, true), (io::ErrorKind::NotFound, false)] {
            assert_eq!(is_disk_full(&io::Error::from(kind)), full);
            assert_eq!(is_disk_full(&Writing(kind.into())), full);
        }
    }

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
