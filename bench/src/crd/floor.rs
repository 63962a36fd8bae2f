//! A bare custom resource, which nobody but the bench looks at.

use kube::{api::ApiResource, core::GroupVersionKind};
use serde_json::{Value, json};

const GROUP: &str = "bench.branchpool.dev";
const KIND: &str = "Bare";

pub(super) fn definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("bares.{GROUP}")},
        "spec": {
            "group": GROUP, "scope": "Namespaced",
            "names": {"kind": KIND, "plural": "bares", "singular": "bare", "listKind": "BareList"},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {
                    "type": "object",
                    "properties": {"spec": {"type": "object", "properties": {"text": {"type": "string"}}}},
                }},
            }],
        },
    })
}

pub(super) fn resource() -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", KIND), "bares")
}
