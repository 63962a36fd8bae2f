//! Who gets the preconnected session.

use std::time::Duration;

use branchpool_gateway::Unavailable;
use bytes::Bytes;
use tokio::time::timeout;

use crate::{
    fixture::{DATABASE, Gateway, PASSWORD, Postgres, ROLE, USER, eventually, open},
    raw::{Raw, tags, value},
};

const PID: &str = "SELECT pg_backend_pid()";

async fn pid_of(gateway: &Gateway, parameters: &[(&str, &str)]) -> (Raw, i32) {
    let mut raw = Raw::connect(gateway.address).await;
    let own = [("user", USER), ("database", DATABASE)];
    let all: Vec<_> = own.iter().chain(parameters).copied().collect();
    raw.log_in(0, &all, PASSWORD).await;
    let pid = value(&raw.query(PID).await).parse().unwrap();
    (raw, pid)
}

#[tokio::test]
async fn the_first_faithful_client_and_no_other() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (branch, warm) = gateway.warm_lease(&server, &[]).await;
    assert!(!branch.activity().used);
    let (first, pid) = pid_of(&gateway, &[]).await;
    assert_eq!(pid, warm);
    let (_second, pid) = pid_of(&gateway, &[]).await;
    assert_ne!(pid, warm);
    assert_eq!(gateway.metric("gateway_handovers_total"), 1);
    assert_eq!(gateway.metric("gateway_fresh_backends_total"), 1);
    assert_eq!(gateway.metric("gateway_connections{state=\"open\"}"), 2);
    let activity = branch.activity();
    assert_eq!(activity.connections, 2);
    assert!(activity.used && activity.last_client_byte.is_some());
    drop(first);
    eventually(async || branch.activity().connections == 1).await;
    // Another one cannot be offered any more.
    let late = open(server.socket_dir(), ROLE, DATABASE, &[])
        .await
        .unwrap();
    branch.offer_session(late).unwrap_err();
}

#[tokio::test]
async fn an_unfaithful_client_gets_its_own_and_the_warm_one_is_gone_before() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (_branch, warm) = gateway.warm_lease(&server, &[]).await;
    let (mut raw, pid) = pid_of(&gateway, &[("search_path", "elsewhere")]).await;
    assert_ne!(pid, warm);
    // In its first statement it sees no other session.
    let count = raw
        .query("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
        .await;
    assert_eq!(value(&count), "1");
    let shown = raw.query("RESET ALL; SHOW search_path").await;
    assert_eq!(value(&shown), "elsewhere");
}

#[tokio::test]
async fn a_database_can_be_dropped_in_the_first_session() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.warm_lease(&server, &[]).await;
    let dropped = gateway.psql("dbname=postgres", "DROP DATABASE shop").await;
    assert_eq!(dropped.as_deref(), Ok(""));
}

#[tokio::test]
async fn a_profile_matches_and_survives_reset_all() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let profile = [("TimeZone", "Asia/Tokyo"), ("DateStyle", "ISO")];
    let (_branch, warm) = gateway.warm_lease(&server, &profile).await;
    let (mut raw, pid) = pid_of(&gateway, &profile).await;
    assert_eq!(pid, warm);
    let shown = raw.query("RESET ALL; SHOW timezone").await;
    assert_eq!(value(&shown), "Asia/Tokyo");
}

#[tokio::test]
async fn the_application_name_is_set_ahead_of_the_first_query() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (_branch, warm) = gateway.warm_lease(&server, &[]).await;
    let mut raw = Raw::connect(gateway.address).await;
    let name = r"it's a \ name";
    let parameters = [
        ("user", USER),
        ("database", DATABASE),
        ("application_name", name),
    ];
    let seen = raw.log_in(0, &parameters, PASSWORD).await;
    let expected = [b"application_name\0", name.as_bytes(), b"\0"].concat();
    assert!(seen.contains(&(b'S', Bytes::from(expected))));
    let answer = raw
        .query("SELECT current_setting('application_name') || pg_backend_pid()")
        .await;
    assert_eq!(tags(&answer).replace('S', ""), "TDCZ");
    assert_eq!(value(&answer), format!("{name}{warm}"));
}

#[tokio::test]
async fn statements_at_the_hand_over_run_first() {
    let server = Postgres::start().await;
    server
        .sql("ALTER ROLE app SET idle_session_timeout = '1h'")
        .await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let session = open(server.socket_dir(), ROLE, DATABASE, &[])
        .await
        .unwrap();
    let mut raw = Raw::over(session.stream);
    raw.query("SET idle_session_timeout = 0").await;
    let session = branchpool_gateway::Session {
        stream: raw.stream,
        at_hand_over: Some("RESET idle_session_timeout".to_owned()),
        ..session
    };
    let warm = session.cancel_key.process_id;
    branch.offer_session(session).unwrap();
    let (mut raw, pid) = pid_of(&gateway, &[("application_name", "x")]).await;
    assert_eq!(pid, warm);
    assert_eq!(value(&raw.query("SHOW idle_session_timeout").await), "1h");
    assert_eq!(value(&raw.query("SHOW application_name").await), "x");
}

#[tokio::test]
async fn notices_that_nobody_has_seen_are_passed_on() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let branch = gateway.lease(&server);
    let mut session = open(server.socket_dir(), ROLE, DATABASE, &[])
        .await
        .unwrap();
    let notice = Bytes::from_static(b"N\0\0\0\x0dSNOTICE\0\0");
    session.notices.push(notice.clone());
    branch.offer_session(session).unwrap();
    let mut raw = Raw::connect(gateway.address).await;
    let seen = raw.log_in(0, &[("user", USER)], PASSWORD).await;
    assert!(seen.contains(&(b'N', notice.slice(5..))), "{seen:?}");
    assert_eq!(gateway.metric("gateway_handovers_total"), 1);
}

#[tokio::test]
async fn a_dead_session_costs_nothing_but_its_speed() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (_branch, warm) = gateway.warm_lease(&server, &[]).await;
    server
        .sql(&format!("SELECT pg_terminate_backend({warm}, 10000)"))
        .await;
    let (_raw, pid) = pid_of(&gateway, &[]).await;
    assert_ne!(pid, warm);
    assert_eq!(gateway.metric("gateway_handovers_total"), 0);
}

#[tokio::test]
async fn http_sql_comes_first() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (branch, warm) = gateway.warm_lease(&server, &[]).await;
    let guest = branch.admit(Duration::ZERO).await.unwrap();
    let gone = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {warm}");
    assert_eq!(server.sql(&gone).await, "0");
    assert_eq!(branch.activity().connections, 1);
    let (raw, pid) = pid_of(&gateway, &[]).await;
    assert_ne!(pid, warm);
    drop(raw);
    // It is told of the end, which waits for it.
    branch.end();
    guest.ended().await;
    assert!(timeout(Duration::ZERO, branch.closed()).await.is_err());
    drop(guest);
    branch.closed().await;
    assert_eq!(branch.activity().connections, 0);
    assert_eq!(
        branch.admit(Duration::ZERO).await.unwrap_err(),
        Unavailable::Ended
    );
}

#[tokio::test]
async fn profiles_are_learned_from_who_got_in() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    assert_eq!(gateway.directory.profile("pool"), None);
    let zone = [("TimeZone", "Asia/Tokyo")];
    pid_of(&gateway, &zone).await;
    let learned = vec![("TimeZone".to_owned(), "Asia/Tokyo".to_owned())];
    assert_eq!(gateway.directory.profile("pool"), Some(learned.clone()));
    // Neither from a failure nor from who works elsewhere.
    let mut raw = Raw::connect(gateway.address).await;
    raw.log_in(0, &[("user", USER), ("TimeZone", "UTC")], "wrong")
        .await;
    let mut raw = Raw::connect(gateway.address).await;
    let other = [("user", USER), ("database", "postgres")];
    raw.log_in(0, &other, PASSWORD).await;
    assert_eq!(gateway.directory.profile("pool"), Some(learned));
}

#[tokio::test]
async fn twenty_at_once_one_takes_over() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (_branch, warm) = gateway.warm_lease(&server, &[]).await;
    let mut clients = tokio::task::JoinSet::new();
    let gateway = std::sync::Arc::new(gateway);
    for _ in 0..20 {
        let gateway = std::sync::Arc::clone(&gateway);
        clients.spawn(async move { pid_of(&gateway, &[]).await });
    }
    let clients = clients.join_all().await;
    let taken = clients.iter().filter(|(_, pid)| *pid == warm).count();
    assert_eq!(taken, 1);
    assert_eq!(gateway.metric("gateway_handovers_total"), 1);
}
