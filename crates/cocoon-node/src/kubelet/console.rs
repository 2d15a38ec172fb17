//! What a guest wrote on its console, as text that cannot steer a reader's terminal. Pure.
//!
//! Entry point: [`Plain`]; both `kubectl logs` and `cocoon vm logs` go through it. Kept: printable
//! characters, line feeds and tabs. Dropped: escape sequences (cursor, clear, modes, colours, titles) and
//! other control characters. A carriage return that is not the end of a line begins a new one, so progress
//! bars stay readable. Invariants: the result does not depend on how the bytes are cut into pieces; what
//! was never control survives; a sequence that never ends hides at most [`LONGEST`] bytes, and no line feed.

/// Longest sequence that is still taken for one.
const LONGEST: usize = 4096;

/// A filter over a stream of bytes. Cheap to clone; a clone goes on from the same point.
#[derive(Debug, Clone, Default)]
pub struct Plain {
    state: State,
    /// Bytes of the sequence that is being dropped.
    dropped: usize,
    /// Bytes of UTF-8 that a lead byte still asks for.
    continuations: u8,
    /// Something stands in the present line.
    in_line: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Text,
    /// After a carriage return.
    Return,
    /// After 0xC2, which begins the two-byte control characters.
    HighControl,
    /// After ESC and perhaps intermediate bytes.
    Escape,
    /// After `ESC [`.
    Control,
    /// In a string for the terminal, such as a window title.
    Words,
}

impl Plain {
    /// The text in the next bytes of the stream.
    pub fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut text = Vec::with_capacity(bytes.len());
        for byte in bytes {
            self.step(*byte, &mut text);
        }
        text
    }

    fn step(&mut self, byte: u8, text: &mut Vec<u8>) {
        match self.state {
            State::Text => self.text(byte, text),
            State::Return => {
                if byte == b'\r' {
                    return;
                }
                if byte != b'\n' && self.in_line {
                    self.line_feed(text);
                }
                self.state = State::Text;
                self.text(byte, text);
            }
            State::HighControl => self.high_control(byte, text),
            State::Escape | State::Control | State::Words => self.sequence(byte, text),
        }
    }

    fn text(&mut self, byte: u8, text: &mut Vec<u8>) {
        let expected = std::mem::take(&mut self.continuations);
        match byte {
            b'\n' => self.line_feed(text),
            b'\r' => self.state = State::Return,
            0x1b => self.begin(State::Escape),
            0xc2 => self.state = State::HighControl,
            // Alone, these would be control characters to a terminal that does not speak UTF-8.
            0x80..=0x9f if expected == 0 => {}
            b'\t' | 0x20..=0x7e | 0x80..=0xff => {
                self.continuations = match byte {
                    0x80..=0xbf => expected.saturating_sub(1),
                    0xc3..=0xdf => 1,
                    0xe0..=0xef => 2,
                    0xf0..=0xf4 => 3,
                    _ => 0,
                };
                self.in_line = true;
                text.push(byte);
            }
            _ => {}
        }
    }

    fn high_control(&mut self, byte: u8, text: &mut Vec<u8>) {
        self.state = State::Text;
        match byte {
            0xa0..=0xbf => {
                self.in_line = true;
                text.extend([0xc2, byte]);
            }
            0x9b => self.begin(State::Control),
            0x90 | 0x98 | 0x9d..=0x9f => self.begin(State::Words),
            0x80..=0x8f | 0x91..=0x97 | 0x99 | 0x9a | 0x9c => {}
            // 0xC2 began nothing.
            _ => self.text(byte, text),
        }
    }

    /// A byte of a sequence; one that cannot be part of it is text again.
    fn sequence(&mut self, byte: u8, text: &mut Vec<u8>) {
        self.dropped += 1;
        let part = self.dropped <= LONGEST && byte != b'\n' && byte != b'\r';
        match (self.state, byte) {
            _ if !part => self.end(Some(byte), text),
            (_, 0x1b) => self.begin(State::Escape),
            (_, 0x18 | 0x1a) | (State::Words, 0x07) | (State::Control, 0x40..=0x7e) => self.end(None, text),
            (State::Words, _) | (State::Control, 0x20..=0x3f) | (State::Escape, 0x20..=0x2f) => {}
            (State::Escape, b'[') => self.begin(State::Control),
            (State::Escape, b']' | b'P' | b'X' | b'^' | b'_') => self.begin(State::Words),
            (State::Escape, 0x30..=0x7e) => self.end(None, text),
            _ => self.end(Some(byte), text),
        }
    }

    fn begin(&mut self, state: State) {
        self.state = state;
        self.dropped = 0;
    }

    fn end(&mut self, left: Option<u8>, text: &mut Vec<u8>) {
        self.state = State::Text;
        if let Some(byte) = left {
            self.text(byte, text);
        }
    }

    fn line_feed(&mut self, text: &mut Vec<u8>) {
        self.in_line = false;
        text.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plain(bytes: &[u8]) -> Vec<u8> {
        Plain::default().pass(bytes)
    }

    #[test]
    fn terminal_codes_go_and_text_stays() {
        for (written, read) in [
            // SeaBIOS.
            ("\x1bc\x1b[?7l\x1b[2J\x1b[0mSeaBIOS (version 1.16.2)\r\n", "SeaBIOS (version 1.16.2)\n"),
            ("\x1b[1;31mred\x1b[0m \x1b[32mgreen\x1b[m\n", "red green\n"),
            ("a\x1b[2;5Hb\x1b[Kc\x1b(Bd\x1b7e\x1b8", "abcde"),
            ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1bPq#1\x1b\\c", "abc"),
            ("bell\x07 back\x08space\x7f nul\0\n", "bell backspace nul\n"),
            ("one\r\ntwo\r\r\nthree\n", "one\ntwo\nthree\n"),
            ("10%\r20%\r30%\n", "10%\n20%\n30%\n"),
            ("\r\r\x1b[Kx\n", "x\n"),
            ("\ttab äöü€🦀\u{a0}end", "\ttab äöü€🦀\u{a0}end"),
            ("a\u{9b}2Jb\u{9d}title\u{7}c\u{85}d", "abcd"),
            // Broken sequences hide no line.
            ("a\x1b[12\nb\x1b]0;never ended\nc\x1b\nd", "a\nb\nc\nd"),
            ("a\x1b[1\x1b[2Jb", "ab"),
            ("\x1b", ""),
        ] {
            assert_eq!(String::from_utf8_lossy(&plain(written.as_bytes())), read, "{written:?}");
        }
        assert_eq!(plain(b"a\x9bb\xc2\x07\x9b\xe9"), b"ab\xe9", "single bytes of an older character set");
    }

    #[test]
    fn a_sequence_without_end_hides_a_bounded_part_of_the_log() {
        for start in ["\x1b[", "\x1b]", "\x1bP"] {
            let text = format!("{start}{}", "1".repeat(3 * LONGEST));
            assert_eq!(plain(text.as_bytes()).len(), 2 * LONGEST, "{start:?}");
        }
    }

    /// Bytes that meet all states, more often than chance would have it.
    fn noise() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<u8>().prop_map(|byte| vec![byte]),
            "[a-z ]{1,4}".prop_map(String::into_bytes),
            "[äß€🦀\u{80}-\u{9f}]".prop_map(String::into_bytes),
            "\x1b[\\[\\]P^_(c7M\\\\]?[0-9;?]{0,4}[A-Za-z\x07\x1b]?".prop_map(String::into_bytes),
            "[\r\n\t\x07\x18\x1b]".prop_map(String::into_bytes),
        ];
        proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn the_text_does_not_depend_on_where_reads_were_cut(bytes in noise(), cuts in proptest::collection::vec(0_usize..9, 0..40)) {
            let (mut filter, mut text, mut rest) = (Plain::default(), Vec::new(), bytes.as_slice());
            for cut in cuts {
                let (piece, more) = rest.split_at(cut.min(rest.len()));
                text.extend(filter.pass(piece));
                rest = more;
            }
            text.extend(filter.pass(rest));
            prop_assert_eq!(text, plain(&bytes));
        }

        #[test]
        fn nothing_that_steers_a_terminal_is_left(bytes in noise()) {
            let text = plain(&bytes);
            let shown = String::from_utf8_lossy(&text);
            prop_assert!(shown.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'), "{:?}", shown);
            prop_assert_eq!(plain(&text), text);
        }

        #[test]
        fn text_is_left_alone_and_no_line_feed_is_lost(text in "[\\PC\n\t]{0,60}", bytes in noise()) {
            prop_assert_eq!(String::from_utf8(plain(text.as_bytes())).unwrap(), text);
            let feeds = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count();
            prop_assert!(feeds(&plain(&bytes)) >= feeds(&bytes));
        }
    }
}
