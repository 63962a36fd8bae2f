//! The watch, from the log to the client.

use branchpool_agent::http::WatchLog;
use branchpool_agent_api::{Change, Client, PoolName, Target, WatchEvent, problem::reason};

use crate::{
    raw::{Running, patiently},
    service::{INSTANCE, node, pool},
};

fn shop(ready: u32) -> branchpool_agent_api::PoolStatus {
    pool("p1", PoolName::new("default", "shop"), ready)
}

fn ready(event: &WatchEvent) -> u32 {
    match &event.change {
        Change::Pool(pool) => pool.ready,
        other => panic!("no pool: {other:?}"),
    }
}

fn snapshot_pools(event: &WatchEvent) -> Vec<u32> {
    match &event.change {
        Change::Snapshot { node, pools, .. } => {
            assert_eq!(node.revision, event.revision);
            pools.iter().map(|pool| pool.ready).collect()
        }
        other => panic!("no snapshot: {other:?}"),
    }
}

fn since(revision: u64) -> (String, u64) {
    (INSTANCE.to_owned(), revision)
}

#[tokio::test]
async fn a_client_sees_a_snapshot_then_each_change_in_order() {
    let server = Running::on_socket().await;
    let client = Client::new(Target::Unix(server.socket.clone()));
    let log = &server.service.log;
    log.pool(shop(1));
    let mut watch = client.watch(None).await.unwrap();
    let first = patiently(watch.next()).await.unwrap().unwrap();
    assert_eq!((first.revision, snapshot_pools(&first)), (2, vec![1]));
    log.pool(shop(2));
    log.pool(shop(2));
    log.pool_gone("p1");
    log.pool_gone("p1");
    let second = patiently(watch.next()).await.unwrap().unwrap();
    assert_eq!((second.revision, ready(&second)), (3, 2));
    let third = patiently(watch.next()).await.unwrap().unwrap();
    let gone = Change::PoolGone {
        uid: "p1".to_owned(),
    };
    assert_eq!((third.revision, third.change), (4, gone));

    let mut resumed = client.watch(Some((INSTANCE, 2))).await.unwrap();
    assert_eq!(patiently(resumed.next()).await.unwrap(), Some(second));
    let mut other = client.watch(Some(("another", 2))).await.unwrap();
    let event = patiently(other.next()).await.unwrap().unwrap();
    assert!(snapshot_pools(&event).is_empty());
    server.stop().await;
}

#[tokio::test]
async fn resuming_works_within_the_ring_and_gives_a_snapshot_beyond_it() {
    let log = WatchLog::new(node());
    for count in 0..5000 {
        log.pool(shop(count));
    }
    let last = log.revision();
    assert_eq!(last, 5001);
    // The ring holds 4,096: its oldest event is the one after this.
    let before_ring = last - 4096;
    let mut oldest = log.subscribe(Some(since(before_ring))).unwrap();
    assert_eq!(oldest.next().await.unwrap().revision, before_ring + 1);
    for beyond in [0, 1, before_ring - 1, last + 1, u64::MAX] {
        let mut stranded = log.subscribe(Some(since(beyond))).unwrap();
        let event = stranded.next().await.unwrap();
        assert_eq!(event.revision, last, "since {beyond}");
        assert_eq!(snapshot_pools(&event), [4999]);
    }
}

#[tokio::test]
async fn a_slow_watcher_gets_a_snapshot_instead_of_what_it_missed() {
    let log = WatchLog::new(node());
    let mut slow = log.subscribe(None).unwrap();
    slow.next().await.unwrap();
    for count in 0..4097 {
        log.pool(shop(count));
    }
    let event = slow.next().await.unwrap();
    assert_eq!(snapshot_pools(&event), [4096]);
    log.pool(shop(9));
    assert_eq!(ready(&slow.next().await.unwrap()), 9);
}

#[tokio::test(start_paused = true)]
async fn an_idle_watch_shows_that_it_lives() {
    let log = WatchLog::new(node());
    let mut watcher = log.subscribe(None).unwrap();
    watcher.next().await.unwrap();
    for _ in 0..2 {
        let event = watcher.next().await.unwrap();
        assert_eq!((event.revision, &event.change), (1, &Change::Bookmark));
    }
}

#[tokio::test]
async fn changes_wake_every_watcher() {
    let log = WatchLog::new(node());
    let mut watchers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let mut watcher = log.subscribe(Some(since(1))).unwrap();
        watchers.spawn(async move {
            let mut expected = 2;
            while expected < 1002 {
                let event = watcher.next().await.unwrap();
                // A watcher that continues and missed nothing hears that first.
                if event.change != Change::Bookmark {
                    assert_eq!(event.revision, expected);
                    expected += 1;
                }
            }
        });
    }
    for count in 0..1000 {
        log.pool(shop(count));
        tokio::task::yield_now().await;
    }
    patiently(watchers.join_all()).await;
}

#[tokio::test]
async fn only_so_many_may_watch_and_a_leaver_makes_room() {
    let log = WatchLog::new(node());
    let mut watchers: Vec<_> = (0..64).map(|_| log.subscribe(None).unwrap()).collect();
    let refusal = log.subscribe(None).unwrap_err();
    assert_eq!(
        (refusal.status, &*refusal.reason),
        (503, reason::TOO_MANY_WATCHERS)
    );
    watchers.pop();
    log.subscribe(None).unwrap();
}

#[tokio::test]
async fn a_closed_log_ends_after_what_it_holds() {
    let log = WatchLog::new(node());
    let mut watcher = log.subscribe(Some(since(1))).unwrap();
    log.pool(shop(1));
    log.close();
    assert_eq!(ready(&watcher.next().await.unwrap()), 1);
    assert_eq!(watcher.next().await, None);
}

#[tokio::test]
async fn an_unchanged_node_is_no_news() {
    let log = WatchLog::new(node());
    assert_eq!(log.node(node()), 1);
    let mut other = node();
    other.leases = 1;
    assert_eq!(log.node(other), 2);
}
