//! Asking what may be away for a moment.

use std::time::{Duration, Instant};

use branchpool_agent_api::{Lease, client::ClientError};
use tokio_postgres::Client;

use super::Held;
use crate::node::{Node, ask, connect};

/// Asks again while the agent is away.
pub(super) async fn patiently<T>(
    node: &Node,
    ask: impl AsyncFn() -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        match ask().await {
            Err(error) if error.is_transport() => {
                assert!(Instant::now() < deadline, "{error}\n{}", node.log());
            }
            answer => return answer,
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The server may be on its way back.
pub(super) async fn connect_patiently(node: &Node, lease: &Lease) -> Client {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        match connect(lease).await {
            Ok(client) => return client,
            Err(error) => assert!(
                Instant::now() < deadline,
                "{lease:#?}: {error}\n{}",
                node.log()
            ),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Writes the row by which the branch is known again.
pub(super) async fn mark(node: &Node, held: &mut Held, text: &str) {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let client = connect_patiently(node, &held.lease).await;
        match try_mark(&client, text).await {
            Ok(seen) => {
                assert!(
                    seen == "one,two,three" || seen == format!("one,two,three,{text}"),
                    "{text} got a used branch: {seen}"
                );
                text.clone_into(&mut held.mark);
                return;
            }
            Err(error) => assert!(Instant::now() < deadline, "{text}: {error}"),
        }
    }
}

async fn try_mark(client: &Client, text: &str) -> Result<String, tokio_postgres::Error> {
    let seen = ask(client, "SELECT body FROM items ORDER BY id").await?;
    let insert = format!("INSERT INTO items VALUES (100, '{text}') ON CONFLICT DO NOTHING");
    ask(client, &insert).await?;
    Ok(seen)
}
