//! A CA is replaced while leases come and go.

use std::{
    collections::BTreeMap,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use branchpool_tls::ca::{Ca, Leaf, Usage};
use branchpool_trust::{OPERATOR_NAME, agent_name};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use rcgen::{KeyPair, SanType};
use serde_json::json;
use time::OffsetDateTime;

use crate::fixture::{
    Process, eventually,
    stage::{Stage, condition},
};

const NAME: &str = "branchpool-ca";

#[tokio::test]
async fn a_ca_is_replaced_without_a_break_and_then_counts_for_nothing() {
    let mut stage = Stage::with_trust(2).await;
    stage
        .create_pool("app", &json!({"replicas": 4, "maxBranches": 8}))
        .await;
    stage.wait_filled("app", 4).await;
    stage.create_lease("kept", &json!({})).await;
    let kept = stage.wait_bound("kept").await.status.unwrap();
    let old = Files::of(&stage, "old").await;
    for number in [1, 2] {
        old.ask_agent(&stage, number, &old).unwrap();
    }
    old.ask_operator(&stage).unwrap();

    ask_for_another(&stage).await;
    // The next leader looks at the CA before all else.
    stage.operators.pop().unwrap().stop().await;
    stage.start_operator("operator-2", None);
    let served = AtomicU32::new(0);
    let bundles = tokio::select! {
        bundles = replaced(&stage) => bundles,
        never = come_and_go(&stage, &served) => never,
    };
    let new = Files::of(&stage, "new").await;
    let steps: Vec<String> = bundles
        .iter()
        .map(|bundle| {
            bundle
                .replace(&old.bundle(), "old ")
                .replace(&new.bundle(), "new ")
        })
        .collect();
    // Trusted before it signs, and gone when nobody shows what it signed.
    assert_eq!(steps, ["old ", "old new ", "new old ", "new "]);
    assert!(served.into_inner() > 0, "nothing was leased meanwhile");
    let log = stage.operators[0].log();
    assert!(!log.contains("watch broke"), "{log}");

    // Whatever connects anew does so by the new one alone.
    for number in [1, 2] {
        new.ask_agent(&stage, number, &new).unwrap();
        let refused = new.ask_agent(&stage, number, &old).unwrap_err();
        assert!(refused.contains("alert"), "{refused}");
        let distrusted = old.ask_agent(&stage, number, &new).unwrap_err();
        assert!(
            distrusted.contains("SSL certificate problem"),
            "{distrusted}"
        );
    }
    new.ask_operator(&stage).unwrap();
    let distrusted = old.ask_operator(&stage).unwrap_err();
    assert!(
        distrusted.contains("SSL certificate problem"),
        "{distrusted}"
    );
    an_agent_by_the_old_one_is_refused(&stage, &old).await;

    stage.agents[0].stop();
    stage.agents[0].launch().await;
    let node = stage.agents[0].client.node().await.unwrap();
    assert_eq!(node.trust.unwrap().trusts.len(), 1);
    stage.wait_filled("app", 4).await;
    let still = stage.wait_bound("kept").await.status.unwrap();
    assert_eq!((still.branch, still.host), (kept.branch, kept.host));
    for lease in stage.all_leases().await {
        stage.delete_lease(&lease.name_any()).await;
    }
    stage.wait_nothing_left().await;

    // The chart grants these for this alone.
    let audit = stage.api.audit().into_iter();
    let written: Vec<_> = audit
        .filter(|entry| entry.verb == "update" && entry.name == NAME)
        .map(|entry| (entry.resource, entry.code))
        .collect();
    let steps = |resource: &str| {
        let written = written.iter();
        written
            .filter(|it| **it == (resource.to_owned(), 200))
            .count()
    };
    assert_eq!(
        (steps("secrets"), steps("configmaps")),
        (3, 3),
        "{written:?}"
    );
}

/// As docs/operator.md says.
async fn ask_for_another(stage: &Stage) {
    let asked = json!({"metadata": {"annotations": {"branchpool.dev/replace-ca": "now"}}});
    let secrets = own_secrets(stage);
    secrets
        .patch(NAME, &PatchParams::default(), &Patch::Merge(&asked))
        .await
        .unwrap();
}

fn own_secrets(stage: &Stage) -> Api<Secret> {
    Api::namespaced(stage.api.client.clone(), "branchpool-system")
}

/// Does what a kubelet does for mounted files until the CA is replaced; answers what was in them.
async fn replaced(stage: &Stage) -> Vec<String> {
    let maps: Api<ConfigMap> = Api::namespaced(stage.api.client.clone(), "branchpool-agents");
    let mut seen: Vec<String> = Vec::new();
    eventually("the CA is replaced", async || {
        let bundle = maps.get(NAME).await.unwrap().data.unwrap().remove("ca.crt");
        let bundle = bundle.unwrap();
        if seen.last() != Some(&bundle) {
            for agent in &stage.agents {
                let file = stage.bundle_file(&agent.name);
                std::fs::write(file.with_extension("new"), &bundle).unwrap();
                std::fs::rename(file.with_extension("new"), file).unwrap();
            }
            seen.push(bundle);
        }
        let [first, .., last] = seen.as_slice() else {
            return None;
        };
        let is_one = last.matches("BEGIN CERTIFICATE").count() == 1;
        (is_one && last != first).then(|| seen.clone())
    })
    .await
}

/// Leases one branch after the other, for ever.
async fn come_and_go(stage: &Stage, served: &AtomicU32) -> ! {
    loop {
        let name = format!("brief-{}", served.load(Ordering::Relaxed));
        stage.create_lease(&name, &json!({})).await;
        stage.wait_bound(&name).await;
        served.fetch_add(1, Ordering::Relaxed);
        stage.delete_lease(&name).await;
    }
}

/// What operator and agents would show by one CA, in files.
struct Files {
    dir: PathBuf,
    name: &'static str,
}

impl Files {
    /// With the CA in force.
    async fn of(stage: &Stage, name: &'static str) -> Self {
        let secret = own_secrets(stage).get(NAME).await.unwrap();
        let data: BTreeMap<_, _> = secret.data.unwrap();
        let text = |entry: &str| String::from_utf8(data[entry].0.clone()).unwrap();
        let ca = Ca::from_pem(&text("ca.key"), &text("ca.crt")).unwrap();
        let files = Self {
            dir: stage.api.dir().to_owned(),
            name,
        };
        std::fs::write(files.path("ca.crt"), text("ca.crt")).unwrap();
        files.issue(&ca, "operator", OPERATOR_NAME, Usage::Client);
        let agent = agent_name("node-9").unwrap();
        files.issue(&ca, "agent", &agent, Usage::Server);
        files
    }

    fn issue(&self, ca: &Ca, file: &str, name: &str, usage: Usage) {
        let key = KeyPair::generate().unwrap();
        let leaf = Leaf {
            common_name: name,
            names: vec![SanType::DnsName(name.try_into().unwrap())],
            usage,
            term: time::Duration::hours(1),
        };
        let certificate = ca.issue(&key, leaf, OffsetDateTime::now_utc()).unwrap();
        let text = certificate.pem() + &key.serialize_pem();
        std::fs::write(self.path(file), text).unwrap();
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.join(format!("{}-{file}", self.name))
    }

    fn bundle(&self) -> String {
        std::fs::read_to_string(self.path("ca.crt")).unwrap()
    }

    /// With this CA trusted and `shown`'s certificate of an operator.
    fn ask_agent(&self, stage: &Stage, number: usize, shown: &Self) -> Result<(), String> {
        let agent = &stage.agents[number - 1];
        let (name, address) = (agent_name(&agent.name).unwrap(), agent.address);
        let (ip, port) = (address.ip(), address.port());
        curl(|command| {
            command
                .args(["--resolve", &format!("{name}:{port}:{ip}"), "--cacert"])
                .arg(self.path("ca.crt"))
                .arg("--cert")
                .arg(shown.path("operator"))
                .arg(format!("https://{name}:{port}/v1/node"))
        })
    }

    /// Anybody may ask for what needs no token: the refusal comes by TLS.
    fn ask_operator(&self, stage: &Stage) -> Result<(), String> {
        curl(|command| {
            command
                .arg("--cacert")
                .arg(self.path("ca.crt"))
                .arg(format!("https://localhost:{}/", stage.port))
        })
    }
}

/// Whether there was any answer.
fn curl(what: impl FnOnce(&mut Command) -> &mut Command) -> Result<(), String> {
    let mut command = Command::new("curl");
    let silent = ["--silent", "--show-error", "--output", "/dev/null"];
    let output = what(command.args(silent)).output().unwrap();
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A server with the certificate that the old CA gave to an agent.
async fn an_agent_by_the_old_one_is_refused(stage: &Stage, old: &Files) {
    let ip = "127.0.0.10";
    let _server = serve(&old.path("agent"), &format!("{ip}:{}", stage.agent_port)).await;
    stage.announce("node-9", ip).await;
    let nodes: Api<branchpool_crds::BranchNode> = Api::all(stage.api.client.clone());
    let why = eventually("the node's agent is not believed", async || {
        let status = nodes.get_opt("node-9").await.unwrap()?.status?;
        let ready = condition(&status.conditions, "Ready").clone();
        (ready.status != "True" && ready.message.contains("certificate")).then_some(ready.message)
    })
    .await;
    assert!(why.contains("UnknownIssuer"), "{why}");
    let at_once = DeleteParams::default().grace_period(0);
    let pods: Api<Pod> = Api::namespaced(stage.api.client.clone(), "branchpool-agents");
    pods.delete("agent-node-9", &at_once).await.unwrap();
    stage.nodes().delete("node-9", &at_once).await.unwrap();
}

async fn serve(certificate: &Path, address: &str) -> Process {
    let server = Command::new("openssl")
        .args(["s_server", "-accept", address, "-WWW", "-cert"])
        .arg(certificate)
        .arg("-key")
        .arg(certificate)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Process(server);
    eventually("the server listens", async || {
        TcpListener::bind(address).err()
    })
    .await;
    server
}
