//! Frames of the WebSocket sub-protocols `v4.channel.k8s.io` and `v5.channel.k8s.io`. Pure.
//!
//! A message is one byte of channel number and the bytes of that channel.

use serde_json::{Value, json};

/// What the client says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Said {
    /// Bytes for standard input.
    Stdin(Vec<u8>),
    /// Standard input is over (v5).
    StdinClosed,
    /// A new window size; there is no terminal here.
    Resize,
    /// Nothing that matters (an empty first frame, a close of another channel).
    Nothing,
    /// Not of the protocol.
    Wrong(String),
}

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
const CLOSE: u8 = 255;

/// The sub-protocols that are served, best first.
pub(crate) const PROTOCOLS: [&str; 2] = ["v5.channel.k8s.io", "v4.channel.k8s.io"];

/// The best one among what the client offers.
#[must_use]
pub(crate) fn choose(offered: &str) -> Option<&'static str> {
    PROTOCOLS.into_iter().find(|known| offered.split(',').any(|one| one.trim() == *known))
}

/// Reads a client's message.
#[must_use]
pub(crate) fn read(message: &[u8]) -> Said {
    match message {
        [] => Said::Wrong("an empty message has no channel".to_owned()),
        [STDIN] => Said::Nothing,
        [STDIN, data @ ..] => Said::Stdin(data.to_vec()),
        [RESIZE, ..] => Said::Resize,
        [CLOSE, STDIN] => Said::StdinClosed,
        [CLOSE, _] => Said::Nothing,
        [channel, ..] => Said::Wrong(format!("channel {channel} takes nothing from the client")),
    }
}

/// A frame of standard output.
#[must_use]
pub(crate) fn stdout(data: &[u8]) -> Vec<u8> {
    frame(STDOUT, data)
}

/// A frame of standard error.
#[must_use]
pub(crate) fn stderr(data: &[u8]) -> Vec<u8> {
    frame(STDERR, data)
}

fn frame(channel: u8, data: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(data.len() + 1);
    frame.push(channel);
    frame.extend_from_slice(data);
    frame
}

/// The code that a client is told: clients take 0 to 255 alone and refuse all else as a broken protocol.
///
/// Death by a signal is 128 and the signal, as in every container. An older agent, which lives on in stored
/// snapshots, says -1 and no signal; which one is not guessed: that is 255, and so is what is no code at all.
#[must_use]
pub(crate) fn exit_code(code: i32, killed: Option<i32>) -> u8 {
    let code = killed.filter(|_| code < 0).and_then(|signal| signal.checked_add(128)).unwrap_or(code);
    u8::try_from(code).unwrap_or(u8::MAX)
}

/// How a command ended, as `metav1.Status` on the error channel.
#[must_use]
pub(crate) fn status(outcome: &Result<u8, String>) -> Vec<u8> {
    let status: Value = match outcome {
        Ok(0) => json!({"metadata": {}, "status": "Success"}),
        Ok(code) => json!({
            "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
            "message": format!("command terminated with exit code {code}"),
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        Err(why) => {
            json!({"metadata": {}, "status": "Failure", "reason": "InternalError", "message": why, "code": 500})
        }
    };
    frame(ERROR, status.to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_best_known_protocol_is_chosen_and_none_when_none_is_known() {
        assert_eq!(choose("v4.channel.k8s.io, v5.channel.k8s.io"), Some("v5.channel.k8s.io"));
        assert_eq!(choose("v4.channel.k8s.io"), Some("v4.channel.k8s.io"));
        assert_eq!(choose("base64.channel.k8s.io,portforward.k8s.io"), None);
    }

    #[test]
    fn each_channel_means_what_the_protocol_says() {
        assert_eq!(read(&[0, b'h', b'i']), Said::Stdin(b"hi".to_vec()));
        assert_eq!(read(&[255, 0]), Said::StdinClosed);
        assert_eq!(read(&[4, b'{', b'}']), Said::Resize);
        assert_eq!(read(&[0]), Said::Nothing);
        assert!(matches!(read(&[1, b'x']), Said::Wrong(_)) && matches!(read(&[]), Said::Wrong(_)));
    }

    #[test]
    fn an_exit_code_is_told_exactly() {
        let body = |outcome: &Result<u8, String>| {
            let frame = status(outcome);
            assert_eq!(frame[0], 3);
            serde_json::from_slice::<Value>(&frame[1..]).unwrap()
        };
        assert_eq!(body(&Ok(0))["status"], "Success");
        let failed = body(&Ok(42));
        assert_eq!(
            (failed["reason"].as_str(), failed["details"]["causes"][0]["message"].as_str()),
            (Some("NonZeroExitCode"), Some("42"))
        );
        assert_eq!(body(&Err("lost".into()))["reason"], "InternalError");
    }

    #[test]
    fn death_by_a_signal_is_128_and_the_signal_and_an_unknown_one_is_255() {
        for (code, killed, told) in [
            (-1, Some(9), 137),
            (-1, Some(15), 143),
            (-1, Some(11), 139),
            (-1, None, 255),
            (-1, Some(200), 255),
            (-1, Some(i32::MAX), 255),
            (0, None, 0),
            (255, None, 255),
            (256, None, 255),
            (i32::MIN, None, 255),
        ] {
            assert_eq!(exit_code(code, killed), told, "{code} {killed:?}");
        }
    }

    proptest! {
        #[test]
        fn no_message_makes_the_reader_panic(message in proptest::collection::vec(any::<u8>(), 0..50)) {
            let _ = read(&message);
        }
    }
}
