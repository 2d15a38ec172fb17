//! Several things go wrong at once around a hibernation: pushes that fail or whose answer is lost, a kill at
//! every effect, guests that go on while the agent is dead, hypervisors that die.

use std::time::Duration;

use super::{
    stage::{Stage, pod},
    tests::{HIBERNATE, booted, gone, reach, state_of},
};
use crate::{
    ports::{VmPhase, fake::Held},
    reason::Reason,
};

/// What goes wrong besides the kill.
#[derive(Debug, Clone, Copy)]
struct Weather {
    failing: u32,
    unheard: u32,
    crash: bool,
}

/// Hibernate, wake, delete. Returns how many effects there were.
async fn storm(kill: u32, weather: Weather) -> u32 {
    let mut stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    stage.fake.live();
    stage.fake.fail("push", weather.failing, Reason::RegistryUnavailable);
    {
        let mut world = stage.fake.world();
        (world.judged, world.kill_after) = (true, Some(kill));
        (world.crash, world.unheard) = (weather.crash, weather.unheard);
    }
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage = reach(stage, |stage| stage.lifecycle("u1") == "hibernated").await;
    stage.assert_sound();
    let saved = stage.fake.world().tags[&format!("{vm}:hibernate")].state;
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage = reach(stage, |stage| stage.lifecycle("u1") == "ready").await;
    assert!(state_of(&stage, &vm) >= saved, "kill {kill}, {weather:?}");
    stage.delete("u1");
    stage = reach(stage, |stage| stage.pod("u1").is_none() && stage.fake.world().records.is_empty()).await;
    let world = stage.fake.world();
    let left = world.tags.get(&format!("{vm}:hibernate"));
    // A hypervisor that dies leaves nothing to save; else the guest's own last state is what survives.
    assert!(left.is_none() || weather.crash, "kill {kill}, {weather:?}: {left:?}");
    kill - world.kill_after.unwrap_or_default()
}

/// A storm at every effect, with guests that live on and with hypervisors that die.
async fn storms(failing: u32, unheard: u32) {
    for crash in [false, true] {
        for n in 1.. {
            if storm(n, Weather { failing, unheard, crash }).await < n {
                assert!(n > 10, "only {n} effects were cut off");
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn no_storm_replaces_newer_state_by_an_older_capture() {
    storms(0, 0).await;
}

#[tokio::test(start_paused = true)]
async fn nor_does_one_in_which_a_push_fails() {
    storms(1, 0).await;
}

#[tokio::test(start_paused = true)]
async fn nor_does_one_in_which_the_answer_of_a_push_is_lost() {
    storms(0, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_push_whose_answer_was_lost_is_taken_back_when_the_guest_goes_on() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let tag = format!("{vm}:hibernate");
    stage.fake.world().unheard = 1;
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "failed").await;
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until_lifecycle("u1", "ready").await;
    assert!(!stage.fake.world().tags.contains_key(&tag));
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "hibernated").await;
    assert!(!stage.told(Reason::TagMoved));
}

/// A hibernation whose push fails and that is then given up: the guest runs on.
async fn push_cut_off(stage: &Stage, vm: &str) {
    stage.fake.fail("push", 1, Reason::RegistryUnavailable);
    stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
    stage.until_lifecycle("u1", "failed").await;
    stage.annotate("u1", &[(HIBERNATE, None)]);
    stage.until("on", |stage| stage.fake.world().vms[vm].view.phase == VmPhase::Running).await;
}

/// What was cut off writes its tag after all.
fn land_late(stage: &Stage, vm: &str) {
    let mut world = stage.fake.world();
    let id = world.records[vm].strays[0].clone();
    let held = Held { id, state: 0, base_image: "demo:latest".into(), ..Held::default() };
    world.tags.insert(format!("{vm}:hibernate"), held);
}

#[tokio::test(start_paused = true)]
async fn a_push_that_lands_after_the_guest_went_on_is_known_as_ones_own() {
    for hibernate_again in [true, false] {
        let stage = Stage::new(true).await;
        let vm = booted(&stage).await;
        let tag = format!("{vm}:hibernate");
        push_cut_off(&stage, &vm).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        land_late(&stage, &vm);
        if hibernate_again {
            stage.annotate("u1", &[(HIBERNATE, Some("true"))]);
            stage.until_lifecycle("u1", "hibernated").await;
            assert!(stage.fake.world().tags[&tag].state > 0);
        } else {
            stage.delete("u1");
            gone(&stage, "u1").await;
            assert!(!stage.fake.world().tags.contains_key(&tag), "the next pod would wake into it");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_push_that_lands_long_after_the_guest_went_on_is_taken_back_within_a_minute() {
    let stage = Stage::new(true).await;
    let vm = booted(&stage).await;
    let tag = format!("{vm}:hibernate");
    push_cut_off(&stage, &vm).await;
    for wait in [5, 600] {
        tokio::time::sleep(Duration::from_secs(wait)).await;
        land_late(&stage, &vm);
        let asked = stage.fake.calls("facts");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(
            !stage.fake.world().tags.contains_key(&tag),
            "{wait} s later: others take it for a hibernation"
        );
        let asked = stage.fake.calls("facts") - asked;
        assert!(asked <= 4, "{asked} looks in a minute");
    }
    stage.assert_sound();
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_name_was_edited_before_it_had_a_vm_is_refused_and_may_go() {
    let stage = Stage::new(true).await;
    stage.apply(pod("demo-0", "u1", &[("cocoonset.cocoonstack.io/image", "nowhere:1")]));
    stage.until_lifecycle("u1", "failed").await;
    stage.fake.world().records.clear();
    stage.annotate("u1", &[("vm.cocoonstack.io/name", Some("vk-a-b-0-aaaaaa"))]);
    stage.until("refused", |stage| stage.told(Reason::VMNameMismatch)).await;
    stage.delete("u1");
    stage.until("gone", |stage| stage.pod("u1").is_none()).await;
}
