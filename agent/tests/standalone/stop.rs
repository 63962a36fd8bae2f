//! Stopping in order, at once, and what is held meanwhile; and leases that run out.

use std::{path::PathBuf, time::Duration};

use branchpool_agent_api::{Lease, LeasePhase, LeaseRequest};
use rustix::process::Signal;

use crate::{
    held::{assert_back, held},
    inspect::Inventory,
    node::{Node, Setup, ask, cgroups, command_of, connect, descendants, pool, request, send},
};

const QUICK_CLEANUP: &str = "  cleanup: {tombstones: {delay: 0s}}\n";

#[tokio::test(flavor = "multi_thread")]
async fn leases_outlive_a_stop_by_either_signal_and_one_at_once() {
    let mut setup = Setup::new(pool("items", 1, 6, QUICK_CLEANUP));
    // So long that only the second signal ends the third stop.
    setup.args = vec!["--stop-timeout".into(), "600".into()];
    let mut node = Node::start(setup).await;
    node.wait_full("items").await;
    let lease = held(&node, "items", "held").await;
    let groups = cgroups(&node);
    assert!(!groups.is_empty());
    for (signal, restarts) in [(Signal::TERM, 1), (Signal::INT, 2)] {
        node.signal_supervisor(signal);
        assert!(node.wait_exit().success(), "{}", node.log());
        node.assert_nothing_left();
        assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
        node.restart().await;
        assert_back(&node, &lease, restarts).await;
    }
    // A backend that cannot end holds up its server.
    let client = connect(&lease).await.unwrap();
    let backend: u32 = ask(&client, "SELECT pg_backend_pid()")
        .await
        .unwrap()
        .parse()
        .unwrap();
    let postmaster = node.postmaster_of(&lease.branch).unwrap();
    assert!(
        descendants(postmaster).contains(&backend),
        "{}",
        command_of(backend)
    );
    send(backend, Signal::STOP);
    node.signal_supervisor(Signal::TERM);
    // Signals that are not yet taken in count as one.
    node.wait_logged("stopping: leases are kept", 3);
    node.signal_supervisor(Signal::TERM);
    node.wait_exit();
    node.assert_nothing_left();
    assert_eq!(cgroups_left(&groups), [] as [PathBuf; 0]);
    node.restart().await;
    assert_back(&node, &lease, 3).await;
    node.client.release("held", None).await.unwrap();
    node.wait_pool("items", |pool| {
        pool.ready == 1 && pool.warming + pool.cleaning + pool.tombstones == 0
    })
    .await;
    Inventory::settled(&node, 1, 0).assert_tidy(1);
    assert!(node.stop().success());
    node.assert_nothing_left();
}

fn cgroups_left(groups: &[PathBuf]) -> Vec<PathBuf> {
    groups
        .iter()
        .filter(|group| group.exists())
        .cloned()
        .collect()
}

async fn short(node: &Node, uid: &str) -> Lease {
    let request = LeaseRequest {
        ttl_seconds: Some(2),
        ..request("items")
    };
    let (lease, _) = node.client.lease(uid, &request).await.unwrap();
    lease
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_run_out_also_while_the_agent_is_down() {
    let mut node = Node::start(Setup::new(pool("items", 2, 6, QUICK_CLEANUP))).await;
    node.wait_full("items").await;
    let lease = short(&node, "watched").await;
    assert_eq!(lease.expires_at, lease.bound_at + 2_000);
    let now = node
        .wait_lease("watched", |lease| lease.phase != LeasePhase::Bound)
        .await;
    assert_eq!(now.phase, LeasePhase::Expired);

    // Its server goes on while the agent is gone, and its address too.
    node.wait_full("items").await;
    let running = short(&node, "running").await;
    node.kill_manager();
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert!(connect(&running).await.is_ok());
    node.restart().await;
    let now = node.client.get_lease("running").await.unwrap();
    assert_eq!(now.phase, LeasePhase::Expired);

    node.wait_full("items").await;
    let parked = short(&node, "parked").await;
    assert!(node.stop().success());
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    node.restart().await;
    let now = node.client.get_lease("parked").await.unwrap();
    assert_eq!((now.phase, now.restarts), (LeasePhase::Expired, 0));

    node.wait_pool("items", |pool| {
        pool.ready == 2 && pool.warming + pool.cleaning + pool.tombstones == 0
    })
    .await;
    let inventory = Inventory::settled(&node, 2, 0);
    inventory.assert_tidy(2);
    for lease in [lease, running, parked] {
        assert!(!inventory.branches.contains(&lease.branch));
    }
    assert!(node.stop().success());
    node.assert_nothing_left();
}
