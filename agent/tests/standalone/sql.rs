//! SQL over HTTP on leases of a real node.

use branchpool_agent_api::{Lease, SqlResult};
use serde_json::{Value, json};
use tokio::net::{TcpStream, UnixStream};

use crate::{
    message::{Reply, Request},
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
