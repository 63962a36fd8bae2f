//! What strangers can do to others.

use std::time::Duration;

use branchpool_gateway::Limits;
use tokio::io::AsyncWriteExt;

use crate::{
    fixture::{Gateway, PASSWORD, Postgres, USER, eventually},
    raw::{Raw, code, value},
};

const SLOW: usize = 500;

/// Clients that send a byte a second, of an endless packet.
async fn slow_clients(gateway: &Gateway) -> tokio::task::JoinSet<()> {
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..SLOW {
        let mut raw = Raw::connect(gateway.address).await;
        clients.spawn(async move {
            let packet = [0, 0, 0x27, 0x10, 0, 3, 0, 0];
            for byte in packet.iter().chain(std::iter::repeat(&b'x')) {
                if raw.stream.write_all(&[*byte]).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
    }
    clients
}

#[tokio::test]
async fn five_hundred_slow_clients_do_not_stop_the_next() {
    let server = Postgres::start().await;
    let few = Limits {
        unauthenticated_per_address: 100,
        ..Limits::default()
    };
    let fewer = Limits {
        unauthenticated: 50,
        ..Limits::default()
    };
    for (limits, left) in [(Limits::default(), 500), (few, 100), (fewer, 50)] {
        let gateway = Gateway::with(limits, true).await;
        gateway.lease(&server);
        let _slow = slow_clients(&gateway).await;
        let startup = "gateway_connections{state=\"startup\"}";
        eventually(async || gateway.metric(startup) == left).await;
        let mut raw = Raw::connect(gateway.address).await;
        raw.log_in(0, &[("user", USER)], PASSWORD).await;
        assert_eq!(value(&raw.query("SELECT 1").await), "1");
    }
}

#[tokio::test]
async fn slow_clients_are_dropped() {
    let limits = Limits {
        startup_time: Duration::from_millis(200),
        ..Limits::default()
    };
    let gateway = Gateway::with(limits, true).await;
    for sent in [
        &b""[..],
        b"\0\0",
        b"\x16\x03\x01",
        b"\0\0\0\x08\x04\xd2\x16\x2f",
    ] {
        let mut raw = Raw::connect(gateway.address).await;
        raw.send(sent).await;
        let mut rest = Vec::new();
        // Ends: nothing else is asked of it.
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut raw.stream, &mut rest).await;
    }
    let mut raw = Raw::connect(gateway.address).await;
    raw.startup(0, &[("user", USER)]).await;
    assert_eq!(raw.reply().await.unwrap().0, b'R');
    assert_eq!(raw.rest().await, []);
}

#[tokio::test]
async fn connections_are_counted_in_all() {
    let server = Postgres::start().await;
    let limits = Limits {
        connections: 2,
        ..Limits::default()
    };
    let gateway = Gateway::with(limits, true).await;
    gateway.lease(&server);
    let mut first = Raw::connect(gateway.address).await;
    first.log_in(0, &[("user", USER)], PASSWORD).await;
    let second = Raw::connect(gateway.address).await;
    let mut third = Raw::connect(gateway.address).await;
    assert_eq!(code(&third.rest().await[0]), "53300");
    drop(second);
    eventually(async || gateway.psql("sslmode=disable", "SELECT 1").await.is_ok()).await;
    assert_eq!(value(&first.query("SELECT 1").await), "1");
}

/// Opens more sessions than the server has, all at once: each gets one or the server's own refusal.
#[tokio::test]
async fn a_full_branch_refuses_and_hurts_no_other() {
    let (full, other) = (Postgres::start().await, Postgres::start().await);
    let gateway = Gateway::start().await;
    gateway.lease(&full);
    let mut clients = tokio::task::JoinSet::new();
    let address = gateway.address;
    for _ in 0..150 {
        clients.spawn(async move {
            let mut raw = Raw::connect(address).await;
            let seen = raw.log_in(0, &[("user", USER)], PASSWORD).await;
            let last = seen.last().unwrap();
            let refused = last.0 == b'E';
            assert!(!refused || code(last) == "53300", "{last:?}");
            (raw, refused)
        });
    }
    let clients = clients.join_all().await;
    let refused = clients.iter().filter(|(_, refused)| *refused).count();
    assert!((50..=60).contains(&refused), "{refused}");
    gateway.lease(&other);
    assert_eq!(gateway.psql("", "SELECT 1").await.unwrap(), "1");
}
