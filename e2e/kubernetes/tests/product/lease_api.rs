//! The operator's own API, as docs/leases.md has it, through a port that kubectl forwards.

use std::process::Stdio;

use libtest_mimic::Failed;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

use crate::stage::{AGENTS, Done, NAMESPACE, SYSTEM, Stage, eventually, psql, run};

const HOST: &str = "branchpool-operator.branchpool-system.svc";

/// A workload with a service account, and a way to the operator.
struct Caller {
    token: String,
    port: u16,
    /// With the CA of the operator.
    directory: TempDir,
    forward: Child,
    /// Whose end would end kubectl: it tells of each connection.
    _said: Lines<BufReader<ChildStdout>>,
}

pub(crate) async fn the_lease_api_answers_with_a_connection(stage: &mut Stage) -> Done {
    let scripts = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "schema", "namespace": NAMESPACE},
        "data": {"notes.sql": "CREATE TABLE notes (body text NOT NULL)"}});
    stage.cluster.apply(&scripts.to_string()).await?;
    let source = json!({"sql": {"configMapRef": {"name": "schema"}}});
    stage
        .fill("asked", &json!({"replicas": 1, "source": source}))
        .await?;
    let mut caller = Caller::start(stage).await?;
    let refused = caller.ask().await?;
    assert_eq!(refused["status"], 403, "{refused}");
    stage
        .kubectl(&[
            "create",
            "rolebinding",
            "runner",
            "--serviceaccount=default:runner",
            "--clusterrole=branchpool-edit",
        ])
        .await?;
    let granted = eventually("the account may lease", async || {
        let answer = caller.ask().await.ok()?;
        answer["uri"].is_string().then_some(answer)
    })
    .await?;
    let uri = granted["uri"].as_str().unwrap();
    assert_eq!(psql(uri, "SELECT 40 + 2").await?, "42");
    let again = caller.ask().await?;
    assert_eq!(
        again["uid"], granted["uid"],
        "the name is the key of a retry"
    );
    caller.forward.kill().await?;
    stage.release("asked").await?;
    stage.nothing_leased().await?;
    for object in [
        "rolebinding/runner",
        "serviceaccount/runner",
        "configmap/schema",
    ] {
        stage.kubectl(&["delete", object]).await?;
    }
    stage.drop_pool("asked").await
}

impl Caller {
    async fn start(stage: &Stage) -> Result<Self, Failed> {
        stage
            .kubectl(&["create", "serviceaccount", "runner"])
            .await?;
        let token = stage.kubectl(&["create", "token", "runner"]).await?;
        let directory = tempfile::tempdir()?;
        let bundle = stage
            .kubectl(&[
                "get",
                "configmap",
                "branchpool-ca",
                "--namespace",
                AGENTS,
                "--output=jsonpath={.data.ca\\.crt}",
            ])
            .await?;
        std::fs::write(directory.path().join("ca.crt"), bundle)?;
        let (leader, _) = stage.leader().await?;
        let mut forward = stage.cluster.command("kubectl");
        forward
            .args([
                "port-forward",
                "--namespace",
                SYSTEM,
                &format!("pod/{leader}"),
                ":8443",
            ])
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut forward = forward.spawn()?;
        let mut lines = BufReader::new(forward.stdout.take().unwrap()).lines();
        // Forwarding from 127.0.0.1:PORT -> 8443
        let line = lines.next_line().await?.ok_or("kubectl forwards no port")?;
        let port = line.split([':', ' ']).find_map(|part| part.parse().ok());
        Ok(Self {
            token: token.trim().to_owned(),
            port: port.ok_or(line)?,
            directory,
            forward,
            _said: lines,
        })
    }

    async fn ask(&self) -> Result<Value, Failed> {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--max-time", "60", "--cacert"])
            .arg(self.directory.path().join("ca.crt"))
            .args([
                "--connect-to",
                &format!("{HOST}:443:127.0.0.1:{}", self.port),
            ])
            .args(["--header", &format!("authorization: Bearer {}", self.token)])
            .args(["--data", r#"{"name": "asked", "ttl": "10m"}"#])
            .arg(format!(
                "https://{HOST}/v1/namespaces/{NAMESPACE}/pools/asked/leases"
            ));
        Ok(serde_json::from_str(&run(curl).await?)?)
    }
}
