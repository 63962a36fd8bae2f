//! `metadata`, whose schema is the API server's own.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

use crate::admission::{Problem, at_field};

const FIELDS: [&str; 15] = [
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];

/// Names as `metadata.name` has them: a DNS subdomain.
static NAME: LazyLock<Regex> =
    LazyLock::new(|| Regex::new("^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$").expect("should compile"));
static NAMESPACE: LazyLock<Regex> =
    LazyLock::new(|| Regex::new("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$").expect("should compile"));

/// Fields, names, labels and annotations; whatever else is in it belongs to API servers.
pub(crate) fn check_metadata(object: &Value, found: &mut Vec<Problem>) {
    let Some(metadata) = object.get("metadata") else {
        found.push(Problem::blocking("metadata", "is required"));
        return;
    };
    let Some(fields) = metadata.as_object() else {
        found.push(Problem::blocking("metadata", "must be an object"));
        return;
    };
    for name in fields
        .keys()
        .filter(|name| !FIELDS.contains(&name.as_str()))
    {
        let message = format!("unknown field: the fields here are {}", FIELDS.join(", "));
        found.push(Problem::new(&at_field("metadata", name), message));
    }
    match fields.get("name") {
        Some(Value::String(name)) => check_name(name, found),
        Some(_) => found.push(Problem::blocking("metadata.name", "must be a string")),
        None => found.push(Problem::blocking("metadata.name", "is required")),
    }
    match fields.get("namespace") {
        Some(Value::String(name)) if NAMESPACE.is_match(name) => {}
        Some(_) => found.push(Problem::new(
            "metadata.namespace",
            "must be 1 to 63 lower-case letters, digits and -, with a letter or digit at both ends",
        )),
        None => {}
    }
    for map in ["labels", "annotations"] {
        check_strings(fields.get(map), &at_field("metadata", map), found);
    }
}

/// Shorter names, and names without dots, are what the rules of the kind ask for.
fn check_name(name: &str, found: &mut Vec<Problem>) {
    if !NAME.is_match(name) {
        found.push(Problem::new(
            "metadata.name",
            "must be lower-case letters, digits and -, with a letter or digit at both ends",
        ));
    }
    if name.len() > 253 {
        let message = format!("must have at most 253 characters, has {}", name.len());
        found.push(Problem::new("metadata.name", message));
    }
}

fn check_strings(map: Option<&Value>, path: &str, found: &mut Vec<Problem>) {
    let Some(map) = map else { return };
    let Some(entries) = map.as_object() else {
        found.push(Problem::new(path, "must be an object"));
        return;
    };
    for (name, value) in entries {
        if !value.is_string() {
            found.push(Problem::new(
                &at_field(path, name),
                "must be a string: write it in quotes",
            ));
        }
    }
}
