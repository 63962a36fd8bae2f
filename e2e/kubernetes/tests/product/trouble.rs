//! Parts that die.

use branchpool_crds::LeasePhase;
use kube::api::DeleteParams;
use serde_json::json;

use crate::stage::{Done, SYSTEM, Stage, eventually, node_of, phase, psql, run};

const WAITING: [&str; 3] = ["third", "fourth", "fifth"];

/// Two leases that are bound, and three for which there is no branch.
async fn leases_that_wait(stage: &Stage) -> Done {
    stage
        .fill("few", &json!({"replicas": 2, "maxBranches": 2}))
        .await?;
    for name in ["first", "second"] {
        stage
            .bind(name, &json!({"poolRef": {"name": "few"}}))
            .await?;
    }
    for name in WAITING {
        stage
            .create_lease(name, &json!({"poolRef": {"name": "few"}}))
            .await?;
        stage.lease_ready(name, "False", "Queued").await?;
    }
    Ok(())
}

/// With two branches, which of them no order tells that is known here: they are of the same second.
async fn two_are_bound(stage: &Stage, leases: usize) -> Done {
    eventually("two leases are bound, and the others wait", async || {
        let all = stage.all_leases().await.ok()?;
        let bound = all.iter().filter(|lease| phase(lease) == LeasePhase::Bound);
        (all.len() == leases && bound.count() == 2).then_some(())
    })
    .await?;
    let held = stage.held().await?;
    let bound = held.iter().filter(|lease| lease["phase"] == "Bound");
    assert_eq!(bound.count(), 2, "{held:?}");
    Ok(())
}

async fn none_waits_any_more(stage: &Stage) -> Done {
    stage.release_all().await?;
    stage.full("few", 2).await?;
    stage.drop_pool("few").await
}

pub(crate) async fn the_leader_is_killed_while_leases_wait(stage: &mut Stage) -> Done {
    leases_that_wait(stage).await?;
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
    two_are_bound(stage, WAITING.len()).await?;
    eventually("another leads, in another term", async || {
        let (pod, term) = stage.leader().await.ok()?;
        (pod != leader && term > epoch).then_some(())
    })
    .await?;
    none_waits_any_more(stage).await
}

pub(crate) async fn the_api_server_is_killed_while_leases_wait(stage: &mut Stage) -> Done {
    let what = "its API server is not the harness's to kill";
    if stage.hands(what).is_none() {
        return Ok(());
    }
    leases_that_wait(stage).await?;
    let url = stage.entry("first", "DATABASE_URL").await?;
    let api = &mut stage.hands(what).unwrap().api;
    api.apiserver.kill().await?;
    psql(&url, "INSERT INTO notes VALUES ('without a server')").await?;
    api.run().await?;
    stage.release("second").await?;
    two_are_bound(stage, 1 + WAITING.len()).await?;
    stage.lease_ready("first", "True", "").await?;
    assert_eq!(stage.entry("first", "DATABASE_URL").await?, url);
    assert_eq!(
        stage.psql("first", "SELECT body FROM notes").await?,
        "without a server"
    );
    none_waits_any_more(stage).await
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
