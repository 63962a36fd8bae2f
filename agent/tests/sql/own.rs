//! `POST /v1/leases/{uid}/sql`.

use branchpool_agent_api::{SqlColumn, SqlError, SqlResult};
use serde_json::{Value, json};

use crate::{Node, message::Request};

fn postgres_error(problem: branchpool_agent_api::Problem) -> SqlError {
    assert_eq!((problem.status, &*problem.reason), (400, "PostgresError"));
    *problem.postgres.expect("should hold Postgres's error")
}

#[tokio::test]
async fn rows_have_types_and_commands_a_tag() {
    let node = Node::start().await;
    let result: SqlResult = {
        let body = json!({"query": "SELECT id, body, id::int8 * 9007199254740993 AS big, id > 1 AS more, 0.5::float8 AS half, 1.10 AS exact, '{\"a\": [1, null]}'::jsonb AS doc, NULL::int AS none, 'NaN'::float8 AS nan, now()::timestamptz IS NOT NULL AS t, '{1,2}'::int[] AS list FROM items ORDER BY id LIMIT $1", "params": [2]});
        serde_json::from_value(node.query(&body).await).unwrap()
    };
    assert_eq!(
        result.rows[0],
        json!({
            "id": 1, "body": "one", "big": 9_007_199_254_740_993_u64, "more": false, "half": 0.5,
            "exact": "1.10", "doc": {"a": [1, null]}, "none": null, "nan": "NaN", "t": true,
            "list": "{1,2}",
        })
    );
    assert_eq!((&*result.command, result.row_count), ("SELECT", Some(2)));
    let column = SqlColumn {
        name: "id".to_owned(),
        type_name: Some("int4".to_owned()),
        type_id: 23,
    };
    assert_eq!(result.columns[0], column);

    for (query, command, count) in [
        (
            "INSERT INTO items VALUES (4, 'four'), (5, 'five')",
            "INSERT",
            json!(2),
        ),
        (
            "UPDATE items SET body = 'x' WHERE id > 3",
            "UPDATE",
            json!(2),
        ),
        ("DELETE FROM items WHERE id > 3", "DELETE", json!(2)),
        ("CREATE TABLE more (id int)", "CREATE TABLE", Value::Null),
        (
            "DO $$ BEGIN RAISE NOTICE 'hello'; END $$",
            "DO",
            Value::Null,
        ),
        ("", "", Value::Null),
        ("SET search_path = pg_catalog", "SET", Value::Null),
    ] {
        let result = node.query(&json!({"query": query})).await;
        assert_eq!(
            (&result["command"], &result["rowCount"]),
            (&json!(command), &count),
            "{query}"
        );
        assert_eq!(
            (&result["columns"], &result["rows"]),
            (&json!([]), &json!([])),
            "{query}"
        );
    }
    let body = json!({"query": "INSERT INTO items VALUES (6, 'six') RETURNING id, body", "arrayMode": true});
    assert_eq!(node.query(&body).await["rows"], json!([[6, "six"]]));
    // A setting of one request is not the next one's.
    assert_eq!(
        node.query(&json!({"query": "SELECT count(*) FROM items"}))
            .await["rows"],
        json!([{"count": 4}])
    );
    node.stop().await;
}

#[tokio::test]
async fn parameters_are_of_the_types_that_the_server_infers() {
    let node = Node::start().await;
    let body = json!({
        "query": "SELECT $1::int4 + 1 AS a, $2::bool AS b, $3::text AS c, $4::text[] AS d, $5::jsonb ->> 'k' AS e, $6::int IS NULL AS f, $7::numeric::text AS g, $8::int[] AS h",
        "params": [41, true, "it's \"ä\"", ["a,b", "\\", null], {"k": "v"}, null, 1.5, [[1, 2], [3, 4]]],
        "arrayMode": true,
    });
    let rows = json!([[
        42,
        true,
        "it's \"ä\"",
        "{\"a,b\",\"\\\\\",NULL}",
        "v",
        true,
        "1.5",
        "{{1,2},{3,4}}"
    ]]);
    assert_eq!(node.query(&body).await["rows"], rows);
    // More digits than any number of JSON parsers holds.
    let digits = "123456789012345678901234567890.123456789";
    let text = format!(r#"{{"query": "SELECT $1::numeric AS n", "params": [{digits}]}}"#);
    let request = Request::json("POST", "/v1/leases/shop/sql", text);
    let result: Value = node.agent.send(&request).await.json();
    assert_eq!(result["rows"][0]["n"], digits);
    node.stop().await;
}

#[tokio::test]
async fn postgres_errors_are_problems_with_its_fields() {
    let node = Node::start().await;
    let error =
        async |query: &str| postgres_error(node.post(&json!({"query": query})).await.problem());
    let syntax = error("SELEC 1").await;
    assert_eq!(
        (syntax.code.as_deref(), syntax.position.as_deref()),
        (Some("42601"), Some("1"))
    );
    assert_eq!(syntax.severity.as_deref(), Some("ERROR"));
    let unique = error("INSERT INTO items VALUES (1, 'again')").await;
    assert_eq!(unique.code.as_deref(), Some("23505"));
    assert_eq!(unique.table.as_deref(), Some("items"));
    assert_eq!(unique.constraint.as_deref(), Some("items_pkey"));
    assert_eq!(
        unique.detail.as_deref(),
        Some("Key (id)=(1) already exists.")
    );
    let raised = error("DO $$ BEGIN RAISE 'm' USING HINT = 'h', ERRCODE = 'P0042'; END $$").await;
    assert_eq!(
        (raised.code.as_deref(), raised.hint.as_deref()),
        (Some("P0042"), Some("h"))
    );
    assert!(raised.context.unwrap().contains("inline_code_block"));
    assert_eq!(
        error("SELECT 1; SELECT 2").await.code.as_deref(),
        Some("42601")
    );
    for copy in ["COPY items TO STDOUT", "COPY items FROM STDIN"] {
        assert_eq!(error(copy).await.code.as_deref(), Some("0A000"));
    }
    let body = json!({"query": "SELECT $1::int", "params": ["x"]});
    let error = postgres_error(node.post(&body).await.problem());
    assert_eq!(error.code.as_deref(), Some("22P02"));
    // An error in a row that comes late does not follow a 200.
    let body = json!({"query": "SELECT 1 / (5000 - i) FROM generate_series(1, 6000) i"});
    assert_eq!(
        postgres_error(node.post(&body).await.problem())
            .code
            .as_deref(),
        Some("22012")
    );
    node.stop().await;
}

#[tokio::test]
async fn a_read_only_query_cannot_write() {
    let node = Node::start().await;
    let body = json!({"query": "SELECT * FROM items", "readOnly": true});
    assert_eq!(node.query(&body).await["rowCount"], 3);
    let body = json!({"query": "DELETE FROM items", "readOnly": true});
    let error = postgres_error(node.post(&body).await.problem());
    assert_eq!(error.code.as_deref(), Some("25006"));
    assert_eq!(
        node.query(&json!({"query": "SELECT * FROM items"})).await["rowCount"],
        3
    );
    node.stop().await;
}

#[tokio::test]
async fn what_is_not_understood_is_refused() {
    let node = Node::start().await;
    for (body, field) in [
        (json!({}), "query"),
        (json!({"query": "SELECT 1", "paramz": []}), "paramz"),
        (json!({"query": "a\u{0}b"}), "query"),
        (
            json!({"query": "SELECT $1", "params": ["\u{0}"]}),
            "params[0]",
        ),
        (json!({"query": "SELECT 1", "timeoutMs": 0}), "timeoutMs"),
        (
            json!({"query": "SELECT 1", "timeoutMs": 600_001}),
            "timeoutMs",
        ),
    ] {
        let problem = node.post(&body).await.problem();
        assert_eq!(problem.status, 422, "{body}");
        assert!(problem.detail.contains(field), "{body}: {problem}");
    }
    let request = Request::json("POST", "/v1/leases/none/sql", r#"{"query": "SELECT 1"}"#);
    assert_eq!(
        node.agent.send(&request).await.problem().reason,
        "LeaseNotFound"
    );
    let request = Request::new("POST", "/v1/leases/shop/sql").body(r#"{"query": "SELECT 1"}"#);
    assert_eq!(node.agent.send(&request).await.problem().status, 415);
    let request = Request::new("GET", "/v1/leases/shop/sql");
    assert_eq!(node.agent.send(&request).await.problem().status, 405);
    node.stop().await;
}
