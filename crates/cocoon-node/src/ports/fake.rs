//! In-memory ports for tests.

use std::collections::BTreeMap;

use crate::record::{OwnerRecord, Phase};

/// A record of a running VM.
pub(crate) fn record(vm_name: &str) -> OwnerRecord {
    OwnerRecord {
        vm_name: vm_name.to_owned(),
        namespace: "default".to_owned(),
        pod: "demo-0".to_owned(),
        uid: "uid-1".to_owned(),
        image: "demo:latest".to_owned(),
        snapshot_on_delete: true,
        keep_snapshot: false,
        annotations: BTreeMap::new(),
        phase: Phase::Up,
        vm_id: "ID1".to_owned(),
        macs: vec!["02:00:00:00:00:01".to_owned()],
        accepted: jiff::Timestamp::UNIX_EPOCH,
        started: None,
        restarts: 0,
        last_restart: None,
        restart_pending: false,
        written: None,
        woken_from: None,
        woken_ready: false,
        import_left: false,
    }
}
