//! Errors as problem details (RFC 9457), media type `application/problem+json`.

use std::fmt;

use hyper::StatusCode;
use serde::{Deserialize, Serialize};

use crate::{PoolName, SqlError};

/// Media type of every answer that is not 2xx.
pub const PROBLEM_MEDIA_TYPE: &str = "application/problem+json";

/// Reasons that clients act on. Others are for people and logs.
pub mod reason {
    pub const LEASE_NOT_FOUND: &str = "LeaseNotFound";
    /// The pool is known and has no ready branch now; `retryAfterMs` says when to look again.
    pub const NO_BRANCH_READY: &str = "NoBranchReady";
    pub const POOL_NOT_FOUND: &str = "PoolNotFound";
    pub const INVALID_FIELD: &str = "InvalidField";
    /// Postgres refused a query; `postgres` holds its error.
    pub const POSTGRES_ERROR: &str = "PostgresError";
    /// A newer leader has commanded the node; `epoch` holds its number.
    pub const STALE_EPOCH: &str = "StaleEpoch";
    pub const TOO_MANY_WATCHERS: &str = "TooManyWatchers";
}

/// A field that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldError {
    /// Path of the field in the body, such as `pool.name`.
    pub field: String,
    pub message: String,
}

impl FieldError {
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            message: message.into(),
        }
    }
}

/// Body of every answer that is not 2xx.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// `about:blank#` and the reason in kebab case.
    #[serde(rename = "type")]
    pub kind: String,
    /// CamelCase word for programs: `PoolNotFound`, `NoBranchReady`, `InvalidField`, …
    pub reason: String,
    /// Short text for the status code.
    pub title: String,
    pub status: u16,
    /// What failed, with what, and what to do.
    pub detail: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// When a retry may work, in milliseconds from now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// Of the newest leader, where a command came from an older one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// What Postgres said, where it refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postgres: Option<Box<SqlError>>,
}

impl Problem {
    /// `type` and `title` follow from the reason and the status.
    pub fn new(status: u16, reason: &str, detail: impl Into<String>) -> Self {
        let title = StatusCode::from_u16(status)
            .ok()
            .and_then(|code| code.canonical_reason())
            .unwrap_or("Error");
        Self {
            kind: format!("about:blank#{}", kebab_case(reason)),
            reason: reason.to_owned(),
            title: title.to_owned(),
            status,
            detail: detail.into(),
            errors: Vec::new(),
            retry_after_ms: None,
            epoch: None,
            postgres: None,
        }
    }

    /// 422 that names each refused field.
    pub fn invalid_fields(errors: Vec<FieldError>) -> Self {
        let detail = errors
            .iter()
            .map(|error| match error.field.as_str() {
                "" => error.message.clone(),
                field => format!("{field}: {}", error.message),
            })
            .collect::<Vec<_>>()
            .join("; ");
        Self {
            errors,
            ..Self::new(422, reason::INVALID_FIELD, detail)
        }
    }

    /// 422 for one field.
    pub fn invalid_field(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid_fields(vec![FieldError::new(field, message)])
    }

    /// 404 that lists the pools there are, at most ten of them.
    pub fn pool_not_found<'a>(
        wanted: &PoolName,
        pools: impl IntoIterator<Item = &'a PoolName>,
    ) -> Self {
        const LISTED: usize = 10;
        let mut names: Vec<_> = pools.into_iter().map(ToString::to_string).collect();
        names.sort();
        let others = match names.len() {
            0 => "this node has no pools".to_owned(),
            1..=LISTED => format!("there are {}", names.join(", ")),
            more => format!(
                "there are {}, and {} more",
                names[..LISTED].join(", "),
                more - LISTED
            ),
        };
        Self::new(
            404,
            reason::POOL_NOT_FOUND,
            format!("there is no pool {wanted}; {others}"),
        )
    }

    #[must_use]
    pub fn with_epoch(mut self, epoch: u64) -> Self {
        self.epoch = Some(epoch);
        self
    }

    #[must_use]
    pub fn with_retry_after_ms(mut self, milliseconds: u64) -> Self {
        self.retry_after_ms = Some(milliseconds);
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}

fn kebab_case(words: &str) -> String {
    let mut kebab = String::with_capacity(words.len() + 4);
    for (index, letter) in words.chars().enumerate() {
        if letter.is_ascii_uppercase() && index > 0 {
            kebab.push('-');
        }
        kebab.push(letter.to_ascii_lowercase());
    }
    kebab
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_and_title_follow_from_reason_and_status() {
        let problem = Problem::new(503, reason::NO_BRANCH_READY, "none").with_retry_after_ms(250);
        assert_eq!(problem.kind, "about:blank#no-branch-ready");
        assert_eq!(problem.title, "Service Unavailable");
        let json = serde_json::to_value(&problem).unwrap();
        assert_eq!(json["type"], "about:blank#no-branch-ready");
        assert_eq!(json["retryAfterMs"], 250);
        assert!(json.get("errors").is_none());
    }

    #[test]
    fn detail_names_every_refused_field() {
        let problem = Problem::invalid_fields(vec![
            FieldError::new("pool.name", "too long"),
            FieldError::new("ttlSeconds", "zero"),
        ]);
        assert_eq!(problem.status, 422);
        assert_eq!(problem.detail, "pool.name: too long; ttlSeconds: zero");
    }
}
