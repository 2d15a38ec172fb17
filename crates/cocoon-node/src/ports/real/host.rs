//! What this host is and how it does, from `/proc`, `/etc` and the data file system.

use std::{
    fs,
    net::{IpAddr, UdpSocket},
    path::{Path, PathBuf},
};

use async_trait::async_trait;

use crate::ports::{Host, HostView};

/// This machine; the data folder is the engine's root.
#[derive(Debug, Clone)]
pub struct ThisHost {
    data: PathBuf,
}

impl ThisHost {
    /// This machine, with its data below `data`.
    #[must_use]
    pub const fn new(data: PathBuf) -> Self {
        Self { data }
    }

    fn read(&self) -> HostView {
        let memory = text("/proc/meminfo");
        let (disk, disk_available) = self.disk();
        HostView {
            cpus: std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64),
            memory: kib(&memory, "MemTotal:"),
            memory_available: kib(&memory, "MemAvailable:"),
            disk,
            disk_available,
            processes: processes(),
            kernel: text("/proc/sys/kernel/osrelease"),
            os_image: os_name(&text("/etc/os-release")),
            machine_id: text("/etc/machine-id"),
            boot_id: text("/proc/sys/kernel/random/boot_id"),
            system_uuid: text("/sys/class/dmi/id/product_uuid"),
            data_folder_fault: self.data_folder_fault(),
        }
    }

    /// Bytes of the data file system: all, available.
    fn disk(&self) -> (u64, u64) {
        rustix::fs::statvfs(&self.data)
            .map_or((0, 0), |facts| (facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize))
    }

    fn data_folder_fault(&self) -> Option<String> {
        let probe = self.data.join(".node-write-check");
        let written = fs::write(&probe, b"ok").and_then(|()| fs::remove_file(&probe));
        written.err().map(|error| format!("data folder {} takes no writes: {error}", self.data.display()))
    }
}

#[async_trait]
impl Host for ThisHost {
    async fn view(&self) -> HostView {
        let host = self.clone();
        tokio::task::spawn_blocking(move || host.read()).await.unwrap_or_default()
    }

    fn address(&self) -> Option<IpAddr> {
        // Connecting a UDP socket sends nothing; it only asks the kernel for the route's address.
        let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
        socket.connect("192.0.2.1:9").ok()?;
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
    }
}

fn text(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Bytes behind a key of `/proc/meminfo`, which counts in KiB.
fn kib(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0).saturating_mul(1024)
}

fn os_name(text: &str) -> String {
    let line = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    line.unwrap_or("Linux").trim_matches('"').to_owned()
}

/// Process ids in use and the limit. `/proc/loadavg` ends "running/all last-pid".
fn processes() -> (u64, u64) {
    let all = text("/proc/loadavg");
    let used = all.split_whitespace().nth(3).and_then(|pair| pair.split('/').nth(1)?.parse().ok());
    (used.unwrap_or(0), text("/proc/sys/kernel/pid_max").parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn this_host_has_processors_memory_and_a_folder_that_can_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let view = ThisHost::new(folder.path().to_owned()).view().await;
        assert!(view.cpus > 0 && view.memory > 0 && view.disk > 0 && !view.kernel.is_empty());
        assert_eq!(view.data_folder_fault, None);
        let missing = ThisHost::new(folder.path().join("missing")).view().await;
        assert!(missing.data_folder_fault.unwrap().contains("takes no writes"));
    }

    #[test]
    fn meminfo_counts_in_kib() {
        assert_eq!(kib("MemTotal:       1000 kB\nMemAvailable:  5 kB", "MemAvailable:"), 5120);
        assert_eq!(kib("", "MemTotal:"), 0);
    }
}
