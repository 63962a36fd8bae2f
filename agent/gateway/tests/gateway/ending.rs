//! What clients see when it ends.

use std::time::Duration;

use crate::{
    fixture::{Gateway, PASSWORD, Postgres, USER, eventually},
    raw::{Raw, code, tags, value},
};

async fn client(gateway: &Gateway) -> Raw {
    let mut raw = Raw::connect(gateway.address).await;
    raw.log_in(0, &[("user", USER)], PASSWORD).await;
    raw
}

async fn backends(server: &Postgres) -> String {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'";
    server.sql(sql).await
}

#[tokio::test]
async fn a_lease_that_ends_ends_its_clients() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let mut clients = Vec::new();
    for _ in 0..20 {
        let mut raw = client(&gateway).await;
        raw.query("CREATE TEMP TABLE t (i int)").await;
        clients.push(raw);
    }
    // One waits for an answer, one writes, one is in a transaction.
    let mut query = bytes::BytesMut::new();
    postgres_protocol::message::frontend::query("SELECT pg_sleep(60)", &mut query).unwrap();
    clients[0].send(&query).await;
    let mut copy = bytes::BytesMut::new();
    postgres_protocol::message::frontend::query("COPY t FROM STDIN", &mut copy).unwrap();
    clients[1].send(&copy).await;
    assert_eq!(clients[1].reply().await.unwrap().0, b'G');
    clients[2].query("BEGIN").await;
    branch.end();
    branch.closed().await;
    for mut raw in clients {
        let rest = raw.rest().await;
        assert_eq!(tags(&rest), "E");
        assert_eq!(code(&rest[0]), "57P01");
    }
    // A backend that sleeps does not look for its client.
    eventually(async || backends(&server).await == "1").await;
    assert_eq!(branch.activity().connections, 0);
}

#[tokio::test]
async fn an_unused_session_ends_with_its_lease() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (branch, _) = gateway.warm_lease(&server, &[]).await;
    let open = tokio::time::timeout(Duration::from_millis(50), branch.closed()).await;
    assert!(open.is_err(), "it has neither ended nor closed");
    branch.end();
    branch.closed().await;
    eventually(async || backends(&server).await == "0").await;
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_nothing_back() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let mut raw = client(&gateway).await;
    let mut query = bytes::BytesMut::new();
    let sql = "SELECT repeat('x', 1000) FROM generate_series(1, 100000)";
    postgres_protocol::message::frontend::query(sql, &mut query).unwrap();
    raw.send(&query).await;
    // It reads a little, and then no more.
    raw.reply().await.unwrap();
    branch.end();
    branch.closed().await;
    // It gets whole messages and the reason, unless it had half of one already.
    let (rest, half) = raw.all().await;
    let told = rest.last().is_some_and(|reply| reply.0 == b'E');
    assert_ne!(told, half);
    if told {
        assert_eq!(code(rest.last().unwrap()), "57P01");
    }
    assert!(rest.len() < 100_000);
}

#[tokio::test]
async fn a_server_that_is_killed() {
    let mut server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let mut idle = client(&gateway).await;
    let mut busy = client(&gateway).await;
    let mut query = bytes::BytesMut::new();
    postgres_protocol::message::frontend::query("SELECT pg_sleep(60)", &mut query).unwrap();
    busy.send(&query).await;
    server.kill();
    for raw in [&mut idle, &mut busy] {
        let rest = raw.rest().await;
        assert_eq!(tags(&rest), "E");
        assert_eq!(code(&rest[0]), "57P02");
    }
    server.restart().await;
    let mut raw = client(&gateway).await;
    assert_eq!(value(&raw.query("SELECT 1").await), "1");
}

#[tokio::test]
async fn a_server_that_is_stopped_speaks_for_itself() {
    let mut server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let mut raw = client(&gateway).await;
    server.stop("-INT");
    let rest = raw.rest().await;
    assert_eq!(tags(&rest), "E");
    assert_eq!(code(&rest[0]), "57P01");
}

#[tokio::test]
async fn a_goodbye_is_not_answered() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let mut raw = client(&gateway).await;
    raw.send(b"X\0\0\0\x04").await;
    assert_eq!(raw.rest().await, []);
    eventually(async || branch.activity().connections == 0).await;
}

#[tokio::test]
async fn a_gateway_that_stops_says_so() {
    let server = Postgres::start().await;
    let mut gateway = Gateway::start().await;
    gateway.lease(&server);
    let mut raw = client(&gateway).await;
    gateway.stop.take().unwrap().send(()).unwrap();
    let rest = raw.rest().await;
    assert_eq!(code(&rest[0]), "57P01");
    gateway.served.await.unwrap();
}
