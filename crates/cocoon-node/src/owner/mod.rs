//! One task a VM name: the only place that acts on that VM.
//!
//! Entry points: [`Context::post`] (which starts owners) and `Owner::run`, the loop: take the inbox,
//! show what the pod should show, ask the planner, carry out one step, look again. A step that a newer
//! wish makes pointless (a pull for a pod that is being deleted) is dropped where dropping is safe;
//! everything else is finished first.

#[cfg(test)]
mod ahead;
#[cfg(test)]
mod answering;
#[cfg(test)]
mod budget;
#[cfg(test)]
mod cut_off;
pub(crate) mod directory;
#[cfg(test)]
mod ending;
mod front;
pub(crate) mod inbox;
mod intake;
mod known;
mod newer;
mod outcome;
#[cfg(test)]
mod overwritten;
mod perform;
mod probe;
mod retry;
#[cfg(test)]
mod reviewed;
#[cfg(test)]
mod silent;
#[cfg(test)]
pub(crate) mod stage;
#[cfg(test)]
mod starved;
#[cfg(test)]
mod storms;
mod task;
#[cfg(test)]
mod tests;
mod waits;

use std::sync::{Arc, Mutex, PoisonError};

use cocoon_kit::world::World;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::Cluster,
    config::NodeConfig,
    owner::{directory::Directory, inbox::Inbox},
    ports::Ports,
    record::OwnerRecord,
};

/// What all owners of a node share.
#[derive(Debug)]
pub struct Context {
    /// Configuration.
    pub config: NodeConfig,
    /// The world outside.
    pub ports: Ports,
    /// Clock and randomness.
    pub world: Arc<dyn World>,
    /// Kubernetes.
    pub cluster: Arc<dyn Cluster>,
    /// All owners.
    pub directory: Directory,
    /// Ends all owners at their next step.
    pub shutdown: CancellationToken,
    /// Cancelled once the first complete list of pods was posted: no owner acts before that, because it
    /// could take a pod that it has not heard of yet for a deleted one.
    pub open: CancellationToken,
    tasks: Mutex<JoinSet<()>>,
}

impl Context {
    /// A context without owners.
    #[must_use]
    pub fn new(
        config: NodeConfig,
        ports: Ports,
        world: Arc<dyn World>,
        cluster: Arc<dyn Cluster>,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let (directory, tasks, open) = (Directory::default(), Mutex::default(), CancellationToken::new());
        Arc::new(Self { config, ports, world, cluster, directory, shutdown, open, tasks })
    }

    /// Posts to the owner of `vm_name`, starting it if there is none.
    pub fn post(self: &Arc<Self>, vm_name: &str, post: impl FnOnce(&Inbox)) {
        if let Some(inbox) = self.directory.post(vm_name, post) {
            self.start(vm_name, inbox, None);
        }
    }

    /// Starts the owner that a record of a former run is about.
    pub fn recall(self: &Arc<Self>, record: OwnerRecord) {
        let vm_name = record.vm_name.clone();
        if let Some(inbox) = self.directory.post(&vm_name, |inbox| inbox.set_record(Some(&record))) {
            self.start(&vm_name, inbox, Some(record));
        }
    }

    fn start(self: &Arc<Self>, vm_name: &str, inbox: Arc<Inbox>, record: Option<OwnerRecord>) {
        let owner = task::Owner::new(Arc::clone(self), vm_name.to_owned(), inbox, record);
        self.spawn(owner.run());
    }

    /// Starts a task that ends with the owners.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Drops every owner where it is, as a kill does.
    #[cfg(test)]
    pub(crate) async fn kill(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        tasks.shutdown().await;
    }

    /// Waits until all owners ended, at most the configured limit; then they are dropped where they are
    /// (every step may be cut off: that is what a kill does, too).
    pub async fn drain(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        let all = async { while tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(self.config.shutdown_limit, all).await.is_err() {
            tracing::warn!(left = tasks.len(), "owners did not end in time and are dropped");
        }
        tasks.shutdown().await;
    }
}
