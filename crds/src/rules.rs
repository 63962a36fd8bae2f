//! How CEL rules are written into a schema. A rule that calls `duration` or `quantity` on a field
//! holds when that field is malformed: the field's own rule refuses it, with the better message.

use serde_json::{Value, json};

/// What `duration` takes without overflow, and no more than our own reader takes.
pub(crate) const DURATION: &str = "^([0-9]{1,4}h|[0-9]{1,6}(m|s|ms)){1,4}$";

/// What `quantity` takes and our own reader takes.
pub(crate) const QUANTITY: &str =
    "^([0-9]{1,19}|[0-9]{1,12}([.][0-9]{1,3})?([KMGTPE]i|[mkMGTPE])?)$";

/// One entry of `x-kubernetes-validations`: what must hold, and what to do when it does not.
pub(crate) fn rule(expression: &str, message: &str) -> Value {
    json!({ "rule": expression, "message": message })
}

/// A rule whose refusal points at a field below the place where the rule stands.
pub(crate) fn rule_at(field_path: &str, expression: &str, message: &str) -> Value {
    json!({ "rule": expression, "message": message, "fieldPath": field_path })
}

pub(crate) fn duration_format() -> Value {
    rule(
        &format!("self.matches('{DURATION}') && duration(self) <= duration('8760h')"),
        "write a duration of at most 8760h as whole numbers with h, m, s or ms, such as 1h30m or 45s",
    )
}

/// All rules of a duration that has a lower bound.
pub(crate) fn duration_of_at_least(least: &str) -> Vec<Value> {
    let bound = rule(
        &format!("!self.matches('{DURATION}') || duration(self) >= duration('{least}')"),
        &format!("must be at least {least}"),
    );
    vec![duration_format(), bound]
}

/// One duration field does not exceed its neighbour.
pub(crate) fn durations_in_order(shorter: &str, longer: &str) -> Value {
    rule_at(
        &format!(".{shorter}"),
        &format!(
            "!self.{shorter}.matches('{DURATION}') || !self.{longer}.matches('{DURATION}') || duration(self.{shorter}) <= duration(self.{longer})"
        ),
        &format!("{shorter} must not exceed {longer}: lower {shorter} or raise {longer}"),
    )
}

pub(crate) fn quantity_format() -> Value {
    rule(
        &format!(
            "string(self).matches('{QUANTITY}') && isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('8Ei')) < 0"
        ),
        "write a number below 8Ei with an optional suffix, such as 512Mi, 1.5Gi, 2 or 500m",
    )
}

/// A quantity field, where present, is not below a bound.
pub(crate) fn quantity_at_least(field: &str, least: &str, message: &str) -> Value {
    rule_at(
        &format!(".{field}"),
        &format!(
            "!has(self.{field}) || !string(self.{field}).matches('{QUANTITY}') || quantity(string(self.{field})).compareTo(quantity('{least}')) >= 0"
        ),
        message,
    )
}
