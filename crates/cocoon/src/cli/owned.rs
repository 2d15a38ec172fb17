//! Whose an object is: what the node agent of the same data folder has recorded.
//!
//! Entry point: [`Owners::of`]. A pod's VM, snapshots and image are looked after by its agent; taking one away
//! behind its back makes the pod fail or forget. So removing one is refused without --force, naming the pod and
//! the way through Kubernetes, and with --force it is said what it does. An object without an owner is served
//! exactly as the contract says, and a data folder without an agent has no owners.

use anyhow::bail;
use cocoon_engine::model::{Image, Vm};
use cocoon_meta::{fork_baseline_name, hibernate_import_name, keys};
use cocoon_node::{
    planner::live_name,
    ports::{PortResult, Records as _, real::SqliteRecords},
    record::{OwnerRecord, Phase, Saved},
};
use cocoon_oci::snapshot::Envelope;

use super::{output, settings::Settings};

/// The owners of a data folder's objects.
#[derive(Debug)]
pub struct Owners {
    /// Or why they cannot be told; then anything may have one.
    known: Result<Vec<OwnerRecord>, String>,
}

impl Owners {
    /// Reads the agent's records, whether it runs or not.
    pub async fn of(settings: &Settings) -> Self {
        let read = async || -> PortResult<Vec<OwnerRecord>> {
            match SqliteRecords::read_only(&settings.node_records())? {
                Some(records) => records.load().await,
                None => Ok(Vec::new()),
            }
        };
        Self { known: read().await.map_err(|error| error.trouble().message) }
    }

    /// What removing a VM means to the pod that owns it.
    #[must_use]
    pub fn vm(&self, vm: &Vm) -> Option<String> {
        self.claim(&format!("VM {}", vm.config.name), |what, record| {
            is_of(record, vm).then(|| {
                format!(
                    "{what} belongs to pod {}, which fails without it; remove it with {}",
                    pod(record),
                    kubectl_delete(record)
                )
            })
        })
    }

    /// What stopping a VM means to the pod that owns it.
    #[must_use]
    pub fn stopping(&self, vm: &Vm) -> Option<String> {
        self.claim(&format!("VM {}", vm.config.name), |what, record| {
            is_of(record, vm).then(|| {
                format!(
                    "{what} belongs to pod {}, which starts it again; to put it to sleep: kubectl annotate pod -n {} \
                     {} {}=true",
                    pod(record),
                    record.namespace,
                    record.pod,
                    keys::ANNOTATION_HIBERNATE
                )
            })
        })
    }

    /// What removing a snapshot means to the pod that owns it.
    #[must_use]
    pub fn snapshot(&self, snapshot: &Envelope) -> Option<String> {
        let what = format!("snapshot {}", output::plain(&snapshot.name));
        self.claim(&what, |what, record| {
            let sleeps = match &record.phase {
                Phase::Hibernated { saved } => saved.snapshot == snapshot.id,
                _ => false,
            };
            let owns = sleeps
                || saved(&record.phase).is_some_and(|saved| saved.snapshot == snapshot.id)
                || record.phase.captured() == Some(&snapshot.id)
                || names(&record.vm_name).contains(&snapshot.name);
            owns.then(|| {
                if sleeps {
                    format!(
                        "{what} is the state of pod {}, which is hibernated; wake it first: kubectl annotate pod -n {} \
                         {} {}-",
                        pod(record),
                        record.namespace,
                        record.pod,
                        keys::ANNOTATION_HIBERNATE
                    )
                } else {
                    format!(
                        "{what} belongs to pod {}, which saves to it, wakes or is forked from it; it goes with the \
                         pod: {}",
                        pod(record),
                        kubectl_delete(record)
                    )
                }
            })
        })
    }

    /// What forgetting an image means to the pods that were made from it.
    #[must_use]
    pub fn image(&self, image: &Image) -> Option<String> {
        let uses = |record: &&OwnerRecord| {
            let boots = !matches!(record.phase, Phase::Deleting { .. });
            boots
                && (record.image == image.name
                    || record.image == image.id
                    || format!("{}:latest", record.image) == image.name)
        };
        let users = self.known.as_ref().map_or(0, |known| known.iter().filter(uses).count());
        self.claim(&format!("image {}", output::plain(&image.name)), |what, record| {
            let others = if users > 1 { format!(" and {} more", users - 1) } else { String::new() };
            uses(&record).then(|| {
                format!(
                    "{what} is what pod {}{others} boots from; delete first: {}",
                    pod(record),
                    kubectl_delete(record)
                )
            })
        })
    }

    /// Refuses to take something from a pod without `force`, and says what is taken with it.
    pub fn allow(&self, claims: impl Iterator<Item = Option<String>>, force: bool) -> anyhow::Result<()> {
        let claims: Vec<String> = claims.flatten().collect();
        if !claims.is_empty() && !force {
            bail!("{}; --force does it all the same, nothing was done", claims.join("; "));
        }
        claims.iter().for_each(|claim| output::note(format_args!("warning: {claim}")));
        Ok(())
    }

    fn claim(&self, what: &str, of: impl Fn(&str, &OwnerRecord) -> Option<String>) -> Option<String> {
        match &self.known {
            Ok(records) => records.iter().find_map(|record| of(what, record)),
            Err(why) => Some(format!("whether a pod owns {what} cannot be told: {why}")),
        }
    }
}

fn pod(record: &OwnerRecord) -> String {
    format!("{}/{}", record.namespace, record.pod)
}

fn is_of(record: &OwnerRecord, vm: &Vm) -> bool {
    record.vm_name == vm.config.name || record.vm_id == vm.id
}

fn kubectl_delete(record: &OwnerRecord) -> String {
    format!("kubectl delete pod -n {} {}", record.namespace, record.pod)
}

/// Local snapshots that the agent makes for a VM name.
fn names(vm_name: &str) -> [String; 4] {
    [vm_name.to_owned(), fork_baseline_name(vm_name), hibernate_import_name(vm_name), live_name(vm_name)]
}

/// Saved state that a phase relies on.
const fn saved(phase: &Phase) -> Option<&Saved> {
    match phase {
        Phase::Creating { restore, .. } => restore.as_ref(),
        Phase::Hibernating { pushed, .. } => pushed.as_ref(),
        Phase::Hibernated { saved, .. } => Some(saved),
        Phase::Deleting { keep, .. } => keep.as_ref(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(phase: Phase) -> Owners {
        let record = serde_json::from_value(serde_json::json!({
            "vm_name": "vk-default-demo-0-8aaf2c", "namespace": "default", "pod": "demo-0", "uid": "u",
            "image": "demo:1", "snapshot_on_delete": true, "keep_snapshot": false, "annotations": {},
            "phase": serde_json::to_value(phase).unwrap(), "vm_id": "VMID", "macs": [],
            "accepted": "2026-01-02T03:04:05Z", "started": null, "restarts": 0, "last_restart": null,
            "restart_pending": false, "written": null, "woken_from": null, "woken_ready": false,
            "import_left": false,
        }));
        Owners { known: Ok(vec![record.unwrap()]) }
    }

    fn snapshot(id: &str, name: &str) -> Envelope {
        Envelope { id: id.into(), name: name.into(), ..Envelope::default() }
    }

    fn image(name: &str) -> Image {
        let created_at = jiff::Timestamp::UNIX_EPOCH;
        Image { id: "sha256:ab".into(), name: name.into(), kind: "oci".into(), size: 1, created_at }
    }

    #[test]
    fn snapshots_that_an_agent_made_or_needs_belong_to_the_pod_and_no_others() {
        let saved = Saved { snapshot: "SAVED".into(), digest: None };
        let vm = "vk-default-demo-0-8aaf2c";
        for (phase, id, name, claimed) in [
            (Phase::Up, "S", "mine", None),
            (Phase::Up, "S", vm, Some("kubectl delete pod -n default demo-0")),
            (Phase::Up, "S", &format!("fork-{vm}"), Some("forked")),
            (Phase::Up, "S", &format!("{vm}-hibernate-import"), Some("belongs to pod default/demo-0")),
            (Phase::Up, "S", &format!("live-{vm}"), Some("belongs to pod default/demo-0")),
            (
                Phase::Hibernated { saved: saved.clone() },
                "SAVED",
                vm,
                Some("kubectl annotate pod -n default demo-0 vm.cocoonstack.io/hibernate-"),
            ),
            (Phase::Hibernated { saved: saved.clone() }, "S", "mine", None),
            (Phase::Creating { restore: Some(saved) }, "SAVED", "elsewhere", Some("default/demo-0")),
        ] {
            let said = owners(phase).snapshot(&snapshot(id, name));
            match (&said, claimed) {
                (None, None) => {}
                (Some(said), Some(words)) => assert!(said.contains(words), "{name}: {said}"),
                _ => panic!("{name}: {said:?}"),
            }
        }
    }

    fn vm(id: &str, name: &str) -> Vm {
        let time = "2026-01-02T03:04:05Z";
        let vm = serde_json::json!({
            "id": id, "hypervisor": "qemu", "state": "stopped", "pid": 0, "config": {"name": name},
            "network_configs": [], "storage_configs": [], "first_booted": true, "snapshot_ids": {},
            "created_at": time, "updated_at": time,
        });
        serde_json::from_value(vm).unwrap()
    }

    #[test]
    fn a_vm_belongs_to_the_pod_with_its_name_or_id_and_another_to_nobody() {
        let owners = owners(Phase::Up);
        for vm in [vm("VMID", "renamed"), vm("OTHER", "vk-default-demo-0-8aaf2c")] {
            let said = owners.vm(&vm).unwrap();
            assert!(said.contains("kubectl delete pod -n default demo-0"), "{said}");
            let said = owners.stopping(&vm).unwrap();
            assert!(said.contains("-n default demo-0 vm.cocoonstack.io/hibernate=true"), "{said}");
        }
        assert_eq!((owners.vm(&vm("OTHER", "demo")), owners.stopping(&vm("OTHER", "demo"))), (None, None));
    }

    #[test]
    fn an_image_is_needed_by_the_pods_that_boot_from_it() {
        let owners = owners(Phase::Up);
        let said = owners.image(&image("demo:1")).unwrap();
        assert!(said.contains("pod default/demo-0 boots from"), "{said}");
        assert_eq!(owners.image(&image("demo:2")), None);
        let ending =
            Phase::Deleting { live: true, keep: None, captured: None, pushed: false, outrun: Vec::new() };
        assert_eq!(
            self::owners(ending).image(&image("demo:1")),
            None,
            "a pod that is being deleted boots no more"
        );
    }

    #[test]
    fn without_force_nothing_is_taken_from_a_pod_and_doubt_counts_as_an_owner() {
        let owners = owners(Phase::Up);
        owners.allow([None, None].into_iter(), false).unwrap();
        owners.allow([None, Some("claim".to_owned())].into_iter(), true).unwrap();
        let refused = owners.allow([None, Some("claim".to_owned())].into_iter(), false).unwrap_err();
        assert!(refused.to_string().contains("--force"), "{refused}");
        let unsure = Owners { known: Err("version 99".into()) };
        assert!(unsure.image(&image("x:1")).unwrap().contains("version 99"));
        assert_eq!(Owners { known: Ok(Vec::new()) }.image(&image("x:1")), None);
    }
}
