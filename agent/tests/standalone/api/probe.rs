//! What the probe, the metrics and the watch show.

use std::time::Duration;

use branchpool_agent_api::{Change, Client, NodeStatus};
use tokio::time::timeout;

use super::{WAYS, ask, node};
use crate::{
    message::Request,
    node::{connect, pool_name},
};

const PATIENCE: Duration = Duration::from_mins(1);

#[tokio::test(flavor = "multi_thread")]
async fn the_probe_and_the_metrics_show_what_is_there() {
    let mut node = node().await;
    let lease = node.lease("items", "held").await.unwrap();
    node.wait_full("items").await;
    connect(&lease).await.unwrap();

    let fetch = async |way, path| ask(&node, way, &Request::new("GET", path)).await;
    for way in WAYS {
        for path in ["/healthz", "/readyz"] {
            let reply = fetch(way, path).await;
            assert_eq!(reply.status, 200, "{reply:?}");
        }
        let status: NodeStatus = fetch(way, "/v1/node").await.json();
        assert!(
            status.ready && status.can_snapshot && status.resident_state && status.async_release
        );
        assert_eq!(
            (&*status.provider, status.branches, status.leases),
            ("btrfs", 3, 1)
        );
        assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
        assert!(status.postgres_majors.contains(&15), "{status:?}");
        let space = status.space;
        assert!(space.total > 7 << 30 && space.used > 0, "{space:?}");
        assert!(
            space.used + space.free <= space.total + space.metadata_free,
            "{space:?}"
        );
        assert!(
            space.unallocated > 0 && space.metadata_free > 0,
            "{space:?}"
        );
        assert!(
            status.gates.is_empty() && status.quarantined.is_empty(),
            "{status:?}"
        );
        let isolation = &status.isolation;
        assert_eq!(
            isolation.missing.is_empty(),
            isolation.level == "Full",
            "{isolation:?}"
        );
        let [probe] = &*status.pools else {
            panic!("{status:?}")
        };
        assert_eq!(probe.name, pool_name("items"));
        assert_eq!(
            (
                probe.ready,
                probe.warming,
                probe.desired,
                probe.leased,
                probe.stale
            ),
            (2, 0, 2, 1, 0)
        );
        assert!(probe.refill && probe.refill_window > 0);
        assert_eq!(probe.sessions_open, 2, "one for each ready branch");
        for queue in [
            probe.snapshot,
            probe.start,
            probe.preconnect,
            probe.cleanup,
            probe.tombstones,
        ] {
            assert!(queue.concurrency > 0, "{probe:?}");
            assert_eq!((queue.active, queue.queued), (0, 0), "{probe:?}");
        }
    }
    let before = node.client.node().await.unwrap();
    node.client.release("held", None).await.unwrap();
    node.wait_pool("items", |pool| {
        pool.leased == 0 && pool.cleaning == 0 && pool.ready == 2
    })
    .await;
    let after = node.client.node().await.unwrap();
    assert_eq!(after.instance, before.instance);
    assert!(after.revision > before.revision);
    assert_eq!(after.leases, 0);
    let scheduled = |status: &NodeStatus| status.pools[0].tombstones_scheduled;
    assert_eq!(scheduled(&after), scheduled(&before) + 1);

    for way in WAYS {
        let reply = fetch(way, "/metrics").await;
        for line in [
            r#"branchpool_branches{namespace="default",pool="items",state="ready"} 2"#,
            r#"branchpool_branches{namespace="default",pool="items",state="leased"} 0"#,
            "branchpool_leases 0",
            "branchpool_leases_handed_out_total 1",
            "branchpool_handout_seconds_count 1",
            "branchpool_golden_build_seconds_count 1",
        ] {
            assert!(
                reply.body.lines().any(|found| found == line),
                "{line} in {}",
                reply.body
            );
        }
        assert!(reply.body.ends_with("# EOF\n"));
    }
    assert!(node.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_goes_on_after_a_cut_and_starts_anew_after_a_restart() {
    let mut node = node().await;
    let mut watch = node.client.watch(None).await.unwrap();
    let event = timeout(PATIENCE, watch.next())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let Change::Snapshot {
        node: status,
        pools,
        leases,
    } = event.change
    else {
        panic!("{event:?}")
    };
    assert_eq!((pools.len(), leases.len()), (1, 0));
    let (instance, seen) = (status.instance.clone(), event.revision);
    drop(watch);

    node.lease("items", "held").await.unwrap();
    let resume = async |client: &Client| {
        let mut watch = client.watch(Some((&instance, seen))).await.unwrap();
        timeout(PATIENCE, watch.next())
            .await
            .unwrap()
            .unwrap()
            .unwrap()
    };
    let event = resume(&node.client).await;
    assert_eq!(event.revision, seen + 1, "{event:?}");
    assert!(
        !matches!(event.change, Change::Snapshot { .. }),
        "{event:?}"
    );

    assert!(node.stop().success());
    node.restart().await;
    let event = resume(&node.client).await;
    let Change::Snapshot {
        node: status,
        leases,
        ..
    } = event.change
    else {
        panic!("{event:?}")
    };
    assert_ne!(status.instance, instance);
    assert_eq!((leases.len(), &*leases[0].uid), (1, "held"));
    assert!(node.stop().success());
}
