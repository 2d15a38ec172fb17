//! What the kernel command line asks of the boot (`engine-cli` §5), pure.

use std::{net::Ipv4Addr, time::Duration};

/// How long each disk is waited for unless `cocoon.timeout=` says otherwise.
const DISK_TIMEOUT: Duration = Duration::from_secs(30);

/// The parameters of one boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parameters {
    /// Read-only disks, top layer first: serials or device paths.
    pub(crate) layers: Vec<String>,
    /// The writable disk.
    pub(crate) cow: String,
    /// Host name; empty leaves it to the image.
    pub(crate) hostname: String,
    /// How long each disk is waited for.
    pub(crate) timeout: Duration,
    /// NICs with a fixed address.
    pub(crate) fixed: Vec<Fixed>,
}

/// A NIC with a fixed address (`ip=`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fixed {
    /// Interface name.
    pub(crate) interface: String,
    /// Address and prefix length.
    pub(crate) address: (Ipv4Addr, u32),
    /// Default gateway.
    pub(crate) gateway: Option<Ipv4Addr>,
    /// DNS servers.
    pub(crate) dns: Vec<Ipv4Addr>,
}

/// Reads a command line. Words we do not know are the kernel's; a malformed `ip=` is left out.
pub(crate) fn parse(line: &str) -> Parameters {
    let mut parameters = Parameters {
        layers: Vec::new(),
        cow: "cocoon-cow".into(),
        hostname: String::new(),
        timeout: DISK_TIMEOUT,
        fixed: Vec::new(),
    };
    for (key, value) in line.split_ascii_whitespace().filter_map(|word| word.split_once('=')) {
        match key {
            "cocoon.layers" => {
                parameters.layers = value.split(',').filter(|s| !s.is_empty()).map(Into::into).collect()
            }
            "cocoon.cow" => parameters.cow = value.into(),
            "cocoon.hostname" => parameters.hostname = value.into(),
            "cocoon.timeout" => {
                if let Ok(seconds) = value.parse() {
                    parameters.timeout = Duration::from_secs(seconds);
                }
            }
            "ip" => parameters.fixed.extend(fixed(value)),
            _ => {}
        }
    }
    parameters
}

/// `<addr>::<gw>:<mask>:<name>:<interface>:off[:dns0[:dns1]]`.
fn fixed(value: &str) -> Option<Fixed> {
    let fields: Vec<&str> = value.split(':').collect();
    let field = |i: usize| fields.get(i).copied().unwrap_or_default();
    let address: Ipv4Addr = field(0).parse().ok()?;
    let mask = u32::from(field(3).parse::<Ipv4Addr>().ok()?);
    let interface = field(5);
    if interface.is_empty() || mask.leading_ones() + mask.trailing_zeros() != 32 {
        return None;
    }
    Some(Fixed {
        interface: interface.into(),
        address: (address, mask.leading_ones()),
        gateway: field(2).parse().ok(),
        dns: fields.iter().skip(7).filter_map(|dns| dns.parse().ok()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_engines_parameters_are_understood() {
        let got = parse(
            "console=ttyS0 loglevel=3 boot=cocoon-overlay rw cocoon.layers=cocoon-layer1,cocoon-layer0 \
             cocoon.cow=cow2 cocoon.hostname=web-0 cocoon.timeout=7 \
             ip=10.0.0.5::10.0.0.1:255.255.255.0:web-0:eth1:off:1.1.1.1:8.8.8.8",
        );
        assert_eq!(got.layers, ["cocoon-layer1", "cocoon-layer0"]);
        assert_eq!((got.cow.as_str(), got.hostname.as_str()), ("cow2", "web-0"));
        assert_eq!(got.timeout, Duration::from_secs(7));
        let want = Fixed {
            interface: "eth1".into(),
            address: (Ipv4Addr::new(10, 0, 0, 5), 24),
            gateway: Some(Ipv4Addr::new(10, 0, 0, 1)),
            dns: vec![Ipv4Addr::new(1, 1, 1, 1), Ipv4Addr::new(8, 8, 8, 8)],
        };
        assert_eq!(got.fixed, [want]);
    }

    #[test]
    fn what_is_missing_has_a_default_and_what_is_malformed_is_left_out() {
        let got = parse(
            "ip=dhcp ip=10.0.0.1::x:255.0.255.0:n:eth0:off ip=1.2.3.4 cocoon.timeout=soon cocoon.layers=",
        );
        let want = parse("");
        assert_eq!(got, want);
        assert_eq!(want.cow, "cocoon-cow");
        assert!(want.layers.is_empty());
    }

    proptest! {
        #[test]
        fn no_command_line_upsets_the_parser(line in "\\PC{0,200}", ip in "[0-9.:a-z]{0,60}") {
            parse(&line);
            parse(&format!("ip={ip}"));
        }
    }
}
