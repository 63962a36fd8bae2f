use branchpool_crds::LeasePhase;
use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use crate::fixture::{
    access::{create, try_create},
    eventually,
    stage::{Stage, condition, phase, reason},
};

#[tokio::test]
async fn terms_renewals_resets_and_ends() {
    let stage = Stage::start(1).await;
    let lease = json!({"defaultTTL": "60s", "maxTTL": "120s", "retainFinished": "3s"});
    stage
        .create_pool("app", &json!({"replicas": 3, "lease": lease}))
        .await;
    stage.wait_filled("app", 3).await;
    stage.create_lease("short", &json!({"ttl": "2s"})).await;
    let expired = stage
        .wait_lease("short", |lease| phase(lease) == LeasePhase::Expired)
        .await;
    assert_eq!(expired.status.unwrap().binding, None);
    eventually("the finished lease is collected", async || {
        stage
            .leases()
            .get_opt("short")
            .await
            .unwrap()
            .is_none()
            .then_some(())
    })
    .await;
    stage.wait_nothing_left().await;

    stage.create_lease("long", &json!({"ttl": "30s"})).await;
    let first = stage.wait_bound("long").await.status.unwrap();
    let later = Timestamp::now() + jiff::SignedDuration::from_hours(9);
    stage
        .change_lease(
            "long",
            &json!({"renewTime": later.to_string(), "ttl": "100s"}),
        )
        .await;
    let renewed = stage
        .wait_lease("long", |lease| {
            let status = lease.status.as_ref().unwrap();
            status.expiration_time > first.expiration_time
        })
        .await;
    let renewed = renewed.status.unwrap();
    let ends = renewed.expiration_time.clone().unwrap().0;
    assert!(
        ends < Timestamp::now() + jiff::SignedDuration::from_secs(101),
        "a future time is now"
    );
    stage.change_lease("long", &json!({"ttl": "121s"})).await;
    let refused = stage
        .wait_lease("long", |lease| {
            let conditions = &lease.status.as_ref().unwrap().conditions;
            conditions
                .iter()
                .any(|condition| condition.type_ == "Renewed")
        })
        .await;
    assert_eq!(phase(&refused), LeasePhase::Bound);
    let status = refused.status.unwrap();
    let why = condition(&status.conditions, "Renewed");
    assert_eq!(
        (&*why.status, &*why.reason),
        ("False", "TTLTooLong"),
        "{}",
        why.message
    );

    stage
        .change_lease("long", &json!({"resetToken": "again", "ttl": "100s"}))
        .await;
    let reset = stage
        .wait_lease("long", |lease| {
            let status = lease.status.as_ref().unwrap();
            status.observed_reset_token.as_deref() == Some("again")
        })
        .await;
    let reset = reset.status.unwrap();
    assert_ne!(reset.branch, first.branch);
    assert_eq!(reset.user, first.user, "the address stays");
    stage.delete_lease("long").await;

    stage.create_lease("greedy", &json!({"ttl": "121s"})).await;
    let failed = stage
        .wait_lease("greedy", |lease| phase(lease) == LeasePhase::Failed)
        .await;
    assert_eq!(reason(&failed), "TTLTooLong");
    stage
        .create_lease("lonely", &json!({"poolRef": {"name": "none"}}))
        .await;
    let waiting = stage
        .wait_lease("lonely", |lease| !reason(lease).is_empty())
        .await;
    assert_eq!(
        (phase(&waiting), &*reason(&waiting)),
        (LeasePhase::Pending, "PoolNotFound")
    );
}

#[tokio::test]
async fn a_secret_that_is_not_a_leases_is_never_touched() {
    let stage = Stage::start(1).await;
    stage.create_pool("app", &json!({"replicas": 1})).await;
    stage.wait_filled("app", 1).await;
    let own = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": {"name": "test", "namespace": "shop"}, "stringData": {"key": "value"},
    });
    create(&stage.api.client, &own).await;
    stage.create_lease("test", &json!({})).await;
    let failed = stage
        .wait_lease("test", |lease| phase(lease) == LeasePhase::Failed)
        .await;
    assert_eq!(reason(&failed), "SecretNameConflict");
    let data = stage.secrets().get("test").await.unwrap().data.unwrap();
    assert_eq!(data["key"].0, b"value");
    // An older lease's is replaced.
    let stale = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "servicebinding.io/postgresql", "immutable": true,
        "metadata": {"name": "second", "namespace": "shop", "labels": {"branchpool.dev/lease-uid": "gone"}},
        "stringData": {"type": "postgresql"},
    });
    create(&stage.api.client, &stale).await;
    stage.wait_filled("app", 1).await;
    stage.create_lease("second", &json!({})).await;
    let bound = stage.wait_bound("second").await;
    let labels = stage
        .secrets()
        .get("second")
        .await
        .unwrap()
        .metadata
        .labels
        .unwrap();
    assert_eq!(
        labels.get("branchpool.dev/lease-uid"),
        bound.metadata.uid.as_ref()
    );
}

#[tokio::test]
async fn an_object_that_cannot_be_decoded_stops_nothing_else() {
    let mut stage = Stage::start(1).await;
    stage.create_pool("app", &json!({"replicas": 1})).await;
    stage.wait_filled("app", 1).await;
    // As a newer version of the definition would.
    let crds: Api<CustomResourceDefinition> = Api::all(stage.api.client.clone());
    for (definition, field) in [("branchleases", "priority"), ("branchpools", "placement")] {
        let spec = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties";
        let patch = json!([{"op": "remove", "path": format!("{spec}/{field}/enum")}]);
        let patch = Patch::Json::<()>(serde_json::from_value(patch).unwrap());
        let name = format!("{definition}.branchpool.dev");
        crds.patch(&name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
    let lease = json!({"poolRef": {"name": "app"}, "priority": "Urgent"});
    let source = json!({"sql": {}});
    let pool = json!({"source": source, "postgres": {"version": 15}, "placement": "Elsewhere"});
    for (kind, spec) in [("BranchLease", lease), ("BranchPool", pool)] {
        let newer = json!({
            "apiVersion": "branchpool.dev/v1alpha1", "kind": kind,
            "metadata": {"name": "newer", "namespace": "shop"}, "spec": spec,
        });
        eventually("the API server takes it", async || {
            try_create(&stage.api.client, &newer).await.ok()
        })
        .await;
    }
    eventually("the operator has seen both", async || {
        let log = stage.operators[0].log();
        (log.matches("cannot be decoded by this version").count() == 2).then_some(())
    })
    .await;
    stage.create_lease("test", &json!({})).await;
    stage.wait_bound("test").await;
    stage.create_pool("other", &json!({"replicas": 1})).await;
    stage.wait_filled("other", 1).await;
    // The next leader finds them in its list.
    stage.operators.pop().unwrap().stop().await;
    stage.start_operator("operator-2", None);
    stage.delete_lease("test").await;
    stage.wait_nothing_left().await;
    stage.wait_filled("app", 1).await;
}

#[tokio::test]
async fn what_is_wrong_is_refused_with_a_sentence_that_helps() {
    let stage = Stage::start(1).await;
    let refusal = async |kind: &str, spec: serde_json::Value| {
        let object = json!({
            "apiVersion": "branchpool.dev/v1alpha1", "kind": kind,
            "metadata": {"name": "bad", "namespace": "shop"}, "spec": spec,
        });
        try_create(&stage.api.client, &object)
            .await
            .unwrap_err()
            .to_string()
    };
    let source = json!({"sql": {}});
    let too_many =
        json!({"source": source, "postgres": {"version": 15}, "replicas": 5, "maxBranches": 4});
    assert!(
        refusal("BranchPool", too_many)
            .await
            .contains("lower replicas or raise maxBranches")
    );
    let two =
        json!({"source": {"sql": {}, "subvolume": {"name": "a"}}, "postgres": {"version": 15}});
    assert!(
        refusal("BranchPool", two)
            .await
            .contains("name exactly one source")
    );
    let ttl = json!({"poolRef": {"name": "app"}, "ttl": "soon"});
    assert!(
        refusal("BranchLease", ttl)
            .await
            .contains("write a duration")
    );
    // What only a node can tell.
    stage.create_pool("app", &json!({"source": {"sql": {"scripts": [{"name": "typo", "sql": "CREATE TABEL t ();"}]}}})).await;
    let pool = stage
        .wait_pool("app", |pool| {
            let status = pool.status.as_ref();
            status.is_some_and(|status| {
                let mut conditions = status.conditions.iter();
                conditions.any(|it| it.type_ == "SourceReady" && it.reason == "BuildFailed")
            })
        })
        .await;
    let conditions = pool.status.unwrap().conditions;
    let message = &condition(&conditions, "SourceReady").message;
    assert!(
        message.contains("typo") && message.contains("TABEL"),
        "{message}"
    );
}
