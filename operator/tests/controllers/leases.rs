use std::collections::{BTreeMap, BTreeSet};

use branchpool_crds::LeasePhase;
use kube::ResourceExt;
use serde_json::json;
use tokio::task::JoinSet;

use crate::fixture::{
    api::Entry,
    eventually,
    stage::{Stage, phase, reason},
};

#[tokio::test]
async fn a_lease_is_bound_with_two_writes_and_ends_with_one() {
    let stage = Stage::start(1).await;
    stage.create_pool("app", &json!({"replicas": 2})).await;
    stage.wait_filled("app", 2).await;
    stage
        .create_lease("test", &json!({"holder": "a test"}))
        .await;
    let lease = stage.wait_bound("test").await;
    let status = lease.status.unwrap();
    assert_eq!(status.node.as_deref(), Some("node-1"));
    let secret = stage.secrets().get("test").await.unwrap();
    assert_eq!(
        secret.type_.as_deref(),
        Some("servicebinding.io/postgresql")
    );
    assert_eq!(secret.immutable, Some(true));
    assert_eq!(secret.metadata.owner_references, None);
    let data = secret.data.unwrap();
    let text = |key: &str| String::from_utf8(data[key].0.clone()).unwrap();
    assert_eq!(text("PGSSLMODE"), "require");
    assert_eq!(text("sslmode"), "verify-full");
    assert_eq!(text("sslrootcert"), "ca.crt");
    assert!(text("ca.crt").contains("BEGIN CERTIFICATE"));
    assert_eq!(text("host"), status.host.unwrap());
    assert!(text("DATABASE_URL").contains(&text("password")));
    let writes = || {
        let audit = stage.api.audit().into_iter();
        let own = audit.filter(|entry| {
            entry.is_write()
                && entry.namespace == "shop"
                && (entry.name == "test" || is_of_lease(entry))
        });
        own.map(|entry| format!("{} {}", entry.verb, entry.resource))
            .collect::<Vec<_>>()
    };
    assert_eq!(writes(), ["create secrets", "patch branchleases/status"]);
    stage.delete_lease("test").await;
    stage.wait_nothing_left().await;
    assert_eq!(
        writes(),
        [
            "create secrets",
            "patch branchleases/status",
            "delete secrets"
        ]
    );
    stage.wait_filled("app", 2).await;
}

#[tokio::test]
async fn a_hundred_leases_over_forty_branches() {
    let stage = Stage::start(2).await;
    stage
        .create_pool("app", &json!({"replicas": 40, "maxBranches": 40}))
        .await;
    stage.wait_filled("app", 40).await;
    let priorities = ["High", "Medium", "Low"];
    let mut creating = JoinSet::new();
    for index in 0..100_usize {
        let leases = stage.leases();
        let lease = json!({
            "apiVersion": "branchpool.dev/v1alpha1", "kind": "BranchLease",
            "metadata": {"name": format!("l{index}")},
            "spec": {"poolRef": {"name": "app"}, "priority": priorities[index % 3]},
        });
        creating.spawn(async move {
            let lease = serde_json::from_value(lease).unwrap();
            leases
                .create(&kube::api::PostParams::default(), &lease)
                .await
                .unwrap()
        });
    }
    creating.join_all().await;
    let bound = async || {
        let leases = stage.all_leases().await;
        let bound = leases
            .iter()
            .filter(|lease| phase(lease) == LeasePhase::Bound);
        bound
            .map(ResourceExt::name_any)
            .collect::<BTreeSet<String>>()
    };
    let mut held = eventually(
        "forty are bound, the others told that they wait",
        async || {
            let leases = stage.all_leases().await;
            let told = leases
                .iter()
                .filter(|lease| reason(lease) == "Queued")
                .count();
            let held = bound().await;
            (held.len() == 40 && told == 60).then_some(held)
        },
    )
    .await;
    // Who is to come, in order.
    let mut waiting = BTreeMap::new();
    for lease in stage.all_leases().await {
        if phase(&lease) == LeasePhase::Pending {
            let created = lease.metadata.creation_timestamp.clone().unwrap().0;
            let rank = (lease.spec.priority, created, lease.uid().unwrap());
            waiting.insert(rank, lease.name_any());
        }
    }
    let (first, _) = waiting
        .iter()
        .next()
        .map(|(rank, name)| (rank.clone(), name.clone()))
        .unwrap();
    let skipped = waiting.remove(&first).unwrap();
    stage.delete_lease(&skipped).await;
    let mut expected = waiting.into_values();
    let mut releases = held.iter().cloned().collect::<Vec<_>>();
    let mut ever: BTreeSet<String> = held.clone();
    for _ in 0..25 {
        let released = releases.pop().unwrap();
        stage.delete_lease(&released).await;
        held.remove(&released);
        let next = eventually("the next one is bound", async || {
            let now = bound().await;
            let new: Vec<String> = now.difference(&held).cloned().collect();
            assert!(new.len() <= 1, "{new:?} for one branch");
            new.into_iter().next()
        })
        .await;
        assert_eq!(Some(&next), expected.next().as_ref());
        assert!(ever.insert(next.clone()), "{next} twice");
        held.insert(next);
    }
    no_branch_is_shared(&stage).await;
    // The rest at once, as fast as it goes.
    loop {
        for name in &held {
            stage.delete_lease(name).await;
        }
        let left = stage.all_leases().await.len();
        if left == 0 {
            break;
        }
        held = eventually("others are bound", async || {
            let now = bound().await;
            (now.len() == left.min(40)).then_some(now)
        })
        .await;
        no_branch_is_shared(&stage).await;
        for name in &held {
            assert!(ever.insert(name.clone()), "{name} twice");
        }
    }
    assert_eq!(ever.len(), 99, "all but the one that was deleted");
    stage.wait_nothing_left().await;
    stage.wait_filled("app", 40).await;
    let audit = stage.api.audit();
    let created = audit
        .iter()
        .filter(|entry| is_of_lease(entry) && entry.verb == "create");
    assert_eq!(created.count(), 99);
    let deleted = audit
        .iter()
        .filter(|entry| is_of_lease(entry) && entry.verb == "delete");
    assert_eq!(deleted.count(), 99);
}

async fn no_branch_is_shared(stage: &Stage) {
    let leases = stage.at_agents().await;
    let bound = leases
        .iter()
        .filter(|lease| lease.phase == branchpool_agent_api::LeasePhase::Bound);
    let mut branches = BTreeSet::new();
    for lease in bound {
        assert!(branches.insert(&lease.branch), "{} is shared", lease.branch);
    }
}

/// The operator's CA is a Secret too, in another namespace.
fn is_of_lease(entry: &Entry) -> bool {
    entry.resource == "secrets" && entry.namespace == "shop"
}
