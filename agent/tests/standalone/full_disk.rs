//! A branch fills the disk: refill stops with a reason, leases go on, and space that comes back
//! fills the pool again.

use std::time::{Duration, Instant};

use crate::{
    inmate::{Inmate, superuser_pool},
    node::{Node, Setup, ask},
    starvation::connect_patiently,
};

fn is_gated(node: &branchpool_agent_api::NodeStatus) -> bool {
    node.gates.iter().any(|gate| gate.reason == "DiskPressure")
}

/// Writes to the data directory until the gate is shut.
async fn fill_until_gated(node: &Node, filler: &Inmate) {
    let deadline = Instant::now() + Duration::from_secs(120);
    for number in 0.. {
        let status = node.client.node().await.unwrap();
        if is_gated(&status) {
            return;
        }
        assert!(Instant::now() < deadline, "{:?}", status.space);
        // Slower once it is nearly there: the space is measured once a second.
        if status.space.free > 256 << 20 {
            let said = filler
                .run(&format!(
                    "head -c 64M /dev/urandom > {0}/fill.{number} && sync -f {0}",
                    filler.data
                ))
                .await;
            assert!(said.ok, "{said:?}");
        } else {
            let said = filler
                .run(&format!(
                    "head -c 4M /dev/urandom > {0}/fill.{number} && sync -f {0}",
                    filler.data
                ))
                .await;
            assert!(said.ok, "{said:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// The journal may need its reserve first, and then the same request is to be sent again.
async fn release(node: &Node, uid: &str) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(refused) = node.client.release(uid, None).await {
        assert!(
            refused.is("JournalFailed") && Instant::now() < deadline,
            "{refused}\n{}",
            node.log()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_stops_refill_only_and_passes() {
    let mut setup = Setup::new(superuser_pool("items", 2, ""));
    setup.size = "1Gi";
    let mut node = Node::start(setup).await;
    let filler = Inmate::enter(&node, "items", "filler").await;
    let reader = Inmate::enter(&node, "items", "reader").await;
    node.wait_full("items").await;

    fill_until_gated(&node, &filler).await;
    let status = node.client.node().await.unwrap();
    assert!(!status.can_snapshot);
    let pressure = status
        .conditions
        .iter()
        .find(|condition| condition.kind == "DiskPressure")
        .unwrap();
    assert_eq!(pressure.status, "True");
    assert!(
        pressure.message.contains("release leases, or enlarge it"),
        "{pressure:?}"
    );
    // What is ready is handed out, and no more is made.
    for uid in ["third", "fourth"] {
        node.lease("items", uid).await.unwrap();
    }
    let refused = node.lease("items", "fifth").await.unwrap_err();
    assert!(
        refused.is("NoBranchReady") && refused.to_string().contains("have to stay free"),
        "{refused}"
    );
    let pool = node
        .wait_pool("items", |pool| {
            let degraded = pool
                .conditions
                .iter()
                .find(|condition| condition.kind == "Degraded");
            degraded.is_some_and(|condition| condition.reason == "DiskPressure")
        })
        .await;
    assert_eq!((pool.ready, pool.warming, pool.leased), (0, 0, 4));
    for uid in ["reader", "third"] {
        let client = connect_patiently(&node, uid).await;
        ask(&client, "INSERT INTO items VALUES (4, 'four')")
            .await
            .unwrap();
        assert_eq!(
            ask(&client, "SELECT count(*) FROM items").await.unwrap(),
            "4"
        );
    }

    // To the last byte: reading goes on, and the agent still answers and takes back.
    let fill = format!(
        "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null; head -c 2G /dev/urandom > {0}/fill.rest; sync -f {0}; head -c 64M /dev/urandom > {0}/fill.more'",
        filler.data
    );
    let refused = filler.sql(&fill).await.unwrap_err();
    assert!(
        refused.contains("child process exited with exit code 1"),
        "{refused}"
    );
    let left = node.client.node().await.unwrap().space.free;
    // Btrfs keeps the last of what it calls free for itself.
    assert!(left < 128 << 20, "{left} bytes are left");
    assert_eq!(
        reader.sql("SELECT count(*) FROM items").await,
        Ok("4".into())
    );
    node.client.get_lease("reader").await.unwrap();
    release(&node, "filler").await;

    node.wait_full("items").await;
    let status = node.client.node().await.unwrap();
    assert!(!is_gated(&status) && status.can_snapshot, "{status:?}");
    for uid in ["reader", "third"] {
        let client = connect_patiently(&node, uid).await;
        ask(&client, "INSERT INTO items VALUES (5, 'five')")
            .await
            .unwrap();
        assert_eq!(
            ask(&client, "SELECT count(*) FROM items").await.unwrap(),
            "5",
            "{uid}"
        );
    }
    drop((filler, reader));
    assert!(node.stop().success());
    node.assert_nothing_left();
}

/// Leases that together do not fit: the pool says why it makes no more.
#[tokio::test(flavor = "multi_thread")]
async fn a_pool_too_big_for_the_disk_stops_in_time() {
    let many = superuser_pool("items", 2, "").replace("maxBranches: 8", "maxBranches: 60");
    let mut setup = Setup::new(many);
    setup.size = "512Mi";
    let mut node = Node::start(setup).await;
    node.wait_full("items").await;
    let mut leased = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    let refused = loop {
        assert!(Instant::now() < deadline, "{}", node.log());
        assert!(leased.len() < 40, "the disk does not fill");
        let uid = format!("lease-{}", leased.len());
        match node.lease("items", &uid).await {
            Ok(lease) => {
                let inmate = Inmate::of(&node, lease).await;
                // The last ones may not get it.
                let fill = format!(
                    "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null; head -c 24M /dev/urandom > {0}/fill; sync -f {0}'",
                    inmate.data
                );
                let _full = inmate.sql(&fill).await;
                leased.push(inmate);
            }
            Err(refused) if refused.to_string().contains("have to stay free") => break refused,
            Err(refused) => {
                assert!(refused.is("NoBranchReady"), "{refused}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    assert!(refused.is("NoBranchReady"), "{refused}");
    for inmate in &leased {
        assert_eq!(
            inmate.sql("SELECT count(*) FROM items").await,
            Ok("3".into())
        );
        release(&node, &inmate.lease.uid).await;
    }
    node.wait_full("items").await;
    drop(leased);
    assert!(node.stop().success());
    node.assert_nothing_left();
}
