//! Time, size and number of what runs.

use std::{sync::Arc, time::Duration};

use branchpool_agent::sql::Limits;
use serde_json::json;
use tokio::{io::AsyncWriteExt, net::UnixStream, task::JoinSet};

use crate::{
    Node,
    message::{Request, patiently},
};

async fn wait_until(condition: impl Fn() -> bool) {
    patiently(async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Most bytes that this process ever had in memory.
fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes: usize = peak
        .unwrap()
        .trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse()
        .unwrap();
    kilobytes << 10
}

#[tokio::test]
async fn a_query_that_takes_too_long_is_cancelled() {
    let node = Node::start().await;
    let body = json!({"query": "SELECT pg_sleep(3600)", "timeoutMs": 200});
    let problem = node.post(&body).await.problem();
    let error = problem.postgres.unwrap();
    assert_eq!(error.code.as_deref(), Some("57014"));
    assert!(error.message.contains("statement timeout"));
    node.postgres.wait_sessions(0, "%").await;
    node.stop().await;
}

#[tokio::test]
async fn a_query_whose_client_goes_away_is_cancelled() {
    let node = Node::start().await;
    let body = json!({"query": "SELECT pg_sleep(3600)"}).to_string();
    let request = Request::json("POST", "/v1/leases/shop/sql", &*body);
    let mut client = UnixStream::connect(&node.agent.socket).await.unwrap();
    let head = format!("{}Content-Length: {}\r\n\r\n", request.head(), body.len());
    client.write_all(head.as_bytes()).await.unwrap();
    client.write_all(body.as_bytes()).await.unwrap();
    node.postgres.wait_sessions(1, "%pg_sleep%").await;
    drop(client);
    node.postgres.wait_sessions(0, "%").await;
    wait_until(|| node.agent.service.sql_probes().0.active == 0).await;
    node.stop().await;
}

#[tokio::test]
async fn a_result_beyond_the_limit_is_cancelled_and_says_so() {
    let node = Node::with(Limits {
        result: 1 << 20,
        ..Limits::default()
    })
    .await;
    for query in [
        // Many rows, one long row, and one that is long only as JSON.
        "SELECT generate_series(1, 1000000000), repeat('x', 100)",
        "SELECT repeat('x', 200000000)",
        "SELECT repeat(chr(1), 900000)",
    ] {
        let problem = node.post(&json!({"query": query})).await.problem();
        let error = problem.postgres.unwrap();
        assert_eq!(error.code.as_deref(), Some("54000"), "{query}");
        assert!(error.message.contains("1048576"), "{query}");
        node.postgres.wait_sessions(0, "%").await;
    }
    // The long row alone would be more.
    assert!(peak_memory() < 150 << 20, "{} bytes", peak_memory());
    let fits = json!({"query": "SELECT repeat('x', 1000000) AS x"});
    let result = node.query(&fits).await;
    assert_eq!(result["rows"][0]["x"].as_str().unwrap().len(), 1_000_000);
    let body = json!({"query": format!("SELECT '{}'", "x".repeat(9 << 20))});
    assert_eq!(node.post(&body).await.problem().status, 413);
    node.stop().await;
}

#[tokio::test]
async fn writes_that_wait_do_not_hold_up_reads() {
    let node = Node::with(Limits {
        reads: 2,
        writes: 1,
        queue: 1,
        ..Limits::default()
    })
    .await;
    let node = Arc::new(node);
    let mut writers = JoinSet::new();
    let mut lock = node.postgres.open("app").await;
    lock.execute("BEGIN; LOCK TABLE items IN SHARE MODE")
        .await
        .unwrap();
    let write = |node: Arc<Node>| async move {
        node.post(&json!({"query": "UPDATE items SET body = body"}))
            .await
            .status
    };
    writers.spawn(write(Arc::clone(&node)));
    node.postgres.wait_sessions(1, "UPDATE%").await;
    writers.spawn(write(Arc::clone(&node)));
    let service = &node.agent.service;
    wait_until(|| service.sql_probes().1.queued == 1).await;
    let full = node.post(&json!({"query": "DELETE FROM items"})).await;
    assert_eq!(full.problem().reason, "TooManyQueries");
    assert_eq!((full.status, full.header("retry-after")), (503, Some("1")));
    assert_eq!(
        node.query(&json!({"query": "SELECT * FROM items"})).await["rowCount"],
        3
    );
    let (_, writes) = service.sql_probes();
    assert_eq!(
        (writes.concurrency, writes.active, writes.queued),
        (1, 1, 1)
    );

    lock.execute("COMMIT").await.unwrap();
    assert_eq!(patiently(writers.join_all()).await, [200, 200]);
    wait_until(|| service.sql_probes().1.active == 0).await;
    Arc::into_inner(node).unwrap().stop().await;
}

#[tokio::test]
async fn a_server_that_is_down_is_worth_another_try() {
    let mut node = Node::start().await;
    let mut running = JoinSet::new();
    let socket = node.agent.socket.clone();
    running.spawn(async move {
        let body = json!({"query": "SELECT pg_sleep(3600)"}).to_string();
        let request = Request::json("POST", "/v1/leases/shop/sql", body);
        request
            .send(UnixStream::connect(socket).await.unwrap())
            .await
    });
    node.postgres.wait_sessions(1, "%pg_sleep%").await;
    node.postgres.stop();
    let cut = running.join_next().await.unwrap().unwrap().problem();
    let code = cut.postgres.unwrap().code.unwrap();
    assert_eq!(code, "57P01", "the server's own last word");
    let reply = node.post(&json!({"query": "SELECT 1"})).await;
    assert_eq!(reply.problem().reason, "ServerUnavailable");
    assert_eq!(
        (reply.status, reply.header("retry-after")),
        (503, Some("1"))
    );
    node.stop().await;
}
