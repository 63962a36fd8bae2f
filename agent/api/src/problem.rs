//! Errors as problem details (RFC 9457), media type `application/problem+json`.

use serde::{Deserialize, Serialize};

/// A field that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldError {
    /// Path of the field in the body, such as `pool.name`.
    pub field: String,
    pub message: String,
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
}
