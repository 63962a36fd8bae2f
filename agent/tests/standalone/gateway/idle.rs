//! Servers that nobody uses.

use std::time::Duration;

use branchpool_agent_api::Lease;

use super::{connect, started};
use crate::node::{ask, pool};

fn idle(more: &str) -> String {
    pool(
        "items",
        1,
        4,
        &format!("  lease: {{idleTimeout: 1s{more}}}\n"),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unused_server_sleeps_and_wakes_with_its_data() {
    let mut node = started(idle("")).await;
    let lease = node.lease("items", "a").await.unwrap();
    let client = connect(&node, &lease).await.unwrap();
    client
        .batch_execute("INSERT INTO items VALUES (4, 'four')")
        .await
        .unwrap();
    // An open connection is use, however quiet.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "4"
    );
    drop(client);
    let is_asleep = |lease: &Lease| lease.reason.as_deref() == Some("Suspended");
    node.wait_lease("a", is_asleep).await;
    assert_eq!(node.postmaster_of(&lease.branch), None);

    // Many at once: one start.
    let waking = (0..8).map(|_| connect(&node, &lease));
    for client in futures_util::future::join_all(waking).await {
        assert_eq!(
            ask(&client.unwrap(), "SELECT count(*) FROM items")
                .await
                .unwrap(),
            "4"
        );
    }
    let awake = node.client.get_lease("a").await.unwrap();
    assert_eq!((awake.reason, awake.restarts), (None, 0));

    node.wait_lease("a", is_asleep).await;
    assert!(node.stop().success());
    node.restart().await;
    let mut again = node.client.get_lease("a").await.unwrap();
    assert!(is_asleep(&again), "{again:?}");
    assert_eq!(node.postmaster_of(&lease.branch), None);
    again.port = node
        .gateway_address()
        .rsplit_once(':')
        .unwrap()
        .1
        .parse()
        .unwrap();
    let client = connect(&node, &again).await.unwrap();
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "4"
    );
    drop(client);

    node.wait_lease("a", is_asleep).await;
    node.client.release("a", None).await.unwrap();
    node.wait_pool("items", |pool| pool.ready == 1 && pool.leased == 0)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_connection_is_ended_where_that_is_wanted() {
    let node = started(idle(", openConnections: Idle")).await;
    let lease = node.lease("items", "a").await.unwrap();
    let client = connect(&node, &lease).await.unwrap();
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
    node.wait_lease("a", |lease| lease.reason.as_deref() == Some("Suspended"))
        .await;
    let cut = client.simple_query("SELECT 1").await.unwrap_err();
    assert!(
        cut.is_closed() || cut.code().is_some_and(|code| code.code() == "57P01"),
        "{cut:?}"
    );
    let client = connect(&node, &lease).await.unwrap();
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
}
