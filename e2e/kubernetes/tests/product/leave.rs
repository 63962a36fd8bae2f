//! Nodes that go, and networks that break.

use std::time::Duration;

use branchpool_crds::{BranchNode, LeasePhase};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams},
};
use libtest_mimic::Failed;
use serde_json::json;
use tokio::time::{Instant, sleep_until};

use crate::stage::{AGENTS, Done, SYSTEM, Stage, eventually, node_of, phase};

const CUT: Duration = Duration::from_secs(60);

pub(crate) async fn a_cordoned_node_keeps_its_leases(stage: &mut Stage) -> Done {
    stage
        .fill("moved", &json!({"replicas": 4, "maxBranches": 8}))
        .await?;
    let lease = stage
        .bind("held", &json!({"poolRef": {"name": "moved"}}))
        .await?;
    let node = node_of(&lease);
    stage
        .psql("held", "INSERT INTO notes VALUES ('on a cordoned node')")
        .await?;
    stage.kubectl(&["cordon", &node]).await?;
    stage.node_ready(&node, "False", "Cordoned").await?;
    stage.full("moved", 4).await?;
    for name in ["next", "after"] {
        let other = stage
            .bind(name, &json!({"poolRef": {"name": "moved"}}))
            .await?;
        assert_ne!(node_of(&other), node, "nothing new on a cordoned node");
    }
    assert_eq!(
        stage.psql("held", "SELECT body FROM notes").await?,
        "on a cordoned node"
    );
    stage.kubectl(&["uncordon", &node]).await?;
    stage.node_ready(&node, "True", "").await?;
    for name in ["held", "next", "after"] {
        stage.release(name).await?;
    }
    stage.nothing_leased().await?;
    stage.full("moved", 4).await?;
    stage.drop_pool("moved").await
}

/// With the operator that leads on it, which has to go as all Pods but the agent's have to.
pub(crate) async fn a_drained_node_keeps_its_leases(stage: &mut Stage) -> Done {
    stage
        .fill("drained", &json!({"replicas": 4, "maxBranches": 8}))
        .await?;
    let (leader, _) = stage.leader().await?;
    let operators: Api<Pod> = Api::namespaced(stage.cluster.client(), SYSTEM);
    let spec = operators.get(&leader).await?.spec.unwrap();
    let node = spec.node_name.unwrap();
    let lease = lease_on(stage, &node, "drained").await?;
    stage
        .psql(&lease, "INSERT INTO notes VALUES ('on a drained node')")
        .await?;
    stage
        .kubectl(&[
            "drain",
            &node,
            "--ignore-daemonsets",
            "--delete-emptydir-data",
            "--timeout=180s",
        ])
        .await?;
    assert!(
        operators.get_opt(&leader).await?.is_none(),
        "it was evicted"
    );
    assert!(stage.agents().await?.contains_key(&node));
    stage.node_ready(&node, "False", "Cordoned").await?;
    eventually("of its branches only the leased one is left", async || {
        (stage.branches().await.ok()?[&node] == 1).then_some(())
    })
    .await?;
    stage.full("drained", 4).await?;
    let other = stage
        .bind("next", &json!({"poolRef": {"name": "drained"}}))
        .await?;
    assert_ne!(node_of(&other), node, "nothing new on a drained node");
    assert_eq!(
        stage.psql(&lease, "SELECT body FROM notes").await?,
        "on a drained node"
    );
    let (another, _) = stage.leader().await?;
    assert_ne!(another, leader);
    stage.kubectl(&["uncordon", &node]).await?;
    stage.node_ready(&node, "True", "").await?;
    stage.release_all().await?;
    stage.full("drained", 4).await?;
    let deployment = "deployment/branchpool-operator";
    stage
        .kubectl(&["rollout", "status", "--namespace", SYSTEM, deployment])
        .await?;
    stage.drop_pool("drained").await
}

pub(crate) async fn a_node_is_cut_off_for_a_minute(stage: &mut Stage) -> Done {
    if stage
        .hands("its network is not the harness's to cut")
        .is_none()
    {
        return Ok(());
    }
    stage.fill("far", &json!({"replicas": 4})).await?;
    let name = node_name(stage);
    operator_beyond(stage, &name).await?;
    let lease = lease_on(stage, &name, "far").await?;
    stage
        .psql(&lease, "INSERT INTO notes VALUES ('before the cut')")
        .await?;
    connect(stage, false).await?;
    let until = Instant::now() + CUT;
    let told = stage
        .node_ready(&name, "Unknown", "AgentUnreachable")
        .await?;
    assert!(told.contains("the agent does not answer"), "{told}");
    stage
        .lease_ready(&lease, "Unknown", "NodeUnreachable")
        .await?;
    // The other node goes on, and takes over.
    let near = stage
        .bind("near", &json!({"poolRef": {"name": "far"}}))
        .await?;
    let other = node_of(&near);
    assert_ne!(other, name);
    let nodes: Api<BranchNode> = Api::all(stage.cluster.client());
    eventually("the whole pool is the other node's to hold", async || {
        let status = nodes.get(&other).await.ok()?.status?;
        let pool = status.pools.iter().find(|pool| pool.name == "far")?;
        (pool.desired == 4 && pool.ready == 4).then_some(())
    })
    .await?;
    sleep_until(until).await;
    stage
        .lease_ready(&lease, "Unknown", "NodeUnreachable")
        .await?;
    connect(stage, true).await?;
    stage.node_ready(&name, "True", "").await?;
    stage.lease_ready(&lease, "True", "").await?;
    assert_eq!(
        stage.psql(&lease, "SELECT body FROM notes").await?,
        "before the cut"
    );
    stage.release_all().await?;
    stage.full("far", 4).await?;
    stage.drop_pool("far").await
}

/// The Node object is deleted, as a cloud does with a machine that is gone; then the machine comes again, before
/// Kubernetes has missed its Pods.
pub(crate) async fn a_node_leaves_and_comes_back(stage: &mut Stage) -> Done {
    if stage
        .hands("its nodes are not the harness's to remove")
        .is_none()
    {
        return Ok(());
    }
    stage.fill("leaving", &json!({"replicas": 4})).await?;
    let name = node_name(stage);
    operator_beyond(stage, &name).await?;
    let lease = lease_on(stage, &name, "leaving").await?;
    stage.hands("").unwrap().nodes[1].kubelet.kill().await?;
    connect(stage, false).await?;
    let nodes: Api<Node> = Api::all(stage.cluster.client());
    nodes.delete(&name, &DeleteParams::default()).await?;
    stage
        .wait("delete", &[&format!("branchnode/{name}")])
        .await?;
    eventually("the lease is Lost", async || {
        let lease = stage.leases().get(&lease).await.ok()?;
        (phase(&lease) == LeasePhase::Lost).then_some(())
    })
    .await?;
    stage.lease_ready(&lease, "False", "NodeGone").await?;
    assert!(
        stage.secrets().get_opt(&lease).await?.is_none(),
        "the Secret goes first"
    );
    stage.full("leaving", 4).await?;
    connect(stage, true).await?;
    stage.hands("").unwrap().nodes[1].run().await?;
    stage.wait("create", &[&format!("node/{name}")]).await?;
    stage
        .wait("condition=Ready", &[&format!("node/{name}")])
        .await?;
    let rollout = [
        "rollout",
        "status",
        "--namespace",
        AGENTS,
        "daemonset/branchpool-agent",
        "--timeout=180s",
    ];
    eventually("the agent's Pod is there", async || {
        stage.agents().await.ok()?.contains_key(&name).then_some(())
    })
    .await?;
    stage.kubectl(&rollout).await?;
    stage.node_ready(&name, "True", "").await?;
    stage.release_all().await?;
    stage.full("leaving", 4).await?;
    stage.drop_pool("leaving").await
}

/// After a drain all of the operator's Pods may be on one node, and nothing moves them back. Where that node is
/// cut off, nobody is left to tell.
async fn operator_beyond(stage: &Stage, node: &str) -> Done {
    let operators: Api<Pod> = Api::namespaced(stage.cluster.client(), SYSTEM);
    let selected = ListParams::default().labels("app.kubernetes.io/component=operator");
    let (leader, _) = stage.leader().await?;
    let pods = operators.list(&selected).await?.items;
    let is_there = |pod: &Pod| {
        let spec = pod.spec.as_ref();
        spec.and_then(|spec| spec.node_name.as_deref()) == Some(node)
    };
    if !pods.iter().all(is_there) {
        return Ok(());
    }
    let standby = pods.iter().find(|pod| pod.name_any() != leader);
    let standby = standby.ok_or("the operator has no standby")?;
    // The chart asks the scheduler to keep them apart.
    operators
        .delete(&standby.name_any(), &DeleteParams::default())
        .await?;
    eventually("a Pod of the operator serves on another node", async || {
        let pods = operators.list(&selected).await.ok()?.items;
        pods.iter()
            .any(|pod| !is_there(pod) && is_ready(pod))
            .then_some(())
    })
    .await
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

async fn connect(stage: &mut Stage, connected: bool) -> Done {
    let own = stage.hands("").unwrap();
    Ok(own.nodes[1].connect(connected).await?)
}

/// Of the one that has its network cut.
fn node_name(stage: &mut Stage) -> String {
    stage.hands("").unwrap().nodes[1].name().to_owned()
}

/// A lease on this node: the only one that may hand out branches while it is bound.
async fn lease_on(stage: &Stage, node: &str, pool: &str) -> Result<String, Failed> {
    let nodes: Api<Node> = Api::all(stage.cluster.client());
    let all = nodes.list(&ListParams::default()).await?.items;
    let others: Vec<String> = all
        .iter()
        .map(ResourceExt::name_any)
        .filter(|name| name != node)
        .collect();
    for other in &others {
        stage.kubectl(&["cordon", other]).await?;
    }
    for other in &others {
        stage.node_ready(other, "False", "Cordoned").await?;
    }
    let lease = stage
        .bind("distant", &json!({"poolRef": {"name": pool}}))
        .await?;
    assert_eq!(node_of(&lease), node);
    for other in &others {
        stage.kubectl(&["uncordon", other]).await?;
    }
    Ok("distant".to_owned())
}
