//! Every driver on a branch of a real node: through the gateway with TLS and a password, and directly
//! over the branch's own socket. Needs root.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

#[allow(
    dead_code,
    unused_imports,
    reason = "shared with tests that use more of it"
)]
#[path = "../../../../agent/tests/standalone/node.rs"]
mod node;

use std::path::{Path, PathBuf};

use branchpool_agent_api::Lease;
use branchpool_e2e_drivers::{Config, Driver, Password, Toolbox};

use node::{Node, Setup, pool};

/// With room for rows of 64 MB, of which server and client have several copies.
const MANIFEST: &str = "  resources: {memory: 2Gi}\n  cleanup: {tombstones: {delay: 0s}}\n";

/// Cargo tells a test where the binaries of its own package are only.
fn agent_binary() -> PathBuf {
    let agent =
        Path::new(env!("CARGO_BIN_EXE_tokio-postgres-suite")).with_file_name("branchpool-agent");
    assert!(
        agent.exists(),
        "{} is missing; build it with: cargo build --workspace",
        agent.display()
    );
    agent
}

fn through(node: &Node, lease: &Lease) -> Config {
    Config {
        host: lease.host.clone(),
        port: lease.port,
        user: lease.user.clone(),
        password: lease.password.clone().map(Password),
        database: lease.database.clone(),
        ca: Some(node.run_dir().join("ca.crt")),
        only: Vec::new(),
    }
}

/// As root, whom the branch takes for the pool's role.
fn direct(lease: &Lease) -> Config {
    Config {
        host: lease.socket.clone(),
        port: 5432,
        user: "app".to_owned(),
        password: None,
        database: lease.database.clone(),
        ca: None,
        only: Vec::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_driver_gets_the_same_through_the_gateway() {
    let program = Path::new(env!("CARGO_BIN_EXE_tokio-postgres-suite"));
    let toolbox = Toolbox::ready(program).await.unwrap();
    let node = Node::start(Setup {
        gateway: "127.0.0.1:0",
        ..Setup::new(pool("items", 2, 6, MANIFEST))
    })
    .await;
    node.wait_full("items").await;
    let mut problems = Vec::new();
    for driver in Driver::ALL {
        let uid = driver.to_string();
        let lease = node.lease_patiently("items", &uid).await;
        let (through, direct) = (through(&node, &lease), direct(&lease));
        let compared = toolbox.compare(driver, &through, &direct).await;
        problems.extend(compared.unwrap());
        let example = toolbox.run_example(driver, &lease.uri).await;
        assert_eq!(example.unwrap(), lease.database, "{driver}");
        node.client.release(&uid, None).await.unwrap();
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}
