//! Many leases at once, each with a branch of its own, and exact accounts.

use std::collections::{BTreeMap, BTreeSet};

use branchpool_agent_api::LeasePhase;

use crate::node::{Node, Setup, ask, connect, pool};

const POOL: u32 = 100;
const BURSTS: u32 = 5;

/// What happened to one lease.
#[derive(Debug, Default, PartialEq, Eq)]
struct Account {
    accepted: u32,
    queried: u32,
    released: u32,
    failed: u32,
}

/// Asks each branch for the three rows of its image, marks it, and looks whether only its own mark
/// is there.
async fn use_branch(node: &Node, uid: String) -> (String, String, Account) {
    let mut account = Account::default();
    let lease = match node.lease("items", &uid).await {
        Ok(lease) => lease,
        Err(error) => panic!("lease {uid}: {error}\n{}", node.log()),
    };
    account.accepted += 1;
    let client = connect(&lease).await.unwrap();
    ask(&client, &format!("INSERT INTO items VALUES (100, '{uid}')"))
        .await
        .unwrap();
    let seen = ask(&client, "SELECT body FROM items ORDER BY id")
        .await
        .unwrap();
    if seen == format!("one,two,three,{uid}") {
        account.queried += 1;
    } else {
        account.failed += 1;
    }
    drop(client);
    let branch = lease.branch.clone();
    let released = node.client.release(&uid, None).await.unwrap();
    assert_eq!(released.branch, branch);
    account.released += u32::from(released.phase == LeasePhase::Released);
    (uid, branch, account)
}

#[tokio::test(flavor = "multi_thread")]
async fn five_bursts_of_a_hundred_leases_add_up() {
    let mut setup = Setup::new(pool(
        "items",
        POOL,
        3 * POOL,
        "  cleanup: {tombstones: {delay: 0s}}\n",
    ));
    setup.size = "20Gi";
    let mut node = Node::start(setup).await;
    node.wait_full("items").await;
    node.renew_client();
    let descriptors = node.descriptors();
    let mut branches = BTreeSet::new();
    for burst in 0..BURSTS {
        node.wait_full("items").await;
        let uses = (0..POOL).map(|n| use_branch(&node, format!("burst-{burst}-{n}")));
        let done = futures_util::future::join_all(uses).await;
        let accounts: BTreeMap<String, Account> = done
            .iter()
            .map(|(uid, _, account)| (uid.clone(), Account { ..*account }))
            .collect();
        assert_eq!(accounts.len(), POOL as usize);
        let expected = Account {
            accepted: 1,
            queried: 1,
            released: 1,
            failed: 0,
        };
        for (uid, account) in accounts {
            assert_eq!(account, expected, "{uid}");
        }
        for (uid, branch, _) in done {
            assert!(
                branches.insert(branch.clone()),
                "{uid} got the used branch {branch}"
            );
        }
    }
    let status = node
        .wait_pool("items", |pool| {
            pool.ready == POOL && pool.warming + pool.cleaning + pool.leased + pool.tombstones == 0
        })
        .await;
    assert_eq!(status.quarantined, 0);
    let entries = |directory: &str| -> usize {
        let shards = std::fs::read_dir(node.root().join(directory)).unwrap();
        shards
            .map(|shard| std::fs::read_dir(shard.unwrap().path()).unwrap().count())
            .sum()
    };
    assert_eq!(entries("branches"), POOL as usize, "branches on disk");
    assert_eq!(entries("trash"), 0, "tombstones on disk");
    let runs = std::fs::read_dir(node.run_dir().join("b")).unwrap();
    assert_eq!(runs.count(), POOL as usize, "run directories");
    node.wait_addresses(POOL as usize);
    assert_eq!(node.postmasters().len(), POOL as usize, "servers");
    assert_eq!(
        std::fs::read_dir(node.root().join("logs")).unwrap().count(),
        POOL as usize,
        "logs"
    );
    // The connections of the bursts go with their client.
    node.renew_client();
    node.wait_descriptors(descriptors);
    assert!(node.stop().success());
    node.assert_nothing_left();
}
