//! Roles that somebody made inside of the branch.

use crate::{
    fixture::{DATABASE, ENDPOINT, Gateway, Postgres},
    raw::{Raw, code, error, tags, value},
};

fn user(role: &str) -> String {
    format!("{role}.{ENDPOINT}")
}

#[tokio::test]
async fn a_role_of_the_branch_logs_in() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (branch, _) = gateway.warm_lease(&server, &[]).await;
    let made = "CREATE ROLE \"o'ther.one\" LOGIN PASSWORD 'their own'";
    gateway.psql("", made).await.unwrap();
    let user = user("o'ther.one");
    for minor in [0, 9999] {
        let mut raw = Raw::connect(gateway.address).await;
        let parameters = [("user", user.as_str()), ("TimeZone", "Asia/Tokyo")];
        let seen = raw.log_in(minor, &parameters, "their own").await;
        assert!(tags(&seen).starts_with("RRS"), "{seen:?}");
        let answer = raw
            .query("SELECT current_user || current_database() || current_setting('TimeZone')")
            .await;
        assert_eq!(value(&answer), format!("o'ther.one{DATABASE}Asia/Tokyo"));
    }
    let mut raw = Raw::connect(gateway.address).await;
    let parameters = [("user", user.as_str()), ("database", "missing")];
    let seen = raw.log_in(0, &parameters, "their own").await;
    assert_eq!(code(seen.last().unwrap()), "3D000");
    drop(raw);
    crate::fixture::eventually(async || branch.activity().connections == 0).await;
    // psql offers channel binding; this role cannot have it, and does not ask for it.
    let settings = format!(
        "user='{}' password='their own' sslmode=verify-full",
        user.replace('\'', "\\'")
    );
    assert_eq!(gateway.psql(&settings, "SELECT 1").await.unwrap(), "1");
}

#[tokio::test]
async fn a_role_that_is_refused_looks_like_one_of_an_unknown_endpoint() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    gateway
        .psql("", "CREATE ROLE other LOGIN PASSWORD 'their own'")
        .await
        .unwrap();
    gateway.psql("", "CREATE ROLE empty LOGIN").await.unwrap();
    for role in ["other", "empty", "missing"] {
        let refused = async |endpoint: &str| {
            let user = format!("{role}.{endpoint}");
            let mut raw = Raw::connect(gateway.address).await;
            raw.startup(0, &[("user", &user)]).await;
            let mut seen = vec![raw.reply().await.unwrap()];
            seen.extend(raw.prove("wrong").await);
            (seen[0].clone(), tags(&seen), error(seen.last().unwrap()).1)
        };
        let known = refused(ENDPOINT).await;
        let unknown = refused("aaaaaaaaaaaaa").await;
        assert_eq!(known.1, "RE");
        let message = format!("password authentication failed for user \"{}\"", user(role));
        assert_eq!(known.2, message);
        assert_eq!((&known.0, &known.1), (&unknown.0, &unknown.1));
    }
}

/// The server believes that the agent asks, whatever the client's password.
#[tokio::test]
async fn the_role_that_is_trusted_is_not_for_clients() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    // Names are cut at 63 bytes by Postgres, after the gateway has looked.
    let long = format!("{}{}", "p".repeat(63), "x");
    server
        .sql(&format!("CREATE ROLE {} SUPERUSER LOGIN", &long[..63]))
        .await;
    for role in ["postgres", "replication", &long] {
        for password in ["", "postgres"] {
            let mut raw = Raw::connect(gateway.address).await;
            let seen = raw.log_in(0, &[("user", &user(role))], password).await;
            assert_eq!(tags(&seen), "E", "{role}");
            assert_eq!(code(&seen[0]), "28P01", "{role}");
        }
    }
}

#[tokio::test]
async fn a_server_that_trusts_too_much_lets_nobody_in() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (branch, _) = gateway.warm_lease(&server, &[]).await;
    std::fs::write(server.socket_dir().join("hba"), "local all all trust\n").unwrap();
    server.sql("CREATE ROLE other LOGIN SUPERUSER").await;
    server.sql("SELECT pg_reload_conf()").await;
    let trusted = async || {
        crate::fixture::open(server.socket_dir(), "other", DATABASE, &[])
            .await
            .is_ok()
    };
    crate::fixture::eventually(trusted).await;
    let mut raw = Raw::connect(gateway.address).await;
    let seen = raw.log_in(0, &[("user", &user("other"))], "").await;
    assert_eq!(tags(&seen), "E");
    assert_eq!(code(&seen[0]), "28P01");
    // And a stranger has not cost the branch its warm session.
    assert!(!branch.activity().used);
}
