//! The verbs on stored objects.

use std::sync::Arc;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures::stream;
use http::{HeaderValue, Method};
use serde_json::{Value, json};

use super::{
    Call, content_type,
    params::delete_options,
    path::Address,
    view::{Presenter, View},
};
use crate::{
    authz,
    error::{ApiError, respond, respond_json},
    fields::{self, Strictness},
    json::{self, text},
    objects::{Objects, WriteOptions, Written},
    patch::Patch,
    plane::Response,
    resources::Kind,
    rules::{self, Part},
    store::{Filter, Object},
};

/// Pieces in which a long list goes out.
const SEGMENT: usize = 256 << 10;

fn presenter(call: &Call, kind: &'static Kind) -> Result<Presenter, ApiError> {
    let view = View::of(&call.parts.headers, &call.params)?;
    Ok(Presenter { kind, view, now: call.inner.objects.world().now() })
}

/// What a list, watch or collection delete is about.
pub(super) fn filter(call: &Call, kind: &'static Kind, address: &Address) -> Result<Filter, ApiError> {
    let mut selection = call.params.selection(kind)?;
    if !address.name.is_empty() {
        selection = selection.and_name(&address.name);
    }
    let namespace = (!address.namespace.is_empty()).then(|| address.namespace.as_str().into());
    Ok(Filter { table: Some(kind.table), namespace, selection })
}

pub(super) async fn get(call: &Call, kind: &'static Kind, address: &Address) -> Result<Response, ApiError> {
    let presenter = presenter(call, kind)?;
    let object = call.inner.objects.get(kind, &address.namespace, &address.name).await?;
    Ok(respond(200, "application/json", presenter.one(&object, true)))
}

pub(super) async fn list(call: &Call, kind: &'static Kind, address: &Address) -> Result<Response, ApiError> {
    let presenter = presenter(call, kind)?;
    let filter = filter(call, kind, address)?;
    let limit = usize::try_from(call.params.number("limit")?.unwrap_or_default()).unwrap_or(usize::MAX);
    let (now, scope) = (call.inner.objects.world().instant(), scope(call));
    let page = match call.params.get("continue") {
        "" => {
            check_revision(call)?;
            let (objects, revision) = call.inner.objects.list(&filter).await?;
            call.inner.pages.first(now, &scope, objects, revision, limit)
        }
        token => call.inner.pages.next(now, &scope, token, limit)?,
    };
    let mut metadata = json!({ "resourceVersion": page.revision.to_string() });
    if let Some((token, left)) = page.next {
        metadata["continue"] = token.into();
        metadata["remainingItemCount"] = left.into();
    }
    Ok(list_response(presenter, &metadata, page.objects))
}

fn scope(call: &Call) -> String {
    let get = |name| call.params.get(name);
    format!("{} {} {}", call.parts.uri.path(), get("labelSelector"), get("fieldSelector"))
}

/// The store keeps one version: an exact older one is gone, a future one does not exist.
fn check_revision(call: &Call) -> Result<(), ApiError> {
    let (asked, current) = (revision(call)?.unwrap_or_default(), call.inner.objects.store().revision());
    if asked > current {
        let message = format!("Too large resource version: {asked}, current: {current}");
        return Err(ApiError::new(504, "Timeout", message));
    }
    if call.params.get("resourceVersionMatch") == "Exact" && asked < current {
        return Err(ApiError::expired(format!(
            "The provided resource version is too old: {asked} ({current})"
        )));
    }
    Ok(())
}

/// The revision in the query.
pub(super) fn revision(call: &Call) -> Result<Option<u64>, ApiError> {
    match call.params.get("resourceVersion") {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| {
            ApiError::bad_request(format!(
                "resourceVersion: Invalid value: \"{text}\": not a revision of this server"
            ))
        }),
    }
}

/// A list, cut into segments so that a long one is never in memory twice as a whole.
fn list_response(presenter: Presenter, metadata: &Value, objects: Vec<Arc<Object>>) -> Response {
    let (head, tail) = presenter.list_frame(metadata);
    let mut items = objects.into_iter().enumerate();
    let mut head = Some(Bytes::from(head));
    let mut open = true;
    let mut segment = move || {
        if !open {
            return None;
        }
        let mut buffer = BytesMut::from(head.take().unwrap_or_default());
        while buffer.len() < SEGMENT {
            let Some((at, object)) = items.next() else {
                buffer.extend_from_slice(tail.as_bytes());
                open = false;
                break;
            };
            if at > 0 {
                buffer.extend_from_slice(b",");
            }
            buffer.extend_from_slice(&presenter.item(&object));
        }
        Some(buffer.freeze())
    };
    let first = segment().unwrap_or_default();
    match segment() {
        None => respond(200, "application/json", first),
        Some(second) => {
            let rest = std::iter::once(first).chain([second]).chain(std::iter::from_fn(segment));
            let chunks = rest.map(Ok::<_, std::convert::Infallible>);
            respond(200, "application/json", Body::from_stream(stream::iter(chunks)))
        }
    }
}

/// A body in `kind`'s form with its name and namespace agreeing with the path.
fn accept_body(kind: &Kind, address: &Address, value: &mut Value) -> Result<(), ApiError> {
    if !value.is_object() {
        return Err(ApiError::bad_request("the body of the request must be an object"));
    }
    let (version, name) = (text(value, "/apiVersion"), text(value, "/kind"));
    let wrong_version = !version.is_empty() && version != kind.api_version();
    if wrong_version || (!name.is_empty() && name != kind.kind) {
        let message = format!(
            "{name} in version \"{version}\" cannot be handled as a {}: the path takes {} {}",
            kind.kind,
            kind.api_version(),
            kind.kind
        );
        return Err(ApiError::bad_request(message));
    }
    kind.stamp(value);
    check_place(kind, address, value)
}

fn check_place(kind: &Kind, address: &Address, value: &Value) -> Result<(), ApiError> {
    let namespace = text(value, "/metadata/namespace");
    if kind.namespaced && !namespace.is_empty() && namespace != address.namespace {
        return Err(ApiError::bad_request(format!(
            "the namespace of the provided object does not match the namespace sent on the request ({namespace} \
             and {})",
            address.namespace
        )));
    }
    let name = text(value, "/metadata/name");
    if !address.name.is_empty() && !name.is_empty() && name != address.name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({name}) does not match the name on the URL ({})",
            address.name
        )));
    }
    Ok(())
}

fn write_options(call: &Call) -> Result<WriteOptions, ApiError> {
    Ok(WriteOptions { dry_run: call.params.dry_run()? })
}

/// Refuses on complaints, or turns them into warnings.
fn judge(kind: &Kind, strictness: Strictness, complaints: Vec<String>) -> Result<Vec<String>, ApiError> {
    match strictness {
        Strictness::Ignore => Ok(Vec::new()),
        Strictness::Warn => Ok(complaints),
        Strictness::Strict if complaints.is_empty() => Ok(complaints),
        Strictness::Strict => Err(ApiError::bad_request(format!(
            "{} in version \"{}\" cannot be handled as a {}: strict decoding error: {}",
            kind.kind,
            kind.version,
            kind.kind,
            complaints.join(", ")
        ))),
    }
}

fn written(presenter: Presenter, written: &Written, warnings: &[String]) -> Response {
    let code = if written.created { 201 } else { 200 };
    warned(respond(code, "application/json", presenter.one(&written.object, true)), warnings)
}

fn warned(mut response: Response, warnings: &[String]) -> Response {
    for warning in warnings {
        let text = format!("299 - \"{}\"", warning.replace('\\', "\\\\").replace('"', "\\\""));
        if let Ok(value) = HeaderValue::from_str(&text) {
            response.headers_mut().append(http::header::WARNING, value);
        }
    }
    response
}

pub(super) async fn create(
    call: &Call,
    body: Body,
    kind: &'static Kind,
    address: &Address,
) -> Result<Response, ApiError> {
    let presenter = presenter(call, kind)?;
    let (options, strictness) = (write_options(call)?, call.params.strictness()?);
    let body = call.inner.bodies.read(body).await?;
    let (mut value, mut complaints) = fields::parse(&content_type(&call.parts.headers), &body)?;
    accept_body(kind, address, &mut value)?;
    authz::check_created(&call.user, kind, text(&value, "/metadata/name"))?;
    // Judged before anything is stored.
    complaints.extend(fields::check_type(kind, &mut value)?);
    let warnings = judge(kind, strictness, complaints)?;
    let done = call.inner.objects.create(kind, &address.namespace, value, options).await?;
    Ok(written(presenter, &done, &warnings))
}

/// PUT and PATCH, of the object or its status.
pub(super) async fn change(
    call: &Call,
    body: Body,
    kind: &'static Kind,
    address: &Address,
) -> Result<Response, ApiError> {
    let presenter = presenter(call, kind)?;
    let change = Change {
        kind,
        address,
        strictness: call.params.strictness()?,
        options: write_options(call)?,
        part: if address.subresource == "status" { Part::Status } else { Part::Main },
    };
    let content_type = content_type(&call.parts.headers);
    let body = call.inner.bodies.read(body).await?;
    let objects = &call.inner.objects;
    let (done, complaints) = if call.parts.method == Method::PATCH {
        let (patch, complaints) = Patch::parse(&content_type, &body)?;
        change.patch(objects, &patch, complaints).await?
    } else {
        let (value, complaints) = fields::parse(&content_type, &body)?;
        change.put(objects, value, complaints).await?
    };
    let warnings = judge(kind, change.strictness, complaints)?;
    Ok(written(presenter, &done, &warnings))
}

/// A PUT or PATCH on its way.
struct Change<'a> {
    kind: &'static Kind,
    address: &'a Address,
    strictness: Strictness,
    options: WriteOptions,
    part: Part,
}

impl Change<'_> {
    async fn patch(
        &self,
        objects: &Objects,
        patch: &Patch,
        mut complaints: Vec<String>,
    ) -> Result<(Written, Vec<String>), ApiError> {
        judge(self.kind, self.strictness, complaints.clone())?;
        let apply = |old| {
            let mut new = patch.apply(self.kind, old)?;
            accept_body(self.kind, self.address, &mut new)?;
            self.refuse_unknown(&new, &complaints)?;
            Ok(new)
        };
        let Address { namespace, name, .. } = self.address;
        let done = objects.update(self.kind, namespace, name, self.part, self.options, apply).await?;
        complaints.extend(done.complaints.iter().cloned());
        Ok((done, complaints))
    }

    async fn put(
        &self,
        objects: &Objects,
        mut value: Value,
        mut complaints: Vec<String>,
    ) -> Result<(Written, Vec<String>), ApiError> {
        accept_body(self.kind, self.address, &mut value)?;
        let word = |field: &str| text(&value, &format!("/metadata/{field}"));
        if word("name").is_empty() {
            return Err(ApiError::bad_request("the name of the object must be set: metadata.name is empty"));
        }
        self.refuse_unknown(&value, &complaints)?;
        // A body with uid or revision means an object that existed.
        let fresh = word("uid").is_empty() && word("resourceVersion").is_empty();
        let (kind, Address { namespace, name, .. }) = (self.kind, self.address);
        let done = if fresh && kind.create_on_update && objects.find(kind, namespace, name).is_none() {
            objects.create(kind, namespace, value, self.options).await?
        } else {
            let replace = |_| Ok(value.clone());
            objects.update(kind, namespace, name, self.part, self.options, replace).await?
        };
        complaints.extend(done.complaints.iter().cloned());
        Ok((done, complaints))
    }

    /// Strict: refused here. Else the update itself drops what is unknown and reports it.
    fn refuse_unknown(&self, new: &Value, before: &[String]) -> Result<(), ApiError> {
        if self.strictness == Strictness::Strict {
            let mut complaints = before.to_vec();
            complaints.extend(fields::check_type(self.kind, &mut new.clone())?);
            judge(self.kind, self.strictness, complaints)?;
        }
        Ok(())
    }
}

/// The body of a write to a subresource, and warnings about fields given twice.
fn judged_body(call: &Call, body: &[u8], kind: &Kind) -> Result<(Value, Vec<String>), ApiError> {
    let (value, complaints) = fields::parse(&content_type(&call.parts.headers), body)?;
    Ok((value, judge(kind, call.params.strictness()?, complaints)?))
}

async fn delete_body(call: &Call, body: Body) -> Result<Value, ApiError> {
    let body = call.inner.bodies.read(body).await?;
    if body.is_empty() {
        return Ok(json!({}));
    }
    fields::parse(&content_type(&call.parts.headers), &body).map(|(value, _)| value)
}

/// How a delete is to be done and shown.
async fn asked_delete(
    call: &Call,
    body: Body,
    kind: &'static Kind,
) -> Result<(Presenter, rules::DeleteOptions), ApiError> {
    let presenter = presenter(call, kind)?;
    let body = delete_body(call, body).await?;
    Ok((presenter, delete_options(&call.params, &body)?))
}

pub(super) async fn delete(
    call: &Call,
    body: Body,
    kind: &'static Kind,
    address: &Address,
) -> Result<Response, ApiError> {
    let (presenter, options) = asked_delete(call, body, kind).await?;
    let deleted = call.inner.objects.delete(kind, &address.namespace, &address.name, &options).await?;
    if !deleted.removed || kind.returns_deleted {
        return Ok(respond(200, "application/json", presenter.one(&deleted.object, true)));
    }
    let mut details = json!({ "name": address.name, "kind": kind.plural, "uid": &*deleted.object.uid });
    if !kind.group.is_empty() {
        details["group"] = kind.group.into();
    }
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details,
    });
    Ok(respond_json(200, &status))
}

pub(super) async fn delete_collection(
    call: &Call,
    body: Body,
    kind: &'static Kind,
    address: &Address,
) -> Result<Response, ApiError> {
    let (presenter, options) = asked_delete(call, body, kind).await?;
    if kind.namespaced && address.namespace.is_empty() {
        return Err(ApiError::method_not_allowed("deletecollection over all namespaces"));
    }
    let filter = filter(call, kind, address)?;
    let (objects, revision) = call.inner.objects.list(&filter).await?;
    let mut deleted = Vec::with_capacity(objects.len());
    for object in objects {
        match call.inner.objects.delete(kind, &object.key.namespace, &object.key.name, &options).await {
            Ok(done) => deleted.push(done.object),
            Err(error) if error.code == 404 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(list_response(presenter, &json!({ "resourceVersion": revision.to_string() }), deleted))
}

/// `namespaces/NAME/finalize`: sets `spec.finalizers`.
pub(super) async fn finalize(
    call: &Call,
    body: Body,
    kind: &'static Kind,
    address: &Address,
) -> Result<Response, ApiError> {
    let presenter = presenter(call, kind)?;
    let options = write_options(call)?;
    let (mut value, warnings) = judged_body(call, &call.inner.bodies.read(body).await?, kind)?;
    accept_body(kind, address, &mut value)?;
    let finalizers = value.pointer("/spec/finalizers").cloned();
    let (uid, revision) = (text(&value, "/metadata/uid"), text(&value, "/metadata/resourceVersion"));
    let set = |mut old: Value| {
        rules::check_preconditions(kind, &old, uid, revision)?;
        json::put(json::object(&mut old, "spec"), "finalizers", finalizers.clone());
        Ok(old)
    };
    let done = call.inner.objects.update(kind, "", &address.name, Part::Inner, options, set).await?;
    Ok(written(presenter, &done, &warnings))
}

/// `pods/NAME/binding`.
pub(super) async fn bind(
    call: &Call,
    body: Body,
    kind: &'static Kind,
    address: &Address,
) -> Result<Response, ApiError> {
    let options = write_options(call)?;
    let (value, warnings) = judged_body(call, &call.inner.bodies.read(body).await?, kind)?;
    let (target, node) = (text(&value, "/target/kind"), text(&value, "/target/name"));
    if !matches!(target, "" | "Node") || node.is_empty() {
        return Err(ApiError::bad_request("the target of a binding must be a Node with a name"));
    }
    check_place(kind, address, &value)?;
    let (uid, revision) = (text(&value, "/metadata/uid"), text(&value, "/metadata/resourceVersion"));
    let now = rules::stamp(call.inner.objects.world().now());
    let bind = |old: Value| {
        rules::check_preconditions(kind, &old, uid, revision)?;
        rules::bound(kind, old, node, &now)
    };
    let (namespace, name) = (&address.namespace, &address.name);
    call.inner.objects.update(kind, namespace, name, Part::Inner, options, bind).await?;
    let status =
        json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201 });
    Ok(warned(respond_json(201, &status), &warnings))
}

/// `pods/NAME/eviction`: a delete; there are no disruption budgets to ask.
pub(super) async fn evict(
    call: &Call,
    body: Body,
    kind: &'static Kind,
    address: &Address,
) -> Result<Response, ApiError> {
    let body = call.inner.bodies.read(body).await?;
    let (body, warnings) =
        if body.is_empty() { (json!({}), Vec::new()) } else { judged_body(call, &body, kind)? };
    let mut options = delete_options(&call.params, &body["deleteOptions"])?;
    options.dry_run |= call.params.dry_run()?;
    call.inner.objects.delete(kind, &address.namespace, &address.name, &options).await?;
    let status =
        json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201 });
    Ok(warned(respond_json(201, &status), &warnings))
}
