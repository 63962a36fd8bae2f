//! `POST /sql`, byte by byte and by the published driver.

use branchpool_agent::http::Tcp;
use serde_json::{Value, json};

use crate::{
    Node,
    message::{Reply, Request},
    neon_driver::check_driver,
    service::PASSWORD,
};

fn address(database: &str, more: &str) -> String {
    let password = PASSWORD.replace(':', "%3A").replace('@', "%40");
    format!("postgresql://app.shop:{password}@db.example.com/{database}{more}")
}

async fn post(node: &Node, headers: &[(&str, &str)], body: &Value) -> Reply {
    let mut request = Request::new("POST", "/sql").body(body.to_string());
    for (name, value) in headers {
        request = request.header(name, value);
    }
    node.agent.send_tcp(&request).await
}

async fn refused(node: &Node, headers: &[(&str, &str)], body: &Value) -> Value {
    let reply = post(node, headers, body).await;
    assert_eq!(reply.status, 400, "{reply:?}");
    reply.json()
}

#[tokio::test]
async fn a_query_is_answered_as_neon_does() {
    let node = Node::start().await;
    let address = address("app", "?sslmode=require");
    let headers = [
        ("Neon-Connection-String", &*address),
        ("Neon-Raw-Text-Output", "true"),
        ("Neon-Array-Mode", "true"),
        ("Neon-Pool-Opt-In", "true"),
    ];
    let body = json!({"query": "SELECT id, body FROM items WHERE id = $1", "params": ["2"]});
    let answer: Value = post(&node, &headers, &body).await.json();
    let table = node
        .query(&json!({"query": "SELECT 'items'::regclass::oid AS oid"}))
        .await;
    let table = &table["rows"][0]["oid"];
    let field = |name, id, known, size| {
        json!({
            "name": name, "dataTypeID": known, "tableID": table, "columnID": id,
            "dataTypeSize": size, "dataTypeModifier": -1, "format": "text",
        })
    };
    let expected = json!({
        "fields": [field("id", 1, 23, 4), field("body", 2, 25, -1)],
        "rows": [["2", "two"]],
        "command": "SELECT",
        "rowCount": 1,
        "rowAsArray": true,
    });
    assert_eq!(answer, expected);
    let answer: Value = post(&node, &headers[..1], &body).await.json();
    assert_eq!(answer["rows"], json!([{"id": 2, "body": "two"}]));
    assert_eq!(answer["rowAsArray"], false);

    let arrays = json!({"query": "SELECT ARRAY['a,b', NULL, '\"\\'] AS t, ARRAY[[1, 2], [3, 4]] AS i, '[2:3]={t,f}'::bool[] AS b, ARRAY['{\"k\": [1]}'::jsonb] AS j"});
    let answer: Value = post(&node, &headers[..1], &arrays).await.json();
    let expected = json!({"t": ["a,b", null, "\"\\"], "i": [[1, 2], [3, 4]], "b": [true, false], "j": [{"k": [1]}]});
    assert_eq!(answer["rows"], json!([expected]));

    let body = json!({"queries": [
        {"query": "INSERT INTO items VALUES (4, $1)", "params": ["four"]},
        {"query": "SELECT id FROM items WHERE id > 2 ORDER BY id", "arrayMode": false},
    ]});
    let answer: Value = post(&node, &headers, &body).await.json();
    assert_eq!(answer["results"][0]["rowCount"], 1);
    assert_eq!(
        answer["results"][1]["rows"],
        json!([{"id": "3"}, {"id": "4"}])
    );
    let answer: Value = post(&node, &headers, &json!({"queries": []})).await.json();
    assert_eq!(answer, json!({"results": []}));
    node.stop().await;
}

#[tokio::test]
async fn the_connection_string_sets_the_session() {
    let node = Node::start().await;
    let query = json!({"query": "SELECT current_database() || ' ' || current_setting('application_name') || ' ' || current_setting('work_mem') AS s"});
    let address = address(
        "postgres",
        "?application_name=my+tool&options=-c%20work_mem%3D5MB",
    );
    let answer: Value = post(&node, &[("Neon-Connection-String", &address)], &query)
        .await
        .json();
    assert_eq!(answer["rows"][0]["s"], "postgres my tool 5MB");
    let address = crate::neon::address("nowhere", "");
    let error = refused(&node, &[("Neon-Connection-String", &address)], &query).await;
    assert_eq!(error["code"], "3D000");
    node.stop().await;
}

#[tokio::test]
async fn errors_are_those_that_the_driver_reads() {
    let node = Node::start().await;
    let right = address("app", "");
    let headers = [("Neon-Connection-String", &*right)];
    let error = refused(&node, &headers, &json!({"query": "SELECT x", "params": []})).await;
    assert_eq!(
        (&error["code"], &error["position"]),
        (&json!("42703"), &json!("8"))
    );
    assert_eq!(error["message"], "column \"x\" does not exist");
    for body in [
        json!({}),
        json!([]),
        json!({"query": "a", "queries": []}),
        json!({"query": 1}),
    ] {
        assert_eq!(
            refused(&node, &headers, &body).await["code"],
            "08P01",
            "{body}"
        );
    }
    let body = json!({"query": "SELECT 1"});
    let error = refused(&node, &[], &body).await;
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("Neon-Connection-String")
    );
    let twice = [headers[0], headers[0]];
    assert_eq!(refused(&node, &twice, &body).await["code"], "08P01");
    let level = [headers[0], ("Neon-Batch-Isolation-Level", "Snapshot")];
    assert_eq!(refused(&node, &level, &body).await["code"], "08P01");
    node.stop().await;
}

#[tokio::test]
async fn the_password_is_the_token_of_this_door_alone() {
    let postgres = crate::Postgres::start().await;
    let service = crate::InMemory::with(crate::Limits::default());
    service.sql_target("shop", postgres.target());
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    std::fs::write(&token, "0123456789abcdef").unwrap();
    let agent = crate::Running::serve(service, |options| {
        options.tcp = Some(Tcp::Plain {
            address: "127.0.0.1:0".parse().unwrap(),
            token_file: Some(token),
        });
    })
    .await;
    let node = Node { postgres, agent };
    let body = json!({"query": "SELECT 1 AS one"});
    let address = address("app", "");
    let answer = post(&node, &[("Neon-Connection-String", &address)], &body).await;
    assert_eq!(answer.json::<Value>()["rows"], json!([{"one": 1}]));
    let request = Request::json("POST", "/v1/leases/shop/sql", body.to_string());
    assert_eq!(node.agent.send_tcp(&request).await.status, 401);
    let request = request.header("Authorization", "Bearer 0123456789abcdef");
    assert_eq!(node.agent.send_tcp(&request).await.status, 200);
    node.stop().await;
}

#[tokio::test]
async fn who_is_not_let_in_learns_nothing_else() {
    let node = Node::start().await;
    let body = json!({"query": "SELECT 1"});
    let password = PASSWORD.replace(':', "%3A").replace('@', "%40");
    for (user, password) in [
        ("app.shop", "wrong"),
        ("other.shop", &password),
        ("app", &password),
    ] {
        let address = format!("postgresql://{user}:{password}@host/app");
        let error = refused(&node, &[("Neon-Connection-String", &address)], &body).await;
        let message = format!("password authentication failed for user \"{user}\"");
        assert_eq!(
            error,
            json!({"message": message, "code": "28P01", "severity": "FATAL"})
        );
    }
    // The lease of a right password may have ended.
    let address = format!("postgresql://app.gone:{password}@host/app");
    let reply = post(&node, &[("Neon-Connection-String", &address)], &body).await;
    assert_eq!(reply.problem().reason, "LeaseNotFound");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_published_driver_works_unchanged() {
    let node = Node::start().await;
    let endpoint = format!("http://{}/sql", node.agent.tcp.unwrap());
    check_driver(endpoint, address("app", "?sslmode=require")).await;
    node.stop().await;
}
