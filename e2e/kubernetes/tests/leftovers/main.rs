//! What is left of a cluster: nothing, however it ended. Needs root.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod traces;

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use branchpool_e2e_kubernetes::{Cluster, Options};

use crate::traces::Traces;

/// In a process of its own, this starts a cluster and waits to be killed.
const VICTIM: &str = "E2E_LEFTOVERS_VICTIM";
const READY: &str = "the victim's cluster is ready: ";

const NOTHING: Vec<String> = Vec::new();

#[tokio::test]
async fn victim() {
    if std::env::var_os(VICTIM).is_some() {
        let cluster = Cluster::start(Options::default()).await.unwrap();
        println!("{READY}{}", cluster.kubeconfig().display());
        std::future::pending::<()>().await;
    }
}

fn start_victim() -> (Child, PathBuf) {
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(victim.stdout.take().unwrap());
    let mut lines = output.lines().map_while(Result::ok);
    let kubeconfig = lines.find_map(|line| Some(PathBuf::from(line.split_once(READY)?.1)));
    (victim, kubeconfig.expect("the victim should get a cluster"))
}

async fn assert_has_two_nodes(cluster: &Cluster) {
    let nodes = cluster.kubectl(&["get", "nodes", "--output=name"]).await;
    assert_eq!(nodes.unwrap(), "node/node-1\nnode/node-2\n");
}

/// On a cluster that is given there is nothing to kill.
fn is_given() -> bool {
    let given = std::env::var_os("E2E_KUBECONFIG").is_some_and(|path| !path.is_empty());
    if given {
        println!("skipped on a cluster that was given: it is not the harness's to end");
    }
    given
}

#[tokio::test]
async fn nothing_is_left_after_an_end_in_order() {
    if is_given() {
        return;
    }
    let cluster = Cluster::start(Options::default()).await.unwrap();
    let traces = Traces::of(cluster.kubeconfig());
    assert_has_two_nodes(&cluster).await;
    drop(cluster);
    assert_eq!(traces.left(), NOTHING);
}

#[tokio::test]
async fn the_next_start_removes_what_a_kill_has_left() {
    if is_given() {
        return;
    }
    let (mut victim, kubeconfig) = start_victim();
    let traces = Traces::of(&kubeconfig);
    victim.kill().unwrap();
    victim.wait().unwrap();
    let cluster = Cluster::start(Options::default()).await.unwrap();
    assert_eq!(traces.left(), NOTHING);
    assert_has_two_nodes(&cluster).await;
}

#[test]
fn a_detached_cluster_stays_until_it_is_removed() {
    let name = format!("detached-{}", std::process::id());
    let printed = cluster_program(&["up", "--empty", "--name", &name]);
    let (_, rest) = printed.split_once("KUBECONFIG=").unwrap();
    let kubeconfig = Path::new(rest.lines().next().unwrap());
    // The program that started it has ended.
    let traces = Traces::of(kubeconfig);
    let again = cluster_program(&["up", "--empty", "--name", &name]);
    assert_eq!(printed, again, "one that runs should be named again");
    let removed = cluster_program(&["down", "--name", &name]);
    assert_eq!(removed, "the cluster is gone\n");
    assert_eq!(traces.left(), NOTHING);
    let again = cluster_program(&["down", "--name", &name]);
    assert_eq!(again, "there was no cluster\n");
}

fn cluster_program(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_branchpool-cluster"))
        .args(arguments)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}
