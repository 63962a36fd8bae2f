//! SQL over HTTP on leases of a real node.

use branchpool_agent_api::{Lease, SqlResult};
use serde_json::{Value, json};
use tokio::net::{TcpStream, UnixStream};

use crate::{
    message::{Reply, Request},
    neon_driver::check_driver,
    node::{Node, Setup, pool, send, wait_gone},
};

async fn post(node: &Node, lease: &str, body: &Value) -> Reply {
    let path = format!("/v1/leases/{lease}/sql");
    let request = Request::json("POST", &path, body.to_string());
    let socket = node.run_dir().join("agent.sock");
    request
        .send(UnixStream::connect(socket).await.unwrap())
        .await
}

/// A full pool `items` behind a gateway; the agent's API on TCP as well.
async fn with_gateway(more: &str) -> Node {
    let node = Node::start(Setup {
        gateway: "127.0.0.1:0",
        args: ["--listen", "127.0.0.1:0"].map(String::from).to_vec(),
        ..Setup::new(pool("items", 2, 6, more))
    })
    .await;
    node.wait_full("items").await;
    node
}

async fn rows(node: &Node, lease: &str, query: &str) -> Value {
    let reply = post(node, lease, &json!({"query": query})).await;
    assert_eq!(reply.status, 200, "{query}: {reply:?}\n{}", node.log());
    let result: SqlResult = reply.json();
    Value::from(result.rows)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_lease_has_its_own_data_until_it_ends() {
    let mut setup = Setup::new(pool("items", 2, 6, ""));
    setup.args = ["--listen", "127.0.0.1:0", "--sql-writes", "3"]
        .map(String::from)
        .to_vec();
    let mut node = Node::start(setup).await;
    node.wait_full("items").await;
    // Asked in the instant of the hand-over.
    node.lease("items", "one").await.unwrap();
    let count = "SELECT count(*) AS n FROM items";
    assert_eq!(rows(&node, "one", count).await, json!([{"n": 3}]));
    let two = node.lease("items", "two").await.unwrap();
    rows(&node, "one", "DELETE FROM items WHERE id = 1").await;
    assert_eq!(rows(&node, "one", count).await, json!([{"n": 2}]));
    assert_eq!(rows(&node, "two", count).await, json!([{"n": 3}]));
    let who = "SELECT current_user::text AS role, current_database()::text AS database";
    let expected = json!([{"role": two.user, "database": two.database}]);
    assert_eq!(rows(&node, "two", who).await, expected);

    let status = node.client.node().await.unwrap();
    let concurrency = (
        status.read_queries.concurrency,
        status.write_queries.concurrency,
    );
    assert_eq!(concurrency, (16, 3));

    // A fresh branch behind the same lease.
    node.wait_full("items").await;
    node.reset("one", "again").await.unwrap();
    assert_eq!(rows(&node, "one", count).await, json!([{"n": 3}]));

    // A server that died comes back, and until then it is worth another try.
    let branch = node.client.get_lease("two").await.unwrap().branch;
    let postmaster = node.postmaster_of(&branch).unwrap();
    send(postmaster, rustix::process::Signal::KILL);
    wait_gone(postmaster);
    let early = post(&node, "two", &json!({"query": count})).await;
    if early.status != 200 {
        assert_eq!(early.problem().reason, "ServerUnavailable", "{early:?}");
    }
    node.wait_lease("two", |lease: &Lease| lease.restarts == 1)
        .await;
    assert_eq!(rows(&node, "two", count).await, json!([{"n": 3}]));

    // Nobody has the password of a lease as long as none is given out.
    let address = format!(
        "postgresql://{}.{}:guess@host/{}",
        two.user, two.endpoint, two.database
    );
    let request = Request::new("POST", "/sql")
        .header("Neon-Connection-String", &address)
        .body(r#"{"query": "SELECT 1"}"#);
    let stream = TcpStream::connect(node.tcp_address()).await.unwrap();
    let refused = request.send(stream).await;
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json::<Value>()["code"], "28P01");

    node.client.release("two", None).await.unwrap();
    let ended = post(&node, "two", &json!({"query": count})).await;
    assert_eq!(
        (ended.status, &*ended.problem().reason),
        (410, "LeaseEnded")
    );
    let unknown = post(&node, "three", &json!({"query": count})).await;
    assert_eq!(unknown.problem().reason, "LeaseNotFound");
    assert!(node.stop().success());
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn neons_driver_works_with_the_address_of_a_lease() {
    let node = with_gateway("").await;
    let lease = node.lease("items", "one").await.unwrap();
    let endpoint = format!("http://{}/sql", node.tcp_address());
    check_driver(endpoint.clone(), lease.uri.clone()).await;
    // What it wrote is in the lease's branch, and in no other.
    let count = "SELECT count(*) AS n FROM items";
    assert_eq!(rows(&node, "one", count).await, json!([{"n": 4}]));
    node.lease("items", "two").await.unwrap();
    assert_eq!(rows(&node, "two", count).await, json!([{"n": 3}]));

    node.client.release("one", None).await.unwrap();
    let request = Request::new("POST", "/sql")
        .header("Neon-Connection-String", &lease.uri)
        .body(r#"{"query": "SELECT 1"}"#);
    let stream = TcpStream::connect(node.tcp_address()).await.unwrap();
    let refused = request.send(stream).await;
    assert_eq!(refused.json::<Value>()["code"], "28P01", "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_is_a_client_of_its_branch() {
    let node = std::sync::Arc::new(with_gateway("  lease: {idleTimeout: 1s}\n").await);
    let lease = node.lease("items", "one").await.unwrap();
    let told = node.client.get_lease("one").await.unwrap();
    assert_eq!((told.connections, told.last_used_at), (Some(0), None));
    rows(
        &node,
        "one",
        "INSERT INTO items VALUES (4, 'four') RETURNING id",
    )
    .await;
    let told = node
        .wait_lease("one", |lease| lease.connections == Some(0))
        .await;
    assert!(told.last_used_at >= Some(lease.bound_at), "{told:?}");

    // It wakes the server, and keeps it up.
    let is_asleep = |lease: &Lease| lease.reason.as_deref() == Some("Suspended");
    node.wait_lease("one", is_asleep).await;
    let query = tokio::spawn({
        let node = std::sync::Arc::clone(&node);
        async move { post(&node, "one", &json!({"query": "SELECT pg_sleep(600)"})).await }
    });
    node.wait_lease("one", |lease| {
        lease.connections == Some(1) && lease.reason.is_none()
    })
    .await;
    tokio::time::sleep(std::time::Duration::from_millis(2_500)).await;
    let told = node.client.get_lease("one").await.unwrap();
    assert_eq!((told.connections, &told.reason), (Some(1), &None));
    let status = node.client.node().await.unwrap();
    let [probe] = &*status.lease_activity else {
        panic!("{status:?}")
    };
    assert_eq!((&*probe.uid, probe.connections), ("one", 1));
    assert_eq!(probe.last_used_at, told.last_used_at);
    assert_eq!(
        (status.read_queries.active, status.write_queries.active),
        (1, 0)
    );
    let running = r#"branchpool_sql_queries{kind="read",state="running"} 1"#;
    assert_metric(&node, running).await;

    // The end of its lease is its end.
    node.client.release("one", None).await.unwrap();
    let ended = query.await.unwrap();
    assert_eq!(ended.status, 400, "{ended:?}");
    let postgres = ended.problem().postgres.unwrap();
    assert_eq!(postgres.code.as_deref(), Some("57P01"));
    node.wait_pool("items", |pool| pool.leased + pool.cleaning == 0)
        .await;
    assert_metric(&node, r#"branchpool_sql_requests_total{outcome="ok"} 1"#).await;
    assert_metric(&node, r#"branchpool_sql_requests_total{outcome="ended"} 1"#).await;
    for kind in ["read", "write"] {
        let ran = format!("branchpool_sql_seconds_count{{kind=\"{kind}\"}} 1");
        assert_metric(&node, &ran).await;
    }
    let kept = node.client.get_lease("one").await.unwrap();
    assert_eq!((kept.connections, kept.last_used_at), (None, None));
}

async fn assert_metric(node: &Node, line: &str) {
    let stream = TcpStream::connect(node.tcp_address()).await.unwrap();
    let reply = Request::new("GET", "/metrics").send(stream).await;
    let found = reply.body.lines().any(|found| found == line);
    assert!(found, "{line} in {}", reply.body);
}
