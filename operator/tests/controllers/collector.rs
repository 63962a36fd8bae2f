//! Leases and their Secrets are no work for the cluster's garbage collector.

use branchpool_crds::{BranchLease, LeasePhase};
use futures_util::future::join_all;
use kube::runtime::wait::await_condition;
use serde_json::json;

use crate::fixture::{
    access::create,
    eventually,
    stage::{NAMESPACE, Stage, phase},
};

const LEASES: usize = 1_000;
const AT_ONCE: usize = 25;

#[tokio::test]
async fn a_thousand_leases_leave_the_garbage_collector_idle() {
    let mut stage = Stage::start(1).await;
    // Branches as cheap as they can be: they are not what is looked at.
    let spec = json!({"replicas": 50, "maxBranches": 80, "warming": {"preconnect": "Never"}});
    stage.create_pool("app", &spec).await;
    stage.api.start_garbage_collector().await;
    // It works, and its log shows what it does.
    orphan(&stage, "before").await;
    stage.wait_filled("app", 50).await;
    let holders = (0..AT_ONCE).map(async |holder| {
        for number in 0..LEASES / AT_ONCE {
            let name = format!("lease-{holder}-{number}");
            stage.create_lease(&name, &json!({})).await;
            let bound = |lease: Option<&BranchLease>| {
                lease.is_some_and(|lease| phase(lease) == LeasePhase::Bound)
            };
            await_condition(stage.leases(), &name, bound).await.unwrap();
            stage.delete_lease(&name).await;
        }
    });
    join_all(holders).await;
    stage.wait_nothing_left().await;
    // It takes one after the other, so behind this one nothing is left to do.
    orphan(&stage, "after").await;
    let operator = stage.api.audit().into_iter();
    let made = operator.filter(|entry| {
        entry.verb == "create" && entry.resource == "secrets" && entry.namespace == NAMESPACE
    });
    assert_eq!(made.count(), LEASES);
    let collected = stage.api.audit_of_collector();
    let (ours, others): (Vec<_>, Vec<_>) = collected
        .into_iter()
        .partition(|entry| matches!(&*entry.name, "before" | "after"));
    assert!(ours.iter().any(|entry| entry.verb == "delete"), "{ours:?}");
    assert!(others.is_empty(), "{others:?}");
}

/// A Secret of a lease that is gone, which is for the garbage collector to delete.
async fn orphan(stage: &Stage, name: &str) {
    let lease = stage
        .create_lease(name, &json!({"poolRef": {"name": "none"}}))
        .await;
    let owner = json!({
        "apiVersion": "branchpool.dev/v1alpha1", "kind": "BranchLease", "name": name, "uid": lease.metadata.uid,
    });
    create(
        &stage.api.client,
        &json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": name, "namespace": NAMESPACE, "ownerReferences": [owner]},
        }),
    )
    .await;
    stage.delete_lease(name).await;
    let secrets = stage.secrets();
    eventually("the garbage collector deletes a Secret", async || {
        let found = secrets.get_opt(name).await.unwrap();
        found.is_none().then_some(())
    })
    .await;
}
