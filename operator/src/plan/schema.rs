//! Whether the cluster serves the custom resources that this operator was made for. A chart that was
//! not upgraded leaves an older schema, which drops new fields in silence.

use serde_json::Value;

/// How a served schema differs from ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    Same,
    /// It lacks these fields of ours, as paths.
    Older(Vec<String>),
    /// It has all fields of ours, and differs.
    Different,
}

/// Compares two definitions' versions, as JSON.
pub fn compare(ours: &Value, served: &Value) -> Comparison {
    if ours == served {
        return Comparison::Same;
    }
    let mut missing = Vec::new();
    let root = "/schema/openAPIV3Schema";
    missing_fields(
        ours.pointer(root).unwrap_or(&Value::Null),
        served.pointer(root).unwrap_or(&Value::Null),
        "",
        &mut missing,
    );
    if missing.is_empty() {
        Comparison::Different
    } else {
        Comparison::Older(missing)
    }
}

fn missing_fields(ours: &Value, served: &Value, path: &str, missing: &mut Vec<String>) {
    if let Some(fields) = ours.get("properties").and_then(Value::as_object) {
        for (name, field) in fields {
            let path = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            match served.get("properties").and_then(|all| all.get(name)) {
                Some(there) => missing_fields(field, there, &path, missing),
                None => missing.push(path),
            }
        }
    }
    if let Some(items) = ours.get("items") {
        let there = served.get("items").unwrap_or(&Value::Null);
        missing_fields(items, there, &format!("{path}[]"), missing);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn version(spec: &Value) -> Value {
        json!({"schema": {"openAPIV3Schema": {"properties": {"spec": spec}}}})
    }

    #[test]
    fn names_the_fields_that_an_older_schema_lacks() {
        let new = json!({"properties": {
            "replicas": {"type": "integer"},
            "prepare": {"items": {"properties": {"name": {}, "sql": {}}}},
        }});
        let old = json!({"properties": {"prepare": {"items": {"properties": {"name": {}}}}}});
        assert_eq!(
            compare(&version(&new), &version(&old)),
            Comparison::Older(vec!["spec.prepare[].sql".into(), "spec.replicas".into()])
        );
        assert_eq!(compare(&version(&new), &version(&new)), Comparison::Same);
    }

    #[test]
    fn another_bound_is_a_difference() {
        let ours = json!({"properties": {"replicas": {"maximum": 10}}});
        let served = json!({"properties": {"replicas": {"maximum": 5}, "newer": {}}});
        assert_eq!(
            compare(&version(&ours), &version(&served)),
            Comparison::Different
        );
    }
}
