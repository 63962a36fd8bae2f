//! An API server with the chart's rights, the operator under them, and agents that have enrolled with it.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    time::{Duration, Instant},
};

use branchpool_agent_api::{
    PoolStatus,
    client::{Client as AgentClient, Target},
};
use branchpool_crds::{BranchLease, BranchPool, BranchPoolStatus};
use branchpool_e2e_kubernetes::{Api, Programs, space};
use hyper::Request;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use snafu::{OptionExt, ResultExt, whatever};
use tokio::time::sleep;

use crate::{
    account::Account,
    agent::{self, Endpoint, POOL, existing},
    error::Result,
    machine::Machine,
    options::Options,
    process::{Daemon, in_account},
};

pub(super) const NAMESPACE: &str = "shop";
const OPERATORS: &str = "branchpool-system";
const AGENTS: &str = "branchpool-agents";
const OPERATOR_USER: &str = "system:serviceaccount:branchpool-system:branchpool-operator";
const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/branchpool");
/// For anything that is waited for.
const PATIENCE: Duration = Duration::from_mins(3);
const LOOK: Duration = Duration::from_millis(50);

/// CPU time so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spent {
    pub(super) operator: Duration,
    /// With the branches' servers.
    pub(super) agents: Duration,
    /// And etcd.
    pub(super) apiserver: Duration,
    pub(super) client: Duration,
}

#[derive(Debug)]
struct Node {
    daemon: Daemon,
    client: AgentClient,
}

/// Dropped in this order: what uses the API server before the API server.
#[derive(Debug)]
pub(super) struct Stage {
    operator: Daemon,
    nodes: Vec<Node>,
    api: Api,
    api_account: Account,
    branches: u32,
}

impl Stage {
    /// With the pool of the bench, full.
    pub(super) async fn start(machines: &[Machine], options: &Options) -> Result<Self> {
        let first = machines.first().whatever_context("no machine")?;
        eprintln!("crd: starting an API server");
        let api = Api::start().await;
        let mut api = api.whatever_context("no API server")?;
        let api_account = Account::create("apiserver")?;
        for program in [&mut api.etcd, &mut api.apiserver] {
            let pid = program.pid().await;
            let pid = pid.whatever_context("cannot find a program of Kubernetes")?;
            api_account.adopt(pid.whatever_context("a program of Kubernetes ended")?)?;
        }
        install(&api, first.directory()).await?;
        let ports = (free_port()?, free_port()?);
        let operator = start_operator(&api, first.directory(), options, ports)?;
        let mut stage = Self {
            operator,
            nodes: Vec::new(),
            api,
            api_account,
            branches: options.branches,
        };
        for (number, machine) in machines.iter().enumerate() {
            let node = stage.add_node(number, machine, options, ports).await?;
            stage.nodes.push(node);
        }
        eprintln!("crd: filling the pool");
        stage.create_pool(options).await?;
        stage.wait_calm().await?;
        Ok(stage)
    }

    async fn add_node(
        &self,
        number: usize,
        machine: &Machine,
        options: &Options,
        (agent_port, port): (u16, u16),
    ) -> Result<Node> {
        let name = format!("node-{}", number + 1);
        let ip = Ipv4Addr::new(127, 0, 0, u8::try_from(number + 2).unwrap_or(u8::MAX));
        let directory = machine.directory();
        let pod = self.announce(&name, ip, directory).await?;
        let certificate = self.operators_certificate().await?;
        let token = self.pod_token(&pod).await?;
        let (ca, secret) = (directory.join("ca.crt"), directory.join("token"));
        std::fs::write(&ca, certificate).whatever_context("cannot write a certificate")?;
        std::fs::write(&secret, token).whatever_context("cannot write a token")?;
        let run = machine.memory().join("run");
        let account = Account::create(&name)?;
        let mut command = in_account(&account, &options.agent)?;
        command
            .arg("run")
            .arg("--root")
            .arg(machine.root())
            .arg("--run-dir")
            .arg(&run)
            .args(["--name", &name])
            .args(["--listen", &SocketAddr::from((ip, agent_port)).to_string()])
            .args(["--operator", &format!("https://localhost:{port}")])
            .arg("--operator-ca")
            .arg(&ca)
            .arg("--operator-token")
            .arg(&secret)
            .args(["--health-listen", "127.0.0.1:0"])
            .args(["--gateway", &format!("{ip}:0")])
            .args(["--gateway-host", &ip.to_string()])
            // The check of each branch speaks no TLS.
            .arg("--gateway-plaintext");
        let daemon = Daemon::start("agent", command, account, directory.join("agent.log"))?;
        let client = AgentClient::new(Target::Unix(run.join("agent.sock")));
        let mut node = Node { daemon, client };
        let deadline = Instant::now() + PATIENCE;
        while node.client.ready().await.is_err() {
            if let Some(status) = node.daemon.ended()? {
                whatever!("an agent ended with {status}: {}", node.daemon.log());
            }
            if Instant::now() > deadline {
                whatever!("an agent does not answer: {}", node.daemon.log());
            }
            sleep(LOOK).await;
        }
        Ok(node)
    }

    /// A Node and its agent's Pod, as a kubelet would have it.
    async fn announce(&self, node: &str, ip: Ipv4Addr, directory: &Path) -> Result<String> {
        let name = format!("agent-{node}");
        let labels = json!({
            "app.kubernetes.io/name": "branchpool",
            "app.kubernetes.io/instance": "branchpool",
            "app.kubernetes.io/component": "agent",
        });
        let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "labels": {"kubernetes.io/hostname": node}}},
            {
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "namespace": AGENTS, "labels": labels},
                "spec": {
                    "serviceAccountName": "branchpool-agent", "nodeName": node,
                    "containers": [{"name": "agent", "image": "agent"}],
                },
            },
        ]});
        apply(&self.api, directory, &objects.to_string()).await?;
        let ip = ip.to_string();
        let status = json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}});
        let pods: kube::Api<Pod> = kube::Api::namespaced(self.api.client(), AGENTS);
        pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))
            .await
            .whatever_context("cannot write a Pod's status")?;
        Ok(name)
    }

    async fn operators_certificate(&self) -> Result<String> {
        let maps: kube::Api<ConfigMap> = kube::Api::namespaced(self.api.client(), AGENTS);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let map = maps.get_opt("branchpool-ca").await;
            let map = map.whatever_context("cannot read the operator's certificate")?;
            let found = map.and_then(|map| map.data?.remove("ca.crt"));
            if let Some(found) = found {
                return Ok(found);
            }
            if Instant::now() > deadline {
                whatever!("the operator has no certificate: {}", self.operator.log());
            }
            sleep(LOOK).await;
        }
    }

    async fn pod_token(&self, pod: &str) -> Result<String> {
        let pods: kube::Api<Pod> = kube::Api::namespaced(self.api.client(), AGENTS);
        let found = pods.get(pod).await.whatever_context("no Pod")?;
        let bound =
            json!({"kind": "Pod", "apiVersion": "v1", "name": pod, "uid": found.metadata.uid});
        let body = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": ["branchpool-operator"], "boundObjectRef": bound},
        });
        let path = format!("/api/v1/namespaces/{AGENTS}/serviceaccounts/branchpool-agent/token");
        let request = Request::post(path)
            .header("content-type", "application/json")
            .body(body.to_string().into_bytes())
            .whatever_context("no request")?;
        let answer: Value = self
            .api
            .client()
            .request(request)
            .await
            .whatever_context("no token")?;
        let token = answer["status"]["token"].as_str();
        Ok(token.whatever_context("no token")?.to_owned())
    }

    async fn create_pool(&self, options: &Options) -> Result<()> {
        let pool = json!({
            "apiVersion": "branchpool.dev/v1alpha1", "kind": "BranchPool",
            "metadata": {"name": POOL},
            "spec": agent::spec(options, Endpoint::Gateway, options.branches),
        });
        let pool = serde_json::from_value(pool).whatever_context("no pool")?;
        let created = self.pools().create(&PostParams::default(), &pool).await;
        created.whatever_context("cannot create the pool")?;
        Ok(())
    }

    pub(super) fn client(&self) -> kube::Client {
        self.api.client()
    }

    pub(super) fn leases(&self) -> kube::Api<BranchLease> {
        kube::Api::namespaced(self.client(), NAMESPACE)
    }

    pub(super) fn pools(&self) -> kube::Api<BranchPool> {
        kube::Api::namespaced(self.client(), NAMESPACE)
    }

    pub(super) fn secrets(&self) -> kube::Api<Secret> {
        kube::Api::namespaced(self.client(), NAMESPACE)
    }

    /// Changes the pool's `spec`.
    pub(super) async fn change_pool(&self, spec: &Value) -> Result<BranchPool> {
        let patch = json!({ "spec": spec });
        let params = PatchParams::default();
        let changed = self
            .pools()
            .patch(POOL, &params, &Patch::Merge(&patch))
            .await;
        changed.whatever_context("cannot change the pool")
    }

    /// Waits until the pool is full and no lease is left, at the API server as at the agents.
    pub(super) async fn wait_calm(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = self.left().await?;
            let Some(left) = left else { return Ok(()) };
            if Instant::now() > deadline {
                let log = self.operator.log();
                whatever!("the pool does not become full and calm: {left}; the operator: {log}");
            }
            sleep(LOOK).await;
        }
    }

    /// What is not yet as it is between two samples.
    async fn left(&self) -> Result<Option<String>> {
        let mut ready = 0;
        for node in &self.nodes {
            let client = &node.client;
            let pools = client.pools().await.whatever_context("no answer")?;
            for pool in pools {
                if existing(&pool) != pool.ready {
                    return Ok(Some(format!("an agent has {pool:?}")));
                }
                ready += pool.ready;
            }
            let leases = client.leases().await.whatever_context("no answer")?;
            if let Some(lease) = leases.first() {
                return Ok(Some(format!("an agent has {lease:?}")));
            }
        }
        if ready != self.branches {
            return Ok(Some(format!("{ready} branches are ready")));
        }
        let pool = self.pools().get(POOL).await;
        let status = pool.whatever_context("cannot read the pool")?.status;
        let status: BranchPoolStatus = status.unwrap_or_default();
        if (status.ready, status.leased) != (self.branches, 0) {
            return Ok(Some(format!("the pool's status is {status:?}")));
        }
        let leases = self.leases().list_metadata(&ListParams::default()).await;
        let leases = leases.whatever_context("cannot list leases")?.items.len();
        let secrets = self.lease_secrets().await?.len();
        let none = leases == 0 && secrets == 0;
        Ok((!none).then(|| format!("{leases} leases and {secrets} Secrets are there")))
    }

    /// Waits for the pools of each agent.
    async fn wait_pools(&self, else_it: &str, wanted: fn(&[PoolStatus]) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        for node in &self.nodes {
            loop {
                let pools = node.client.pools().await.whatever_context("no answer")?;
                if wanted(&pools) {
                    break;
                }
                if Instant::now() > deadline {
                    whatever!("at an agent the pool {else_it}: {pools:?}");
                }
                sleep(LOOK).await;
            }
        }
        Ok(())
    }

    /// Names of the Secrets of leases.
    pub(super) async fn lease_secrets(&self) -> Result<Vec<String>> {
        let ours = ListParams::default().labels("branchpool.dev/lease-uid");
        let found = self.secrets().list_metadata(&ours).await;
        let found = found.whatever_context("cannot list Secrets")?;
        Ok(found
            .items
            .iter()
            .map(kube::ResourceExt::name_any)
            .collect())
    }

    pub(super) fn spent(&self) -> Result<Spent> {
        let mut agents = Duration::ZERO;
        for node in &self.nodes {
            agents += node.daemon.account.cpu()?;
        }
        Ok(Spent {
            operator: self.operator.account.cpu()?,
            agents,
            apiserver: self.api_account.cpu()?,
            client: crate::account::own_cpu(),
        })
    }

    /// How often the operator did this so far: a verb and a resource, with its subresource.
    pub(super) fn operators_requests(&self, verb: &str, resource: &str) -> Result<usize> {
        let events = self.api.audit_events();
        let events = events.whatever_context("cannot read the audit log")?;
        let (resource, below) = resource.split_once('/').unwrap_or((resource, ""));
        let is_one = |event: &&Value| {
            let target = &event["objectRef"];
            event["user"]["username"] == OPERATOR_USER
                && event["verb"] == verb
                && target["resource"] == resource
                && target["subresource"].as_str().unwrap_or_default() == below
        };
        Ok(events.iter().filter(is_one).count())
    }

    /// Empties and deletes the pool, and stops all in order.
    pub(super) async fn stop(self, machines: &[Machine]) -> Result<()> {
        self.change_pool(&json!({ "replicas": 0 })).await?;
        self.wait_pools("is not emptied", |pools| {
            pools.iter().all(|pool| existing(pool) == 0)
        })
        .await?;
        let params = DeleteParams::default();
        let deleted = self.pools().delete(POOL, &params).await;
        deleted.whatever_context("cannot delete the pool")?;
        self.wait_pools("stays", <[_]>::is_empty).await?;
        self.operator.stop().await?;
        for (node, machine) in self.nodes.into_iter().zip(machines) {
            node.daemon.stop().await?;
            for kind in ["branches", "trash"] {
                crate::checks::shards_are_empty(&machine.root().join(kind))?;
            }
        }
        Ok(())
    }
}

/// All of the chart, as Helm renders it. Nobody makes Pods of its workloads here.
async fn install(api: &Api, directory: &Path) -> Result<()> {
    let programs = Programs::ready(&["helm"]).await;
    let programs = programs.whatever_context("no Helm")?;
    let mut helm = tokio::process::Command::new(programs.path("helm"));
    helm.args(["template", "branchpool", CHART, "--no-hooks"])
        .args(["--namespace", OPERATORS, "--kube-version", "1.34"]);
    let chart = space::run(helm)
        .await
        .whatever_context("cannot render the chart")?;
    let namespaces = [OPERATORS, NAMESPACE]
        .map(|name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}));
    let list = json!({"apiVersion": "v1", "kind": "List", "items": namespaces});
    apply(api, directory, &list.to_string()).await?;
    apply(api, directory, &chart).await?;
    apply(api, directory, &super::floor::definition().to_string()).await?;
    let mut wait = api.kubectl();
    wait.args([
        "wait",
        "--for=condition=Established",
        "--timeout=60s",
        "crd",
        "--all",
    ]);
    let established = space::run(wait).await;
    established.whatever_context("the definitions are not taken in")?;
    Ok(())
}

async fn apply(api: &Api, directory: &Path, manifest: &str) -> Result<()> {
    let file = directory.join("manifest.yaml");
    std::fs::write(&file, manifest).whatever_context("cannot write a manifest")?;
    let mut command = api.kubectl();
    command.args(["apply", "--server-side", "-f"]).arg(&file);
    let applied = space::run(command).await;
    applied.whatever_context("cannot apply a manifest")?;
    Ok(())
}

fn start_operator(
    api: &Api,
    directory: &Path,
    options: &Options,
    (agent_port, port): (u16, u16),
) -> Result<Daemon> {
    // As its token would have it, also for the API server's flow control.
    let kubeconfig = api.kubeconfig_of(OPERATOR_USER, Some("system:serviceaccounts"));
    let kubeconfig = kubeconfig.whatever_context("no kubeconfig")?;
    let account = Account::create("operator")?;
    let mut command = in_account(&account, &options.operator)?;
    command
        .env("KUBECONFIG", kubeconfig)
        .args(["--namespace", OPERATORS])
        .args(["--name", "operator-1"])
        .args(["--agent-namespace", AGENTS])
        .arg("--agent-selector=app.kubernetes.io/name=branchpool,app.kubernetes.io/instance=branchpool,app.kubernetes.io/component=agent")
        .args(["--agent-port", &agent_port.to_string()])
        .args(["--metrics-listen", &agent::free_address()?])
        .args(["--listen", &format!("127.0.0.1:{port}")])
        .args(["--log-format", "json"]);
    Daemon::start("operator", command, account, directory.join("operator.log"))
}

fn free_port() -> Result<u16> {
    let address: SocketAddr = agent::free_address()?
        .parse()
        .whatever_context("no address")?;
    Ok(address.port())
}
