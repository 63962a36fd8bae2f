//! The API by mutual TLS: who is let in, and what a replacement of certificates does to whoever is in.

use branchpool_agent::http::Tcp;
use branchpool_agent_api::{Change, Client, ClientError, LeaseRequest, PoolName};
use branchpool_tls::ca::Usage;
use branchpool_trust::plan::Step;
use time::Duration;
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    client::whole_life,
    message::Request,
    raw::{Running, patiently},
    service::pool,
    trust::{Agent, Operator, Serving, client_with, in_time, served, showing},
};

/// An operator, its listener, and the API of an agent that it has certified for `node-1`.
struct Pair {
    operator: Operator,
    serving: Serving,
    agent: Agent,
    server: Running,
}

impl Pair {
    async fn new() -> Self {
        let operator = Operator::new();
        let serving = operator.serve().await;
        let agent = Agent::enrolled(&operator, &serving, "node-1").await;
        let config = agent.enrolment.server.clone();
        let server = Running::start(|options| {
            options.tcp = Some(Tcp::Tls {
                address: "127.0.0.1:0".parse().unwrap(),
                config,
            });
            options.health = Some("127.0.0.1:0".parse().unwrap());
        })
        .await;
        Self {
            operator,
            serving,
            agent,
            server,
        }
    }

    fn client(&self) -> Client {
        self.operator.client(self.server.tcp.unwrap(), "node-1")
    }

    async fn refused(&self, client: &Client) -> String {
        let error = patiently(client.node()).await.unwrap_err();
        assert!(error.is_transport(), "{error}");
        error.to_string()
    }

    async fn stop(self) {
        self.server.stop().await;
        self.serving.stop().await;
    }
}

fn in_a_day() -> Duration {
    Duration::DAY
}

#[tokio::test]
async fn the_operator_does_everything_and_no_token_is_wanted() {
    let pair = Pair::new().await;
    whole_life(&pair.client()).await;
    pair.stop().await;
}

#[tokio::test]
async fn whoever_is_not_the_operator_is_refused() {
    let pair = Pair::new().await;
    let operator = &pair.operator;
    let at = pair.server.tcp.unwrap();
    let bundle = operator.bundle();
    let forged = |name, usage, term| {
        let shown = operator.forge(name, usage, term);
        client_with(at, "node-1", showing(&bundle, Some(shown)))
    };
    let right = forged("operator.branchpool", Usage::Client, in_a_day());
    right.node().await.unwrap();

    let nothing = client_with(at, "node-1", showing(&bundle, None));
    let says = pair.refused(&nothing).await;
    assert!(says.contains("CertificateRequired"), "{says}");
    // Another operator, of whose bundle this agent has never heard.
    let other = Operator::new();
    let stranger = other.forge("operator.branchpool", Usage::Client, in_a_day());
    let stranger = client_with(at, "node-1", showing(&bundle, Some(stranger)));
    let says = pair.refused(&stranger).await;
    assert!(
        says.contains("UnknownCA") || says.contains("DecryptError"),
        "{says}"
    );
    // An agent's own certificate, which its CA did sign.
    let agent = forged("node-2.agent.branchpool", Usage::Server, in_a_day());
    pair.refused(&agent).await;
    let wrong_usage = forged("operator.branchpool", Usage::Server, in_a_day());
    pair.refused(&wrong_usage).await;
    let wrong_name = forged("node-2.agent.branchpool", Usage::Client, in_a_day());
    pair.refused(&wrong_name).await;
    let expired = forged("operator.branchpool", Usage::Client, -Duration::MINUTE);
    let says = pair.refused(&expired).await;
    assert!(says.contains("CertificateExpired"), "{says}");

    // No TLS at all.
    let get = Request::new("GET", "/v1/node");
    let mut plain = TcpStream::connect(at).await.unwrap();
    plain.write_all(get.head().as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = patiently(tokio::io::AsyncReadExt::read_to_end(
        &mut plain,
        &mut answer,
    ))
    .await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    right.node().await.unwrap();
    pair.stop().await;
}

#[tokio::test]
async fn one_node_does_not_stand_for_another() {
    let pair = Pair::new().await;
    let at = pair.server.tcp.unwrap();
    let expected_elsewhere = pair.operator.client(at, "node-2");
    let error = patiently(expected_elsewhere.node()).await.unwrap_err();
    assert!(matches!(error, ClientError::Handshake { .. }), "{error}");
    assert!(
        error.to_string().contains("node-2.agent.branchpool"),
        "{error}"
    );
    // Nor does an agent of another operator.
    let other = Operator::new();
    let error = patiently(other.client(at, "node-1").node())
        .await
        .unwrap_err();
    assert!(matches!(error, ClientError::Handshake { .. }), "{error}");
    assert!(pair.client().node().await.is_ok());
    pair.stop().await;
}

#[tokio::test]
async fn the_operator_believes_no_certificate_that_is_over_or_for_a_client() {
    let operator = Operator::new();
    let name = "node-1.agent.branchpool";
    for (usage, term, says) in [
        (Usage::Server, -Duration::MINUTE, "expired"),
        (Usage::Client, in_a_day(), "key usage"),
        (Usage::Server, in_a_day(), ""),
    ] {
        let config = served(operator.forge(name, usage, term));
        let server = Running::start(|options| {
            options.tcp = Some(Tcp::Tls {
                address: "127.0.0.1:0".parse().unwrap(),
                config,
            });
        })
        .await;
        let client = operator.client(server.tcp.unwrap(), "node-1");
        match patiently(client.node()).await {
            Ok(_) => assert_eq!(says, "", "it was believed"),
            Err(error) => {
                assert!(matches!(error, ClientError::Handshake { .. }), "{error}");
                assert!(!says.is_empty(), "{error}");
                let error = error.to_string().to_lowercase();
                assert!(error.contains(says), "{error}");
            }
        }
        server.stop().await;
    }
}

#[tokio::test]
async fn connections_and_watches_go_on_while_the_ca_is_replaced() {
    let mut pair = Pair::new().await;
    let client = pair.client();
    let log = pair.server.service.log.clone();
    let mut watch = client.watch(None).await.unwrap();
    assert!(patiently(watch.next()).await.unwrap().is_some());
    let desired = branchpool_agent_api::DesiredPool {
        namespace: "default".to_owned(),
        name: "shop".to_owned(),
        generation: 1,
        epoch: None,
        spec: serde_json::json!({"replicas": 1}),
    };
    client.apply_pool("p1", &desired).await.unwrap();
    let request = LeaseRequest {
        pool: PoolName::new("default", "shop"),
        ttl_seconds: Some(60),
        holder: None,
        epoch: None,
    };
    client.lease("before", &request).await.unwrap();
    let old = pair
        .operator
        .forge("operator.branchpool", Usage::Client, in_a_day());
    let first = pair.operator.authority().bundle().signing();
    for (number, step) in [Step::Introduce, Step::Switch, Step::Retire]
        .iter()
        .enumerate()
    {
        pair.operator.take(step).await;
        pair.operator.write_bundle(&pair.agent.bundle());
        let bundle = pair.operator.authority().bundle();
        pair.agent
            .wait(|status| {
                let trust = status.trust.as_ref().unwrap();
                trust.trusts == bundle.ids() && trust.issuer == bundle.signing()
            })
            .await;
        // The kept connection and a new one, both.
        client
            .lease(&format!("kept-{number}"), &request)
            .await
            .unwrap();
        let new = pair.client();
        new.lease(&format!("new-{number}"), &request).await.unwrap();
        log.pool(pool(
            "p9",
            PoolName::new("default", "other"),
            u32::try_from(number).unwrap(),
        ));
        loop {
            let event = patiently(watch.next()).await.unwrap().unwrap();
            if matches!(event.change, Change::Pool(pool) if pool.uid == "p9") {
                break;
            }
        }
    }
    assert_ne!(pair.operator.authority().bundle().signing(), first);
    assert_eq!(client.leases().await.unwrap().len(), 7);
    // What the old CA has signed opens no connection any more.
    let shown = showing(&pair.operator.bundle(), Some(old));
    let late = client_with(pair.server.tcp.unwrap(), "node-1", shown);
    let says = pair.refused(&late).await;
    assert!(says.contains("UnknownCA"), "{says}");
    drop(watch);
    in_time(pair.stop()).await;
}

#[tokio::test]
async fn health_has_an_address_of_its_own_and_nothing_else_there() {
    let pair = Pair::new().await;
    let health = pair.server.health.unwrap();
    let ask = async |path: &str| {
        let stream = TcpStream::connect(health).await.unwrap();
        Request::new("GET", path).send(stream).await
    };
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(ask(path).await.status, 200, "{path}");
    }
    for path in [
        "/v1/node",
        "/v1/leases",
        "/sql",
        "/",
        "/healthz/",
        "//metrics",
        "/%6detrics",
    ] {
        assert_eq!(ask(path).await.status, 404, "{path}");
    }
    pair.server.service.not_ready("no certificate yet");
    let reply = ask("/readyz").await;
    assert_eq!(reply.status, 503);
    pair.stop().await;
}
