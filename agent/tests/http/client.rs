//! The typed client against the server.

use std::slice;

use branchpool_agent_api::{
    Client, ClientError, DesiredPool, LeasePhase, LeaseRequest, PoolName, RenewRequest,
    ResetRequest, Target, problem::reason,
};
use serde_json::json;

use crate::raw::{Running, local, patiently};

fn desired(name: &str, replicas: u32) -> DesiredPool {
    DesiredPool {
        namespace: "default".to_owned(),
        name: name.to_owned(),
        generation: 1,
        epoch: None,
        spec: json!({"replicas": replicas}),
    }
}

fn request(name: &str) -> LeaseRequest {
    LeaseRequest {
        pool: PoolName::new("default", name),
        ttl_seconds: Some(60),
        holder: None,
        epoch: None,
    }
}

pub(crate) async fn whole_life(client: &Client) {
    let status = client.apply_pool("p1", &desired("shop", 2)).await.unwrap();
    assert_eq!(client.pools().await.unwrap(), slice::from_ref(&status));
    assert_eq!(client.pool(&status.name).await.unwrap(), status);

    let (lease, created) = client.lease("l1", &request("shop")).await.unwrap();
    assert!(created);
    let (again, created) = client.lease("l1", &request("shop")).await.unwrap();
    assert!(!created);
    assert_eq!(again, lease);
    assert_eq!(client.get_lease("l1").await.unwrap(), lease);
    assert_eq!(client.leases().await.unwrap(), slice::from_ref(&lease));
    let renewed = client.renew("l1", &RenewRequest::default()).await.unwrap();
    assert!(renewed.expires_at > lease.expires_at);
    let token = ResetRequest {
        token: "t".to_owned(),
        epoch: Some(3),
    };
    let reset = client.reset("l1", &token).await.unwrap();
    assert_eq!(reset.observed_reset_token.as_deref(), Some("t"));
    let released = client.release("l1", Some(4)).await.unwrap();
    assert_eq!(released.phase, LeasePhase::Released);
    client.forget("l1", None).await.unwrap();
    let gone = client.get_lease("l1").await.unwrap_err();
    assert!(gone.is(reason::LEASE_NOT_FOUND), "{gone}");
    client.remove_pool("p1", None).await.unwrap();

    assert_eq!(client.node().await.unwrap().name, "node-1");
    client.ready().await.unwrap();
    assert!(client.metrics().await.unwrap().ends_with("# EOF\n"));
}

#[tokio::test]
async fn every_call_works_over_both_transports() {
    let server = Running::start(|options| options.tcp = Some(local())).await;
    whole_life(&Client::new(Target::Unix(server.socket.clone()))).await;
    let address = format!("http://{}", server.tcp.unwrap());
    whole_life(&Client::new(address.parse().unwrap())).await;
    server.stop().await;
}

#[tokio::test]
async fn a_refusal_keeps_its_reason_and_fields() {
    let server = Running::on_socket().await;
    let client = Client::new(Target::Unix(server.socket.clone()));
    let mut bad = request("shop");
    bad.ttl_seconds = Some(0);
    let error = client.lease("l1", &bad).await.unwrap_err();
    let problem = error.problem().unwrap();
    assert_eq!(
        (problem.status, &*problem.errors[0].field),
        (422, "ttlSeconds")
    );
    let error = client.get_lease("../node").await.unwrap_err();
    assert_eq!(error.problem().unwrap().errors[0].field, "uid");
    server.stop().await;
}

#[tokio::test]
async fn a_kept_connection_that_was_closed_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent.sock");
    let client = Client::new(Target::Unix(path.clone()));
    for _ in 0..2 {
        let server = Running::start(|options| options.socket = Some(path.clone())).await;
        client.node().await.unwrap();
        server.stop().await;
    }
    let error = client.node().await.unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
    assert!(error.is_transport());
    assert!(error.to_string().contains("start one"), "{error}");
}

#[tokio::test]
async fn many_calls_at_once_are_all_answered() {
    let server = Running::on_socket().await;
    let client = Client::new(Target::Unix(server.socket.clone()));
    client.apply_pool("p1", &desired("shop", 1)).await.unwrap();
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..200 {
        let client = client.clone();
        calls.spawn(async move {
            let uid = format!("l{number}");
            let (lease, created) = client.lease(&uid, &request("shop")).await.unwrap();
            assert!(created);
            assert_eq!(lease.uid, uid);
        });
    }
    patiently(calls.join_all()).await;
    assert_eq!(client.leases().await.unwrap().len(), 200);
    server.stop().await;
}

#[tokio::test]
async fn a_stop_with_open_connections_is_not_held_up_by_them() {
    let server = Running::on_socket().await;
    let client = Client::new(Target::Unix(server.socket.clone()));
    client.node().await.unwrap();
    let mut watch = client.watch(None).await.unwrap();
    watch.next().await.unwrap().unwrap();
    server.stop().await;
    assert_eq!(patiently(watch.next()).await.unwrap(), None);
}
