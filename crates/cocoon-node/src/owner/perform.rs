//! One step, carried out through the ports.
//!
//! Entry point: [`perform`]. It decides nothing: it translates a step into one port call and names the
//! failure after what the step was for.

use std::{sync::Arc, time::Duration};

use cocoon_meta::{fork_baseline_name, hibernate_import_name};

use crate::{
    owner::{Context, known::Found},
    planner::{
        Look, Step,
        observation::{How, Observation, Wish},
    },
    ports::{PortResult, PushRequest, Registry, SnapshotView, VmView},
    reason::{Reason, Trouble},
    record::Phase,
};

/// How long a short question to the registry may take, at least and at most.
const ANSWER_LEAST: Duration = Duration::from_secs(5);
const ANSWER_MOST: Duration = Duration::from_secs(30);

/// The longest push of a live capture's blobs; nobody waits for it but the hibernation itself.
const PREPUSH_MOST: Duration = Duration::from_secs(1800);

/// What a step needs to know besides itself.
#[derive(Debug, Clone)]
pub(super) struct Scene {
    pub(super) vm_name: String,
    pub(super) wish: Option<Wish>,
    pub(super) macs: Vec<String>,
    /// The capture of a hibernation under way: the VM goes only if its guest has not run since.
    pub(super) hibernates: Option<String>,
    /// What is left of the guest's pause.
    pub(super) pause_left: Duration,
}

impl Scene {
    pub(super) fn of(vm_name: &str, o: &Observation, pause_left: Duration) -> Self {
        let macs = o.record.as_ref().map(|record| record.macs.clone()).unwrap_or_default();
        let hibernates = o.record.as_ref().and_then(|record| match &record.phase {
            Phase::Hibernating { captured, .. } => captured.clone(),
            _ => None,
        });
        Self { vm_name: vm_name.to_owned(), wish: o.wish.clone(), macs, hibernates, pause_left }
    }
}

/// Carries out one step.
pub(super) async fn perform(context: &Arc<Context>, scene: &Scene, step: &Step) -> Result<Found, Trouble> {
    let (vms, records, vm) = (&context.ports.vms, &context.ports.records, scene.vm_name.as_str());
    match step {
        Step::Look(look) => look_at(context, scene, *look).await,
        Step::EnsureImage => ensure_image(context, scene).await,
        Step::PullSource => pull_source(context, scene).await,
        Step::PullImport { digest } => pull_import(context, vm, digest).await,
        Step::Run(request) => made(vms.run(request.clone()).await, Reason::CreateFailed),
        Step::Clone(request) => {
            let blame = if request.same_machine { Reason::WakeCloneFailed } else { Reason::CreateFailed };
            made(vms.clone_vm(request.clone()).await, blame)
        }
        Step::Start => made(vms.start(vm).await, Reason::RestartFailed),
        Step::Resume => done(vms.resume(vm).await, Reason::ResumeFailed),
        Step::RemoveVm { blame } => done(remove_vm(context, scene).await, *blame),
        Step::Capture { blame } => taken(vms.capture(vm, vm).await, *blame),
        Step::SaveBaseline => {
            taken(vms.save(vm, &fork_baseline_name(vm)).await, Reason::ForkSourceUnavailable)
        }
        Step::Prepush(request) => prepush(context, vm, request).await,
        Step::PushHibernate(request) => push_hibernate(context, scene, request).await,
        Step::PushLatest(request) => push_latest(context, request).await,
        Step::LiveSnapshot { push, .. } => live_snapshot(context, vm, push).await,
        Step::DropTag { digest, snapshot } => drop_tag(context, scene, digest, snapshot).await,
        Step::DropSnapshots(names) => drop_snapshots(context, names).await,
        Step::ReleaseLeases => release(context, &scene.macs).await,
        Step::Finalise => finalise(context, scene).await,
        Step::Note(record) => done(records.put(record).await, Reason::RecordsUnavailable),
        Step::Forget => done(records.forget(vm).await, Reason::RecordsUnavailable),
        Step::Rest | Step::Wait(_) | Step::AnswerBaseline(_) => Ok(Found::Done),
        Step::Fail(trouble) => Err(trouble.clone()),
    }
}

fn named<T>(result: PortResult<T>, blame: Reason) -> Result<T, Trouble> {
    result.map_err(|error| error.trouble().r#as(blame))
}

fn done(result: PortResult<()>, blame: Reason) -> Result<Found, Trouble> {
    named(result.map(|()| Found::Done), blame)
}

fn made(result: PortResult<VmView>, blame: Reason) -> Result<Found, Trouble> {
    named(result.map(|vm| Found::Vm(Some(vm))), blame)
}

fn taken(result: PortResult<SnapshotView>, blame: Reason) -> Result<Found, Trouble> {
    named(result.map(|snapshot| Found::Snapshot(Some(snapshot))), blame)
}

async fn ensure_image(context: &Context, scene: &Scene) -> Result<Found, Trouble> {
    let wish = scene.wish.as_ref();
    let image = wish.map_or("", |wish| wish.image.as_str());
    let force = wish.is_some_and(|wish| wish.force_pull);
    named(context.ports.images.ensure(image, force).await.map(Found::Text), Reason::ImageNotFound)
}

/// A VM whose capture is pushed goes only if its guest has not run since (I3).
async fn remove_vm(context: &Context, scene: &Scene) -> PortResult<()> {
    let (vms, vm) = (&context.ports.vms, scene.vm_name.as_str());
    match &scene.hibernates {
        Some(snapshot) => vms.remove_captured(vm, snapshot).await,
        None => vms.remove(vm).await,
    }
}

async fn push_latest(context: &Context, request: &PushRequest) -> Result<Found, Trouble> {
    let pushed = registry(context)?.push(request.clone()).await;
    named(pushed.map(Found::Text), Reason::DeleteSnapshotFailed)
}

async fn drop_tag(context: &Context, scene: &Scene, digest: &str, snapshot: &str) -> Result<Found, Trouble> {
    let (vm, tag) = (scene.vm_name.as_str(), cocoon_meta::keys::HIBERNATE_SNAPSHOT_TAG);
    let dropped = registry(context)?.drop_tag(vm, tag, digest, snapshot);
    done(answered(scene, vm, dropped).await?, Reason::RegistryUnavailable)
}

async fn drop_snapshots(context: &Context, names: &[String]) -> Result<Found, Trouble> {
    for name in names {
        named(context.ports.snapshots.remove(name).await, Reason::CleanupFailed)?;
    }
    Ok(Found::Done)
}

async fn finalise(context: &Context, scene: &Scene) -> Result<Found, Trouble> {
    let Some(wish) = &scene.wish else { return Ok(Found::Done) };
    done(context.cluster.finalise(&wish.key, &wish.uid).await, Reason::ApiUnavailable)
}

fn registry(context: &Context) -> Result<&dyn Registry, Trouble> {
    context.ports.registry.as_deref().ok_or_else(|| {
        let message = "this node has no registry; set OCI_REGISTRY to push and pull snapshots";
        Trouble::new(Reason::RegistryUnavailable, message)
    })
}

/// A short question to the registry, which a paused guest may be waiting for.
async fn answered<T>(scene: &Scene, vm: &str, question: impl Future<Output = T>) -> Result<T, Trouble> {
    let limit = scene.pause_left.clamp(ANSWER_LEAST, ANSWER_MOST);
    tokio::time::timeout(limit, question).await.map_err(|_| {
        let message = format!(
            "the registry said nothing about {vm}:hibernate within {} s; it is asked again",
            limit.as_secs()
        );
        Trouble::new(Reason::HibernateEvidenceUnavailable, message)
    })
}

async fn look_at(context: &Arc<Context>, scene: &Scene, look: Look) -> Result<Found, Trouble> {
    let (ports, vm) = (&context.ports, scene.vm_name.as_str());
    let name = match look {
        Look::Vm => {
            return named(ports.vms.inspect(vm).await.map(Found::Vm), Reason::EngineUnavailable);
        }
        Look::Tag => {
            let tag = cocoon_meta::keys::HIBERNATE_SNAPSHOT_TAG;
            let facts = answered(scene, vm, registry(context)?.facts(vm, tag)).await?;
            return named(facts.map(Found::Tag), Reason::HibernateEvidenceUnavailable);
        }
        Look::PushTime => return push_time(context, vm).await,
        Look::Fork => return ask_source(context, scene).await,
        Look::Source => return look_at_source(context, scene).await,
        Look::Saved => vm.to_owned(),
        Look::Import => hibernate_import_name(vm),
        Look::Baseline => fork_baseline_name(vm),
    };
    named(ports.snapshots.get(&name).await.map(Found::Snapshot), Reason::EngineUnavailable)
}

/// The local copy of the clone source, if it is what the registry's tag holds now; so `force-pull` has
/// nothing to add. A registry that gives no answer leaves it open (I5), and what the registry does not have
/// is not made from an old copy. Without a registry the copy is all there is.
async fn look_at_source(context: &Arc<Context>, scene: &Scene) -> Result<Found, Trouble> {
    let Some(How::Clone(source)) = scene.wish.as_ref().map(|wish| &wish.how) else {
        return Ok(Found::Snapshot(None));
    };
    let local = context.ports.snapshots.get(&source.local).await;
    let Some(local) = named(local, Reason::EngineUnavailable)? else { return Ok(Found::Snapshot(None)) };
    let Some(registry) = &context.ports.registry else { return Ok(Found::Snapshot(Some(local))) };
    let facts = registry.facts(&source.repository, &source.reference).await;
    let there = named(facts, Reason::RegistryUnavailable)?;
    Ok(Found::Snapshot(there.filter(|tag| tag.snapshot_id == local.id).map(|_| local)))
}

async fn ask_source(context: &Arc<Context>, scene: &Scene) -> Result<Found, Trouble> {
    let Some((source, wish)) = scene.wish.as_ref().and_then(|wish| match &wish.how {
        How::Fork(source) => Some((source, wish)),
        _ => None,
    }) else {
        return Ok(Found::Snapshot(None));
    };
    let answer = context.directory.ask_baseline(source, &wish.key.namespace)?;
    let limit = context.config.fork_deadline;
    match tokio::time::timeout(limit, answer).await {
        Ok(Ok(answer)) => answer.map(|snapshot| Found::Snapshot(Some(snapshot))),
        Ok(Err(_)) | Err(_) => {
            let message =
                format!("VM {source} gave no baseline within {} s; it is asked again", limit.as_secs());
            Err(Trouble::new(Reason::ForkSourceUnavailable, message))
        }
    }
}

async fn pull_source(context: &Arc<Context>, scene: &Scene) -> Result<Found, Trouble> {
    let Some(How::Clone(source)) = scene.wish.as_ref().map(|wish| &wish.how) else {
        return Ok(Found::Snapshot(None));
    };
    let pulled = registry(context)?.pull(&source.repository, &source.reference, &source.local).await;
    named(pulled.map(|snapshot| Found::Snapshot(Some(snapshot))), Reason::SnapshotNotFound).map_err(
        |mut trouble| {
            if trouble.reason == Reason::SnapshotNotFound {
                trouble.message.push_str(
                    "; set the pod's image to a snapshot that is there, or its mode to run to boot an image",
                );
            }
            trouble
        },
    )
}

async fn pull_import(context: &Arc<Context>, vm: &str, digest: &str) -> Result<Found, Trouble> {
    let name = hibernate_import_name(vm);
    let pulled = registry(context)?.pull(vm, digest, &name).await;
    named(pulled.map(|snapshot| Found::Snapshot(Some(snapshot))), Reason::WakePullFailed)
}

/// Saves under a name of its own, pushes, and drops the local copy whatever came of it.
async fn live_snapshot(context: &Arc<Context>, vm: &str, request: &PushRequest) -> Result<Found, Trouble> {
    let (vms, snapshots) = (&context.ports.vms, &context.ports.snapshots);
    named(snapshots.remove(&request.snapshot).await, Reason::CleanupFailed)?;
    let saved = named(vms.save(vm, &request.snapshot).await, Reason::EngineUnavailable)?;
    let push = PushRequest { snapshot: saved.id, ..request.clone() };
    let pushed = registry(context)?.push(push).await;
    if let Err(error) = snapshots.remove(&request.snapshot).await {
        tracing::warn!(vm, error = %error.trouble(), "the local copy of a live snapshot stays until the next");
    }
    named(pushed.map(Found::Text), Reason::RegistryUnavailable)
}

/// How long the push of a capture would take. Without a measured push that is not known, and not asked.
async fn push_time(context: &Arc<Context>, vm: &str) -> Result<Found, Trouble> {
    let Some(rate) = context.ports.registry.as_ref().and_then(|registry| registry.throughput()) else {
        return Ok(Found::Time(None));
    };
    let size = named(context.ports.upkeep.capture_size(vm).await, Reason::EngineUnavailable)?;
    Ok(Found::Time(size.map(|size| Duration::from_secs(size / rate.max(1)))))
}

/// Saves the running guest and pushes that capture's blobs, for as long as that is worth while. The local copy
/// is dropped by the planner's next step, which a kill does not lose.
async fn prepush(context: &Arc<Context>, vm: &str, request: &PushRequest) -> Result<Found, Trouble> {
    let blame = Reason::HibernatePrepushFailed;
    let saved = named(context.ports.vms.save(vm, &request.snapshot).await, blame)?;
    let push = registry(context)?.push_blobs(PushRequest { snapshot: saved.id, ..request.clone() });
    match tokio::time::timeout(PREPUSH_MOST, push).await {
        Ok(sent) => named(sent, blame).map(|sent| {
            tracing::info!(vm, sent, "a live capture's blobs went ahead");
            Found::Done
        }),
        Err(_) => {
            let message = format!("it took longer than {} minutes", PREPUSH_MOST.as_secs() / 60);
            Err(Trouble::new(blame, message))
        }
    }
}

/// A push while the guest is paused, cut off when the pause becomes too long.
async fn push_hibernate(
    context: &Arc<Context>,
    scene: &Scene,
    request: &PushRequest,
) -> Result<Found, Trouble> {
    let push = registry(context)?.push(request.clone());
    match tokio::time::timeout(scene.pause_left, push).await {
        Ok(pushed) => named(pushed.map(Found::Text), Reason::HibernatePushFailed),
        Err(_) => {
            let message = format!(
                "pushing {}:{} took longer than the guest of VM {} may be paused ({} s); the guest goes on, \
                 what was pushed is reused by the next try",
                request.repository,
                request.tag,
                scene.vm_name,
                context.config.pause_limit.as_secs()
            );
            Err(Trouble::new(Reason::HibernatePauseLimit, message))
        }
    }
}

/// Best effort: a lease that is not given back now is found by the sweep (`leases`).
async fn release(context: &Arc<Context>, macs: &[String]) -> Result<Found, Trouble> {
    for mac in macs {
        if let Err(error) = context.ports.leases.release(mac).await {
            tracing::warn!(mac, error = %error.trouble(), "lease not released; the sweep tries again");
        }
    }
    Ok(Found::Done)
}
