//! Frames between host and guest agent: newline-delimited JSON (`engine-cli` §8), pure; the submodule carries
//! them over any byte stream.
//!
//! Entry points: [`encode`] and [`decode`]. Field order, omitted empty fields and escapes follow the
//! original agent byte for byte (golden vectors `guest_agent`); keys are read without regard to case, as
//! the original does.

mod carry;

use std::{collections::BTreeMap, fmt};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{IgnoredAny, MapAccess, Visitor},
};
use thiserror::Error;

pub use self::carry::{FrameReader, FrameWriter, LargeFrames};

/// Longest frame in bytes, newline excluded, in both directions.
pub const MAX_FRAME: usize = 8 << 20;
/// Size of the chunks in which a client sends stdin.
pub const STDIN_CHUNK: usize = 32 << 10;

/// What a clone must become before its link goes up (our extension, design §5 "The guest channel").
/// Empty fields are left alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// MAC addresses by NIC index (`aa:bb:cc:dd:ee:ff`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub macs: Vec<String>,
    /// Host name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hostname: String,
    /// 32 lower-case hex digits for `/etc/machine-id`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub machine_id: String,
    /// Wall clock in nanoseconds since 1970; 0 leaves the clock alone.
    #[serde(default)]
    pub unix_time_ns: i64,
    /// Fresh entropy, base64; at most 512 bytes are used.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub entropy: String,
    /// Ask for a new DHCP lease once the link is up.
    #[serde(default)]
    pub renew_dhcp: bool,
}

/// The `type` of a frame.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Kind {
    /// No type at all.
    #[default]
    None,
    /// To the guest, first: run a command.
    Exec,
    /// To the guest, first: new entropy, perhaps a new machine id.
    Reseed,
    /// To the guest, first: become another machine (ours).
    Identity,
    /// To the guest: bytes for standard input.
    Stdin,
    /// To the guest: standard input ends.
    StdinClose,
    /// To the host: the command runs.
    Started,
    /// To the host: bytes of standard output.
    Stdout,
    /// To the host: bytes of standard error.
    Stderr,
    /// To the host, terminal: the command ended.
    Exit,
    /// To the host, terminal: the session failed.
    Error,
    /// A type we do not know.
    Other(String),
}

const KINDS: [(&str, Kind); 10] = [
    ("exec", Kind::Exec),
    ("reseed", Kind::Reseed),
    ("identity", Kind::Identity),
    ("stdin", Kind::Stdin),
    ("stdin_close", Kind::StdinClose),
    ("started", Kind::Started),
    ("stdout", Kind::Stdout),
    ("stderr", Kind::Stderr),
    ("exit", Kind::Exit),
    ("error", Kind::Error),
];

impl Kind {
    /// The word on the wire.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::None => "",
            Self::Other(word) => word,
            known => KINDS.iter().find(|(_, kind)| kind == known).map_or("", |(word, _)| word),
        }
    }
}

impl From<&str> for Kind {
    fn from(word: &str) -> Self {
        match KINDS.iter().find(|(known, _)| *known == word) {
            Some((_, kind)) => kind.clone(),
            None if word.is_empty() => Self::None,
            None => Self::Other(word.to_owned()),
        }
    }
}

/// One frame; fields that its type has no use for stay empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    /// `type`.
    pub kind: Kind,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment to merge.
    pub env: BTreeMap<String, String>,
    /// Bytes; base64 on the wire.
    pub data: Vec<u8>,
    /// Process id in the guest.
    pub pid: i64,
    /// Exit code; -1 when a signal killed the command.
    pub exit_code: i64,
    /// The signal that killed the command (our extension); 0: none, or an agent that does not say.
    pub signal: i64,
    /// Text of an error.
    pub message: String,
    /// Whether `reseed` also makes a new machine id.
    pub regen_machine_id: bool,
    /// Fields of an `identity` frame, beside the others on the wire.
    pub identity: Identity,
}

impl Frame {
    /// A frame with nothing but its type.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Self { kind, ..Self::default() }
    }

    /// A frame that carries bytes.
    #[must_use]
    pub fn data(kind: Kind, data: Vec<u8>) -> Self {
        Self { kind, data, ..Self::default() }
    }

    /// A terminal `error`.
    #[must_use]
    pub fn error(message: impl Into<String>) -> Self {
        Self { kind: Kind::Error, message: message.into(), ..Self::default() }
    }

    /// A terminal `exit`.
    #[must_use]
    pub fn exit(code: i32) -> Self {
        Self { kind: Kind::Exit, exit_code: code.into(), ..Self::default() }
    }

    /// A terminal `exit` of a command that a signal killed.
    #[must_use]
    pub fn killed(signal: i32) -> Self {
        Self { signal: signal.into(), ..Self::exit(-1) }
    }
}

/// Why bytes are not a frame.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The line is longer than [`MAX_FRAME`].
    #[error("a frame is longer than 8 MiB; send it in several")]
    TooLong,
    /// The line is not the JSON object of a frame.
    #[error("a frame is not the JSON it should be")]
    Malformed(#[source] serde_json::Error),
    /// `data` is not base64.
    #[error("the data of a frame is not base64")]
    Data(#[source] base64::DecodeError),
    /// The stream ended inside a frame.
    #[error("the stream ended inside a frame")]
    Truncated,
    /// The stream under the frames failed.
    #[error("reading or writing a frame")]
    Io(#[from] std::io::Error),
}

/// The fields in the order of the wire, empty ones left out.
#[derive(Serialize)]
struct Wire<'a> {
    r#type: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    argv: &'a [String],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    env: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    data: String,
    #[serde(skip_serializing_if = "is_zero")]
    pid: i64,
    #[serde(skip_serializing_if = "is_zero")]
    exit_code: i64,
    #[serde(skip_serializing_if = "is_zero")]
    signal: i64,
    #[serde(skip_serializing_if = "str::is_empty")]
    message: &'a str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    regen_machine_id: bool,
    #[serde(flatten)]
    identity: Option<&'a Identity>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a reference")]
fn is_zero(n: &i64) -> bool {
    *n == 0
}

/// The line of a frame, newline included.
pub fn encode(frame: &Frame) -> Result<Vec<u8>, FrameError> {
    let wire = Wire {
        r#type: frame.kind.as_str(),
        argv: &frame.argv,
        env: &frame.env,
        data: STANDARD.encode(&frame.data),
        pid: frame.pid,
        exit_code: frame.exit_code,
        signal: frame.signal,
        message: &frame.message,
        regen_machine_id: frame.regen_machine_id,
        identity: (frame.kind == Kind::Identity).then_some(&frame.identity),
    };
    let mut line = escape(serde_json::to_string(&wire).map_err(FrameError::Malformed)?).into_bytes();
    if line.len() > MAX_FRAME {
        return Err(FrameError::TooLong);
    }
    line.push(b'\n');
    Ok(line)
}

/// The original's encoder escapes these five inside strings, and they occur nowhere else in JSON.
fn escape(json: String) -> String {
    if !json.contains(['<', '>', '&', '\u{2028}', '\u{2029}']) {
        return json;
    }
    let mut out = String::with_capacity(json.len() + 32);
    for c in json.chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            _ => out.push(c),
        }
    }
    out
}

/// Reads one line (with or without its newline) as a frame.
pub fn decode(line: &[u8]) -> Result<Frame, FrameError> {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    if line.len() > MAX_FRAME {
        return Err(FrameError::TooLong);
    }
    let raw: Raw =
        serde_json::from_slice::<Option<Raw>>(line).map_err(FrameError::Malformed)?.unwrap_or_default();
    let data = STANDARD.decode(&raw.data).map_err(FrameError::Data)?;
    Ok(Frame { data, ..raw.frame })
}

/// A frame whose data is still base64.
#[derive(Default)]
struct Raw {
    frame: Frame,
    data: String,
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a frame object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let mut raw = Raw::default();
        while let Some(key) = map.next_key::<String>()? {
            let f = &mut raw.frame;
            match key.to_ascii_lowercase().as_str() {
                "type" => {
                    let mut word = String::new();
                    set(&mut map, &mut word)?;
                    f.kind = Kind::from(word.as_str());
                }
                "argv" => set(&mut map, &mut f.argv)?,
                "env" => set(&mut map, &mut f.env)?,
                "data" => set(&mut map, &mut raw.data)?,
                "pid" => set(&mut map, &mut f.pid)?,
                "exit_code" => set(&mut map, &mut f.exit_code)?,
                "signal" => set(&mut map, &mut f.signal)?,
                "message" => set(&mut map, &mut f.message)?,
                "regen_machine_id" => set(&mut map, &mut f.regen_machine_id)?,
                "macs" => set(&mut map, &mut f.identity.macs)?,
                "hostname" => set(&mut map, &mut f.identity.hostname)?,
                "machine_id" => set(&mut map, &mut f.identity.machine_id)?,
                "unix_time_ns" => set(&mut map, &mut f.identity.unix_time_ns)?,
                "entropy" => set(&mut map, &mut f.identity.entropy)?,
                "renew_dhcp" => set(&mut map, &mut f.identity.renew_dhcp)?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(raw)
    }
}

/// Reads a value into `slot`; `null` leaves it as it is.
fn set<'de, A: MapAccess<'de>, T: Deserialize<'de>>(map: &mut A, slot: &mut T) -> Result<(), A::Error> {
    if let Some(value) = map.next_value::<Option<T>>()? {
        *slot = value;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*};

    use super::*;

    fn text(frame: &Frame) -> String {
        String::from_utf8(encode(frame).unwrap()).unwrap()
    }

    #[test]
    fn frames_are_written_as_the_original_writes_them() {
        let env = BTreeMap::from([("B".into(), "2".into()), ("A".into(), "1".into())]);
        let identity =
            Identity { macs: vec!["52:54:00:00:00:01".into()], renew_dhcp: true, ..Identity::default() };
        for (frame, want) in [
            (Frame::exit(0), "{\"type\":\"exit\"}\n"),
            (Frame::exit(-1), "{\"type\":\"exit\",\"exit_code\":-1}\n"),
            (Frame::killed(9), "{\"type\":\"exit\",\"exit_code\":-1,\"signal\":9}\n"),
            (
                Frame::error("a<b>&\u{2028}"),
                "{\"type\":\"error\",\"message\":\"a\\u003cb\\u003e\\u0026\\u2028\"}\n",
            ),
            (Frame::data(Kind::Stdin, vec![0, 1, 255]), "{\"type\":\"stdin\",\"data\":\"AAH/\"}\n"),
            (
                Frame { kind: Kind::Exec, argv: vec!["x".into()], env, ..Frame::default() },
                "{\"type\":\"exec\",\"argv\":[\"x\"],\"env\":{\"A\":\"1\",\"B\":\"2\"}}\n",
            ),
            (
                Frame { kind: Kind::Identity, identity, ..Frame::default() },
                "{\"type\":\"identity\",\"macs\":[\"52:54:00:00:00:01\"],\"unix_time_ns\":0,\"renew_dhcp\":true}\n",
            ),
        ] {
            assert_eq!(text(&frame), want);
        }
    }

    #[test]
    fn keys_are_read_without_regard_to_case_and_null_is_nothing() {
        let got =
            decode(br#"{"TYPE":"exec","Argv":["a"],"env":null,"pid":null,"rows":[1,{"x":2}]}"#).unwrap();
        assert_eq!(got, Frame { kind: Kind::Exec, argv: vec!["a".into()], ..Frame::default() });
        assert_eq!(decode(b"null").unwrap(), Frame::default());
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        for line in [
            "",
            "x",
            "[]",
            "5",
            r#"{"type":5}"#,
            r#"{"type":"exit","exit_code":"1"}"#,
            r#"{"type":"stdin","data":"*"}"#,
        ] {
            assert!(decode(line.as_bytes()).is_err(), "{line:?}");
        }
    }

    #[test]
    fn a_frame_of_more_than_8_mib_is_refused_in_both_directions() {
        let huge = Frame::data(Kind::Stdin, vec![0; MAX_FRAME]);
        assert!(matches!(encode(&huge), Err(FrameError::TooLong)));
        let line = vec![b' '; MAX_FRAME + 1];
        assert!(matches!(decode(&line), Err(FrameError::TooLong)));
    }

    pub(super) fn frame() -> impl Strategy<Value = Frame> {
        let kind = "exec|reseed|identity|stdin|stdin_close|started|stdout|stderr|exit|error||other";
        let argv = collection::vec("\\PC{0,8}", 0..4);
        let env = collection::btree_map("\\PC{0,6}", "\\PC{0,6}", 0..3);
        let data = collection::vec(any::<u8>(), 0..64);
        let numbers = (any::<i64>(), any::<i64>(), any::<i64>());
        (kind, argv, env, data, numbers, any::<String>(), any::<bool>(), "[a-f]{0,4}").prop_map(
            |(kind, argv, env, data, (pid, exit_code, signal), message, regen_machine_id, hostname)| {
                let kind = Kind::from(kind.as_str());
                let hostname = if kind == Kind::Identity { hostname } else { String::new() };
                let identity = Identity { hostname, ..Identity::default() };
                Frame { kind, argv, env, data, pid, exit_code, signal, message, regen_machine_id, identity }
            },
        )
    }

    proptest! {
        #[test]
        fn what_was_written_reads_back(frame in frame()) {
            let line = encode(&frame).unwrap();
            prop_assert_eq!(line.iter().filter(|&&b| b == b'\n').count(), 1);
            prop_assert_eq!(decode(&line).unwrap(), frame);
        }

        #[test]
        fn no_bytes_upset_the_reader(bytes in collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }
    }
}
