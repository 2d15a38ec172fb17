//! Questions that are answered and not stored: who am I, whose token is this, may someone do this, what may I do.

use serde_json::{Value, json};

use super::{Call, content_type, path::Address};
use crate::{
    authz::{self, Attributes},
    error::{ApiError, respond_json},
    fields,
    json::{list, text},
    plane::{Response, User},
};

/// A kind of question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Review {
    Myself,
    Token,
    MyAccess,
    Access,
    MyRules,
}

impl Review {
    pub(super) fn of(address: &Address) -> Option<Self> {
        match (address.group.as_str(), address.version.as_str(), address.resource.as_str()) {
            ("authentication.k8s.io", "v1", "selfsubjectreviews") => Some(Self::Myself),
            ("authentication.k8s.io", "v1", "tokenreviews") => Some(Self::Token),
            ("authorization.k8s.io", "v1", "selfsubjectaccessreviews") => Some(Self::MyAccess),
            ("authorization.k8s.io", "v1", "selfsubjectrulesreviews") => Some(Self::MyRules),
            ("authorization.k8s.io", "v1", "subjectaccessreviews") => Some(Self::Access),
            _ => None,
        }
    }
}

fn user_info(user: &User) -> Value {
    json!({ "username": user.name, "groups": user.groups })
}

pub(super) async fn answer(
    call: &Call,
    body: axum::body::Body,
    review: Review,
) -> Result<Response, ApiError> {
    if call.parts.method != http::Method::POST {
        return Err(ApiError::method_not_allowed(call.parts.method.as_str()));
    }
    let body = call.inner.bodies.read(body).await?;
    let (mut value, _) = fields::parse(&content_type(&call.parts.headers), &body)?;
    value["status"] = match review {
        Review::Myself => json!({ "userInfo": user_info(&call.user) }),
        Review::Token => match call.inner.token_user(text(&value, "/spec/token")) {
            Some(user) => json!({ "authenticated": true, "user": user_info(&user) }),
            None => json!({ "authenticated": false, "error": "the token is not known" }),
        },
        Review::MyRules => authz::rules(&call.user),
        Review::MyAccess => access(call, &call.user, &value),
        Review::Access => {
            let groups =
                list(&value, "/spec/groups").iter().filter_map(Value::as_str).map(Into::into).collect();
            access(call, &User { name: text(&value, "/spec/user").into(), groups }, &value)
        }
    };
    Ok(respond_json(201, &value))
}

fn access(call: &Call, user: &User, value: &Value) -> Value {
    let word = |field: &str| text(value, &format!("/spec/resourceAttributes/{field}")).to_owned();
    let attributes = if value.pointer("/spec/resourceAttributes").is_some() {
        Attributes {
            verb: word("verb"),
            group: word("group"),
            resource: word("resource"),
            path: String::new(),
            subresource: word("subresource"),
            namespace: word("namespace"),
            name: word("name"),
            node: None,
        }
    } else {
        let word = |field: &str| text(value, &format!("/spec/nonResourceAttributes/{field}")).to_owned();
        Attributes { verb: word("verb"), path: word("path"), ..Attributes::default() }
    };
    match authz::check(user, &attributes, &call.inner.objects) {
        Ok(()) => json!({ "allowed": true }),
        Err(error) => json!({ "allowed": false, "reason": error.message }),
    }
}
