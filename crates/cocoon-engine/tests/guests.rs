//! Real QEMU guests: boot, capture, clone, remove. Needs root, QEMU, the boot bundle and the embedded
//! parts (`cargo xtask bundle`, `cargo xtask embed`).

mod support;

use std::time::Instant;

use cocoon_engine::model::{CloneIdentity, VmState};
use support::{Host, MIB, on_a_fresh_host};

#[test]
fn a_guest_is_captured_and_its_clone_goes_on_where_it_was() {
    on_a_fresh_host("a_guest_is_captured_and_its_clone_goes_on_where_it_was", || async {
        let host = Host::new().await;
        let begun = Instant::now();
        let vm = host.run("vm-a", 256 * MIB).await;
        println!("FIGURE boot {:?}", begun.elapsed());
        assert_eq!((vm.state, vm.pid > 0, vm.first_booted), (VmState::Running, true, true));
        host.sh("vm-a", "echo in-memory > /run/mark; echo on-disk > /root/mark").await;
        host.sh("vm-a", "dd if=/dev/urandom of=/run/blob bs=1M count=20 2>/dev/null").await;
        let sum = host.sh("vm-a", "md5sum /run/blob").await;
        let begun = Instant::now();
        let snapshot = host.engine.capture("vm-a", "vm-a").await.unwrap();
        println!("FIGURE capture {:?}", begun.elapsed());
        assert!(host.engine.inspect("vm-a").await.unwrap().paused);
        host.engine.remove("vm-a", true).await.unwrap();
        assert_eq!(host.remains(), Vec::<String>::new());
        for round in 0..3 {
            let begun = Instant::now();
            let vm = host.clone_of("vm-a", "vm-a", CloneIdentity::Same).await;
            println!("FIGURE clone {round} {:?}", begun.elapsed());
            assert_eq!(vm.cloned_from, snapshot.envelope.id);
            assert_eq!(host.sh("vm-a", "cat /run/mark /root/mark").await, "in-memory\non-disk");
            assert_eq!(host.sh("vm-a", "md5sum /run/blob").await, sum);
            if round < 2 {
                host.engine.remove("vm-a", true).await.unwrap();
            }
        }
        let begun = Instant::now();
        host.engine.capture("vm-a", "vm-a").await.unwrap();
        println!("FIGURE capture of a clone {:?}", begun.elapsed());
        host.engine.remove("vm-a", true).await.unwrap();
        host.clone_of("vm-a", "vm-a", CloneIdentity::Same).await;
        assert_eq!(host.sh("vm-a", "cat /run/mark /root/mark").await, "in-memory\non-disk");
        assert_eq!(host.sh("vm-a", "md5sum /run/blob").await, sum);
        host.engine.remove("vm-a", true).await.unwrap();
        assert_eq!(host.remains(), Vec::<String>::new());
    });
}
