//! Pools whose source will not do: each says so, the others go on, and a mended manifest heals it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use branchpool_agent_api::PoolStatus;

use crate::{
    inmate::run_as_root,
    node::{Node, Setup, pool, pool_name},
};

const BIN: &str = "/usr/lib/postgresql/15/bin";

fn subvolume_pool(name: &str, source: &str) -> String {
    format!(
        "apiVersion: branchpool.dev/v1alpha1
kind: BranchPool
metadata: {{name: {name}}}
spec:
  replicas: 1
  maxBranches: 4
  postgres: {{version: 15}}
  source: {{subvolume: {{name: {source}}}}}
"
    )
}

fn script_pool(sql: &str) -> String {
    pool("script", 1, 4, "").replace(
        "INSERT INTO items VALUES (1",
        &format!("{sql};\n            INSERT INTO items VALUES (1"),
    )
}

fn as_postgres(script: &str) {
    let output = Command::new("runuser")
        .args(["-u", "postgres", "--", "sh", "-ec", script])
        .current_dir("/")
        .output()
        .unwrap();
    assert!(output.status.success(), "{script}: {output:?}");
}

/// A data directory with the database `app`, shut down.
fn data_directory(node: &Node) -> PathBuf {
    let home = node.directory().join("postgres");
    fs::create_dir(&home).unwrap();
    let chowned = Command::new("chown").arg("postgres").arg(&home).status();
    assert!(chowned.unwrap().success());
    let data = home.join("clean");
    as_postgres(&format!(
        "{BIN}/initdb -N -U postgres -A trust -D {0} && \
         echo 'CREATE DATABASE app; CREATE ROLE app LOGIN' | tr ';' '\\n' | {BIN}/postgres --single -D {0} postgres",
        data.display()
    ));
    data
}

/// Prepares sources from one good data directory, all but one of them spoilt.
fn prepare_sources(node: &Node) {
    let clean = data_directory(node);
    let dirty = clean.with_file_name("dirty");
    as_postgres(&format!(
        "cp -a {0} {1}; {BIN}/pg_ctl -s -w -D {1} -l {1}.log -o \"-c listen_addresses= -c unix_socket_directories={2}\" start; {BIN}/pg_ctl -s -D {1} -m immediate stop",
        clean.display(),
        dirty.display(),
        clean.with_file_name("").display()
    ));
    let sources = node.inner_root().join("sources");
    let put = |from: &Path, name: &str, spoil: &str| {
        let to = sources.join(name).display().to_string();
        let script = format!(
            "set -e; btrfs -q subvolume create {to}; cp -a {}/. {to}; cd {to}; {spoil}",
            from.display()
        );
        let said = run_as_root(node, &script);
        assert!(said.ok, "{script}: {said:?}");
    };
    put(&clean, "clean", "true");
    put(&dirty, "dirty", "true");
    put(&clean, "major", "echo 14 > PG_VERSION");
    put(&clean, "tablespace", "ln -s /tmp pg_tblspc/16384");
    put(&clean, "nodata", "rm -r *");
    let plain = sources.join("plain");
    let said = run_as_root(
        node,
        &format!("cp -a {} {}", clean.display(), plain.display()),
    );
    assert!(said.ok, "{said:?}");
}

fn source_condition(pool: &PoolStatus) -> (&str, &str) {
    let found = pool
        .conditions
        .iter()
        .find(|condition| condition.kind == "SourceReady")
        .unwrap();
    (&found.status, &found.message)
}

fn source_is(pool: &PoolStatus, status: &str, sentence: &str) -> bool {
    let (found, message) = source_condition(pool);
    found == status && message.contains(sentence)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_source_is_told_and_healed_while_other_pools_go_on() {
    let mut node = Node::start(Setup::new(pool("good", 1, 4, ""))).await;
    node.wait_full("good").await;
    node.lease("good", "holder").await.unwrap();
    prepare_sources(&node);

    let bad = [
        ("absent", "there is no"),
        ("plain", "is not a Btrfs subvolume; make one with"),
        (
            "nodata",
            "is not a Postgres data directory: it has no file PG_VERSION",
        ),
        (
            "major",
            "holds data of Postgres 14, but the pool asks for 15",
        ),
        ("tablespace", "pg_tblspc/16384 leads to /tmp"),
        ("dirty", "was not shut down cleanly"),
    ];
    let write = |name: &str, text: &str| fs::write(node.manifest_dir().join(name), text).unwrap();
    for (name, _) in bad {
        write(&format!("{name}.yaml"), &subvolume_pool(name, name));
    }
    write("script.yaml", &script_pool("SELEC 'broken'"));
    for (name, sentence) in bad {
        let status = node
            .wait_pool(name, |pool| source_is(pool, "False", sentence))
            .await;
        assert_eq!((status.ready, status.warming), (0, 0), "{name}");
        // Whoever wants a lease is told the same.
        let refused = node.lease(name, "no").await.unwrap_err();
        assert!(
            refused.is("NoBranchReady") && refused.to_string().contains(sentence),
            "{refused}"
        );
    }
    let status = node
        .wait_pool("script", |pool| source_is(pool, "False", "SELEC"))
        .await;
    let (_, message) = source_condition(&status);
    assert!(
        message.contains("script items failed") && message.contains("syntax error"),
        "{message}"
    );

    // The good one goes on all the while.
    node.lease_patiently("good", "second").await;
    node.client.release("second", None).await.unwrap();
    node.wait_full("good").await;

    write("script.yaml", &script_pool("SELECT 'mended'"));
    for (name, _) in bad {
        write(&format!("{name}.yaml"), &subvolume_pool(name, "clean"));
    }
    for name in ["script", "absent", "dirty", "tablespace"] {
        let status = node.wait_pool(name, |pool| pool.ready == 1).await;
        assert!(
            source_is(&status, "True", "is sealed"),
            "{name}: {status:?}"
        );
        node.lease(name, &format!("of-{name}")).await.unwrap();
    }

    // A bad edit of a pool that serves ends nothing, and is taken back without a trace.
    let good = script_pool("SELECT 'mended'");
    write("script.yaml", &script_pool("SELECT 1 / 0"));
    let status = node
        .wait_pool("script", |pool| source_is(pool, "True", "division by zero"))
        .await;
    assert_eq!(status.golden.generation, 2);
    node.lease_patiently("script", "meanwhile").await;
    write("script.yaml", &good);
    let status = node
        .wait_pool("script", |pool| source_is(pool, "True", "is sealed"))
        .await;
    assert_eq!(status.golden.generation, 2);
    assert!(node.stop().success());
    node.assert_nothing_left();
}

fn manifest_problem(node: &branchpool_agent_api::NodeStatus) -> Option<&str> {
    node.conditions
        .iter()
        .find(|condition| condition.kind == "Manifests")
        .map(|condition| condition.message.as_str())
}

async fn wait_manifest_problem(node: &Node, wanted: impl Fn(Option<&str>) -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    loop {
        let status = node.client.node().await.unwrap();
        if wanted(manifest_problem(&status)) {
            return;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "{:?}",
            status.conditions
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_this_node_cannot_hold_is_named_and_the_others_are_taken_in() {
    let newer = pool("newer", 1, 2, "");
    let mut setup = Setup::new(pool("good", 1, 2, ""));
    setup.manifests.push((
        "newer.yaml".into(),
        newer.replace("version: 15", "version: 16"),
    ));
    let mut node = Node::start(setup).await;
    node.wait_full("good").await;
    wait_manifest_problem(&node, |problem| {
        problem.is_some_and(|problem| {
            problem.contains("default/newer")
                && problem.contains("Postgres 16 is not installed on this node, which has 15")
        })
    })
    .await;
    let refused = node.client.pool(&pool_name("newer")).await.unwrap_err();
    assert!(refused.to_string().contains("default/newer"), "{refused}");
    let refused = node.lease("newer", "no").await.unwrap_err();
    assert!(refused.is("PoolNotFound"), "{refused}");

    let file = node.manifest_dir().join("newer.yaml");
    fs::write(&file, &newer).unwrap();
    node.wait_pool("newer", |pool| pool.ready == 1).await;
    wait_manifest_problem(&node, |problem| problem.is_none()).await;

    // What is no pool at all leaves both as they are.
    let long = format!("name: {}", "n".repeat(253));
    for (broken, part) in [
        ("[".to_owned(), "newer.yaml"),
        (
            newer.replace("replicas: 1", "replicas: -1"),
            "spec.replicas",
        ),
        (
            newer.replace("maxBranches: 2", "maxBranches: 0"),
            "maxBranches",
        ),
        (newer.replace("name: newer", &long), "metadata.name"),
    ] {
        fs::write(&file, broken).unwrap();
        wait_manifest_problem(&node, |problem| {
            problem.is_some_and(|problem| problem.contains(part))
        })
        .await;
        for name in ["good", "newer"] {
            let status = node.client.pool(&pool_name(name)).await.unwrap();
            assert_eq!((status.ready, status.desired), (1, 1), "{name}");
        }
    }
    fs::write(&file, &newer).unwrap();
    wait_manifest_problem(&node, |problem| problem.is_none()).await;
    assert!(node.stop().success());
    node.assert_nothing_left();
}
