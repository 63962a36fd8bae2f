use std::time::Duration;

use branchpool_agent_api::LeaseRequest;
use branchpool_crds::{BranchLease, LeasePhase};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use rustix::process::{Signal, kill_process};
use serde_json::json;

use crate::fixture::{
    access::create,
    eventually,
    stage::{Stage, condition, phase, reason},
};

/// Between each two steps of a lease, in their order.
const STEPS: [&str; 7] = [
    "lease",
    "secret-created",
    "bound-written",
    "deletion-seen",
    "release",
    "secret-deleted",
    "forget",
];

fn leadership(stage: &Stage) -> Api<Lease> {
    Api::namespaced(stage.api.client.clone(), "branchpool-system")
}

/// As if a leader that crashed had had its time.
async fn free_leadership(stage: &Stage) {
    let patch = json!({"spec": {"holderIdentity": ""}});
    let patch = Patch::Merge(&patch);
    let params = PatchParams::default();
    let _not_there_yet = leadership(stage)
        .patch("branchpool-operator", &params, &patch)
        .await;
}

#[tokio::test]
async fn killed_between_any_two_steps_a_lease_is_bound_once_and_leaves_nothing() {
    let mut stage = Stage::start(1).await;
    stage.create_pool("app", &json!({"replicas": 2})).await;
    stage.wait_filled("app", 2).await;
    for step in STEPS {
        stage.operators.pop().unwrap().stop().await;
        stage.start_operator("crashing", Some(step));
        stage.create_lease(step, &json!({})).await;
        if !matches!(step, "lease" | "secret-created" | "bound-written") {
            stage.wait_bound(step).await;
            stage.delete_lease(step).await;
        }
        let mut crashed = stage.operators.pop().unwrap();
        let status = crashed.ended().await;
        assert!(!status.success(), "{step}");
        free_leadership(&stage).await;
        stage.start_operator("next", None);
        if matches!(step, "lease" | "secret-created" | "bound-written") {
            let lease = stage.wait_bound(step).await;
            let status = lease.status.unwrap();
            let held = stage.at_agents().await;
            assert_eq!(held.len(), 1, "{step}: {held:?}");
            assert_eq!(status.branch.as_ref(), Some(&held[0].branch), "{step}");
            let data = stage.secrets().get(step).await.unwrap().data.unwrap();
            assert_eq!(data["username"].0, held[0].user.as_bytes(), "{step}");
            stage.delete_lease(step).await;
        }
        stage.wait_nothing_left().await;
        stage.wait_filled("app", 2).await;
    }
}

#[tokio::test]
async fn of_two_operators_one_leads_and_the_old_ones_commands_are_refused() {
    let mut stage = Stage::start(1).await;
    stage.create_pool("app", &json!({"replicas": 2})).await;
    stage.wait_filled("app", 2).await;
    stage.start_operator("operator-2", None);
    let record = async || {
        leadership(&stage)
            .get("branchpool-operator")
            .await
            .unwrap()
            .spec
            .unwrap()
    };
    let old = record().await;
    assert!(old.holder_identity.unwrap().starts_with("operator-1_"));
    let epoch = u64::try_from(old.lease_transitions.unwrap()).unwrap();
    kill_process(stage.operators[0].process.id(), Signal::STOP).unwrap();
    stage.create_lease("test", &json!({})).await;
    stage.wait_bound("test").await;
    let new = record().await;
    assert!(new.holder_identity.unwrap().starts_with("operator-2_"));
    assert_eq!(
        u64::try_from(new.lease_transitions.unwrap()).unwrap(),
        epoch + 1
    );
    // What the old one may have had in its hands.
    let late = LeaseRequest {
        pool: branchpool_agent_api::PoolName::new("shop", "app"),
        ttl_seconds: None,
        holder: None,
        epoch: Some(epoch),
    };
    let refused = stage.agents[0]
        .client
        .lease("late.late", &late)
        .await
        .unwrap_err();
    assert!(refused.is("StaleEpoch"), "{refused}");
    assert_eq!(refused.problem().unwrap().epoch, Some(epoch + 1));
    kill_process(stage.operators[0].process.id(), Signal::CONT).unwrap();
    let status = stage.operators[0].ended().await;
    assert!(!status.success());
    assert_eq!(stage.at_agents().await.len(), 1);
    stage.delete_lease("test").await;
    stage.wait_nothing_left().await;
}

#[tokio::test]
async fn a_leadership_that_was_deleted_goes_on_above_what_agents_have_seen() {
    let mut stage = Stage::start(1).await;
    stage.create_pool("app", &json!({"replicas": 1})).await;
    stage.wait_filled("app", 1).await;
    for name in ["second", "third"] {
        stage.operators.pop().unwrap().stop().await;
        stage.start_operator(name, None);
        stage.create_lease(name, &json!({})).await;
        stage.wait_bound(name).await;
        stage.delete_lease(name).await;
        stage.wait_nothing_left().await;
    }
    stage.operators.pop().unwrap().stop().await;
    leadership(&stage)
        .delete("branchpool-operator", &DeleteParams::default())
        .await
        .unwrap();
    stage.start_operator("fourth", None);
    stage.create_lease("test", &json!({})).await;
    stage.wait_bound("test").await;
}

#[tokio::test]
async fn leases_wait_through_a_restart_of_the_api_server() {
    let mut stage = Stage::start(1).await;
    stage
        .create_pool("app", &json!({"replicas": 1, "maxBranches": 1}))
        .await;
    stage.wait_filled("app", 1).await;
    stage.create_lease("first", &json!({})).await;
    stage.wait_bound("first").await;
    for (name, priority) in [("low", "Low"), ("high", "High")] {
        stage
            .create_lease(name, &json!({"priority": priority}))
            .await;
        stage
            .wait_lease(name, |lease| reason(lease) == "Queued")
            .await;
    }
    stage.api.kill().await;
    stage.api.run().await;
    let mut held = "first";
    for next in ["high", "low"] {
        stage.delete_lease(held).await;
        wait_bound_by_any_leader(&mut stage, next).await;
        let bound = stage.all_leases().await.into_iter();
        let bound = bound.filter(|lease| phase(lease) == LeasePhase::Bound);
        assert_eq!(bound.count(), 1);
        held = next;
    }
    stage.delete_lease(held).await;
    stage.wait_nothing_left().await;
}

/// A leader that could not renew for so long ends, and a kubelet starts it again.
async fn wait_bound_by_any_leader(stage: &mut Stage, name: &str) -> BranchLease {
    eventually("the lease is bound", async || {
        if let Some(status) = stage.operators[0].process.0.try_wait().unwrap() {
            assert!(!status.success());
            stage.operators.clear();
            stage.start_operator("operator-2", None);
        }
        let lease = stage.leases().get(name).await.ok()?;
        (phase(&lease) == LeasePhase::Bound).then_some(lease)
    })
    .await
}

#[tokio::test]
async fn restarts_of_api_server_and_agent_and_the_end_of_a_node() {
    let mut stage = Stage::start(2).await;
    stage
        .create_pool("app", &json!({"replicas": 4, "maxBranches": 10}))
        .await;
    stage.wait_filled("app", 4).await;
    for name in ["a", "b"] {
        stage.create_lease(name, &json!({})).await;
        stage.wait_bound(name).await;
    }
    stage.api.kill().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    stage.api.run().await;
    stage.create_lease("c", &json!({})).await;
    let c = wait_bound_by_any_leader(&mut stage, "c").await;
    let node = c.status.unwrap().node.unwrap();
    let index = stage
        .agents
        .iter()
        .position(|agent| agent.name == node)
        .unwrap();
    stage.agents[index].stop();
    stage
        .wait_lease("c", |lease| reason(lease) == "NodeUnreachable")
        .await;
    // The other node serves meanwhile.
    stage.create_lease("d", &json!({})).await;
    let d = stage.wait_bound("d").await;
    assert_ne!(d.status.unwrap().node.as_deref(), Some(&*node));
    stage.agents[index].launch().await;
    let back = stage
        .wait_lease("c", |lease| reason(lease) == "Bound")
        .await;
    assert_eq!(phase(&back), LeasePhase::Bound);
    // Its machine is gone, and nobody has missed its Pod yet.
    stage.agents[index].stop();
    stage
        .nodes()
        .delete(&node, &DeleteParams::default())
        .await
        .unwrap();
    let lost = stage
        .wait_lease("c", |lease| phase(lease) == LeasePhase::Lost)
        .await;
    assert_eq!(reason(&lost), "NodeGone");
    eventually("its Secret is gone", async || {
        let secrets = stage.lease_secrets().await;
        (!secrets.contains(&"c".to_owned())).then_some(())
    })
    .await;
    let nodes: Api<branchpool_crds::BranchNode> = Api::all(stage.api.client.clone());
    eventually("its BranchNode is gone", async || {
        nodes.get_opt(&node).await.unwrap().is_none().then_some(())
    })
    .await;
    stage.wait_filled("app", 4).await;
    // The machine comes again, and then leaves for good.
    create(
        &stage.api.client,
        &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}),
    )
    .await;
    stage.agents[index].launch().await;
    eventually("its BranchNode tells of it", async || {
        let status = nodes.get_opt(&node).await.unwrap()?.status?;
        (condition(&status.conditions, "Ready").status == "True").then_some(())
    })
    .await;
    stage.wait_filled("app", 4).await;
    stage.agents[index].stop();
    let pods: Api<k8s_openapi::api::core::v1::Pod> =
        Api::namespaced(stage.api.client.clone(), "branchpool-agents");
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete(&format!("agent-{node}"), &at_once)
        .await
        .unwrap();
    stage
        .nodes()
        .delete(&node, &DeleteParams::default())
        .await
        .unwrap();
    eventually("its BranchNode is gone again", async || {
        nodes.get_opt(&node).await.unwrap().is_none().then_some(())
    })
    .await;
    stage.wait_filled("app", 4).await;
}
