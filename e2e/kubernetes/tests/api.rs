//! An apiserver without nodes: what a controller's tests stand on. Needs root.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use branchpool_e2e_kubernetes::{Api, space};

const CRDS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../charts/branchpool/files/crds"
);
const POOL: &str = "apiVersion: branchpool.dev/v1alpha1
kind: BranchPool
metadata: {name: app}
spec:
  postgres: {version: 15}
  source: {sql: {scripts: [{name: one, sql: SELECT 1}]}}
";

async fn kubectl(api: &Api, arguments: &[&str]) -> Result<String, String> {
    let mut command = api.kubectl();
    command.args(arguments).stdin(Stdio::null());
    space::run(command).await.map_err(|error| error.to_string())
}

async fn apply(api: &Api, manifest: &str) -> Result<String, String> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("manifest.yaml");
    std::fs::write(&file, manifest).unwrap();
    kubectl(api, &["apply", "-f", file.to_str().unwrap()]).await
}

async fn with_crds() -> Api {
    let api = Api::start().await.unwrap();
    kubectl(&api, &["apply", "--server-side", "-f", CRDS])
        .await
        .unwrap();
    let established = [
        "wait",
        "--for=condition=Established",
        "--timeout=60s",
        "crd",
        "--all",
    ];
    kubectl(&api, &established).await.unwrap();
    api
}

/// What is served is documented some time later.
async fn until_explained(api: &Api, field: &str) -> String {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match kubectl(api, &["explain", field]).await {
            Ok(explained) => return explained,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn serves_the_crds_and_their_rules() {
    let api = with_crds().await;
    let version = kubectl(&api, &["version"]).await.unwrap();
    assert!(version.contains("Server Version: v1.34.4"), "{version}");
    let explained = until_explained(&api, "branchpool.spec.source").await;
    assert!(explained.contains("sql"), "{explained}");

    apply(&api, POOL).await.unwrap();
    let pools = kubectl(
        &api,
        &["get", "bp", "app", "--output=jsonpath={.spec.maxBranches}"],
    )
    .await;
    assert_eq!(pools.unwrap(), "100", "the default should be written down");

    let superuser = POOL.replace("{version: 15}", "{version: 15, role: postgres}");
    let refused = apply(&api, &superuser).await.unwrap_err();
    assert!(
        refused.contains("role postgres is the superuser"),
        "{refused}"
    );
    let unknown = POOL.replace("spec:", "spec:\n  replica: 3");
    let refused = apply(&api, &unknown).await.unwrap_err();
    assert!(
        refused.contains("unknown field \"spec.replica\""),
        "{refused}"
    );
}

#[tokio::test]
async fn objects_outlive_a_killed_apiserver() {
    let mut api = with_crds().await;
    apply(&api, POOL).await.unwrap();
    api.apiserver.kill().await.unwrap();
    assert_eq!(api.apiserver.pid().await.unwrap(), None);
    let refused = kubectl(&api, &["get", "bp"]).await.unwrap_err();
    assert!(refused.contains("refused"), "{refused}");
    api.run().await.unwrap();
    let found = kubectl(&api, &["get", "bp", "app", "--output=name"])
        .await
        .unwrap();
    assert_eq!(found.trim(), "branchpool.branchpool.dev/app");
}

#[tokio::test]
async fn the_audit_log_tells_who_did_what() {
    let api = with_crds().await;
    let kubeconfig = api.kubeconfig_of("somebody", Some("visitors")).unwrap();
    let mut command = api.kubectl();
    command
        .env("KUBECONFIG", kubeconfig)
        .args(["get", "branchpools"])
        .stdin(Stdio::null());
    let refused = space::run(command).await.unwrap_err().to_string();
    assert!(refused.contains("\"somebody\" cannot list"), "{refused}");

    let events = api.audit_events().unwrap();
    let theirs: Vec<_> = events
        .iter()
        .filter(|event| event["user"]["username"] == "somebody")
        .filter(|event| event["objectRef"]["resource"] == "branchpools")
        .collect();
    let [event] = theirs.as_slice() else {
        panic!("one request, and not {theirs:?}")
    };
    assert_eq!(event["verb"], "list");
    assert_eq!(event["responseStatus"]["code"], 403);
    assert!(
        !events
            .iter()
            .any(|event| event["user"]["username"] == "system:apiserver"),
        "the cluster's own machinery should be left out"
    );
}
