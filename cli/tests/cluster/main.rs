//! The binary against a real API server. There is no operator: its part is played by the tests.

#![allow(clippy::unwrap_used)]

mod clerk;
#[allow(dead_code)] // Shared with tests that use more of it.
#[path = "../cli/pty.rs"]
mod pty;

use std::fs;

use branchpool_crds::{BranchLease, Priority};
use kube::{ResourceExt, api::DeleteParams};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::Child;

use clerk::{Cluster, command, condition, finish, refusal};
use pty::Terminal;

#[tokio::test(flavor = "multi_thread")]
async fn every_verb_against_a_cluster() {
    let cluster = Cluster::start().await;
    without_definitions(&cluster).await;
    cluster.install_definitions().await;
    for namespace in ["shop", "other", "queue", "run", "verbs", "psql", "rights"] {
        cluster.namespace(namespace).await;
        cluster.pool(namespace, "app").await;
    }
    lists_are_of_the_namespace_that_kubectl_would_take(&cluster).await;
    a_queue_is_shown_and_waited_in(&cluster).await;
    who_does_not_wait_gives_the_lease_back(&cluster).await;
    a_signal_gives_the_lease_back(&cluster).await;
    a_command_has_its_branch_for_as_long_as_it_runs(&cluster).await;
    a_lease_is_renewed_reset_and_released(&cluster).await;
    what_has_ended_is_told(&cluster).await;
    psql_finds_a_lease(&cluster).await;
    nodes_are_shown(&cluster).await;
    the_rights_in_the_docs_are_enough(&cluster).await;
}

async fn without_definitions(cluster: &Cluster) {
    let nowhere = std::path::Path::new("/nonexistent/kubeconfig");
    let (code, error) = refusal(finish(command(&["ls"], nowhere).spawn().unwrap()).await);
    assert_eq!(code, 1);
    assert!(error.contains("no cluster is configured"), "{error}");
    assert!(error.contains("--server unix:"), "{error}");

    let config = fs::read_to_string(cluster.server.kubeconfig()).unwrap();
    let port = config.split_once("https://127.0.0.1:").unwrap().1;
    let port: String = port.chars().take_while(char::is_ascii_digit).collect();
    let away = cluster.file("away.kubeconfig", &config.replace(&port, "1"));
    let (_, error) = refusal(finish(command(&["ls"], &away).spawn().unwrap()).await);
    assert!(error.contains("the API server does not answer"), "{error}");

    for arguments in [&["pools"][..], &["ls"], &["lease", "app"], &["status"]] {
        let (code, error) = cluster.refused(arguments).await;
        assert_eq!(code, 1);
        assert!(
            error.contains("does not know the objects of Branchpool as v1alpha1"),
            "{error}"
        );
    }
    let (code, error) = cluster.refused(&["ls", "--token-file", "/a"]).await;
    assert_eq!(
        (code, error.contains("for a standalone agent")),
        (2, true),
        "{error}"
    );
}

async fn lists_are_of_the_namespace_that_kubectl_would_take(cluster: &Cluster) {
    let table = cluster.printed(&["pools", "-n", "shop"]).await;
    let row: Vec<_> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row, ["shop", "app", "3/4", "1", "2", "100", "5", "Ready"]);
    assert_eq!(cluster.printed(&["pools"]).await, "No pools found.\n");
    assert_eq!(cluster.printed(&["pools", "-A"]).await.lines().count(), 8);
    assert!(
        cluster
            .printed(&["pools", "shop/app"])
            .await
            .contains("AllWell")
    );
    let (_, error) = cluster.refused(&["pools", "shop/nothing"]).await;
    assert!(
        error.contains("no pool nothing in namespace shop; pools there: app"),
        "{error}"
    );

    // Two files, the second with a context of its own, merged as kubectl merges them.
    let admin = fs::read_to_string(cluster.server.kubeconfig()).unwrap();
    let admin: Value = serde_saphyr::from_str(&admin).unwrap();
    let mut context = admin["contexts"][0].clone();
    context["name"] = "second".into();
    context["context"]["namespace"] = "other".into();
    let second = json!({"apiVersion": "v1", "kind": "Config", "contexts": [context]});
    let second = cluster.file("second.kubeconfig", &second.to_string());
    let both = format!(
        "{}:{}",
        cluster.server.kubeconfig().display(),
        second.display()
    );
    let listed = async |arguments: &[&str]| {
        let child = command(arguments, both.as_ref()).spawn().unwrap();
        let output = finish(child).await;
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(listed(&["pools"]).await, "No pools found.\n");
    assert!(
        listed(&["pools", "--context", "second"])
            .await
            .contains("\nother ")
    );
    assert!(
        listed(&["pools", "--context", "second", "-n", "shop"])
            .await
            .contains("\nshop ")
    );
    let (_, error) = refusal(
        finish(
            command(&["ls", "--context", "third"], both.as_ref())
                .spawn()
                .unwrap(),
        )
        .await,
    );
    assert!(error.contains("third"), "{error}");

    let list: Value =
        serde_json::from_str(&cluster.printed(&["pools", "-A", "-o", "json"]).await).unwrap();
    assert_eq!(list["items"].as_array().unwrap().len(), 7);
    assert_eq!(list["items"][0]["spec"]["postgres"]["version"], 15);
}

async fn a_queue_is_shown_and_waited_in(cluster: &Cluster) {
    let arguments = [
        "lease",
        "queue/app",
        "--id",
        "q",
        "--ttl",
        "2h",
        "--priority",
        "high",
        "--wait",
        "10m",
    ];
    let (mut terminal, child) = Terminal::run(&cluster.command(&arguments));
    let lease = cluster.until("queue", "q", |_| true).await;
    assert_eq!(lease.spec.priority, Priority::High);
    assert_eq!(lease.spec.ttl.as_ref().unwrap().as_str(), "7200s");
    assert!(lease.spec.holder.as_ref().unwrap().starts_with("tester@"));
    for (position, shown) in [
        (12, "12 leases before it"),
        (1, "1 lease before it"),
        (0, "next in the queue"),
    ] {
        cluster.queue(&lease, position).await;
        terminal.until(&format!("queue/app: {shown}"));
    }
    let table = cluster.printed(&["ls", "-n", "queue"]).await;
    assert!(table.contains("Pending (0 before it)"), "{table}");
    cluster.bind(&lease, 7200).await;
    terminal.until(
        "\r\u{1b}[Kpostgresql://app_owner.abc:s3cret@10.0.0.7:7432/app?sslmode=require\r\nq\r\n",
    );
    assert_eq!(finish(child).await.status.code(), Some(0));

    // The same again is the same lease; another pool is not.
    assert!(
        cluster
            .printed(&[
                "lease",
                "queue/app",
                "--id",
                "q",
                "--ttl",
                "2h",
                "--priority",
                "high"
            ])
            .await
            .ends_with("q\n")
    );
    cluster.pool("queue", "second").await;
    let (_, error) = cluster
        .refused(&["lease", "queue/second", "--id", "q"])
        .await;
    assert!(error.contains("poolRef cannot change"), "{error}");
    let strict = cluster.server.audit_events().unwrap().iter().any(|event| {
        let uri = event["requestURI"].as_str().unwrap_or("");
        event["verb"] == "patch"
            && uri.contains("/branchleases/q?")
            && uri.contains("fieldValidation=Strict")
    });
    assert!(strict);
}

async fn who_does_not_wait_gives_the_lease_back(cluster: &Cluster) {
    let arguments = ["lease", "run/app", "--id", "short", "--wait", "0s"];
    let child = cluster.command(&arguments).spawn().unwrap();
    let lease = cluster.until("run", "short", |_| true).await;
    cluster.queue(&lease, 4).await;
    let (code, error) = refusal(finish(child).await);
    assert_eq!(code, 3);
    assert!(
        error.contains("4 leases before it in the queue; all branches are leased"),
        "{error}"
    );
    assert!(error.contains("--wait"), "{error}");
    assert_eq!(cluster.names("run").await, [""; 0]);

    let (_, error) = cluster.refused(&["lease", "run/nothing"]).await;
    assert!(error.contains("there is no pool nothing"), "{error}");
    let (code, error) = cluster
        .refused(&["lease", "run/app", "--id", "Not.a.name"])
        .await;
    assert_eq!(
        (code, error.contains("name of an object")),
        (2, true),
        "{error}"
    );
    assert_eq!(cluster.names("run").await, [""; 0]);
}

fn send(signal: Signal, child: &Child) {
    let pid = i32::try_from(child.id().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

async fn a_signal_gives_the_lease_back(cluster: &Cluster) {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let child = cluster
            .command(&["lease", "run/app", "--id", "cut", "--wait", "10m"])
            .spawn()
            .unwrap();
        cluster.until("run", "cut", |_| true).await;
        send(signal, &child);
        assert_eq!(finish(child).await.status.code(), Some(code));
        assert_eq!(cluster.names("run").await, [""; 0]);
    }
}

fn is_renewed(lease: &BranchLease) -> bool {
    lease.spec.renew_time.is_some()
}

async fn a_command_has_its_branch_for_as_long_as_it_runs(cluster: &Cluster) {
    let script = r#"
        test "$PGHOST:$PGPORT:$PGDATABASE:$PGUSER:$PGPASSWORD" = 10.0.0.7:7432:app:app_owner.abc:s3cret || exit 90
        test "$PGSSLMODE" = verify-full && test "$(cat "$PGSSLROOTCERT")" = "PEM of a CA" || exit 91
        test "$BRANCHPOOL_LEASE" = held || exit 92
        echo "$PGSSLROOTCERT"; echo "$DATABASE_URL"
        read line; exit 7"#;
    let arguments = [
        "lease", "run/app", "--id", "held", "--ttl", "2s", "--", "sh", "-c", script,
    ];
    let mut command = cluster.command(&arguments);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let lease = cluster.until("run", "held", |_| true).await;
    cluster.bind(&lease, 2).await;
    let renewed = cluster.until("run", "held", is_renewed).await;
    let first = renewed.spec.renew_time.clone();
    cluster.renew(&renewed, 3).await;
    let again = cluster
        .until("run", "held", |lease| lease.spec.renew_time != first)
        .await;
    cluster.renew(&again, 600).await;
    drop(child.stdin.take());
    let output = finish(child).await;
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let out = String::from_utf8(output.stdout).unwrap();
    let (file, uri) = out.trim_end().split_once('\n').unwrap();
    assert!(fs::metadata(file).is_err(), "the CA's file is left behind");
    assert!(
        uri.starts_with("postgresql://app_owner.abc:s3cret@10.0.0.7:7432/app?sslmode=verify-full&"),
        "{uri}"
    );
    assert_eq!(cluster.names("run").await, [""; 0]);
}

async fn a_lease_is_renewed_reset_and_released(cluster: &Cluster) {
    let child = cluster
        .command(&["lease", "verbs/app", "--id", "kept"])
        .spawn()
        .unwrap();
    let lease = cluster.until("verbs", "kept", |_| true).await;
    cluster.bind(&lease, 60).await;
    assert!(finish(child).await.status.success());

    let child = cluster
        .command(&["renew", "kept", "-n", "verbs", "--ttl", "1h"])
        .spawn()
        .unwrap();
    let renewed = cluster.until("verbs", "kept", is_renewed).await;
    assert_eq!(renewed.spec.ttl.as_ref().unwrap().as_str(), "3600s");
    cluster.renew(&renewed, 3600).await;
    let output = finish(child).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.starts_with("lease kept renewed, expires in 59m") || text.contains("1h"),
        "{text}"
    );

    let child = cluster
        .command(&["reset", "kept", "-n", "verbs"])
        .spawn()
        .unwrap();
    let asked = cluster
        .until("verbs", "kept", |lease| lease.spec.reset_token.is_some())
        .await;
    let answer = json!({"observedResetToken": asked.spec.reset_token, "branch": "branch-2"});
    cluster.say(&asked, answer).await;
    let output = finish(child).await;
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "lease kept reset, now on branch branch-2\n"
    );

    let table = cluster.printed(&["ls", "-n", "verbs"]).await;
    let row: Vec<_> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(
        row[..4],
        ["kept", "verbs/app", "Bound", "branch-2"],
        "{table}"
    );
    for verb in [
        &["renew", "none"][..],
        &["reset", "none"],
        &["psql", "none"],
    ] {
        let arguments = [verb, &["-n", "verbs"]].concat();
        let (_, error) = cluster.refused(&arguments).await;
        assert!(
            error.contains("no lease none") || error.contains("neither a lease nor"),
            "{error}"
        );
    }
    let (code, error) = cluster
        .refused(&["release", "none", "kept", "-n", "verbs"])
        .await;
    assert_eq!(code, 1);
    assert!(
        error.contains("no lease none in namespace verbs") && error.contains("1 of 2"),
        "{error}"
    );
    assert_eq!(cluster.names("verbs").await, [""; 0]);
}

async fn what_has_ended_is_told(cluster: &Cluster) {
    let child = cluster
        .command(&["lease", "verbs/app", "--id", "lost"])
        .spawn()
        .unwrap();
    let lease = cluster.until("verbs", "lost", |_| true).await;
    let status = json!({"phase": "Failed", "conditions": [condition("False", "PoolNotFound", "there is no such pool")]});
    cluster.say(&lease, status).await;
    let (code, error) = refusal(finish(child).await);
    assert_eq!(code, 1);
    assert!(
        error.contains("lost is Failed already (there is no such pool)"),
        "{error}"
    );
    let (_, error) = cluster.refused(&["psql", "lost", "-n", "verbs"]).await;
    assert!(error.contains("is Failed already"), "{error}");

    let child = cluster
        .command(&["lease", "verbs/app", "--id", "gone", "--wait", "10m"])
        .spawn()
        .unwrap();
    let lease = cluster.until("verbs", "gone", |_| true).await;
    cluster.queue(&lease, 1).await;
    cluster
        .leases("verbs")
        .delete(&lease.name_any(), &DeleteParams::default())
        .await
        .unwrap();
    let (_, error) = refusal(finish(child).await);
    assert!(
        error.contains("was deleted while it was waited for"),
        "{error}"
    );
}

async fn psql_finds_a_lease(cluster: &Cluster) {
    let bin = cluster.file("psql", "#!/bin/sh\necho \"$PGUSER $*\"\n");
    fs::set_permissions(&bin, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", bin.parent().unwrap().display());
    let run = |arguments: &[&str]| {
        cluster
            .command(arguments)
            .env("PATH", &path)
            .spawn()
            .unwrap()
    };

    let child = run(&["psql", "psql/app", "--", "-Atc", "SELECT 1"]);
    let found = loop {
        if let [name] = &*cluster.names("psql").await {
            break cluster.until("psql", name, |_| true).await;
        }
    };
    assert!(found.name_any().starts_with("app-"));
    cluster.bind(&found, 600).await;
    let output = finish(child).await;
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "app_owner.abc -Atc SELECT 1\n"
    );
    assert_eq!(cluster.names("psql").await, [""; 0]);

    let child = run(&["lease", "psql/app", "--id", "mine"]);
    let lease = cluster.until("psql", "mine", |_| true).await;
    let (_, error) = cluster.refused(&["psql", "mine", "-n", "psql"]).await;
    assert!(error.contains("has no branch yet"), "{error}");
    cluster.bind(&lease, 600).await;
    assert!(finish(child).await.status.success());
    let output = finish(run(&["psql", "mine", "-n", "psql"])).await;
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "app_owner.abc \n"
    );
    assert_eq!(
        cluster.names("psql").await,
        ["mine"],
        "psql on a lease leaves it"
    );
}

async fn nodes_are_shown(cluster: &Cluster) {
    let (code, error) = cluster.refused(&["status"]).await;
    assert_eq!(
        (code, error.contains("no node can hold branches")),
        (1, true),
        "{error}"
    );
    cluster.node("one", "True").await;
    cluster.node("two", "False").await;
    let text = cluster.printed(&["status"]).await;
    let row: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..5], ["one", "yes", "7", "2", "40"], "{text}");
    assert!(
        text.contains("two    Ready       NotMounted   nothing is mounted"),
        "{text}"
    );
}

/// Those of docs/install.md, by a role and nothing else.
async fn the_rights_in_the_docs_are_enough(cluster: &Cluster) {
    cluster.grant("rights", "dev").await;
    let kubeconfig = cluster.server.kubeconfig_of("dev", None).unwrap();
    let run = |arguments: &[&str]| command(arguments, &kubeconfig).spawn().unwrap();
    let child = run(&["lease", "rights/app", "--id", "mine", "--", "true"]);
    let lease = cluster.until("rights", "mine", |_| true).await;
    cluster.bind(&lease, 600).await;
    let output = finish(child).await;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(cluster.names("rights").await, [""; 0]);
    let (_, error) = refusal(finish(run(&["ls", "-n", "shop"])).await);
    assert!(
        error.contains("cannot list leases") && error.contains("forbidden"),
        "{error}"
    );
}
