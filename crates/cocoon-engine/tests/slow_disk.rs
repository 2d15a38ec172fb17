//! A capture of a real guest on a host that does not get it done. Needs root, QEMU, the boot bundle and the
//! embedded parts. Takes as long as a guest may stand still: half a minute.

#![allow(clippy::unwrap_used, clippy::unwrap_in_result, clippy::panic)]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod support;

use std::{
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use cocoon_engine::model::CloneIdentity;
use support::{Host, MIB, chain, on_a_fresh_host, until};

const QEMU_IMG: &str = "/usr/bin/qemu-img";
/// What stands in for it, for ever, and can be told from any other process.
const HANGS: &str = "sleep 31415926";

#[test]
fn a_capture_that_hangs_lets_the_guest_go_on_and_leaves_nothing() {
    on_a_fresh_host("a_capture_that_hangs_lets_the_guest_go_on_and_leaves_nothing", || async {
        let host = Host::new().await;
        host.run("vm-a", 256 * MIB).await;
        host.engine.save("vm-a", "base", "").await.unwrap();
        host.engine.remove("vm-a", true).await.unwrap();
        // A clone's disk has a file below it, so `qemu-img` has to join them while the guest stands still.
        host.clone_of("base", "vm-b", CloneIdentity::New).await;
        let before = host.engine.capture("vm-b", "kept").await.unwrap();
        host.engine.resume("vm-b").await.unwrap();
        host.sh("vm-b", "echo in-memory > /run/mark").await;
        hang(host.folder.path());
        let begun = Instant::now();
        let (failed, ()) = tokio::join!(host.engine.capture("vm-b", "kept"), async {
            until("the helper", || async { hanging() == 1 }).await;
            assert!(
                host.engine.inspect("vm-b").await.unwrap().paused,
                "it waits for the frozen guest's disk"
            );
        });
        let (took, failed) = (begun.elapsed(), chain(&failed.unwrap_err()));
        println!("FIGURE a capture that hangs {took:?}: {failed}");
        assert!(took > Duration::from_secs(29) && took < support::HANGS, "{took:?}");
        for part in ["the disk of VM vm-b", "within 30 s", "--root-dir", "take the snapshot again"] {
            assert!(failed.contains(part), "{part}: {failed}");
        }
        assert!(!host.engine.inspect("vm-b").await.unwrap().paused);
        assert_eq!(host.sh("vm-b", "cat /run/mark").await, "in-memory");
        until("the helper's end", || async { hanging() == 0 }).await;
        let staging = host.engine.config().root_dir.join("snapshot/staging");
        until("the end of partial files", || async { std::fs::read_dir(&staging).unwrap().count() == 0 })
            .await;
        assert_eq!(host.engine.snapshot("kept").await.unwrap().envelope.id, before.envelope.id);
        // With a helper that works, the next capture does too.
        assert!(Command::new("umount").arg(QEMU_IMG).status().unwrap().success());
        let captured = host.engine.capture("vm-b", "kept").await.unwrap();
        host.engine.remove_captured("vm-b", &captured.envelope.id).await.unwrap();
        host.clone_of("kept", "vm-c", CloneIdentity::Same).await;
        assert_eq!(host.sh("vm-c", "cat /run/mark").await, "in-memory");
        host.engine.remove("vm-c", true).await.unwrap();
        host.leaves_nothing().await;
    });
}

/// Puts a program that never ends in the place of `qemu-img`, in this test's own mount namespace.
fn hang(folder: &Path) {
    let script = folder.join("qemu-img");
    std::fs::write(&script, format!("#!/bin/sh\nexec {HANGS}\n")).unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    let done = Command::new("mount").arg("--bind").arg(&script).arg(QEMU_IMG).status().unwrap();
    assert!(done.success());
}

/// How many of them run.
fn hanging() -> usize {
    let wanted = HANGS.replace(' ', "\0") + "\0";
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter(|entry| std::fs::read(entry.path().join("cmdline")).unwrap_or_default() == wanted.as_bytes())
        .count()
}
