//! The program itself, on an empty host: exit status, stdout, and the phrases that callers match. The
//! rows with a contract number are golden vectors (`engine.json`) of the original. Needs root.

use std::process::{Command, Output, Stdio};

struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn run(&self, line: &str) -> Output {
        let words: Vec<&str> = line.split(' ').filter(|word| !word.is_empty()).collect();
        let at = |name: &str| self.folder.path().join(name);
        Command::new(env!("CARGO_BIN_EXE_cocoon"))
            .arg("--root-dir")
            .arg(at("root"))
            .arg("--run-dir")
            .arg(at("run"))
            .arg("--log-dir")
            .arg(at("log"))
            .args(words)
            .stdin(Stdio::null())
            .output()
            .expect("the program starts")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn exit_status_stdout_and_phrases_are_those_of_the_contract() {
    let host = Host::new();
    for (line, code, stdout, phrase) in [
        ("vm list", 0, "No VMs found.\n", ""),                     // eng-0001
        ("snapshot list", 0, "No snapshots found.\n", ""),         // eng-0002
        ("image list", 0, "No images found.\n", ""),               // eng-0003
        ("vm list -o json", 0, "No VMs found.\n", ""),             // eng-0004
        ("snapshot list -o json", 0, "No snapshots found.\n", ""), // eng-0005
        ("image list -o json", 0, "No images found.\n", ""),       // eng-0006
        ("vm list -o yaml", 0, "No VMs found.\n", ""),             // eng-0010
        ("snapshot list -o yaml", 0, "No snapshots found.\n", ""), // eng-0011
        ("image list -o yaml", 0, "No images found.\n", ""),       // eng-0012
        ("snapshot list --vm nope", 1, "", "VM not found"),        // eng-0015
        ("vm rm nope", 1, "", "VM not found"),                     // eng-0018
        ("vm rm --force nope", 1, "", "VM not found"),             // eng-0019
        ("vm rm -o json nope", 1, "", "VM not found"),             // eng-0020
        ("vm start nope", 1, "", "VM not found"),                  // eng-0021
        ("vm stop nope", 1, "", "VM not found"),                   // eng-0023
        ("snapshot save nope", 1, "", "VM not found"),             // eng-0028
        ("snapshot save --name x nope", 1, "", "VM not found"),    // eng-0029
        ("snapshot inspect nope", 1, "", "snapshot not found"),    // eng-0030
        ("snapshot rm nope", 1, "", "snapshot not found"),         // eng-0031
        ("image inspect nope", 1, "", "not found in any backend"), // eng-0036
        ("image rm nope", 1, "", "not found in any backend"),      // eng-0037
        ("vm inspect ab", 1, "", "VM not found"),                  // eng-0039
        ("vm inspect", 1, "", ""),                                 // eng-0041
        ("vm run", 1, "", ""),                                     // eng-0043
        ("vm clone", 1, "", ""),                                   // eng-0044
        ("snapshot save", 1, "", ""),                              // eng-0045
        ("image import", 1, "", ""),                               // eng-0048
        ("--bogus", 1, "", ""),                                    // eng-0050
        ("bogus", 1, "", ""),                                      // eng-0051
        ("vm list --bogus", 1, "", ""),                            // eng-0053
        ("gc", 0, "", ""),                                         // eng-0056
        ("vm run --cpu x img", 1, "", ""),                         // eng-0058
        ("vm run --nics -1 --name x img", 1, "", "not resolved"),  // eng-0059
        ("--log-level bogus vm list", 1, "", ""),                  // eng-0060
        ("--config /nonexistent.yaml vm list", 1, "", ""),         // eng-0063
        ("vm run --name x --nics 0 img:1", 1, "", "not resolved"), // eng-0065
        ("vm run --name x --nics 0 --cpu 9999 img:1", 1, "", "not resolved"), // eng-0073
        ("vm run --nics 0 img:1", 1, "", "not resolved"),          // eng-0117
        ("vm exec nope -- true", 1, "", "VM not found"),
        ("vm logs nope", 1, "", "VM not found"),
        ("vm clone --name x nope", 1, "", "snapshot not found"),
        ("image import x", 1, "", "standard input is empty"),
        ("image import x /nonexistent.tar", 1, "", "/nonexistent.tar"),
        ("--root-dir /x up", 1, "", "after it"),
    ] {
        let done = host.run(line);
        let (out, err) = (text(&done.stdout), text(&done.stderr));
        assert_eq!((done.status.code(), out.as_str()), (Some(code), stdout), "{line}: {err}");
        assert!(err.contains(phrase), "{line}: {err}");
        let last = err.lines().last().unwrap_or_default();
        assert_eq!(last.starts_with("Error: "), code != 0, "{line}: {err}");
        assert!(!err.contains("Usage:"), "{line} prints the usage: {err}");
    }
}

#[test]
fn commands_that_make_nothing_make_no_data_folder() {
    for (line, code, stdout, phrase) in [
        ("vm list", 0, "No VMs found.\n", "--root-dir"),
        ("snapshot list", 0, "No snapshots found.\n", "--root-dir"),
        ("image list -o json", 0, "No images found.\n", "--root-dir"),
        ("gc", 0, "", "gc: 0 removed"),
        ("vm inspect nope", 1, "", "VM not found"),
        ("vm logs nope", 1, "", "VM not found"),
        ("vm exec nope -- true", 1, "", "VM not found"),
        ("vm start nope", 1, "", "VM not found"),
        ("vm stop nope", 1, "", "VM not found"),
        ("vm rm --force nope", 1, "", "VM not found"),
        ("vm clone --name x nope", 1, "", "snapshot not found"),
        ("vm run --name x nope", 1, "", "not resolved"),
        ("snapshot inspect nope", 1, "", "snapshot not found"),
        ("snapshot save nope", 1, "", "VM not found"),
        ("snapshot list --vm nope", 1, "", "VM not found"),
        ("snapshot rm nope", 1, "", "snapshot not found"),
        ("image inspect nope", 1, "", "not found in any backend"),
        ("image rm nope", 1, "", "not found in any backend"),
        ("version", 0, "Version", ""),
    ] {
        let host = Host::new();
        let done = host.run(line);
        let (out, err) = (text(&done.stdout), text(&done.stderr));
        assert_eq!(done.status.code(), Some(code), "{line}: {err}");
        assert!(out.starts_with(stdout) && err.contains(phrase), "{line}: {out} {err}");
        let left: Vec<_> = std::fs::read_dir(host.folder.path()).expect("the folder").collect();
        assert!(left.is_empty(), "{line} made {left:?}");
    }
}

/// As the node agent of a pod that boots `demo:1` would have written it.
fn own(host: &Host) {
    let record = serde_json::json!({
        "vm_name": "vk-default-demo-0-8aaf2c", "namespace": "default", "pod": "demo-0", "uid": "u", "image": "demo:1",
        "snapshot_on_delete": true, "keep_snapshot": false, "annotations": {}, "phase": "Up", "vm_id": "VMID",
        "macs": [], "accepted": "2026-01-02T03:04:05Z", "started": null, "restarts": 0, "last_restart": null,
        "restart_pending": false, "written": null, "woken_from": null, "woken_ready": false, "import_left": false,
    });
    let records = cocoon_node::ports::real::SqliteRecords::open(&host.folder.path().join("root/node.db"));
    let record = serde_json::from_value(record).expect("a record");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let put = async { cocoon_node::ports::Records::put(&records.expect("the records"), &record).await };
    runtime.block_on(put).expect("written");
}

#[test]
fn what_a_pod_needs_is_removed_with_force_only_and_then_not_silently() {
    let host = Host::new();
    let tar = host.folder.path().join("l.tar").display().to_string();
    let made = Command::new("tar").args(["-cf", &tar, "-C", "/etc", "hostname"]).status();
    assert!(made.expect("tar is missing; apt-get install tar").success());
    for name in ["demo:1", "other:1"] {
        assert!(host.run(&format!("image import {name} {tar}")).status.success());
    }
    own(&host);
    let refused = host.run("image rm other:1 demo:1");
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    for words in ["Error: image demo:1", "default/demo-0", "kubectl delete pod -n default demo-0", "--force"]
    {
        assert!(said.contains(words), "{said}");
    }
    assert!(host.run("image inspect other:1").status.success(), "one that is refused keeps all");
    let done = host.run("image rm other:1");
    assert!(done.status.success());
    assert_eq!(text(&done.stderr), "removed other:1\n", "without an owner nothing is said");
    let done = host.run("image rm --force demo:1");
    assert!(done.status.success());
    assert!(text(&done.stderr).starts_with("warning: image demo:1"), "{}", text(&done.stderr));
}

#[test]
fn help_and_version_are_data() {
    let host = Host::new();
    for (line, word) in [
        ("version", "OS/Arch: linux/"),
        ("--version", "cocoon "),
        ("--help", "cocoon up"),
        ("vm run --help", "Exit status"),
        ("vm exec --help", "Exit status"),
        ("image import -h", "--strip-setuid"),
    ] {
        let done = host.run(line);
        let out = text(&done.stdout);
        assert!(done.status.success() && out.contains(word), "{line}: {out}");
        assert_eq!(text(&done.stderr), "", "{line}");
    }
}

#[test]
fn an_image_is_imported_listed_and_removed() {
    let host = Host::new();
    let tree = host.folder.path().join("tree");
    std::fs::create_dir(&tree).expect("a folder");
    std::fs::write(tree.join("hello"), "hello").expect("a file");
    let tar = host.folder.path().join("l.tar").display().to_string();
    let made = Command::new("tar").args(["-cf", &tar, "-C"]).arg(&tree).arg(".").status();
    assert!(made.expect("tar is missing; apt-get install tar").success());

    let done = host.run(&format!("image import demo:1 {tar}"));
    assert!(done.status.success() && done.stdout.is_empty(), "{}", text(&done.stderr));
    let image: serde_json::Value =
        serde_json::from_slice(&host.run("image inspect demo:1").stdout).expect("JSON");
    assert_eq!((&image["name"], &image["type"]), (&"demo:1".into(), &"oci".into()));
    for format in ["yaml", "wide", "JSON"] {
        let refused = host.run(&format!("image list -o {format}"));
        let said = text(&refused.stderr);
        assert_eq!((refused.status.code(), refused.stdout.len()), (Some(1), 0), "{said}");
        assert!(said.contains(format) && said.contains("-o table or -o json"), "{said}");
    }
    let listed = text(&host.run("image list").stdout);
    assert!(listed.starts_with("NAME") && listed.lines().count() == 2, "{listed}");
    assert!(!host.run("image rm demo:1 nope").status.success(), "one unknown name removes none");
    assert!(host.run("image rm demo:1").status.success());
    assert_eq!(text(&host.run("image list").stdout), "No images found.\n");
    let swept = text(&host.run("gc").stderr);
    assert!(swept.contains("1 removed"), "{swept}");
}
