//! The binary against the agent's HTTP server, with a service held in memory behind it.

#![allow(clippy::unwrap_used)]

mod pty;
mod terminal;

#[path = "../../../agent/tests/http/service.rs"]
mod service;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Output, Stdio},
    time::Duration,
};

use branchpool_agent::http::{Options, Server, Service};
use branchpool_agent_api::{DesiredPool, Lease, LeaseList, LeasePhase};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    time::timeout,
};

use pty::PATIENCE;
use service::InMemory;

struct Agent {
    service: InMemory,
    directory: TempDir,
}

impl Agent {
    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let service = InMemory::new();
        let options = Options {
            socket: Some(directory.path().join("agent.sock")),
            ..Options::default()
        };
        let server = Server::bind(&options).await.unwrap();
        // Ends with the test's runtime.
        tokio::spawn(server.serve(service.clone(), std::future::pending()));
        Self { service, directory }
    }

    /// With a pool `default/shop` that has a branch ready.
    async fn with_shop() -> Self {
        let agent = Self::start().await;
        agent.shop(1).await;
        agent
    }

    async fn shop(&self, ready: u32) {
        let desired = DesiredPool {
            namespace: "default".to_owned(),
            name: "shop".to_owned(),
            generation: 1,
            epoch: None,
            spec: json!({ "replicas": ready }),
        };
        let uid = "p1".to_owned();
        self.service.apply_pool(uid, desired).await.unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("agent.sock")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-branch"));
        command
            .args(arguments)
            .env(
                "BRANCHPOOL_SERVER",
                format!("unix:{}", self.socket().display()),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn run(&self, arguments: &[&str]) -> Output {
        finish(self.command(arguments).spawn().unwrap()).await
    }

    fn phase(&self, id: &str) -> Option<LeasePhase> {
        Some(self.service.get_lease(id)?.phase)
    }

    async fn until_attempted(&self) {
        let attempted = async {
            while self.service.attempts() == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, attempted).await.unwrap();
    }
}

async fn finish(child: Child) -> Output {
    let output = timeout(PATIENCE, child.wait_with_output()).await;
    output.expect("should not hang").unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{output:?}"))
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

fn send(signal: Signal, child: &Child) {
    let pid = i32::try_from(child.id().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

#[tokio::test]
async fn a_command_gets_its_branch_and_gives_it_back() {
    let agent = Agent::with_shop().await;
    let script = r#"printf '%s\n' "$DATABASE_URL" "$PGHOST" "$PGPORT" "$PGDATABASE" "$PGUSER" "$PGSSLMODE" "$BRANCHPOOL_LEASE" "[$PGSERVICE$PGHOSTADDR$PGPASSWORD]"; exit 7"#;
    let mut command = agent.command(&["lease", "shop", "--id", "l1", "--", "sh", "-c", script]);
    for misleading in ["PGSERVICE", "PGHOSTADDR", "PGPASSWORD"] {
        command.env(misleading, "production");
    }
    let output = finish(command.spawn().unwrap()).await;
    assert_eq!(code(&output), 7, "{output:?}");
    let expected = "postgresql:///app?host=/run/e\n/run/e\n5432\napp\napp\ndisable\nl1\n[]\n";
    assert_eq!(stdout(&output), expected);
    assert_eq!(agent.phase("l1"), Some(LeasePhase::Released));
}

#[tokio::test]
async fn ends_of_every_kind_are_passed_on() {
    let agent = Agent::with_shop().await;
    for (id, command, expected) in [
        ("ok", &["true"][..], 0),
        ("killed", &["sh", "-c", "kill -KILL $$"], 137),
        ("missing", &["no-such-program-anywhere"], 127),
        ("directory", &["/"], 126),
    ] {
        let mut arguments = vec!["lease", "shop", "--id", id, "--"];
        arguments.extend(command);
        let output = agent.run(&arguments).await;
        assert_eq!(code(&output), expected, "{id}: {output:?}");
        assert_eq!(agent.phase(id), Some(LeasePhase::Released), "{id}");
    }
}

#[tokio::test]
async fn signals_reach_the_command_and_its_answer_counts() {
    let agent = Agent::with_shop().await;
    for (name, signal) in [
        ("TERM", Signal::TERM),
        ("INT", Signal::INT),
        ("HUP", Signal::HUP),
    ] {
        let script = format!("trap 'exit 5' {name}; echo started; while :; do sleep 0.05; done");
        let arguments = ["lease", "shop", "--id", name, "--", "sh", "-c", &script];
        // In a group of its own, as no terminal's keys are meant here.
        let mut child = agent.command(&arguments).process_group(0).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
        assert_eq!(first.as_deref(), Some("started"));
        send(signal, &child);
        let output = finish(child).await;
        assert_eq!(code(&output), 5, "{name}: {output:?}");
        assert_eq!(agent.phase(name), Some(LeasePhase::Released), "{name}");
    }
}

#[tokio::test]
async fn an_ignored_hangup_stays_ignored() {
    let agent = Agent::with_shop().await;
    let binary = env!("CARGO_BIN_EXE_kubectl-branch");
    let inner = format!(
        "trap '' HUP; exec {binary} lease shop --id l1 -- sh -c 'echo started; read line; echo \"got $line\"'"
    );
    let mut command = agent.command(&[]);
    let environment: Vec<_> = command
        .as_std()
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
        .collect();
    command = Command::new("sh");
    let mut child = command
        .args(["-c", &inner])
        .envs(environment)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
    assert_eq!(first.as_deref(), Some("started"));
    send(Signal::HUP, &child);
    let mut input = child.stdin.take().unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut input, b"more\n")
        .await
        .unwrap();
    drop(input);
    let second = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
    assert_eq!(second.as_deref(), Some("got more"));
    assert_eq!(code(&finish(child).await), 0);
}

#[tokio::test]
async fn the_lease_is_renewed_while_the_command_runs() {
    let agent = Agent::with_shop().await;
    let arguments = ["lease", "shop", "--id", "l1", "--ttl", "1s", "--", "cat"];
    let mut command = agent.command(&arguments);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let renewed_twice = async {
        let expires_at = || Some(agent.service.get_lease("l1")?.expires_at);
        while expires_at().is_none_or(|at| at < 4_000) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, renewed_twice).await.unwrap();
    drop(child.stdin.take());
    assert_eq!(code(&finish(child).await), 0);
    assert_eq!(agent.phase("l1"), Some(LeasePhase::Released));
}

#[tokio::test]
async fn a_signal_while_waiting_ends_the_wait() {
    let agent = Agent::start().await;
    agent.shop(0).await;
    let child = agent.command(&["lease", "shop"]).spawn().unwrap();
    agent.until_attempted().await;
    send(Signal::TERM, &child);
    let output = finish(child).await;
    assert_eq!(code(&output), 143, "{output:?}");
    assert!(agent.service.leases().is_empty());
}

#[tokio::test]
async fn a_branch_that_becomes_ready_is_taken() {
    let agent = Agent::start().await;
    agent.shop(0).await;
    let arguments = ["lease", "shop", "--id", "l1", "--wait", "10m"];
    let child = agent.command(&arguments).spawn().unwrap();
    agent.until_attempted().await;
    agent.shop(1).await;
    let output = finish(child).await;
    assert_eq!(code(&output), 0, "{output:?}");
    assert_eq!(stdout(&output), "postgresql:///app?host=/run/e\nl1\n");
    assert_eq!(agent.phase("l1"), Some(LeasePhase::Bound));
}

#[tokio::test]
async fn waiting_ends_in_time_with_a_code_of_its_own() {
    let agent = Agent::start().await;
    agent.shop(0).await;
    for wait in ["0s", "1s"] {
        let output = agent.run(&["lease", "shop", "--wait", wait]).await;
        assert_eq!(code(&output), 3, "{output:?}");
        let says = format!("no branch of pool default/shop became ready within {wait}");
        assert!(stderr(&output).contains(&says), "{output:?}");
    }
}

#[tokio::test]
async fn wrong_pools_are_refused_at_once_with_those_there_are() {
    let agent = Agent::with_shop().await;
    for arguments in [
        &["lease", "shap", "--wait", "10m"][..],
        &["lease", "-n", "staging", "shop", "--wait", "10m"],
        &["pools", "shap"],
        &["psql", "shap"],
    ] {
        let output = agent.run(arguments).await;
        assert_eq!(code(&output), 1, "{output:?}");
        assert!(stderr(&output).contains("default/shop"), "{output:?}");
    }
}

#[tokio::test]
async fn without_an_agent_there_is_a_sentence() {
    let agent = Agent::start().await;
    let nowhere = format!("unix:{}", agent.directory.path().join("no.sock").display());
    for arguments in [&["status"][..], &["lease", "shop", "--wait", "10m"]] {
        let mut command = agent.command(arguments);
        let output = finish(command.env("BRANCHPOOL_SERVER", &nowhere).spawn().unwrap()).await;
        assert_eq!(code(&output), 1, "{output:?}");
        let says = format!("no agent answers at {nowhere}");
        assert!(stderr(&output).contains(&says), "{output:?}");
    }
}

#[tokio::test]
async fn a_kept_lease_is_listed_renewed_reset_and_released() {
    let agent = Agent::with_shop().await;
    let output = agent
        .run(&[
            "lease", "shop", "--ttl", "90s", "--holder", "me", "-o", "json",
        ])
        .await;
    let lease: Lease = serde_json::from_str(stdout(&output)).unwrap();
    assert!(lease.uid.starts_with("shop-"), "{lease:?}");
    assert_eq!(
        (lease.holder.as_deref(), lease.expires_at),
        (Some("me"), 91_000)
    );
    let id = &*lease.uid;

    let output = agent.run(&["ls"]).await;
    assert!(stdout(&output).starts_with("ID "), "{output:?}");
    assert!(stdout(&output).contains(id), "{output:?}");
    let output = agent.run(&["ls", "-n", "staging"]).await;
    assert_eq!(stdout(&output), "No leases found.\n");

    let output = agent.run(&["renew", id, "--ttl", "2m", "-o", "yaml"]).await;
    assert!(
        stdout(&output).contains("expiresAt: 211000\n"),
        "{output:?}"
    );
    let output = agent.run(&["reset", id]).await;
    assert_eq!(
        stdout(&output),
        format!("lease {id} reset, now on branch branch-1\n")
    );
    assert!(
        agent
            .service
            .get_lease(id)
            .unwrap()
            .observed_reset_token
            .is_some()
    );

    let output = agent.run(&["release", "unknown", id]).await;
    assert_eq!(code(&output), 1);
    assert_eq!(stdout(&output), format!("lease {id} released\n"));
    assert!(
        stderr(&output).contains("there is no lease unknown"),
        "{output:?}"
    );
    let output = agent.run(&["release", id, "-o", "json"]).await;
    assert_eq!(code(&output), 0);
    let list: LeaseList = serde_json::from_str(stdout(&output)).unwrap();
    assert_eq!(list.leases[0].phase, LeasePhase::Released);

    let output = agent
        .run(&["lease", "shop", "--id", id, "--", "true"])
        .await;
    assert_eq!(code(&output), 1);
    assert!(
        stderr(&output).contains("is Released already"),
        "{output:?}"
    );
}

#[tokio::test]
async fn pools_and_the_node_are_shown() {
    let agent = Agent::with_shop().await;
    let output = agent.run(&["pools"]).await;
    assert!(stdout(&output).starts_with("NAMESPACE "), "{output:?}");
    assert!(
        stdout(&output).contains("default     shop   1/1"),
        "{output:?}"
    );
    let output = agent.run(&["pools", "shop", "-o", "json"]).await;
    assert!(
        stdout(&output).contains("\"maxBranches\": 100"),
        "{output:?}"
    );
    let output = agent.run(&["status"]).await;
    assert!(stdout(&output).contains("Isolation:  Full\n"), "{output:?}");
}

#[tokio::test]
async fn psql_gets_a_branch_of_its_own_or_that_of_a_lease() {
    let agent = Agent::with_shop().await;
    let psql = agent.directory.path().join("psql");
    fs::write(&psql, "#!/bin/sh\necho \"$BRANCHPOOL_LEASE $*\"\n").unwrap();
    fs::set_permissions(&psql, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!(
        "{}:{}",
        agent.directory.path().display(),
        std::env::var("PATH").unwrap()
    );
    let run = async |arguments: &[&str]| {
        let mut command = agent.command(arguments);
        finish(command.env("PATH", &path).spawn().unwrap()).await
    };

    agent.run(&["lease", "shop", "--id", "l1"]).await;
    let output = run(&["psql", "l1", "--", "-c", "select 1"]).await;
    assert_eq!(stdout(&output), "l1 -c select 1\n", "{output:?}");
    assert_eq!(
        agent.phase("l1"),
        Some(LeasePhase::Bound),
        "not psql's to release"
    );

    let output = run(&["psql", "default/shop"]).await;
    let id = stdout(&output).trim();
    assert!(id.starts_with("shop-"), "{output:?}");
    assert_eq!(agent.phase(id), Some(LeasePhase::Released));
}

#[tokio::test]
async fn completions_are_made_for_shells() -> io::Result<()> {
    let agent = Agent::start().await;
    for shell in ["bash", "zsh", "fish"] {
        let output = agent.run(&["completion", shell]).await;
        assert_eq!(code(&output), 0);
        assert!(stdout(&output).contains("release"), "{shell}");
    }
    Ok(())
}
