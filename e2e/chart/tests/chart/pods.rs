//! Pods, and what every object has in common.

use serde_json::Value;

use crate::helm::{NAMESPACE, objects, string, template, value_files};

/// Every Pod or template of one, with its name.
fn pods(objects: &[Value]) -> Vec<(&str, &Value)> {
    objects
        .iter()
        .filter_map(|object| {
            let spec = match string(object, "/kind") {
                "Pod" => object.get("spec"),
                "DaemonSet" | "Deployment" | "Job" => object.pointer("/spec/template/spec"),
                _ => None,
            };
            Some((string(object, "/metadata/name"), spec?))
        })
        .collect()
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"]
        .into_iter()
        .filter_map(|field| pod.get(field).and_then(Value::as_array))
        .flatten()
}

/// The Pod Security Standard `restricted`, and no file of the image can be written.
fn assert_restricted(name: &str, pod: &Value) {
    let security = &pod["securityContext"];
    assert_eq!(security["runAsNonRoot"], true, "{name}");
    assert_eq!(
        security["seccompProfile"]["type"], "RuntimeDefault",
        "{name}"
    );
    for field in ["hostNetwork", "hostPID", "hostIPC"] {
        assert!(pod.get(field).is_none(), "{name}: {field}");
    }
    for volume in pod
        .get("volumes")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        assert!(volume.get("hostPath").is_none(), "{name}: {volume}");
    }
    for container in containers(pod) {
        let security = &container["securityContext"];
        assert_eq!(security["allowPrivilegeEscalation"], false, "{name}");
        assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
        assert_eq!(security["capabilities"]["drop"][0], "ALL", "{name}");
        assert!(security.get("privileged").is_none(), "{name}");
        for port in container
            .get("ports")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            assert!(port.get("hostPort").is_none(), "{name}: {port}");
        }
    }
}

#[test]
fn all_but_the_agent_are_restricted() {
    for values in value_files() {
        let objects = objects(&template(&values, &[]));
        let pods = pods(&objects);
        assert_eq!(pods.len(), 3, "{values}: operator, agent, test");
        for (name, pod) in pods {
            if name.ends_with("-agent") {
                assert_eq!(pod["automountServiceAccountToken"], false);
                assert!(
                    containers(pod)
                        .all(|container| container["securityContext"]["privileged"] == true)
                );
            } else {
                assert_restricted(name, pod);
            }
        }
    }
}

#[test]
fn every_long_running_container_has_probes_and_requests() {
    for values in value_files() {
        let objects = objects(&template(&values, &[]));
        for (name, pod) in pods(&objects) {
            if name.ends_with("-test") {
                continue;
            }
            for container in pod["containers"].as_array().unwrap() {
                for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
                    let path = string(container, &format!("/{probe}/httpGet/path"));
                    assert!(
                        ["/healthz", "/readyz"].contains(&path),
                        "{values}: {name}: {probe}"
                    );
                }
                let resources = &container["resources"];
                assert!(
                    resources
                        .get("requests")
                        .or(resources.get("limits"))
                        .is_some(),
                    "{values}: {name}"
                );
            }
        }
    }
}

/// A Pod template that changes with the chart's version alone would restart every server of a node.
#[test]
fn a_new_version_of_the_chart_restarts_no_agent() {
    let objects = objects(&template("default", &["--set", "agent.image.tag=fixed"]));
    let agent = objects
        .iter()
        .find(|object| string(object, "/kind") == "DaemonSet")
        .unwrap();
    let version = string(agent, "/metadata/labels/app.kubernetes.io~1version");
    assert!(!version.is_empty());
    assert!(!agent["spec"]["template"].to_string().contains(version));
}

#[test]
fn every_object_says_what_it_belongs_to_and_where() {
    let of_the_cluster = [
        "ClusterRole",
        "ClusterRoleBinding",
        "Namespace",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    for values in value_files() {
        for object in objects(&template(&values, &[])) {
            let (kind, name) = (string(&object, "/kind"), string(&object, "/metadata/name"));
            let label = |label: &str| {
                string(
                    &object,
                    &format!("/metadata/labels/app.kubernetes.io~1{label}"),
                )
                .to_owned()
            };
            assert_eq!(label("name"), "branchpool", "{values}: {kind} {name}");
            assert_eq!(label("instance"), "branchpool", "{values}: {kind} {name}");
            assert!(!label("component").is_empty(), "{values}: {kind} {name}");
            let has_namespace = !string(&object, "/metadata/namespace").is_empty();
            assert_eq!(
                has_namespace,
                !of_the_cluster.contains(&kind),
                "{values}: {kind} {name}"
            );
        }
    }
}

#[test]
fn the_agents_namespace_lets_privileged_pods_in() {
    let objects = objects(&template("default", &[]));
    let namespace = objects
        .iter()
        .find(|object| string(object, "/kind") == "Namespace")
        .unwrap();
    let level = string(
        namespace,
        "/metadata/labels/pod-security.kubernetes.io~1enforce",
    );
    assert_eq!(
        (string(namespace, "/metadata/name"), level),
        ("branchpool-agents", "privileged")
    );
    assert_ne!(string(namespace, "/metadata/name"), NAMESPACE);
}

#[test]
fn a_budget_is_made_for_more_than_one_replica_only() {
    let budgets = |replicas: &str| {
        let text = template(
            "default",
            &["--set", &format!("operator.replicas={replicas}")],
        );
        let objects = objects(&text);
        objects
            .iter()
            .filter(|object| string(object, "/kind") == "PodDisruptionBudget")
            .count()
    };
    assert_eq!((budgets("1"), budgets("2")), (0, 1));
}
