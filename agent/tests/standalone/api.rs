//! What the HTTP API answers when the real engine is behind it.

mod probe;

use branchpool_agent_api::LeasePhase;
use serde_json::{Value, json};
use tokio::net::{TcpStream, UnixStream};

use crate::{
    message::{Reply, Request},
    node::{Node, Setup, pool},
};

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

fn desired(name: &str, generation: u64, spec: &Value) -> Value {
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
        let body = desired("bad", 1, &spec_with(pointer, &value)).to_string();
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

    let (path, body) = put("empty", desired("empty", 3, &good_spec()));
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
    let stale = desired("empty", 2, &good_spec()).to_string();
    let taken = desired("items", 1, &good_spec()).to_string();
    let token = r#"{"token": "t"}"#;
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
            token,
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
