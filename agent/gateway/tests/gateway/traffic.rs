//! What moves through an open connection.

use std::{fmt::Write, pin::pin};

use bytes::{Bytes, BytesMut};
use futures_util::{SinkExt, StreamExt, TryStreamExt};
use postgres_protocol::message::frontend;
use tokio::io::AsyncWriteExt;
use tokio_postgres::{AsyncMessage, NoTls, config::SslMode};

use crate::{
    fixture::{Gateway, PASSWORD, Postgres, USER, eventually},
    raw::{Raw, tags, value},
};

const ROWS: i64 = 300_000;

async fn copies(client: &tokio_postgres::Client) {
    client
        .batch_execute("CREATE TEMP TABLE t (i int8, t text)")
        .await
        .unwrap();
    let sink = client.copy_in("COPY t FROM STDIN").await.unwrap();
    let mut sink = pin!(sink);
    let mut batch = String::new();
    for i in 0..ROWS {
        writeln!(batch, "{i}\ttext of row {i}").unwrap();
        if batch.len() > 60_000 || i == ROWS - 1 {
            sink.send(Bytes::from(std::mem::take(&mut batch)))
                .await
                .unwrap();
        }
    }
    assert_eq!(sink.finish().await.unwrap(), ROWS.unsigned_abs());
    let row = client
        .query_one("SELECT sum(i)::int8 FROM t", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), ROWS * (ROWS - 1) / 2);
    let stream = client.copy_out("COPY t TO STDOUT").await.unwrap();
    let length = stream
        .try_fold(0, async |sum, chunk: Bytes| Ok(sum + chunk.len()))
        .await
        .unwrap();
    let expected = "SELECT sum(length(i::text) + length(t) + 2)::int8 FROM t";
    let row = client.query_one(expected, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), i64::try_from(length).unwrap());
}

#[tokio::test]
async fn copy_in_both_directions() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let mut config = crate::login::config(&gateway);
    let (client, connection) = config
        .ssl_mode(SslMode::Disable)
        .connect(NoTls)
        .await
        .unwrap();
    tokio::spawn(connection);
    copies(&client).await;
    assert!(gateway.metric("gateway_bytes_total{direction=\"in\"}") > 5_000_000);
    assert!(gateway.metric("gateway_bytes_total{direction=\"out\"}") > 5_000_000);
}

#[tokio::test]
async fn copy_in_both_directions_encrypted() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let config = crate::login::config(&gateway);
    let (client, connection) = config
        .connect(crate::login::rustls_of(&gateway))
        .await
        .unwrap();
    tokio::spawn(connection);
    copies(&client).await;
}

#[tokio::test]
async fn a_row_of_64_megabytes() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    for mode in ["disable", "require"] {
        let sql = "SELECT repeat('0123456789abcdef', 4194304)";
        let row = gateway.psql(&format!("sslmode={mode}"), sql).await.unwrap();
        assert_eq!(row, "0123456789abcdef".repeat(4_194_304));
    }
}

/// Neither side reads while it writes, unless the other makes it wait.
#[tokio::test]
async fn a_pipeline_fills_both_directions() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let mut raw = Raw::connect(gateway.address).await;
    raw.log_in(0, &[("user", USER)], PASSWORD).await;
    let count = 400;
    let text = "y".repeat(50_000);
    let mut query = BytesMut::new();
    frontend::query(&format!("SELECT '{text}'"), &mut query).unwrap();
    let (mut read, mut write) = raw.stream.into_split();
    let writer = tokio::spawn(async move {
        for _ in 0..count {
            write.write_all(&query).await.unwrap();
        }
        write
    });
    let mut received = 0;
    let mut buffer = vec![0; 1 << 16];
    let expected = count * (text.len() + 7);
    while received < expected {
        let length = tokio::io::AsyncReadExt::read(&mut read, &mut buffer)
            .await
            .unwrap();
        assert_ne!(length, 0);
        received += length;
    }
    writer.await.unwrap();
}

#[tokio::test]
async fn a_client_that_closes_its_half_gets_its_answer() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let mut raw = Raw::connect(gateway.address).await;
    raw.log_in(0, &[("user", USER)], PASSWORD).await;
    let mut query = BytesMut::new();
    frontend::query("SELECT 'done' FROM pg_sleep(0.3)", &mut query).unwrap();
    raw.send(&query).await;
    raw.stream.shutdown().await.unwrap();
    let rest = raw.rest().await;
    assert_eq!(tags(&rest), "TDCZ");
    assert_eq!(value(&rest), "done");
    eventually(async || branch.activity().connections == 0).await;
}

#[tokio::test]
async fn a_client_that_vanishes_frees_its_session() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let mut raw = Raw::connect(gateway.address).await;
    raw.log_in(0, &[("user", USER)], PASSWORD).await;
    raw.query("BEGIN; CREATE TABLE t (i int)").await;
    drop(raw);
    eventually(async || branch.activity().connections == 0).await;
    let count = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'";
    eventually(async || server.sql(count).await == "0").await;
}

#[tokio::test]
async fn notifications_reach_an_idle_client_and_are_known_as_its_own() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (_branch, warm) = gateway.warm_lease(&server, &[]).await;
    let mut config = crate::login::config(&gateway);
    let (client, mut connection) = config
        .ssl_mode(SslMode::Disable)
        .connect(NoTls)
        .await
        .unwrap();
    let (sender, mut receiver) = tokio::sync::mpsc::channel(4);
    tokio::spawn(async move {
        let mut messages = futures_util::stream::poll_fn(|cx| connection.poll_message(cx));
        while let Some(Ok(message)) = messages.next().await {
            if let AsyncMessage::Notification(notification) = message {
                sender.send(notification).await.unwrap();
            }
        }
    });
    client
        .batch_execute("LISTEN news; NOTIFY news, 'own'")
        .await
        .unwrap();
    let own = receiver.recv().await.unwrap();
    assert_eq!((own.payload(), own.process_id()), ("own", warm));
    server.sql("NOTIFY news, 'other'").await;
    let other = receiver.recv().await.unwrap();
    assert_eq!(other.payload(), "other");
    assert_ne!(other.process_id(), warm);
}

#[tokio::test]
async fn a_thousand_connects_in_a_row() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    for _ in 0..1_000 {
        let mut raw = Raw::connect(gateway.address).await;
        let seen = raw.log_in(0, &[("user", USER)], PASSWORD).await;
        assert_eq!(seen.last().unwrap().0, b'Z');
    }
    eventually(async || branch.activity().connections == 0).await;
    branch.end();
    branch.closed().await;
}
