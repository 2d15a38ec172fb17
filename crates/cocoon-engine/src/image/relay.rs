//! A borrowed registry, lent to blocking threads.
//!
//! Layers are read on threads that outlive no borrow, while callers pass `&dyn Registry`. A [`Relay`]
//! is a registry of its own whose questions are answered by [`serve`], which runs beside the import on
//! the caller's task. Reading only.

use async_trait::async_trait;
use bytes::Bytes;
use cocoon_oci::registry::{Body, Manifest, Registry, RegistryError};
use tokio::sync::{mpsc, oneshot};

type Answer<T> = oneshot::Sender<Result<Option<T>, RegistryError>>;

/// What a blocking thread wants to know.
pub(super) enum Question {
    Blob(String, String, Answer<Body>),
    Manifest(String, String, Answer<Manifest>),
}

impl std::fmt::Debug for Question {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Blob(repository, of, _) | Self::Manifest(repository, of, _) => {
                write!(f, "{repository}@{of}")
            }
        }
    }
}

/// The lent side.
#[derive(Debug)]
pub(super) struct Relay {
    ask: mpsc::Sender<Question>,
}

/// A relay and the questions that will come through it.
pub(super) fn pair() -> (Relay, mpsc::Receiver<Question>) {
    let (ask, questions) = mpsc::channel(1);
    (Relay { ask }, questions)
}

/// Answers until the relay is gone.
pub(super) async fn serve(registry: &dyn Registry, mut questions: mpsc::Receiver<Question>) {
    while let Some(question) = questions.recv().await {
        // An asker that gave up drops its receiver; there is nobody to tell.
        match question {
            Question::Blob(repository, digest, answer) => {
                drop(answer.send(registry.get_blob(&repository, &digest).await));
            }
            Question::Manifest(repository, reference, answer) => {
                drop(answer.send(registry.get_manifest(&repository, &reference).await));
            }
        }
    }
}

impl Relay {
    async fn ask<T>(
        &self,
        what: &str,
        question: impl FnOnce(Answer<T>) -> Question,
    ) -> Result<Option<T>, RegistryError> {
        let (answer, receive) = oneshot::channel();
        let gone = || unavailable(what, "the import was given up");
        self.ask.send(question(answer)).await.map_err(|_| gone())?;
        receive.await.map_err(|_| gone())?
    }
}

fn unavailable(what: &str, why: &str) -> RegistryError {
    RegistryError::Unavailable { what: what.to_owned(), source: why.into() }
}

#[async_trait]
impl Registry for Relay {
    async fn has_blob(&self, repository: &str, digest: &str) -> Result<bool, RegistryError> {
        Ok(self.get_blob(repository, digest).await?.is_some())
    }

    async fn put_blob(&self, _: &str, digest: &str, _: u64, _: Body) -> Result<(), RegistryError> {
        Err(unavailable(digest, "an import only reads"))
    }

    async fn get_blob(&self, repository: &str, digest: &str) -> Result<Option<Body>, RegistryError> {
        self.ask(digest, |answer| Question::Blob(repository.to_owned(), digest.to_owned(), answer)).await
    }

    async fn put_manifest(
        &self,
        _: &str,
        reference: &str,
        _: &str,
        _: Bytes,
    ) -> Result<String, RegistryError> {
        Err(unavailable(reference, "an import only reads"))
    }

    async fn put_tag_if(
        &self,
        _: &str,
        tag: &str,
        _: Option<&str>,
        _: &str,
        _: Bytes,
    ) -> Result<Option<String>, RegistryError> {
        Err(unavailable(tag, "an import only reads"))
    }

    async fn get_manifest(
        &self,
        repository: &str,
        reference: &str,
    ) -> Result<Option<Manifest>, RegistryError> {
        self.ask(reference, |answer| Question::Manifest(repository.to_owned(), reference.to_owned(), answer))
            .await
    }

    async fn delete_manifest(&self, _: &str, reference: &str) -> Result<(), RegistryError> {
        Err(unavailable(reference, "an import only reads"))
    }

    async fn delete_tag_if(&self, _: &str, tag: &str, _: &str) -> Result<bool, RegistryError> {
        Err(unavailable(tag, "an import only reads"))
    }
}
