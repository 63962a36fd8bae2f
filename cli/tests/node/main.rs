//! The binary against a real agent with real branches.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_imports)] // Shared with tests that use more of it.
#[path = "../../../agent/tests/standalone/node.rs"]
mod node;
#[allow(dead_code)]
#[path = "../cli/pty.rs"]
mod pty;

use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use branchpool_agent_api::{Lease, LeaseList, LeasePhase, NodeStatus, PoolList, PoolStatus};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    time::timeout,
};
use tokio_postgres::NoTls;

use node::{Node, Setup, ask, pool};
use pty::{PATIENCE, Terminal};

/// Cargo tells a test where the binaries of its own package are only.
fn agent_binary() -> PathBuf {
    let cli = Path::new(env!("CARGO_BIN_EXE_kubectl-branch"));
    let agent = cli.with_file_name("branchpool-agent");
    assert!(
        agent.exists(),
        "{} is missing; build it with: cargo build --workspace",
        agent.display()
    );
    agent
}

/// Runs `kubectl-branch` against the node, with variables around that lead elsewhere.
fn command<S: AsRef<OsStr>>(node: &Node, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-branch"));
    let server = format!("unix:{}", node.run_dir().join("agent.sock").display());
    command
        .args(arguments)
        .env("BRANCHPOOL_SERVER", server)
        .env("PGHOST", "nowhere.invalid")
        .env("PGSERVICE", "production")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

async fn finish(child: Child) -> Output {
    let output = timeout(PATIENCE, child.wait_with_output()).await;
    output.expect("should not hang").unwrap()
}

async fn run(node: &Node, arguments: &[&str]) -> Output {
    finish(command(node, arguments).spawn().unwrap()).await
}

/// What a command prints that must succeed.
async fn printed(node: &Node, arguments: &[&str]) -> String {
    let output = run(node, arguments).await;
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

async fn json<T: serde::de::DeserializeOwned>(node: &Node, arguments: &[&str]) -> T {
    let arguments = [arguments, &["-o", "json"]].concat();
    serde_json::from_str(&printed(node, &arguments).await).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

fn send(signal: Signal, child: &Child) {
    let pid = i32::try_from(child.id().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// A driver gets nothing but the URI.
async fn connect(uri: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(uri, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

const BODIES: &str = "SELECT string_agg(body, ',' ORDER BY id) FROM items";

#[tokio::test(flavor = "multi_thread")]
async fn every_command_from_the_first_minute_to_the_last() {
    let mut node = Node::start(Setup::new(pool("items", 2, 8, ""))).await;
    let first = waited_for_on_a_terminal(&node).await;
    let client = connect(&first).await;
    assert_eq!(ask(&client, BODIES).await.unwrap(), "one,two,three");
    drop(client);
    a_command_finds_its_branch(&node).await;
    psql_opens_a_branch(&node).await;
    a_kept_lease(&node).await;
    what_is_wrong_is_told(&node).await;

    printed(&node, &["release", "first"]).await;
    node.wait_full("items").await;
    let pools: PoolList = json(&node, &["pools"]).await;
    assert_eq!((pools.pools[0].ready, pools.pools[0].leased), (2, 0));
    assert_eq!(node.postmasters().len(), 2);
    assert!(node.stop().success());
    let output = run(&node, &["pools"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("no agent answers"), "{output:?}");
    node.assert_nothing_left();
}

/// The node has just been started. Returns the URI that is printed.
async fn waited_for_on_a_terminal(node: &Node) -> String {
    let arguments = ["lease", "items", "--id", "first", "--wait", "5m"];
    let (mut terminal, child) = Terminal::run(&command(node, arguments));
    terminal.until("default/items: the golden image is being built");
    terminal.until("default/items: 0 of 2 ready");
    terminal.until("\r\u{1b}[Kpostgresql://");
    assert_eq!(finish(child).await.status.code(), Some(0));
    terminal.until("first\r\n");
    let (_, uri) = terminal.seen.rsplit_once("\r\u{1b}[K").unwrap();
    uri.lines().next().unwrap().to_owned()
}

async fn a_command_finds_its_branch(node: &Node) {
    let script = r#"
        psql -Atc "INSERT INTO items VALUES (4, 'mine')" &&
        psql -d "$DATABASE_URL" -Atc "SELECT body FROM items WHERE id = 4" &&
        psql "host=$PGHOST port=$PGPORT dbname=$PGDATABASE user=$PGUSER" -Atc "SELECT count(*) FROM items" &&
        echo "$DATABASE_URL" && echo "$BRANCHPOOL_LEASE" && exit 7"#;
    let output = run(
        node,
        &[
            "lease", "items", "--id", "script", "--wait", "5m", "--", "sh", "-c", script,
        ],
    )
    .await;
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let out = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = out.lines().collect();
    let ended = node.client.get_lease("script").await.unwrap();
    assert_eq!(lines, ["INSERT 0 1", "mine", "4", &*ended.uri, "script"]);
    assert_eq!(ended.phase, LeasePhase::Released);

    for (id, script, code) in [
        ("fails", "psql -c 'SELECT 1/0'", 1),
        (
            "cut",
            r#"psql -c "SELECT pg_terminate_backend(pg_backend_pid())""#,
            2,
        ),
        ("killed", "kill -KILL $$", 137),
    ] {
        let arguments = [
            "lease", "items", "--id", id, "--wait", "5m", "--", "sh", "-c", script,
        ];
        let output = run(node, &arguments).await;
        assert_eq!(output.status.code(), Some(code), "{id}: {output:?}");
        let ended = node.client.get_lease(id).await.unwrap();
        assert_eq!(ended.phase, LeasePhase::Released, "{id}");
    }
}

async fn psql_opens_a_branch(node: &Node) {
    let on_lease = printed(node, &["psql", "first", "--", "-Atc", BODIES]).await;
    assert_eq!(on_lease, "one,two,three\n");
    let remove = [
        "psql",
        "items",
        "--wait",
        "5m",
        "--",
        "-Atc",
        "DELETE FROM items",
    ];
    assert_eq!(printed(node, &remove).await, "DELETE 3\n");
    let look = [
        "psql",
        "default/items",
        "--wait",
        "5m",
        "--",
        "-Atc",
        BODIES,
    ];
    assert_eq!(printed(node, &look).await, "one,two,three\n");
    let leases: LeaseList = json(node, &["ls"]).await;
    let bound = leases
        .leases
        .iter()
        .filter(|lease| lease.phase == LeasePhase::Bound);
    let bound: Vec<_> = bound.map(|lease| &*lease.uid).collect();
    assert_eq!(bound, ["first"], "psql gave back what it took");
}

async fn a_kept_lease(node: &Node) {
    node.wait_full("items").await;
    let lease: Lease = json(
        node,
        &[
            "lease", "items", "--id", "kept", "--ttl", "10m", "--holder", "review",
        ],
    )
    .await;
    assert_eq!(lease.expires_at - lease.bound_at, 600_000);
    let client = connect(&lease.uri).await;
    ask(&client, "DELETE FROM items").await.unwrap();

    let table = printed(node, &["ls"]).await;
    let row = table.lines().find(|row| row.starts_with("kept ")).unwrap();
    for cell in ["default/items", "Bound", &lease.branch, "review"] {
        assert!(row.contains(cell), "{cell}: {table}");
    }
    let yaml = printed(node, &["ls", "-o", "yaml"]).await;
    let listed: LeaseList = serde_saphyr::from_str(&yaml).unwrap();
    assert!(listed.leases.contains(&lease), "{yaml}");

    let renewed: Lease = json(node, &["renew", "kept", "--ttl", "20m"]).await;
    assert!(renewed.expires_at >= lease.bound_at + 1_200_000);
    node.wait_full("items").await;
    let said = printed(node, &["reset", "kept"]).await;
    let reset = node.client.get_lease("kept").await.unwrap();
    assert_eq!(
        said,
        format!("lease kept reset, now on branch {}\n", reset.branch)
    );
    assert_ne!(reset.branch, lease.branch);
    assert_eq!((&reset.uri, &reset.host), (&lease.uri, &lease.host));
    assert_eq!(
        ask(&connect(&lease.uri).await, BODIES).await.unwrap(),
        "one,two,three"
    );
    assert_eq!(
        printed(node, &["release", "kept"]).await,
        "lease kept released\n"
    );
    assert!(
        tokio_postgres::connect(&lease.uri, NoTls).await.is_err(),
        "the address is gone"
    );

    node.wait_full("items").await;
    let table = printed(node, &["pools"]).await;
    assert!(table.contains("default     items   2/2 "), "{table}");
    let pool: PoolStatus = json(node, &["pools", "items"]).await;
    assert_eq!((pool.ready, pool.golden.generation), (2, 1));
    let status: NodeStatus = json(node, &["status"]).await;
    assert!(status.ready && status.pools.len() == 1);
    let yaml = printed(node, &["status", "-o", "yaml"]).await;
    let status: NodeStatus = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(status.provider, "btrfs");
}

async fn what_is_wrong_is_told(node: &Node) {
    for arguments in [
        &["lease", "itens", "--wait", "10m"][..],
        &["pools", "itens"],
        &["psql", "itens"],
    ] {
        let output = run(node, arguments).await;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let says = "there is no pool default/itens; there are default/items";
        assert!(stderr(&output).contains(says), "{output:?}");
    }
    let output = run(node, &["lease", "items", "--ttl", "300d"]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("lease.maxTTL"), "{output:?}");
    for arguments in [
        &["reset", "kept"][..],
        &["renew", "kept"],
        &["psql", "kept"],
    ] {
        let output = run(node, arguments).await;
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("Released"), "{output:?}");
    }

    // Manifests that are not taken in.
    let file = node.manifest_dir().join("pools.yaml");
    let good = fs::read_to_string(&file).unwrap();
    fs::write(&file, good.replace("replicas: 2", "replicas: -2")).unwrap();
    let until_status = async |wanted: bool| {
        while printed(node, &["status"]).await.contains("spec.replicas") != wanted {}
    };
    timeout(PATIENCE, until_status(true)).await.unwrap();
    let status = printed(node, &["status"]).await;
    assert!(
        status.contains("Manifests") && status.contains("pools.yaml"),
        "{status}"
    );
    fs::write(&file, good).unwrap();
    timeout(PATIENCE, until_status(false)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_the_command_and_gives_the_branch_back() {
    let mut node = Node::start(Setup::new(pool("items", 2, 8, ""))).await;
    node.wait_full("items").await;
    for (id, signal) in [
        ("int", Signal::INT),
        ("term", Signal::TERM),
        ("hup", Signal::HUP),
    ] {
        let mut child = holding(&node, id, &[]).await;
        // Kept open: its end would end the command as well.
        let stdin = child.stdin.take();
        let lease = node.client.get_lease(id).await.unwrap();
        let server = node.postmaster_of(&lease.branch).unwrap();
        send(signal, &child);
        let output = finish(child).await;
        drop(stdin);
        assert_eq!(
            output.status.code(),
            Some(128 + signal.as_raw()),
            "{id}: {output:?}"
        );
        let ended = node.client.get_lease(id).await.unwrap();
        assert_eq!(ended.phase, LeasePhase::Released, "{id}");
        node::wait_gone(server);
        node.wait_full("items").await;
    }

    // Nothing can be done about SIGKILL but to let the time run out.
    let mut child = holding(&node, "kill", &["--ttl", "2s"]).await;
    child.kill().await.unwrap();
    let ended = node
        .wait_lease("kill", |lease| lease.phase != LeasePhase::Bound)
        .await;
    assert_eq!(ended.phase, LeasePhase::Expired);
    node.wait_full("items").await;
    assert_eq!(node.postmasters().len(), 2);
    assert!(node.stop().success());
    node.assert_nothing_left();
}

/// A command that has used its branch and then waits, until its input ends at the latest.
async fn holding(node: &Node, id: &str, options: &[&str]) -> Child {
    let script = "psql -Atc 'SELECT 1' && exec cat";
    let leasing = ["lease", "items", "--id", id];
    let arguments = [&leasing, options, &["--", "sh", "-c", script]].concat();
    let mut command = command(node, &arguments);
    let mut child = command
        .process_group(0)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let first = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
    assert_eq!(first.as_deref(), Some("1"));
    child
}
