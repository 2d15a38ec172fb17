//! What a failing pod costs: at most 5 engine calls and 10 API writes in any minute, for each kind of failure.
//!
//! The list of all VMs, once a second for all pods together, is nobody's own call; nor is the look whether what
//! pods wait for is here (`arrivals`). A push and a pull read or write the engine's store once.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    stage::{Stage, pod},
    tests::{HIBERNATE, booted},
};
use crate::reason::Reason;

const MINUTE: Duration = Duration::from_secs(60);
const ENGINE: [&str; 13] = [
    "inspect", "run", "clone", "start", "remove", "capture", "save", "resume", "snapshot", "drop", "image",
    "pull", "size",
];
const PUSH: &str = "push";

fn most_in_a_minute(times: &[Instant]) -> usize {
    let within = |start: &Instant| times.iter().filter(|at| *at >= start && **at - *start < MINUTE).count();
    times.iter().map(within).max().unwrap_or_default()
}

/// Lets the pod fail for ten minutes and looks at the worst one.
async fn ten_minutes(kind: &str, stage: &Stage, begun: Instant, word: Reason) {
    tokio::time::sleep(10 * MINUTE).await;
    assert!(stage.told(word), "{kind}: {:#?}", stage.api.events.lock().unwrap());
    let world = stage.fake.world();
    let engine = |call: &String| {
        let name = call.split(' ').next().unwrap_or_default();
        ENGINE.contains(&name) || name == PUSH
    };
    let calls = world.calls.iter().zip(&world.called_at);
    let calls: Vec<_> = calls.filter(|(call, at)| **at >= begun && engine(call)).collect();
    let times: Vec<Instant> = calls.iter().map(|(_, at)| **at).collect();
    let worst = most_in_a_minute(&times);
    let told: Vec<_> = calls.iter().take(20).map(|(call, at)| format!("{call} {:?}", **at - begun)).collect();
    assert!(worst <= 5, "{kind}: {worst} engine calls in a minute: {told:#?}");
    let tries = world.called_at.iter().filter(|at| **at > begun + MINUTE).count();
    assert!(tries > 540 + 1, "{kind}: it is tried again, besides the list once a second: {tries}");
    let written: Vec<Instant> =
        stage.api.written_at.lock().unwrap().iter().copied().filter(|at| *at >= begun).collect();
    let worst = most_in_a_minute(&written);
    assert!(
        worst <= 10,
        "{kind}: {worst} API writes in a minute {:?} {:#?}",
        written.iter().map(|at| *at - begun).collect::<Vec<_>>(),
        stage.api.events.lock().unwrap()
    );
    drop(world);
    stage.assert_sound();
}

/// A pod that is made and fails.
async fn made(kind: &str, word: Reason, extra: &[(&str, &str)], prepare: impl Fn(&Stage)) {
    let stage = Stage::new(true).await;
    prepare(&stage);
    let begun = Instant::now();
    stage.apply(pod("demo-0", "u1", extra));
    ten_minutes(kind, &stage, begun, word).await;
}

/// A pod that is up and fails when it is asked to hibernate, or to go.
async fn lived(kind: &str, word: Reason, goes: bool, prepare: impl Fn(&Stage)) {
    let stage = Stage::new(true).await;
    booted(&stage).await;
    tokio::time::sleep(MINUTE).await;
    prepare(&stage);
    let begun = Instant::now();
    if goes {
        stage.delete("u1")
    } else {
        stage.annotate("u1", &[(HIBERNATE, Some("true"))])
    }
    ten_minutes(kind, &stage, begun, word).await;
}

/// A pod that is hibernated and fails to wake.
async fn woken(kind: &str, word: Reason, local: bool, prepare: impl Fn(&Stage)) {
    let stage = Stage::new(true).await;
    booted(&stage).await;
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "hibernated").await;
    if !local {
        stage.fake.world().snapshots.clear();
    }
    tokio::time::sleep(MINUTE).await;
    prepare(&stage);
    let begun = Instant::now();
    stage.annotate("u1", &[(HIBERNATE, None)]);
    ten_minutes(kind, &stage, begun, word).await;
}

const ALWAYS: u32 = 100_000;

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_be_made_costs_no_more_than_its_budget() {
    let image = ("cocoonset.cocoonstack.io/image", "nowhere:1");
    let clone = ("cocoonset.cocoonstack.io/mode", "clone");
    made("image unknown", Reason::ImageNotFound, &[image], |_| ()).await;
    made("snapshot unknown", Reason::SnapshotNotFound, &[image, clone], |_| ()).await;
    made("registry down", Reason::HibernateEvidenceUnavailable, &[], |stage| {
        stage.fake.fail("facts", ALWAYS, Reason::RegistryUnavailable);
    })
    .await;
    made("guest silent", Reason::GuestSilent, &[], |stage| {
        stage.fake.fail("run", ALWAYS, Reason::GuestSilent);
    })
    .await;
    made("engine down", Reason::EngineUnavailable, &[], |stage| {
        for call in ["inspect", "list", "run", "image", "snapshot"] {
            stage.fake.fail(call, ALWAYS, Reason::EngineUnavailable);
        }
    })
    .await;
    made("disk full while importing", Reason::DiskFull, &[], |stage| {
        stage.fake.fail("image", ALWAYS, Reason::DiskFull);
    })
    .await;
    let golden = ("cocoonset.cocoonstack.io/image", "golden:v1");
    made("clone incompatible", Reason::SnapshotIncompatible, &[golden, clone], |stage| {
        let held = crate::ports::fake::Held { id: "G".into(), state: 0, ..Default::default() };
        stage.fake.world().tags.insert("golden:v1".into(), held);
        stage.fake.fail("clone", ALWAYS, Reason::SnapshotIncompatible);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_hibernate_costs_no_more_than_its_budget() {
    lived("registry down", Reason::HibernateEvidenceUnavailable, false, |stage| {
        for call in ["push", "facts"] {
            stage.fake.fail(call, ALWAYS, Reason::RegistryUnavailable);
        }
    })
    .await;
    lived("push refused", Reason::HibernatePushFailed, false, |stage| {
        stage.fake.fail("push", ALWAYS, Reason::RegistryUnavailable);
    })
    .await;
    lived("disk full while saving", Reason::DiskFull, false, |stage| {
        stage.fake.fail("capture", ALWAYS, Reason::DiskFull);
    })
    .await;
    lived("removal refused", Reason::HibernateRemoveFailed, false, |stage| {
        stage.fake.fail("remove", ALWAYS, Reason::EngineUnavailable);
    })
    .await;
    lived("resume refused", Reason::ResumeFailed, false, |stage| {
        stage.fake.fail("push", ALWAYS, Reason::RegistryUnavailable);
        stage.fake.fail("resume", ALWAYS, Reason::EngineUnavailable);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_wake_costs_no_more_than_its_budget() {
    for local in [true, false] {
        woken("incompatible", Reason::SnapshotIncompatible, local, |stage| {
            stage.fake.fail("clone", ALWAYS, Reason::SnapshotIncompatible);
        })
        .await;
        woken("guest silent", Reason::GuestSilent, local, |stage| {
            stage.fake.world().mute = true;
            stage.fake.fail("start", ALWAYS, Reason::GuestSilent);
        })
        .await;
    }
    woken("pull fails", Reason::WakePullFailed, false, |stage| {
        stage.fake.fail("pull", ALWAYS, Reason::RegistryUnavailable);
    })
    .await;
    woken("disk full while pulling", Reason::DiskFull, false, |stage| {
        stage.fake.fail("pull", ALWAYS, Reason::DiskFull);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_go_costs_no_more_than_its_budget() {
    lived("push refused", Reason::DeleteSnapshotFailed, true, |stage| {
        stage.fake.fail("push", ALWAYS, Reason::RegistryUnavailable);
    })
    .await;
    lived("disk full while saving", Reason::DiskFull, true, |stage| {
        stage.fake.fail("capture", ALWAYS, Reason::DiskFull);
    })
    .await;
    lived("removal refused", Reason::DeleteRemoveFailed, true, |stage| {
        stage.fake.fail("remove", ALWAYS, Reason::EngineUnavailable);
    })
    .await;
}
