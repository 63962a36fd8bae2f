//! What the chart grants to whom.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::helm::{NAMESPACE, objects, string, strings, template, value_files};

fn of_kind<'a>(objects: &'a [Value], kinds: &[&str]) -> Vec<&'a Value> {
    objects
        .iter()
        .filter(|object| kinds.contains(&string(object, "/kind")))
        .collect()
}

fn rules(role: &Value) -> impl Iterator<Item = &Value> {
    role.get("rules")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

/// Everything that one account may do: (scope, resource, verb), the scope empty for the cluster.
fn granted(objects: &[Value], account: &str) -> BTreeSet<(String, String, String)> {
    let mut granted = BTreeSet::new();
    for binding in of_kind(objects, &["ClusterRoleBinding", "RoleBinding"]) {
        let subjects = binding.get("subjects").and_then(Value::as_array).unwrap();
        if !subjects
            .iter()
            .any(|subject| string(subject, "/name") == account)
        {
            continue;
        }
        let scope = string(binding, "/metadata/namespace");
        let (kind, name) = (
            string(binding, "/roleRef/kind"),
            string(binding, "/roleRef/name"),
        );
        let role = of_kind(objects, &[kind])
            .into_iter()
            .find(|role| {
                string(role, "/metadata/name") == name
                    && (kind == "ClusterRole" || string(role, "/metadata/namespace") == scope)
            })
            .unwrap_or_else(|| panic!("{kind} {name} is bound and not there"));
        for rule in rules(role) {
            let names = strings(rule, "resourceNames").join(",");
            for resource in strings(rule, "resources") {
                for verb in strings(rule, "verbs") {
                    let resource = match &*names {
                        "" => resource.to_owned(),
                        names => format!("{resource}[{names}]"),
                    };
                    granted.insert((scope.to_owned(), resource, verb.to_owned()));
                }
            }
        }
    }
    granted
}

fn on<'a>(
    granted: &'a BTreeSet<(String, String, String)>,
    resource: &'a str,
) -> Vec<(&'a str, &'a str)> {
    granted
        .iter()
        .filter(|(_, found, _)| found == resource)
        .map(|(scope, _, verb)| (scope.as_str(), verb.as_str()))
        .collect()
}

#[test]
fn rules_are_spelled_out_and_in_order() {
    for name in value_files() {
        let objects = objects(&template(&name, &[]));
        for role in of_kind(&objects, &["ClusterRole", "Role"]) {
            for rule in rules(role) {
                for field in ["apiGroups", "resources", "resourceNames", "verbs"] {
                    let found = strings(rule, field);
                    assert!(!found.contains(&"*"), "{name}: {rule}");
                    assert!(found.is_sorted(), "{name}: {field} of {rule}");
                }
                assert_eq!(strings(rule, "apiGroups").len(), 1, "{name}: {rule}");
            }
        }
    }
}

#[test]
fn the_operator_reads_no_secret_but_its_ca() {
    for name in value_files() {
        let objects = objects(&template(&name, &[]));
        let account = if name == "one-namespace" {
            "branches-operator"
        } else {
            "branchpool-operator"
        };
        let granted = granted(&objects, account);
        assert_eq!(
            on(&granted, "secrets[branchpool-ca]"),
            [(NAMESPACE, "get"), (NAMESPACE, "update")],
            "{name}"
        );
        let others = on(&granted, "secrets");
        assert!(!others.is_empty(), "{name}");
        for (scope, verb) in others {
            assert!(
                ["create", "delete"].contains(&verb),
                "{name}: {verb} in {scope:?}"
            );
        }
    }
}

#[test]
fn the_policy_names_the_account_that_the_operator_has() {
    for name in value_files() {
        let objects = objects(&template(&name, &[]));
        let policy = of_kind(&objects, &["ValidatingAdmissionPolicy"])[0];
        let deployment = of_kind(&objects, &["Deployment"])[0];
        let account = string(deployment, "/spec/template/spec/serviceAccountName");
        let condition = string(policy, "/spec/matchConditions/0/expression");
        let user = format!("'system:serviceaccount:{NAMESPACE}:{account}'");
        assert!(condition.ends_with(&user), "{name}: {condition}");
        assert_eq!(string(policy, "/spec/failurePolicy"), "Fail");
        let binding = of_kind(&objects, &["ValidatingAdmissionPolicyBinding"])[0];
        assert_eq!(
            string(binding, "/spec/policyName"),
            string(policy, "/metadata/name")
        );
        assert_eq!(strings(&binding["spec"], "validationActions"), ["Deny"]);
    }
}

#[test]
fn watched_namespaces_are_all_that_is_reached() {
    let objects = objects(&template("one-namespace", &[]));
    let granted = granted(&objects, "branches-operator");
    for (scope, resource, verb) in &granted {
        if scope.is_empty() {
            let plain = resource.split(['/', '[']).next().unwrap();
            let of_the_cluster = [
                "branchnodes",
                "customresourcedefinitions",
                "nodes",
                "subjectaccessreviews",
                "tokenreviews",
            ];
            assert!(of_the_cluster.contains(&plain), "{verb} {resource}");
        } else {
            let namespaces = ["review", "review-agents", NAMESPACE, "default"];
            assert!(
                namespaces.contains(&scope.as_str()),
                "{verb} {resource} in {scope}"
            );
            assert!(scope != "default" || resource == "events", "{resource}");
        }
    }
    assert!(on(&granted, "branchleases").contains(&("review", "watch")));
}

#[test]
fn what_is_granted_is_the_same_for_one_namespace_and_for_all() {
    let of = |values: &str, account: &str| -> BTreeSet<(String, String)> {
        granted(&objects(&template(values, &[])), account)
            .into_iter()
            .map(|(_, resource, verb)| (resource, verb))
            .collect()
    };
    assert_eq!(
        of("default", "branchpool-operator"),
        of("one-namespace", "branches-operator")
    );
}

#[test]
fn an_agent_may_do_nothing() {
    for name in value_files() {
        let objects = objects(&template(&name, &[]));
        for binding in of_kind(&objects, &["ClusterRoleBinding", "RoleBinding"]) {
            assert!(
                !binding["subjects"].to_string().contains("-agent\""),
                "{name}: {binding}"
            );
        }
    }
}

#[test]
fn roles_for_people_and_bindings_are_switched() {
    let labelled = |values: &str, label: &str| {
        of_kind(&objects(&template(values, &[])), &["ClusterRole"])
            .iter()
            .filter(|role| string(role, &format!("/metadata/labels/{label}")) == "true")
            .count()
    };
    let view = "rbac.authorization.k8s.io~1aggregate-to-view";
    let edit = "rbac.authorization.k8s.io~1aggregate-to-edit";
    let admin = "rbac.authorization.k8s.io~1aggregate-to-admin";
    let binding = "servicebinding.io~1controller";
    for (label, count) in [(view, 1), (edit, 2), (admin, 2), (binding, 1)] {
        assert_eq!(labelled("default", label), count, "{label}");
        assert_eq!(labelled("one-namespace", label), 0, "{label}");
    }
}
