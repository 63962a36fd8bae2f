//! Other versions of the chart, with leases bound.

use std::fs;

use libtest_mimic::Failed;
use serde_json::json;

use crate::stage::{AGENTS, Done, NAMESPACE, Stage, eventually, path, run};

const DEFINITION: &str = "files/crds/branchleases.yaml";

/// Without a lease, and with one.
pub(crate) async fn the_tests_of_the_chart_pass(stage: &mut Stage) -> Done {
    let page = fs::read_to_string(path("docs/upgrade.md"))?;
    let mut lines = page.lines();
    let line = lines.find(|line| line.starts_with("helm test "));
    // Helm tells what the Pod said among its complaints.
    let test = format!("{} 2>&1", line.ok_or("docs/upgrade.md has no helm test")?);
    let said = stage.shell(&test).await?;
    assert!(
        said.contains("all well") && !said.contains("a branch of its own"),
        "{said}"
    );
    stage.fill("tried", &json!({"replicas": 1})).await?;
    let chart = path("charts/branchpool");
    let pool = format!("--set=tests.pool={NAMESPACE}/tried");
    stage
        .helm(&["upgrade", "branchpool", &chart, &pool], true)
        .await?;
    let said = stage.shell(&test).await?;
    assert!(
        said.contains("a branch of its own") && said.contains("all well"),
        "{said}"
    );
    stage.nothing_leased().await?;
    stage.drop_pool("tried").await?;
    stage.install().await
}

pub(crate) async fn an_upgrade_keeps_what_is_leased(stage: &mut Stage) -> Done {
    let older = older_chart().await?;
    let older = older.path().display().to_string();
    stage.helm(&["upgrade", "branchpool", &older], true).await?;
    let url = hold(stage).await?;
    let explain = ["explain", "branchlease.spec.priority"];
    eventually("the older definition is served", async || {
        stage.kubectl(&explain).await.err()
    })
    .await?;

    let chart = path("charts/branchpool");
    // A new Pod of each agent too.
    let newer = [
        "upgrade",
        "branchpool",
        &chart,
        "--set=agent.podAnnotations.version=newer",
    ];
    stage.helm(&newer, true).await?;
    rolled_out(stage).await?;
    eventually("the newer definition is served", async || {
        stage.kubectl(&explain).await.ok()
    })
    .await?;
    is_as_before(stage, &url).await?;
    let_go(stage).await
}

pub(crate) async fn a_new_installation_finds_what_is_there(stage: &mut Stage) -> Done {
    let url = hold(stage).await?;
    stage
        .helm(&["uninstall", "branchpool", "--wait"], false)
        .await?;
    stage
        .wait("delete", &["pod", "--namespace", AGENTS, "--all"])
        .await?;
    assert!(stage.pools().get_opt("upgraded").await?.is_some());
    assert!(stage.leases().get_opt("held").await?.is_some());
    stage.install().await?;
    is_as_before(stage, &url).await?;
    let_go(stage).await
}

/// A lease with something written in its branch; answers its URL.
async fn hold(stage: &Stage) -> Result<String, Failed> {
    stage.fill("upgraded", &json!({"replicas": 2})).await?;
    stage
        .bind("held", &json!({"poolRef": {"name": "upgraded"}}))
        .await?;
    stage
        .psql("held", "INSERT INTO notes VALUES ('of the version before')")
        .await?;
    stage.entry("held", "DATABASE_URL").await
}

async fn let_go(stage: &Stage) -> Done {
    stage.full("upgraded", 2).await?;
    stage.release("held").await?;
    stage.nothing_leased().await?;
    stage.drop_pool("upgraded").await
}

async fn rolled_out(stage: &Stage) -> Done {
    let daemons = "daemonset/branchpool-agent";
    stage
        .kubectl(&[
            "rollout",
            "status",
            "--namespace",
            AGENTS,
            daemons,
            "--timeout=180s",
        ])
        .await?;
    Ok(())
}

async fn is_as_before(stage: &Stage, url: &str) -> Done {
    stage.lease_ready("held", "True", "").await?;
    assert_eq!(stage.entry("held", "DATABASE_URL").await?, url);
    let read = eventually("the branch answers", async || {
        stage.psql("held", "SELECT body FROM notes").await.ok()
    })
    .await?;
    assert_eq!(read, "of the version before");
    Ok(())
}

/// As it would have been before the field `priority` came.
async fn older_chart() -> Result<tempfile::TempDir, Failed> {
    let directory = tempfile::tempdir()?;
    let mut copy = tokio::process::Command::new("cp");
    copy.arg("-rT")
        .arg(path("charts/branchpool"))
        .arg(directory.path());
    run(copy).await?;
    let file = directory.path().join(DEFINITION);
    let text = fs::read_to_string(&file)?;
    let lines: Vec<_> = text.lines().collect();
    let start = lines
        .iter()
        .position(|line| line.trim_end() == "              priority:")
        .ok_or("the definition has no field priority at its usual depth")?;
    let depth = |line: &str| line.len() - line.trim_start().len();
    let length = lines[start + 1..]
        .iter()
        .take_while(|line| depth(line) > depth(lines[start]))
        .count();
    let kept = [&lines[..start], &lines[start + 1 + length..]].concat();
    fs::write(&file, kept.join("\n"))?;
    Ok(directory)
}
