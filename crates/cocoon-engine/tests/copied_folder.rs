//! A data folder that was copied while its guest ran: two engines on one machine, with the same notes. Needs root,
//! QEMU, the boot bundle and the embedded parts.

#![allow(clippy::unwrap_used, clippy::unwrap_in_result, clippy::panic)]

#[allow(dead_code, reason = "each test program uses a part of it")]
mod support;

use std::{process::Command, sync::Arc};

use cocoon_engine::{
    engine::{Engine, EngineConfig},
    model::VmState,
};
use cocoon_kit::world::RealWorld;
use support::{Host, MIB, chain, on_a_fresh_host};

#[test]
fn a_copy_of_a_running_guest_starts_from_its_own_disk_and_goes_without_the_original() {
    on_a_fresh_host(
        "a_copy_of_a_running_guest_starts_from_its_own_disk_and_goes_without_the_original",
        || async {
            let host = Host::new().await;
            let original = host.run("vm-a", 256 * MIB).await;
            host.sh("vm-a", "echo mine > /run/memory; echo first > /root/disk; sync").await;
            let copy = copied(&host).await;
            let seen = copy.engine.list().await.unwrap();
            assert_eq!(seen.iter().map(|vm| (vm.state, vm.pid)).collect::<Vec<_>>(), [(VmState::Stale, 0)]);
            let own = copy.engine.start("vm-a").await.unwrap_or_else(|error| panic!("{}", chain(&error)));
            assert_ne!(own.pid, original.pid);
            assert_eq!(copy.sh("vm-a", "cat /root/disk; ls /run/memory || true").await, "first");
            copy.sh("vm-a", "echo second > /root/disk; sync").await;
            unharmed(&host, original.pid).await;
            copy.engine.remove("vm-a", true).await.unwrap();
            unharmed(&host, original.pid).await;
            // Another process, on the original's own folder, still has it, and ends it.
            let again = host.again(cocoon_engine::engine::MemoryRecipe::Auto).await;
            assert_eq!(again.list().await.unwrap()[0].pid, original.pid);
            again.remove("vm-a", true).await.unwrap();
            host.leaves_nothing().await;
        },
    );
}

/// A second host on a copy of the first one's folders.
async fn copied(host: &Host) -> Host {
    let folder = tempfile::tempdir().unwrap();
    let from = host.folder.path().join(".");
    assert!(Command::new("cp").arg("-a").arg(from).arg(folder.path()).status().unwrap().success());
    let config = EngineConfig {
        root_dir: folder.path().join("root"),
        run_dir: folder.path().join("root/run"),
        log_dir: folder.path().join("log"),
        ..host.engine.config().clone()
    };
    Host::of(Engine::open(config, Arc::new(RealWorld)).await.unwrap(), folder)
}

async fn unharmed(host: &Host, pid: u32) {
    let vm = host.engine.inspect("vm-a").await.unwrap();
    assert_eq!((vm.state, vm.pid), (VmState::Running, pid));
    assert_eq!(host.sh("vm-a", "cat /run/memory /root/disk").await, "mine\nfirst");
}
