//! Every bad input gets a 4xx that names what is wrong.

use branchpool_agent_api::{Lease, LeasePhase, PoolStatus};
use serde_json::json;

use crate::raw::{Reply, Request, Running};

fn ok_lease() -> serde_json::Value {
    json!({"pool": {"namespace": "default", "name": "shop"}})
}

/// The good request with one field set.
fn lease_with(field: &str, value: serde_json::Value) -> Vec<u8> {
    let mut body = ok_lease();
    *body.pointer_mut(field).unwrap_or(&mut json!(null)) = value.clone();
    if body.pointer(field).is_none() {
        body[&field[1..]] = value;
    }
    body.to_string().into_bytes()
}

async fn with_pool() -> Running {
    let server = Running::on_socket().await;
    let body =
        json!({"namespace": "default", "name": "shop", "generation": 1, "spec": {"replicas": 3}});
    let reply = server
        .send(&Request::json("PUT", "/v1/pools/pool-1", body.to_string()))
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let status: PoolStatus = reply.json();
    assert_eq!(
        (status.ready, status.name.to_string()),
        (3, "default/shop".to_owned())
    );
    server
}

async fn expect_field(server: &Running, request: &Request<'_>, field: &str, says: &str) {
    let reply = server.send(request).await;
    let context = format!("{request:?}: {reply:?}");
    assert_eq!(reply.status, 422, "{context}");
    let problem = reply.problem();
    assert_eq!(problem.reason, "InvalidField", "{context}");
    assert_eq!(problem.errors[0].field, field, "{context}");
    assert!(problem.errors[0].message.contains(says), "{context}");
    assert!(problem.detail.contains(field), "{context}");
}

async fn expect(server: &Running, request: &Request<'_>, status: u16, reason: &str) -> Reply {
    let reply = server.send(request).await;
    let context = format!("{request:?}: {reply:?}");
    assert_eq!(reply.status, status, "{context}");
    assert_eq!(reply.problem().reason, reason, "{context}");
    reply
}

#[tokio::test]
async fn fields_of_a_lease_are_checked_one_by_one() {
    let server = with_pool().await;
    let long = "x".repeat(253);
    let long_name = format!("{} characters", long.len());
    let cases: Vec<(Vec<u8>, &str, &str)> = vec![
        (lease_with("/ttlSeconds", json!(0)), "ttlSeconds", "from 1"),
        (
            lease_with("/ttlSeconds", json!(31_536_001)),
            "ttlSeconds",
            "31536000",
        ),
        (lease_with("/ttlSeconds", json!(-5)), "ttlSeconds", "from 1"),
        (
            lease_with("/ttlSeconds", json!(1.5)),
            "ttlSeconds",
            "whole number",
        ),
        (
            lease_with("/ttlSeconds", json!("60")),
            "ttlSeconds",
            "whole number",
        ),
        (lease_with("/epoch", json!(-1)), "epoch", "whole number"),
        (lease_with("/epoch", json!([])), "epoch", "whole number"),
        (lease_with("/holder", json!(7)), "holder", "a string"),
        (
            lease_with("/holder", json!("x".repeat(257))),
            "holder",
            "256",
        ),
        (lease_with("/holder", json!("a\u{1}")), "holder", "control"),
        (
            lease_with("/unheardOf", json!(1)),
            "unheardOf",
            "unknown field",
        ),
        (
            lease_with("/pool", json!("shop")),
            "pool",
            "namespace and name",
        ),
        (
            lease_with("/pool", json!({"namespace": "default"})),
            "pool.name",
            "missing",
        ),
        (lease_with("/pool/name", json!(5)), "pool.name", "a string"),
        (lease_with("/pool/name", json!("")), "pool.name", "empty"),
        (
            lease_with("/pool/name", json!("Shop")),
            "pool.name",
            "DNS label",
        ),
        (
            lease_with("/pool/name", json!("a.b")),
            "pool.name",
            "DNS label",
        ),
        (
            lease_with("/pool/name", json!(long)),
            "pool.name",
            &long_name,
        ),
        (
            lease_with("/pool/namespace", json!("-a")),
            "pool.namespace",
            "DNS label",
        ),
        (
            lease_with("/pool", json!({"namespace": "a", "name": "b", "extra": 1})),
            "pool.extra",
            "unknown field",
        ),
        (b"{}".to_vec(), "pool", "missing"),
        (
            br#"{"pool":{"namespace":"a","name":"b"},"ttlSeconds":5,"ttlSeconds":6}"#.to_vec(),
            "ttlSeconds",
            "more than once",
        ),
    ];
    for (body, field, says) in cases {
        let request = Request::json("PUT", "/v1/leases/l1", body);
        expect_field(&server, &request, field, says).await;
    }
    let empty = server.service.log.revision();
    assert_eq!(empty, 2, "no refused request should have changed anything");
    server.stop().await;
}

#[tokio::test]
async fn all_bad_fields_are_named_at_once() {
    let server = with_pool().await;
    let body = json!({"pool": {"namespace": "A", "name": "B"}, "ttlSeconds": 0, "holder": "\n"});
    let reply = server
        .send(&Request::json("PUT", "/v1/leases/l1", body.to_string()))
        .await;
    let problem = reply.problem();
    let fields: Vec<_> = problem.errors.iter().map(|error| &*error.field).collect();
    assert_eq!(
        fields,
        ["pool.namespace", "pool.name", "ttlSeconds", "holder"]
    );
    server.stop().await;
}

#[tokio::test]
async fn other_bodies_are_checked_too() {
    let server = with_pool().await;
    let cases = [
        (
            "POST",
            "/v1/leases/l/renew",
            json!({"ttlSeconds": 0}),
            "ttlSeconds",
            "from 1",
        ),
        (
            "POST",
            "/v1/leases/l/renew",
            json!({"ttl": 5}),
            "ttl",
            "unknown field",
        ),
        ("POST", "/v1/leases/l/reset", json!({}), "token", "missing"),
        (
            "POST",
            "/v1/leases/l/reset",
            json!({"token": ""}),
            "token",
            "1 to 253",
        ),
        (
            "POST",
            "/v1/leases/l/reset",
            json!({"token": "x".repeat(254)}),
            "token",
            "254",
        ),
        (
            "PUT",
            "/v1/pools/p",
            json!({"namespace": "a", "name": "b", "generation": 1}),
            "spec",
            "missing",
        ),
        (
            "PUT",
            "/v1/pools/p",
            json!({"namespace": "a", "name": "b", "generation": 1, "spec": "x"}),
            "spec",
            "object",
        ),
        (
            "PUT",
            "/v1/pools/p",
            json!({"namespace": "a", "name": "b", "generation": "1", "spec": {}}),
            "generation",
            "whole number",
        ),
        (
            "PUT",
            "/v1/pools/p",
            json!({"namespace": "a", "name": "B", "generation": 1, "spec": {}}),
            "name",
            "DNS label",
        ),
    ];
    for (method, path, body, field, says) in cases {
        let request = Request::json(method, path, body.to_string());
        expect_field(&server, &request, field, says).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn bodies_that_are_not_json_are_told_where() {
    let server = with_pool().await;
    for (body, place) in [
        ("", "line 1 column 0"),
        ("{", "line 1 column 1"),
        ("{\n \"pool\": nope}", "line 2 column 11"),
        (&*format!("{} x", ok_lease()), "trailing"),
        (
            "{\"pool\": {\"namespace\": \"a\", \"name\": \"b\"},}",
            "trailing comma",
        ),
        (&*"[".repeat(1000), "expected"),
    ] {
        let request = Request::json("PUT", "/v1/leases/l1", body);
        let reply = server.send(&request).await;
        if body.starts_with("[[") {
            // Well-formed so far, but no object.
            assert_eq!(reply.status, 422, "{reply:?}");
            continue;
        }
        assert_eq!(reply.status, 400, "{body}: {reply:?}");
        let problem = reply.problem();
        assert_eq!(problem.reason, "MalformedJson");
        assert!(problem.detail.contains(place), "{body}: {}", problem.detail);
    }
    let not_utf8 = b"{\"holder\": \"\xff\"}".to_vec();
    let request = Request::json("PUT", "/v1/leases/l1", not_utf8);
    expect(&server, &request, 400, "MalformedJson").await;
    server.stop().await;
}

#[tokio::test]
async fn media_types_other_than_json_are_refused() {
    let server = with_pool().await;
    let path = "/v1/leases/l1";
    let plain = |kind| {
        Request::new("PUT", path)
            .header("Content-Type", kind)
            .body("{}")
    };
    for request in [
        Request::new("PUT", path).body("{}"),
        plain("text/plain"),
        plain("application/jsonp"),
        plain("application/json; charset=latin1"),
        plain("application/json").header("Content-Encoding", "gzip"),
        Request::new("POST", "/v1/leases/l1/renew").body("{}"),
    ] {
        expect(&server, &request, 415, "UnsupportedMediaType").await;
    }
    let good = Request::new("PUT", path)
        .header("Content-Type", "Application/JSON; charset=\"UTF-8\"")
        .body(ok_lease().to_string());
    assert_eq!(server.send(&good).await.status, 201);
    server.stop().await;
}

#[tokio::test]
async fn long_bodies_are_refused_by_announced_and_by_real_length() {
    let server = with_pool().await;
    let padded = |limit: usize| {
        format!(
            "{}{}",
            ok_lease(),
            " ".repeat(limit - ok_lease().to_string().len())
        )
    };
    let at_limit = Request::json("PUT", "/v1/leases/l1", padded(64 << 10));
    assert_eq!(server.send(&at_limit).await.status, 201);
    let over = Request::json("PUT", "/v1/leases/l1", padded((64 << 10) + 1));
    expect(&server, &over, 413, "BodyTooLarge").await;
    let pool = Request::json("PUT", "/v1/pools/p", " ".repeat((1 << 20) + 1));
    expect(&server, &pool, 413, "BodyTooLarge").await;

    // Without an announced length.
    let mut chunk = format!("{:x}\r\n", (64 << 10) + 1).into_bytes();
    chunk.extend(padded((64 << 10) + 1).into_bytes());
    chunk.extend(b"\r\n0\r\n\r\n");
    let mut chunked =
        Request::json("PUT", "/v1/leases/l1", Vec::new()).header("Transfer-Encoding", "chunked");
    chunked.body = Vec::new();
    let reply = server.send_with_tail(&chunked, &chunk).await;
    assert_eq!(reply.status, 413, "{reply:?}");
    server.stop().await;
}

#[tokio::test]
async fn paths_and_methods_are_exact() {
    let server = with_pool().await;
    for path in [
        "/",
        "/v1",
        "/v1/",
        "/v1/lease",
        "/v1/leases/",
        "/v1/leases/a/b/c",
        "/v1/node/",
    ] {
        expect(&server, &Request::new("GET", path), 404, "NoSuchPath").await;
    }
    for (method, path, allow) in [
        ("POST", "/v1/node", "GET,HEAD"),
        ("PUT", "/v1/leases", "GET,HEAD"),
        ("GET", "/v1/leases/a/renew", "POST"),
        ("PATCH", "/v1/leases/a", "GET,HEAD,PUT,DELETE"),
        ("GET", "/v1/pools/a", "PUT,DELETE"),
        ("OPTIONS", "/v1/watch", "GET,HEAD"),
    ] {
        let reply = expect(
            &server,
            &Request::new(method, path),
            405,
            "MethodNotAllowed",
        )
        .await;
        assert_eq!(reply.header("allow"), Some(allow), "{method} {path}");
        assert!(reply.problem().detail.contains(allow));
    }
    for path in [
        "/v1/leases/a%2Fb",
        "/v1/leases/%20",
        "/v1/leases/..",
        "/v1/leases/%C3%A4",
    ] {
        expect_field(&server, &Request::new("GET", path), "uid", "letters").await;
    }
    let long = format!("/v1/leases/{}", "x".repeat(129));
    expect_field(&server, &Request::new("GET", &long), "uid", "128").await;
    expect(
        &server,
        &Request::new("GET", "/v1/leases/%FF"),
        400,
        "BadPath",
    )
    .await;
    let long = format!("/v1/pools/default/{}", "x".repeat(253));
    expect_field(&server, &Request::new("GET", &long), "name", "253").await;
    server.stop().await;
}

#[tokio::test]
async fn queries_hold_what_is_known_and_nothing_else() {
    let server = with_pool().await;
    for (method, path, field, says) in [
        (
            "GET",
            "/v1/node?verbose=1",
            "verbose",
            "no query parameters",
        ),
        ("GET", "/v1/leases?pool=a", "pool", "no query parameters"),
        ("GET", "/healthz?x", "x", "no query parameters"),
        ("DELETE", "/v1/leases/a?force=1", "force", "epoch"),
        ("DELETE", "/v1/leases/a?epoch=-1", "epoch", "whole number"),
        ("DELETE", "/v1/leases/a?epoch=%2B1", "epoch", "whole number"),
        ("DELETE", "/v1/leases/a?epoch=", "epoch", "whole number"),
        ("DELETE", "/v1/leases/a?epoch=1&epoch=1", "epoch", "once"),
        ("GET", "/v1/watch?since=1", "instance", "with since"),
        ("GET", "/v1/watch?instance=a", "since", "with instance"),
        (
            "GET",
            "/v1/watch?instance=a&since=x",
            "since",
            "whole number",
        ),
    ] {
        expect_field(&server, &Request::new(method, path), field, says).await;
    }
    for method_path in [("DELETE", "/v1/leases/a"), ("POST", "/v1/leases/a/forget")] {
        let request = Request::json(method_path.0, method_path.1, "{}");
        expect(&server, &request, 400, "UnexpectedBody").await;
    }
    server.stop().await;
}

#[tokio::test]
async fn good_requests_arrive_whole() {
    let server = with_pool().await;
    let mut body = ok_lease();
    body["ttlSeconds"] = json!(90);
    body["holder"] = json!("CI job 7");
    let put = Request::json("PUT", "/v1/leases/l1", body.to_string());
    let reply = server.send(&put).await;
    assert_eq!(reply.status, 201);
    let lease: Lease = reply.json();
    assert_eq!(lease.expires_at, 91_000);
    assert_eq!(lease.holder.as_deref(), Some("CI job 7"));
    assert_eq!(server.send(&put).await.status, 200);

    let renewed = server
        .send(&Request::new("POST", "/v1/leases/l1/renew"))
        .await;
    assert_eq!(renewed.json::<Lease>().expires_at, 151_000);
    let renew = Request::json("POST", "/v1/leases/l1/renew", r#"{"ttlSeconds":1}"#);
    assert_eq!(
        server.send(&renew).await.json::<Lease>().expires_at,
        152_000
    );
    let reset = Request::json("POST", "/v1/leases/l1/reset", r#"{"token":"t1"}"#);
    let reset = server.send(&reset).await.json::<Lease>();
    assert_eq!(reset.observed_reset_token.as_deref(), Some("t1"));

    let release = Request::new("DELETE", "/v1/leases/l1?epoch=7");
    for _ in 0..2 {
        let released = server.send(&release).await.json::<Lease>();
        assert_eq!(released.phase, LeasePhase::Released);
        assert_eq!(server.service.last_epoch(), Some(7));
    }
    let forget = Request::new("POST", "/v1/leases/l1/forget?epoch=8");
    assert_eq!(server.send(&forget).await.status, 204);
    assert_eq!(server.service.last_epoch(), Some(8));
    expect(
        &server,
        &Request::new("GET", "/v1/leases/l1"),
        404,
        "LeaseNotFound",
    )
    .await;

    let reply = server.send(&Request::new("GET", "/metrics")).await;
    assert!(
        reply
            .header("content-type")
            .unwrap()
            .starts_with("application/openmetrics-text")
    );
    assert_eq!(
        server
            .send(&Request::new("DELETE", "/v1/pools/pool-1"))
            .await
            .status,
        204
    );
    server.stop().await;
}

#[tokio::test]
async fn refusals_of_the_service_keep_their_reason_and_say_when_to_retry() {
    let server = with_pool().await;
    let unknown = json!({"pool": {"namespace": "default", "name": "shap"}});
    let request = Request::json("PUT", "/v1/leases/l1", unknown.to_string());
    let reply = expect(&server, &request, 404, "PoolNotFound").await;
    assert!(reply.problem().detail.contains("default/shop"));
    let path = "/v1/pools/default/shap";
    let reply = expect(&server, &Request::new("GET", path), 404, "PoolNotFound").await;
    assert!(reply.problem().detail.contains("default/shop"));

    let empty = json!({"namespace": "default", "name": "empty", "generation": 1, "spec": {}});
    let request = Request::json("PUT", "/v1/pools/pool-2", empty.to_string());
    assert_eq!(server.send(&request).await.status, 200);
    let body = json!({"pool": {"namespace": "default", "name": "empty"}});
    let request = Request::json("PUT", "/v1/leases/l1", body.to_string());
    let reply = expect(&server, &request, 503, "NoBranchReady").await;
    assert_eq!(reply.header("retry-after"), Some("2"));
    assert_eq!(reply.problem().retry_after_ms, Some(1500));

    assert_eq!(
        server.send(&Request::new("GET", "/readyz")).await.status,
        200
    );
    server.service.not_ready("the filesystem is full");
    let reply = expect(&server, &Request::new("GET", "/readyz"), 503, "NotReady").await;
    assert_eq!(reply.problem().detail, "the filesystem is full");
    server.stop().await;
}
