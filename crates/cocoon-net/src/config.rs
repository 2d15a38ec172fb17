//! What a host network of ours looks like, and which addresses it has to give.
//!
//! Entry points: [`NetworkConfig`], [`subnet_ips`]. Invariant: a configuration that [`NetworkConfig::check`]
//! accepts can be put into `nft` text and netlink messages as it is.

use std::{
    io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::names;

/// A network hands out at most this many addresses, however wide its subnet is.
const MAX_POOL: i64 = 65_536;

/// One bridge with its addresses. Also kept as JSON in `state_dir/network.json`, so that engine, agent
/// and daemon of one host agree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkConfig {
    /// Bridge interface name, at most 15 bytes (`cni0` by contract; `cocoon up` picks `cocoon0`).
    pub bridge: String,
    /// Addresses for VMs.
    pub subnet: Ipv4Net,
    /// The bridge's own address, inside `subnet`.
    pub gateway: Ipv4Addr,
    /// Name servers handed out by DHCP.
    pub dns: Vec<Ipv4Addr>,
    /// How long a lease lasts.
    pub lease_time: Duration,
    /// VMs reach the world by masquerading behind the host; then nothing but answers, and what the host
    /// forwards by a DNAT rule, reaches them from other machines. Unset, the network is routed and open to
    /// whoever has a route to it. The host itself always reaches its VMs.
    pub masquerade: bool,
    /// Ports are isolated from one another unless this is set.
    pub vm_to_vm: bool,
    /// `network.json`, `leases.json`, lock and saved sysctls.
    pub state_dir: PathBuf,
    /// Unix socket that takes lease releases.
    pub control_socket: PathBuf,
}

/// Why a network configuration cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A value is wrong.
    #[error("network configuration: {0}")]
    Value(String),
    /// The kept copy is not one.
    #[error("network file {path} is corrupt: {message}; start the network daemon again to rewrite it")]
    Corrupt {
        /// Which file.
        path: String,
        /// What is wrong.
        message: String,
    },
    /// The file failed.
    #[error("network file {path}")]
    Io {
        /// Which file.
        path: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl NetworkConfig {
    /// The lease file.
    #[must_use]
    pub fn lease_file(&self) -> PathBuf {
        self.state_dir.join("leases.json")
    }

    /// The kept copy of this configuration.
    #[must_use]
    pub fn network_file(&self) -> PathBuf {
        self.state_dir.join("network.json")
    }

    /// Refuses what cannot work, naming the value.
    pub fn check(&self) -> Result<(), ConfigError> {
        names::check_bridge(&self.bridge).map_err(ConfigError::Value)?;
        self.pool()?;
        if self.lease_time < Duration::from_secs(60) || self.lease_time.as_secs() > u64::from(u32::MAX) {
            return Err(ConfigError::Value(format!(
                "a lease of {} s is out of range; give 60 s or more, below 2^32 s",
                self.lease_time.as_secs()
            )));
        }
        if self.dns.len() > 32 {
            return Err(ConfigError::Value(format!(
                "{} name servers are too many; give at most 32",
                self.dns.len()
            )));
        }
        Ok(())
    }

    /// The addresses that VMs can get, lowest first.
    pub fn pool(&self) -> Result<Vec<Ipv4Addr>, ConfigError> {
        let pool = hosts(self.subnet, self.gateway, MAX_POOL)?;
        if pool.is_empty() {
            return Err(ConfigError::Value(format!(
                "subnet {} has no address for a VM; give a wider one",
                self.subnet
            )));
        }
        Ok(pool)
    }

    /// Reads the copy that the daemon keeps in `state_dir`. A folder that was copied or moved is itself, whatever the
    /// file says: nothing of the folder that it was is meant.
    pub fn load(state_dir: &Path) -> Result<Self, ConfigError> {
        let path = state_dir.join("network.json");
        let name = path.display().to_string();
        let text = std::fs::read(&path).map_err(|source| ConfigError::Io { path: name.clone(), source })?;
        let kept: Self = serde_json::from_slice(&text)
            .map_err(|error| ConfigError::Corrupt { path: name, message: error.to_string() })?;
        Ok(kept.at(state_dir))
    }

    fn at(self, state_dir: &Path) -> Self {
        let here = state_dir.canonicalize().unwrap_or_else(|_| state_dir.to_owned());
        if self.state_dir.canonicalize().is_ok_and(|kept| kept == here) {
            return self;
        }
        let control_socket = match self.control_socket.strip_prefix(&self.state_dir) {
            Ok(rest) => here.join(rest),
            Err(_) => self.control_socket,
        };
        Self { state_dir: here, control_socket, ..self }
    }

    /// Writes the copy, durably, if it would change.
    pub(crate) fn save(&self) -> Result<(), ConfigError> {
        if Self::load(&self.state_dir).is_ok_and(|kept| kept == *self) {
            return Ok(());
        }
        let failed = |source| ConfigError::Io { path: self.network_file().display().to_string(), source };
        let text = serde_json::to_vec_pretty(self).map_err(|error| failed(error.into()))?;
        cocoon_kit::files::replace(&self.network_file(), &text, 0o600).map_err(failed)
    }
}

/// The first `count` host addresses of `cidr`, without `gateway` (cocoon-net §3). Host bits of `cidr`
/// are dropped; a subnet with fewer hosts gives them all.
pub fn subnet_ips(cidr: &str, gateway: &str, count: i64) -> Result<Vec<Ipv4Addr>, ConfigError> {
    let subnet = parse_subnet(cidr)?;
    let gateway = gateway
        .parse()
        .map_err(|_| ConfigError::Value(format!("gateway {gateway:?} is not an IPv4 address")))?;
    hosts(subnet, gateway, count)
}

/// The address after the network address: the gateway when none is given.
pub fn first_host(cidr: &str) -> Result<Ipv4Addr, ConfigError> {
    let subnet = parse_subnet(cidr)?;
    u32::from(subnet.network())
        .checked_add(1)
        .map(Ipv4Addr::from)
        .ok_or_else(|| ConfigError::Value(format!("subnet {cidr} has no host address")))
}

fn parse_subnet(cidr: &str) -> Result<Ipv4Net, ConfigError> {
    cidr.parse()
        .map_err(|_| ConfigError::Value(format!("{cidr:?} is not an IPv4 subnet such as 172.20.100.0/24")))
}

fn hosts(subnet: Ipv4Net, gateway: Ipv4Addr, count: i64) -> Result<Vec<Ipv4Addr>, ConfigError> {
    let count = usize::try_from(count)
        .map_err(|_| ConfigError::Value(format!("{count} addresses cannot be given; ask for 0 or more")))?;
    let (network, broadcast) = (subnet.network(), subnet.broadcast());
    if !subnet.contains(&gateway) || gateway == network || gateway == broadcast {
        return Err(ConfigError::Value(format!(
            "gateway {gateway} is not a host address of subnet {subnet}"
        )));
    }
    let inner = u32::from(network).saturating_add(1)..u32::from(broadcast);
    Ok(inner.map(Ipv4Addr::from).filter(|address| *address != gateway).take(count).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_was_copied_or_moved_means_itself_and_one_under_another_name_is_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let [one, two, link] = ["one", "two", "link"].map(|name| root.join(name));
        std::fs::create_dir_all(&one).unwrap();
        let kept = crate::testing::network(&one);
        let kept = NetworkConfig { control_socket: one.join("control.sock"), state_dir: one.clone(), ..kept };
        kept.save().unwrap();
        std::os::unix::fs::symlink(&one, &link).unwrap();
        for same in [&one, &link] {
            assert_eq!(NetworkConfig::load(same).unwrap(), kept);
        }
        std::fs::create_dir(&two).unwrap();
        std::fs::copy(one.join("network.json"), two.join("network.json")).unwrap();
        let itself =
            NetworkConfig { control_socket: two.join("control.sock"), state_dir: two.clone(), ..kept };
        for original_lives in [true, false] {
            assert_eq!(NetworkConfig::load(&two).unwrap(), itself, "{original_lives}");
            let _ = std::fs::remove_dir_all(&one);
        }
    }

    #[test]
    fn a_pool_has_the_hosts_of_the_subnet_without_the_gateway() {
        let ips = |cidr, gateway, count| subnet_ips(cidr, gateway, count).map(|ips| ips.len()).ok();
        assert_eq!(ips("10.0.0.0/24", "10.0.0.1", 1000), Some(253));
        assert_eq!(ips("10.0.0.5/24", "10.0.0.1", 2), Some(2));
        assert_eq!(ips("10.0.0.0/30", "10.0.0.1", 10), Some(1));
        assert_eq!(ips("10.0.0.0/24", "10.0.0.1", 0), Some(0));
        for (cidr, gateway, count) in [
            ("10.0.0.0/24", "10.0.0.255", 2),
            ("10.0.0.0/24", "10.0.0.0", 2),
            ("10.0.0.0/24", "10.0.1.1", 2),
            ("10.0.0.0/24", "", 2),
            ("10.0.0.0/24", "10.0.0.1", -1),
            ("fd00::/64", "fd00::1", 2),
            ("10.0.0.0/32", "10.0.0.0", 2),
            ("bad", "10.0.0.1", 2),
        ] {
            assert_eq!(ips(cidr, gateway, count), None, "{cidr} {gateway} {count}");
        }
        assert_eq!(first_host("255.255.255.248/29").ok(), Some(Ipv4Addr::new(255, 255, 255, 249)));
    }
}
