//! An `identity` frame checked before anything is changed, and the texts it changes; pure.

use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::network::{Mac, parse_mac};
use crate::protocol::Identity;

/// The kernel's own limit.
const HOSTNAME_MAX: usize = 64;

/// A checked identity.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Change {
    /// MAC addresses by NIC index.
    pub(crate) macs: Vec<Mac>,
    /// Host name.
    pub(crate) hostname: Option<String>,
    /// Machine id.
    pub(crate) machine_id: Option<String>,
    /// Wall clock, nanoseconds since 1970.
    pub(crate) unix_time_ns: Option<i64>,
    /// Entropy.
    pub(crate) entropy: Vec<u8>,
    /// Whether all leases are to be had anew.
    pub(crate) renew_dhcp: bool,
}

/// Checks a frame's fields.
pub(crate) fn check(identity: &Identity) -> Result<Change, String> {
    let macs = identity.macs.iter().map(|text| sound_mac(text)).collect::<Result<_, _>>()?;
    let entropy = STANDARD.decode(&identity.entropy).map_err(|_| "entropy is not base64")?;
    let machine_id = given(&identity.machine_id);
    if machine_id.as_ref().is_some_and(|id| !is_machine_id(id)) {
        return Err("machine_id is not 32 lower-case hex digits".into());
    }
    let hostname = given(&identity.hostname);
    if hostname.as_ref().is_some_and(|name| !is_hostname(name)) {
        return Err(format!("hostname {:?} is none: 1 to 64 of a-z, 0-9, '-' and '.'", identity.hostname));
    }
    let unix_time_ns = match identity.unix_time_ns {
        0 => None,
        ns if ns < 0 => return Err("unix_time_ns is before 1970".into()),
        ns => Some(ns),
    };
    Ok(Change { macs, hostname, machine_id, unix_time_ns, entropy, renew_dhcp: identity.renew_dhcp })
}

fn given(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn sound_mac(text: &str) -> Result<Mac, String> {
    match parse_mac(text) {
        Some(mac) if mac[0] & 1 == 0 && mac != [0; 6] => Ok(mac),
        _ => Err(format!("{text:?} is no MAC address of a NIC")),
    }
}

/// Whether the text can stand in `/etc/machine-id`.
pub(crate) fn is_machine_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether the text can be a host name.
pub(crate) fn is_hostname(text: &str) -> bool {
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    (1..=HOSTNAME_MAX).contains(&text.len()) && text.bytes().all(sound) && !text.starts_with(['-', '.'])
}

/// `/etc/hosts` with the host's own name, everything else kept.
pub(crate) fn hosts(old: &str, name: &str) -> String {
    let own = format!("127.0.1.1\t{name}");
    let is_own = |line: &str| line.split_ascii_whitespace().next() == Some("127.0.1.1");
    let mut lines: Vec<&str> = old.lines().collect();
    if !lines.iter().any(|line| line.split_ascii_whitespace().any(|word| word == "localhost")) {
        lines.insert(0, "127.0.0.1\tlocalhost");
    }
    match lines.iter().position(|line| is_own(line)) {
        Some(at) => lines[at] = &own,
        None => lines.push(&own),
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn identity() -> Identity {
        Identity {
            macs: vec!["52:54:00:aa:01:02".into()],
            hostname: "web-0".into(),
            machine_id: "0123456789abcdef0123456789abcdef".into(),
            unix_time_ns: 1,
            entropy: "AAEC".into(),
            renew_dhcp: true,
        }
    }

    #[test]
    fn a_sound_identity_passes_whole() {
        let want = Change {
            macs: vec![[0x52, 0x54, 0, 0xaa, 1, 2]],
            hostname: Some("web-0".into()),
            machine_id: Some("0123456789abcdef0123456789abcdef".into()),
            unix_time_ns: Some(1),
            entropy: vec![0, 1, 2],
            renew_dhcp: true,
        };
        assert_eq!(check(&identity()), Ok(want));
        assert_eq!(check(&Identity::default()), Ok(Change::default()));
    }

    #[test]
    fn one_bad_field_refuses_the_whole_identity() {
        type Spoil = fn(&mut Identity);
        let spoils: [(&str, Spoil); 8] = [
            ("short MAC", |i| i.macs.push("52:54:00".into())),
            ("multicast MAC", |i| i.macs.push("01:00:5e:00:00:01".into())),
            ("zero MAC", |i| i.macs.push("00:00:00:00:00:00".into())),
            ("upper-case machine id", |i| i.machine_id = i.machine_id.to_uppercase()),
            ("host name with a line end", |i| i.hostname = "a\nb".into()),
            ("long host name", |i| i.hostname = "a".repeat(65)),
            ("entropy", |i| i.entropy = "*".into()),
            ("time before 1970", |i| i.unix_time_ns = -1),
        ];
        for (what, spoil) in spoils {
            let mut spoiled = identity();
            spoil(&mut spoiled);
            assert!(check(&spoiled).is_err(), "{what}");
        }
    }

    #[test]
    fn the_hosts_file_keeps_everything_but_the_own_name() {
        for (old, want) in [
            ("", "127.0.0.1\tlocalhost\n127.0.1.1\tn\n"),
            (
                "127.0.0.1 localhost\n127.0.1.1 old\n10.0.0.1 db\n",
                "127.0.0.1 localhost\n127.0.1.1\tn\n10.0.0.1 db\n",
            ),
            ("::1 localhost", "::1 localhost\n127.0.1.1\tn\n"),
        ] {
            assert_eq!(hosts(old, "n"), want);
        }
    }

    proptest! {
        #[test]
        fn renaming_twice_is_renaming_once(old in "[a-z0-9. \n]{0,80}", a in "[a-z]{1,9}", b in "[a-z]{1,9}") {
            prop_assert_eq!(hosts(&hosts(&old, &a), &b), hosts(&old, &b));
        }
    }
}
