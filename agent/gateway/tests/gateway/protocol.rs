//! The front end, spoken by hand.

use std::{fs, sync::Arc};

use branchpool_gateway::ALPN;
use bytes::{BufMut, BytesMut};
use tokio::{io::AsyncReadExt, net::TcpStream};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, ServerName, pem::PemObject},
    },
};

use crate::{
    fixture::{DATABASE, Gateway, PASSWORD, Postgres, USER},
    raw::{Raw, code, error, startup_packet, tags, value},
};

const TLS_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
const GSS_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 48];

async fn tls(
    gateway: &Gateway,
    socket: TcpStream,
    alpn: &[&[u8]],
) -> std::io::Result<Raw<TlsStream<TcpStream>>> {
    let pem = fs::read(&gateway.authority).unwrap();
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(&pem).unwrap())
        .unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let name = ServerName::try_from("localhost").unwrap();
    let stream = TlsConnector::from(Arc::new(config))
        .connect(name, socket)
        .await?;
    Ok(Raw::over(stream))
}

#[tokio::test]
async fn encryption_is_negotiated() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let mut raw = Raw::connect(gateway.address).await;
    raw.send(&GSS_REQUEST).await;
    assert_eq!(raw.stream.read_u8().await.unwrap(), b'N');
    raw.send(&TLS_REQUEST).await;
    assert_eq!(raw.stream.read_u8().await.unwrap(), b'S');
    let mut raw = tls(&gateway, raw.stream, &[]).await.unwrap();
    raw.startup(0, &[("user", USER)]).await;
    let (_, offered) = raw.reply().await.unwrap();
    assert_eq!(&offered[4..], b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0");
    raw.prove(PASSWORD).await;
    assert_eq!(value(&raw.query("SELECT 1").await), "1");
}

#[tokio::test]
async fn direct_tls_names_the_protocol() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let socket = TcpStream::connect(gateway.address).await.unwrap();
    let mut raw = tls(&gateway, socket, &[ALPN]).await.unwrap();
    raw.log_in(0, &[("user", USER)], PASSWORD).await;
    assert_eq!(value(&raw.query("SELECT 1").await), "1");
    let socket = TcpStream::connect(gateway.address).await.unwrap();
    assert!(tls(&gateway, socket, &[b"http/1.1"]).await.is_err());
    // Without a name the handshake succeeds for the client; then it is closed.
    let socket = TcpStream::connect(gateway.address).await.unwrap();
    if let Ok(mut raw) = tls(&gateway, socket, &[]).await {
        assert!(raw.stream.read_u8().await.is_err());
    }
}

#[tokio::test]
async fn bytes_ahead_of_the_handshake_are_refused() {
    let gateway = Gateway::start().await;
    let mut raw = Raw::connect(gateway.address).await;
    let injected = startup_packet(0, &[("user", USER)]);
    raw.send(&[&TLS_REQUEST[..], &injected].concat()).await;
    let rest = raw.rest().await;
    assert_eq!(tags(&rest), "E");
    assert_eq!(code(&rest[0]), "08P01");
}

#[tokio::test]
async fn versions_are_negotiated() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    let newest = [0, 3, 0, 2];
    for (minor, options, told) in [
        (0, vec![], None),
        (2, vec![], None),
        (9999, vec![], Some([&newest[..], &[0; 4]].concat())),
        (
            2,
            vec![("_pq_.one", "1"), ("_pq_.two", "2")],
            Some([&newest[..], b"\0\0\0\x02_pq_.one\0_pq_.two\0"].concat()),
        ),
    ] {
        let mut raw = Raw::connect(gateway.address).await;
        let parameters: Vec<_> = [("user", USER)].into_iter().chain(options).collect();
        raw.startup(minor, &parameters).await;
        let mut first = raw.reply().await.unwrap();
        if let Some(told) = told {
            assert_eq!(first, (b'v', told.into()));
            first = raw.reply().await.unwrap();
        }
        assert_eq!(first.0, b'R');
        let seen = raw.prove(PASSWORD).await;
        let (_, key) = seen.iter().find(|(tag, _)| *tag == b'K').unwrap();
        assert_eq!(key.len(), if minor == 0 { 8 } else { 36 });
        assert_eq!(value(&raw.query("SELECT 1").await), "1");
    }
    let mut raw = Raw::connect(gateway.address).await;
    raw.send(&[0, 0, 0, 9, 0, 2, 0, 0, 0]).await;
    let expected = "unsupported frontend protocol 2.0: server supports 3.0 to 3.2";
    let rest = raw.rest().await;
    assert_eq!(error(&rest[0]), ("0A000".to_owned(), expected.to_owned()));
}

#[tokio::test]
async fn a_client_of_a_newer_protocol_takes_over() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (_branch, warm) = gateway.warm_lease(&server, &[]).await;
    let mut raw = Raw::connect(gateway.address).await;
    raw.log_in(2, &[("user", USER)], PASSWORD).await;
    let pid = value(&raw.query("SELECT pg_backend_pid()").await);
    assert_eq!(pid, warm.to_string());
}

#[tokio::test]
async fn broken_starts_are_refused() {
    let gateway = Gateway::start().await;
    for (packet, expected) in [
        (&[0, 0, 0, 7][..], "08P01"),
        (&[0, 0, 0x27, 0x11], "08P01"),
        (&[0xff, 0xff, 0xff, 0xff], "08P01"),
        (&[0, 0, 0, 9, 0, 3, 0, 0, 0], "28000"),
        (&[0, 0, 0, 9, 0, 3, 0, 0, 1], "08P01"),
    ] {
        let mut raw = Raw::connect(gateway.address).await;
        raw.send(packet).await;
        let rest = raw.rest().await;
        assert_eq!(code(&rest[0]), expected, "{packet:?}");
    }
    let mut raw = Raw::connect(gateway.address).await;
    raw.send(&GSS_REQUEST).await;
    assert_eq!(raw.stream.read_u8().await.unwrap(), b'N');
    raw.send(&GSS_REQUEST).await;
    assert_eq!(code(&raw.rest().await[0]), "08P01");
    // As long as is allowed, and in pieces.
    let padding = "x".repeat(9_900);
    let packet = startup_packet(0, &[("user", USER), ("database", &padding)]);
    let mut raw = Raw::connect(gateway.address).await;
    for piece in packet.chunks(1_000) {
        raw.send(piece).await;
    }
    assert_eq!(raw.reply().await.unwrap().0, b'R');
}

#[tokio::test]
async fn broken_proofs_are_refused() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    for message in [
        &b"p\0\0\0\x04"[..],
        b"p\0\0\0\x03",
        b"p\xff\xff\xff\xff",
        b"p\0\0\x04\x01",
        b"Q\0\0\0\x05\0",
        b"p\0\0\0\x16SCRAM-SHA-256\0\xff\xff\xff\xff",
        b"p\0\0\0\x16SCRAM-SHA-256\0\x7f\xff\xff\xff",
        b"p\0\0\0\x0ePLAIN\0\0\0\0\0",
        b"p\0\0\0\x1bSCRAM-SHA-256-PLUS\0\0\0\0\0",
    ] {
        for user in [USER, "app.aaaaaaaaaaaaa"] {
            let mut raw = Raw::connect(gateway.address).await;
            raw.startup(0, &[("user", user)]).await;
            raw.reply().await.unwrap();
            raw.send(message).await;
            let rest = raw.rest().await;
            assert_eq!(code(&rest[0]), "08P01", "{message:?}");
        }
    }
}

#[tokio::test]
async fn databases_by_all_their_names() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.lease(&server);
    for (database, expected) in [
        (None, DATABASE),
        (Some(DATABASE), DATABASE),
        (Some(USER), DATABASE),
        (Some("postgres"), "postgres"),
    ] {
        let mut raw = Raw::connect(gateway.address).await;
        let parameters: Vec<_> = [("user", USER)]
            .into_iter()
            .chain(database.map(|database| ("database", database)))
            .collect();
        raw.log_in(0, &parameters, PASSWORD).await;
        let name = value(&raw.query("SELECT current_database()").await);
        assert_eq!(name, expected);
    }
}

/// A cancel request with the key that a client was given.
fn cancel(key: &[u8]) -> BytesMut {
    let mut packet = BytesMut::new();
    packet.put_u32(u32::try_from(8 + key.len()).unwrap());
    packet.put_u32(80_877_102);
    packet.put_slice(key);
    packet
}

#[tokio::test]
async fn queries_are_cancelled_by_the_gateways_keys() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    let (_branch, warm) = gateway.warm_lease(&server, &[]).await;
    // The first takes over, the second has a fresh backend, the third a long key.
    for minor in [0, 0, 2] {
        let mut raw = Raw::connect(gateway.address).await;
        let seen = raw.log_in(minor, &[("user", USER)], PASSWORD).await;
        let (_, key) = seen.iter().find(|(tag, _)| *tag == b'K').unwrap();
        let pid = value(&raw.query("SELECT pg_backend_pid()").await);
        assert_eq!(key[..4], pid.parse::<i32>().unwrap().to_be_bytes());
        let mut query = BytesMut::new();
        postgres_protocol::message::frontend::query("SELECT pg_sleep(60)", &mut query).unwrap();
        raw.send(&query).await;
        let active = format!(
            "SELECT state FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'PgSleep'"
        );
        crate::fixture::eventually(async || server.sql(&active).await == "active").await;

        let mut wrong = key.to_vec();
        *wrong.last_mut().unwrap() ^= 1;
        let mut canceller = Raw::connect(gateway.address).await;
        canceller.send(&cancel(&wrong)).await;
        assert_eq!(canceller.rest().await, []);
        assert_eq!(server.sql(&active).await, "active");

        // Once plain, once encrypted.
        let mut canceller = Raw::connect(gateway.address).await;
        if minor == 0 {
            canceller.send(&cancel(key)).await;
            assert_eq!(canceller.rest().await, []);
        } else {
            let mut canceller = tls(&gateway, canceller.stream, &[ALPN]).await.unwrap();
            canceller.send(&cancel(key)).await;
            assert_eq!(canceller.rest().await, []);
        }
        let answer = raw.until(b'Z').await;
        let error = answer.iter().find(|(tag, _)| *tag == b'E').unwrap();
        assert_eq!(code(error), "57014");
    }
    assert_ne!(warm, 0);
}

#[tokio::test]
async fn drivers_cancel() {
    let server = Postgres::start().await;
    let gateway = Gateway::start().await;
    gateway.warm_lease(&server, &[]).await;
    let mut config = crate::login::config(&gateway);
    config.ssl_mode(tokio_postgres::config::SslMode::Disable);
    let (client, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let token = client.cancel_token();
    let (result, ()) = tokio::join!(client.execute("SELECT pg_sleep(60)", &[]), async {
        let active = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
        crate::fixture::eventually(async || server.sql(active).await == "1").await;
        token.cancel_query(tokio_postgres::NoTls).await.unwrap();
    });
    let state = result.unwrap_err();
    assert_eq!(
        state.code(),
        Some(&tokio_postgres::error::SqlState::QUERY_CANCELED)
    );
}
