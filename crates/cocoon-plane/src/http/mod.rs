//! Requests to answers.
//!
//! Entry point: [`handle`]. Flow: identity is known before the path is looked at; then the path names a
//! target, the user is checked against it, then the verb runs. Submodules: `path` and `params` read the
//! request, `bodies` its body, `verbs` and `watch` do the work, `view` shapes answers, `discovery`, `openapi` and
//! `reviews` serve what is not stored.

mod bodies;
pub(crate) mod discovery;
mod openapi;
mod pages;
pub(crate) mod params;
pub(crate) mod path;
mod reviews;
mod verbs;
mod view;
mod watch;

pub(crate) use bodies::Bodies;
pub(crate) use watch::Closing;

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderMap, Method, header, request::Parts};
pub(crate) use pages::Pages;
use path::{Address, Target};

use crate::{
    authz::{self, Attributes},
    error::{ApiError, respond, respond_json},
    plane::{Inner, Request, Response, User},
    proxy,
    resources::{self, Kind},
};

/// One request on its way, without its body.
pub(crate) struct Call {
    pub(crate) inner: Arc<Inner>,
    pub(crate) user: User,
    pub(crate) parts: Parts,
    pub(crate) params: params::Params,
}

/// Answers a request of a known user.
pub(crate) async fn handle(inner: Arc<Inner>, user: User, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let params = params::Params::parse(parts.uri.query());
    let call = Call { inner, user, parts, params };
    route(&call, body).await.unwrap_or_else(ApiError::into_response)
}

async fn route(call: &Call, body: Body) -> Result<Response, ApiError> {
    if call.parts.headers.keys().any(|name| name.as_str().starts_with("impersonate-")) {
        return Err(ApiError::new(403, "Forbidden", "impersonation is not served: ask as yourself"));
    }
    let target = Target::parse(call.parts.uri.path()).ok_or_else(ApiError::no_path)?;
    match target {
        Target::Other(words) => other(call, &words),
        Target::GroupVersion { group, version } => {
            only_get(call)?;
            view::check_accept(&call.parts.headers)?;
            let found = discovery::resources(&group, &version).ok_or_else(ApiError::no_path)?;
            Ok(respond_json(200, &found))
        }
        Target::Resource(address) => resource(call, body, &address).await,
    }
}

fn only_get(call: &Call) -> Result<(), ApiError> {
    match call.parts.method {
        Method::GET | Method::HEAD => Ok(()),
        ref method => Err(ApiError::method_not_allowed(method.as_str())),
    }
}

/// What is neither stored nor below a group version.
fn other(call: &Call, words: &[String]) -> Result<Response, ApiError> {
    only_get(call)?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["healthz" | "livez", ..] => Ok(respond(200, "text/plain; charset=utf-8", "ok")),
        ["readyz", ..] => {
            call.inner.objects.durability().ready()?;
            Ok(respond(200, "text/plain; charset=utf-8", "ok"))
        }
        ["version"] => Ok(respond_json(200, &discovery::version())),
        ["api"] => discovery::core(&call.parts.headers),
        ["apis"] => discovery::groups(&call.parts.headers),
        ["apis", group] => {
            discovery::group(group).map(|found| respond_json(200, &found)).ok_or_else(ApiError::no_path)
        }
        ["openapi", "v2"] => Ok(openapi::version_2(&call.parts.headers)),
        ["openapi", "v3"] => Ok(respond_json(200, &openapi::index())),
        ["openapi", "v3", rest @ ..] => {
            openapi::document(rest).map(|found| respond_json(200, &found)).ok_or_else(ApiError::no_path)
        }
        ["metrics"] => {
            authz::check(&call.user, &Attributes::of_path("/metrics"), &call.inner.objects)?;
            Ok(respond(200, "text/plain; version=0.0.4", metrics(&call.inner)))
        }
        _ => Err(ApiError::no_path()),
    }
}

fn metrics(inner: &Inner) -> String {
    let (store, journal) = (inner.objects.store(), inner.objects.durability());
    let (body_bytes, bodies_refused) = inner.bodies.figures();
    format!(
        "# TYPE cocoon_plane_revision counter\ncocoon_plane_revision {}\n\
         # TYPE cocoon_plane_window_oldest gauge\ncocoon_plane_window_oldest {}\n\
         # TYPE cocoon_plane_watchers_ended_total counter\ncocoon_plane_watchers_ended_total {}\n\
         # TYPE cocoon_plane_journal_waiting_bytes gauge\ncocoon_plane_journal_waiting_bytes {}\n\
         # TYPE cocoon_plane_journal_refused_total counter\ncocoon_plane_journal_refused_total {}\n\
         # TYPE cocoon_plane_connections_refused_total counter\ncocoon_plane_connections_refused_total {}\n\
         # TYPE cocoon_plane_body_bytes gauge\ncocoon_plane_body_bytes {body_bytes}\n\
         # TYPE cocoon_plane_bodies_refused_total counter\ncocoon_plane_bodies_refused_total {bodies_refused}\n",
        store.revision(),
        store.oldest(),
        store.ended_watchers(),
        journal.waiting(),
        journal.refused(),
        inner.refused.count()
    )
}

/// The API's word for what a request does.
fn verb(call: &Call, address: &Address) -> Result<&'static str, ApiError> {
    let collection = address.name.is_empty();
    Ok(match (&call.parts.method, collection) {
        (&Method::GET | &Method::HEAD, _) if call.params.flag("watch")? && address.subresource.is_empty() => {
            "watch"
        }
        (&Method::GET | &Method::HEAD, true) => "list",
        (&Method::GET | &Method::HEAD, false) => "get",
        (&Method::POST, true) => "create",
        // Subresources such as exec and binding.
        (&Method::POST, false) if !address.subresource.is_empty() => "create",
        (&Method::PUT, false) => "update",
        (&Method::PATCH, false) => "patch",
        (&Method::DELETE, true) => "deletecollection",
        (&Method::DELETE, false) => "delete",
        (method, _) => return Err(ApiError::method_not_allowed(method.as_str())),
    })
}

async fn resource(call: &Call, body: Body, address: &Address) -> Result<Response, ApiError> {
    let verb = verb(call, address)?;
    let attributes = Attributes::of(verb, address, &call.params);
    authz::check(&call.user, &attributes, &call.inner.objects)?;
    if let Some(review) = reviews::Review::of(address) {
        return reviews::answer(call, body, review).await;
    }
    let kind = resources::by_path(&address.group, &address.version, &address.resource)
        .ok_or_else(|| ApiError::not_served(address))?;
    if kind.namespaced == address.namespace.is_empty() && !(kind.namespaced && address.name.is_empty()) {
        return Err(ApiError::no_path());
    }
    match (address.subresource.as_str(), verb) {
        ("", "watch") => watch::answer(call, kind, address),
        ("", "list") => verbs::list(call, kind, address).await,
        ("", "get") => verbs::get(call, kind, address).await,
        ("", "create") if kind.namespaced && address.namespace.is_empty() => {
            Err(ApiError::method_not_allowed("create without a namespace"))
        }
        ("", "create") => verbs::create(call, body, kind, address).await,
        ("", "delete") => verbs::delete(call, body, kind, address).await,
        ("", "deletecollection") => verbs::delete_collection(call, body, kind, address).await,
        ("", _) => verbs::change(call, body, kind, address).await,
        ("status", "get") if kind.status => verbs::get(call, kind, address).await,
        ("status", "update" | "patch") if kind.status => verbs::change(call, body, kind, address).await,
        (subresource, _) => special(call, body, kind, address, subresource, verb).await,
    }
}

async fn special(
    call: &Call,
    body: Body,
    kind: &'static Kind,
    address: &Address,
    subresource: &str,
    verb: &str,
) -> Result<Response, ApiError> {
    match (kind.table, subresource, verb) {
        ("namespaces", "finalize", "update") => verbs::finalize(call, body, kind, address).await,
        ("pods", "binding", "create") => verbs::bind(call, body, kind, address).await,
        ("pods", "eviction", "create") => verbs::evict(call, body, kind, address).await,
        ("pods", "log", "get") => proxy::logs(call, kind, address).await,
        ("pods", "exec", "get" | "create") => proxy::exec(call, kind, address).await,
        ("pods", "attach" | "portforward", _) => {
            let message = format!("pods/{subresource} is not in this release: use kubectl exec");
            Err(ApiError::not_implemented(message))
        }
        _ => Err(ApiError::not_served(address)),
    }
}

/// Content type without parameters, in lower case.
pub(crate) fn content_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_lowercase()
}
