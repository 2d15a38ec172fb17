//! Whether a running VM still has its taps.
//!
//! Entry point: [`lost`]. A hypervisor holds its tap by a descriptor and is not told when somebody deletes the
//! interface. Invariant: a tap counts as lost only when two answers say so: the host has no interface of its name,
//! and a descriptor of the living hypervisor is one of no interface any more. A VM on its way down, or a tap that
//! was renamed, is not that.

use std::{fs, io};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketType, netdevice::name_to_index, socket},
};

/// The first of these taps that was deleted under the hypervisor `pid`.
pub(super) fn lost<'a>(pid: u32, mut taps: impl Iterator<Item = &'a str>) -> Option<String> {
    let missing = taps.find(|tap| is_missing(tap))?;
    has_detached(pid).unwrap_or_default().then(|| missing.to_owned())
}

/// Whether the host says for sure that it has no such interface.
fn is_missing(tap: &str) -> bool {
    let Ok(any) = socket(AddressFamily::INET, SocketType::DGRAM, None) else { return false };
    !tap.is_empty() && name_to_index(any, tap) == Err(Errno::NODEV)
}

/// Whether the process holds a tap's descriptor whose interface is gone.
fn has_detached(pid: u32) -> io::Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
        // A descriptor that was closed meanwhile says nothing.
        if fs::read_to_string(entry?.path()).is_ok_and(|facts| is_detached(&facts)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The kernel names a tap descriptor's interface in a line `iff:`, empty once that is gone.
fn is_detached(facts: &str) -> bool {
    facts.lines().any(|line| line.strip_prefix("iff:").is_some_and(|name| name.trim().is_empty()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_a_tap_descriptor_without_an_interface_is_detached() {
        for (facts, expected) in [
            ("pos:\t0\nflags:\t02\nmnt_id:\t15\n", false),
            ("pos:\t0\nflags:\t0104002\niff:\tbtjrwsim3s-0\n", false),
            ("pos:\t0\nflags:\t0104002\niff:\t\n", true),
            ("", false),
        ] {
            assert_eq!(is_detached(facts), expected, "{facts:?}");
        }
    }

    #[test]
    fn nothing_is_lost_without_both_answers() {
        let ours = std::process::id();
        assert_eq!(lost(ours, ["lo"].into_iter()), None, "the interface is there");
        assert_eq!(lost(ours, ["no-such-tap"].into_iter()), None, "this process has no tap's descriptor");
        assert_eq!(lost(u32::MAX, ["no-such-tap"].into_iter()), None, "the process is gone");
        assert_eq!(lost(ours, [""].into_iter()), None, "a VM whose tap was never named");
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(facts in "(?s).{0,200}") {
            is_detached(&facts);
        }
    }
}
