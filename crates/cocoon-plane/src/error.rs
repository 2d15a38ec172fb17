//! Refusals in the API's own words.
//!
//! Entry point: [`ApiError`], which renders as `metav1.Status`. Invariant: code, reason and message
//! are the ones a stock client knows how to print and to classify.

use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::{
    http::path::Address,
    plane::Response,
    resources::{Kind, group_version},
};

/// One thing that is wrong with a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cause {
    pub(crate) reason: &'static str,
    pub(crate) field: String,
    pub(crate) message: String,
}

/// Collects what is wrong with an object, field by field.
#[derive(Debug, Default)]
pub(crate) struct Causes(pub(crate) Vec<Cause>);

impl Causes {
    pub(crate) fn required(&mut self, field: impl Into<String>, hint: &str) {
        let message =
            if hint.is_empty() { "Required value".into() } else { format!("Required value: {hint}") };
        self.0.push(Cause { reason: "FieldValueRequired", field: field.into(), message });
    }

    pub(crate) fn invalid(&mut self, field: impl Into<String>, value: &Value, why: &str) {
        let message = format!("Invalid value: {value}: {why}");
        self.0.push(Cause { reason: "FieldValueInvalid", field: field.into(), message });
    }

    pub(crate) fn unsupported(&mut self, field: impl Into<String>, value: &str, known: &[&str]) {
        let known: Vec<_> = known.iter().map(|k| format!("\"{k}\"")).collect();
        let message = format!("Unsupported value: \"{value}\": supported values: {}", known.join(", "));
        self.0.push(Cause { reason: "FieldValueNotSupported", field: field.into(), message });
    }

    pub(crate) fn duplicate(&mut self, field: impl Into<String>, value: &str) {
        let message = format!("Duplicate value: \"{value}\"");
        self.0.push(Cause { reason: "FieldValueDuplicate", field: field.into(), message });
    }

    pub(crate) fn forbidden(&mut self, field: impl Into<String>, why: &str) {
        let message = format!("Forbidden: {why}");
        self.0.push(Cause { reason: "FieldValueForbidden", field: field.into(), message });
    }

    pub(crate) fn not_found(&mut self, field: impl Into<String>, value: &str) {
        let message = format!("Not found: \"{value}\"");
        self.0.push(Cause { reason: "FieldValueNotFound", field: field.into(), message });
    }

    /// An `Invalid` status if anything was collected.
    pub(crate) fn into_result(self, kind: &Kind, name: &str) -> Result<(), ApiError> {
        if self.0.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, name, self.0)) }
    }
}

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    pub(crate) code: u16,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    details: Option<Box<Value>>,
}

impl ApiError {
    pub(crate) fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: None }
    }

    fn with(mut self, details: Value) -> Self {
        self.details = Some(Box::new(details));
        self
    }

    pub(crate) fn not_found(kind: &Kind, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} \"{name}\" not found", kind.qualified())).with(about(
            kind,
            kind.plural,
            name,
        ))
    }

    pub(crate) fn no_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource").with(json!({}))
    }

    /// As [`Self::no_path`], about a resource or subresource that this plane does not have. The beginning is what
    /// clients know.
    pub(crate) fn not_served(address: &Address) -> Self {
        let Address { group, version, resource, subresource, .. } = address;
        let part = if subresource.is_empty() { String::new() } else { format!("/{subresource}") };
        let mut error = Self::no_path();
        error.message.push_str(&format!(
            " ({}, {resource}{part} is not served by this API of one machine; `kubectl api-resources` lists what is)",
            group_version(group, version)
        ));
        error
    }

    pub(crate) fn already_exists(kind: &Kind, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} \"{name}\" already exists", kind.qualified()))
            .with(about(kind, kind.plural, name))
    }

    pub(crate) fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} \"{name}\": {why}", kind.qualified());
        Self::new(409, "Conflict", message).with(about(kind, kind.plural, name))
    }

    pub(crate) fn modified(kind: &Kind, name: &str) -> Self {
        Self::conflict(
            kind,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    pub(crate) fn invalid(kind: &Kind, name: &str, causes: Vec<Cause>) -> Self {
        let lines: Vec<_> = causes.iter().map(|c| format!("{}: {}", c.field, c.message)).collect();
        let text = if lines.len() == 1 { lines[0].clone() } else { format!("[{}]", lines.join(", ")) };
        let mut details = about(kind, kind.kind, name);
        details["causes"] = causes
            .iter()
            .map(|c| json!({ "reason": c.reason, "message": c.message, "field": c.field }))
            .collect();
        Self::new(422, "Invalid", format!("{} \"{name}\" is invalid: {text}", kind.kind_group()))
            .with(details)
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(crate) fn forbidden(kind: &Kind, name: &str, why: &str) -> Self {
        let what = if name.is_empty() {
            format!("{} is forbidden: {why}", kind.qualified())
        } else {
            format!("{} \"{name}\" is forbidden: {why}", kind.qualified())
        };
        Self::new(403, "Forbidden", what).with(about(kind, kind.plural, name))
    }

    pub(crate) fn terminating(kind: &Kind, name: &str, namespace: &str) -> Self {
        let why =
            format!("unable to create new content in namespace {namespace} because it is being terminated");
        let mut error = Self::forbidden(kind, name, &why);
        if let Some(details) = &mut error.details {
            let message = format!("namespace {namespace} is being terminated");
            details["causes"] = json!([{ "reason": "NamespaceTerminating", "message": message, "field": "metadata.namespace" }]);
        }
        error
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    pub(crate) fn method_not_allowed(what: &str) -> Self {
        let message = format!("the server does not allow this method on the requested resource: {what}");
        Self::new(405, "MethodNotAllowed", message).with(json!({}))
    }

    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    pub(crate) fn internal(message: impl std::fmt::Display) -> Self {
        Self::new(500, "InternalError", format!("Internal error occurred: {message}"))
    }

    pub(crate) fn not_implemented(message: impl Into<String>) -> Self {
        Self::new(501, "NotImplemented", message)
    }

    pub(crate) fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        });
        if let Some(details) = &self.details {
            status["details"] = (**details).clone();
        }
        status
    }

    pub(crate) fn into_response(self) -> Response {
        let mut response = respond_json(self.code, &self.status());
        if self.code == 429 || self.code == 503 {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

fn about(kind: &Kind, word: &str, name: &str) -> Value {
    let mut details = json!({ "kind": word });
    if !name.is_empty() {
        details["name"] = name.into();
    }
    if !kind.group.is_empty() {
        details["group"] = kind.group.into();
    }
    details
}

/// A JSON response.
pub(crate) fn respond_json(code: u16, value: &Value) -> Response {
    respond(code, "application/json", Bytes::from(value.to_string()))
}

/// A response with a known body.
pub(crate) fn respond(code: u16, content_type: &'static str, body: impl Into<axum::body::Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
