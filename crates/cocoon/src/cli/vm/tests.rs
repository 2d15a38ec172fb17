//! What is said before the host is looked at.

use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Harness {
    #[command(subcommand)]
    command: VmCommand,
}

fn said(line: &str) -> Result<(), String> {
    let words = std::iter::once("vm").chain(line.split(' '));
    let result = match Harness::try_parse_from(words).map_err(|error| error.to_string())?.command {
        VmCommand::Run(args) => args.check(),
        VmCommand::Clone(args) => args.check(),
        _ => Ok(()),
    };
    result.map_err(|error| error.to_string())
}

#[test]
fn run_is_checked_like_the_contract_says() {
    for (line, word) in [
        ("run --name x img", None),
        ("run --name A.b-c_d img", None),
        ("run --name 0 img", None),
        ("run --name x --memory 512M --storage 10G img", None),
        ("run --name x --memory 1GiB --cpu 1 --nics -1 img", None),
        ("run --name=-x img", Some("name")),
        ("run --name=.x img", Some("name")),
        ("run --name=_x img", Some("name")),
        ("run --name=a/b img", Some("name")),
        ("run --name=ü img", Some("name")),
        (&format!("run --name {} img", "a".repeat(63)), None),
        (&format!("run --name {} img", "a".repeat(64)), Some("63")),
        ("run --name x --cpu 0 img", Some("--cpu")),
        ("run --name x --memory 511M img", Some("512M")),
        ("run --name x --memory 20Gi img", Some("not a size")),
        ("run --name x --memory -1 img", Some("not a size")),
        ("run --name x --storage 10737418239 img", Some("10G")),
        ("run --name x --queue-size -1 img", Some("negative")),
        ("run --name x --queue-size 256 img", Some("fixed")),
        ("run --name x --user Root img", Some("--user")),
        ("run --name x --password a;b img", Some("--password")),
        ("run --name x --password a$b img", Some("--password")),
        ("run --name x --network n img", Some("--network-dir")),
        ("run --name x --fc img", Some("Firecracker")),
        ("run --name x --windows img", Some("Windows")),
        ("run --name x --data-disk size=16M img", Some("data disks")),
        ("run --name x --cpu-weight 5 img", Some("--cpu-weight")),
        ("clone --name x s", None),
        ("clone s", None),
        ("clone --name a/b s", Some("name")),
        ("clone --from-dir /x", Some("--from-dir")),
    ] {
        match (said(line), word) {
            (Ok(()), None) => {}
            (Err(error), Some(word)) => assert!(error.contains(word), "{line}: {error}"),
            (other, _) => panic!("{line}: {other:?}"),
        }
    }
}

#[test]
fn a_vm_without_a_name_is_named_after_its_image() {
    for (image, name) in [
        ("ubuntu", "cocoon-ubuntu"),
        ("ubuntu:latest", "cocoon-ubuntu"),
        ("ubuntu:24.04", "cocoon-ubuntu-24.04"),
        ("ghcr.io/org/app:1", "cocoon-org-app-1"),
        ("127.0.0.1:5599/oci:1", "cocoon-oci-1"),
        ("localhost/x", "cocoon-x"),
        ("org/app@sha256:abc", "cocoon-org-app"),
    ] {
        assert_eq!(default_name(image), name, "{image}");
        check_name(&default_name(image)).unwrap();
    }
    assert_eq!(default_name(&"x".repeat(100)).len(), 63);
}

#[test]
fn a_clone_has_the_sizes_of_its_snapshot() {
    let snapshot = Snapshot {
        envelope: cocoon_oci::snapshot::Envelope {
            cpu: 2,
            memory: 1 << 30,
            storage: 10 << 30,
            nics: 1,
            ..Default::default()
        },
        created_at: jiff::Timestamp::UNIX_EPOCH,
        folder: "/x".into(),
    };
    for (line, word) in [
        ("clone s", None),
        ("clone --cpu 2 --memory 1G --storage 10G --nics 1 s", None),
        ("clone --nics 0 s", None),
        ("clone --cpu 1 s", Some("below snapshot minimum")),
        ("clone --memory 600M s", Some("below snapshot minimum")),
        ("clone --cpu 4 s", Some("a clone has")),
        ("clone --nics 2 s", Some("nic count mismatch")),
        ("clone --cpu -1 s", Some("negative")),
        ("clone --memory x s", Some("not a size")),
    ] {
        let words = std::iter::once("vm").chain(line.split(' '));
        let VmCommand::Clone(args) = Harness::try_parse_from(words).unwrap().command else {
            panic!("{line}")
        };
        match (args.check_sizes(&snapshot).map_err(|error| error.to_string()), word) {
            (Ok(()), None) => {}
            (Err(error), Some(word)) => assert!(error.contains(word), "{line}: {error}"),
            (other, _) => panic!("{line}: {other:?}"),
        }
    }
}
