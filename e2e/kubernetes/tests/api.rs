//! An apiserver without nodes: what a controller's tests stand on. Needs root.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

use std::{path::Path, process::Output};

use branchpool_e2e_kubernetes::Api;

const CRDS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../charts/branchpool/files/crds"
);

async fn kubectl(api: &Api, arguments: &[&str]) -> Output {
    api.kubectl().args(arguments).output().await.unwrap()
}

async fn succeeds(api: &Api, arguments: &[&str]) -> String {
    let output = kubectl(api, arguments).await;
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn starts_and_survives_a_kill() {
    let mut api = Api::start().await.unwrap();
    println!("{}", succeeds(&api, &["version"]).await);
    println!(
        "{}",
        succeeds(&api, &["apply", "--server-side", "-f", CRDS]).await
    );
    assert!(Path::new(&api.audit_log()).exists());
    api.restart().await.unwrap();
}
