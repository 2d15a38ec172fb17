//! Names and addresses as checked values: what goes into netlink messages and `nft` text passes here.
//!
//! Entry points: [`Mac`], [`check_bridge`], [`tap_name`]. Invariants: an interface name is at most 15
//! bytes; nothing that comes from outside reaches `nft` unchecked; alias and alternative name of a tap
//! say whose it is, so that the kernel's own interface list is the only register of taps.

use std::{fmt, str::FromStr};

/// Alias of a bridge that we made.
pub(crate) const BRIDGE_ALIAS: &str = "cocoon:bridge";
const ALIAS_PREFIX: &str = "cocoon:";
/// Interface group of our taps: what the packet filter knows them by when they are in no bridge.
pub(crate) const TAP_GROUP: u32 = 0xc0_c0_00;
/// The kernel's limit for interface names, without the final zero.
pub(crate) const MAX_INTERFACE: usize = 15;

/// An Ethernet address. Written lower case with colons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac([u8; 6]);

impl Mac {
    /// From its six bytes.
    #[must_use]
    pub const fn new(bytes: [u8; 6]) -> Self {
        Self(bytes)
    }

    /// Its six bytes.
    #[must_use]
    pub const fn bytes(self) -> [u8; 6] {
        self.0
    }

    /// Whether one interface can own it: not a group address, not all zero.
    #[must_use]
    pub fn is_unicast(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }

    /// From its 48 bits.
    pub(crate) fn from_number(number: u64) -> Option<Self> {
        match number.to_be_bytes() {
            [0, 0, bytes @ ..] => Some(Self(bytes)),
            _ => None,
        }
    }

    /// Twelve hexadecimal digits.
    pub(crate) fn hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 12 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let mut bytes = [0; 6];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(text.get(index * 2..index * 2 + 2)?, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A text that is not an Ethernet address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an Ethernet address such as 52:54:00:ab:cd:01")]
pub struct NotAMac(String);

impl FromStr for Mac {
    type Err = NotAMac;

    fn from_str(text: &str) -> Result<Self, NotAMac> {
        let not = || NotAMac(text.chars().take(40).collect());
        let mut bytes = [0; 6];
        let separator = if text.contains('-') { '-' } else { ':' };
        let mut parts = text.split(separator);
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or_else(not)?;
            // `from_str_radix` would take a sign.
            if !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(not());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| not())?;
        }
        if parts.next().is_some() { Err(not()) } else { Ok(Self(bytes)) }
    }
}

/// Whether `name` can be the name of a bridge of ours: it goes into `nft` text and names of tables.
pub(crate) fn check_bridge(name: &str) -> Result<(), String> {
    let fits = (1..=MAX_INTERFACE).contains(&name.len());
    let safe = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'));
    if fits && safe && name.starts_with(|first: char| first.is_ascii_alphabetic()) {
        return Ok(());
    }
    Err(format!(
        "bridge name {name:?} must begin with a letter and have at most {MAX_INTERFACE} of the characters a-z A-Z 0-9 . _ -"
    ))
}

/// What all taps of a VM begin with.
pub(crate) fn tap_prefix(vm_id: &str) -> Result<String, String> {
    if vm_id.is_empty() || !vm_id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        return Err(format!("VM id {vm_id:?} must be letters, digits and dashes"));
    }
    let short: String = vm_id.chars().take(8).collect();
    Ok(format!("bt{}-", short.to_ascii_lowercase()))
}

/// The tap of NIC `index` of a VM.
pub(crate) fn tap_name(vm_id: &str, index: usize) -> Result<String, String> {
    let name = format!("{}{index}", tap_prefix(vm_id)?);
    if name.len() > MAX_INTERFACE {
        return Err(format!("NIC number {index} is too high: a VM has at most 10000 NICs"));
    }
    Ok(name)
}

/// The alias of a VM's tap.
pub(crate) fn tap_alias(vm_id: &str) -> String {
    format!("{ALIAS_PREFIX}{vm_id}")
}

/// The VM that an alias names; `None` for the bridge and for what is not ours.
pub(crate) fn vm_of_alias(alias: &str) -> Option<&str> {
    alias.strip_prefix(ALIAS_PREFIX).filter(|rest| *rest != "bridge" && !rest.is_empty())
}

/// The alternative interface name that ties a tap to a network and a MAC. The kernel keeps it unique,
/// so one MAC cannot be on two taps of a network.
pub(crate) fn alternative_name(bridge: &str, mac: Mac) -> String {
    format!("{bridge}_{}", mac.hex())
}

/// The MAC in a tap's alternative name, if the name belongs to `bridge`.
pub(crate) fn mac_of_alternative(bridge: &str, name: &str) -> Option<Mac> {
    Mac::from_hex(name.strip_prefix(bridge)?.strip_prefix('_')?)
}

/// The name of our `nft` tables of a network.
pub(crate) fn table_name(bridge: &str) -> String {
    format!("{TABLE_PREFIX}{bridge}")
}

/// What the names of all our tables begin with.
pub(crate) const TABLE_PREFIX: &str = "cocoon_";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn macs_are_read_in_either_case_and_written_in_lower_case() {
        let mac: Mac = "02:AA:bb:cc:DD:01".parse().unwrap();
        assert_eq!(mac.to_string(), "02:aa:bb:cc:dd:01");
        assert_eq!("02-aa-bb-cc-dd-01".parse(), Ok(mac));
        for bad in [
            "",
            "bad",
            "02:aa:bb:cc:dd",
            "02:aa:bb:cc:dd:01:02",
            "+2:aa:bb:cc:dd:01",
            "2:aa:bb:cc:dd:01",
            "02:aa:bb:cc:dd-01",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
        assert!(!"01:00:5e:00:00:01".parse::<Mac>().unwrap().is_unicast());
    }

    #[test]
    fn two_vms_have_different_tap_names_that_fit_the_kernel() {
        let (one, two) =
            (tap_name("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 0), tap_name("ABCDEFG2IJKLMNOPQRSTUVWXYZ", 9999));
        assert_eq!(one.as_deref(), Ok("btabcdefgh-0"));
        assert_eq!(two.as_deref(), Ok("btabcdefg2-9999"));
        assert!(tap_name("ABCDEFGH", 10_000).is_err());
        assert!(tap_name("a\";flush", 0).is_err());
    }

    #[test]
    fn names_that_could_break_out_of_nft_text_are_refused() {
        for good in ["cni0", "cocoon0", "br-a.1_2", "a23456789012345"] {
            assert_eq!(check_bridge(good), Ok(()));
        }
        for bad in ["", "a234567890123456", "0br", "a b", "a\"b", "a/b", "ü", "a{"] {
            assert!(check_bridge(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn an_alternative_name_gives_back_its_mac_and_only_to_its_own_bridge(bytes: [u8; 6]) {
            let name = alternative_name("cocoon0", Mac::new(bytes));
            prop_assert_eq!(mac_of_alternative("cocoon0", &name), Some(Mac::new(bytes)));
            prop_assert_eq!(mac_of_alternative("cocoon", &name), None);
            prop_assert!(name.len() < 128);
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,40}") {
            if let Ok(mac) = text.parse::<Mac>() {
                prop_assert_eq!(mac.to_string().parse::<Mac>(), Ok(mac));
            }
            let _ = (check_bridge(&text), tap_name(&text, 3), mac_of_alternative("b", &text));
        }
    }
}
