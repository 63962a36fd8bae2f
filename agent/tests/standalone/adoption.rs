//! Agent, supervisor or servers are killed; leases and their data go on.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use branchpool_agent_api::{Lease, LeasePhase};
use rustix::process::Signal;
use tokio_postgres::Client;

use crate::{
    inspect::{Inventory, start_time},
    node::{Node, Setup, ask, cgroups, connect, pool, send, wait_gone},
};

const QUICK_CLEANUP: &str = "  cleanup: {tombstones: {delay: 0s}}\n";

const PATIENCE: Duration = Duration::from_mins(1);

/// Waits until the settings of the hand-over are in force, which come some time after the lease.
async fn wait_handed_over(client: &Client) {
    let on = async { while ask(client, "SHOW autovacuum").await.unwrap() != "on" {} };
    tokio::time::timeout(PATIENCE, on).await.unwrap();
}

/// A lease with its own row and an open connection.
struct Holder {
    lease: Lease,
    client: Client,
    postmaster: u32,
    started: u64,
}

impl Holder {
    async fn new(node: &Node, uid: &str) -> Self {
        let lease = node.lease_patiently("items", uid).await;
        let client = connect(&lease).await.unwrap();
        ask(&client, &format!("INSERT INTO items VALUES (100, '{uid}')"))
            .await
            .unwrap();
        let postmaster = node.postmaster_of(&lease.branch).unwrap();
        Self {
            started: start_time(postmaster),
            lease,
            client,
            postmaster,
        }
    }

    /// Same server, address and data, for the open connection and for a new one.
    async fn assert_untouched(&self, node: &Node) {
        let uid = &self.lease.uid;
        let now = node.client.get_lease(uid).await.unwrap();
        assert_eq!(now, self.lease, "{uid}");
        assert_eq!(
            node.postmaster_of(&self.lease.branch),
            Some(self.postmaster),
            "{uid}"
        );
        assert_eq!(start_time(self.postmaster), self.started, "{uid}");
        self.assert_data(&self.client).await;
        self.assert_data(&connect(&self.lease).await.unwrap()).await;
    }

    async fn assert_data(&self, client: &Client) {
        let bodies = ask(client, "SELECT body FROM items ORDER BY id")
            .await
            .unwrap();
        assert_eq!(bodies, format!("one,two,three,{}", self.lease.uid));
    }
}

/// Pool full, nothing else: `held` leased branches beside the ready ones.
async fn assert_settled(node: &Node, replicas: u32, held: u32) {
    node.wait_pool("items", |pool| {
        pool.ready == replicas
            && pool.leased == held
            && pool.warming + pool.cleaning + pool.tombstones == 0
    })
    .await;
    let branches = (replicas + held) as usize;
    Inventory::settled(node, branches, 0).assert_tidy(branches);
    let status = node.client.node().await.unwrap();
    assert_eq!(status.quarantined, [], "{}", node.log());
}

fn stop_and_assert_nothing_left(mut node: Node) {
    let groups = cgroups(&node);
    assert!(
        !groups.is_empty(),
        "the cgroups are looked for at the wrong place"
    );
    assert!(node.stop().success(), "{}", node.log());
    node.assert_nothing_left();
    assert_eq!(cgroups(&node), [] as [PathBuf; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_during_the_build_and_the_filling() {
    let mut node = Node::start(Setup::new(pool("items", 20, 30, QUICK_CLEANUP))).await;
    // The build runs by now: the pool is there as soon as the manifest is applied.
    node.wait_pool("items", |pool| pool.golden.generation == 0)
        .await;
    node.kill_agent();
    node.wait_serving().await;
    // At further moments of the build; each start begins another one.
    for wait in [100, 250, 450, 700, 950] {
        tokio::time::sleep(Duration::from_millis(wait)).await;
        node.kill_manager();
        node.restart().await;
    }
    // Killed again and again while it fills; each start takes over what is there.
    for ready in [1, 5, 9, 13, 17] {
        node.wait_pool("items", |pool| pool.ready >= ready).await;
        node.kill_manager();
        node.restart().await;
    }
    assert_settled(&node, 20, 0).await;
    stop_and_assert_nothing_left(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_over_and_over_while_leases_are_held() {
    let mut node = Node::start(Setup::new(pool("items", 3, 12, QUICK_CLEANUP))).await;
    node.wait_full("items").await;
    let mut holders = Vec::new();
    for n in 0..3 {
        holders.push(Holder::new(&node, &format!("holder-{n}")).await);
    }
    // Idle, by the agent's own restart.
    node.wait_full("items").await;
    let ready = node.postmasters();
    node.kill_agent();
    node.wait_serving().await;
    node.wait_full("items").await;
    assert_eq!(
        node.postmasters(),
        ready,
        "ready servers are taken over too"
    );
    for holder in &holders {
        holder.assert_untouched(&node).await;
        // The hand-over of each was or is completed.
        wait_handed_over(&holder.client).await;
    }
    // Ten times as fast as it comes up, half of them before it serves.
    for round in 0..10 {
        node.kill_manager();
        node.launch();
        if round % 2 == 0 {
            node.wait_serving().await;
        } else {
            std::thread::sleep(Duration::from_millis(10 * round));
        }
    }
    node.wait_serving().await;
    for holder in &holders {
        holder.assert_untouched(&node).await;
    }
    assert_settled(&node, 3, 3).await;
    for holder in holders {
        drop(holder.client);
        node.client.release(&holder.lease.uid, None).await.unwrap();
    }
    assert_settled(&node, 3, 0).await;
    stop_and_assert_nothing_left(node);
}

/// Takes a lease, marks it, maybe resets it, maybe gives it back; goes on through crashes of the
/// agent. Returns each branch that it was given.
async fn busy(node: &Node, uid: String, n: usize) -> Vec<String> {
    let mut seen = Vec::new();
    let mut lease = node.lease_patiently("items", &uid).await;
    seen.push(lease.branch.clone());
    let client = connect(&lease).await.unwrap();
    let mark = format!("INSERT INTO items VALUES (100, '{uid}')");
    ask(&client, &mark).await.unwrap();
    drop(client);
    if n.is_multiple_of(3) {
        lease = loop {
            match node.reset(&uid, "again").await {
                Ok(lease) => break lease,
                Err(error) => {
                    assert!(error.is_transport() || error.is("NoBranchReady"), "{error}");
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        seen.push(lease.branch.clone());
        let client = connect(&lease).await.unwrap();
        let bodies = ask(&client, "SELECT body FROM items ORDER BY id")
            .await
            .unwrap();
        assert_eq!(bodies, "one,two,three", "{uid} was not reset");
        ask(&client, &mark).await.unwrap();
    }
    if n.is_multiple_of(2) {
        while let Err(error) = node.client.release(&uid, None).await {
            assert!(error.is_transport(), "{error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_during_bursts_of_leases_resets_and_releases() {
    const USERS: usize = 16;
    let mut node = Node::start(Setup::new(pool("items", 10, 40, QUICK_CLEANUP))).await;
    node.wait_full("items").await;
    let mut branches = BTreeMap::new();
    for round in 0..3_usize {
        node.wait_full("items").await;
        let users = (0..USERS).map(|n| busy(&node, format!("user-{round}-{n}"), n));
        let kills = async {
            tokio::time::sleep(Duration::from_millis(15 + 40 * round as u64)).await;
            tokio::task::block_in_place(|| node.kill_agent());
        };
        let (seen, ()) = tokio::join!(futures_util::future::join_all(users), kills);
        for (n, seen) in seen.into_iter().enumerate() {
            for branch in seen {
                let other = branches.insert(branch, (round, n));
                assert_eq!(other, None, "handed out twice, now to {round}-{n}");
            }
        }
        for n in (1..USERS).step_by(2) {
            let uid = format!("user-{round}-{n}");
            let lease = node.client.get_lease(&uid).await.unwrap();
            let client = connect(&lease).await.unwrap();
            let bodies = ask(&client, "SELECT body FROM items ORDER BY id")
                .await
                .unwrap();
            assert_eq!(bodies, format!("one,two,three,{uid}"));
            wait_handed_over(&client).await;
            drop(client);
            if round < 2 {
                node.client.release(&uid, None).await.unwrap();
            }
        }
    }
    assert_settled(&node, 10, 8).await;
    node.kill_manager();
    node.restart().await;
    assert_settled(&node, 10, 8).await;
    stop_and_assert_nothing_left(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_servers() {
    let mut node = Node::start(Setup::new(pool("items", 2, 10, QUICK_CLEANUP))).await;
    node.wait_full("items").await;
    let holder = Holder::new(&node, "holder").await;
    node.wait_full("items").await;
    for restarts in 1..=3 {
        let postmaster = node.postmaster_of(&holder.lease.branch).unwrap();
        send(postmaster, Signal::KILL);
        wait_gone(postmaster);
        let now = node
            .wait_lease("holder", |lease| {
                lease.restarts == restarts && lease.reason.is_none()
            })
            .await;
        assert_eq!(now.uri, holder.lease.uri);
        assert_eq!(now.branch, holder.lease.branch);
        assert_ne!(node.postmaster_of(&now.branch), Some(postmaster));
        let client = connect(&now).await.unwrap();
        holder.assert_data(&client).await;
    }

    // A ready one is replaced; what it was is kept for a look.
    let leased = node.postmaster_of(&holder.lease.branch).unwrap();
    let ready = node.postmasters().into_iter().find(|pid| *pid != leased);
    send(ready.unwrap(), Signal::KILL);
    let status = node
        .wait_pool("items", |pool| pool.quarantined == 1 && pool.ready == 2)
        .await;
    assert_eq!(status.leased, 1);
    let named = node.client.node().await.unwrap().quarantined;
    assert_eq!(named.len(), 1, "{named:?}");
    assert!(node.root().join(&named[0].path).is_dir(), "{named:?}");

    // Server and agent at once: down while nobody looks.
    let postmaster = node.postmaster_of(&holder.lease.branch).unwrap();
    node.kill_manager();
    send(postmaster, Signal::KILL);
    wait_gone(postmaster);
    node.restart().await;
    let now = node.wait_lease("holder", |lease| lease.restarts == 4).await;
    assert_eq!(now.uri, holder.lease.uri);
    holder.assert_data(&connect(&now).await.unwrap()).await;
    assert_eq!(now.phase, LeasePhase::Bound);
    stop_and_assert_nothing_left(node);
}
