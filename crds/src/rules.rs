//! How CEL rules and list types are written into a schema.

use serde_json::{Value, json};

/// One entry of `x-kubernetes-validations`: what must hold, and what to do when it does not.
pub(crate) fn rule(expression: &str, message: &str) -> Value {
    json!({ "rule": expression, "message": message })
}

/// A rule whose refusal points at a field below the place where the rule stands.
pub(crate) fn rule_at(field_path: &str, expression: &str, message: &str) -> Value {
    json!({ "rule": expression, "message": message, "fieldPath": field_path })
}
