//! Whether this host has the memory that a guest is to have.
//!
//! Entry points: [`fits`] for a VM that boots, [`held`] for a snapshot. Memory is given out as guests touch it, so
//! more may be promised than there is; but a guest that alone is larger than the host never comes up, and
//! to be told so after a boot's whole limit helps nobody.

use super::blocking;
use crate::error::{BringUpError, Fault};

const MEMINFO: &str = "/proc/meminfo";

/// Refuses to boot VM `vm` with `memory` bytes where the whole host has less.
pub(crate) async fn fits(vm: &str, memory: u64) -> Result<(), BringUpError> {
    let total = total().await?;
    if memory <= total {
        return Ok(());
    }
    Err(BringUpError::Invalid(format!(
        "VM {vm}: {} of memory are asked for, and this host has {} in all (MemTotal in {MEMINFO}); ask for less \
         (`--memory`), or use a larger host",
        in_words(memory),
        in_words(total)
    )))
}

/// The same for the guest of a snapshot, whose memory is as large as it is.
pub(crate) async fn held(snapshot: &str, memory: u64) -> Result<(), BringUpError> {
    let total = total().await?;
    if memory <= total {
        return Ok(());
    }
    Err(BringUpError::SnapshotIncompatible {
        snapshot: snapshot.to_owned(),
        theirs: format!("{} of memory", in_words(memory)),
        ours: format!("{} in all", in_words(total)),
    })
}

async fn total() -> Result<u64, Fault> {
    let text = blocking("memory of this host", || std::fs::read_to_string(MEMINFO)).await?;
    total_of(&text).ok_or_else(|| Fault::new("memory of this host", format!("{MEMINFO} has no MemTotal")))
}

/// Bytes of `MemTotal`.
fn total_of(meminfo: &str) -> Option<u64> {
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"))?;
    kib.trim().parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// Bytes for people.
pub(crate) fn in_words(bytes: u64) -> String {
    match bytes >> 20 {
        mib if mib < 10 << 10 => format!("{mib} MiB"),
        mib => format!("{}.{} GiB", mib >> 10, ((mib & 1023) * 10) >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_guest_larger_than_the_host_is_refused_at_once_with_both_sizes() {
        for (memory, fine) in [(128 << 20, true), (64 << 40, false)] {
            assert_eq!((fits("big", memory).await.is_ok(), held("s", memory).await.is_ok()), (fine, fine));
        }
        let host = in_words(total().await.unwrap());
        let error = fits("big", 64 << 40).await.unwrap_err().to_string();
        assert!(error.contains("VM big: 65536.0 GiB") && error.contains(&host), "{error}");
        let error = held("s", 64 << 40).await.unwrap_err().to_string();
        assert!(
            error.contains("snapshot s") && error.contains("65536.0 GiB") && error.contains(&host),
            "{error}"
        );
    }

    #[test]
    fn the_hosts_memory_is_read_or_not_known() {
        for (text, total) in [
            ("MemTotal:       24612345 kB\nMemFree: 1 kB\n", Some(24_612_345 << 10)),
            ("MemFree: 1 kB\n", None),
            ("MemTotal: many kB\n", None),
            ("MemTotal: 1\n", None),
            ("MemTotal: 18446744073709551615 kB\n", None),
            ("", None),
        ] {
            assert_eq!(total_of(text), total, "{text:?}");
        }
        assert_eq!(in_words(640 << 30), "640.0 GiB");
        assert_eq!(in_words((24 << 30) - (1 << 28)), "23.7 GiB");
        assert_eq!(in_words(512 << 20), "512 MiB");
    }
}
