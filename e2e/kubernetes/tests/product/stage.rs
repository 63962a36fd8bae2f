//! What the tests have in common: the chart's release, pools, leases, and what is left of them.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use branchpool_crds::{BranchLease, BranchNode, BranchPool, LeasePhase};
use branchpool_e2e_kubernetes::{Cluster, Own};
use k8s_openapi::{
    api::{
        coordination::v1::Lease,
        core::v1::{Pod, Secret},
    },
    apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use libtest_mimic::Failed;
use serde_json::{Value, json};
use tokio::{process::Command, time::Instant};

use crate::trials;

pub(crate) type Done = Result<(), Failed>;

pub(crate) const SYSTEM: &str = "branchpool-system";
pub(crate) const AGENTS: &str = "branchpool-agents";
pub(crate) const NAMESPACE: &str = "default";
const WAIT: &str = "--timeout=180s";
/// Longer than a leader that is gone keeps others waiting, and a node that is gone is waited for.
const PATIENCE: Duration = Duration::from_secs(120);
const INTERVAL: Duration = Duration::from_millis(100);

pub(crate) struct Stage {
    pub(crate) cluster: Cluster,
    /// How many tests did.
    pub(crate) passed: usize,
}

impl trials::Stage for Stage {
    const IMAGES: &'static [&'static str] = &["operator", "agent"];

    async fn begin(cluster: Cluster) -> Result<Self, Failed> {
        let stage = Self { cluster, passed: 0 };
        if let Err(why) = stage.install().await {
            stage.tell().await;
            return Err(why);
        }
        Ok(stage)
    }

    fn cluster(&mut self) -> &mut Cluster {
        &mut self.cluster
    }

    async fn clear(&mut self) {
        // Nobody could tell anything without it.
        if let Some(own) = self.cluster.own_mut()
            && let Err(why) = own.api.run().await
        {
            println!("the API server does not run: {why}");
        }
        self.tell().await;
        if let Err(why) = self.begin_anew().await {
            println!("what the test left is still there: {why:?}");
        }
    }

    fn count(&mut self, passed: bool) {
        self.passed += usize::from(passed);
    }
}

impl Stage {
    /// What needs the harness's own hands is not done on a cluster that was given.
    pub(crate) fn hands(&mut self, what: &str) -> Option<&mut Own> {
        if self.cluster.own().is_none() {
            println!("skipped on a cluster that was given: {what}");
        }
        self.cluster.own_mut()
    }

    pub(crate) async fn install(&self) -> Done {
        let chart = path("charts/branchpool");
        let install = [
            "upgrade",
            "--install",
            "--reset-values",
            "branchpool",
            &chart,
        ];
        self.helm(&install, true).await?;
        Ok(())
    }

    /// As before the first test.
    async fn begin_anew(&mut self) -> Done {
        if let Some(own) = self.cluster.own_mut() {
            for node in &mut own.nodes {
                node.connect(true).await?;
                node.run().await?;
            }
        }
        self.kubectl(&["uncordon", "--selector=kubernetes.io/os"])
            .await?;
        self.install().await?;
        for kinds in ["jobs,branchleases", "branchpools"] {
            self.kubectl(&["delete", kinds, "--all", WAIT]).await?;
        }
        self.nothing_leased().await?;
        self.no_branches().await
    }

    /// `--wait` holds until Pods are ready.
    pub(crate) async fn helm(&self, arguments: &[&str], wait: bool) -> Result<String, Failed> {
        let mut command = self.cluster.command("helm");
        command.args(arguments).args(["--namespace", SYSTEM]);
        if wait {
            command.args(["--create-namespace", "--wait", "--timeout=180s"]);
        }
        run(command).await
    }

    pub(crate) async fn kubectl(&self, arguments: &[&str]) -> Result<String, Failed> {
        Ok(self.cluster.kubectl(arguments).await?)
    }

    pub(crate) async fn wait(&self, what: &str, objects: &[&str]) -> Result<String, Failed> {
        let what = format!("--for={what}");
        self.kubectl(&[&["wait", WAIT, &what], objects].concat())
            .await
    }

    /// In bash at the root of the checkout, as a reader would type it, with kubectl on the PATH.
    pub(crate) async fn shell(&self, script: &str) -> Result<String, Failed> {
        let kubectl = PathBuf::from(self.cluster.command("kubectl").as_std().get_program());
        let mut command = Command::new("bash");
        let system = std::env::var("PATH").unwrap();
        command
            .args(["-euo", "pipefail", "-c", script])
            .current_dir(root())
            .env("KUBECONFIG", self.cluster.kubeconfig())
            .env(
                "PATH",
                format!("{}:{system}", kubectl.parent().unwrap().display()),
            );
        run(command).await
    }

    pub(crate) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.cluster.client(), NAMESPACE)
    }

    pub(crate) fn pools(&self) -> Api<BranchPool> {
        self.api()
    }

    pub(crate) fn leases(&self) -> Api<BranchLease> {
        self.api()
    }

    pub(crate) fn secrets(&self) -> Api<Secret> {
        self.api()
    }

    pub(crate) fn agent_pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client(), AGENTS)
    }

    /// Waits until it is Ready and full.
    pub(crate) async fn fill(&self, name: &str, spec: &Value) -> Done {
        let mut whole = json!({
            "postgres": {"version": 15},
            "source": {"sql": {"scripts": [{"name": "notes", "sql": "CREATE TABLE notes (body text NOT NULL)"}]}},
            "cleanup": {"tombstones": {"delay": "1s"}},
        });
        for (field, value) in spec.as_object().unwrap() {
            whole[field] = value.clone();
        }
        let replicas = whole["replicas"].as_u64().unwrap();
        let pool = json!({"apiVersion": "branchpool.dev/v1alpha1", "kind": "BranchPool", "metadata": {"name": name}, "spec": whole});
        let pool = serde_json::from_value(pool)?;
        self.pools().create(&PostParams::default(), &pool).await?;
        self.full(name, replicas).await
    }

    pub(crate) async fn full(&self, name: &str, replicas: u64) -> Done {
        let full = format!("jsonpath={{.status.ready}}={replicas}");
        let pool = format!("branchpool/{name}");
        self.wait("condition=Ready", &[&pool]).await?;
        self.wait(&full, &[&pool]).await?;
        Ok(())
    }

    /// Together with what it left behind.
    pub(crate) async fn drop_pool(&self, name: &str) -> Done {
        self.kubectl(&["delete", "branchpool", name, WAIT]).await?;
        self.no_branches().await
    }

    async fn no_branches(&self) -> Done {
        eventually("no branch is left on any node", async || {
            let counts = self.branches().await.ok()?;
            counts.values().all(|count| *count == 0).then_some(())
        })
        .await
    }

    pub(crate) fn lease_of(name: &str, spec: &Value) -> BranchLease {
        serde_json::from_value(json!({
            "apiVersion": "branchpool.dev/v1alpha1", "kind": "BranchLease",
            "metadata": {"name": name}, "spec": spec,
        }))
        .unwrap()
    }

    pub(crate) async fn create_lease(&self, name: &str, spec: &Value) -> Done {
        let lease = Self::lease_of(name, spec);
        self.leases().create(&PostParams::default(), &lease).await?;
        Ok(())
    }

    pub(crate) async fn bind(&self, name: &str, spec: &Value) -> Result<BranchLease, Failed> {
        self.create_lease(name, spec).await?;
        self.wait("condition=Ready", &[&format!("branchlease/{name}")])
            .await?;
        Ok(self.leases().get(name).await?)
    }

    pub(crate) async fn release(&self, name: &str) -> Done {
        self.leases().delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    pub(crate) async fn release_all(&self) -> Done {
        for lease in self.all_leases().await? {
            self.release(&lease.name_any()).await?;
        }
        self.nothing_leased().await
    }

    pub(crate) async fn all_leases(&self) -> Result<Vec<BranchLease>, kube::Error> {
        Ok(self.leases().list(&ListParams::default()).await?.items)
    }

    /// An entry of a lease's Secret.
    pub(crate) async fn entry(&self, secret: &str, key: &str) -> Result<String, Failed> {
        let data = self.secrets().get(secret).await?.data.unwrap();
        Ok(String::from_utf8(data[key].0.clone())?)
    }

    /// What psql prints, through the Secret of a lease.
    pub(crate) async fn psql(&self, lease: &str, sql: &str) -> Result<String, Failed> {
        let url = self.entry(lease, "DATABASE_URL").await?;
        psql(&url, sql).await
    }

    /// Names of the agents' Pods by node.
    pub(crate) async fn agents(&self) -> Result<BTreeMap<String, String>, Failed> {
        let ours = ListParams::default().labels("app.kubernetes.io/component=agent");
        let pods = self.agent_pods().list(&ours).await?;
        let running = pods
            .items
            .into_iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none());
        Ok(running
            .filter_map(|pod| Some((pod.spec.as_ref()?.node_name.clone()?, pod.name_any())))
            .collect())
    }

    async fn ask(&self, pod: &str, what: &[&str]) -> Result<Value, Failed> {
        let command = [
            &[
                "exec",
                "--namespace",
                AGENTS,
                pod,
                "--container=agent",
                "--",
                "kubectl-branch",
            ][..],
            &["--server=unix:/run/branchpool/agent.sock"],
            what,
            &["--output=json"],
        ]
        .concat();
        Ok(serde_json::from_str(&self.kubectl(&command).await?)?)
    }

    /// Leases as the agents themselves know them.
    pub(crate) async fn held(&self) -> Result<Vec<Value>, Failed> {
        let mut all = Vec::new();
        for pod in self.agents().await?.values() {
            let answer = self.ask(pod, &["ls"]).await?;
            all.extend(answer["leases"].as_array().unwrap().clone());
        }
        Ok(all)
    }

    /// Branches on each node, as its agent says.
    pub(crate) async fn branches(&self) -> Result<BTreeMap<String, u64>, Failed> {
        let mut all = BTreeMap::new();
        for (node, pod) in self.agents().await? {
            let answer = self.ask(&pod, &["status"]).await?;
            all.insert(node, answer["branches"].as_u64().unwrap());
        }
        Ok(all)
    }

    /// Of no lease anything is left: no Secret, nothing at the agents.
    pub(crate) async fn nothing_leased(&self) -> Done {
        eventually("nothing of a lease is left", async || {
            let ours = ListParams::default().labels("branchpool.dev/lease-uid");
            let secrets = self.secrets().list(&ours).await.ok()?.items.len();
            let held = self.held().await.ok()?.len();
            (secrets + held == 0).then_some(())
        })
        .await
    }

    /// Name of the operator's Pod that leads, and its epoch.
    pub(crate) async fn leader(&self) -> Result<(String, i32), Failed> {
        let api: Api<Lease> = Api::namespaced(self.cluster.client(), SYSTEM);
        let spec = api.get("branchpool-operator").await?.spec.unwrap();
        let holder = spec.holder_identity.unwrap_or_default();
        let pod = holder.rsplit_once('_').map_or("", |(pod, _)| pod);
        Ok((pod.to_owned(), spec.lease_transitions.unwrap_or(0)))
    }

    /// A condition of a BranchNode.
    pub(crate) async fn node_ready(
        &self,
        node: &str,
        status: &str,
        reason: &str,
    ) -> Result<String, Failed> {
        let api: Api<BranchNode> = Api::all(self.cluster.client());
        eventually(&format!("{node} is Ready={status}, {reason}"), async || {
            let node = api.get(node).await.ok()?;
            let ready = condition(&node.status?.conditions, "Ready")?;
            (ready.status == status && (reason.is_empty() || ready.reason == reason))
                .then_some(ready.message)
        })
        .await
    }

    pub(crate) async fn lease_ready(&self, name: &str, status: &str, reason: &str) -> Done {
        eventually(&format!("{name} is Ready={status}, {reason}"), async || {
            let lease = self.leases().get(name).await.ok()?;
            let ready = condition(&lease.status?.conditions, "Ready")?;
            (ready.status == status && (reason.is_empty() || ready.reason == reason)).then_some(())
        })
        .await
    }

    /// For who reads of a failure.
    pub(crate) async fn tell(&self) {
        for arguments in [
            &["get", "pods", "-A", "-o", "wide"][..],
            &["get", "bp,bl,bn", "-A", "-o", "wide"],
            &["get", "nodes"],
            &["get", "events", "-A"],
            &[
                "logs",
                "-n",
                SYSTEM,
                "-l",
                "app.kubernetes.io/component=operator",
                "--tail=60",
                "--prefix",
            ],
            &[
                "logs",
                "-n",
                AGENTS,
                "-l",
                "app.kubernetes.io/component=agent",
                "--tail=30",
                "--prefix",
            ],
        ] {
            let said = self.kubectl(arguments).await;
            println!(
                "kubectl {}:\n{}",
                arguments.join(" "),
                said.unwrap_or_else(|why| format!("{why:?}"))
            );
        }
    }
}

pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .unwrap()
}

pub(crate) fn path(below: &str) -> String {
    root().join(below).display().to_string()
}

pub(crate) async fn psql(connection: &str, sql: &str) -> Result<String, Failed> {
    let mut command = Command::new("psql");
    command
        .args([
            "--no-psqlrc",
            "-qAt",
            "-v",
            "ON_ERROR_STOP=1",
            connection,
            "-c",
            sql,
        ])
        .env("PGCONNECT_TIMEOUT", "10");
    Ok(run(command).await?.trim().to_owned())
}

/// What it printed; its complaints when it failed.
pub(crate) async fn run(mut command: Command) -> Result<String, Failed> {
    let output = command
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output()
        .await?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!(
            "{:?} ended with {}: {error}",
            command.as_std(),
            output.status
        )
        .into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

pub(crate) fn condition(conditions: &[Condition], kind: &str) -> Option<Condition> {
    conditions
        .iter()
        .find(|condition| condition.type_ == kind)
        .cloned()
}

pub(crate) fn phase(lease: &BranchLease) -> LeasePhase {
    lease
        .status
        .as_ref()
        .map(|status| status.phase)
        .unwrap_or_default()
}

pub(crate) fn node_of(lease: &BranchLease) -> String {
    let status = lease.status.as_ref();
    status
        .and_then(|status| status.node.clone())
        .expect("a bound lease should name its node")
}

/// The world outside moves by itself; nobody tells of it in one place.
pub(crate) async fn eventually<T>(
    what: &str,
    look: impl AsyncFn() -> Option<T>,
) -> Result<T, Failed> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look().await {
            return Ok(seen);
        }
        if Instant::now() > deadline {
            return Err(format!("this did not come about: {what}").into());
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
