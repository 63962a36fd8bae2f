//! `POST /v1/leases/{uid}/sql`: one query on a lease's branch.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// Body of `POST /v1/leases/{uid}/sql`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SqlRequest {
    /// One statement; `$1`, `$2` … stand for the parameters.
    pub query: String,
    /// JSON values, which the server reads as text of the type it infers: a string as it is, a number
    /// and a boolean as written, an array as an array, an object as JSON, `null` as NULL.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub params: Vec<Box<RawValue>>,
    /// Rows as arrays instead of objects.
    #[serde(default)]
    pub array_mode: bool,
    /// In a read-only transaction; such a query counts as a read whatever its text is.
    #[serde(default)]
    pub read_only: bool,
    /// Milliseconds that the query may take; absent: the agent's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

impl SqlRequest {
    pub fn new(query: impl Into<String>) -> Self {
        Self {
            query: query.into(),
            params: Vec::new(),
            array_mode: false,
            read_only: false,
            timeout_ms: None,
        }
    }
}

/// A column of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SqlColumn {
    pub name: String,
    /// Such as `int4`; absent for types that are not built in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub type_name: Option<String>,
    /// OID of the type.
    pub type_id: u32,
}

/// Answer of `POST /v1/leases/{uid}/sql`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SqlResult {
    pub columns: Vec<SqlColumn>,
    /// Objects by column name, or arrays in the order of the columns. Booleans, integers and binary
    /// floating-point numbers are JSON's, `json` and `jsonb` are embedded, NULL is `null`; all else, and
    /// numbers that JSON lacks, is Postgres's text.
    pub rows: Vec<serde_json::Value>,
    /// The command tag without its counts, such as `SELECT` or `CREATE TABLE`.
    pub command: String,
    /// Rows returned or affected, for commands that count them.
    pub row_count: Option<u64>,
}

/// An error that Postgres reported, by the names that its drivers use. Positions and lines are decimal
/// numbers in text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SqlError {
    pub message: String,
    /// SQLSTATE, five characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Not localised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub severity: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Character of the query, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal_position: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internal_query: Option<String>,
    #[serde(rename = "where", skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub constraint: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routine: Option<String>,
}

impl SqlError {
    /// One of the agent's own.
    pub fn new(code: &str, message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            code: Some(code.to_owned()),
            severity: Some("ERROR".to_owned()),
            ..Self::default()
        }
    }
}
