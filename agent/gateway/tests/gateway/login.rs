//! Who gets in, and what the others see.

use std::{fs, sync::Arc};

use branchpool_gateway::{Limits, State};
use tokio_postgres::config::{ChannelBinding, SslMode};
use tokio_postgres_rustls::MakeRustlsConnect;
use tokio_rustls::rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::{
    fixture::{Certificates, DATABASE, ENDPOINT, Gateway, PASSWORD, Postgres, ROLE, USER},
    raw::{Raw, Reply, code, error, tags},
};

pub(crate) fn rustls_of(gateway: &Gateway) -> MakeRustlsConnect {
    let pem = fs::read(&gateway.authority).unwrap();
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(&pem).unwrap())
        .unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    MakeRustlsConnect::new(config)
}

pub(crate) fn config(gateway: &Gateway) -> tokio_postgres::Config {
    let mut config = tokio_postgres::Config::new();
    config
        .host("localhost")
        .hostaddr(gateway.address.ip())
        .port(gateway.address.port())
        .user(USER)
        .password(PASSWORD)
        .dbname(DATABASE)
        .ssl_mode(SslMode::Require);
    config
}

#[tokio::test]
async fn psql_with_and_without_tls() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let sql = "SELECT current_user, current_database()";
    for mode in ["disable", "prefer", "require", "verify-ca", "verify-full"] {
        let result = gateway.psql(&format!("sslmode={mode}"), sql).await;
        assert_eq!(result.as_deref(), Ok("app|shop"), "{mode}");
    }
    let bound = "sslmode=verify-full channel_binding=require";
    assert_eq!(gateway.psql(bound, "SELECT 1").await.unwrap(), "1");
    let older = "sslmode=require ssl_max_protocol_version=TLSv1.2";
    assert_eq!(gateway.psql(older, "SELECT 1").await.unwrap(), "1");
    let oldest = "sslmode=require ssl_min_protocol_version=TLSv1 ssl_max_protocol_version=TLSv1.1";
    gateway.psql(oldest, "SELECT 1").await.unwrap_err();
    let elsewhere = "sslmode=verify-full host=127.0.0.1";
    gateway.psql(elsewhere, "SELECT 1").await.unwrap_err();
}

#[tokio::test]
async fn tokio_postgres_binds_to_the_channel() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let (client, connection) = config(&gateway)
        .channel_binding(ChannelBinding::Require)
        .connect(rustls_of(&gateway))
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let row = client
        .query_one("SELECT $1::int8 + 1", &[&41_i64])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 42);
    drop(client);
    connection.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_new_certificate_is_for_new_connections() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let old = rustls_of(&gateway);
    let (client, connection) = config(&gateway).connect(old.clone()).await.unwrap();
    tokio::spawn(connection);
    let new = Certificates::new();
    fs::write(&gateway.authority, &new.authority).unwrap();
    gateway.identity.send_replace(new.identity);
    assert!(config(&gateway).connect(old).await.is_err());
    let (other, connection) = config(&gateway)
        .channel_binding(ChannelBinding::Require)
        .connect(rustls_of(&gateway))
        .await
        .unwrap();
    tokio::spawn(connection);
    for client in [client, other] {
        client.execute("SELECT 1", &[]).await.unwrap();
    }
}

#[tokio::test]
async fn plaintext_only_where_it_is_allowed() {
    let server = Postgres::start().await;
    let gateway = Gateway::with(Limits::default(), false).await;
    gateway.lease(&server);
    let refused = gateway
        .psql("sslmode=disable", "SELECT 1")
        .await
        .unwrap_err();
    assert!(
        refused.contains("connections without TLS are not allowed"),
        "{refused}"
    );
    assert_eq!(
        gateway.psql("sslmode=require", "SELECT 1").await.unwrap(),
        "1"
    );
    // Whoever the user is: nothing is told before.
    let mut raw = Raw::connect(gateway.address).await;
    raw.startup(0, &[("user", "nobody")]).await;
    assert_eq!(code(&raw.rest().await[0]), "28000");
}

/// Everything that a client sees, but for salt and nonces.
async fn refused(gateway: &Gateway, user: &str, password: &str) -> Vec<Reply> {
    let mut raw = Raw::connect(gateway.address).await;
    raw.startup(0, &[("user", user), ("database", DATABASE)])
        .await;
    let mut seen = vec![raw.reply().await.unwrap()];
    seen.extend(raw.prove(password).await);
    seen.extend(raw.rest().await);
    seen
}

async fn salt(gateway: &Gateway, user: &str) -> String {
    let mut raw = Raw::connect(gateway.address).await;
    raw.startup(0, &[("user", user)]).await;
    raw.reply().await.unwrap();
    let mut message = bytes::BytesMut::new();
    let first = b"n,,n=,r=abc";
    postgres_protocol::message::frontend::sasl_initial_response(
        "SCRAM-SHA-256",
        first,
        &mut message,
    )
    .unwrap();
    raw.send(&message).await;
    let (_, body) = raw.reply().await.unwrap();
    let text = String::from_utf8(body[4..].to_vec()).unwrap();
    let (_, salt) = text.split_once(",s=").unwrap();
    salt.to_owned()
}

#[tokio::test]
async fn all_who_are_refused_see_the_same() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let wrong = refused(&gateway, USER, "wrong").await;
    assert_eq!(tags(&wrong), "RE");
    let expected = format!("password authentication failed for user \"{USER}\"");
    assert_eq!(error(&wrong[1]), ("28P01".to_owned(), expected));
    let salt_before = salt(&gateway, USER).await;

    // The lease is gone, with the right password and with a wrong one.
    let removed = gateway.directory.remove(ENDPOINT).unwrap();
    assert_eq!(refused(&gateway, USER, PASSWORD).await, wrong);
    assert_eq!(salt(&gateway, USER).await, salt_before);
    // Gone, but still listed.
    gateway.directory.insert(ENDPOINT, removed);
    branch.end();
    assert_eq!(refused(&gateway, USER, PASSWORD).await, wrong);
    assert_eq!(refused(&gateway, USER, "wrong").await, wrong);
    assert_eq!(gateway.metric("gateway_authentication_failures_total"), 4);

    // Never there: the same but for the name.
    let unknown = "app.aaaaaaaaaaaaa";
    let text = |replies: &[Reply]| String::from_utf8(replies[1].1.to_vec()).unwrap();
    for user in [unknown, "app", "nobody.", "postgres"] {
        let seen = refused(&gateway, user, PASSWORD).await;
        assert_eq!(tags(&seen), "RE");
        assert_eq!(seen[0], wrong[0]);
        assert_eq!(text(&seen), text(&wrong).replace(USER, user));
    }
    assert_eq!(salt(&gateway, unknown).await, salt(&gateway, unknown).await);
}

#[tokio::test]
async fn a_restart_is_told_to_who_knows_the_password() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let wrong = refused(&gateway, USER, "wrong").await;
    branch.set_state(State::Restarting);
    let mut raw = Raw::connect(gateway.address).await;
    let seen = raw.log_in(0, &[("user", USER)], PASSWORD).await;
    assert_eq!(tags(&seen), "RRE");
    assert_eq!(code(&seen[2]), "57P03");
    assert_eq!(refused(&gateway, USER, "wrong").await, wrong);
    branch.set_state(State::Serving);
    gateway.psql("", "SELECT 1").await.unwrap();
}

#[tokio::test]
async fn a_suspended_branch_is_woken() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    branch.set_state(State::Suspended);
    let (woken, ()) = tokio::join!(gateway.psql("", "SELECT 1"), async {
        branch.wake_requested().await;
        assert_eq!(gateway.metric("gateway_connections{state=\"waking\"}"), 1);
        branch.set_state(State::Serving);
    });
    assert_eq!(woken.unwrap(), "1");
    assert_eq!(gateway.metric("gateway_wake_seconds_count"), 1);
    // The wish was fulfilled: the next suspension begins without one.
    branch.set_state(State::Suspended);
    let early = tokio::time::timeout(std::time::Duration::ZERO, branch.wake_requested()).await;
    assert!(early.is_err());
}

#[tokio::test]
async fn waiting_for_a_suspended_branch_is_bounded() {
    let server = Postgres::start().await;
    let limits = Limits {
        wake_time: std::time::Duration::from_millis(50),
        ..Limits::default()
    };
    let gateway = Gateway::with(limits, true).await;
    let branch = gateway.lease(&server);
    branch.set_state(State::Suspended);
    let mut raw = Raw::connect(gateway.address).await;
    let seen = raw.log_in(0, &[("user", USER)], PASSWORD).await;
    assert_eq!(code(seen.last().unwrap()), "57P03");
}

#[tokio::test]
async fn an_endpoint_that_moves_leads_to_the_new_branch() {
    let (old, new) = (Postgres::start().await, Postgres::start().await);
    new.sql("CREATE TABLE new AS SELECT 1; GRANT SELECT ON new TO app")
        .await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&old);
    gateway.psql("", "SELECT * FROM new").await.unwrap_err();
    gateway.lease(&new);
    branch.end();
    branch.closed().await;
    assert_eq!(gateway.psql("", "SELECT * FROM new").await.unwrap(), "1");
    assert_eq!(gateway.directory.get(ENDPOINT).unwrap().facts().role, ROLE);
}

#[tokio::test]
async fn a_server_that_is_not_there() {
    let nowhere = tempfile::tempdir().unwrap();
    let gateway = Gateway::start().await;
    gateway.lease_at(nowhere.path());
    let mut raw = Raw::connect(gateway.address).await;
    let seen = raw.log_in(0, &[("user", USER)], PASSWORD).await;
    assert_eq!(code(seen.last().unwrap()), "57P03");
}

#[tokio::test]
async fn a_socket_behind_a_long_path() {
    let server = Postgres::start().await;
    let elsewhere = tempfile::tempdir().unwrap();
    let long = elsewhere.path().join("x".repeat(120));
    std::os::unix::fs::symlink(server.socket_dir(), &long).unwrap();
    let gateway = Gateway::start().await;
    gateway.lease_at(&long);
    assert_eq!(gateway.psql("", "SELECT 1").await.unwrap(), "1");
}

#[tokio::test]
async fn errors_of_the_server_reach_the_client() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let mut raw = Raw::connect(gateway.address).await;
    let parameters = [("user", USER), ("database", "missing")];
    let seen = raw.log_in(0, &parameters, PASSWORD).await;
    assert_eq!(tags(&seen), "RRE");
    assert_eq!(code(&seen[2]), "3D000");
    let mut raw = Raw::connect(gateway.address).await;
    let parameters = [("user", USER), ("work_mem", "lots")];
    let seen = raw.log_in(0, &parameters, PASSWORD).await;
    assert_eq!(code(seen.last().unwrap()), "22023");
}
