//! What is left of a cluster: nothing, however it ended. Needs root.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use branchpool_e2e_kubernetes::{Cluster, Options};

/// In a process of its own, this starts a cluster and waits to be killed.
const VICTIM: &str = "E2E_LEFTOVERS_VICTIM";
const READY: &str = "the victim's cluster is ready";

/// Everything on this machine that a cluster could leave. scripts/test keeps others' processes out of
/// sight.
#[derive(Debug, Default, PartialEq, Eq)]
struct Machine {
    interfaces: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    loop_devices: BTreeSet<String>,
    mounts: BTreeSet<String>,
    processes: BTreeSet<String>,
    namespaces: BTreeSet<String>,
}

impl Machine {
    fn now() -> Self {
        Self {
            interfaces: names("/sys/class/net", "branchpool"),
            cgroups: hierarchies()
                .iter()
                .flat_map(|root| names(root, "branchpool-e2e-"))
                .collect(),
            loop_devices: lines(
                &[
                    "losetup",
                    "--list",
                    "--noheadings",
                    "--output",
                    "NAME,BACK-FILE",
                ],
                "/clusters/",
            ),
            mounts: lines(&["cat", "/proc/self/mountinfo"], "/kubernetes/clusters/"),
            processes: programs(),
            namespaces: namespaces(),
        }
    }

    /// What has come since.
    fn new_since(before: &Self) -> Self {
        let now = Self::now();
        let new = |now: &BTreeSet<String>, before: &BTreeSet<String>| now - before;
        Self {
            interfaces: new(&now.interfaces, &before.interfaces),
            cgroups: new(&now.cgroups, &before.cgroups),
            loop_devices: new(&now.loop_devices, &before.loop_devices),
            mounts: new(&now.mounts, &before.mounts),
            processes: new(&now.processes, &before.processes),
            namespaces: new(&now.namespaces, &before.namespaces),
        }
    }

    /// The same, once the kernel has taken down what the last process has left.
    fn left_since(before: &Self) -> Self {
        for _ in 0..200 {
            let new = Self::new_since(before);
            if new == Self::default() {
                return new;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Self::new_since(before)
    }
}

fn names(directory: &str, prefix: &str) -> BTreeSet<String> {
    fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(prefix))
        .collect()
}

fn lines(command: &[&str], part: &str) -> BTreeSet<String> {
    let output = Command::new(command[0])
        .args(&command[1..])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .filter(|line| line.contains(part))
        .map(str::to_owned)
        .collect()
}

fn hierarchies() -> BTreeSet<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
    text.lines()
        .filter(|line| line.contains(" - cgroup"))
        .map(|line| line.split(' ').nth(4).unwrap().to_owned())
        .collect()
}

/// Processes that only a cluster has, by name and id.
fn programs() -> BTreeSet<String> {
    let ours = ["etcd", "kube-", "kubelet", "containerd", "coredns", "pause"];
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| {
            let directory = entry.ok()?.path();
            let name = fs::read_to_string(directory.join("comm")).ok()?;
            let is_ours = ours.iter().any(|start| name.starts_with(start));
            is_ours.then(|| format!("{} {}", directory.display(), name.trim()))
        })
        .collect()
}

/// Network namespaces that a process lives in.
fn namespaces() -> BTreeSet<String> {
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.ok()?.path().join("ns/net")).ok())
        .map(|link| link.display().to_string())
        .collect()
}

fn start_victim() -> Child {
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "victim", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(victim.stdout.take().unwrap());
    let ready = output.lines().any(|line| line.unwrap().contains(READY));
    assert!(ready, "the victim has no cluster");
    victim
}

#[tokio::test]
async fn victim() {
    if std::env::var_os(VICTIM).is_some() {
        let _cluster = Cluster::start(Options::default()).await.unwrap();
        println!("{READY}");
        std::future::pending::<()>().await;
    }
}

/// One test, so that no other starts a cluster meanwhile.
#[tokio::test]
async fn nothing_is_left_after_an_end_and_after_a_kill() {
    if std::env::var_os("E2E_KUBECONFIG").is_some() {
        println!("skipped on a cluster that was given: it is not the harness's to kill");
        return;
    }
    let before = Machine::now();
    let cluster = Cluster::start(Options::default()).await.unwrap();
    let made = Machine::new_since(&before);
    assert_eq!(made.interfaces.len(), 1, "{made:?}");
    assert_eq!(made.cgroups.len(), 1, "{made:?}");
    assert_eq!(made.loop_devices.len(), 2, "{made:?}");
    assert!(
        made.namespaces.len() >= 3 && made.processes.len() >= 10,
        "{made:?}"
    );
    drop(cluster);
    assert_eq!(Machine::left_since(&before), Machine::default());

    let mut victim = start_victim();
    victim.kill().unwrap();
    victim.wait().unwrap();
    let cluster = Cluster::start(Options::default()).await.unwrap();
    let nodes = cluster.kubectl(&["get", "nodes", "--output=name"]).await;
    assert_eq!(nodes.unwrap(), "node/node-1\nnode/node-2\n");
    let kubectl = cluster.own().unwrap().api.programs().path("kubectl");
    drop(cluster);
    assert_eq!(Machine::left_since(&before), Machine::default());

    let name = format!("detached-{}", std::process::id());
    let printed = cluster_program(&["up", "--empty", "--name", &name]);
    let kubeconfig = printed.split("KUBECONFIG=").nth(1).unwrap();
    let kubeconfig = kubeconfig.lines().next().unwrap();
    let again = cluster_program(&["up", "--empty", "--name", &name]);
    assert_eq!(printed, again, "one that runs should be named again");
    let nodes = Command::new(kubectl)
        .args(["get", "nodes", "--output=name", "--kubeconfig", kubeconfig])
        .output()
        .unwrap();
    assert_eq!(nodes.stdout, b"node/node-1\nnode/node-2\n");
    assert_eq!(
        cluster_program(&["down", "--name", &name]),
        "the cluster is gone\n"
    );
    assert_eq!(Machine::left_since(&before), Machine::default());
    assert_eq!(
        cluster_program(&["down", "--name", &name]),
        "there was no cluster\n"
    );
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
