//! Output, from fixed values.

use cocoon_engine::model::{Disk, Hypervisor, NetworkInterface, VmConfig};
use cocoon_oci::snapshot::{Empty, Envelope};

use super::*;

fn time() -> Timestamp {
    "2026-01-02T03:04:05.123456789Z".parse().unwrap()
}

fn vm() -> Vm {
    Vm {
        id: "AAAAAAAAAAAAAAAAAAAAAAAAAA".to_owned(),
        hypervisor: Hypervisor::Qemu,
        state: VmState::Running,
        config: VmConfig {
            name: "demo".to_owned(),
            cpu: 2,
            memory: 1 << 30,
            storage: 10 << 30,
            image: "cocoon-demo:1".to_owned(),
            image_digest: "sha256:ab".to_owned(),
            image_type: "oci".to_owned(),
            ..VmConfig::default()
        },
        pid: 77,
        socket_path: "/run/x/ctl.sock".to_owned(),
        network_configs: vec![NetworkInterface {
            tap: "ctAAAAAAAA-0".to_owned(),
            mac: "02:00:00:00:00:01".to_owned(),
            backend: "bridge".to_owned(),
            bridge_dev: "cocoon0".to_owned(),
        }],
        storage_configs: vec![Disk {
            path: "/x/cow.qcow2".to_owned(),
            ro: false,
            serial: "cocoon-cow".to_owned(),
            role: "cow".to_owned(),
        }],
        first_booted: true,
        snapshot_ids: [("S1".to_owned(), Empty {})].into(),
        paused: false,
        cloned_from: String::new(),
        warnings: Vec::new(),
        links_down: false,
        disk_full: false,
        transition_generation: 2,
        created_at: time(),
        updated_at: time(),
        started_at: Some(time()),
        stopped_at: None,
    }
}

fn snapshot() -> Snapshot {
    Snapshot {
        envelope: Envelope {
            id: "SSSSSSSSSSSSSSSSSSSSSSSSSS".to_owned(),
            name: "org/app:1.0".to_owned(),
            description: "bell\u{7}".to_owned(),
            image: "cocoon-demo:1".to_owned(),
            hypervisor: "qemu".to_owned(),
            cpu: 2,
            memory: 512 << 20,
            storage: 10 << 30,
            nics: 1,
            ..Envelope::default()
        },
        created_at: time(),
        folder: "/never/printed".into(),
    }
}

fn image() -> Image {
    Image {
        id: format!("sha256:{}", "ab".repeat(32)),
        name: "cocoon-demo:1".to_owned(),
        kind: "oci".to_owned(),
        size: 196_616,
        created_at: time(),
    }
}

#[test]
fn empty_lists_say_so_in_words_whatever_was_asked_for() {
    for output in ["", "table", "json", "yaml"] {
        assert_eq!(vms(&[], output).unwrap(), "No VMs found.\n");
        assert_eq!(snapshots(&[], output, false).unwrap(), "No snapshots found.\n");
        assert_eq!(snapshots(&[], output, true).unwrap(), "No snapshots found for VM.\n");
        assert_eq!(images(&[], output).unwrap(), "No images found.\n");
    }
}

#[test]
fn a_list_in_a_format_that_is_not_known_is_refused_with_those_that_are() {
    for output in ["yaml", "wide", "JSON", "name"] {
        for refused in
            [vms(&[vm()], output), snapshots(&[snapshot()], output, false), images(&[image()], output)]
        {
            let said = refused.unwrap_err().to_string();
            assert!(said.contains(output) && said.contains("-o table or -o json"), "{said}");
        }
    }
    assert_eq!(vms(&[vm()], "").unwrap(), vms(&[vm()], "table").unwrap());
}

#[test]
fn the_vm_object_has_the_keys_of_the_contract() {
    insta::assert_snapshot!(vms(&[vm()], "json").unwrap(), @r#"
    [
      {
        "id": "AAAAAAAAAAAAAAAAAAAAAAAAAA",
        "hypervisor": "qemu",
        "state": "running",
        "config": {
          "name": "demo",
          "cpu": 2,
          "memory": 1073741824,
          "storage": 10737418240,
          "image": "cocoon-demo:1",
          "image_digest": "sha256:ab",
          "image_type": "oci"
        },
        "pid": 77,
        "socket_path": "/run/x/ctl.sock",
        "network_configs": [
          {
            "tap": "ctAAAAAAAA-0",
            "mac": "02:00:00:00:00:01",
            "backend": "bridge",
            "bridge_dev": "cocoon0"
          }
        ],
        "storage_configs": [
          {
            "path": "/x/cow.qcow2",
            "ro": false,
            "serial": "cocoon-cow",
            "role": "cow"
          }
        ],
        "first_booted": true,
        "snapshot_ids": {
          "S1": {}
        },
        "transition_generation": 2,
        "created_at": "2026-01-02T03:04:05.123456789Z",
        "updated_at": "2026-01-02T03:04:05.123456789Z",
        "started_at": "2026-01-02T03:04:05.123456789Z"
      }
    ]
    "#);
}

#[test]
fn tables_line_up_and_show_no_control_characters() {
    let paused = Vm { paused: true, ..vm() };
    insta::assert_snapshot!(vms(&[vm(), paused], "").unwrap(), @r"
    ID                          NAME  STATE             CPU  MEMORY  STORAGE  IMAGE          CREATED
    AAAAAAAAAAAAAAAAAAAAAAAAAA  demo  running           2    1G      10G      cocoon-demo:1  2026-01-02 03:04:05
    AAAAAAAAAAAAAAAAAAAAAAAAAA  demo  running (paused)  2    1G      10G      cocoon-demo:1  2026-01-02 03:04:05
    ");
    insta::assert_snapshot!(snapshots(&[snapshot()], "table", false).unwrap(), @r"
    ID                          NAME         HYPERVISOR  CPU  MEMORY  STORAGE  IMAGE          CREATED              DESCRIPTION
    SSSSSSSSSSSSSSSSSSSSSSSSSS  org/app:1.0  qemu        2    512M    10G      cocoon-demo:1  2026-01-02 03:04:05  bell?
    ");
    insta::assert_snapshot!(images(&[image()], "table").unwrap(), @r"
    NAME           DIGEST               TYPE  SIZE  CREATED
    cocoon-demo:1  sha256:abababababab  oci   192K  2026-01-02 03:04:05
    ");
}

#[test]
fn a_text_of_any_length_is_cut_in_a_table_and_whole_as_json() {
    let mut long = snapshot();
    long.envelope.description = "d\u{e9}".repeat(100_000);
    let listed = [long];
    let table = snapshots(&listed, "table", false).unwrap();
    assert!(table.lines().all(|line| line.chars().count() < 1000), "a row is too long");
    assert!(table.contains('…'));
    assert!(snapshots(&listed, "json", false).unwrap().contains(&listed[0].envelope.description));
}

#[test]
fn snapshot_and_image_objects_have_the_keys_of_the_contract() {
    let keys = |text: &str| {
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        keys(&json(&snapshot()).unwrap()),
        "cpu created_at description hypervisor id image memory name nics storage"
    );
    assert_eq!(keys(&json(&image()).unwrap()), "created_at id name size type");
}
