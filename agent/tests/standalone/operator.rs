//! A whole node that an operator commands.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use branchpool_agent_api::{Change, Condition, DesiredPool, TrustStatus, client::Watch};
use branchpool_trust::plan::Step;
use serde_json::json;
use tempfile::TempDir;

use crate::{
    loop_btrfs::LoopBtrfs,
    message::Request,
    node::{Node, Setup, ask, connect},
    trust::{Operator, Serving, in_time},
};

const TOKEN: &str = "the-token-of-this-pod";

/// What the kubelet would mount.
struct Mounted {
    directory: TempDir,
}

impl Mounted {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("token"), TOKEN).unwrap();
        Self { directory }
    }

    fn bundle(&self) -> PathBuf {
        self.directory.path().join("ca.crt")
    }
}

fn setup(root: &Path, serving: &Serving, mounted: &Mounted) -> Setup {
    let mut setup = Setup::new(String::new());
    setup.operated = Some(root.to_owned());
    let at = |name: &str| mounted.directory.path().join(name).display().to_string();
    let args = [
        ["--operator", &serving.url()],
        ["--operator-ca", &at("ca.crt")],
        ["--operator-token", &at("token")],
        ["--listen", "127.0.0.1:0"],
        ["--health-listen", "127.0.0.1:0"],
        ["--name", "node-1"],
    ];
    setup.args = args.concat().into_iter().map(str::to_owned).collect();
    setup
}

async fn health(node: &Node, path: &str) -> (u16, String) {
    let stream = tokio::net::TcpStream::connect(node.health_address())
        .await
        .unwrap();
    let reply = Request::new("GET", path).send(stream).await;
    (reply.status, reply.body)
}

/// Until the agent, which has just started, says why it is not ready.
async fn wait_not_ready(node: &Node, says: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let found = node.client.ready().await;
        match &found {
            Err(error) if error.to_string().contains(says) => return,
            _ => assert!(Instant::now() < deadline, "{found:?}\n{}", node.log()),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn certified(node: &Node) -> Condition {
    let conditions = node.client.node().await.unwrap().conditions;
    let found = conditions.into_iter().find(|one| one.kind == "Certified");
    found.expect("an agent with an operator should say whether it is certified")
}

/// The next one that is as wanted, of those that the node tells.
async fn wait_trust(watch: &mut Watch, wanted: impl Fn(&TrustStatus) -> bool) -> TrustStatus {
    loop {
        let event = in_time(watch.next()).await.unwrap().unwrap();
        let trust = match event.change {
            Change::Node(node) | Change::Snapshot { node, .. } => node.trust,
            _ => None,
        };
        if let Some(trust) = trust.filter(&wanted) {
            return trust;
        }
    }
}

fn items() -> DesiredPool {
    DesiredPool {
        namespace: "default".into(),
        name: "items".into(),
        generation: 1,
        epoch: Some(1),
        spec: json!({
            "replicas": 2,
            "maxBranches": 6,
            "postgres": {"version": 15},
            "source": {"sql": {"scripts": [
                {"name": "items", "sql": "CREATE TABLE items AS SELECT generate_series(1, 3) AS id"},
            ]}},
        }),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_enrols_serves_its_operator_and_goes_on_without_it() {
    let btrfs = LoopBtrfs::new(4 << 30);
    fs::set_permissions(btrfs.root(), fs::Permissions::from_mode(0o755)).unwrap();
    let mounted = Mounted::new();
    let mut operator = Operator::new();
    operator.register.pod(TOKEN, "node-1");
    let serving = operator.serve().await;
    let operator_at = serving.address;
    let mut node = Node::launched(setup(btrfs.root(), &serving, &mounted));

    // Before the bundle is there: alive, not ready, and the socket answers.
    wait_not_ready(&node, "no certificate yet").await;
    assert_eq!(health(&node, "/healthz").await.0, 200);
    let (status, says) = health(&node, "/readyz").await;
    assert_eq!(status, 503, "{says}");
    assert_eq!(health(&node, "/v1/node").await.0, 404);
    assert_eq!(certified(&node).await.status, "False");

    operator.write_bundle(&mounted.bundle());
    node.wait_serving().await;
    assert_eq!(certified(&node).await.status, "True");
    let address = node.tcp_address().parse().unwrap();
    let client = operator.client(address, "node-1");
    let mut watch = client.watch(None).await.unwrap();
    let ids = operator.authority().bundle().ids().to_vec();
    let trust = wait_trust(&mut watch, |_| true).await;
    assert_eq!(trust.trusts, [ids[0].to_string()]);
    assert_eq!(trust.issuer, ids[0].to_string());
    assert!(operator.client(address, "node-2").node().await.is_err());

    client.apply_pool("uid-1", &items()).await.unwrap();
    node.wait_full("items").await;
    let request = crate::node::request("items");
    let (lease, _) = client.lease("held", &request).await.unwrap();
    let session = connect(&lease).await.unwrap();
    assert_eq!(
        ask(&session, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );

    // A new CA, to its end, over the same watch.
    for step in [Step::Introduce, Step::Switch, Step::Retire] {
        operator.take(&step).await;
        operator.write_bundle(&mounted.bundle());
        let bundle = operator.authority().bundle();
        let ids: Vec<_> = bundle.ids().iter().map(ToString::to_string).collect();
        wait_trust(&mut watch, |trust| {
            trust.trusts == ids && trust.issuer == ids[0]
        })
        .await;
        client.get_lease("held").await.unwrap();
    }

    // The operator is away: leases go on, and so does whoever is connected.
    serving.stop().await;
    let (second, _) = client.lease("second", &request).await.unwrap();
    assert_ne!(second.branch, lease.branch);
    assert_eq!(
        ask(&session, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
    assert!(node.client.ready().await.is_ok());

    // A crash takes the key with it. Servers and leases stay; the operator is needed for a new one.
    node.kill_agent();
    wait_not_ready(&node, "not reached").await;
    assert_eq!(
        ask(&session, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
    let serving = operator.serve_at(operator_at).await;
    node.wait_serving().await;
    let address = node.tcp_address().parse().unwrap();
    let client = operator.client(address, "node-1");
    assert_eq!(client.get_lease("held").await.unwrap().branch, lease.branch);

    for place in [node.run_dir(), btrfs.root().join("state")] {
        let found = Command::new("grep")
            .args(["-rlE", "PRIVATE KEY|the-token-of-this-pod"])
            .args(["--devices=skip", "--"])
            .arg(&place)
            .output()
            .unwrap();
        let found = String::from_utf8_lossy(&found.stdout).into_owned();
        assert_eq!(found, "", "secrets on the disk");
    }
    assert!(!node.log().contains(TOKEN), "{}", node.log());
    drop(session);
    assert!(node.stop().success(), "{}", node.log());
    serving.stop().await;
}
