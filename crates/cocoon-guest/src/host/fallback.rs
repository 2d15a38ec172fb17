//! Identity for a guest whose agent does not know the `identity` frame: the steps of `engine-cli` §9, by
//! `reseed` and one shell script. Values travel in the environment, never in the script's text.

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::{Channel, Entropy, Exec, GuestError, session::refused};
use crate::protocol::Identity;

/// Each step of the script is bounded by the caller; this bounds the two sessions on their own.
const STEP: Duration = Duration::from_secs(15);

const SCRIPT: &str = r#"
[ -z "$CLOCK" ] || date -u -s "@$CLOCK" >/dev/null
[ ! -w /proc/sys/vm/drop_caches ] || echo 3 >/proc/sys/vm/drop_caches
if [ -n "$NAME" ]; then echo "$NAME" >/etc/hostname; hostname "$NAME"; fi
if [ -n "$MACHINE_ID" ]; then echo "$MACHINE_ID" >/etc/machine-id; fi
[ -z "$MACS" ] || rm -f /etc/systemd/network/10-*.network
i=0
for mac in $MACS; do
  ip link set "eth$i" down && ip link set "eth$i" address "$mac" && ip link set "eth$i" up || exit 1
  if [ -d /run/systemd/system ]; then
    mkdir -p /etc/systemd/network
    printf '[Match]\nMACAddress=%s\n[Network]\nDHCP=ipv4\n[DHCPv4]\nClientIdentifier=mac\n' "$mac" \
      >"/etc/systemd/network/10-$i.network"
  elif [ -n "$RENEW" ]; then ip addr flush dev "eth$i"; fi
  i=$((i+1))
done
[ ! -d /run/systemd/system ] || [ -z "$MACS" ] || systemctl restart systemd-networkd
"#;

/// Performs the steps.
pub(crate) async fn identity(channel: &Channel, identity: &Identity) -> Result<(), GuestError> {
    let bytes = STANDARD
        .decode(&identity.entropy)
        .map_err(|e| GuestError::Protocol(format!("entropy of the identity is not base64: {e}")))?;
    let regen_machine_id = !identity.machine_id.is_empty();
    channel.reseed(Entropy { bytes, regen_machine_id }, STEP).await?;
    let argv = ["sh", "-c", SCRIPT].map(str::to_owned).to_vec();
    let output = channel.output(Exec { argv, env: environment(identity) }, STEP).await?;
    match output.code {
        0 => Ok(()),
        code => Err(refused(&format!(
            "the identity script ended with {code}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

fn environment(identity: &Identity) -> BTreeMap<String, String> {
    let clock = match identity.unix_time_ns {
        0 => String::new(),
        ns => (ns / 1_000_000_000).to_string(),
    };
    let renew = if identity.renew_dhcp { "1" } else { "" };
    [
        ("NAME", identity.hostname.clone()),
        ("MACHINE_ID", identity.machine_id.clone()),
        ("MACS", identity.macs.join(" ")),
        ("CLOCK", clock),
        ("RENEW", renew.to_owned()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}
