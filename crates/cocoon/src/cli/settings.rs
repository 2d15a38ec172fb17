//! Flags of all engine commands, and what they come to.
//!
//! Two stages: [`Flags`] is what was typed; [`Settings::resolve`] joins flags, environment
//! (`COCOON_<KEY>`), configuration file and defaults, in that order, without looking anywhere else. The
//! flags may stand before or after the command.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::Args;
use cocoon_engine::engine::{Engine, EngineConfig, MemoryRecipe};
use cocoon_kit::world::RealWorld;
use cocoon_net::config::NetworkConfig;
use serde::Deserialize;

use crate::version;

/// How long a fresh guest may take; software emulation on a busy machine is slow.
const BOOT_TIMEOUT: u64 = 120;
const STOP_TIMEOUT: u64 = 30;

/// Global flags (`engine-cli` §0), as typed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Global options")]
pub struct Flags {
    /// Configuration file (YAML); the keys are the long flags' names with underscores.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Data folder: images, snapshots, records [env COCOON_ROOT_DIR; default /var/lib/cocoon].
    #[arg(long, value_name = "DIR")]
    pub root_dir: Option<PathBuf>,
    /// Disks and sockets of the VMs; not on a tmpfs [env COCOON_RUN_DIR; default <root-dir>/run].
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Logs and consoles [env COCOON_LOG_DIR; default <root-dir>/log if there is one, else /var/log/cocoon].
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Log filter, such as info or cocoon_engine=debug [env COCOON_LOG_LEVEL; default info].
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Folder with vmlinuz and initrd.img for images without a kernel [env COCOON_BOOT_BUNDLE; default
    /// /usr/share/cocoon/bundle].
    #[arg(long, value_name = "DIR")]
    pub boot_bundle: Option<PathBuf>,
    /// Folder with the network.json of `cocoon net` or `cocoon up`; without one VMs have no NIC [env
    /// COCOON_NETWORK_DIR; default <root-dir>/net].
    #[arg(long, value_name = "DIR")]
    pub network_dir: Option<PathBuf>,
    /// QEMU program [env COCOON_QEMU; default qemu-system-x86_64].
    #[arg(long, value_name = "FILE")]
    pub qemu: Option<PathBuf>,
    /// Accepted for compatibility; networks come from --network-dir [env COCOON_CNI_CONF_DIR].
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub cni_conf_dir: Option<PathBuf>,
    /// Accepted for compatibility; networks come from --network-dir [env COCOON_CNI_BIN_DIR].
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    pub cni_bin_dir: Option<PathBuf>,
    /// Accepted for compatibility; guests learn their name servers by DHCP [env COCOON_DNS].
    #[arg(long, value_name = "LIST", hide_short_help = true)]
    pub dns: Option<String>,
}

impl Flags {
    /// These flags, and where one was not given, the other's.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            config: self.config.or(other.config),
            root_dir: self.root_dir.or(other.root_dir),
            run_dir: self.run_dir.or(other.run_dir),
            log_dir: self.log_dir.or(other.log_dir),
            log_level: self.log_level.or(other.log_level),
            boot_bundle: self.boot_bundle.or(other.boot_bundle),
            network_dir: self.network_dir.or(other.network_dir),
            qemu: self.qemu.or(other.qemu),
            cni_conf_dir: self.cni_conf_dir.or(other.cni_conf_dir),
            cni_bin_dir: self.cni_bin_dir.or(other.cni_bin_dir),
            dns: self.dns.or(other.dns),
        }
    }
}

/// The configuration file. Unknown keys are ignored, as the contract asks.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    root_dir: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    log_dir: Option<PathBuf>,
    log_level: Option<String>,
    log: LogFile,
    boot_bundle: Option<PathBuf>,
    network_dir: Option<PathBuf>,
    qemu: Option<PathBuf>,
    dns: Option<String>,
    stop_timeout_seconds: Option<u64>,
    boot_timeout_seconds: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LogFile {
    level: Option<String>,
}

/// What the flags come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// See [`Flags::root_dir`].
    pub root_dir: PathBuf,
    /// See [`Flags::run_dir`].
    pub run_dir: PathBuf,
    /// See [`Flags::log_dir`].
    pub log_dir: PathBuf,
    /// See [`Flags::log_level`].
    pub log_level: String,
    /// See [`Flags::boot_bundle`].
    pub boot_bundle: PathBuf,
    /// See [`Flags::network_dir`].
    pub network_dir: PathBuf,
    /// See [`Flags::qemu`].
    pub qemu: PathBuf,
    /// For `vm stop` without --timeout.
    pub stop_timeout: Duration,
    /// For `vm run` and `vm start`.
    pub boot_timeout: Duration,
}

impl Settings {
    /// Flags win over the environment, that over the file, that over defaults. `file` is the content of
    /// [`Flags::config`].
    pub fn resolve(flags: Flags, env: impl Fn(&str) -> Option<String>, file: &str) -> anyhow::Result<Self> {
        let config = flags.config.clone();
        let file: Option<File> = if file.trim().is_empty() {
            None
        } else {
            let name = config.unwrap_or_default();
            serde_yaml_ng::from_str(file).with_context(|| format!("configuration file {}", name.display()))?
        };
        let file = file.unwrap_or_default();
        let env = |key: &str| env(&format!("COCOON_{key}")).filter(|value| !value.is_empty());
        let path = |flag: Option<PathBuf>, key: &str, file: Option<PathBuf>, default: PathBuf| {
            flag.or_else(|| env(key).map(PathBuf::from)).or(file).unwrap_or(default)
        };
        let root_dir = path(flags.root_dir, "ROOT_DIR", file.root_dir, "/var/lib/cocoon".into());
        let log_level = flags.log_level.or_else(|| env("LOG_LEVEL")).or(file.log_level).or(file.log.level);
        let log_level = log_level.unwrap_or_else(|| "info".to_owned());
        check_level(&log_level)?;
        check_dns(
            &flags.dns.or_else(|| env("DNS")).or(file.dns).unwrap_or_else(|| "8.8.8.8,1.1.1.1".to_owned()),
        )?;
        Ok(Self {
            run_dir: path(flags.run_dir, "RUN_DIR", file.run_dir, root_dir.join("run")),
            log_dir: path(flags.log_dir, "LOG_DIR", file.log_dir, default_log_dir(&root_dir)),
            boot_bundle: path(
                flags.boot_bundle,
                "BOOT_BUNDLE",
                file.boot_bundle,
                "/usr/share/cocoon/bundle".into(),
            ),
            network_dir: path(flags.network_dir, "NETWORK_DIR", file.network_dir, root_dir.join("net")),
            qemu: path(flags.qemu, "QEMU", file.qemu, "qemu-system-x86_64".into()),
            root_dir,
            log_level,
            stop_timeout: Duration::from_secs(file.stop_timeout_seconds.unwrap_or(STOP_TIMEOUT)),
            boot_timeout: Duration::from_secs(file.boot_timeout_seconds.unwrap_or(BOOT_TIMEOUT)),
        })
    }

    /// [`Settings::resolve`] with this process' environment and files.
    pub fn load(flags: Flags) -> anyhow::Result<Self> {
        let config = flags.config.clone().or_else(|| std::env::var_os("COCOON_CONFIG").map(PathBuf::from));
        let file = match &config {
            None => String::new(),
            Some(path) => std::fs::read_to_string(path)
                .with_context(|| format!("configuration file {} cannot be read", path.display()))?,
        };
        Self::resolve(Flags { config, ..flags }, |key| std::env::var(key).ok(), &file)
    }

    /// The network of VMs, if there is one.
    pub fn network(&self) -> anyhow::Result<Option<NetworkConfig>> {
        if !self.network_dir.join("network.json").exists() {
            return Ok(None);
        }
        let load = NetworkConfig::load(&self.network_dir);
        load.map(Some).with_context(|| format!("the network in {}", self.network_dir.display()))
    }

    /// The engine on these folders.
    pub async fn engine(&self, memory: MemoryRecipe) -> anyhow::Result<Engine> {
        need_root()?;
        version::check(&self.root_dir)?;
        let config = EngineConfig {
            root_dir: self.root_dir.clone(),
            run_dir: self.run_dir.clone(),
            log_dir: self.log_dir.clone(),
            boot_bundle: self.boot_bundle.clone(),
            network: self.network()?,
            qemu: found(&self.qemu),
            memory,
            boot_timeout: self.boot_timeout,
        };
        Ok(Engine::open(config, std::sync::Arc::new(RealWorld)).await?)
    }

    /// The engine, where there is something already: only commands that make something make folders. `None`
    /// is said on stderr, since a wrong --root-dir looks the same.
    pub async fn existing(&self, memory: MemoryRecipe) -> anyhow::Result<Option<Engine>> {
        if self.root_dir.join("engine.db").exists() {
            return self.engine(memory).await.map(Some);
        }
        need_root()?;
        version::check(&self.root_dir)?;
        super::output::note(format_args!(
            "note: {} has nothing of cocoon yet; another data folder is named with --root-dir",
            self.root_dir.display()
        ));
        Ok(None)
    }

    /// The node agent's records, if one ever ran on this data folder.
    #[must_use]
    pub fn node_records(&self) -> PathBuf {
        self.root_dir.join("node.db")
    }

    /// Where half-made things of an import go.
    #[must_use]
    pub fn temp_dir(&self) -> PathBuf {
        Path::new(&self.root_dir).join("oci/temp")
    }
}

fn need_root() -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("VMs and images need root (mounts, taps, file owners); run it with sudo");
    }
    Ok(())
}

/// The contract's folder, or the one that `cocoon up` keeps in its data folder.
fn default_log_dir(root_dir: &Path) -> PathBuf {
    let of_up = root_dir.join("log");
    if of_up.is_dir() { of_up } else { "/var/log/cocoon".into() }
}

/// Where a program is: a bare name is looked for in `PATH`; one that is not there stays as it is, for the
/// engine to say so.
#[must_use]
pub fn found(program: &Path) -> PathBuf {
    if program.components().count() != 1 {
        return program.to_owned();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
        .unwrap_or_else(|| program.to_owned())
}

/// One of the usual words, or filter directives (`target=level`).
fn check_level(level: &str) -> anyhow::Result<()> {
    let word = |text: &str| ["trace", "debug", "info", "warn", "error", "off"].contains(&text);
    let fine = level.split(',').map(str::trim).all(|part| {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        word(&level.to_ascii_lowercase())
    });
    if !fine {
        bail!("log level {level:?} is unknown; use trace, debug, info, warn, error, or target=level");
    }
    Ok(())
}

fn check_dns(list: &str) -> anyhow::Result<()> {
    for entry in list.split([',', ';']).map(str::trim).filter(|entry| !entry.is_empty()) {
        if entry.parse::<IpAddr>().is_err() {
            bail!("--dns {entry:?} is not an IP address; separate several by comma or semicolon");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn the_defaults_are_those_of_the_contract() {
        let settings = Settings::resolve(Flags::default(), nothing, "").unwrap();
        assert_eq!(settings.root_dir, Path::new("/var/lib/cocoon"));
        assert_eq!(settings.run_dir, Path::new("/var/lib/cocoon/run"));
        assert_eq!(settings.log_dir, Path::new("/var/log/cocoon"));
        assert_eq!(settings.network_dir, Path::new("/var/lib/cocoon/net"));
        assert_eq!((settings.log_level.as_str(), settings.stop_timeout), ("info", Duration::from_secs(30)));
    }

    #[test]
    fn flags_win_over_environment_over_file_over_defaults() {
        let flags = Flags { root_dir: Some("/flag".into()), config: Some("c".into()), ..Flags::default() };
        let env = |key: &str| match key {
            "COCOON_ROOT_DIR" | "COCOON_LOG_DIR" => Some("/env".to_owned()),
            "COCOON_QEMU" => Some(String::new()),
            _ => None,
        };
        let file = "root_dir: /file\nlog_dir: /file\nqemu: /file\nlog:\n  level: debug\nunknown: [1]\nstop_timeout_seconds: 5\n";
        let settings = Settings::resolve(flags, env, file).unwrap();
        assert_eq!(settings.root_dir, Path::new("/flag"));
        assert_eq!(settings.run_dir, Path::new("/flag/run"), "what is derived follows");
        assert_eq!(settings.log_dir, Path::new("/env"));
        assert_eq!(settings.qemu, Path::new("/file"), "an empty variable is none");
        assert_eq!((settings.log_level.as_str(), settings.stop_timeout), ("debug", Duration::from_secs(5)));
    }

    #[test]
    fn a_bare_program_name_is_looked_for_in_path() {
        assert!(found(Path::new("sh")).is_absolute());
        for kept in ["./sh", "/nowhere/sh", "no-such-program-of-ours"] {
            assert_eq!(found(Path::new(kept)), Path::new(kept));
        }
    }

    #[test]
    fn bad_values_name_themselves() {
        for (flags, file, word) in [
            (Flags { log_level: Some("bogus".into()), ..Flags::default() }, "", "bogus"),
            (Flags { dns: Some("8.8.8.8;dns.example".into()), ..Flags::default() }, "", "dns.example"),
            (Flags { config: Some("my.yaml".into()), ..Flags::default() }, "root_dir: [", "my.yaml"),
        ] {
            let error = Settings::resolve(flags, nothing, file).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        for level in ["INFO", "cocoon_node=debug,info", "off"] {
            check_level(level).unwrap();
        }
    }
}
