//! The golden image is what it was, whatever happens in branches.

use std::{fs, path::Path};

use branchpool_agent_api::Lease;
use branchpool_sys::btrfs;
use data_encoding::HEXLOWER;
use rustix::process::Signal;
use sha2::{Digest, Sha256};

use crate::{
    inspect::{digest, golden_image},
    node::{Node, Setup, ask, connect, pool, send, wait_gone},
};

const ROWS: u32 = 5_000;

/// What can be told of the image from outside.
#[derive(Debug, PartialEq, Eq)]
struct Seal {
    files: String,
    read_only: bool,
    /// Transaction of the last change of its content.
    changed: u64,
}

fn seal(image: &Path) -> Seal {
    let directory = btrfs::open_dir(image).unwrap();
    let info = btrfs::info(&directory).unwrap();
    Seal {
        files: digest(image),
        read_only: info.read_only,
        changed: info.changed,
    }
}

/// Digest of the rows that the pool's script makes, computed here.
fn expected_rows() -> String {
    let mut rows = Sha256::new();
    for id in 1..=ROWS {
        rows.update(format!("{id}:body {}\n", id * 7));
    }
    HEXLOWER.encode(&rows.finalize())
}

async fn rows(lease: &Lease) -> String {
    let client = connect(lease).await.unwrap();
    let all = ask(
        &client,
        "SELECT string_agg(id || ':' || body || chr(10), '' ORDER BY id) FROM entries",
    )
    .await
    .unwrap();
    HEXLOWER.encode(&Sha256::digest(all))
}

async fn run(lease: &Lease, statements: &[&str]) {
    let client = connect(lease).await.unwrap();
    for statement in statements {
        let result = client.simple_query(statement).await;
        assert!(result.is_ok(), "{statement}: {result:?}");
    }
}

const ROW_CHANGES: [&str; 6] = [
    "INSERT INTO entries SELECT g, 'new' FROM generate_series(100001, 120000) g",
    "UPDATE entries SET body = body || '!' WHERE id % 2 = 0",
    "DELETE FROM entries WHERE id % 3 = 0",
    "VACUUM FULL entries",
    "VACUUM (FREEZE, ANALYZE)",
    "CHECKPOINT",
];
const DEFINITIONS: [&str; 9] = [
    "ALTER TABLE entries ADD COLUMN extra text DEFAULT md5(random()::text)",
    "CREATE INDEX ON entries (body)",
    "CREATE UNLOGGED TABLE scratch AS SELECT * FROM entries",
    "INSERT INTO scratch SELECT id + 1000000, body, extra FROM entries",
    "DROP TABLE entries",
    "CREATE TABLE entries (id integer, body text)",
    "CREATE DATABASE another",
    "DROP DATABASE another",
    "CREATE ROLE someone",
];
const FILES: [&str; 8] = [
    "TRUNCATE entries",
    "SET work_mem = '64kB'",
    "CREATE TEMP TABLE t AS SELECT g, repeat('x', 500) AS filler FROM generate_series(1, 20000) g",
    "SELECT count(*) FROM (SELECT * FROM t ORDER BY filler, g DESC) s",
    "COPY t TO '/dev/null'",
    "SELECT lo_from_bytea(0, convert_to(repeat('large object ', 200000), 'UTF8'))",
    "ALTER SYSTEM SET work_mem = '7MB'",
    "SELECT pg_reload_conf()",
];

#[tokio::test(flavor = "multi_thread")]
async fn the_image_is_unchanged_after_writes_of_every_kind() {
    let manifest = pool("items", 3, 12, "  cleanup: {tombstones: {delay: 0s}}\n")
        .replace("    version: 15", "    version: 15\n    superuser: true")
        .replace(
            "CREATE TABLE items",
            &format!(
                "CREATE TABLE entries (id integer PRIMARY KEY, body text NOT NULL);
            INSERT INTO entries SELECT g, 'body ' || g * 7 FROM generate_series(1, {ROWS}) g;
            CREATE TABLE items"
            ),
        );
    let mut node = Node::start(Setup::new(manifest)).await;
    node.wait_full("items").await;
    let image = golden_image(&node);
    let before = seal(&image);
    assert!(before.read_only);

    let (a, b, c) = (
        node.lease("items", "a").await.unwrap(),
        node.lease("items", "b").await.unwrap(),
        node.lease("items", "c").await.unwrap(),
    );
    for lease in [&a, &b, &c] {
        assert_eq!(rows(lease).await, expected_rows());
    }
    tokio::join!(
        run(&a, &ROW_CHANGES),
        run(&b, &DEFINITIONS),
        run(&c, &FILES)
    );
    copy_in(&a).await;
    assert_ne!(rows(&a).await, expected_rows(), "the writes were lost");

    // A crash, with recovery and the reset of unlogged tables.
    let postmaster = node.postmaster_of(&b.branch).unwrap();
    send(postmaster, Signal::KILL);
    wait_gone(postmaster);
    node.wait_lease("b", |lease| lease.restarts == 1).await;
    let client = connect(&b).await.unwrap();
    assert_eq!(
        ask(&client, "SELECT count(*) FROM scratch").await.unwrap(),
        "0"
    );
    drop(client);

    assert_eq!(seal(&image), before, "the image changed under its branches");
    for uid in ["a", "b", "c"] {
        node.client.release(uid, None).await.unwrap();
    }
    node.wait_pool("items", |pool| {
        pool.ready == 3 && pool.warming + pool.cleaning + pool.tombstones == 0
    })
    .await;
    assert_eq!(
        seal(&image),
        before,
        "the image changed with the end of its branches"
    );
    let fresh = node.lease("items", "fresh").await.unwrap();
    assert_eq!(rows(&fresh).await, expected_rows());

    // What the image refuses by itself.
    let write = fs::write(image.join("PG_VERSION"), "99");
    assert_eq!(write.unwrap_err().raw_os_error(), Some(30), "EROFS");
    assert!(node.stop().success());
    node.assert_nothing_left();
}

async fn copy_in(lease: &Lease) {
    use futures_util::SinkExt;
    let client = connect(lease).await.unwrap();
    let sink = client.copy_in("COPY entries FROM STDIN").await.unwrap();
    let mut sink = Box::pin(sink);
    for chunk in 0..20 {
        let lines = (0..1000).map(|n| format!("{}\tcopied\n", 1_000_000 + chunk * 1000 + n));
        let lines = lines.collect::<Vec<_>>().concat();
        sink.send(bytes::Bytes::from(lines)).await.unwrap();
    }
    assert_eq!(sink.as_mut().finish().await.unwrap(), 20_000);
}
