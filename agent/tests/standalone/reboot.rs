//! The machine is started anew: what ran without fsync is not trusted.

use std::fs;

use branchpool_agent_api::LeasePhase;

use crate::{
    held::{assert_back, held},
    inspect::{Inventory, Mounted},
    node::{Node, Setup, pool},
};

const QUICK_CLEANUP: &str = "  cleanup: {tombstones: {delay: 0s}}\n";

/// As after the start of the machine: another boot id than the journal's, no run directory.
fn boot_anew(node: &Node) {
    let mounted = Mounted::new(node);
    let journal = rusqlite::Connection::open(mounted.journal()).unwrap();
    let changed = journal.execute(
        "UPDATE record SET value = '\"another boot\"' WHERE kind = 'meta' AND key = 'boot'",
        [],
    );
    assert_eq!(changed.unwrap(), 1);
    fs::remove_dir_all(node.run_dir()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn ephemeral_leases_are_lost_durable_and_parked_ones_come_back() {
    let durable = pool("kept", 1, 6, QUICK_CLEANUP)
        .replace("    version: 15", "    version: 15\n    tuning: Durable");
    let manifest = format!("{}---\n{durable}", pool("items", 1, 6, QUICK_CLEANUP));
    let mut node = Node::start(Setup::new(manifest)).await;
    node.wait_full("items").await;
    node.wait_full("kept").await;

    // Parked by a clean stop, both come back, even if the machine was started anew.
    let ephemeral = held(&node, "items", "ephemeral").await;
    let durable = held(&node, "kept", "durable").await;
    assert!(node.stop().success(), "{}", node.log());
    boot_anew(&node);
    node.restart().await;
    assert_back(&node, &ephemeral, 1).await;
    assert_back(&node, &durable, 1).await;

    // From now on they run again, so the next time only one can be trusted.
    node.wait_full("items").await;
    node.wait_full("kept").await;
    node.kill_everything();
    boot_anew(&node);
    node.restart().await;
    let lost = node.client.get_lease("ephemeral").await.unwrap();
    assert_eq!(lost.phase, LeasePhase::Lost);
    assert_eq!(lost.reason.as_deref(), Some("NodeRebooted"));
    assert_back(&node, &durable, 2).await;
    for name in ["items", "kept"] {
        node.wait_pool(name, |pool| {
            pool.ready == 1 && pool.warming + pool.cleaning + pool.tombstones == 0
        })
        .await;
    }
    let lost = node.client.get_lease("ephemeral").await.unwrap();
    assert_eq!((lost.phase, lost.restarts), (LeasePhase::Lost, 1));
    let inventory = Inventory::of(&node);
    assert!(!inventory.branches.contains(&ephemeral.branch));
    assert_eq!(inventory.branches.len(), 3, "{inventory:?}");
    assert_eq!(inventory.servers, 3);

    // The same crash without a start of the machine loses nothing.
    let again = held(&node, "items", "again").await;
    node.kill_everything();
    node.restart().await;
    assert_back(&node, &again, 1).await;
    assert_back(&node, &durable, 3).await;
    assert!(node.stop().success());
    node.assert_nothing_left();
}
