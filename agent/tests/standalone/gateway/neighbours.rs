//! What one lease's clients do to the others, and who else may log in to a branch.

use std::time::Duration;

use branchpool_agent_api::Lease;
use tokio_postgres::error::SqlState;

use super::{connect, connect_as, node, refusal, started};
use crate::node::{ask, pool};

/// What Postgres says when all its connections are taken.
const TOO_MANY: &str = "53300";

#[tokio::test(flavor = "multi_thread")]
async fn who_takes_all_connections_hurts_its_own_branch_alone() {
    let node = node().await;
    let greedy = node.lease("items", "greedy").await.unwrap();
    let modest = node.lease("items", "modest").await.unwrap();
    let before = connect(&node, &modest).await.unwrap();
    let most: usize = ask(&before, "SHOW max_connections")
        .await
        .unwrap()
        .parse()
        .unwrap();

    let mut held = Vec::new();
    let refused = loop {
        assert!(held.len() <= most);
        match connect(&node, &greedy).await {
            Ok(client) => held.push(client),
            Err(error) => break error,
        }
    };
    assert_eq!(refusal(Err(refused)).0, TOO_MANY);
    assert!(held.len() > most / 2, "{} of {most}", held.len());
    let told = node.client.get_lease("greedy").await.unwrap();
    assert_eq!(told.connections, u32::try_from(held.len()).ok());

    // Others do not notice, the ones that are in already among them.
    assert_eq!(ask(&before, "SELECT 1").await.unwrap(), "1");
    for _ in 0..3 {
        let client = connect(&node, &modest).await.unwrap();
        assert_eq!(
            ask(&client, "SELECT count(*) FROM items").await.unwrap(),
            "3"
        );
    }
    let late = node.lease("items", "late").await.unwrap();
    let client = connect(&node, &late).await.unwrap();
    assert_eq!(ask(&client, "SELECT 1").await.unwrap(), "1");
    for client in &held {
        assert_eq!(ask(client, "SELECT 1").await.unwrap(), "1");
    }
    assert_eq!(refusal(connect(&node, &greedy).await).0, TOO_MANY);

    drop(held);
    let client = once_there_is_room(|| connect(&node, &greedy)).await;
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
    node.wait_lease("greedy", |lease| lease.connections == Some(1))
        .await;
}

/// Backends end some time after their clients.
async fn once_there_is_room<T>(connect: impl AsyncFn() -> Result<T, tokio_postgres::Error>) -> T {
    for _ in 0..500 {
        match connect().await {
            Ok(client) => return client,
            Err(error) => {
                let code = error.code().map(|code| code.code().to_owned());
                assert_eq!(code.as_deref(), Some(TOO_MANY), "{error:?}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("there is no room after all have gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_a_user_made_logs_in_to_its_branch_alone() {
    let manifest =
        pool("items", 2, 6, "").replace("    version: 15", "    version: 15\n    superuser: true");
    let node = started(manifest).await;
    let lease = node.lease("items", "a").await.unwrap();
    let other = node.lease("items", "b").await.unwrap();
    let owner = connect(&node, &lease).await.unwrap();
    let made = "CREATE ROLE \"some.one\" LOGIN PASSWORD 'their own';
        GRANT SELECT ON items TO \"some.one\"";
    owner.batch_execute(made).await.unwrap();

    let at = |lease: &Lease| Lease {
        user: format!("some.one.{}", lease.endpoint),
        ..lease.clone()
    };
    let client = connect_as(&node, &at(&lease), "their own").await.unwrap();
    let who = "SELECT session_user::text || ' ' || count(*) FROM items";
    assert_eq!(ask(&client, who).await.unwrap(), "some.one 3");
    let denied = client.batch_execute("DELETE FROM items").await.unwrap_err();
    assert_eq!(denied.code().map(SqlState::code), Some("42501"));
    let told = node.client.get_lease("a").await.unwrap();
    assert_eq!(told.connections, Some(2));
    // Its connection can be cancelled like any other.
    let cancel = client.cancel_token();
    let sleeping = tokio::spawn(async move { ask(&client, "SELECT pg_sleep(600)").await });
    let is_sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
    while ask(&owner, is_sleeping).await.unwrap() != "1" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let tls = super::trusting(&node.run_dir().join("ca.crt"));
    cancel.cancel_query(tls).await.unwrap();
    let cancelled = sleeping.await.unwrap().unwrap_err();
    assert_eq!(cancelled.code().map(SqlState::code), Some("57014"));

    for (lease, password) in [(&lease, "wrong"), (&other, "their own")] {
        let refused = refusal(connect_as(&node, &at(lease), password).await);
        assert_eq!(refused.0, "28P01", "{refused:?}");
    }
    // It goes with its branch.
    node.wait_full("items").await;
    node.reset("a", "again").await.unwrap();
    let refused = refusal(connect_as(&node, &at(&lease), "their own").await);
    assert_eq!(refused.0, "28P01", "{refused:?}");
}
