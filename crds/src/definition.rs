//! The three definitions as a cluster takes them.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use crate::rules::{rule, rule_at};
use crate::{BranchLease, BranchNode, BranchPool};

/// API group of the resources.
pub const GROUP: &str = "branchpool.dev";
/// Version of the resources.
pub const VERSION: &str = "v1alpha1";

/// All definitions, in the order of their use.
pub fn crds() -> Vec<CustomResourceDefinition> {
    vec![
        finished(BranchPool::crd(), &[name_length(), name_dots()]),
        finished(
            BranchLease::crd(),
            &[name_length(), name_dots(), finished_lease()],
        ),
        finished(BranchNode::crd(), &[]),
    ]
}

/// The schema of a definition's only version.
pub(crate) fn schema_of(crd: &CustomResourceDefinition) -> Value {
    crd.spec
        .versions
        .first()
        .and_then(|version| version.schema.as_ref()?.open_api_v3_schema.as_ref())
        .map_or(Value::Null, |schema| {
            serde_json::to_value(schema).expect("a schema should be JSON")
        })
}

fn name_length() -> Value {
    rule_at(
        ".metadata.name",
        "self.metadata.name.size() <= 63",
        "a name has at most 63 characters: choose a shorter one",
    )
}

fn name_dots() -> Value {
    rule_at(
        ".metadata.name",
        "!self.metadata.name.contains('.')",
        "a name holds no dots: use - instead",
    )
}

fn finished_lease() -> Value {
    rule(
        "!has(oldSelf.status) || !has(oldSelf.status.phase) || !(oldSelf.status.phase in ['Expired', 'Failed', 'Lost']) || self.spec == oldSelf.spec",
        "this lease has ended and cannot change: create another BranchLease",
    )
}

/// What the derived definition lacks or says in a way that API servers do not take.
fn finished(derived: CustomResourceDefinition, root_rules: &[Value]) -> CustomResourceDefinition {
    let mut crd = derived;
    // A chart's uninstall must not take the definitions, and every pool with them.
    crd.metadata.annotations = Some(BTreeMap::from([(
        "helm.sh/resource-policy".to_owned(),
        "keep".to_owned(),
    )]));
    let mut schema = schema_of(&crd);
    tidy(&mut schema);
    if let Some(root) = schema.as_object_mut()
        && !root_rules.is_empty()
    {
        root.insert("x-kubernetes-validations".to_owned(), json!(root_rules));
    }
    if let Some(target) = crd
        .spec
        .versions
        .first_mut()
        .and_then(|version| version.schema.as_mut())
    {
        target.open_api_v3_schema =
            Some(serde_json::from_value(schema).expect("a tidied schema should be a schema"));
    }
    crd
}

fn tidy(schema: &mut Value) {
    let Some(node) = schema.as_object_mut() else {
        return;
    };
    // A stored null would be a third state beside absent and present.
    node.remove("nullable");
    if let Some(Value::Array(values)) = node.get_mut("enum") {
        values.retain(|value| !value.is_null());
    }
    // One rule on the field counts the members and says what to do; this would only say "oneOf".
    node.remove("oneOf");
    if node.get("format").and_then(Value::as_str) == Some("uint32") {
        node.insert("format".to_owned(), json!("int32"));
        // API servers do not hold numbers to their format.
        node.entry("maximum").or_insert_with(|| json!(i32::MAX));
    }
    if node.contains_key("x-kubernetes-int-or-string") {
        node.insert(
            "anyOf".to_owned(),
            json!([{"type": "integer"}, {"type": "string"}]),
        );
    }
    shorten_default(node);
    for child in children(node) {
        tidy(child);
    }
}

/// The default of an object is `{}` where the defaults of its fields say the rest.
fn shorten_default(node: &mut Map<String, Value>) {
    let Some(Value::Object(default)) = node.get("default") else {
        return;
    };
    let said_below = default.iter().all(|(name, value)| {
        node.get("properties")
            .and_then(|fields| fields.get(name)?.get("default"))
            .is_some_and(|below| below == value)
    });
    if said_below {
        node.insert("default".to_owned(), json!({}));
    }
}

/// The definition as the YAML file that charts and `kubectl apply` take.
pub fn to_yaml(crd: &CustomResourceDefinition) -> String {
    let mut value = serde_json::to_value(crd).expect("a definition should be JSON");
    whole_numbers(&mut value);
    let yaml = serde_saphyr::to_string(&value).expect("JSON should be YAML");
    format!("# Generated from the types in crds/ by `make generate`; edits are lost.\n{yaml}")
}

/// Bounds are floating point in the type, and whole numbers in the file.
#[allow(clippy::cast_possible_truncation)]
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(float) = number.as_f64().filter(|_| number.is_f64())
                && float.fract() == 0.0
            {
                *value = json!(float as i64);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(whole_numbers),
        _ => {}
    }
}

fn children(node: &mut Map<String, Value>) -> impl Iterator<Item = &mut Value> {
    node.iter_mut().flat_map(|(key, value)| match key.as_str() {
        "properties" => value
            .as_object_mut()
            .map(|fields| fields.values_mut().collect())
            .unwrap_or_default(),
        "items" | "additionalProperties" => vec![value],
        _ => Vec::new(),
    })
}
