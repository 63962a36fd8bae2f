use std::time::Duration;

use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::json;

use crate::fixture::{
    eventually,
    stage::{Stage, condition, is},
};

#[tokio::test]
async fn a_pool_becomes_ready_on_two_nodes_and_then_nothing_is_written() {
    let stage = Stage::start(2).await;
    stage
        .create_pool("app", &json!({"replicas": 6, "maxBranches": 10}))
        .await;
    let pool = stage.wait_filled("app", 6).await;
    let status = pool.status.unwrap();
    assert_eq!((status.nodes, status.desired, status.replicas), (2, 6, 6));
    assert!(is(&status.conditions, "Available", "True"));
    assert!(is(&status.conditions, "SourceReady", "True"));
    for agent in &stage.agents {
        let pools = agent.client.pools().await.unwrap();
        assert_eq!(
            (pools[0].desired, pools[0].max_branches),
            (3, 5),
            "{}",
            agent.name
        );
    }
    let nodes: kube::Api<branchpool_crds::BranchNode> = kube::Api::all(stage.api.client.clone());
    let node = eventually("the node is told", async || {
        let node = nodes.get_opt("node-1").await.unwrap()?;
        node.status
            .filter(|status| status.pools.first().is_some_and(|pool| pool.ready == 3))
    })
    .await;
    assert!(is(&node.conditions, "Ready", "True"));
    assert_eq!(node.postgres_versions, [15]);
    // What was under way is written; from then on nothing.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let writes = || {
        let audit = stage.api.audit().into_iter();
        audit
            .filter(|entry| entry.is_write() && entry.resource != "leases")
            .collect::<Vec<_>>()
    };
    let before = writes().len();
    tokio::time::sleep(Duration::from_secs(8)).await;
    let after = writes();
    assert_eq!(after.len(), before, "{:?}", &after[before..]);
}

#[tokio::test]
async fn scripts_of_a_config_map_and_its_absence() {
    let stage = Stage::start(1).await;
    let source = json!({"sql": {"configMapRef": {"name": "schema"}}});
    stage
        .create_pool("app", &json!({"replicas": 1, "source": source}))
        .await;
    let pool = stage
        .wait_pool("app", |pool| {
            let status = pool.status.as_ref();
            status.is_some_and(|status| is(&status.conditions, "SourceReady", "False"))
        })
        .await;
    let conditions = pool.status.unwrap().conditions;
    let source = condition(&conditions, "SourceReady");
    assert_eq!(source.reason, "ConfigMapNotFound");
    assert!(source.message.contains("create it"), "{}", source.message);
    crate::fixture::access::create(
        &stage.api.client,
        &json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "schema", "namespace": "shop"},
            "data": {"1.sql": "CREATE TABLE ordered (id int);", "readme": "no script"},
        }),
    )
    .await;
    stage.wait_filled("app", 1).await;
    // The same trouble again soon is counted in the same Event.
    let maps: kube::Api<k8s_openapi::api::core::v1::ConfigMap> =
        kube::Api::namespaced(stage.api.client.clone(), "shop");
    maps.delete("schema", &DeleteParams::default())
        .await
        .unwrap();
    eventually("the Event is told again", async || {
        let audit = stage.api.audit().into_iter();
        let events = audit.filter(|entry| entry.resource == "events" && entry.code < 300);
        let verbs: Vec<String> = events.map(|entry| entry.verb).collect();
        (verbs == ["create", "patch"]).then_some(())
    })
    .await;
}

#[tokio::test]
async fn cordoned_nodes_give_up_their_share_and_labels_choose() {
    let stage = Stage::start(2).await;
    let spec = json!({"replicas": 4, "maxBranches": 8, "nodeSelector": {"disk": "local"}});
    stage.create_pool("app", &spec).await;
    stage.wait_filled("app", 4).await;
    let desired = async |node: usize| {
        let pools = stage.agents[node].client.pools().await.unwrap();
        (pools[0].desired, pools[0].ready)
    };
    let cordon = async |cordoned: bool| {
        let patch = json!({"spec": {"unschedulable": cordoned}});
        let nodes = stage.nodes();
        let patch = Patch::Merge(&patch);
        nodes
            .patch("node-2", &PatchParams::default(), &patch)
            .await
            .unwrap();
    };
    cordon(true).await;
    eventually("the other node holds all", async || {
        (desired(0).await == (4, 4) && desired(1).await == (0, 0)).then_some(())
    })
    .await;
    cordon(false).await;
    eventually("both hold half", async || {
        (desired(0).await == (2, 2) && desired(1).await == (2, 2)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_namespace_that_refuses_agents_is_named() {
    let stage = Stage::start(0).await;
    let namespaces: kube::Api<k8s_openapi::api::core::v1::Namespace> =
        kube::Api::all(stage.api.client.clone());
    let labels =
        json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}});
    namespaces
        .patch(
            "branchpool-agents",
            &PatchParams::default(),
            &Patch::Merge(&labels),
        )
        .await
        .unwrap();
    stage.create_pool("app", &json!({"replicas": 1})).await;
    let pool = stage
        .wait_pool("app", |pool| {
            let status = pool.status.as_ref();
            status.is_some_and(|status| {
                let mut conditions = status.conditions.iter();
                conditions.any(|it| it.type_ == "Degraded" && it.reason == "PodSecurity")
            })
        })
        .await;
    let conditions = pool.status.unwrap().conditions;
    let message = &condition(&conditions, "Ready").message;
    assert!(message.contains("kubectl label namespace"), "{message}");
}
