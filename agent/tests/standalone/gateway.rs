//! Leases over the gateway: real clients, TLS, and the life of an address.

mod idle;
mod neighbours;

use std::{path::Path, process::Command, sync::Arc, time::Duration};

use branchpool_agent_api::{Lease, LeasePhase, ResetRequest};
use rustix::process::Signal;
use tokio_postgres::{Client, Config, config::SslMode};
use tokio_postgres_rustls::MakeRustlsConnect;
use tokio_rustls::rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::{
    inspect::names,
    node::{Node, Setup, ask, connect_at, pool, send, wait_gone},
};

async fn node() -> Node {
    started(pool("items", 4, 12, "")).await
}

async fn started(manifest: String) -> Node {
    let node = Node::start(Setup {
        gateway: "127.0.0.1:0",
        ..Setup::new(manifest)
    })
    .await;
    node.wait_full("items").await;
    node
}

fn trusting(authority: &Path) -> MakeRustlsConnect {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(authority).unwrap();
    roots.add(certificate).unwrap();
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    MakeRustlsConnect::new(config)
}

/// By TLS, verified by the lease's own words.
async fn connect(node: &Node, lease: &Lease) -> Result<Client, tokio_postgres::Error> {
    connect_as(node, lease, lease.password.as_deref().unwrap()).await
}

async fn connect_as(
    node: &Node,
    lease: &Lease,
    password: &str,
) -> Result<Client, tokio_postgres::Error> {
    let mut config = Config::new();
    config
        .host(&lease.host)
        .port(lease.port)
        .user(&lease.user)
        .password(password)
        .dbname(&lease.database)
        .ssl_mode(SslMode::Require);
    let tls = trusting(&node.run_dir().join("ca.crt"));
    let (client, connection) = config.connect(tls).await?;
    tokio::spawn(connection);
    Ok(client)
}

fn refusal(result: Result<Client, tokio_postgres::Error>) -> (String, String) {
    let error = result.map(drop).unwrap_err();
    let error = error.as_db_error().unwrap_or_else(|| panic!("{error:?}"));
    (error.code().code().to_owned(), error.message().to_owned())
}

fn psql(uri: &str, sql: &str) -> (bool, String, String) {
    let output = Command::new("psql")
        .args([
            "--no-psqlrc",
            "--tuples-only",
            "--no-align",
            uri,
            "--command",
            sql,
        ])
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

/// The client sessions of the pool's role.
async fn backends(lease: &Lease) -> String {
    let client = connect_at(&lease.socket, "postgres", &lease.database).await;
    let sql = "SELECT pid FROM pg_stat_activity WHERE usename = 'app' AND backend_type = 'client backend' ORDER BY pid";
    ask(&client.unwrap(), sql).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_client_gets_the_warm_session_and_all_are_served() {
    let node = node().await;
    let lease = node.lease("items", "a").await.unwrap();
    assert!(lease.user.ends_with(&lease.endpoint), "{lease:?}");
    let warm = backends(&lease).await;
    let client = connect(&node, &lease).await.unwrap();
    let own = ask(&client, "SELECT pg_backend_pid()").await.unwrap();
    assert_eq!(own, warm, "the session that was open already");
    assert_eq!(
        ask(&client, "SELECT body FROM items ORDER BY id")
            .await
            .unwrap(),
        "one,two,three"
    );
    assert_eq!(
        ask(&client, "SHOW idle_session_timeout").await.unwrap(),
        "0"
    );
    client
        .batch_execute("INSERT INTO items VALUES (4, 'four')")
        .await
        .unwrap();
    let second = connect(&node, &lease).await.unwrap();
    assert_ne!(ask(&second, "SELECT pg_backend_pid()").await.unwrap(), warm);
    assert_eq!(
        ask(&second, "SELECT count(*) FROM items").await.unwrap(),
        "4"
    );

    let (ok, out, error) = psql(
        &lease.uri,
        "SELECT count(*), current_user, current_database() FROM items",
    );
    assert!(ok, "{error}");
    assert_eq!(out, "4|app|app");

    // The same again for who asks again, and without the password for who looks around.
    let again = node.lease("items", "a").await.unwrap();
    assert_eq!(again, lease);
    let listed = node.client.leases().await.unwrap();
    let password = lease.password.as_deref().unwrap();
    assert!(!serde_json::to_string(&listed).unwrap().contains(password));
    assert!(!node.log().contains(password));
    let journal = std::fs::read(node.root().join("state/journal.db-wal")).unwrap();
    assert!(
        !journal
            .windows(password.len())
            .any(|bytes| bytes == password.as_bytes())
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_declared_profile_is_that_of_the_warm_session() {
    let manifest = pool(
        "items",
        2,
        6,
        "  warming: {sessionParameters: {TimeZone: Asia/Tokyo}}\n",
    );
    let node = started(manifest).await;
    let lease = node.lease("items", "a").await.unwrap();
    let warm = backends(&lease).await;
    let command = |zone: &str| {
        let output = Command::new("psql")
            .env("PGTZ", zone)
            .args(["--no-psqlrc", "--tuples-only", "--no-align", &lease.uri])
            .args([
                "--command",
                "SELECT pg_backend_pid() || ' ' || current_setting('TimeZone')",
            ])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(command("Asia/Tokyo"), format!("{warm} Asia/Tokyo"));
    let lease = node.lease("items", "b").await.unwrap();
    let warm = backends(&lease).await;
    let client = connect(&node, &lease).await.unwrap();
    // It did not ask for that time zone, so it does not get it.
    assert_ne!(ask(&client, "SELECT pg_backend_pid()").await.unwrap(), warm);
    assert_ne!(ask(&client, "SHOW TimeZone").await.unwrap(), "Asia/Tokyo");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_come_in_learns_nothing() {
    let node = node().await;
    let lease = node.lease("items", "a").await.unwrap();
    let other = node.lease("items", "b").await.unwrap();
    let wrong = refusal(connect_as(&node, &lease, other.password.as_deref().unwrap()).await);
    assert_eq!(wrong.0, "28P01");
    let mut unknown = lease.clone();
    unknown.user = format!("app.{}", "a".repeat(13));
    let unknown = refusal(connect(&node, &unknown).await);
    let hide =
        |(code, message): (String, String), user: &str| (code, message.replace(user, "USER"));
    let wrong = hide(wrong, &lease.user);
    assert_eq!(hide(unknown, &format!("app.{}", "a".repeat(13))), wrong);

    let client = connect(&node, &lease).await.unwrap();
    node.client.release("a", None).await.unwrap();
    assert_eq!(
        hide(refusal(connect(&node, &lease).await), &lease.user),
        wrong
    );
    let cut = client.simple_query("SELECT 1").await.unwrap_err();
    // The words may have been read before the query was sent.
    assert!(
        cut.is_closed() || cut.code().is_some_and(|code| code.code() == "57P01"),
        "{cut:?}"
    );
    node.wait_pool("items", |pool| {
        pool.leased == 1 && pool.cleaning + pool.tombstones == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_keeps_url_and_password_and_cuts_the_old_sessions() {
    let node = node().await;
    let lease = node.lease("items", "a").await.unwrap();
    let client = connect(&node, &lease).await.unwrap();
    client.batch_execute("DELETE FROM items").await.unwrap();
    let token = ResetRequest {
        token: "one".into(),
        epoch: None,
    };
    let reset = node.client.reset("a", &token).await.unwrap();
    assert_eq!((&reset.uri, &reset.password), (&lease.uri, &lease.password));
    assert_ne!(reset.branch, lease.branch);
    assert!(client.simple_query("SELECT 1").await.is_err());
    let warm = backends(&reset).await;
    let client = connect(&node, &lease).await.unwrap();
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
    assert_eq!(ask(&client, "SELECT pg_backend_pid()").await.unwrap(), warm);
    node.client.release("a", None).await.unwrap();
    assert_eq!(refusal(connect(&node, &lease).await).0, "28P01");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_outlives_the_server_and_the_agent() {
    let mut node = node().await;
    let lease = node.lease("items", "a").await.unwrap();
    let client = connect(&node, &lease).await.unwrap();
    client
        .batch_execute("INSERT INTO items VALUES (9, 'nine')")
        .await
        .unwrap();
    let backend = ask(&client, "SELECT pg_backend_pid()").await.unwrap();
    let pid = node.postmaster_of(&lease.branch).unwrap();
    send(pid, Signal::KILL);
    wait_gone(pid);
    // Which may answer once more before it sees that its server is gone.
    wait_gone(backend.parse().unwrap());
    let cut = client.simple_query("SELECT 1").await.unwrap_err();
    assert!(cut.is_closed() || cut.code().is_some(), "{cut:?}");
    node.wait_lease("a", |lease| lease.restarts == 1 && lease.reason.is_none())
        .await;
    let client = patiently(&node, &lease).await;
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "4"
    );

    node.kill_agent();
    node.wait_serving().await;
    let mut again = node.client.get_lease("a").await.unwrap();
    assert_eq!(
        (&again.password, &again.user),
        (&lease.password, &lease.user)
    );
    assert_eq!(again.phase, LeasePhase::Bound);
    // It asked for any port.
    again.port = node
        .gateway_address()
        .rsplit_once(':')
        .unwrap()
        .1
        .parse()
        .unwrap();
    let client = patiently(&node, &again).await;
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "4"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ready_branch_that_lost_its_session_gets_another() {
    let node = node().await;
    let ready = names(&node.run_dir().join("b"));
    for branch in &ready {
        let sockets = node.run_dir().join("b").join(branch).join("s");
        let client = connect_at(&sockets.to_string_lossy(), "postgres", "app").await;
        let sql =
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'app'";
        assert_eq!(ask(&client.unwrap(), sql).await.unwrap(), "t");
    }
    node.wait_full("items").await;
    for uid in ["a", "b", "c", "d"] {
        let lease = node.lease_patiently("items", uid).await;
        let warm = backends(&lease).await;
        let client = connect(&node, &lease).await.unwrap();
        assert_eq!(ask(&client, "SELECT pg_backend_pid()").await.unwrap(), warm);
    }
}

/// The process that started a process.
fn parent(pid: &str) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    line.unwrap().trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn who_connects_in_the_instant_of_the_lease_gets_its_branch() {
    const CLIENTS: usize = 4;
    const EACH: usize = 125;
    let node = Arc::new(
        started(pool(
            "items",
            12,
            24,
            "  cleanup: {tombstones: {delay: 0s}}\n",
        ))
        .await,
    );
    let clients = (0..CLIENTS).map(|number| {
        let node = Arc::clone(&node);
        tokio::spawn(async move {
            for round in 0..EACH {
                let uid = format!("lease-{number}-{round}");
                let lease = node.lease_patiently("items", &uid).await;
                let client = connect(&node, &lease).await.unwrap();
                assert_eq!(
                    ask(&client, "SELECT count(*) FROM items").await.unwrap(),
                    "3"
                );
                client.batch_execute("DELETE FROM items").await.unwrap();
                let pid = ask(&client, "SELECT pg_backend_pid()").await.unwrap();
                assert_eq!(
                    Some(parent(&pid)),
                    node.postmaster_of(&lease.branch),
                    "{uid} is connected to another branch"
                );
                drop(client);
                node.client.release(&uid, None).await.unwrap();
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_ends_who_writes_and_leaves_nothing_open() {
    let node = started(pool(
        "items",
        2,
        6,
        "  cleanup: {tombstones: {delay: 0s}}\n",
    ))
    .await;
    let lease = node.lease("items", "a").await.unwrap();
    let mut writers = Vec::new();
    for number in 0..20 {
        let client = connect(&node, &lease).await.unwrap();
        writers.push(tokio::spawn(async move {
            let mut id = 1_000_000 * (number + 1);
            loop {
                id += 1;
                let sql = format!("INSERT INTO items VALUES ({id}, 'x')");
                if let Err(error) = client.batch_execute(&sql).await {
                    return error;
                }
            }
        }));
    }
    let socket = lease.socket.clone();
    node.client.release("a", None).await.unwrap();
    for writer in writers {
        let error = tokio::time::timeout(Duration::from_secs(10), writer)
            .await
            .unwrap()
            .unwrap();
        let code = error.code().map(|code| code.code().to_owned());
        assert!(
            error.is_closed() || code.as_deref() == Some("57P01"),
            "{error:?}"
        );
    }
    node.wait_pool("items", |pool| {
        pool.ready == 2 && pool.cleaning + pool.tombstones == 0
    })
    .await;
    assert!(!Path::new(&socket).exists());
}

/// A server may be on its way back.
async fn patiently(node: &Node, lease: &Lease) -> Client {
    for _ in 0..500 {
        match connect(node, lease).await {
            Ok(client) => return client,
            Err(error) => {
                let known = error
                    .as_db_error()
                    .map(|error| error.code().code().to_owned());
                assert!(known.is_none_or(|code| code == "57P03"), "{error:?}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no connection: {}", node.log());
}
