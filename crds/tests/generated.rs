//! Generated files are what the types say, and the definitions keep to what API servers enforce.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::path::Path;
use std::process::Command;

use branchpool_crds::{crds, to_yaml};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::cel::{CompiledSchema, compile_schema};
use serde_json::Value;

fn crdgen(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_crdgen"))
        .args(arguments)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    (output.status.success(), text)
}

#[test]
fn generated_files_are_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (up_to_date, message) = crdgen(&["--check", root.to_str().unwrap()]);
    assert!(up_to_date, "{message}");
}

#[test]
fn the_check_sees_a_difference() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().to_str().unwrap();
    assert!(!crdgen(&["--check", path]).0);
    assert!(crdgen(&[path]).0);
    assert!(crdgen(&["--check", path]).0);
    let file = root
        .path()
        .join("charts/branchpool/files/crds/branchpools.yaml");
    let changed = std::fs::read_to_string(&file).unwrap().replace("bp", "bq");
    std::fs::write(&file, changed).unwrap();
    let (up_to_date, message) = crdgen(&["--check", path]);
    assert!(!up_to_date);
    assert!(message.contains("branchpools.yaml"), "{message}");
}

#[test]
fn yaml_reads_back_as_the_definition() {
    for crd in crds() {
        let read: CustomResourceDefinition = serde_saphyr::from_str(&to_yaml(&crd)).unwrap();
        assert_eq!(read, crd);
    }
}

fn schemas() -> Vec<Value> {
    crds()
        .iter()
        .map(|crd| {
            let schema = crd.spec.versions[0].schema.as_ref().unwrap();
            serde_json::to_value(schema.open_api_v3_schema.as_ref().unwrap()).unwrap()
        })
        .collect()
}

fn walk(schema: &Value, path: &str, visit: &mut impl FnMut(&Value, &str)) {
    visit(schema, path);
    for (name, below) in schema["properties"].as_object().into_iter().flatten() {
        walk(below, &format!("{path}.{name}"), visit);
    }
    for key in ["items", "additionalProperties"] {
        if schema[key].is_object() {
            walk(&schema[key], &format!("{path}[]"), visit);
        }
    }
}

#[test]
fn every_field_is_bounded_and_explained() {
    for schema in schemas() {
        walk(&schema, "", &mut |field, path| {
            if path.contains(".conditions[]") {
                return; // The conditions of Kubernetes itself.
            }
            let bound = match field["type"].as_str() {
                Some("string") if field["format"] == "date-time" || field.get("enum").is_some() => {
                    None
                }
                Some("string") => Some("maxLength"),
                Some("array") => Some("maxItems"),
                Some("integer") if field["format"] == "int64" => Some("minimum"),
                Some("integer") => Some("maximum"),
                Some("object") if field.get("additionalProperties").is_some() => {
                    Some("maxProperties")
                }
                _ => None,
            };
            if let Some(bound) = bound {
                assert!(field.get(bound).is_some(), "{path} has no {bound}");
            }
            assert!(
                path.ends_with("[]") || field["description"].is_string(),
                "{path} is not explained"
            );
            for key in ["nullable", "oneOf"] {
                assert!(field.get(key).is_none(), "{path} has {key}");
            }
            for rule in field["x-kubernetes-validations"]
                .as_array()
                .into_iter()
                .flatten()
            {
                assert!(
                    rule["message"].is_string(),
                    "{path} has a rule without a message"
                );
            }
        });
    }
}

fn compiles(schema: &CompiledSchema, path: &str) {
    assert!(
        !schema.has_errors(),
        "{path}: {:?}",
        schema.compilation_errors()
    );
    for (name, below) in &schema.properties {
        compiles(below, &format!("{path}.{name}"));
    }
    for below in [&schema.items, &schema.additional_properties]
        .into_iter()
        .flatten()
    {
        compiles(below, &format!("{path}[]"));
    }
}

#[test]
fn every_rule_compiles() {
    for schema in schemas() {
        compiles(&compile_schema(&schema), "");
    }
}
