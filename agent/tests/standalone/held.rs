//! Leases whose holders have written to them, over the stops and ends of their servers.

use branchpool_agent_api::{Lease, LeasePhase};

use crate::node::{Node, ask, connect};

/// Leased, and written to.
pub(crate) async fn held(node: &Node, pool: &str, uid: &str) -> Lease {
    let lease = node.lease_patiently(pool, uid).await;
    let client = connect(&lease).await.unwrap();
    ask(&client, &format!("INSERT INTO items VALUES (100, '{uid}')"))
        .await
        .unwrap();
    lease
}

/// Same address and data once its server runs.
pub(crate) async fn assert_back(node: &Node, lease: &Lease, restarts: u32) {
    let now = node
        .wait_lease(&lease.uid, |now| {
            now.phase != LeasePhase::Bound || now.restarts >= restarts
        })
        .await;
    assert_eq!(now.phase, LeasePhase::Bound, "{now:?}");
    assert_eq!((&now.uri, &now.branch), (&lease.uri, &lease.branch));
    let client = connect(&now).await.unwrap();
    let bodies = ask(&client, "SELECT body FROM items ORDER BY id")
        .await
        .unwrap();
    assert_eq!(bodies, format!("one,two,three,{}", lease.uid));
}
