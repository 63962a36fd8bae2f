//! Parts that die, nodes that go, networks that break.

use branchpool_crds::LeasePhase;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, api::DeleteParams};
use libtest_mimic::Failed;
use serde_json::json;

use crate::stage::{AGENTS, Done, SYSTEM, Stage, eventually, node_of, phase, run};

pub(crate) async fn the_leader_is_killed_while_leases_wait(stage: &mut Stage) -> Done {
    stage
        .fill("few", &json!({"replicas": 2, "maxBranches": 2}))
        .await?;
    for name in ["first", "second"] {
        stage
            .bind(name, &json!({"poolRef": {"name": "few"}}))
            .await?;
    }
    let waiting = ["third", "fourth", "fifth"];
    for name in waiting {
        stage
            .create_lease(name, &json!({"poolRef": {"name": "few"}}))
            .await?;
        stage.lease_ready(name, "False", "Queued").await?;
    }
    let (leader, epoch) = stage.leader().await?;
    stage
        .kubectl(&[
            "delete",
            "pod",
            "--namespace",
            SYSTEM,
            &leader,
            "--grace-period=0",
            "--force",
        ])
        .await?;
    for name in ["first", "second"] {
        stage.release(name).await?;
    }
    // Made in the same second they are in no order that is known here.
    eventually("two of them are bound, and one waits", async || {
        let leases = stage.all_leases().await.ok()?;
        let bound = leases
            .iter()
            .filter(|lease| phase(lease) == LeasePhase::Bound);
        (leases.len() == 3 && bound.count() == 2).then_some(())
    })
    .await?;
    eventually("another leads, in another term", async || {
        let (pod, term) = stage.leader().await.ok()?;
        (pod != leader && term > epoch).then_some(())
    })
    .await?;
    let held = stage.held().await?;
    let bound = held.iter().filter(|lease| lease["phase"] == "Bound");
    assert_eq!(bound.count(), 2, "{held:?}");
    for name in waiting {
        stage.release(name).await?;
    }
    stage.nothing_leased().await?;
    stage.full("few", 2).await?;
    stage.drop_pool("few").await
}

/// A lease, its Secret, a pool: deleted while nobody looks.
pub(crate) async fn what_ends_while_no_operator_runs_is_noticed(stage: &mut Stage) -> Done {
    for (pool, lease) in [("stays", "left"), ("goes", "orphan")] {
        stage.fill(pool, &json!({"replicas": 1})).await?;
        stage
            .bind(lease, &json!({"poolRef": {"name": pool}}))
            .await?;
    }
    let scale = async |replicas: &str| {
        let replicas = format!("--replicas={replicas}");
        let deployment = "deployment/branchpool-operator";
        stage
            .kubectl(&["scale", "--namespace", SYSTEM, deployment, &replicas])
            .await
    };
    scale("0").await?;
    let pods = [
        "pod",
        "--namespace",
        SYSTEM,
        "--selector=app.kubernetes.io/component=operator",
    ];
    stage.wait("delete", &pods).await?;
    for lease in ["left", "orphan"] {
        stage.release(lease).await?;
    }
    stage
        .pools()
        .delete("goes", &DeleteParams::default())
        .await?;
    scale("2").await?;
    stage.nothing_leased().await?;
    stage.full("stays", 1).await?;
    stage.drop_pool("stays").await
}

pub(crate) async fn an_agent_is_killed_and_its_branches_stay(stage: &mut Stage) -> Done {
    let what = "its containers are not the harness's to kill";
    if stage.hands(what).is_none() {
        return Ok(());
    }
    stage.fill("kept", &json!({"replicas": 2})).await?;
    let lease = stage
        .bind("held", &json!({"poolRef": {"name": "kept"}}))
        .await?;
    stage
        .psql("held", "INSERT INTO notes VALUES ('before the kill')")
        .await?;
    let (node, url) = (node_of(&lease), stage.entry("held", "DATABASE_URL").await?);
    let pod = stage.agents().await?[&node].clone();
    let pods = stage.agent_pods();
    let container = async || {
        let status = pods.get(&pod).await.ok()?.status?;
        let container = status.container_statuses?.into_iter().next()?;
        Some((
            container.restart_count,
            container.container_id?,
            container.ready,
        ))
    };
    let (restarts, id, _) = container().await.unwrap();
    let own = stage.hands(what).unwrap();
    let node = own.nodes.iter().find(|one| one.name() == node).unwrap();
    let mut kill = node.command("ctr");
    let id = id.trim_start_matches("containerd://").to_owned();
    kill.args([
        "--namespace",
        "k8s.io",
        "tasks",
        "kill",
        "--signal",
        "SIGKILL",
        &id,
    ]);
    run(kill).await?;
    eventually("the agent's container runs again", async || {
        let (count, _, ready) = container().await?;
        (ready && count > restarts).then_some(())
    })
    .await?;
    stage.lease_ready("held", "True", "").await?;
    assert_eq!(stage.entry("held", "DATABASE_URL").await?, url);
    let read = eventually("the branch answers", async || {
        stage.psql("held", "SELECT body FROM notes").await.ok()
    })
    .await?;
    assert_eq!(read, "before the kill");
    stage.release("held").await?;
    stage.nothing_leased().await?;
    stage.drop_pool("kept").await
}

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

pub(crate) async fn a_node_is_cut_off_and_comes_back(stage: &mut Stage) -> Done {
    if stage
        .hands("its network is not the harness's to cut")
        .is_none()
    {
        return Ok(());
    }
    stage.fill("far", &json!({"replicas": 4})).await?;
    let lease = lease_on_the_second(stage, "far").await?;
    stage
        .psql(&lease, "INSERT INTO notes VALUES ('before the cut')")
        .await?;
    connect(stage, false).await?;
    let name = node_name(stage);
    let told = stage
        .node_ready(&name, "Unknown", "AgentUnreachable")
        .await?;
    assert!(told.contains("the agent does not answer"), "{told}");
    stage
        .lease_ready(&lease, "Unknown", "NodeUnreachable")
        .await?;
    // The other node goes on.
    let near = stage
        .bind("near", &json!({"poolRef": {"name": "far"}}))
        .await?;
    assert_ne!(node_of(&near), name);
    connect(stage, true).await?;
    stage.node_ready(&name, "True", "").await?;
    stage.lease_ready(&lease, "True", "").await?;
    assert_eq!(
        stage.psql(&lease, "SELECT body FROM notes").await?,
        "before the cut"
    );
    release_all(stage).await?;
    stage.full("far", 4).await?;
    stage.drop_pool("far").await
}

/// The Node object is deleted, as a cloud does with a machine that is gone; then the machine comes again.
pub(crate) async fn a_node_leaves_and_comes_back(stage: &mut Stage) -> Done {
    if stage
        .hands("its nodes are not the harness's to remove")
        .is_none()
    {
        return Ok(());
    }
    stage.fill("leaving", &json!({"replicas": 4})).await?;
    let lease = lease_on_the_second(stage, "leaving").await?;
    let name = node_name(stage);
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
    release_all(stage).await?;
    stage.full("leaving", 4).await?;
    stage.drop_pool("leaving").await
}

async fn connect(stage: &mut Stage, connected: bool) -> Done {
    let own = stage.hands("").unwrap();
    Ok(own.nodes[1].connect(connected).await?)
}

fn node_name(stage: &mut Stage) -> String {
    stage.hands("").unwrap().nodes[1].name().to_owned()
}

/// A lease on the second node: the only one that may hold branches while it is bound.
async fn lease_on_the_second(stage: &mut Stage, pool: &str) -> Result<String, Failed> {
    let own = stage.hands("").unwrap();
    let (first, second) = (
        own.nodes[0].name().to_owned(),
        own.nodes[1].name().to_owned(),
    );
    stage.kubectl(&["cordon", &first]).await?;
    stage.node_ready(&first, "False", "Cordoned").await?;
    let lease = stage
        .bind("distant", &json!({"poolRef": {"name": pool}}))
        .await?;
    assert_eq!(node_of(&lease), second);
    stage.kubectl(&["uncordon", &first]).await?;
    stage.node_ready(&first, "True", "").await?;
    Ok("distant".to_owned())
}

async fn release_all(stage: &Stage) -> Done {
    for lease in stage.all_leases().await? {
        stage.release(&lease.metadata.name.unwrap()).await?;
    }
    stage.nothing_leased().await
}
