//! What the HTTP API answers when the real engine is behind it.

use std::time::Duration;

use branchpool_agent_api::{Change, Client, LeasePhase, NodeStatus};
use serde_json::{Value, json};
use tokio::{
    net::{TcpStream, UnixStream},
    time::timeout,
};

use crate::{
    message::{Reply, Request},
    node::{Node, Setup, connect, pool, pool_name},
};

const PATIENCE: Duration = Duration::from_mins(1);

/// How a request gets to the agent.
#[derive(Clone, Copy, Debug)]
enum Way {
    Socket,
    Tcp,
}

const WAYS: [Way; 2] = [Way::Socket, Way::Tcp];

/// A node with a full pool `items` of two branches, whose leases last an hour at most.
async fn node() -> Node {
    let mut setup = Setup::new(pool(
        "items",
        2,
        6,
        "  lease: {defaultTTL: 10m, maxTTL: 1h, maxLifetime: 90m}\n",
    ));
    setup.args = vec!["--listen".into(), "127.0.0.1:0".into()];
    let node = Node::start(setup).await;
    node.wait_full("items").await;
    node
}

async fn ask(node: &Node, way: Way, request: &Request<'_>) -> Reply {
    match way {
        Way::Socket => {
            let socket = node.run_dir().join("agent.sock");
            request
                .send(UnixStream::connect(socket).await.unwrap())
                .await
        }
        Way::Tcp => {
            request
                .send(TcpStream::connect(node.tcp_address()).await.unwrap())
                .await
        }
    }
}

fn desired(name: &str, generation: u64, spec: Value) -> Value {
    json!({"namespace": "default", "name": name, "generation": generation, "spec": spec})
}

fn good_spec() -> Value {
    json!({
        "replicas": 0,
        "maxBranches": 2,
        "postgres": {"version": 15},
        "source": {"sql": {"scripts": [{"name": "one", "sql": "SELECT 1"}]}},
    })
}

/// The good spec with one field set.
fn spec_with(pointer: &str, value: &Value) -> Value {
    let mut spec = good_spec();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    let parent = match parent {
        "" => &mut spec,
        parent => spec.pointer_mut(parent).unwrap(),
    };
    parent[field] = value.clone();
    spec
}

async fn a_bad_spec_names_its_field(node: &Node) {
    let cases = [
        ("/replicas", json!(-1), "spec.replicas"),
        ("/replicas", json!("two"), "spec.replicas"),
        ("/replicas", json!(3), "spec"),
        ("/maxBranches", json!(0), "spec.maxBranches"),
        ("/replica", json!(1), "spec.replica"),
        ("/postgres/verison", json!(15), "spec.postgres.verison"),
        ("/postgres/version", json!(9), "spec.postgres.version"),
        ("/postgres/version", json!(18), "spec.postgres.version"),
        (
            "/postgres/parameters",
            json!({"listen_addresses": "*"}),
            "spec.postgres.parameters",
        ),
        (
            "/postgres/parameters",
            json!({"work_mem": "1\n2"}),
            "spec.postgres.parameters",
        ),
        (
            "/source/subvolume",
            json!({"name": "prepared"}),
            "spec.source",
        ),
        (
            "/source",
            json!({"subvolume": {"name": "../../etc"}}),
            "spec.source.subvolume.name",
        ),
        (
            "/source",
            json!({"sql": {"configMapRef": {"name": "scripts"}}}),
            "spec.source.sql.configMapRef",
        ),
        (
            "/lease",
            json!({"defaultTTL": "soon"}),
            "spec.lease.defaultTTL",
        ),
        (
            "/lease",
            json!({"defaultTTL": "2h", "maxTTL": "1h"}),
            "spec.lease",
        ),
        (
            "/refresh",
            json!({"schedule": "0 3 * * *"}),
            "spec.refresh.schedule",
        ),
        (
            "/resources",
            json!({"memory": "-1Gi"}),
            "spec.resources.memory",
        ),
    ];
    for (index, (pointer, value, field)) in cases.into_iter().enumerate() {
        let body = desired("bad", 1, spec_with(pointer, &value)).to_string();
        let request = Request::json("PUT", "/v1/pools/bad", body);
        let reply = ask(node, WAYS[index % 2], &request).await;
        let context = format!("{pointer}={value}: {reply:?}");
        assert_eq!(reply.status, 422, "{context}");
        let problem = reply.problem();
        assert_eq!(problem.reason, "InvalidField", "{context}");
        let named = problem
            .errors
            .iter()
            .any(|error| error.field == field || error.field.starts_with(&format!("{field}.")));
        assert!(named, "{field}: {context}");
        assert!(problem.detail.contains(field), "{context}");
    }
    let pools = node.client.pools().await.unwrap();
    assert_eq!(pools.len(), 1, "nothing of them was taken in: {pools:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_of_the_engine_say_what_is_wrong() {
    let mut node = node().await;
    a_bad_spec_names_its_field(&node).await;

    let put = |uid: &str, body: Value| (format!("/v1/pools/{uid}"), body.to_string());
    let lease_of = |name: &str| json!({"pool": {"namespace": "default", "name": name}});
    let ok = async |method: &str, path: &str, body: &str| {
        let request = if body.is_empty() {
            Request::new(method, path)
        } else {
            Request::json(method, path, body)
        };
        let reply = ask(&node, Way::Socket, &request).await;
        assert!((200..300).contains(&reply.status), "{path}: {reply:?}");
        reply
    };

    let (path, body) = put("empty", desired("empty", 3, good_spec()));
    let status = ok("PUT", &path, &body).await.json::<Value>();
    assert_eq!(
        (&status["observedGeneration"], &status["desired"]),
        (&json!(3), &json!(0))
    );
    let held = lease_of("items").to_string();
    for uid in ["held", "ended"] {
        ok("PUT", &format!("/v1/leases/{uid}"), &held).await;
    }
    ok("DELETE", "/v1/leases/ended", "").await;
    node.wait_full("items").await;
    // From here on a leader of epoch 5 is in charge.
    ok("POST", "/v1/leases/held/renew", r#"{"epoch": 5}"#).await;

    let with = |field: &str, value: Value| {
        let mut body = lease_of("items");
        body[field] = value;
        body.to_string()
    };
    let other = lease_of("empty").to_string();
    let renew_too_long = r#"{"ttlSeconds": 3601}"#;
    let stale = desired("empty", 2, good_spec()).to_string();
    let taken = desired("items", 1, good_spec()).to_string();
    let once = r#"{"token": "t"}"#;
    let cases = [
        (
            "PUT",
            "/v1/leases/new",
            &*with("ttlSeconds", json!(3601)),
            422,
            "InvalidField",
            "ttlSeconds",
        ),
        (
            "POST",
            "/v1/leases/held/renew",
            renew_too_long,
            422,
            "InvalidField",
            "ttlSeconds",
        ),
        (
            "PUT",
            "/v1/leases/held",
            &*other,
            409,
            "LeaseConflict",
            "default/items",
        ),
        (
            "PUT",
            "/v1/leases/ended",
            &*held,
            410,
            "LeaseEnded",
            "another uid",
        ),
        (
            "POST",
            "/v1/leases/ended/renew",
            "",
            410,
            "LeaseEnded",
            "Released",
        ),
        (
            "POST",
            "/v1/leases/ended/reset",
            once,
            410,
            "LeaseEnded",
            "Released",
        ),
        (
            "POST",
            "/v1/leases/held/forget",
            "",
            409,
            "StillBound",
            "release it first",
        ),
        (
            "PUT",
            "/v1/leases/new",
            &*with("epoch", json!(4)),
            409,
            "StaleEpoch",
            "epoch 5",
        ),
        (
            "POST",
            "/v1/leases/held/renew",
            r#"{"epoch": 4}"#,
            409,
            "StaleEpoch",
            "epoch 5",
        ),
        (
            "POST",
            "/v1/leases/held/reset",
            r#"{"token": "t", "epoch": 4}"#,
            409,
            "StaleEpoch",
            "epoch 5",
        ),
        (
            "DELETE",
            "/v1/leases/held?epoch=4",
            "",
            409,
            "StaleEpoch",
            "epoch 5",
        ),
        (
            "DELETE",
            "/v1/pools/empty?epoch=4",
            "",
            409,
            "StaleEpoch",
            "epoch 5",
        ),
        (
            "PUT",
            "/v1/pools/empty",
            &*stale,
            409,
            "StaleGeneration",
            "older than 3",
        ),
        (
            "PUT",
            "/v1/pools/second",
            &*taken,
            409,
            "NameTaken",
            "remove that one first",
        ),
        (
            "PUT",
            "/v1/pools/Not_A_Uid",
            &*stale,
            422,
            "InvalidField",
            "uid",
        ),
        (
            "DELETE",
            "/v1/pools/unknown",
            "",
            404,
            "PoolNotFound",
            "unknown",
        ),
        (
            "PUT",
            "/v1/leases/new",
            &*lease_of("itens").to_string(),
            404,
            "PoolNotFound",
            "default/empty, default/items",
        ),
        (
            "POST",
            "/v1/leases/new/renew",
            "",
            404,
            "LeaseNotFound",
            "new",
        ),
        ("DELETE", "/v1/leases/new", "", 404, "LeaseNotFound", "new"),
    ];
    for (method, path, body, status, reason, says) in cases {
        for way in WAYS {
            let request = if body.is_empty() {
                Request::new(method, path)
            } else {
                Request::json(method, path, body)
            };
            let reply = ask(&node, way, &request).await;
            let context = format!("{way:?} {method} {path} {body}: {reply:?}");
            assert_eq!(reply.status, status, "{context}");
            let problem = reply.problem();
            assert_eq!(problem.reason, reason, "{context}");
            assert!(problem.detail.contains(says), "{context}");
        }
    }

    let body = lease_of("empty").to_string();
    for way in WAYS {
        let reply = ask(&node, way, &Request::json("PUT", "/v1/leases/new", &*body)).await;
        assert_eq!(reply.status, 503, "{reply:?}");
        let problem = reply.problem();
        assert_eq!(problem.reason, "NoBranchReady", "{reply:?}");
        assert!(problem.detail.contains("default/empty"), "{reply:?}");
        let after = problem.retry_after_ms.unwrap();
        let header: u64 = reply.header("retry-after").unwrap().parse().unwrap();
        assert_eq!(header, after.div_ceil(1_000).max(1), "{reply:?}");
    }

    // None of it did anything.
    let leases = node.client.leases().await.unwrap();
    let phases: Vec<_> = leases
        .iter()
        .map(|lease| (&*lease.uid, lease.phase))
        .collect();
    assert_eq!(
        phases,
        [("ended", LeasePhase::Released), ("held", LeasePhase::Bound)]
    );
    assert!(node.stop().success());
}

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
