//! What a delete waits for, said while it waits: a step's own deadline is longer than people wait (I6).
//!
//! Entry points: `Owner::word_due` and `Owner::say_wait`, called by the loop around a step under way.

use std::time::Duration;

use tokio::time::Instant;

use crate::{
    cluster::Tone,
    owner::task::Owner,
    planner::{Look, Step},
    reason::{Reason, Trouble},
};

/// A delete says within 10 s why it is not done; this leaves time to write it.
const AFTER: Duration = Duration::from_secs(8);

/// A later step of a delete that has lasted longer gets so long before it is named.
const EACH: Duration = Duration::from_secs(2);

impl Owner {
    /// When a word is due about the step that began at `begun`; `None`: nothing to say, or it is said.
    pub(super) fn word_due(&self, begun: Instant) -> Option<Instant> {
        let since = self.ending_since.filter(|_| self.o.waits.is_none() && self.o.failure.is_none())?;
        Some((since + AFTER).max(begun + EACH))
    }

    /// Status and event say what the delete waits for; the step goes on.
    pub(super) fn say_wait(&mut self, step: &Step) {
        let (tone, what) = waits_for(step, &self.vm_name);
        self.tell(tone, &what);
        self.o.waits = Some(what);
        self.show();
    }
}

fn waits_for(step: &Step, vm: &str) -> (Tone, Trouble) {
    let silent = "it goes on when the engine answers or gives up; if it does not, look at the VM's process";
    match step {
        Step::Capture { .. } | Step::Resume => {
            let message = format!(
                "waiting for the engine: VM {vm} does not answer yet, so its snapshot is not taken yet; {silent}, or \
                 set the pod's snapshot-policy to never"
            );
            (Tone::Warning, Trouble::new(Reason::DeleteSnapshotFailed, message))
        }
        Step::RemoveVm { .. } | Step::Look(Look::Vm) => {
            let message = format!(
                "waiting for the engine: VM {vm} does not answer yet, so it is not removed yet; {silent}"
            );
            (Tone::Warning, Trouble::new(Reason::DeleteRemoveFailed, message))
        }
        Step::PushLatest(push) => {
            let message = format!(
                "the pod's end waits until VM {vm} is pushed as {}:{}, which goes on; set the pod's \
                 snapshot-policy to never to end it without",
                push.repository, push.tag
            );
            (Tone::Normal, Trouble::new(Reason::Terminating, message))
        }
        Step::Look(Look::Tag) | Step::DropTag { .. } => {
            let message = format!("waiting for the registry: it does not answer about VM {vm} yet");
            (Tone::Warning, Trouble::new(Reason::RegistryUnavailable, message))
        }
        _ => {
            let message =
                format!("the pod's end waits for a step about VM {vm} that is not done yet; it goes on");
            (Tone::Normal, Trouble::new(Reason::Terminating, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::{
        owner::{
            stage::Stage,
            tests::{HIBERNATE, booted, gone},
        },
        reason::Reason,
    };

    /// Reason and message of the pod's condition `Ready`.
    fn not_ready(stage: &Stage) -> (String, String) {
        let conditions = stage.pod("u1").unwrap().status.unwrap().conditions.unwrap();
        let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready").unwrap();
        (ready.reason.unwrap(), ready.message.unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn a_delete_says_within_ten_seconds_what_it_waits_for_though_the_step_is_not_done() {
        for (slow, reason, says) in [
            ("capture", Reason::DeleteSnapshotFailed, "does not answer"),
            ("remove", Reason::DeleteRemoveFailed, "does not answer"),
            ("push", Reason::Terminating, ":latest"),
        ] {
            let stage = Stage::new(true).await;
            let vm = booted(&stage).await;
            stage.fake.world().slow.insert(slow.into(), Duration::from_secs(30));
            stage.delete("u1");
            tokio::time::sleep(Duration::from_secs(7)).await;
            assert_eq!(not_ready(&stage).0, "Terminating", "{slow}: not at once");
            assert!(!stage.told(Reason::DeleteSnapshotFailed) && !stage.told(Reason::DeleteRemoveFailed));
            tokio::time::sleep(Duration::from_secs(3)).await;
            let (word, message) = not_ready(&stage);
            assert_eq!(word, reason.to_string(), "{slow}");
            assert!(message.contains(&vm) && message.contains(says), "{slow}: {message}");
            assert!(stage.told(reason), "{slow}: the event");
            gone(&stage, "u1").await;
            let said = stage.api.said.lock().unwrap().clone();
            assert_eq!(said.iter().filter(|event| event.reason == reason).count(), 1, "{slow}: {said:?}");
            stage.assert_sound();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_that_began_before_the_delete_counts_from_the_delete_on() {
        let stage = Stage::new(true).await;
        booted(&stage).await;
        stage.fake.world().slow.insert("capture".into(), Duration::from_secs(60));
        stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
        stage.until("capturing", |stage| stage.fake.calls("capture") == 1).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(!stage.told(Reason::DeleteSnapshotFailed), "nothing is deleted");
        stage.delete("u1");
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(not_ready(&stage).0, "DeleteSnapshotFailed");
        gone(&stage, "u1").await;
    }
}
