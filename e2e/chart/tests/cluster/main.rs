//! The chart in a real API server: what is installed, upgraded and left, and what the operator's account may do.
//! No node is needed for that.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)] // Shared with tests that use more of it.
#[path = "../chart/helm.rs"]
mod helm;
mod server;

use serde_json::json;

use helm::chart;
use server::{Server, secret};

const OPERATOR: &str = "system:serviceaccount:branchpool-system:branchpool-operator";
const AGENT: &str = "system:serviceaccount:branchpool-agents:branchpool-agent";

#[tokio::test(flavor = "multi_thread")]
async fn definitions_are_upgraded_and_outlive_the_release() {
    let server = Server::start().await;
    let older = Server::older_chart();
    let older = older.path().to_str().unwrap();
    server.helm(&["install", "branchpool", older]);
    server.create_lease("kept").await;
    let dropped = server
        .kubectl(&["explain", "branchlease.spec.priority"])
        .await;
    assert!(
        dropped.is_err(),
        "the older schema has the field: {dropped:?}"
    );

    server.helm(&["upgrade", "branchpool", "."]);
    server.until_explained("branchlease.spec.priority").await;
    server.set_priority("kept", "High").await;

    server.helm(&["uninstall", "branchpool"]);
    assert!(
        server
            .kubectl(&["get", "deployment", "-n", helm::NAMESPACE, "-o", "name"])
            .await
            .unwrap()
            .is_empty()
    );
    assert_eq!(server.priority("kept").await, "High");

    server.helm(&["install", "branchpool", "."]);
    assert_eq!(server.priority("kept").await, "High");
    server.helm(&["uninstall", "branchpool"]);

    // As docs/upgrade.md says.
    let refused = server.helm_refused(&["install", "renamed", "."]);
    assert!(refused.contains("invalid ownership metadata"), "{refused}");
    server.helm(&["install", "renamed", ".", "--take-ownership"]);
    assert_eq!(server.priority("kept").await, "High");
    assert!(chart().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operator_and_agents_may_do_what_they_need() {
    let server = Server::start().await;
    server.helm(&["install", "branchpool", "."]);
    let operator = server.user(OPERATOR);
    let ours = "servicebinding.io/postgresql";
    let labels = json!({"branchpool.dev/lease-uid": "1"});

    server.until_fenced(&operator).await;
    operator
        .create(&secret("default", "lease", ours, &labels))
        .await
        .unwrap();
    for (name, kind, labels) in [
        ("opaque", "Opaque", &labels),
        ("unlabelled", ours, &json!({})),
        ("branchpool-ca", "Opaque", &json!({})),
    ] {
        let refused = operator
            .create(&secret("default", name, kind, labels))
            .await
            .unwrap_err();
        assert!(
            refused.contains("the operator may write Secrets of type"),
            "{name}: {refused}"
        );
    }
    // By which it finds out that the fence is there.
    let probe = secret("default", "branchpool-guard-probe", "Opaque", &json!({}));
    assert!(
        operator
            .apply(&probe, &["create", "--dry-run=server"])
            .await
            .is_err()
    );

    let admin = server.admin();
    admin
        .create(&secret("default", "theirs", "Opaque", &json!({})))
        .await
        .unwrap();
    admin
        .create(&secret("default", "labelled", "Opaque", &labels))
        .await
        .unwrap();
    for name in ["theirs", "labelled"] {
        let refused = operator.run(&["delete", "secret", name]).await.unwrap_err();
        assert!(refused.contains("is not one of a lease"), "{refused}");
    }
    operator
        .run(&["delete", "secret", "lease", "--wait=false"])
        .await
        .unwrap();
    for arguments in [
        &["get", "secret", "theirs"][..],
        &["get", "secrets", "-A"],
        &["patch", "secret", "theirs", "-p", "{}"],
        &["delete", "secrets", "--all"],
        &["get", "secrets", "-n", helm::NAMESPACE],
    ] {
        let refused = operator.run(arguments).await.unwrap_err();
        assert!(
            refused.contains("forbidden") || refused.contains("Forbidden"),
            "{arguments:?}: {refused}"
        );
    }

    // Its own CA, and nothing else there.
    let ca = secret(helm::NAMESPACE, "branchpool-ca", "Opaque", &json!({}));
    operator.create(&ca).await.unwrap();
    operator
        .run(&["get", "secret", "branchpool-ca", "-n", helm::NAMESPACE])
        .await
        .unwrap();
    operator.apply(&ca, &["replace"]).await.unwrap();
    let other = secret(helm::NAMESPACE, "other", "Opaque", &json!({}));
    assert!(operator.create(&other).await.is_err());

    let agent = server.user(AGENT);
    for arguments in [
        &["get", "secrets"][..],
        &["get", "pods", "-n", "branchpool-agents"],
        &["get", "nodes"],
        &["get", "branchleases", "-A"],
        &[
            "get",
            "configmap",
            "branchpool-ca",
            "-n",
            "branchpool-agents",
        ],
    ] {
        let refused = agent.run(arguments).await.unwrap_err();
        assert!(refused.contains("forbidden"), "{arguments:?}: {refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_namespace_is_all_that_is_reached() {
    let server = Server::start().await;
    server.helm(&[
        "install",
        "branchpool",
        ".",
        "--set",
        "watchNamespaces={review}",
    ]);
    let operator = server.user(OPERATOR);
    server.create_lease("somebody").await;
    operator
        .run(&["get", "branchleases", "-n", "review"])
        .await
        .unwrap();
    for arguments in [
        &["get", "branchleases", "-A"][..],
        &["get", "branchleases", "-n", "default"],
    ] {
        let refused = operator.run(arguments).await.unwrap_err();
        assert!(refused.contains("forbidden"), "{refused}");
    }
    let labels = json!({"branchpool.dev/lease-uid": "1"});
    let ours = |namespace| secret(namespace, "lease", "servicebinding.io/postgresql", &labels);
    operator.create(&ours("review")).await.unwrap();
    let refused = operator.create(&ours("default")).await.unwrap_err();
    assert!(refused.contains("forbidden"), "{refused}");
}

/// Every value that has an effect on objects, taken by the API server as it is.
#[tokio::test(flavor = "multi_thread")]
async fn the_server_takes_every_object() {
    let server = Server::start().await;
    for values in helm::value_files() {
        // The kinds of the Prometheus operator and of cert-manager are not known there.
        let more = [
            "--set",
            "metrics.serviceMonitor.enabled=false",
            "--set",
            "agent.gateway.tls.certManager.enabled=false",
        ];
        let objects = helm::objects(&helm::template(&values, &more));
        // The namespace is there already, and no controller makes the service account behind a Pod.
        let elsewhere = ["Namespace", "Pod"];
        let (others, objects): (Vec<_>, Vec<_>) = objects
            .into_iter()
            .partition(|object| elsewhere.contains(&helm::string(object, "/kind")));
        let all = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        let strictly = ["create", "--dry-run=server", "--validate=strict"];
        let created = server.admin().apply(&all, &strictly).await;
        assert!(created.is_ok(), "{values}: {created:?}");
        let pod = others
            .iter()
            .find(|object| helm::string(object, "/kind") == "Pod");
        let refused = server
            .admin()
            .apply(pod.unwrap(), &strictly)
            .await
            .unwrap_err();
        assert!(
            refused.contains("error looking up service account"),
            "{values}: {refused}"
        );
    }
}
