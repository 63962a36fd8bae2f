//! Values that are refused, and with which words.

use std::fs;

use serde_json::Value;

use crate::helm::{chart, refusal};

#[test]
fn wrong_values_are_refused_by_name() {
    for (set, says) in [
        (
            "operators.replicas=2",
            "additional properties 'operators' not allowed",
        ),
        (
            "operator.replica=2",
            "at '/operator': additional properties 'replica' not allowed",
        ),
        (
            "agent.storage.prepare.fromat=true",
            "'/agent/storage/prepare': additional properties 'fromat'",
        ),
        (
            "agent.image.name=a",
            "'/agent/image': additional properties 'name'",
        ),
        (
            "agent.tolerations[0].effects=NoSchedule",
            "additional properties 'effects'",
        ),
        ("operator.replicas=0", "at '/operator/replicas'"),
        ("operator.replicas=two", "at '/operator/replicas'"),
        ("operator.log.format=yaml", "at '/operator/log/format'"),
        (
            "operator.resources.requests.memory=lots",
            "at '/operator/resources/requests/memory'",
        ),
        ("watchNamespaces={Review}", "at '/watchNamespaces/0'"),
        ("watchNamespaces={a\\,b}", "at '/watchNamespaces/0'"),
        ("agent.storage.path=branches", "at '/agent/storage/path'"),
        ("agent.storage.path=/", "at '/agent/storage/path'"),
        (
            "agent.storage.prepare.enabled=true",
            "at '/agent/storage/prepare/devices': minItems",
        ),
        (
            "agent.storage.prepare.devices={/etc/passwd}",
            "at '/agent/storage/prepare/devices/0'",
        ),
        ("agent.gateway.port=70000", "at '/agent/gateway/port'"),
        (
            "agent.gateway.tls.certManager.enabled=true",
            "at '/agent/gateway/tls/certManager",
        ),
        (
            "agent.updateStrategy=Recreate",
            "at '/agent/updateStrategy'",
        ),
        ("image.pullPolicy=Sometimes", "at '/image/pullPolicy'"),
        (
            "operator.image.digest=sha256:12",
            "at '/operator/image/digest'",
        ),
        (
            "networkPolicy.metricsFrom[0].namespace=a",
            "additional properties 'namespace'",
        ),
        ("tests.pool=shop", "at '/tests/pool'"),
        ("fullnameOverride=Branches", "at '/fullnameOverride'"),
        (
            "agent.namespace=branchpool-system",
            "must not be the release's namespace",
        ),
        (
            "watchNamespaces={branchpool-agents}",
            "must not name the agents' namespace",
        ),
        (
            "operator.podDisruptionBudget.minAvailable=2",
            "must be less than operator.replicas (2)",
        ),
    ] {
        let found = refusal(&["--set", set]);
        assert!(found.contains(says), "{set}: {found}");
    }
}

#[test]
fn an_old_cluster_is_refused() {
    let found = refusal(&["--kube-version", "1.30.9"]);
    assert!(found.contains("requires kubeVersion: >=1.31.0"), "{found}");
}

fn schema() -> Value {
    let text = fs::read_to_string(chart().join("values.schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// An object whose keys are known takes no others.
#[test]
fn the_schema_is_closed_everywhere() {
    fn check(schema: &Value, path: &str, conditional: bool) {
        if let Some(fields) = schema.as_object() {
            if fields.contains_key("properties") && !conditional {
                assert_eq!(
                    fields.get("additionalProperties"),
                    Some(&Value::Bool(false)),
                    "{path}"
                );
            }
            for (name, inner) in fields {
                // Conditions look at some keys of an object that is closed around them.
                let conditional = conditional || ["if", "then", "anyOf"].contains(&name.as_str());
                check(inner, &format!("{path}/{name}"), conditional);
            }
        } else if let Some(items) = schema.as_array() {
            for inner in items {
                check(inner, path, conditional);
            }
        }
    }
    check(&schema(), "", false);
}

/// So that values.yaml shows everything there is to set.
#[test]
fn the_schema_and_the_defaults_have_the_same_keys() {
    fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
        match schema.get("$ref").and_then(Value::as_str) {
            Some(reference) => root.pointer(reference.trim_start_matches('#')).unwrap(),
            None => schema,
        }
    }
    fn compare(root: &Value, schema: &Value, values: &Value, path: &str) {
        let schema = resolved(root, schema);
        let (Some(properties), Some(values)) = (schema.get("properties"), values.as_object())
        else {
            return;
        };
        for (name, inner) in properties.as_object().unwrap() {
            let path = format!("{path}/{name}");
            // Such as those of a Pod, which Kubernetes documents.
            let foreign = path == "/global"
                || ["requests", "limits"].contains(&name.as_str())
                || path.contains("/affinity/");
            match values.get(name) {
                Some(value) => compare(root, inner, value, &path),
                None => assert!(foreign, "{path} is not in values.yaml"),
            }
        }
    }
    let values = fs::read_to_string(chart().join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&values).unwrap();
    let schema = schema();
    compare(&schema, &schema, &values, "");
}
