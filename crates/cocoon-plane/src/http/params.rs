//! Query parameters and delete options.

use serde_json::Value;

use crate::{
    error::ApiError,
    fields::Strictness,
    json::text,
    resources::Kind,
    rules::{DeleteOptions, Propagation},
    selector::Selection,
};

/// The query of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Params(Vec<(String, String)>);

impl Params {
    pub(crate) fn parse(query: Option<&str>) -> Self {
        let pairs = url::form_urlencoded::parse(query.unwrap_or_default().as_bytes());
        Self(pairs.into_owned().collect())
    }

    /// The first value of `name`, or `""`.
    pub(crate) fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool, ApiError> {
        match self.get(name) {
            "" if self.all(name).next().is_some() => Ok(true),
            "" | "0" | "false" | "f" | "F" | "False" | "FALSE" => Ok(false),
            "1" | "true" | "t" | "T" | "True" | "TRUE" => Ok(true),
            other => {
                Err(ApiError::bad_request(format!("invalid value \"{other}\" for {name}: not a boolean")))
            }
        }
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<u64>, ApiError> {
        match self.get(name) {
            "" => Ok(None),
            digits => digits.parse().map(Some).map_err(|_| {
                ApiError::bad_request(format!("invalid value \"{digits}\" for {name}: not a whole number"))
            }),
        }
    }

    /// True for `dryRun=All`.
    pub(crate) fn dry_run(&self) -> Result<bool, ApiError> {
        let mut found = false;
        for value in self.all("dryRun") {
            match value {
                "All" => found = true,
                other => return Err(bad_dry_run(other)),
            }
        }
        Ok(found)
    }

    pub(crate) fn strictness(&self) -> Result<Strictness, ApiError> {
        match self.get("fieldValidation") {
            "" | "Warn" => Ok(Strictness::Warn),
            "Ignore" => Ok(Strictness::Ignore),
            "Strict" => Ok(Strictness::Strict),
            other => Err(ApiError::bad_request(format!(
                "invalid value \"{other}\" for fieldValidation: supported values: \"Ignore\", \"Warn\", \"Strict\""
            ))),
        }
    }

    pub(crate) fn selection(&self, kind: &Kind) -> Result<Selection, ApiError> {
        Selection::parse(kind, self.get("labelSelector"), self.get("fieldSelector"))
            .map_err(ApiError::bad_request)
    }
}

fn bad_dry_run(found: &str) -> ApiError {
    ApiError::bad_request(format!("invalid value \"{found}\" for dryRun: supported values: \"All\""))
}

/// Delete options from the query and the body; the body wins.
pub(crate) fn delete_options(params: &Params, body: &Value) -> Result<DeleteOptions, ApiError> {
    let kind = text(body, "/kind");
    if !matches!(kind, "" | "DeleteOptions") {
        let message = format!("the body of a delete must be DeleteOptions, not {kind}");
        return Err(ApiError::bad_request(message));
    }
    let mut grace = match params.get("gracePeriodSeconds") {
        "" => None,
        digits => Some(digits.parse().map_err(|_| {
            ApiError::bad_request(format!(
                "invalid value \"{digits}\" for gracePeriodSeconds: not a whole number"
            ))
        })?),
    };
    if let Some(value) = body.get("gracePeriodSeconds").filter(|value| !value.is_null()) {
        grace = Some(
            value
                .as_i64()
                .ok_or_else(|| ApiError::bad_request("gracePeriodSeconds must be a whole number"))?,
        );
    }
    if grace.is_some_and(|grace| grace < 0) {
        return Err(ApiError::bad_request("gracePeriodSeconds must be greater than or equal to 0"));
    }
    let mut dry_run = params.dry_run()?;
    for value in crate::json::list(body, "/dryRun") {
        match value.as_str() {
            Some("All") => dry_run = true,
            _ => return Err(bad_dry_run(&value.to_string())),
        }
    }
    Ok(DeleteOptions {
        grace,
        uid: text(body, "/preconditions/uid").into(),
        revision: text(body, "/preconditions/resourceVersion").into(),
        propagation: propagation(params, body)?,
        dry_run,
    })
}

fn propagation(params: &Params, body: &Value) -> Result<Propagation, ApiError> {
    let named = match text(body, "/propagationPolicy") {
        "" => params.get("propagationPolicy"),
        found => found,
    };
    match named {
        "" if crate::json::flag(body, "/orphanDependents") || params.flag("orphanDependents")? => {
            Ok(Propagation::Orphan)
        }
        "" | "Background" => Ok(Propagation::Background),
        "Foreground" => Ok(Propagation::Foreground),
        "Orphan" => Ok(Propagation::Orphan),
        other => Err(ApiError::bad_request(format!(
            "invalid value \"{other}\" for propagationPolicy: supported values: \"Foreground\", \"Background\", \
             \"Orphan\""
        ))),
    }
}
